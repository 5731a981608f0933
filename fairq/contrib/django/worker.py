"""The app that `manage.py fairq work` runs: all tasks of Django whose backend is fairq's, and the tasks of
every `fairq.App` in a module `tasks` of an installed app.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator
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
    # Made on first use: the settings may not be ready, and the project's modules import this one.
    if name == "app":
        try:
            return discover()
        except ImportError as exc:
            raise ConfigurationError(
                f"the tasks of the project cannot be imported: {exc}",
                "To see where, import that module in: manage.py shell",
            ) from exc
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def discover(in_this_thread: bool = False) -> DjangoApp:
    """The tasks of the project. Imports the module `tasks` of each installed app."""
    if not apps.ready:
        django.setup()
    autodiscover_modules("tasks")
    app = DjangoApp(in_this_thread)
    for each in _apps():
        app.include(each)
    return app


def install(conn: Any) -> None:
    """Create the project's queues, and store what its tasks declare."""
    conn.ensure_connection()
    if installer.schema_version(conn.connection) is None:
        return
    for queue in discover().queues:
        configure_queue(conn, queue)
    for app in _apps():
        app.install(conn)


def _apps() -> list[App]:
    modules = [sys.modules.get(f"{config.name}.tasks") for config in apps.get_app_configs()]
    found = {id(value): value for module in modules if module for value in vars(module).values()}
    return [value for value in found.values() if type(value) is App]


class DjangoApp(App):
    """Declares tasks of Django when it first meets them, wherever in the project they are."""

    def __init__(self, in_this_thread: bool = False) -> None:
        """`in_this_thread`: run coroutines, too, in the thread whose connection has a test's transaction."""
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
        """The queues of the included apps, and QUEUES of TASKS."""
        return sorted({*super().queues, *_backend_queues()})

    def __getitem__(self, kind: str) -> Task[Any, ..., Any]:
        if kind not in self and _is_of_the_project(kind):
            self._declare(kind)
        return super().__getitem__(kind)

    def _declare(self, path: str) -> None:
        try:
            found = import_string(path)
        except Exception as exc:  # the project's code may raise anything
            raise UnknownTask(
                f"there is no task {path!r}: {type(exc).__name__}: {exc}",
                "Tasks of this kind wait for a worker that has it: deploy one, or cancel them.",
            ) from exc
        self._add(_declared(path, found, self._in_this_thread))


def _backend_queues() -> Iterator[str]:
    for parameters in getattr(settings, "TASKS", {}).values():
        try:
            backend = import_string(parameters["BACKEND"])
        except ImportError:  # `manage.py check` reports it
            continue
        if issubclass(backend, Backend):
            yield from parameters.get("QUEUES", ["default"])


def _is_of_the_project(path: str) -> bool:
    """Whether a worker may import it: enqueueing must not allow importing anything."""
    roots = {config.name.split(".")[0] for config in apps.get_app_configs()}
    roots.add(settings.SETTINGS_MODULE.split(".")[0])
    return "." in path and path.split(".")[0] in roots


def _declared(path: str, found: Any, in_this_thread: bool) -> Task[Any, ..., Any]:
    if not hasattr(found, "get_backend") or not isinstance(found.get_backend(), Backend):

        def refuse(payload: Any) -> None:
            raise SuspiciousOperation(f"{path!r} is not a task of a fairq backend")

        return Task(refuse, kind=path)
    is_async = inspect.iscoroutinefunction(found.func) and not in_this_thread
    make = _async_handler if is_async else _handler
    return Task(make(found), kind=path, queue=found.queue_name, store_result=True)


def _in_this_thread(task: Task[Any, ..., Any]) -> Task[Any, ..., Any]:
    """The same task, whose coroutine runs on its own loop while this thread waits and serves its ORM."""

    async def invoke(payload: Any, ctx: Context) -> Any:
        return await task.invoke(payload, ctx)

    twin = copy.copy(task)
    twin.is_async = False
    twin.invoke = async_to_sync(invoke)  # type: ignore[method-assign]
    return twin


@contextlib.contextmanager
def _attempt(task: Any, ctx: Context, payload: Any) -> Iterator[tuple[Backend, Any]]:
    """An attempt of a task of Django, inside its group. Only the last attempt finishes the task."""
    alias = ctx.headers.get(HEADER, {}).get("backend", task.backend)
    if alias != task.backend:
        task = task.using(backend=alias)
    backend = task.get_backend()
    result = backend.running(task, ctx, payload)
    with backend.inside(ctx.group_key):
        backend.space.signals.task_started.send(type(backend), task_result=result)
        try:
            yield backend, result
        except BaseException as exc:
            final = ctx.is_last_attempt
            if ctx.cancelled.reason != "shutdown":
                final = final or outcome_of(exc, None, ctx.attempt).outcome != "retry"
            if final:
                backend.failed(result, exc)
            raise


def _handler(task: Any) -> Any:
    def handler(payload: Any, ctx: Context) -> Any:
        with _attempt(task, ctx, payload) as (backend, result):
            value = task.call(*backend.arguments(result), **result.kwargs)
            return backend.succeeded(result, value)

    return handler


def _async_handler(task: Any) -> Any:
    async def handler(payload: Any, ctx: Context) -> Any:
        # Signals' receivers and look-ups of results use the database, so they run in the ORM's thread.
        attempt = _attempt(task, ctx, payload)
        backend, result = await sync_to_async(attempt.__enter__)()
        try:
            value = await task.func(*backend.arguments(result), **result.kwargs)
            stored = await sync_to_async(backend.succeeded)(result, value)
        except BaseException as exc:
            await sync_to_async(attempt.__exit__)(type(exc), exc, exc.__traceback__)
            raise
        await sync_to_async(attempt.__exit__)(None, None, None)
        return stored

    return handler
