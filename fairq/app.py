"""Tasks: declare handlers, enqueue them typed, and decide how an attempt ends.

    app = fairq.App()

    @app.task(queue="docs", max_attempts=5, timeout=60, retry=fairq.Backoff(base=2, cap=600))
    def parse(payload: Parse, ctx: fairq.Context) -> dict[str, int]: ...

    parse.enqueue(conn, "bob", Parse(file="a.pdf"))       # checked by the type checker
    parse(Parse(file="a.pdf"), ctx)                       # the plain function, for tests

Nothing in here talks to a database or starts a thread, but for `enqueue` and `finish_in`, which use the
caller's connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
import random
import threading
import traceback
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from fairq.client import (
    Item,
    Options,
    Seconds,
    _check_options,
    create_call,
    create_many_call,
    interval,
)
from fairq.codec import Decoder, decoder, encode, encode_for, simplify
from fairq.connections import AsyncConnection, Call, SyncConnection, run
from fairq.dsn import mask
from fairq.errors import (
    LONGEST_PAUSE,
    Cancelled,
    ConfigurationError,
    Fail,
    FairqError,
    FinishLost,
    NotDecodable,
    NotEncodable,
    NotHeld,
    ResultNotEncodable,
    Retry,
    TaskError,
    UnknownTask,
    is_within,
)
from fairq.queries import client as queries
from fairq.results import Progress

__all__ = ["App", "Backoff", "Cancellation", "Context", "Outcome", "Task", "outcome_of"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

# --- Retry policy ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backoff:
    """When a failed attempt is tried again: which exceptions, and after how many seconds.

    The pause after attempt n is `base * factor ** (n - 1)`, at most `cap`, moved by up to `jitter` of itself
    both ways. Exceptions in `on` are retried, those in `never` are not, even so.
    """

    base: float = 1.0
    cap: float = 600.0
    factor: float = 2.0
    jitter: float = 0.25
    on: tuple[type[BaseException], ...] = (Exception,)
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        numbers = {"base": self.base, "cap": self.cap, "factor": self.factor, "jitter": self.jitter}
        bounds = {"factor": (1, LONGEST_PAUSE), "jitter": (0, 1)}
        wrong = [
            name
            for name, value in numbers.items()
            if not is_within(value, *bounds.get(name, (0, LONGEST_PAUSE)))
        ]
        if wrong:
            shown = ", ".join(f"{name}={numbers[name]!r}" for name in wrong)
            raise ConfigurationError(
                f"Backoff({shown}) is out of range",
                "base and cap: seconds, 0 to ten years; factor: 1 or more; jitter: 0 to 1.",
            )
        for name, classes in (("on", self.on), ("never", self.never)):
            if not isinstance(classes, tuple) or not all(
                isinstance(each, type) and issubclass(each, BaseException) for each in classes
            ):
                raise ConfigurationError(
                    f"Backoff({name}=…) is not a tuple of exception types: {classes!r:.80}"
                )

    def retries(self, exception: BaseException) -> bool:
        return isinstance(exception, self.on) and not isinstance(exception, self.never)

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after attempt number `attempt`; `draw` gives a number from 0 to 1."""
        try:
            pause = self.base * self.factor ** (max(attempt, 1) - 1)
        except OverflowError:
            pause = self.cap
        return min(pause, self.cap) * (1 + self.jitter * (2 * draw() - 1))


# --- What a handler knows --------------------------------------------------------------------------


class Cancellation:
    """Tells a handler to stop. True once it should: `if ctx.cancelled: …`.

    A thread waits with `ctx.cancelled.wait(seconds)`, a coroutine with `await ctx.cancelled`.
    `reason` is "cancelled", "timeout" or "shutdown".
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str = "cancelled") -> None:
        """For the worker, from any thread. Only the first reason counts."""
        with self._lock:
            if self._event.is_set():
                return
            self.reason = reason
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, future)

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is set, or the time is over. Says whether it is set."""
        return self._event.wait(timeout)

    def raise_if_set(self) -> None:
        if self._event.is_set():
            raise Cancelled(f"the handler was told to stop: {self.reason}")

    def __await__(self) -> typing.Generator[Any, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._event.is_set():
                return
            entry = (loop, future)
            self._waiting.append(entry)
        try:
            await future
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(entry)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class PoppedTask(Protocol):
    """A row of `fairq.pop_tasks`, as far as a context needs it."""

    @property
    def id(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def queue(self) -> str: ...
    @property
    def group_key(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def started_at(self) -> datetime | None: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def headers(self) -> Any: ...


@dataclass(eq=False, slots=True)
class Context:
    """What a handler may know about its attempt, and say about it."""

    id: int
    attempt: int
    max_attempts: int
    group_key: str
    queue: str
    kind: str
    worker_id: int
    headers: Mapping[str, Any] = field(default_factory=dict)
    deadline: datetime | None = None
    """When the attempt times out; None: never."""
    cancelled: Cancellation = field(default_factory=Cancellation)
    last_progress: Progress | None = None
    finished_in: bool = False
    """The handler ended the task in a transaction of its own. Whether that one commits is another matter."""
    on_progress: Callable[[Context], None] | None = None
    """Set by who runs the handler; called in the handler's thread after each report."""

    @classmethod
    def of(
        cls, row: PoppedTask, worker_id: int, on_progress: Callable[[Context], None] | None = None
    ) -> Context:
        """The context of a task just popped. `headers` may be parsed, or JSON text."""
        headers = row.headers
        if isinstance(headers, str | bytes):
            headers = json.loads(headers)
        deadline = None
        if row.timeout is not None:
            deadline = (row.started_at or datetime.now(UTC)) + row.timeout
        return cls(
            id=row.id,
            attempt=row.attempt,
            max_attempts=row.max_attempts,
            group_key=row.group_key,
            queue=row.queue,
            kind=row.kind,
            worker_id=worker_id,
            headers=headers or {},
            deadline=deadline,
            on_progress=on_progress,
        )

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt >= self.max_attempts

    def progress(self, done: float, total: float | None = None, note: Any = None) -> None:
        """Report how far the work is. Cheap: only the newest report is sent, with the worker's next turn."""
        # A copy: the handler may go on with its note while the report waits for the next turn.
        note = simplify(note, "note")
        self.last_progress = Progress(
            _amount("done", done), None if total is None else _amount("total", total), note
        )
        if self.on_progress is not None:
            self.on_progress(self)

    @overload
    def finish_in(self, conn: SyncConnection, result: Any = ...) -> None: ...
    @overload
    def finish_in(self, conn: AsyncConnection, result: Any = ...) -> Coroutine[Any, Any, None]: ...
    def finish_in(self, conn: Any, result: Any = None) -> Coroutine[Any, Any, None] | None:
        """End the task as succeeded in the transaction of `conn`: what else that does and this end commit
        together.

        Call it last, and commit before the handler returns. When that transaction rolls back the task is not
        ended, and gets another attempt. Raises NotHeld, so that nothing commits, when the attempt is not this
        worker's any more.
        """
        text = None if result is None else encode(result, "result")
        call = finish_call(self, Outcome("succeeded", result=text))
        return run(conn, Call(call.query, self._finished))  # type: ignore[no-any-return]

    def _finished(self, accepted: list[int]) -> None:
        if not accepted:
            hint = "Let the exception pass, so that your transaction rolls back: somebody else does the work."
            if self.finished_in:
                hint = "ctx.finish_in() ended it before. Call it once, as the last thing before the commit."
            raise NotHeld(
                f"attempt {self.attempt} of task {self.id} is not held by worker {self.worker_id} any more",
                hint,
            )
        self.finished_in = True


def _amount(what: str, value: Any) -> float:
    try:
        amount = float(value)
    except (TypeError, ValueError, OverflowError):
        amount = math.nan
    if not math.isfinite(amount):
        raise ConfigurationError(
            f"the progress is reported with {what}={value!r:.60}, which is no number",
            "ctx.progress(pages_read, pages): how much is done, and of how much, if that is known.",
        )
    return amount


# --- A task ----------------------------------------------------------------------------------------


class Task(Generic[T, P, R]):
    """A handler and how its tasks are treated. Made by `App.task`; calling it calls the handler."""

    __name__: str

    def __init__(
        self,
        handler: Callable[Concatenate[T, P], R],
        *,
        kind: str,
        queue: str,
        priority: int = 0,
        cost: float = 1.0,
        max_attempts: int | None = None,
        timeout: Seconds | None = None,
        retry: Backoff | None = None,
        store_result: bool = False,
    ) -> None:
        functools.update_wrapper(self, handler)
        self.handler = handler
        self.options = Options(
            queue=queue, kind=kind, priority=priority, cost=cost, max_attempts=max_attempts, timeout=timeout
        )
        _check_options(self.options)
        if retry is not None and not isinstance(retry, Backoff):
            raise ConfigurationError(
                f"task {kind!r} has retry={retry!r:.80}",
                "Pass a policy: retry=fairq.Backoff(base=2, cap=600). How often is said by max_attempts=5.",
            )
        self.retry = retry
        self.store_result = store_result
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        )
        self._context_by: Literal["position", "keyword"] | None = None
        self._context_name = ""
        self._read_signature()

    @property
    def kind(self) -> str:
        return self.options.kind

    @property
    def queue(self) -> str:
        return self.options.queue

    @property
    def timeout(self) -> float | None:
        """Seconds that one attempt may take; None: no limit."""
        given = self.options.timeout
        return given.total_seconds() if isinstance(given, timedelta) else given

    @property
    def wants_context(self) -> bool:
        return self._context_by is not None

    def __call__(self, payload: T, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.handler(payload, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<fairq task {self.kind!r} on queue {self.queue!r}>"

    # Running it

    def invoke(self, payload: T, ctx: Context) -> Any:
        """Call the handler as its signature asks. Of an async handler, this is the coroutine."""
        handler: Any = self.handler
        if self._context_by == "position":
            answer = handler(payload, ctx)
        elif self._context_by == "keyword":
            answer = handler(payload, **{self._context_name: ctx})
        else:
            answer = handler(payload)
        if isinstance(answer, types.CoroutineType) and not self.is_async:
            # Nobody would await it: the task would count as done with nothing done.
            answer.close()
            raise ConfigurationError(
                f"the handler of task {self.kind!r} is a plain function and returned a coroutine",
                "A decorator between @app.task and an async handler must be an async function itself.",
            )
        return answer

    def decode(self, payload: str | bytes) -> T:
        """The payload, from JSON text, as the handler's annotation says. Raises NotDecodable."""
        return self._decoder(payload)  # type: ignore[no-any-return]

    def decode_plain(self, payload: Any) -> T:
        """The same of JSON that is parsed already."""
        return self._decoder.plain(payload)  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise ConfigurationError when the payload's annotation cannot be decoded."""
        _ = self._decoder

    # Enqueueing it

    @overload
    def enqueue(
        self,
        conn: SyncConnection,
        group_key: str,
        payload: T,
        *,
        queue: str | None = ...,
        priority: int | None = ...,
        run_at: datetime | None = ...,
        expires_at: datetime | None = ...,
        max_attempts: int | None = ...,
        cost: float | None = ...,
        timeout: Seconds | None = ...,
        idempotency_key: str | None = ...,
        concurrency_key: str | None = ...,
        headers: Mapping[str, Any] | None = ...,
    ) -> int: ...
    @overload
    def enqueue(
        self,
        conn: AsyncConnection,
        group_key: str,
        payload: T,
        *,
        queue: str | None = ...,
        priority: int | None = ...,
        run_at: datetime | None = ...,
        expires_at: datetime | None = ...,
        max_attempts: int | None = ...,
        cost: float | None = ...,
        timeout: Seconds | None = ...,
        idempotency_key: str | None = ...,
        concurrency_key: str | None = ...,
        headers: Mapping[str, Any] | None = ...,
    ) -> Coroutine[Any, Any, int]: ...
    def enqueue(
        self,
        conn: Any,
        group_key: str,
        payload: T,
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        cost: float | None = None,
        timeout: Seconds | None = None,
        idempotency_key: str | None = None,
        concurrency_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> int | Coroutine[Any, Any, int]:
        """Create a task of this kind in the transaction of `conn`; what is not given is as the task
        declares.
        """
        options = self._options(queue, priority, run_at, expires_at, max_attempts, cost, timeout, headers)
        call = create_call(group_key, self.encode_payload(payload), options, idempotency_key, concurrency_key)
        return run(conn, call)  # type: ignore[no-any-return]

    @overload
    def enqueue_many(
        self,
        conn: SyncConnection,
        items: Iterable[tuple[str, T] | Item],
        *,
        queue: str | None = ...,
        priority: int | None = ...,
        run_at: datetime | None = ...,
        expires_at: datetime | None = ...,
        max_attempts: int | None = ...,
        cost: float | None = ...,
        timeout: Seconds | None = ...,
        headers: Mapping[str, Any] | None = ...,
    ) -> list[int]: ...
    @overload
    def enqueue_many(
        self,
        conn: AsyncConnection,
        items: Iterable[tuple[str, T] | Item],
        *,
        queue: str | None = ...,
        priority: int | None = ...,
        run_at: datetime | None = ...,
        expires_at: datetime | None = ...,
        max_attempts: int | None = ...,
        cost: float | None = ...,
        timeout: Seconds | None = ...,
        headers: Mapping[str, Any] | None = ...,
    ) -> Coroutine[Any, Any, list[int]]: ...
    def enqueue_many(
        self,
        conn: Any,
        items: Iterable[tuple[str, T] | Item],
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        cost: float | None = None,
        timeout: Seconds | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> list[int] | Coroutine[Any, Any, list[int]]:
        """Create many tasks of this kind in one round trip; ids in the order of `items`."""
        options = self._options(queue, priority, run_at, expires_at, max_attempts, cost, timeout, headers)
        return run(conn, create_many_call(items, options, self.encode_payload))  # type: ignore[no-any-return]

    def encode_payload(self, payload: T, root: str = "payload") -> str:
        """JSON text of a payload, checked: what the handler could not decode is refused here, not in the
        worker.
        """
        if self._is_surely_decodable(payload):
            return encode(payload, root)
        try:
            return encode_for(self._decoder, payload, root)
        except NotEncodable as exc:
            exc.hint = exc.hint or f"Task {self.kind!r} declares its payload as {self._annotation!r:.200}."
            raise

    # Inside

    def _options(
        self,
        queue: str | None,
        priority: int | None,
        run_at: datetime | None,
        expires_at: datetime | None,
        max_attempts: int | None,
        cost: float | None,
        timeout: Seconds | None,
        headers: Mapping[str, Any] | None,
    ) -> Options:
        own = self.options
        return Options(
            queue=own.queue if queue is None else queue,
            kind=own.kind,
            priority=own.priority if priority is None else priority,
            run_at=run_at,
            expires_at=expires_at,
            max_attempts=own.max_attempts if max_attempts is None else max_attempts,
            cost=own.cost if cost is None else cost,
            timeout=own.timeout if timeout is None else timeout,
            headers=headers,
        )

    def _is_surely_decodable(self, payload: Any) -> bool:
        # pydantic checked its models when they were made. Dataclasses and structs hold what they were given.
        annotation = self._annotation
        return annotation is Any or (
            type(payload) is annotation and hasattr(annotation, "__pydantic_validator__")
        )

    def _read_signature(self) -> None:
        if inspect.isgeneratorfunction(self.handler) or inspect.isasyncgenfunction(self.handler):
            raise ConfigurationError(
                f"the handler of task {self.kind!r} is a generator; calling it does nothing"
            )
        try:
            parameters = list(inspect.signature(self.handler).parameters.values())
        except ValueError as exc:  # some that are written in C
            raise ConfigurationError(
                f"the handler of task {self.kind!r} says nothing about its parameters",
                "Declare a plain function that calls it.",
            ) from exc
        positional = [
            each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        if not positional:
            raise ConfigurationError(
                f"the handler of task {self.kind!r} takes no payload",
                "First comes the payload, then, if wanted, the fairq.Context: def parse(payload, ctx)",
            )
        self._payload_name = positional[0].name
        if self._payload_name in ("self", "cls"):
            raise ConfigurationError(
                f"the handler of task {self.kind!r} is a method",
                "Declare a plain function that calls the method.",
            )
        rest = [each for each in parameters if each is not positional[0]]
        context = next((each for each in rest if each.name == "ctx" or _is_context(each.annotation)), None)
        if context is not None:
            self._context_name = context.name
            keyword = context.kind == context.KEYWORD_ONLY or context is not rest[0]
            self._context_by = "keyword" if keyword else "position"
        for each in rest:
            optional = each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            if each is not context and not optional:
                raise ConfigurationError(
                    f"the handler of task {self.kind!r} has a parameter {each.name!r} that nobody fills",
                    "A handler takes the payload and, if it wants one, a context: def parse(payload, ctx)",
                )

    @cached_property
    def _annotation(self) -> Any:
        target = self.handler if inspect.isroutine(self.handler) else type(self.handler).__call__
        try:
            hints = typing.get_type_hints(target, include_extras=True)
        except Exception as exc:  # they are code: any error is possible
            raise ConfigurationError(
                f"the annotations of task {self.kind!r} cannot be resolved: {exc}"
            ) from exc
        return hints.get(self._payload_name, Any)

    @cached_property
    def _decoder(self) -> Decoder:
        try:
            return decoder(self._annotation)
        except ConfigurationError as exc:
            raise ConfigurationError(f"the payload of task {self.kind!r}: {exc}", exc.hint) from exc


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.split(".")[-1] == "Context"
    return annotation is Context


# --- The registry ----------------------------------------------------------------------------------


class App:
    """The tasks that an application knows, by kind. `fairq work module:app` runs them."""

    def __init__(
        self,
        *,
        queue: str = "default",
        max_attempts: int | None = None,
        timeout: Seconds | None = None,
        retry: Backoff | None = None,
    ) -> None:
        self.queue = queue
        self.max_attempts = max_attempts
        self.timeout = timeout
        self.retry = retry
        self._tasks: dict[str, Task[Any, ..., Any]] = {}

    @overload
    def task(self, handler: Callable[Concatenate[T, P], R], /) -> Task[T, P, R]: ...
    @overload
    def task(
        self,
        *,
        kind: str | None = ...,
        queue: str | None = ...,
        priority: int = ...,
        cost: float = ...,
        max_attempts: int | None = ...,
        timeout: Seconds | None = ...,
        retry: Backoff | None = ...,
        store_result: bool = ...,
    ) -> Callable[[Callable[Concatenate[T, P], R]], Task[T, P, R]]: ...
    def task(
        self,
        handler: Any = None,
        *,
        kind: str | None = None,
        queue: str | None = None,
        priority: int = 0,
        cost: float = 1.0,
        max_attempts: int | None = None,
        timeout: Seconds | None = None,
        retry: Backoff | None = None,
        store_result: bool = False,
    ) -> Any:
        """Declare a handler. Its first parameter is the payload, decoded to its annotation; a second one, the
        context.

        `kind` is the name stored with each task, the function's by default: keep it when you rename the
        function.
        """

        def declare(handler: Callable[..., Any]) -> Task[Any, ..., Any]:
            task: Task[Any, ..., Any] = Task(
                handler,
                kind=getattr(handler, "__name__", "") if kind is None else kind,
                queue=self.queue if queue is None else queue,
                priority=priority,
                cost=cost,
                max_attempts=self.max_attempts if max_attempts is None else max_attempts,
                timeout=self.timeout if timeout is None else timeout,
                retry=self.retry if retry is None else retry,
                store_result=store_result,
            )
            self._add(task)
            return task

        if handler is None:
            return declare
        if not callable(handler):
            raise ConfigurationError(
                f"app.task({handler!r:.60}) declares no function",
                "Name a kind like this: @app.task(kind='parse')",
            )
        return declare(handler)

    def include(self, other: App) -> None:
        """Take over the tasks of another app: one app per module, one for the worker."""
        for task in other:
            self._add(task)

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
        """The queues that its tasks are declared on, each once."""
        return sorted({task.queue for task in self._tasks.values()})

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
                f"there is no handler of kind {kind!r}; this app knows: {known}",
                "Import the module that declares it, or app.include() its app.",
            ) from None

    def problems(self) -> list[str]:
        """What is wrong with the declarations, all at once; a worker refuses to start with any."""
        found: list[str] = []
        for task in self:
            try:
                task.check()
            except ConfigurationError as exc:
                found.append(str(exc))
        return found


def _place(task: Task[Any, ..., Any]) -> str:
    return f"{getattr(task.handler, '__module__', '?')}.{getattr(task.handler, '__qualname__', '?')}"


# --- How an attempt ends ---------------------------------------------------------------------------

OutcomeName = Literal["succeeded", "failed", "retry", "cancelled", "expired"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `fairq.finish_tasks` is told about one attempt. `result` and `error` are JSON text."""

    outcome: OutcomeName
    result: str | None = None
    error: str | None = None
    retry_delay: float | None = None
    """Seconds; None takes the queue's back-off."""


LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 8_000
LONGEST_CHAIN = 20

# Another attempt cannot help: the payload and the code are what they are.
_FINAL = (NotDecodable, ResultNotEncodable, Fail)


def outcome_of(
    exception: BaseException | None,
    task: Task[Any, ..., Any] | None,
    attempt: int,
    *,
    result: Any = None,
    draw: Callable[[], float] = random.random,
) -> Outcome:
    """How an attempt ended, from what its handler raised, or from None and what it returned. Pure but for
    `draw`.

    | raised                                   | outcome                                                     |
    |------------------------------------------|-------------------------------------------------------------|
    | nothing                                  | succeeded; the result kept if the task stores results       |
    | Cancelled, asyncio.CancelledError        | cancelled                                                   |
    | Fail, NotDecodable, ResultNotEncodable   | failed                                                      |
    | Retry                                    | retry, after its delay, or the task's back-off              |
    | UnknownTask, FinishLost, no policy given | retry, after the queue's back-off: a newer worker may know  |
    | what the task's policy retries           | retry, after the policy's delay                             |
    | anything else                            | failed                                                      |

    `retry` becomes `failed` in the engine when no attempts are left.
    """
    if exception is None:
        try:
            stored = encode(result, "result") if task is not None and task.store_result else None
        except NotEncodable as exc:
            exception = ResultNotEncodable(str(exc), exc.hint)
        else:
            return Outcome("succeeded", result=stored)

    error = describe(exception)
    if isinstance(exception, Cancelled | asyncio.CancelledError):
        return Outcome("cancelled", error=error)
    if isinstance(exception, _FINAL):
        return Outcome("failed", error=error)
    policy = None if task is None else task.retry
    if isinstance(exception, Retry):
        delay = exception.delay
        if delay is None and policy is not None:
            delay = policy.delay(attempt, draw)
        return Outcome("retry", error=error, retry_delay=delay)
    if policy is None or isinstance(exception, UnknownTask | FinishLost):
        return Outcome("retry", error=error)
    if policy.retries(exception):
        return Outcome("retry", error=error, retry_delay=policy.delay(attempt, draw))
    return Outcome("failed", error=error)


def describe(exception: BaseException) -> str:
    """The JSON that is stored of an exception: code, type, message and, where it helps, the traceback."""
    ours = isinstance(exception, TaskError)
    code = exception.code if isinstance(exception, TaskError) else "unhandled_error"
    if isinstance(exception, asyncio.CancelledError):
        code = Cancelled.code
    cls = type(exception)
    found: dict[str, Any] = {
        "code": _clean(str(code), 200),
        "type": cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}",
        "message": _clean(_message(exception), LONGEST_MESSAGE),
    }
    if isinstance(exception, FairqError) and exception.hint:
        found["hint"] = _clean(exception.hint, LONGEST_MESSAGE)
    if exception.__traceback__ is not None and not (ours and not isinstance(exception, Fail | Retry)):
        found["traceback"] = _clean("\n".join(_frames(exception)), LONGEST_TRACEBACK, keep_end=True)
    return json.dumps(found)


def _frames(exception: BaseException) -> list[str]:
    """Where it was raised, after where its causes were; long messages and deep recursion cut short."""
    found: list[str] = []
    for each in reversed(_causes(exception)):
        last = traceback.format_tb(each.__traceback__, limit=-20)
        name = type(each).__qualname__
        found += [""] * bool(found)
        found += ["".join(last).rstrip("\n"), f"{name}: {_clean(_message(each), 500)}"]
    return found


def _causes(exception: BaseException) -> list[BaseException]:
    """The exception and what led to it, the newest ones: a chain may be long, and may lead back to itself."""
    chain: list[BaseException] = []
    current: BaseException | None = exception
    while current is not None and len(chain) < LONGEST_CHAIN and not any(current is each for each in chain):
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _message(exception: BaseException) -> str:
    try:
        return str(exception) or type(exception).__name__
    except Exception:  # somebody's __str__ is broken; the task's end must be written all the same
        return type(exception).__name__


def _clean(text: str, longest: int, *, keep_end: bool = False) -> str:
    """What may be stored: no passwords, no characters that jsonb refuses, not too long."""
    text = mask(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    return f"…{text[-longest + 1 :]}" if keep_end else f"{text[: longest - 1]}…"


def finish_call(ctx: Context, outcome: Outcome) -> Call[list[int], bool]:
    """`fairq.finish_tasks` for one attempt; true when it was accepted."""
    query = queries.finish_one.call(
        worker_id=ctx.worker_id,
        id=ctx.id,
        attempt=ctx.attempt,
        outcome=outcome.outcome,
        result=outcome.result,
        error=outcome.error,
        retry_delay=interval(outcome.retry_delay),
    )
    return Call(query, bool)
