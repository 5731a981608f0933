"""An application's tasks.

app = fairq.App()

@app.task(queue="docs", max_attempts=5, timeout=60, retry=fairq.Backoff(base=2, cap=600))
def parse(payload: Parse, ctx: fairq.Context) -> dict[str, int]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from fairq.around import Lifespan, Middleware, around, check_lifespan, check_middleware
from fairq.connections import AsyncConnection, Steps, SyncConnection, run
from fairq.errors import ConfigurationError, UnknownTask
from fairq.options import GroupKey, Seconds, refuse_unknown
from fairq.policies import KindSettings, QueueSettings, kind_call, queue_call
from fairq.schedules import Schedule, declared_steps
from fairq.task import Declaration, Task

__all__ = ["App"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class _Declares(Protocol):
    """The decorator that `@app.task(…)` returns."""

    @overload
    def __call__(self, handler: Callable[Concatenate[T, P], R], /) -> Task[T, Concatenate[T, P], R]: ...
    @overload
    def __call__(self, handler: Callable[[], R], /) -> Task[None, [], R]: ...
    @overload
    def __call__(  # type: ignore[overload-cannot-match]  # it is: P has keywords
        self, handler: Callable[P, R], /
    ) -> Task[Mapping[str, Any], P, R]: ...


class _DeclaresBatch(Protocol):
    """The decorator that `@app.task(batch=…)` returns."""

    def __call__(
        self, handler: Callable[Concatenate[list[T], P], Any], /
    ) -> Task[T, Concatenate[list[T], P], Any]: ...


class App:
    """An application's tasks, by kind. `fairq work module:app` runs them."""

    def __init__(
        self,
        *,
        name: str | None = None,
        middleware: Iterable[Middleware] = (),
        lifespan: Lifespan | None = None,
        **defaults: Unpack[Declaration],
    ) -> None:
        """`middleware` is called around each handler, the first outermost: async middleware around async
        handlers, sync middleware around sync ones; a tuple holds one of each. `lifespan` opens `ctx.state`
        when a worker process starts, and closes it at the end. `name` owns the app's schedules and kinds: an
        app with another name, or with none, cannot change them.

        The other options are defaults for the app's tasks.
        """
        refuse_unknown("App", defaults, Declaration)
        self.name = name
        self.middleware = check_middleware(middleware)
        self.lifespan = check_lifespan(lifespan)
        self.defaults = defaults
        self._tasks: dict[str, Task[Any, ..., Any]] = {}
        self._queues: dict[str, QueueSettings[Seconds]] = {}
        self._schedules: dict[tuple[str, GroupKey], tuple[Task[Any, ..., Any], Schedule]] = {}

    def queue(self, name: str, **settings: Unpack[QueueSettings[Seconds]]) -> str:
        """Declare a queue with its settings, and return its name. `install` creates it."""
        refuse_unknown("queue", settings, QueueSettings)
        queue_call(name, settings)
        if name in self._queues:
            raise _declared_twice(name)
        self._queues[name] = settings
        return name

    @overload
    def task(self, handler: Callable[Concatenate[T, P], R], /) -> Task[T, Concatenate[T, P], R]: ...
    @overload
    def task(self, handler: Callable[[], R], /) -> Task[None, [], R]: ...
    @overload
    def task(  # type: ignore[overload-cannot-match]  # it is: P has keywords
        self, handler: Callable[P, R], /
    ) -> Task[Mapping[str, Any], P, R]: ...
    @overload
    def task(
        self,
        handler: None = None,
        /,
        *,
        batch: int,
        kind: str | None = ...,
        schedule: str | timedelta | Schedule | None = ...,
        **declared: Unpack[Declaration],
    ) -> _DeclaresBatch: ...
    @overload
    def task(
        self,
        handler: None = None,
        /,
        *,
        kind: str | None = ...,
        schedule: str | timedelta | Schedule | None = ...,
        **declared: Unpack[Declaration],
    ) -> _Declares: ...
    def task(
        self,
        handler: Any = None,
        /,
        *,
        kind: str | None = None,
        schedule: str | timedelta | Schedule | None = None,
        batch: int | None = None,
        **declared: Unpack[Declaration],
    ) -> Any:
        """Declare a handler. It takes one payload, decoded to its annotation; or keyword arguments, which are
        the fields of the payload; or nothing. A parameter `ctx` receives the context.

        `kind` is the name stored with each task, by default the function's name: keep it when you rename the
        function. `schedule` makes the task recur: "0 3 * * *", "every 10s", or a `fairq.Schedule`.
        With `batch=n`, the handler takes a list of at most n payloads, and a `fairq.Batch` as `ctx`.
        """
        refuse_unknown("task", declared, Declaration)
        said: Any = {name: value for name, value in declared.items() if value is not None}

        def declare(handler: Callable[..., Any]) -> Task[Any, ..., Any]:
            name = getattr(handler, "__name__", "") if kind is None else kind
            task: Task[Any, ..., Any] = Task(handler, kind=name, batch=batch, **{**self.defaults, **said})
            self._add(task)
            if schedule is not None:
                self.schedule(task.kind, task, schedule)
            return task

        if handler is None:
            return declare
        if not callable(handler):
            raise ConfigurationError(
                f"app.task({handler!r:.60}) declares no function",
                "Name a kind like this: @app.task(kind='parse')",
            )
        return declare(handler)

    def schedule(self, name: str, task: Task[Any, ..., Any], schedule: str | timedelta | Schedule) -> None:
        """Declare that a task recurs. `install` stores the schedule in the database. A schedule that is no
        longer declared goes on until you remove it, because another deployment may still declare it.
        """
        if not isinstance(schedule, Schedule):
            schedule = Schedule(schedule)
        schedule.check()
        task.encode_payload(schedule.payload)
        if self._schedules.setdefault((name, schedule.group_key), (task, schedule)) != (task, schedule):
            raise ConfigurationError(
                f"schedule {name!r} of group {schedule.group_key!r} is declared twice", "Rename one of them."
            )

    def include(self, other: App) -> None:
        """Add the tasks, queues and schedules of another app, so that one worker runs the apps of many
        modules.
        """
        if other.middleware or other.lifespan:
            raise ConfigurationError(
                "an app with middleware or a lifespan cannot be included",
                "Declare them on the app that includes it.",
            )
        for task in other:
            self._add(task)
        for (name, _), (task, schedule) in other._schedules.items():
            self.schedule(name, task, schedule)
        for name, settings in other._queues.items():
            if self._queues.setdefault(name, settings) is not settings:
                raise _declared_twice(name)

    @overload
    def install(self, conn: SyncConnection) -> None: ...
    @overload
    def install(self, conn: AsyncConnection) -> Coroutine[Any, Any, None]: ...
    def install(self, conn: Any) -> Coroutine[Any, Any, None] | None:
        """Create this app's queues and schedules, and store what its tasks declare, so that it holds however
        they are enqueued. Happens in the transaction of `conn`, which needs the rights of `fairq_admin`.

        Settings that the app does not declare stay as they are.
        """
        return run(conn, self._install(), "fairq.App.install")  # type: ignore[no-any-return]

    def _install(self) -> Steps[None]:
        for name in self.queues:
            yield queue_call(name, self._queues.get(name, {}))
        for task in self:
            declared = {name: task.options.get(name) for name in KindSettings.__optional_keys__}
            yield kind_call(task.queue, task.kind, {**declared, "owner": self.name or ""})
        for (name, _), (task, schedule) in self._schedules.items():
            yield from declared_steps(name, task, schedule, self.name or "")

    def _add(self, task: Task[Any, ..., Any]) -> None:
        known = self._tasks.get(task.kind)
        if known is not None and known is not task:
            raise ConfigurationError(
                f"two tasks have the kind {task.kind!r}: {_place(known)} and {_place(task)}",
                "Name one of them: @app.task(kind=…)",
            )
        self._tasks[task.kind] = task

    @property
    def tasks(self) -> Mapping[str, Task[Any, ..., Any]]:
        return dict(self._tasks)

    @property
    def queues(self) -> list[str]:
        """The declared queues and the queues of the tasks, each once."""
        return sorted({*self._queues, *(task.queue for task in self._tasks.values())})

    def __iter__(self) -> Iterator[Task[Any, ..., Any]]:
        return iter(list(self._tasks.values()))

    def __contains__(self, kind: object) -> bool:
        return kind in self._tasks

    def __getitem__(self, kind: str) -> Task[Any, ..., Any]:
        """The task of that kind. Raises UnknownTask."""
        try:
            return self._tasks[kind]
        except KeyError:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise UnknownTask(
                f"there is no handler of kind {kind!r}; this app has: {known}",
                "Import the module that declares it, or app.include() its app.",
            ) from None

    def problems(self) -> list[str]:
        """Everything that is wrong with the declarations. A worker refuses to start if there is anything."""
        found: list[str] = []
        for task in self:
            try:
                task.check()
            except ConfigurationError as exc:
                found.append(str(exc))
        for each in self.middleware:
            if self._tasks and not any(around(task, [each]) for task in self):
                found.append(
                    f"the middleware {each!r:.80} matches no handler:"
                    " async middleware goes around async handlers, sync middleware around sync ones"
                )
        return found


def _declared_twice(queue: str) -> ConfigurationError:
    return ConfigurationError(f"queue {queue!r} is declared twice", "Declare all its settings in one place.")


def _place(task: Task[Any, ..., Any]) -> str:
    return f"{getattr(task.handler, '__module__', '?')}.{getattr(task.handler, '__qualname__', '?')}"
