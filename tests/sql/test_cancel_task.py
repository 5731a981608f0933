"""cancel_task: waiting tasks end, running ones are told, and nothing waits for anything."""

import pytest

from tests.support.calls import (
    Conn,
    at,
    create,
    create_many,
    finish,
    maintain,
    one,
    pop,
    promote,
    register,
    release,
    run,
    start,
    state,
)
from tests.support.database import Database
from tests.support.shards import neighbours


def cancel(conn: Conn, id_: int) -> bool:
    return bool(one(conn, "select fairq.cancel_task(%s)", id_))


def test_a_waiting_task_ends_at_the_next_promotion(db: Conn) -> None:
    worker = register(db)
    queued = create(db, "b")
    promote(db)
    overflow = create(db, "a")
    at(db, "12:00:00")
    scheduled = create(db, "c", run_at="2030-01-01 13:00:00+00")
    assert cancel(db, overflow)
    assert cancel(db, queued)
    assert cancel(db, scheduled)
    assert pop(db, worker, 10) == []
    assert [state(db, i) for i in (overflow, queued, scheduled)] == ["cancelled"] * 3
    maintain(db)
    assert one(db, "select count(*) from fairq.cancellations") == 0


def test_ended_and_unknown_tasks_cannot_be_cancelled(db: Conn) -> None:
    worker = register(db)
    id_ = create(db)
    pop(db, worker, 1)
    finish(db, worker, [id_])
    assert not cancel(db, id_)
    assert not cancel(db, 4711)
    assert not one(db, "select fairq.cancel_task(null)")
    assert state(db, id_) == "succeeded"


def test_a_cancellation_that_rolls_back_leaves_nothing(database: Database) -> None:
    """I1."""
    app, other = database.connect(), database.connect(autocommit=True)
    id_ = create(other)
    assert cancel(app, id_)
    app.rollback()
    assert pop(other, register(other), 1) == [id_]


def test_an_application_may_cancel_what_it_created_in_the_same_transaction(database: Database) -> None:
    app = database.connect()
    first, second = create_many(app, "bob", 2)
    assert cancel(app, first)
    app.commit()
    assert pop(app, register(app), 10) == [second]


def test_cancelling_locks_nothing_that_workers_need(database: Database) -> None:
    """I2: an open transaction with cancellations holds up neither promotion nor pop nor finish."""
    app, other = database.connect(), database.connect(autocommit=True)
    run(other, "set lock_timeout = '1s'")
    worker = register(other)
    ids = create_many(other, "bob", 3)
    assert pop(other, worker, 1) == ids[:1]
    for id_ in ids:
        assert cancel(app, id_)
    promote(other)
    assert pop(other, worker, 1) == ids[1:2]
    assert finish(other, worker, ids[:2]) == ids[:2]
    app.commit()
    assert pop(other, worker, 1) == []
    assert [state(other, i) for i in ids] == ["succeeded", "succeeded", "cancelled"]


@pytest.mark.parametrize("way", ["retire", "release", "retry", "lost", "claim"])
def test_a_cancelled_task_that_its_holder_gives_up_does_not_run_again(db: Conn, way: str) -> None:
    at(db, "12:00:00")
    worker, other = register(db, lease="1 minute"), register(db, lease="1 day")
    id_ = create(db)
    assert pop(db, worker, 1, lease="10 seconds" if way == "claim" else None) == [id_]
    assert cancel(db, id_)
    promote(db)
    if way == "retire":
        run(db, "select fairq.retire_worker(%s)", worker)
    elif way == "release":
        assert release(db, worker, [id_]) == [id_]
    elif way == "retry":
        assert finish(db, worker, [id_], "retry", delay="0") == [id_]
    else:
        at(db, "12:10:00")
        maintain(db)
    assert pop(db, other, 1) == []
    assert state(db, id_) == "cancelled"


def test_a_cancelled_task_whose_pop_rolls_back_does_not_run(database: Database) -> None:
    conn, other = database.connect(), database.connect(autocommit=True)
    worker, id_ = register(other), create(other)
    promote(other)
    assert pop(conn, worker, 1) == [id_]
    assert cancel(other, id_)
    promote(other)
    conn.rollback()
    assert pop(other, worker, 1) == []
    assert state(other, id_) == "cancelled"


def test_a_cancelled_task_may_be_run_again_by_hand(db: Conn) -> None:
    """The old wish does not stick to it."""
    worker = register(db)
    id_ = create(db)
    assert pop(db, worker, 1) == [id_]
    assert cancel(db, id_)
    assert finish(db, worker, [id_], "cancelled") == [id_]
    assert one(db, "select fairq.retry_task(%s)", id_)
    assert pop(db, worker, 1) == [id_]
    assert run(db, "select fairq.heartbeat(%s)", worker) == []


def test_cancelled_tasks_that_were_queued_cost_their_group_nothing(db: Conn) -> None:
    """I5: the clock does not move, and the group is served where its first cancelled task would have been."""
    worker = register(db)
    promote(db)
    alice_key, bob_key = neighbours(db, "alice", "bob")
    create(db, alice_key)
    bob = create_many(db, bob_key, 100)
    promote(db)
    for id_ in bob:
        cancel(db, id_)
    promote(db)
    create_many(db, alice_key, 50)
    again = create(db, bob_key)
    served = pop(db, worker, 100)
    assert again in served[:3]


def test_a_claimed_task_that_is_cancelled_may_still_be_started_and_its_worker_is_told(db: Conn) -> None:
    worker = register(db)
    id_ = create(db)
    assert pop(db, worker, 1, lease="1 minute") == [id_]
    assert cancel(db, id_)
    assert run(db, "select fairq.heartbeat(%s)", worker) == [(id_,)]
    assert start(db, worker, [id_]) == [id_]
    assert finish(db, worker, [id_], "cancelled") == [id_]
