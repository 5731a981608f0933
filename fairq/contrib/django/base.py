"""The backend of Django's tasks: what `backend` and `backport` share.

A task of Django is a task of fairq. Its kind is the path of the function, its payload has the arguments, and
its headers have what fairq has no column for. So statistics, limits and settings by kind are those of the
function, and SQL can create one, too: `fairq.create_task('bob', '{"args": [1]}', p_kind =>
'shop.tasks.charge')`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from traceback import format_exception
from types import ModuleType
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import SuspiciousOperation
from django.db import transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from fairq.client import enqueue
from fairq.codec import simplify
from fairq.connections import run
from fairq.context import Context
from fairq.contrib.django import database
from fairq.contrib.django.exceptions import class_path
from fairq.errors import ConfigurationError, FairqError, NotEncodable
from fairq.options import TaskOptions, options_of, sent
from fairq.policies import configure_queue
from fairq.queries import client as queries

__all__ = ["DEFINED", "HEADER", "OPTIONS", "Backend", "Space", "task_class"]

# The key of Django's object in a task's headers.
HEADER = "django"
# The paths of all functions declared as tasks of fairq's backends.
DEFINED: dict[str, type[Backend]] = {}
# The options of fairq for which Django has no name of its own.
_DJANGOS = ("queue", "priority", "run_at", "delay", "headers")
OPTIONS = ("group", *(name for name in options_of(TaskOptions) if name not in _DJANGOS))
# Options whose value may be a function of the task, its args and its kwargs.
ASKED = ("group", "user")


@dataclass(frozen=True, slots=True)
class Space:
    """One of the two name spaces: `django.tasks` or `django_tasks`."""

    base: ModuleType
    exceptions: ModuleType
    signals: ModuleType
    invalid_task: type[Exception]
    normalize: Callable[[Any], Any]


def task_class(base: Any, module: str) -> Any:
    """Django's Task with the options of fairq: `send.using(group="bob", cost=3).enqueue()`, and
    `@task(group="bob")` if the decorator passes on unknown options.
    """

    def using(self: Any, **changes: Any) -> Any:
        said = {name: value for name, value in changes.items() if value is not None}
        if isinstance(said.get("run_after"), timedelta):
            said["run_after"] += timezone.now()
        return dataclasses.replace(self, **said)

    # Not compared, because a result from the database does not tell how its group was chosen.
    fields = [(name, Any, dataclasses.field(default=None, compare=False)) for name in OPTIONS]
    made = dataclasses.make_dataclass(
        "FairqTask", fields, bases=(base,), namespace={"using": using}, frozen=True, slots=True, kw_only=True
    )
    made.__module__ = module  # where pickle looks for it
    return made


class Backend:
    """OPTIONS are the options of `fairq.enqueue` in capitals, as defaults for tasks. GROUP is the task's
    group. A task has one attempt, unless MAX_ATTEMPTS or the task says otherwise.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    space: Space
    alias: str
    options: Mapping[str, Any]
    queues: set[str]

    # --- Enqueueing ---

    def validate_task(self, task: Any) -> None:
        super().validate_task(task)  # type: ignore[misc]
        given = {name: getattr(task, name, None) for name in OPTIONS if name not in ASKED}
        try:
            sent({**given, "kind": task.module_path, "queue": task.queue_name})
        except FairqError as exc:
            raise self.space.invalid_task(str(exc)) from exc
        DEFINED[task.module_path] = type(self)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue in the transaction of the connection to fairq's database."""
        self.validate_task(task)
        payload = self._round_trip({"args": args, "kwargs": kwargs})
        now = timezone.now()
        run_at = None if task.run_after is None else _aware(task.run_after)
        about: dict[str, Any] = {"backend": self.alias, "enqueued_at": _aware(now).isoformat()}
        if task.priority:
            about["priority"] = task.priority
        if run_at is not None:
            about["run_after"] = run_at.isoformat()
        options = self._options(task, payload["args"], payload["kwargs"])
        conn = database.connection()
        if not self.queues:
            _ensure_queue(conn, task.queue_name)
        id = enqueue(
            conn,
            options.pop("group"),
            payload,
            kind=task.module_path,
            queue=task.queue_name,
            priority=task.priority,
            run_at=run_at,
            headers={HEADER: about},
            **options,
        )
        result = self._result(task, id, payload, enqueued_at=now)
        self.space.signals.task_enqueued.send(type(self), task_result=result)
        return result

    def _round_trip(self, value: Any, root: str = "payload") -> Any:
        """The value as JSON returns it: tuples become lists, keys become texts. Raises TypeError if JSON, or
        PostgreSQL, has no such value.
        """
        try:
            return simplify(json.loads(json.dumps(self.space.normalize(value))), root)
        except NotEncodable as exc:  # NaN, or the character U+0000
            raise TypeError(str(exc)) from exc

    def _options(self, task: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The task's own options, else those of OPTIONS."""
        found: dict[str, Any] = {"group": "default", "max_attempts": 1, **self.defaults()}
        found |= {name: value for name in OPTIONS if (value := getattr(task, name, None)) is not None}
        for name in ASKED:
            if callable(found.get(name)):
                found[name] = found[name](task, args, kwargs)
        return found

    def defaults(self) -> dict[str, Any]:
        """OPTIONS by fairq's names, with functions imported from their paths."""
        found = {}
        for name, value in self.options.items():
            option = name.lower()
            if option not in OPTIONS or name != name.upper():
                raise ConfigurationError(
                    f"the task backend {self.alias!r} has no option {name!r}",
                    f"Options: {', '.join(each.upper() for each in OPTIONS)}.",
                )
            found[option] = import_string(value) if option in ASKED and isinstance(value, str) else value
        return found

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        if not apps.is_installed("fairq.contrib.django"):
            yield checks.Error(
                f"the task backend {self.alias!r} is fairq's, but fairq's app is not installed",
                hint='Add "fairq.contrib.django" to INSTALLED_APPS.',
                id="fairq.E001",
            )
        try:
            defaults = self.defaults()
            sent({name: value for name, value in defaults.items() if name not in ASKED})
        except (ImportError, FairqError) as exc:
            hint = getattr(exc, "hint", None)
            yield checks.Error(f"the task backend {self.alias!r}: {exc}", hint=hint, id="fairq.E002")
            return
        for name in {*ASKED} & {*defaults}:
            if not callable(defaults[name]):
                yield checks.Error(
                    f"{name.upper()} of the task backend {self.alias!r} is not a function",
                    hint="Name a function that takes the task, its args and its kwargs.",
                    id="fairq.E003",
                )

    # --- Results ---

    def get_result(self, result_id: str) -> Any:
        does_not_exist = self.space.exceptions.TaskResultDoesNotExist
        if not (isinstance(result_id, str) and result_id.isascii() and result_id.isdigit()):
            raise does_not_exist(result_id)
        id = int(result_id)
        rows = run(database.connection(), queries.task_history.call(id=id)) if id < 2**63 else []
        for row in rows:
            if row.kind is not None:
                return self._found(id, row, [each for each in rows if each.has_begun])
        raise does_not_exist(result_id)

    def _found(self, id: int, found: queries.TaskHistoryRow, attempts: list[queries.TaskHistoryRow]) -> Any:
        about = (_read(found.headers) or {}).get(HEADER, {})
        task = _as_enqueued(self.task_of(str(found.kind)), str(found.queue), about)
        enqueued_at = about.get("enqueued_at")
        statuses = self.space.base.TaskResultStatus
        if found.outcome is not None:
            status = statuses.SUCCESSFUL if found.outcome == "succeeded" else statuses.FAILED
        elif attempts and attempts[-1].outcome is None:
            status = statuses.RUNNING
        else:
            status = statuses.READY
        failed = [_read(each.error) or {} for each in attempts if each.outcome in ("retry", "worker_lost")]
        if status == statuses.FAILED:
            failed.append(_read(found.error) or {"code": found.outcome})
        result = self._result(
            task,
            id,
            _read(found.payload),
            enqueued_at=_shown(datetime.fromisoformat(enqueued_at) if enqueued_at else found.created_at),
            status=status,
            started_at=_shown(attempts[0].started_at) if attempts else None,
            last_attempted_at=_shown(attempts[-1].started_at) if attempts else None,
            finished_at=_shown(found.finished_at),
            errors=[self.space.base.TaskError(**_error(each)) for each in failed],
            worker_ids=[str(each.worker_id) for each in attempts],
        )
        _set(result, _return_value=_read(found.result))
        return result

    def task_of(self, path: str) -> Any:
        task = import_string(path) if "." in path else None
        if not isinstance(task, self.space.base.Task):
            raise SuspiciousOperation(f"{path!r} is not a task of {self.space.base.__package__}")
        return task

    def _result(self, task: Any, id: int, payload: Any, **known: Any) -> Any:
        payload = payload if isinstance(payload, dict) else {}
        said = {"task": task, "id": str(id), "backend": task.backend}
        said |= {"args": payload.get("args", []), "kwargs": payload.get("kwargs", {})}
        said |= {"status": self.space.base.TaskResultStatus.READY, "errors": [], "worker_ids": []}
        said |= dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
        return self.space.base.TaskResult(**said | known)

    # --- Running it, see fairq.contrib.django.worker ---

    def running(self, task: Any, ctx: Context, payload: Any) -> Any:
        """The result of a task whose attempt begins. Only later attempts read it from the database."""
        about = ctx.headers.get(HEADER, {})
        if ctx.attempt > 1 or "enqueued_at" not in about:
            return self.get_result(str(ctx.id))
        now = timezone.now()
        return self._result(
            _as_enqueued(task, ctx.queue, about),
            ctx.id,
            payload,
            status=self.space.base.TaskResultStatus.RUNNING,
            enqueued_at=_shown(datetime.fromisoformat(about["enqueued_at"])),
            started_at=now,
            last_attempted_at=now,
            worker_ids=[str(ctx.worker_id)],
        )

    def inside(self, group_key: str) -> contextlib.AbstractContextManager[Any]:
        """The context manager of GROUP for that tenant."""
        enter = getattr(self.defaults().get("group"), "inside", contextlib.nullcontext)
        return enter(group_key)

    def arguments(self, result: Any) -> list[Any]:
        """The function's positional arguments."""
        if not result.task.takes_context:
            return list(result.args)
        return [self.space.base.TaskContext(task_result=result), *result.args]

    def succeeded(self, result: Any, value: Any) -> Any:
        """The result to store. Raises TypeError if it cannot be stored."""
        value = self._round_trip(value, "result")
        self._finish(result, self.space.base.TaskResultStatus.SUCCESSFUL, _return_value=value)
        return value

    def failed(self, result: Any, exc: BaseException) -> None:
        error = self.space.base.TaskError(
            exception_class_path=f"{type(exc).__module__}.{type(exc).__qualname__}",
            traceback="".join(format_exception(exc)),
        )
        self._finish(result, self.space.base.TaskResultStatus.FAILED, errors=[*result.errors, error])

    def _finish(self, result: Any, status: Any, **known: Any) -> None:
        _set(result, status=status, finished_at=timezone.now(), **known)
        # A failing receiver must not fail a task that is done; Django logs it.
        self.space.signals.task_finished.send_robust(type(self), task_result=result)


_KNOWN_QUEUES: set[str] = set()


def _ensure_queue(conn: Any, name: str) -> None:
    """Without QUEUES any name is allowed, and a queue's first task creates it."""
    if name in _KNOWN_QUEUES:
        return
    with conn.cursor() as cursor:
        cursor.execute("select exists (select from fairq.queues q where q.queue = %s)", [name])
        if not cursor.fetchone()[0]:
            configure_queue(conn, name)
    transaction.on_commit(lambda: _KNOWN_QUEUES.add(name), using=conn.alias)


def _as_enqueued(task: Any, queue: str, about: Mapping[str, Any]) -> Any:
    """The task as it was enqueued, from its headers."""
    run_after = about.get("run_after")
    said = {
        "priority": about.get("priority", 0),
        "queue_name": queue,
        "backend": about.get("backend", task.backend),
        "run_after": None if run_after is None else _shown(datetime.fromisoformat(run_after)),
    }
    same = all(getattr(task, name) == value for name, value in said.items())
    return task if same else dataclasses.replace(task, **said)


def _read(text: str | None) -> Any:
    return json.loads(text or "null")


def _error(stored: Mapping[str, Any]) -> dict[str, str]:
    """A stored error in Django's form."""
    last = f"{stored.get('type') or stored.get('code')}: {stored.get('message')}"
    traceback = stored.get("traceback") or last
    return {
        "exception_class_path": class_path(stored),
        "traceback": f"Traceback (most recent call last):\n{traceback}\n",
    }


def _set(result: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _aware(at: datetime) -> datetime:
    return timezone.make_aware(at) if timezone.is_naive(at) else at


def _shown(at: datetime | None) -> datetime | None:
    """A time, aware or naive as the project's USE_TZ says."""
    if at is None or timezone.is_aware(at) == settings.USE_TZ:
        return at
    return _aware(at) if settings.USE_TZ else timezone.make_naive(at)
