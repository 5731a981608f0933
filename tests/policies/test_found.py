"""What somebody who set out to break the engine found, each as the smallest case that failed."""

from typing import Any

import pytest
from psycopg import IsolationLevel

from tests.support.calls import (
    LOCK_DOMAIN,
    Conn,
    at,
    call,
    create,
    create_all,
    create_many,
    finish,
    in_flight,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
    state,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound
from tests.support.moves import set_shards
from tests.support.plans import explain, shared_buffers
from tests.support.sessions import in_background, pid_of, result, wait_until, wait_until_blocked
from tests.support.stops import GATE, install_stops

pytestmark = pytest.mark.usefixtures("one_shard")


def rows_read(conn: Conn, table: str) -> int:
    """Rows of a table that this transaction has read so far."""
    return int(
        one(
            conn,
            "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables"
            " where schemaname = 'fairq' and relname = %s",
            table,
        )
    )


def test_a_rebuild_keeps_the_turn_of_a_group_that_waits_for_a_key(conn: Conn) -> None:
    """More tasks wait than one portion announces again."""
    bob = register(conn)
    create_many(conn, "bob", 5100, concurrency_keys=["k"] * 5100)
    held = pop(conn, bob, 1)
    for _ in range(15):
        pop(conn, bob, 1)
    call(conn, "rebuild", "default")
    for _ in range(15):
        pop(conn, bob, 1)
    finish(conn, bob, held)
    assert len(pop(conn, bob, 1)) == 1
    assert_sound(conn)


@pytest.mark.new_database
@pytest.mark.parametrize("parked", [200, 1600])
def test_what_was_given_a_key_is_found_without_a_walk_through_those_that_wait(
    conn: Conn, parked: int
) -> None:
    bob = register(conn)
    create_many(conn, "bob", parked, concurrency_keys=["k"] * parked)
    held = pop(conn, bob, 1)
    for _ in range(8):
        pop(conn, bob, 1)
    assert one(conn, "select count(*) from fairq.parked") == parked - 1
    for _ in range(3):
        finish(conn, bob, held)
        with conn.transaction():
            before = rows_read(conn, "tasks") + rows_read(conn, "parked")
            held = pop(conn, bob, 1)
            assert rows_read(conn, "tasks") + rows_read(conn, "parked") - before < 60
    assert_sound(conn)


def test_a_key_does_not_wait_with_a_task_that_is_ready_in_a_paused_queue(conn: Conn) -> None:
    for queue in ("x", "y"):
        call(conn, "configure_queue", queue)
    bob = register(conn, "x", "y")
    create(conn, "g1", queue="x", concurrency_key="k1")
    create(conn, "g2", queue="x", concurrency_key="k2")
    assert len(pop(conn, bob, 1, queue="x")) == 1
    call(conn, "pause_queue", "x")
    create(conn, "h", queue="y", concurrency_key="k2")
    maintain(conn)
    assert len(pop(conn, bob, 1, queue="y")) == 1
    assert_sound(conn)


def test_a_key_is_not_given_to_who_has_used_up_the_rate_of_its_queue(conn: Conn) -> None:
    call(conn, "configure_queue", "x", rate_limit=1, rate_period="1 hour", rate_burst=1)
    call(conn, "configure_queue", "y")
    bob = register(conn, "x", "y")
    create(conn, "h", queue="y", concurrency_key="k")
    held = pop(conn, bob, 1, queue="y")
    create(conn, "g1", queue="x", concurrency_key="k")
    assert pop(conn, bob, 1, queue="x") == []
    create(conn, "g2", queue="x")
    assert len(pop(conn, bob, 1, queue="x")) == 1
    create(conn, "h", queue="y", concurrency_key="k")
    assert pop(conn, bob, 1, queue="y") == []
    finish(conn, bob, held)
    for _ in range(2):
        maintain(conn)
    assert len(pop(conn, bob, 1, queue="y")) == 1


def test_a_first_pass_parks_a_bounded_number_of_tasks_however_many_groups(conn: Conn) -> None:
    bob = register(conn)
    for group in range(60):
        create_many(conn, f"g{group}", 40, concurrency_keys=["k"] * 40)
    with conn.transaction():
        pop(conn, bob, 1)
        assert one(conn, "select count(*) from fairq.parked") <= 8 * 600


@pytest.mark.parametrize("setting", ["group_max_running", "max_running"])
def test_a_rebuild_forgets_no_task_that_was_counted(conn: Conn, setting: str) -> None:
    """Also where the cap was taken away meanwhile, or came and was not heard of yet."""
    bob = register(conn)
    call(conn, "configure_queue", "default", **{setting: 2})
    create_many(conn, "bob", 2)
    assert len(pop(conn, bob, 10)) == 2
    call(conn, "configure_queue", "default", **{setting: None})
    create_many(conn, "bob", 4)
    call(conn, "rebuild", "default")
    promote(conn)
    call(conn, "configure_queue", "default", **{setting: 2})
    assert pop(conn, bob, 10) == []
    assert_sound(conn)


def test_a_cap_that_no_pass_has_heard_of_is_counted_by_a_rebuild(conn: Conn) -> None:
    bob = register(conn)
    create_many(conn, "bob", 10)
    assert len(pop(conn, bob, 5)) == 5
    run(
        conn,
        "insert into fairq.groups (shard_no, queue, group_key, max_running) values (0, 'default', 'bob', 5)",
    )
    call(conn, "rebuild", "default")
    assert pop(conn, bob, 10) == []
    assert in_flight(conn, "bob") == 5


def test_a_rebuild_gives_back_nothing_of_a_rate(conn: Conn) -> None:
    call(conn, "configure_queue", "y", rate_limit=1, rate_period="1 hour", rate_burst=1)
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour", rate_burst=1)
    bob = register(conn, "default", "y")
    create_many(conn, "bob", 3, queue="y")
    create_many(conn, "bob", 3)
    assert len(pop(conn, bob, 5, queue="y")) == len(pop(conn, bob, 5)) == 1
    for queue in ("default", "y"):
        call(conn, "rebuild", queue)
        assert pop(conn, bob, 5, queue="y") == pop(conn, bob, 5) == []


@pytest.mark.parametrize("by", ["a rate", "a breaker", "a hold"])
def test_a_rebuild_forgets_nobodys_limit_where_groups_come_to_share_something_else(
    conn: Conn, by: str
) -> None:
    """What was spent is in another unit then; a rate, a breaker and a hold are in none."""
    call(conn, "configure_queue", "default", fairness="cost")
    if by == "a rate":
        call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour", rate_burst=1)
    elif by == "a breaker":
        call(conn, "configure_group", "default", "bob", breaker_threshold=1, breaker_cooldown="1 hour")
    bob = register(conn)
    create_many(conn, "bob", 3)
    finish(conn, bob, pop(conn, bob, 1), "failed")
    if by == "a hold":
        call(conn, "hold_group", "default", "bob", "2030-01-01 13:00:00+00")
    promote(conn)
    call(conn, "rebuild", "default")
    call(conn, "configure_queue", "default", fairness="time")
    assert pop(conn, bob) == []
    assert_sound(conn)


def test_a_rate_that_is_reset_after_a_rebuild_brings_no_places_back(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", max_running=2, rate_limit=1000, rate_period="1 second")
    bob = register(conn)
    create_many(conn, "bob", 4)
    finish(conn, bob, pop(conn, bob, 2))
    call(conn, "rebuild", "default")
    call(conn, "reset_rate", "default", "bob")
    assert len(pop(conn, bob, 5)) == 2
    assert_sound(conn)


def test_a_cap_for_all_groups_holds_before_every_group_has_heard_of_it(conn: Conn) -> None:
    """Its rings are more than a pass hears."""
    bob = register(conn)
    groups = [f"g{number}" for number in range(5200)]
    create_all(conn, *groups)
    while pop(conn, bob, 2000):
        pass
    assert one(conn, "select count(*) from fairq.held") == 5200
    create_all(conn, *groups)
    promote(conn)
    call(conn, "configure_queue", "default", group_max_running=1)
    for _ in range(3):
        assert pop(conn, bob, 1000) == []


def test_settings_that_come_between_two_statements_of_a_promotion_are_not_lost(
    conn: Conn, database: Database
) -> None:
    install_stops(conn)
    bob = register(conn)
    create_many(conn, "bob", 5)
    assert len(pop(conn, bob, 5)) == 5
    create_many(conn, "bob", 50)
    popping = database.connect(autocommit=True)
    popping.execute("set stops.at = '_promote:4'")
    conn.execute("select pg_advisory_lock(%s)", [GATE])
    call_ = in_background(popping, "select count(*) from fairq.pop_tasks('default', 1, %s)", [bob])
    wait_until_blocked(conn, pid_of(popping))
    call(conn, "configure_queue", "default", group_max_running=5)
    conn.execute("select pg_advisory_unlock(%s)", [GATE])
    result(call_)
    pop(conn, bob, 50)
    assert one(conn, "select count(*) from fairq.held") <= 6
    assert pop(conn, bob, 50) == []
    assert_sound(conn)


def test_a_paused_group_is_not_served_when_a_pop_of_it_rolls_back(conn: Conn, database: Database) -> None:
    bob = register(conn)
    ids = create_many(conn, "bob", 20)
    promote(conn)
    popping = database.connect()
    assert len(pop(popping, bob, 10)) == 10
    call(conn, "pause_group", "default", "bob")
    maintain(conn)
    popping.rollback()
    assert pop(conn, bob, 20) == []
    assert {state(conn, one_) for one_ in ids} == {"overflow"}


def test_nobody_who_holds_a_task_waits_for_a_pop_that_met_the_wish_to_cancel_it(
    conn: Conn, database: Database
) -> None:
    bob = register(conn)
    create_all(conn, "bob", "al")
    held = pop(conn, bob, 1)
    call(conn, "cancel_task", held[0])
    hung = database.connect()
    assert len(pop(hung, bob, 1)) == 1
    conn.execute("set lock_timeout = '1s'")
    assert finish(conn, bob, held) == held


def test_the_probe_of_a_breaker_is_not_made_ready_in_advance(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", breaker_threshold=1, breaker_cooldown="1 second")
    bob = register(conn)
    create_many(conn, "bob", 9)
    finish(conn, bob, pop(conn, bob, 1), "failed")
    for second in (2, 4, 6, 8):
        at(conn, f"12:00:0{second}")
        maintain(conn)
    assert len(pop(conn, bob, 5)) == 1


def test_an_idle_poll_of_a_queue_with_a_cap_leaves_no_trace(conn: Conn) -> None:
    call(conn, "configure_queue", "default", max_running=2)
    bob = register(conn)
    create_many(conn, "bob", 3)
    held = pop(conn, bob, 5)
    assert len(held) == 2
    for left in (1, 0):
        with conn.transaction():
            assert pop(conn, bob, 5) == []
            assert one(conn, "select pg_current_xact_id_if_assigned() is null")
        finish(conn, bob, held)
        held = pop(conn, bob, 5)
        assert len(held) == left


def test_settings_go_with_their_groups_to_other_shards(conn: Conn) -> None:
    for group in ("a", "b", "c", "d", "e"):
        call(conn, "configure_group", "default", group, max_running=1)
    call(conn, "configure_key", "k", max_running=3)
    for shards in (4, 1, 4):
        set_shards(conn, shards)
        rows = run(conn, "select shard_no from fairq.groups where queue = '#keys' order by 1")
        assert [row[0] for row in rows] == list(range(shards))
        assert one(
            conn,
            "select bool_and(g.shard_no = fairq._shard_of(g.group_key, %s)) from fairq.groups g"
            " where g.queue = 'default'",
            shards,
        )
    bob = register(conn)
    for group in ("a", "b", "c", "d", "e"):
        create_many(conn, group, 2)
    assert len(pop(conn, bob, 10)) == 5


@pytest.mark.new_database
def test_many_equal_deadlines_are_met_a_portion_at_a_time(conn: Conn) -> None:
    run(
        conn,
        "select fairq.create_tasks(array_fill('bob'::text, array[900]), array_fill('1'::jsonb, array[900]),"
        " p_expires_at => clock_timestamp() + interval '50 milliseconds')",
    )
    run(conn, "select pg_sleep(0.1)")
    with conn.transaction():
        before = rows_read(conn, "tasks")
        assert one(conn, "select fairq.maintain(100, 'expiry')") == {"expired": 100}
        assert rows_read(conn, "tasks") - before < 800
    assert sum(one(conn, "select fairq.maintain(100, 'expiry')").get("expired", 0) for _ in range(9)) == 800


@pytest.mark.parametrize("slots", [0, 100_001, 2**31 - 1])
def test_a_worker_has_a_number_of_slots_that_somebody_could_have(conn: Conn, slots: int) -> None:
    with refused(conn, "QF007"):
        register(conn, slots=slots)


def test_a_purge_beside_a_due_task_that_somebody_holds_is_short(conn: Conn, database: Database) -> None:
    due: Any = one(
        conn, "select fairq.create_task('carol', '1', p_run_at => clock_timestamp() + interval '20 ms')"
    )
    retrying = database.connect()
    call(retrying, "retry_task", due)
    run(conn, "select pg_sleep(0.05)")
    create_many(conn, "bob", 3)
    promote(conn)
    before: Any = one(conn, "select max(tick) from fairq.ticks where queue = 'default'")
    assert one(conn, "select fairq.purge_group('default', 'bob')") == 3
    assert one(conn, "select max(tick) from fairq.ticks where queue = 'default'") - before < 15


def test_what_was_given_a_key_and_stands_in_line_as_well_is_served_once(conn: Conn) -> None:
    """The first comes back, and the line begins with it again."""
    bob = register(conn)
    ids = create_many(conn, "bob", 4, concurrency_keys=["k"] * 4)
    held = pop(conn, bob, 1)
    assert pop(conn, bob, 5) == []
    with conn.transaction():
        release(conn, bob, held)
        call(conn, "configure_key", "k", max_running=3)
        popped = [*pop(conn, bob, 5), *pop(conn, bob, 5)]
    assert len(popped) == len(set(popped)) == 3
    finish(conn, bob, popped)
    assert sorted([*popped, *pop(conn, bob, 5)]) == ids
    assert_sound(conn)


@pytest.mark.parametrize("priorities", [[0] * 5, [1, 0, 0, 0, 0]], ids=["alike", "higher"])
@pytest.mark.parametrize("outcome", ["released", "retry"])
def test_a_keyed_task_that_comes_back_is_served_before_younger_ones_that_wait(
    conn: Conn, outcome: str, priorities: list[int]
) -> None:
    """Its place comes free before the lane of its group hears of it (I12)."""
    bob = register(conn)
    ids = create_many(conn, "bob", 5, concurrency_keys=["k"] * 5, priorities=priorities)
    held = pop(conn, bob, 1)
    assert [*held, *pop(conn, bob, 1)] == ids[:1]
    if outcome == "released":
        release(conn, bob, held)
    else:
        finish(conn, bob, held, "retry", delay="0 seconds")
    served = []
    while held := pop(conn, bob, 1):
        served += held
        finish(conn, bob, held)
        assert_sound(conn)
    assert served == ids


@pytest.mark.parametrize("paused", [False, True])
def test_a_key_does_not_stay_with_tasks_that_nobody_pops(conn: Conn, paused: bool) -> None:
    """All workers of x may be busy for hours: each of its groups would have its turn before y."""
    for queue in ("x", "y"):
        call(conn, "configure_queue", queue)
    bob = register(conn, "x", "y")
    at(conn, "12:00:00")
    create(conn, "h", queue="y", concurrency_key="k")
    held = pop(conn, bob, 1, queue="y")
    ids = [create(conn, f"g{number}", queue="x", concurrency_key="k") for number in range(5)]
    assert pop(conn, bob, 5, queue="x") == []
    create(conn, "h", queue="y", concurrency_key="k")
    assert pop(conn, bob, 1, queue="y") == []
    finish(conn, bob, held)
    for time in ("12:00:01", "12:00:02"):
        at(conn, time)
        maintain(conn)
        assert pop(conn, bob, 1, queue="y") == []
    assert [state(conn, one_) for one_ in ids] == ["queued", *["blocked"] * 4]
    if paused:
        call(conn, "pause_queue", "x")
    at(conn, "12:00:03" if paused else "12:00:13")
    maintain(conn)
    held = pop(conn, bob, 1, queue="y")
    assert len(held) == 1
    assert_sound(conn)
    call(conn, "resume_queue", "x")
    finish(conn, bob, held)
    for one_ in ids:
        held = pop(conn, bob, 5, queue="x")
        assert held == [one_]
        finish(conn, bob, held)


def test_a_queue_that_once_had_keys_does_not_wait_for_them_for_ever(conn: Conn, database: Database) -> None:
    call(conn, "configure_queue", "x")
    bob = register(conn, "default", "x")
    create(conn, "ann", concurrency_key="k1")
    create(conn, "bob", concurrency_key="k1")
    for _ in range(2):
        finish(conn, bob, pop(conn, bob, 5))
        create(conn, "ann")
    maintain(conn)
    create(conn, "eve", queue="x", concurrency_key="k2")
    hung = database.connect()
    assert len(pop(hung, bob, 1, queue="x")) == 1
    create(conn, "bob")
    assert len(pop(conn, bob, 5)) == 2
    create(conn, "bob", concurrency_key="k1")
    create(conn, "ann")
    hung.rollback()
    assert len(pop(conn, bob, 5)) == 2
    assert_sound(conn)


@pytest.mark.new_database
def test_one_that_comes_back_before_many_that_wait_for_a_key_is_found_in_a_few_steps(conn: Conn) -> None:
    """Its lane knew of no keys any more: all its other tasks were parked."""
    bob = register(conn)
    create(conn, "bob")
    early = pop(conn, bob, 1)
    create_many(conn, "bob", 1500, concurrency_keys=["k"] * 1500)
    for _ in range(8):
        pop(conn, bob, 1)
    assert one(conn, "select count(*) from fairq.parked") == 1499
    release(conn, bob, early)
    with conn.transaction():
        before = rows_read(conn, "tasks") + rows_read(conn, "parked")
        assert pop(conn, bob, 1) == early
        assert rows_read(conn, "tasks") + rows_read(conn, "parked") - before < 2000
    assert_sound(conn)


@pytest.mark.parametrize("younger", [False, True], ids=["", "by a transaction that began after the change"])
def test_tasks_popped_while_the_first_cap_of_their_queue_came_are_counted_by_upkeep(
    conn: Conn, database: Database, younger: bool
) -> None:
    bob = register(conn)
    create_many(conn, "bob", 9)
    configuring, popping = database.connect(), database.connect()
    if younger:
        run(configuring, "select pg_current_xact_id()")
    early = pop(popping, bob, 5)
    call(configuring, "configure_queue", "default", max_running=2)
    configuring.commit()
    for _ in range(5):
        maintain(conn)
    popping.commit()
    maintain(conn)
    assert in_flight(conn, "queue default", "#queue default") == 5
    for end in early[:4]:
        assert pop(conn, bob, 5) == []
        finish(conn, bob, [end])
    assert len(pop(conn, bob, 5)) == 1

    def is_done() -> bool:
        """As soon as no transaction anywhere on the server is older; other tests have some open."""
        maintain(conn)
        return bool(one(conn, "select count(*) from fairq.sweeps where what like 'count held%%'") == 0)

    wait_until(is_done, "upkeep counts no more")
    assert_sound(conn)


def test_a_first_cap_holds_for_a_group_without_a_lane_whose_ring_is_far_behind(
    conn: Conn, database: Database
) -> None:
    bob = register(conn)
    create_many(conn, "bob", 5)
    assert len(pop(conn, bob, 5)) == 5
    assert one(conn, "select count(*) from fairq.lanes where group_key = 'bob'") == 0
    create_many(conn, "bob", 5)
    create_all(conn, *[f"g{number}" for number in range(5200)])
    promoting = database.connect()
    run(promoting, LOCK_DOMAIN, "default")
    call(conn, "configure_group", "default", "bob", max_running=5)
    promoting.rollback()
    assert "bob" not in {held.group_key for held in pop(conn, bob, 2000)}
    assert_sound(conn)


@pytest.mark.new_database
@pytest.mark.parametrize("waiting", [0, 800], ids=["one at a time", "many wait"])
def test_a_key_under_a_held_snapshot_is_found_in_a_few_steps(
    conn: Conn, database: Database, waiting: int
) -> None:
    report = database.connect()
    report.isolation_level = IsolationLevel.REPEATABLE_READ
    report.execute("select pg_current_xact_id(), count(*) from fairq.tasks")
    bob = register(conn)
    create_many(conn, "bob", waiting, concurrency_keys=["k"] * waiting)
    costs = []
    for _ in range(300):
        if not waiting:
            create(conn, concurrency_key="k")
        query = "select t.id, t.attempt from fairq.pop_tasks('default', 1, %s) t"
        with conn.transaction(force_rollback=True):
            costs.append(shared_buffers(explain(conn, query, [bob])))
        finish(conn, bob, pop(conn, bob, 1))
    early, late = sorted(costs[20:60])[20], sorted(costs[-40:])[20]
    assert late <= 1.5 * early + 60, (early, late)
    report.rollback()
    maintain(conn)
    assert_sound(conn)


def test_a_clock_that_is_set_back_during_a_pop_leaves_no_place_taken(conn: Conn) -> None:
    """I7, I13: to the pop the task has expired, to the promotion it made a moment later it has not."""
    call(conn, "configure_group", "default", "bob", max_running=1)
    bob = register(conn)
    task = create(conn, concurrency_key="k", expires_at="2030-01-01 12:00:00+00")
    run(conn, "create sequence fairq.looks")
    run(
        conn,
        "create or replace function fairq._now() returns timestamptz language sql as $$"
        " select timestamptz '2030-01-01 12:00:01+00'"
        "   - case when nextval('fairq.looks') = 1 then interval '0' else interval '2 seconds' end $$",
    )
    assert pop(conn, bob, 1) == [task]
    assert_sound(conn)
    finish(conn, bob, [task], attempt=1)
    assert_sound(conn)
    assert in_flight(conn, "bob") == in_flight(conn, "k", "#keys") == 0
