"""How a task ended, and waiting until it has.

    id = fairq.enqueue(conn, "bob", {"file": "a.pdf"})
    conn.commit()
    fairq.result(conn, id, timeout=30).value()

Polling is the truth: it works on every connection and behind every pooler. On a psycopg connection in
autocommit, a session of its own that listens to nothing else, a notification (channel `fairq_done`) cuts the
wait short, however the task ends. It is asked for, task by task: who waits for nobody's end costs those who
finish tasks nothing.
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
# A watch holds for a minute, and is renewed well before.
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
        """What the handler returned, if the task stores results. Raises TaskFailed unless it succeeded."""
        if self.outcome == "succeeded":
            return self.result
        message = (self.error or {}).get("message") if isinstance(self.error, dict) else None
        raise TaskFailed(
            f"task {self.id} {self.outcome}{f': {message}' if message else ''}", self.outcome, self.error
        )


@on_connection
def result(id: int, *, timeout: float | None = None) -> Steps[TaskResult[Any]]:
    """Wait until a task has ended, at most `timeout` seconds; 0 only looks, None waits for ever.

    Raises ResultTimeout, NoSuchTask (also for one whose retention is over), and InTransaction where the wait
    could never end: commit before you wait.
    """
    return waiting(id, timeout)


def waiting(id: int, timeout: float | None) -> Steps[TaskResult[Any]]:
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidTime(
            f"the timeout of a wait is {timeout!r:.60}", "Seconds: 0 only looks, None waits for ever."
        )
    return _wait(check_id(id), timeout)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a handler says it has come."""

    done: float
    total: float | None = None
    note: Any = None


@on_connection
def progress(id: int) -> Call[Progress | None]:
    """What a running task reported last with `ctx.progress(…)`; None: nothing, or it is not live any more."""
    return queries.latest_progress.call(id=check_id(id)).then(
        lambda row: None if row is None else Progress(row.done or 0.0, row.total, _parsed(row.note))
    )


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as exc:
        # Written by a consumer in another language: numbers of thousands of digits, thousands of levels.
        raise NotDecodable("the result", f"is too much for Python: {exc}") from exc


def _wait(id: int, timeout: float | None) -> Steps[TaskResult[Any]]:
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    began: str | None = None
    listening: bool | None = None  # None: it is not known yet whether we may
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
                    "Commit first: the task may be part of it, and its locks would be held while you wait.",
                )
            is_fixed = look.isolation in ("repeatable read", "serializable")
            if is_fixed and look.transaction_began == began:
                raise InTransaction(
                    f"the result of task {id} is awaited in a transaction whose snapshot stands still",
                    "Commit first, or wait on a connection in READ COMMITTED or autocommit.",
                )
            began = look.transaction_began
            if listening is None:
                listening = yield from _listen(id)
                watched_at = time.monotonic()
                if listening:
                    began = None
                    continue  # it may have ended before we listened
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


# A role that may only read, or a standby: then it is polling alone.
_NOT_ALLOWED = ("42501", "25006")
_LISTEN = Call[None](driver.Statement[None]("exec", "listen fairq_done"))
_UNLISTEN = Call[None](driver.Statement[None]("exec", "unlisten fairq_done"))


def _listen(id: int) -> Steps[bool]:
    """Listen, then watch: an end in between is found by the look that follows. Where the application listens
    itself, its notifications are its own.
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
    """LISTEN takes effect at a commit, which in a pipeline is for the application to say. Behind a pooler it
    would stay with a session that somebody else has next.
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
    """A pause that ends with the notice of a task."""

    async def step(conn: Any, wait: Wait) -> None:
        with translating():
            notices = conn.notifies(timeout=seconds)
            while notice := await wait((anext if wait is awaited else next)(notices, None)):
                # Of a large batch the engine does not name the tasks.
                named = notice.payload.split(",") if notice.payload else [str(id)]
                if notice.channel == "fairq_done" and str(id) in named:
                    break

    return step
