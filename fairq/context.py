"""What a handler may know about its attempt, and say about it."""

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
    """Whose task it is among those of its group; None: it names nobody."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    deadline: datetime | None = None
    """When the attempt times out; None: never."""
    cancelled: Cancellation = field(default_factory=Cancellation)
    last_progress: Progress | None = None
    charged: float | None = None
    """What the attempt has used so far, by `charge`."""
    over: bool = False
    """The attempt has ended, for whoever runs the handler."""
    finished_in: bool = False
    """The handler ended the task in a transaction of its own. Whether that one commits is another matter."""
    on_progress: Callable[[Context], None] | None = None
    """Set by who runs the handler; called in the handler's thread after each report or charge."""
    state: Any = None
    """What the app's lifespan made for this worker process."""
    session: Any = None
    """Where the task declares one: a connection, or a session, whose transaction ends with the task."""

    @classmethod
    def of(
        cls,
        row: TurnRow | PopOneRow,
        worker_id: int,
        on_progress: Callable[[Context], None] | None = None,
        state: Any = None,
    ) -> Context:
        """The context of a task just popped; who runs it says until when."""
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
        """The tick, of a task that a schedule created."""
        tick = self.headers.get("scheduled_for")
        return None if tick is None else datetime.fromisoformat(tick)

    def progress(self, done: float, total: float | None = None, note: Any = None) -> None:
        """Report how far the work is. Cheap: only the newest report is sent, with the worker's next turn."""
        # A copy: the handler may go on with its note while the report waits for the next turn.
        note = simplify(note, "note")
        self.last_progress = Progress(
            _amount("done", done), None if total is None else _amount("total", total), note
        )
        if self.on_progress is not None:
            self.on_progress(self)

    def charge(self, amount: float) -> None:
        """Say that the attempt used so much more: tokens, pages, whatever a queue with `fairness = "cost"`
        shares.

        Amounts add up, from any thread, and the end of the attempt settles them. What an attempt charged that
        fails or is lost counts. Without a word a task counts as what was expected of it.
        """
        with _charging:
            total = (self.charged or 0.0) + _used(amount)
            if not total <= MOST_CHARGED:
                raise InvalidCost(f"task {self.id} charges {total:g} in all", _CHARGE_HINT)
            if self.finished_in or self.over:
                raise NotHeld(
                    f"attempt {self.attempt} of task {self.id} has ended, and what it used is settled",
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
        """Create a task in the transaction of `ctx.session`, of the same group and user unless another group
        is named: it exists if this one ends well. Returns its id; with an async session, await it.
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
        """End the task as succeeded in the transaction of `conn`: what else that does and this end commit
        together.

        Call it last, and commit before the handler returns. When that transaction rolls back the task is not
        ended, and gets another attempt. Raises NotHeld, so that nothing commits, when the attempt is not this
        worker's any more.
        """
        return run(conn, self.success(result), "fairq.Context.finish_in")  # type: ignore[no-any-return]

    def success(self, result: Any) -> Call[None]:
        """What `finish_in` sends."""
        try:
            text = None if result is None else encode(result, "result")
        except NotEncodable as exc:
            raise ResultNotEncodable(str(exc), exc.hint) from exc
        return finish_call(self, Outcome("succeeded", result=text)).then(self._finished)

    def _finished(self, accepted: bool) -> None:
        if not accepted:
            hint = "Let the exception pass, so that your transaction rolls back: somebody else does the work."
            if self.finished_in:
                hint = "ctx.finish_in() ended it before. Call it once, as the last thing before the commit."
            raise NotHeld(
                f"attempt {self.attempt} of task {self.id} is not held by worker {self.worker_id} any more",
                hint,
            )
        self.finished_in = True


# What an attempt may use in all; the engine asks the same.
MOST_CHARGED: Final = 1e9
_CHARGE_HINT: Final = f"What the handler used: 0 to {MOST_CHARGED:.0f}, in the unit of the queue's choice."
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
            f"the progress is reported with {what}={value!r:.60}, which is not a number",
            "ctx.progress(pages_read, pages): how much is done, and of how much, if that is known.",
        )
    return amount


def _number(value: Any) -> float:
    """NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def finish_call(ctx: Context, outcome: Outcome) -> Call[bool]:
    """`fairq.finish_tasks` for one attempt; true when it was accepted."""
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
