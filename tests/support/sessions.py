"""Races without sleeping: statements in the background, and seeing a session wait for a lock.

first.execute("select … for update")
second = in_background(other, "update …")        # blocks
wait_until_blocked(observer, pid_of(other))
first.commit()
second.result()
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg.abc import Params, QueryNoTemplate

from tests.support.database import MANAGED

# Only ever reached when a test is about to fail.
PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.005

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


def pid_of(conn: psycopg.Connection[Any]) -> int:
    """The session's process id, as pg_stat_activity shows it."""
    if not MANAGED or conn.info.host.startswith("/"):
        return conn.info.backend_pid
    # PgBouncer's client, by TCP, has none; its transaction has one, as long as it is open.
    name = conn.info.get_parameters()["application_name"]
    found: Rows = []
    with psycopg.connect(os.environ["FAIRQ_TEST_ADMIN"], autocommit=True) as admin:
        query = "select pid from pg_stat_activity where application_name = %s and state <> 'idle'"

        def has_one() -> bool:
            found[:] = admin.execute(query, [name]).fetchall()
            return bool(found)

        wait_until(has_one, f"{name} has a session")
    return int(found[0][0])


def call_in_background(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a thread; `result(future)` waits for it, and raises what it raised."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    # A daemon: when the test fails before it unblocks the statement, the thread does not hold up the run.
    threading.Thread(target=run, daemon=True).start()
    return future


def in_background(
    conn: psycopg.Connection[Any], query: QueryNoTemplate, params: Params | None = None
) -> "Future[Rows]":
    """Run one statement in a thread. The future has its rows, or none if it returns nothing."""

    def run() -> Rows:
        cursor = conn.execute(query, params)
        return cursor.fetchall() if cursor.description else []

    return call_in_background(run)


def result(future: "Future[T]") -> T:
    """The result of the background call. Raises TimeoutError if it does not end."""
    return future.result(PATIENCE_SECONDS)


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE_SECONDS) -> None:
    """Poll until `condition` holds. `what` completes "waited in vain until …"."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        if waited > patience:
            raise TimeoutError(f"waited in vain until {what}")
        # Looking takes time from those who are waited for: the longer it lasts, the less often.
        time.sleep(min(max(POLL_SECONDS, waited / 10), 10 * POLL_SECONDS))


def survivor(
    ended: "dict[psycopg.Connection[Any], Future[T]]",
) -> tuple[psycopg.Connection[Any], T]:
    """Of two sessions that wait for each other PostgreSQL ends one. The other one, and what it got; it is
    still to commit.
    """
    wait_until(lambda: any(f.done() and f.exception() for f in ended.values()), "one of the two fails")
    victim = next(conn for conn, f in ended.items() if f.done() and f.exception())
    with pytest.raises(psycopg.errors.DeadlockDetected):
        result(ended.pop(victim))
    victim.rollback()
    ((conn, future),) = ended.items()
    return conn, result(future)


def is_blocked(observer: psycopg.Connection[Any], pid: int) -> bool:
    """Whether the session waits for a lock now. `observer` must be in autocommit to see that."""
    found = observer.execute(
        """
        select exists (select from pg_catalog.pg_locks as l where l.pid = a.pid and not l.granted)
           and a.wait_event_type = 'Lock'
        from pg_catalog.pg_stat_activity as a
        where a.pid = %s
        """,
        [pid],
    ).fetchone()
    return found is not None and bool(found[0])


def kill(observer: psycopg.Connection[Any], victim: psycopg.Connection[Any]) -> None:
    """End the session as an administrator or the kernel would, and wait until it is gone."""
    pid = pid_of(victim)
    observer.execute("select pg_terminate_backend(%s::integer)", [pid])
    gone = "select not exists (select from pg_stat_activity where pid = %s)"
    wait_until(lambda: bool(observer.execute(gone, [pid]).fetchall()[0][0]), "the killed session is gone")


def wait_until_blocked(
    observer: psycopg.Connection[Any], pid: int, patience: float = PATIENCE_SECONDS
) -> list[int]:
    """Wait until the session waits for a lock; returns the process ids of those that hold it up."""
    if not observer.autocommit:
        raise ValueError("the observer must be in autocommit: statistics stand still within a transaction")
    try:
        wait_until(lambda: is_blocked(observer, pid), f"session {pid} waits for a lock", patience)
    except TimeoutError as exc:
        exc.add_note(f"sessions: {activity(observer)}")
        raise
    row = observer.execute("select pg_catalog.pg_blocking_pids(%s)", [pid]).fetchone()
    assert row is not None
    return list(row[0])


def activity(observer: psycopg.Connection[Any]) -> Rows:
    """What each client session runs and waits for."""
    return observer.execute(
        """
        select a.pid, a.application_name, a.state, a.wait_event_type, a.wait_event, a.query
        from pg_catalog.pg_stat_activity as a
        where a.backend_type = 'client backend' and a.pid <> pg_catalog.pg_backend_pid()
        order by a.pid
        """
    ).fetchall()
