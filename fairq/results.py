"""How a task ended, and waiting until it has.

    id = fairq.enqueue(conn, "bob", {"file": "a.pdf"})
    conn.commit()
    fairq.result(conn, id, timeout=30).value()

Polling is the truth: it works on every connection and behind every pooler. On a psycopg connection in
autocommit that listens to nothing else a notification (channel `fairq_done`) cuts the wait short, however the
task ends. It is asked for, task by task: who waits for nobody's end costs those who finish tasks nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, overload

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from fairq import driver
from fairq.client import identity
from fairq.connections import AsyncConnection, Call, SyncConnection, is_async, run
from fairq.errors import (
    DatabaseError,
    InTransaction,
    InvalidTime,
    NoSuchTask,
    ResultTimeout,
    TaskFailed,
    translating,
)
from fairq.queries import client as queries

__all__ = ["Progress", "TaskResult", "progress", "result"]

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
# A watch holds for a minute, and is renewed well before.
RENEW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The end of a task. `outcome` is succeeded, failed, cancelled or expired."""

    id: int
    outcome: str
    finished_at: datetime
    result: Any
    error: Any

    def value(self) -> Any:
        """What the handler returned, if the task stores results. Raises TaskFailed unless it succeeded."""
        if self.outcome == "succeeded":
            return self.result
        message = (self.error or {}).get("message") if isinstance(self.error, dict) else None
        raise TaskFailed(
            f"task {self.id} {self.outcome}{f': {message}' if message else ''}", self.outcome, self.error
        )


@overload
def result(conn: SyncConnection, id: int, *, timeout: float | None = ...) -> TaskResult: ...
@overload
def result(
    conn: AsyncConnection, id: int, *, timeout: float | None = ...
) -> Coroutine[Any, Any, TaskResult]: ...
def result(
    conn: Any, id: int, *, timeout: float | None = None
) -> TaskResult | Coroutine[Any, Any, TaskResult]:
    """Wait until a task has ended, at most `timeout` seconds; 0 only looks, None waits for ever.

    Raises ResultTimeout, NoSuchTask (also for one whose retention is over), and InTransaction where the wait
    could never end: commit before you wait.
    """
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidTime(
            f"the timeout of a wait is {timeout!r:.60}", "Seconds: 0 only looks, None waits for ever."
        )
    steps = _steps(id, timeout)
    return _drive_async(conn, id, steps) if is_async(conn) else _drive(conn, id, steps)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a handler says it has come."""

    done: float
    total: float | None = None
    note: Any = None


@overload
def progress(conn: SyncConnection, id: int) -> Progress | None: ...
@overload
def progress(conn: AsyncConnection, id: int) -> Coroutine[Any, Any, Progress | None]: ...
def progress(conn: Any, id: int) -> Progress | Coroutine[Any, Any, Progress | None] | None:
    """What a running task reported last with `ctx.progress(…)`; None: nothing, or it is not live any more."""
    return run(conn, Call(queries.latest_progress.call(id=id), _progress))  # type: ignore[no-any-return]


def _progress(row: queries.LatestProgressRow | None) -> Progress | None:
    return None if row is None else Progress(row.done or 0.0, row.total, _parsed(row.note))


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at the database."""

    ended: TaskResult | None
    live: bool
    fixed_snapshot: bool
    transaction_began: str
    has_written: bool


def _look_call(id: int) -> Call[queries.LookAtResultRow, _Look]:
    def read(row: queries.LookAtResultRow) -> _Look:
        ended = None
        if row.outcome is not None and row.finished_at is not None:
            at = datetime.fromisoformat(row.finished_at)
            ended = TaskResult(id, row.outcome, at, _parsed(row.result), _parsed(row.error))
        fixed = row.isolation in ("repeatable read", "serializable")
        return _Look(ended, row.live, fixed, row.transaction_began, row.has_written)

    return Call(queries.look_at_result.call(id=id), read)


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


_Steps = Generator[float | None, _Look | None, TaskResult]


def _steps(id: int, timeout: float | None) -> _Steps:
    """What to do next, apart from doing it: None asks for a look, a number for a wait of so many seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    began: str | None = None
    while True:
        look = yield None
        assert look is not None
        if look.ended is not None and not look.live:
            return look.ended
        if not look.live:
            raise NoSuchTask(
                f"there is no task {id}",
                "It was rolled back or never created, or it ended longer ago than its queue's retention.",
            )
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise ResultTimeout(f"task {id} did not end within {timeout:g} s")
        if look.has_written:
            raise InTransaction(
                f"the result of task {id} is awaited in a transaction that has written something",
                "Commit first: the task may be part of it, and its locks would be held while you wait.",
            )
        if look.fixed_snapshot and look.transaction_began == began:
            raise InTransaction(
                f"the result of task {id} is awaited in a transaction whose snapshot stands still",
                "Commit first, or wait on a connection in READ COMMITTED or autocommit.",
            )
        began = look.transaction_began
        wait = pause * random.uniform(0.75, 1.25)
        yield wait if left is None else min(wait, left)
        pause = min(pause * 1.5, LONGEST_PAUSE)


def _drive(conn: SyncConnection, id: int, steps: _Steps) -> TaskResult:
    call = _look_call(id)
    # None: it is not known yet whether we may listen; False: we may not.
    listener: psycopg.Connection[Any] | Literal[False] | None = None
    step = next(steps)
    watched_at = 0.0
    try:
        while True:
            look: _Look | None = None
            if step is None:
                look = run(conn, call)
            elif listener is None and isinstance(conn, psycopg.Connection) and _listens(conn, id):
                listener, watched_at = conn, time.monotonic()
                step = steps.send(None)
                look = run(conn, call)  # it may have ended before we listened
            elif listener:
                if time.monotonic() - watched_at > RENEW_SECONDS:
                    run(listener, _watch_call(id))
                    watched_at = time.monotonic()
                _hear(listener, id, step)
            else:
                listener = False
                time.sleep(step)
            step = steps.send(look)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        if listener and not listener.closed:
            run(listener, _UNLISTEN)


async def _drive_async(conn: AsyncConnection, id: int, steps: _Steps) -> TaskResult:
    call = _look_call(id)
    # None: it is not known yet whether we may listen; False: we may not.
    listener: psycopg.AsyncConnection[Any] | Literal[False] | None = None
    step = next(steps)
    watched_at = 0.0
    try:
        while True:
            look: _Look | None = None
            if step is None:
                look = await run(conn, call)
            elif (
                listener is None
                and isinstance(conn, psycopg.AsyncConnection)
                and await _listens_async(conn, id)
            ):
                listener, watched_at = conn, time.monotonic()
                step = steps.send(None)
                look = await run(conn, call)  # it may have ended before we listened
            elif listener:
                if time.monotonic() - watched_at > RENEW_SECONDS:
                    await run(listener, _watch_call(id))
                    watched_at = time.monotonic()
                await _hear_async(listener, id, step)
            else:
                listener = False
                await asyncio.sleep(step)
            step = steps.send(look)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        if listener and not listener.closed:
            await run(listener, _UNLISTEN)


# A role that may only read, or a standby: then it is polling alone.
_NOT_ALLOWED = ("42501", "25006")
_LISTENS = Call(queries.is_listening.call(), identity)
_LISTEN = Call(driver.Call(driver.Statement[None]("exec", "listen fairq_done"), ()), lambda _: True)
_UNLISTEN = Call(driver.Call(driver.Statement[None]("exec", "unlisten fairq_done"), ()), identity)


def _may_listen(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """LISTEN takes effect at a commit, which in a pipeline is for the application to say."""
    info = conn.info
    return (
        conn.autocommit
        and info.transaction_status == TransactionStatus.IDLE
        and info.pipeline_status == PipelineStatus.OFF
    )


def _watch_call(id: int) -> Call[bool, bool]:
    return Call(queries.watch_task.call(id=id), identity)


def _listens(conn: psycopg.Connection[Any], id: int) -> bool:
    """Listen, then watch: an end in between is found by the look that follows. Where the application listens
    itself, its notifications are its own.
    """
    if not _may_listen(conn) or run(conn, _LISTENS):
        return False
    try:
        run(conn, _LISTEN)
        run(conn, _watch_call(id))
    except BaseException as exc:
        if not conn.closed:
            run(conn, _UNLISTEN)
        if isinstance(exc, DatabaseError) and exc.sqlstate in _NOT_ALLOWED:
            return False
        raise
    return True


async def _listens_async(conn: psycopg.AsyncConnection[Any], id: int) -> bool:
    if not _may_listen(conn) or await run(conn, _LISTENS):
        return False
    try:
        await run(conn, _LISTEN)
        await run(conn, _watch_call(id))
    except BaseException as exc:
        if not conn.closed:
            await run(conn, _UNLISTEN)
        if isinstance(exc, DatabaseError) and exc.sqlstate in _NOT_ALLOWED:
            return False
        raise
    return True


def _hear(conn: psycopg.Connection[Any], id: int, seconds: float) -> None:
    with translating():
        for notice in conn.notifies(timeout=seconds):
            if _names(notice, id):
                break


async def _hear_async(conn: psycopg.AsyncConnection[Any], id: int, seconds: float) -> None:
    with translating():
        async for notice in conn.notifies(timeout=seconds):
            if _names(notice, id):
                break


def _names(notice: psycopg.Notify, id: int) -> bool:
    # Of a large batch the engine does not name the tasks.
    return notice.channel == "fairq_done" and (not notice.payload or str(id) in notice.payload.split(","))
