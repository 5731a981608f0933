"""The app that `manage.py fairq work` runs: every task of Django whose backend is fairq's, and the tasks of
every `fairq.App` that a module `tasks` of an installed app has.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import django
from asgiref.sync import async_to_sync, sync_to_async
from django.apps import apps
from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.utils.module_loading import autodiscover_modules, import_string

from fairq import install as installer
from fairq.app import App
from fairq.context import Context
from fairq.contrib.django import fresh
from fairq.contrib.django.base import DEFINED, HEADER, Backend
from fairq.errors import ConfigurationError, UnknownTask
from fairq.outcome import outcome_of
from fairq.policies import configure_queue
from fairq.task import Task

__all__ = ["DjangoApp", "discover", "install"]


def __getattr__(name: str) -> Any:
    # Not at the import: the settings may not be there yet, and the project's modules import us.
    if name == "app":
        try:
            return discover()
        except ImportError as exc:
            raise ConfigurationError(
                f"the tasks of the project cannot be imported: {exc}",
                "See where with: manage.py shell, and an import of that module.",
            ) from exc
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def discover(in_this_thread: bool = False) -> DjangoApp:
    """The tasks of the project, after an import of the module `tasks` of each installed app."""
    if not apps.ready:
        django.setup()
    autodiscover_modules("tasks")
    app = DjangoApp(in_this_thread)
    for each in _apps():
        app.include(each)
    return app


def install(conn: Any) -> None:
    """Create the queues that the project names, and tell the database what its tasks declare."""
    conn.ensure_connection()
    if installer.schema_version(conn.connection) is None:
        return
    for app in (discover(), *_apps()):
        for queue in app.queues:
            configure_queue(conn, queue)
        if type(app) is App:
            app.install(conn)


def _apps() -> list[App]:
    modules = [sys.modules.get(f"{config.name}.tasks") for config in apps.get_app_configs()]
    found = {id(value): value for module in modules if module for value in vars(module).values()}
    return [value for value in found.values() if type(value) is App]


class DjangoApp(App):
    """Tasks of Django are declared here when they are first met, wherever in the project they are."""

    def __init__(self, in_this_thread: bool = False) -> None:
        """In tests coroutines, too, run in the thread whose connection has the test's transaction."""
        super().__init__(middleware=[fresh.middleware])
        self._in_this_thread = in_this_thread
        for path in DEFINED:
            with contextlib.suppress(UnknownTask):
                self._declare(path)

    def include(self, other: App) -> None:
        super().include(other)
        for each in other if self._in_this_thread else ():
            if each.is_async and each.session is None:
                self._tasks[each.kind] = _in_this_thread(each)

    @property
    def queues(self) -> list[str]:
        """Those of the apps in it, and QUEUES of TASKS."""
        return sorted({*super().queues, *_backend_queues()})

    def __getitem__(self, kind: str) -> Task[Any, ..., Any]:
        if kind not in self and _is_of_the_project(kind):
            self._declare(kind)
        return super().__getitem__(kind)

    def _declare(self, path: str) -> None:
        try:
            found = import_string(path)
        except Exception as exc:  # it is the project's code: any error is possible
            raise UnknownTask(
                f"there is no task {path!r}: {type(exc).__name__}: {exc}",
                "Its tasks wait for a worker that has it: deploy one, or cancel them.",
            ) from exc
        self._add(_declared(path, found, self._in_this_thread))


def _backend_queues() -> Iterator[str]:
    for parameters in getattr(settings, "TASKS", {}).values():
        try:
            backend = import_string(parameters["BACKEND"])
        except ImportError:  # `manage.py check` says so
            continue
        if issubclass(backend, Backend):
            yield from parameters.get("QUEUES", ["default"])


def _is_of_the_project(path: str) -> bool:
    """Whoever may enqueue must not choose freely what a worker imports."""
    roots = {config.name.split(".")[0] for config in apps.get_app_configs()}
    roots.add(settings.SETTINGS_MODULE.split(".")[0])
    return "." in path and path.split(".")[0] in roots


def _declared(path: str, found: Any, in_this_thread: bool) -> Task[Any, ..., Any]:
    if not hasattr(found, "get_backend") or not isinstance(found.get_backend(), Backend):

        def refuse(payload: Any) -> None:
            raise SuspiciousOperation(f"{path!r} does not lead to a task of a fairq backend")

        return Task(refuse, kind=path)
    is_async = inspect.iscoroutinefunction(found.func) and not in_this_thread
    make = _async_handler if is_async else _handler
    return Task(make(path, found), kind=path, queue=found.queue_name, store_result=True)


def _in_this_thread(task: Task[Any, ..., Any]) -> Task[Any, ..., Any]:
    """The same task, whose coroutine runs on a loop of its own while the thread waits and serves its ORM."""

    async def invoke(payload: Any, ctx: Context) -> Any:
        return await task.invoke(payload, ctx)

    twin = copy.copy(task)
    twin.is_async = False
    twin.invoke = async_to_sync(invoke)  # type: ignore[method-assign]
    return twin


class _Run:
    """One attempt of a task of Django."""

    def __init__(self, path: str, task: Any, ctx: Context, payload: Any) -> None:
        alias = ctx.headers.get(HEADER, {}).get("backend", task.backend)
        if alias != task.backend:
            task = task.using(backend=alias)
        self.ctx = ctx
        self.backend = task.get_backend()
        self.result = self.backend.running(task, ctx, payload)
        self.signals = self.backend.space.signals
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.backend.inside(ctx.group_key))
            self.signals.task_started.send(type(self.backend), task_result=self.result)
            self._stack = stack.pop_all()
        self.args: list[Any] = self.backend.arguments(self.result)
        self.kwargs: Mapping[str, Any] = self.result.kwargs

    def leave(self) -> None:
        """The tenant, whatever became of the task."""
        self._stack.close()

    def returned(self, value: Any) -> Any:
        stored = self.backend.succeeded(self.result, value)
        self._finished()
        return stored

    def raised(self, exc: BaseException) -> None:
        """Only the last attempt finishes the task."""
        final = self.ctx.is_last_attempt
        if self.ctx.cancelled.reason != "shutdown":
            final = final or outcome_of(exc, None, self.ctx.attempt).outcome != "retry"
        if final:
            self.backend.failed(self.result, exc)
            self._finished()

    def _finished(self) -> None:
        # A receiver that fails does not make a task fail that is done: Django logs it.
        self.signals.task_finished.send_robust(type(self.backend), task_result=self.result)


def _handler(path: str, task: Any) -> Any:
    def handler(payload: Any, ctx: Context) -> Any:
        run = _Run(path, task, ctx, payload)
        try:
            return run.returned(task.call(*run.args, **run.kwargs))
        except BaseException as exc:
            run.raised(exc)
            raise
        finally:
            run.leave()

    return handler


def _async_handler(path: str, task: Any) -> Any:
    # Receivers of signals, and results that are looked up, touch the database: in the ORM's thread.
    @sync_to_async
    def ended(run: _Run, value: Any, exc: BaseException | None) -> Any:
        try:
            return run.raised(exc) if exc is not None else run.returned(value)
        except Exception as error:  # what it returned is no JSON
            run.raised(error)
            raise
        finally:
            run.leave()

    async def handler(payload: Any, ctx: Context) -> Any:
        run = await sync_to_async(_Run)(path, task, ctx, payload)
        try:
            value = await task.func(*run.args, **run.kwargs)
        except BaseException as exc:
            await ended(run, None, exc)
            raise
        return await ended(run, value, None)

    return handler
