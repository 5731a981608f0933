"""The context of a handler: what it may know about its attempt, and say about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import typing
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

from fairq.codec import encode, simplify
from fairq.connections import AsyncConnection, SyncConnection, run
from fairq.driver import Call
from fairq.errors import Cancelled, ConfigurationError, InvalidCost, NotEncodable, NotHeld, ResultNotEncodable
from fairq.options import GroupKey, TaskOptions, interval
from fairq.outcome import Outcome
from fairq.queries import client as queries
from fairq.results import Progress

if TYPE_CHECKING:
    from fairq.queries.client import PopOneRow
    from fairq.queries.workers import TurnRow
    from fairq.task import Task

__all__ = ["Cancellation", "Context", "finish_call"]


T = TypeVar("T")


class Cancellation:
    """Tells a handler to stop. True once it should: `if ctx.cancelled: …`.

    A thread waits for that with `ctx.cancelled.wait(seconds)`, a coroutine with `await ctx.cancelled`.
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
        """For the worker. Thread-safe. Only the first reason counts."""
        with self._lock:
            if self._event.is_set():
                return
            self.reason = reason
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(_resolve, future)

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is set, at most `timeout` seconds. Return whether it is set."""
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
    user_key: str | None = None
    """The user, inside the group; None: none."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    deadline: datetime | None = None
    """When the attempt times out; None: never."""
    cancelled: Cancellation = field(default_factory=Cancellation)
    last_progress: Progress | None = None
    charged: float | None = None
    """What the attempt has charged so far."""
    over: bool = False
    """The attempt has ended, as far as the worker is concerned."""
    finished_in: bool = False
    """The handler called `finish_in`. Its transaction may still roll back."""
    on_progress: Callable[[Context], None] | None = None
    """Called in the handler's thread after each report or charge."""
    state: Any = None
    """What the app's lifespan opened for this worker process."""
    session: Any = None
    """The task's session, if it declares one. Its transaction commits together with the task's end."""

    @classmethod
    def of(
        cls,
        row: TurnRow | PopOneRow,
        worker_id: int,
        on_progress: Callable[[Context], None] | None = None,
        state: Any = None,
    ) -> Context:
        """The context of a popped task. The caller sets the deadline."""
        headers = json.loads(row.headers or "null")
        return cls(
            id=row.id,
            attempt=row.attempt,
            max_attempts=row.max_attempts,
            group_key=row.group_key,
            user_key=row.user_key,
            queue=row.queue,
            kind=row.kind,
            worker_id=worker_id,
            headers=headers or {},
            on_progress=on_progress,
            state=state,
        )

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt >= self.max_attempts

    @property
    def scheduled_for(self) -> datetime | None:
        """The tick, if a schedule created the task."""
        tick = self.headers.get("scheduled_for")
        return None if tick is None else datetime.fromisoformat(tick)

    def progress(self, done: float, total: float | None = None, note: Any = None) -> None:
        """Report how far the work is. Cheap: only the newest report is sent, with the worker's next turn."""
        # A copy: the handler may change its note before the next turn.
        note = simplify(note, "note")
        self.last_progress = Progress(
            _amount("done", done), None if total is None else _amount("total", total), note
        )
        if self.on_progress is not None:
            self.on_progress(self)

    def charge(self, amount: float) -> None:
        """Add to what the attempt used: tokens, pages, whatever a queue with `fairness = "cost"` shares.

        Thread-safe. The sum is settled when the attempt ends, also when it fails or is lost. An attempt that
        charges nothing counts as its expected cost.
        """
        with _charging:
            total = (self.charged or 0.0) + _used(amount)
            if not total <= MOST_CHARGED:
                raise InvalidCost(f"task {self.id} charges {total:g} in all", _CHARGE_HINT)
            if self.finished_in or self.over:
                raise NotHeld(
                    f"attempt {self.attempt} of task {self.id} has ended, and its charges are settled",
                    "Call ctx.charge() before ctx.finish_in(), and before the handler returns.",
                )
            self.charged = total
        if self.on_progress is not None:
            self.on_progress(self)

    def enqueue(
        self,
        task: Task[T, ..., Any],
        payload: T,
        *,
        group_key: GroupKey | None = None,
        **options: Unpack[TaskOptions],
    ) -> Any:
        """Create a task in the transaction of `ctx.session`: it exists only if that commits. Without a
        `group_key` it has this task's group and user. Returns the id; with an async session, a coroutine.
        """
        if self.session is None:
            raise ConfigurationError(
                f"the handler of task {self.kind!r} has no session to enqueue in",
                "Declare one, @app.task(session=…), or pass a connection: task.enqueue(conn, …)",
            )
        if group_key is None:
            group_key = self.group_key
            options.setdefault("user", self.user_key)
        return task.enqueue(self.session, group_key, payload, **options)

    @overload
    def finish_in(self, conn: SyncConnection, result: Any = ...) -> None: ...
    @overload
    def finish_in(self, conn: AsyncConnection, result: Any = ...) -> Coroutine[Any, Any, None]: ...
    def finish_in(self, conn: Any, result: Any = None) -> Coroutine[Any, Any, None] | None:
        """End the task as succeeded in the transaction of `conn`, so that your changes and this end commit
        together.

        Call it last, and commit before the handler returns. If the transaction rolls back, the task gets
        another attempt. Raises NotHeld if this worker no longer holds the attempt: then let nothing commit.
        """
        return run(conn, self.success(result), "fairq.Context.finish_in")  # type: ignore[no-any-return]

    def success(self, result: Any) -> Call[None]:
        """The call of `finish_in`."""
        try:
            text = None if result is None else encode(result, "result")
        except NotEncodable as exc:
            raise ResultNotEncodable(str(exc), exc.hint) from exc
        return finish_call(self, Outcome("succeeded", result=text)).then(self._finished)

    def _finished(self, accepted: bool) -> None:
        if not accepted:
            hint = "Let the exception pass, so that your transaction rolls back: another worker has the task."
            if self.finished_in:
                hint = "ctx.finish_in() was called before. Call it once, last before the commit."
            raise NotHeld(
                f"worker {self.worker_id} no longer holds attempt {self.attempt} of task {self.id}", hint
            )
        self.finished_in = True


# The most that an attempt may charge; the engine checks the same.
MOST_CHARGED: Final = 1e9
_CHARGE_HINT: Final = f"Charge what the handler used, in the queue's unit: 0 to {MOST_CHARGED:.0f}."
_charging = threading.Lock()


def _used(amount: Any) -> float:
    used = _number(amount)
    if not 0 <= used <= MOST_CHARGED:
        raise InvalidCost(f"a handler charges {amount!r:.60}", _CHARGE_HINT)
    return used


def _amount(what: str, value: Any) -> float:
    amount = _number(value)
    if not math.isfinite(amount):
        raise ConfigurationError(
            f"ctx.progress() got {what}={value!r:.60}, which is not a number",
            "Say how much is done and, if known, of how much: ctx.progress(pages_read, pages).",
        )
    return amount


def _number(value: Any) -> float:
    """The value as a float; NaN if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def finish_call(ctx: Context, outcome: Outcome) -> Call[bool]:
    """The call that ends one attempt; its answer is whether the end was accepted."""
    return queries.finish_one.call(
        worker_id=ctx.worker_id,
        id=ctx.id,
        attempt=ctx.attempt,
        outcome=outcome.outcome,
        result=outcome.result,
        error=outcome.error,
        retry_delay=interval(outcome.retry_delay),
        cost=ctx.charged,
        hold=outcome.hold,
    ).then(bool)
