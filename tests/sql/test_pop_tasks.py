"""pop_tasks: what it hands out and refuses, and that it never comes back empty while something can run."""

import psycopg
import pytest

from tests.support.calls import (
    NOON,
    Conn,
    at,
    create,
    create_many,
    field,
    finish,
    maintain,
    needs_one_order,
    pop,
    promote,
    refused,
    register,
    run,
    start,
    state,
)
from tests.support.database import Database


def test_a_fresh_install_serves_a_task_with_all_defaults(db: Conn) -> None:
    """F2, F3, S33: one call creates, one call pops, nothing has to be configured."""
    id_ = create(db)
    worker = register(db)
    ((popped, attempt, group, started),) = run(
        db,
        "select id, attempt, group_key, started_at is not null from fairq.pop_tasks('default', 10, %s)",
        worker,
    )
    assert (popped, attempt, group, started) == (id_, 1, "bob", True)
    assert (state(db, id_), field(db, id_, "worker_id")) == ("running", worker)
    assert pop(db, worker, 1) == []


@pytest.mark.parametrize("limit", [None, 0, -1, 100_001])
def test_a_limit_out_of_range_is_refused(db: Conn, limit: int | None) -> None:
    create(db)
    worker = register(db)
    with refused(db, "QF007"):
        run(db, "select fairq.pop_tasks('default', %s, %s)", limit, worker)


@pytest.mark.parametrize("queue", [None, "", "nowhere"])
def test_an_unknown_queue_is_refused(db: Conn, queue: str | None) -> None:
    worker = register(db)
    with refused(db, "QF003"):
        run(db, "select fairq.pop_tasks(%s, 1, %s)", queue, worker)


@pytest.mark.parametrize("stranger", [None, 0, 4711])
def test_an_unknown_worker_is_refused(db: Conn, stranger: int | None) -> None:
    create(db)
    with refused(db, "QF004"):
        run(db, "select fairq.pop_tasks('default', 1, %s)", stranger)


@pytest.mark.parametrize("lease", ["0", "-1 second"])
def test_a_claim_lease_that_is_not_positive_is_refused(db: Conn, lease: str) -> None:
    worker = register(db)
    with refused(db, "QF009"):
        run(db, "select fairq.pop_tasks('default', 1, %s, %s)", worker, lease)


def test_a_pop_that_would_promote_is_refused_outside_read_committed(database: Database) -> None:
    conn = database.connect()
    worker = register(conn)
    create(conn)
    conn.commit()
    conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error) as caught:
        pop(conn, worker, 1)
    assert caught.value.sqlstate == "QF005"
    assert caught.value.diag.message_hint


def test_the_limit_bounds_what_is_returned_and_the_order_is_the_served_one(db: Conn) -> None:
    """F8, H28, H32: one task of each group per round."""
    needs_one_order(db)
    worker = register(db)
    promote(db)
    bob = create_many(db, "bob", 3)
    alice = create_many(db, "alice", 3)
    assert pop(db, worker, 4) == [bob[0], alice[0], bob[1], alice[1]]
    assert pop(db, worker, 10) == [bob[2], alice[2]]


def test_with_a_claim_lease_tasks_are_claimed_and_do_not_run_yet(db: Conn) -> None:
    """H20: a prefetched task has a lease and no start."""
    at(db, "12:00:00")
    worker = register(db)
    id_ = create(db)
    assert pop(db, worker, 1, lease="30 seconds") == [id_]
    assert state(db, id_) == "claimed"
    assert field(db, id_, "started_at") is None
    assert str(field(db, id_, "lease_expires_at - interval '30 seconds'")) == NOON.replace("+00", "+00:00")


def test_expired_tasks_in_front_do_not_hide_one_that_can_run(db: Conn) -> None:
    """HR11, I8: one pop of one task passes any number of expired ones."""
    at(db, "12:00:00")
    worker = register(db)
    late = create_many(db, "bob", 10, expires_at="2030-01-01 12:00:30+00")
    good = create(db)
    assert promote(db) == 11
    at(db, "12:00:31")
    assert pop(db, worker, 1) == [good]
    assert {state(db, id_) for id_ in late} == {"expired"}


def test_a_task_past_its_deadline_expires_at_promotion(db: Conn) -> None:
    """H41, HR11: it never becomes queued, and no attempt is counted."""
    at(db, "12:00:00")
    worker = register(db)
    id_ = create(db, expires_at="2030-01-01 12:00:30+00")
    at(db, "12:00:30")
    assert pop(db, worker, 1) == []
    assert run(db, "select outcome, attempt, started_at from fairq.finished_tasks where id = %s", id_) == [
        ("expired", 0, None)
    ]


def test_a_task_past_its_deadline_expires_at_start(db: Conn) -> None:
    """HR12: the deadline passed in the worker's buffer, the body does not run."""
    at(db, "12:00:00")
    worker = register(db)
    id_ = create(db, expires_at="2030-01-01 12:00:30+00")
    assert pop(db, worker, 1, lease="1 hour") == [id_]
    at(db, "12:00:30")
    assert start(db, worker, [id_]) == []
    assert state(db, id_) == "expired"


def test_a_schedule_that_is_heard_of_when_it_is_due_is_popped_at_once(db: Conn) -> None:
    """HR10, S3, I8: nobody polled between creation and due time."""
    at(db, "12:00:00")
    worker = register(db)
    promote(db)
    id_ = create(db, run_at="2030-01-01 12:00:10+00")
    at(db, "12:00:10")
    assert pop(db, worker, 1) == [id_]
    assert finish(db, worker, [id_], "retry", delay="0") == [id_]
    assert pop(db, worker, 1) == [id_]


def test_groups_whose_waiting_tasks_were_cancelled_do_not_hide_others(db: Conn) -> None:
    """I8: lanes without tasks are passed, however few lanes a pass looks at."""
    run(db, "update fairq.queues set ready_target = 1")
    worker = register(db)
    promote(db)
    ids = [create(db, f"g{n % 12}") for n in range(36)]
    promote(db)
    run(db, "select fairq.cancel_task(id) from fairq.tasks where group_key <> 'g11'")
    assert [pop(db, worker, 1) for _ in range(4)] == [[ids[11]], [ids[23]], [ids[35]], []]


def test_cheap_tasks_beside_dear_ones_do_not_stop_the_queue(db: Conn) -> None:
    """I8: the horizon may lie before the middle of the ready set."""
    run(db, "update fairq.queues set ready_target = 40")
    worker = register(db)
    for group in "abc":
        create_many(db, group, 50, cost=1000)
    create_many(db, "z", 50, cost=0.001)
    assert sum(len(pop(db, worker, 1)) for _ in range(200)) == 200


def test_expired_newcomers_do_not_stop_the_queue(db: Conn) -> None:
    """I8: a newcomer whose first tasks are all expired lowers the horizon and promotes nothing."""
    run(db, "update fairq.queues set ready_target = 10")
    at(db, "12:00:00")
    worker = register(db)
    promote(db)
    create_many(db, "a", 30)
    assert len(pop(db, worker, 1)) == 1
    create_many(db, "b", 15, expires_at="2030-01-01 11:00:00+00")
    create(db, "b")
    assert sum(len(pop(db, worker, 1)) for _ in range(40)) == 30


def test_a_claim_whose_lease_ran_out_goes_back_in_line_with_its_attempt(db: Conn) -> None:
    """H3, H20: claimed by one worker, never started, taken over by another; no attempt is burned."""
    at(db, "12:00:00")
    first, second = register(db), register(db)
    id_ = create(db)
    assert pop(db, first, 1, lease="10 seconds") == [id_]
    at(db, "12:00:10")
    assert maintain(db)["unclaimed"] == 1
    assert pop(db, second, 1) == [id_]
    assert field(db, id_, "max_attempts") - field(db, id_, "attempt") == 4
    assert start(db, first, [id_]) == []


def test_creating_promoting_and_popping_work_in_one_transaction(db: Conn) -> None:
    """F24: own rings are heard once, before and after a promotion of their transaction, with savepoints."""
    worker = register(db)
    first = create(db)
    promote(db)
    run(db, "savepoint s")
    create(db, "lost")
    assert promote(db) == 1
    run(db, "rollback to savepoint s")
    second = create(db)
    promoted = create(db, "alice")
    assert promote(db) == 2
    third = create(db)
    assert sorted(pop(db, worker, 10)) == sorted([first, second, promoted, third])
    assert pop(db, worker, 10) == []


def test_a_pop_that_rolls_back_leaves_everything_as_it_was(database: Database) -> None:
    """I1: the tasks go to the next one who asks, in the same order, at the first attempt."""
    conn, other = database.connect(), database.connect()
    worker = register(conn)
    ids = create_many(conn, "bob", 3)
    conn.commit()
    assert pop(conn, worker, 2) == ids[:2]
    conn.rollback()
    assert pop(other, worker, 3) == ids
    assert {field(other, id_, "attempt") for id_ in ids} == {1}


def test_a_pop_in_flight_does_not_keep_the_rest_of_the_backlog_waiting(database: Database) -> None:
    """I8: the client that holds the first task hangs; others go past it and past the end of the ready set."""
    conn, hanging = database.connect(autocommit=True), database.connect()
    run(conn, "update fairq.queues set ready_target = 10")
    worker = register(conn)
    ids = create_many(conn, "bob", 100)
    promote(conn)
    assert pop(hanging, worker, 1) == ids[:1]
    assert [id_ for _ in range(20) for id_ in pop(conn, worker, 7)] == ids[1:]
    hanging.rollback()
    assert pop(conn, worker, 7) == ids[:1]


def test_expired_tasks_waiting_in_front_do_not_hide_one_that_can_run(db: Conn) -> None:
    """I8: promotion ends them one by one, and promotes nothing meanwhile."""
    run(db, "update fairq.queues set ready_target = 1")
    at(db, "12:00:00")
    worker = register(db)
    promote(db)
    create_many(db, "bob", 10, expires_at="2030-01-01 11:00:00+00")
    good = create(db)
    assert pop(db, worker, 1) == [good]


def test_expired_tasks_that_come_back_in_line_do_not_hide_one_that_can_run(db: Conn) -> None:
    """I8: ending them moves neither the horizon nor what the lane knows of its line."""
    run(db, "update fairq.queues set ready_target = 1")
    at(db, "12:00:00")
    worker = register(db)
    create_many(db, "bob", 10, expires_at="2030-01-01 12:00:10+00")
    good = create(db)
    assert promote(db, limit=20) == 11
    run(db, "select fairq.pause_group('default', 'bob')")
    promote(db)
    run(db, "select fairq.resume_group('default', 'bob')")
    at(db, "12:00:11")
    assert pop(db, worker, 1) == [good]


def lanes(db: Conn) -> list[tuple[str, ...]]:
    return run(db, "select group_key from fairq.lanes where queue = 'default' order by 1")


@pytest.mark.usefixtures("one_shard")
def test_tasks_that_come_when_nothing_waits_leave_a_tick_and_no_lane(database: Database) -> None:
    conn = database.connect(autocommit=True)
    worker = register(conn)
    bob, alice = create_many(conn, "bob", 3), create(conn, "alice")
    with conn.transaction():
        (before,) = run(conn, "select tick, clock from fairq._tick(0, 'default')")
        assert pop(conn, worker, 10) == [bob[0], alice, *bob[1:]]
        assert lanes(conn) == []
        assert run(conn, "select tick from fairq._tick(0, 'default')") == [(before[0] + 1,)]
    # The clock goes past them: whoever comes next pays for nothing.
    carol = create(conn, "carol")
    assert pop(conn, worker, 10) == [carol]
    ((clock,),) = run(conn, "select clock from fairq._tick(0, 'default')")
    assert clock == before[1] + 3 * 2**20
    assert finish(conn, worker, [*bob, alice, carol]) == [*bob, alice, carol]


@pytest.mark.parametrize(
    ("odd", "popped"),
    [
        ("""fairq.configure_group('default', 'bob', '{"weight": 2}')""", 3),
        ("""fairq.configure_queue('default', '{"group_max_running": 2}')""", 2),
        ("""fairq.configure_queue('default', '{"fairness": "time"}')""", 3),
        ("fairq.create_task('bob', '{}', p_concurrency_key => 'k')", 4),
        ("fairq.create_task('bob', '{}', p_expires_at => clock_timestamp() - interval '1 second')", 3),
        ("fairq.cancel_task(max(id)) from fairq.tasks", 2),
        (
            "count(*) from fairq.create_tasks(array_fill('bob'::text, '{9}'), array_fill('1'::jsonb, '{9}'))",
            10,
        ),
    ],
    ids=["weight", "cap", "time", "key", "deadline", "wish", "too many"],
)
def test_what_is_not_plain_goes_the_whole_way(db: Conn, odd: str, popped: int) -> None:
    worker = register(db)
    create_many(db, "bob", 3)
    run(db, f"select {odd}")
    assert len(pop(db, worker, 10)) == popped
    assert lanes(db) == [("bob",)]
