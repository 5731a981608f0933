"""explain_task: why a task is not running; the reason is for people, the rest for programs."""

import pytest

from tests.support.calls import (
    Conn,
    Row,
    at,
    create,
    create_many,
    finish,
    maintain,
    pop,
    promote,
    register,
    run,
)
from tests.support.database import Database

COLUMNS = "state, ahead_in_group, ahead, next_look_at::text, worker_id, attempt, max_attempts, reason"


def explain(conn: Conn, id_: int) -> Row:
    (row,) = run(conn, f"select {COLUMNS} from fairq.explain_task(%s)", id_)  # noqa: S608
    return row


def test_an_unknown_task_has_no_explanation(db: Conn) -> None:
    assert run(db, "select * from fairq.explain_task(4711)") == []
    assert run(db, "select * from fairq.explain_task(null)") == []


def test_a_task_nobody_works_on(db: Conn) -> None:
    """H40."""
    row = explain(db, create(db))
    assert row[:3] == ("overflow", 0, None)
    assert "no live worker" in row[-1]


def test_a_task_in_overflow_counts_what_its_group_has_before_it(db: Conn) -> None:
    register(db)
    ids = create_many(db, "bob", 3)
    create(db, "alice")
    high = create(db, priority=5)
    assert explain(db, ids[2])[:2] == ("overflow", 3)
    assert explain(db, ids[0])[:2] == ("overflow", 1)
    assert explain(db, high)[:2] == ("overflow", 0)


def test_a_queued_task_counts_what_is_served_before_it(db: Conn) -> None:
    worker = register(db)
    promote(db)
    bob, alice = create_many(db, "bob", 3), create_many(db, "alice", 3)
    promote(db)
    if len(run(db, "select from fairq.domains where queue = 'default'")) == 1:
        assert explain(db, alice[1])[:3] == ("queued", 1, 3)
    served = [i for i in pop(db, worker, 3) if i]
    assert explain(db, bob[2])[0] in ("queued", "running")
    assert all(explain(db, i)[0] == "running" for i in served)


def test_a_scheduled_task_says_when(db: Conn) -> None:
    at(db, "12:00:00")
    run(db, "set local timezone = 'UTC'")
    row = explain(db, create(db, run_at="2030-01-01 12:30:00+00"))
    assert (row[0], row[3]) == ("scheduled", "2030-01-01 12:30:00+00")


def test_a_task_that_waits_for_its_back_off_says_which_attempt_comes(db: Conn) -> None:
    at(db, "12:00:00")
    run(db, "set local timezone = 'UTC'")
    worker = register(db)
    id_ = create(db)
    pop(db, worker, 1)
    finish(db, worker, [id_], "retry", delay="1 minute")
    row = explain(db, id_)
    assert (row[0], row[3], row[5]) == ("scheduled", "2030-01-01 12:01:00+00", 1)
    assert "back-off" in row[-1]


def test_what_has_come_due_does_not_wait_for_its_time_any_more(db: Conn) -> None:
    at(db, "12:00:00")
    id_ = create(db, run_at="2030-01-01 12:30:00+00")
    at(db, "12:30:01")
    assert explain(db, id_)[3:] == (None, None, 0, 5, 'no live worker for queue "default"')
    register(db)
    run(db, "set local timezone = 'UTC'")
    assert explain(db, id_)[-1] == "due since 2030-01-01 12:30:00+00, waiting for promotion"


@pytest.mark.parametrize("held", [False, True])
def test_a_wish_to_cancel_that_nobody_has_heard_yet_is_told(db: Conn, held: bool) -> None:
    worker = register(db)
    id_ = create(db)
    if held:
        pop(db, worker, 1)
    run(db, "select fairq.cancel_task(%s)", id_)
    says = f"running by worker {worker}, attempt 1 of 5, asked to stop" if held else "cancelled, to be ended"
    assert explain(db, id_)[-1] == says


@pytest.mark.parametrize("lease", [None, "1 minute"])
def test_a_held_task_names_its_holder(db: Conn, lease: str | None) -> None:
    worker = register(db)
    id_ = create(db, max_attempts=3)
    pop(db, worker, 1, lease=lease)
    row = explain(db, id_)
    assert (row[0], *row[4:7]) == ("claimed" if lease else "running", worker, 1, 3)
    assert str(worker) in row[-1]


def test_an_expired_task_that_is_not_ended_yet_says_so(db: Conn) -> None:
    at(db, "12:00:00")
    register(db)
    id_ = create(db, expires_at="2030-01-01 12:00:10+00")
    at(db, "12:00:10")
    row = explain(db, id_)
    assert row[0] == "overflow"
    assert "expired" in row[-1]
    maintain(db)
    assert explain(db, id_)[0] == "expired"


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "cancelled", "expired"])
def test_an_ended_task_says_how_it_ended(db: Conn, outcome: str) -> None:
    worker = register(db)
    id_ = create(db)
    pop(db, worker, 1)
    finish(db, worker, [id_], outcome)
    row = explain(db, id_)
    assert (row[0], *row[4:6]) == (outcome, worker, 1)


def test_a_group_at_its_cap_is_the_reason(db: Conn) -> None:
    worker = register(db)
    run(db, """select fairq.configure_group('default', 'bob', '{"max_running": 1}')""")
    first, second = create_many(db, "bob", 2)
    assert pop(db, worker, 10) == [first]
    assert "bob" in explain(db, second)[-1]
    assert finish(db, worker, [first]) == [first]
    assert pop(db, worker, 10) == [second]


def test_a_key_without_places_is_the_reason_even_when_nobody_remembers_it(database: Database) -> None:
    """What is known of a key that nobody uses goes after a minute, its cap stays."""
    conn = database.connect(autocommit=True)
    at(conn, "12:00:00")
    worker = register(conn)
    run(conn, """select fairq.configure_key('k', '{"max_running": 0}')""")
    task = create(conn, concurrency_key="k")
    assert pop(conn, worker) == []
    for time in ("12:00:05", "12:02:00", "12:04:00"):
        at(conn, time)
        maintain(conn)
    assert run(conn, "select from fairq.lanes where queue = '#keys'") == []
    assert 'concurrency key "k": 0 tasks are in flight, the cap is 0' in explain(conn, task)[-1]


def test_explaining_changes_nothing(database: Database) -> None:
    """It can run on a standby."""
    conn = database.connect()
    id_ = create(conn)
    conn.commit()
    run(conn, "set transaction read only")
    assert explain(conn, id_)[0] == "overflow"
