"""A queue that drains takes nothing new, and serves what it has to the end."""

from collections.abc import Callable

import pytest

from tests.support.calls import (
    Conn,
    at,
    call,
    create,
    create_many,
    finish,
    one,
    pop,
    refused,
    register,
    release,
    run,
    state,
    written,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound


def live(conn: Conn, queue: str = "default") -> int:
    return int(
        one(
            conn,
            "select scheduled + overflow + blocked + queued + claimed + running"
            " from fairq.queue_stats where queue = %s",
            queue,
        )
    )


def test_new_tasks_are_refused_and_nothing_changes(conn: Conn) -> None:
    """Each way to bring one, whatever its state would be."""
    failed = create(conn, "bob", max_attempts=1)
    bob = register(conn)
    finish(conn, bob, pop(conn, bob), "failed")
    call(conn, "drain_queue", "default")
    for more in ({}, {"run_at": "2031-01-01"}, {"idempotency_key": "new"}, {"concurrency_key": "k"}):
        with refused(conn, "QF016"):
            create(conn, "bob", **more)
    with refused(conn, "QF016"):
        create_many(conn, "bob", 3)
    with refused(conn, "QF016"):
        create_many(conn, "bob", 2, idempotency_keys=["a", "b"])
    with refused(conn, "QF016"):
        call(conn, "retry_task", failed)
    call(conn, "configure_queue", "other")
    assert create(conn, "bob", queue="other") > 0


def test_what_is_there_is_served_to_the_end(conn: Conn) -> None:
    """Ready and waiting ones, retries, schedules, those that wait for a key, and what a worker gives back."""
    ids = create_many(conn, "bob", 3)
    later = create(conn, "bob", run_at="2030-01-01 12:30+00")
    keyed = [create(conn, "carol", concurrency_key="k") for _ in range(2)]
    bob = register(conn)
    held = pop(conn, bob, 3)
    assert ids[0] in held
    call(conn, "drain_queue", "default")
    finish(conn, bob, held[:1], "retry", delay="10 minutes")
    release(conn, bob, held[1:2], 1)
    finish(conn, bob, held[2:])
    for moment in ("12:00:01", "12:10:00", "12:30:00", "12:31:00"):
        at(conn, moment)
        while batch := pop(conn, bob):
            finish(conn, bob, batch)
    assert live(conn) == 0
    assert {state(conn, task) for task in (*ids, later, *keyed)} == {"succeeded"}
    assert_sound(conn)


def test_a_scheduled_task_may_be_hurried_while_its_queue_drains(conn: Conn) -> None:
    later = create(conn, "bob", run_at="2031-01-01")
    call(conn, "drain_queue", "default")
    assert one(conn, "select fairq.retry_task(%s)", later)
    assert pop(conn, register(conn)) == [later]


def test_a_known_idempotency_key_is_answered_all_the_same(conn: Conn) -> None:
    """It is no new task: a client that repeats what it does not know to have worked learns that it did."""
    first = create(conn, "bob", idempotency_key="a")
    second = create(conn, "bob", idempotency_key="b")
    call(conn, "drain_queue", "default")
    assert create(conn, "bob", idempotency_key="a") == first
    assert create_many(conn, "bob", 2, idempotency_keys=["b", "a"]) == [second, first]
    with refused(conn, "QF016"):
        create_many(conn, "bob", 2, idempotency_keys=["a", "c"])


def test_resuming_takes_new_tasks_again_and_serves_them(conn: Conn) -> None:
    call(conn, "drain_queue", "default")
    call(conn, "pause_queue", "default")
    call(conn, "resume_queue", "default")
    task = create(conn)
    assert pop(conn, register(conn)) == [task]


def test_a_paused_queue_that_drains_does_neither(conn: Conn) -> None:
    """Two settings: the one says what comes in, the other what goes out."""
    create_many(conn, "bob", 2)
    call(conn, "pause_queue", "default")
    call(conn, "drain_queue", "default")
    assert pop(conn, register(conn)) == []
    with refused(conn, "QF016"):
        create(conn)


def test_draining_since_the_first_call(conn: Conn) -> None:
    query = (
        "select to_char(draining_at at time zone 'UTC', 'HH24:MI') from fairq.queues where queue = 'default'"
    )
    assert one(conn, query) is None
    call(conn, "drain_queue", "default")
    at(conn, "13:00:00")
    call(conn, "drain_queue", "default")
    assert one(conn, query) == "12:00"
    call(conn, "configure_queue", "default", max_attempts=7)
    assert one(conn, query) == "12:00", "other settings leave it alone"


def test_draining_writes_one_row_however_much_is_waiting(conn: Conn) -> None:
    create_many(conn, "bob", 5000)
    with conn.transaction():
        before = written(conn)
        call(conn, "drain_queue", "default")
        after = written(conn)
    assert sum(after.values()) - sum(before.values()) == 1


@pytest.mark.parametrize("bring", [lambda c: create(c), lambda c: create_many(c, "bob", 2)])
def test_what_was_created_before_is_let_through(
    conn: Conn, database: Database, bring: Callable[[Conn], object]
) -> None:
    """I2: neither waits for the other. A transaction open when draining begins commits its tasks, and they
    are served.
    """
    app = database.connect()
    bring(app)
    run(conn, "set lock_timeout = '1s'")
    call(conn, "drain_queue", "default")
    run(app, "set lock_timeout = '1s'")
    with refused(conn, "QF016"):
        create(conn)
    app.commit()
    bob = register(conn)
    assert finish(conn, bob, pop(conn, bob))
    assert live(conn) == 0
    app.close()
