"""The helpers of race tests see real locks."""

import psycopg
import pytest

from tests.support.database import Database
from tests.support.sessions import (
    call_in_background,
    in_background,
    is_blocked,
    pid_of,
    result,
    wait_until,
    wait_until_blocked,
)


@pytest.fixture
def locked(database: Database) -> Database:
    with database.connect(autocommit=True) as conn:
        conn.execute("create table guarded (id int primary key, n int)")
        conn.execute("insert into guarded values (1, 0)")
    return database


def test_a_blocked_session_is_seen_with_the_one_that_blocks_it(locked: Database) -> None:
    observer = locked.connect(autocommit=True, application_name="observer")
    holder = locked.connect(application_name="holder")
    waiter = locked.connect(application_name="waiter")
    holder.execute("select from guarded where id = 1 for update")
    assert not is_blocked(observer, pid_of(waiter))

    waiting = in_background(waiter, "update guarded set n = n + 1 where id = 1 returning n")

    assert wait_until_blocked(observer, pid_of(waiter)) == [pid_of(holder)]
    holder.commit()
    assert result(waiting) == [(1,)]
    waiter.rollback()


def test_waiting_for_a_session_that_never_blocks_ends_and_tells_who_runs_what(locked: Database) -> None:
    observer = locked.connect(autocommit=True)
    idle = locked.connect(application_name="idle one")
    with pytest.raises(TimeoutError, match="waits for a lock") as caught:
        wait_until_blocked(observer, pid_of(idle), patience=0.05)
    assert "idle one" in caught.value.__notes__[0]


def test_an_observer_inside_a_transaction_is_refused(locked: Database) -> None:
    observer = locked.connect()
    with pytest.raises(ValueError, match="autocommit"):
        wait_until_blocked(observer, 1)


def test_an_error_in_the_background_is_raised_by_its_result(locked: Database) -> None:
    conn = locked.connect()
    with pytest.raises(psycopg.errors.DivisionByZero):
        result(in_background(conn, "select 1 / 0"))
    with pytest.raises(KeyError):
        result(call_in_background(lambda: {"here": 1}["missing"]))


def test_a_deadlock_shows_within_the_short_timeout_of_the_test_server(locked: Database) -> None:
    one, two = locked.connect(), locked.connect()
    observer = locked.connect(autocommit=True)
    observer.execute("insert into guarded values (2, 0)")
    one.execute("update guarded set n = 1 where id = 1")
    two.execute("update guarded set n = 1 where id = 2")
    crossing = in_background(one, "update guarded set n = 2 where id = 2")
    wait_until_blocked(observer, pid_of(one))
    closing = in_background(two, "update guarded set n = 2 where id = 1")
    # PostgreSQL picks the victim; the other one is let through once the victim has gone.
    ended = {one: crossing, two: closing}
    wait_until(
        lambda: any(future.done() and future.exception() for future in ended.values()), "one of the two fails"
    )
    victim = next(conn for conn, future in ended.items() if future.done() and future.exception())
    with pytest.raises(psycopg.errors.DeadlockDetected):
        result(ended.pop(victim))
    victim.rollback()
    assert [result(survivor) for survivor in ended.values()] == [[]]
