"""How a task ended, and waiting for its end.

    id = fairq.enqueue(conn, "bob", {"file": "a.pdf"})
    conn.commit()
    fairq.result(conn, id, timeout=30).value()

The wait polls, which works on every connection and behind every pooler. On a psycopg connection in autocommit
that is one session and listens to nothing else, a notification (channel `fairq_done`) cuts the wait short,
however the task ends. It is requested task by task, so that tasks nobody waits for cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from fairq import driver
from fairq.connections import Step, Steps, Wait, awaited, is_session, on_connection
from fairq.driver import Call
from fairq.errors import (
    DatabaseError,
    InTransaction,
    InvalidTime,
    NoSuchTask,
    NotDecodable,
    ResultTimeout,
    TaskFailed,
    translating,
)
from fairq.options import check_id
from fairq.queries import client as queries

__all__ = ["Progress", "TaskResult", "progress", "result", "waiting"]

V = TypeVar("V")

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
# A watch lasts for a minute, and is renewed well before that.
RENEW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TaskResult(Generic[V]):
    """The end of a task. `outcome` is succeeded, failed, cancelled or expired."""

    id: int
    outcome: str
    finished_at: datetime
    result: V
    error: Any

    def value(self) -> V:
        """What the handler returned, if the task stores results. Raises TaskFailed if it did not succeed."""
        if self.outcome == "succeeded":
            return self.result
        message = (self.error or {}).get("message") if isinstance(self.error, dict) else None
        raise TaskFailed(
            f"task {self.id} {self.outcome}{f': {message}' if message else ''}", self.outcome, self.error
        )


@on_connection
def result(id: int, *, timeout: float | None = None) -> Steps[TaskResult[Any]]:
    """Wait until a task has ended, at most `timeout` seconds; 0 only looks, None waits for ever.

    Raises ResultTimeout, NoSuchTask (also when the task's retention is over), and InTransaction if the wait
    could never end: commit before you wait.
    """
    return waiting(id, timeout)


def waiting(id: int, timeout: float | None) -> Steps[TaskResult[Any]]:
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidTime(
            f"the timeout is {timeout!r:.60}", "Pass seconds: 0 only looks, None waits for ever."
        )
    return _wait(check_id(id), timeout)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a handler reported."""

    done: float
    total: float | None = None
    note: Any = None


@on_connection
def progress(id: int) -> Call[Progress | None]:
    """What a running task last reported with `ctx.progress(…)`; None: nothing, or the task has ended."""
    return queries.latest_progress.call(id=check_id(id)).then(
        lambda row: None if row is None else Progress(row.done or 0.0, row.total, _parsed(row.note))
    )


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as exc:
        # From a consumer in another language: numbers of thousands of digits, thousands of levels.
        raise NotDecodable("the result", f"cannot be read by Python: {exc}") from exc


def _wait(id: int, timeout: float | None) -> Steps[TaskResult[Any]]:
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    began: str | None = None
    listening: bool | None = None  # None: not known yet
    watched_at = 0.0
    try:
        while True:
            look: queries.LookAtResultRow = yield queries.look_at_result.call(id=id)
            if not look.live:
                if look.outcome is None or look.finished_at is None:
                    raise NoSuchTask(id)
                at = datetime.fromisoformat(look.finished_at)
                return TaskResult(id, look.outcome, at, _parsed(look.result), _parsed(look.error))
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise ResultTimeout(f"task {id} did not end within {timeout:g} s")
            if look.has_written:
                raise InTransaction(
                    f"the result of task {id} is awaited in a transaction that has written something",
                    "Commit first: the task may be part of it, and the wait would keep its locks.",
                )
            is_fixed = look.isolation in ("repeatable read", "serializable")
            if is_fixed and look.transaction_began == began:
                raise InTransaction(
                    f"the result of task {id} is awaited in a transaction with a fixed snapshot",
                    "Commit first, or wait on a connection in READ COMMITTED or autocommit.",
                )
            began = look.transaction_began
            if listening is None:
                listening = yield from _listen(id)
                watched_at = time.monotonic()
                if listening:
                    began = None
                    continue  # the task may have ended before we listened
            if listening and time.monotonic() - watched_at > RENEW_SECONDS:
                yield queries.watch_task.call(id=id)
                watched_at = time.monotonic()
            wait = pause * random.uniform(0.75, 1.25)
            wait = wait if left is None else min(wait, left)
            yield _notice(id, wait) if listening else _pause(wait)
            pause = min(pause * 1.5, LONGEST_PAUSE)
    finally:
        if listening:
            yield _unlisten


# A role that may only read, or a standby. Then the wait only polls.
_NOT_ALLOWED = ("42501", "25006")
_LISTEN = Call[None](driver.Statement[None]("exec", "listen fairq_done"))
_UNLISTEN = Call[None](driver.Statement[None]("exec", "unlisten fairq_done"))


def _listen(id: int) -> Steps[bool]:
    """Listen, then watch; the next look finds an end in between. If the application itself listens, leave its
    notifications alone.
    """
    if not (yield _may_listen) or (yield queries.is_listening.call()):
        return False
    try:
        yield _LISTEN
        yield queries.watch_task.call(id=id)
    except BaseException as exc:
        yield _unlisten
        if isinstance(exc, DatabaseError) and exc.sqlstate in _NOT_ALLOWED:
            return False
        raise
    return True


async def _may_listen(conn: Any, wait: Wait) -> bool:
    """Whether LISTEN works here. It takes effect at a commit, which in a pipeline is up to the application.
    Behind a pooler it would stay in a session that somebody else gets next.
    """
    return (
        isinstance(conn, psycopg.Connection | psycopg.AsyncConnection)
        and conn.autocommit
        and conn.info.transaction_status == TransactionStatus.IDLE
        and conn.info.pipeline_status == PipelineStatus.OFF
        and await is_session(conn, wait)
    )


async def _unlisten(conn: Any, wait: Wait) -> None:
    if not conn.closed:
        with translating():
            await wait(driver.run(conn, _UNLISTEN))


def _pause(seconds: float) -> Step:
    async def step(conn: Any, wait: Wait) -> None:
        sleep: Any = asyncio.sleep if wait is awaited else time.sleep
        await wait(sleep(seconds))

    return step


def _notice(id: int, seconds: float) -> Step:
    """A pause that a notification about the task cuts short."""

    async def step(conn: Any, wait: Wait) -> None:
        with translating():
            notices = conn.notifies(timeout=seconds)
            while notice := await wait((anext if wait is awaited else next)(notices, None)):
                # For a large batch the engine names no tasks.
                named = notice.payload.split(",") if notice.payload else [str(id)]
                if notice.channel == "fairq_done" and str(id) in named:
                    break

    return step
