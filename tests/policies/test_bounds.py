"""What one tenant does, or one setting says, is bounded for the others: each case was seen to fail once."""

import threading
from collections import Counter
from typing import Any

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    call,
    create,
    create_many,
    drain,
    finish,
    groups_of,
    maintain,
    one,
    pop,
    promote,
    register,
    release,
    run,
    state,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound
from tests.support.plans import explain, shared_buffers

pytestmark = pytest.mark.usefixtures("one_shard")

CLOCK = "select set_config('fairq.now', %s, false)"


def written(conn: Conn) -> int:
    """Rows that this transaction has written so far, in all tables of fairq."""
    return int(
        one(
            conn,
            "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_xact_user_tables"
            " where schemaname = 'fairq'",
        )
    )


# --- Keys ---


@pytest.mark.new_database
def test_a_place_of_a_key_that_comes_free_costs_the_same_however_many_groups_wait(conn: Conn) -> None:
    bob = register(conn)
    costs = {}
    for groups in (20, 200):
        key = f"k{groups}"
        run(
            conn,
            "select fairq.create_tasks(array_agg(%s || n), array_agg('{}'::jsonb),"
            " p_concurrency_keys => array_agg(%s::text)) from generate_series(1, %s) n",
            key,
            key,
            groups,
        )
        held = pop(conn, bob, 10)
        served = list(held)
        for _ in range(3):
            finish(conn, bob, held)
            held = pop(conn, bob, 10)
            assert len(held) == 1
            served += held
        with conn.transaction():
            before = written(conn)
            for _ in range(10):
                finish(conn, bob, held)
                held = pop(conn, bob, 10)
                assert len(held) == 1
                served += held
            costs[groups] = written(conn) - before
        assert len(set(groups_of(served))) == len(served), "each group had its turn once"
        finish(conn, bob, held)
        while held := pop(conn, bob, 10):
            finish(conn, bob, held)
    assert costs[200] <= 1.2 * costs[20], costs
    assert_sound(conn)


def test_a_backlog_of_one_key_is_parked_in_portions_and_holds_nobody_up(conn: Conn) -> None:
    bob = register(conn)
    create_many(conn, "eve", 6000, concurrency_keys=["eve's"] * 6000)
    create(conn, "alice")
    assert sorted(groups_of(pop(conn, bob, 2))) == ["alice", "eve"]
    parked = 0
    for _ in range(3):
        create(conn, "carol")
        assert groups_of(pop(conn, bob, 1)) == ["carol"]
        now_parked = one(conn, "select count(*) from fairq.parked")
        assert now_parked - parked <= 8 * 500, "one call parks a bounded number"
        parked = now_parked
    # A task of eve's without the key is not held up by those that have it.
    free = create(conn, "eve")
    for _ in range(20):
        if free in pop(conn, bob, 1):
            break
    else:
        pytest.fail("it was not served")
    assert one(conn, "select count(*) from fairq.parked") == 5999
    assert_sound(conn)


def test_no_task_has_a_key_while_it_only_waits_for_its_turn(conn: Conn) -> None:
    bob = register(conn)
    create_many(conn, "bob", 900)
    create(conn, "bob", concurrency_key="db")
    promote(conn)
    finish(conn, bob, pop(conn, bob, 1))
    create(conn, "alice", concurrency_key="db")
    assert "alice" in groups_of(pop(conn, bob, 2)), "nobody runs with the key"
    assert_sound(conn)


def test_a_key_is_not_given_to_a_task_of_a_paused_queue(conn: Conn) -> None:
    call(conn, "configure_queue", "other")
    bob = register(conn, "default", "other")
    create(conn, "bob", concurrency_key="k")
    held = pop(conn, bob)
    create(conn, "carol", queue="other", concurrency_key="k")
    assert pop(conn, bob, queue="other") == []
    create(conn, "alice", concurrency_key="k")
    assert pop(conn, bob) == []
    call(conn, "pause_queue", "other")
    finish(conn, bob, held)
    held = pop(conn, bob)
    assert groups_of(held) == ["alice"]
    finish(conn, bob, held)
    call(conn, "resume_queue", "other")
    assert groups_of(pop(conn, bob, queue="other")) == ["carol"]
    assert_sound(conn)


# --- Hearing ---


def test_alice_is_next_behind_ten_thousand_tasks_that_came_one_by_one(conn: Conn) -> None:
    bob = register(conn)
    run(conn, "select count(fairq.create_task('bob', '{}')) from generate_series(1, 10000)")
    create(conn, "alice")
    assert sorted(groups_of(pop(conn, bob, 2))) == ["alice", "bob"]


@pytest.mark.new_database
def test_every_pass_hears_a_bounded_number_of_rings_also_the_third(conn: Conn) -> None:
    run(conn, "select fairq.create_task('g' || n, '{}') from generate_series(1, 100) n")
    promote(conn)
    for _ in range(13):
        run(conn, "select fairq.create_task('h' || n, '{}') from generate_series(1, 1000) n")
    passes = []
    while one(conn, "select fairq._has_news(k) from fairq._tick(0, 'default') k"):
        with conn.transaction():
            before = one(
                conn,
                "select coalesce(sum(n_tup_ins), 0) from pg_stat_xact_user_tables where relname = 'lanes'",
            )
            promote(conn, limit=1)
            after = one(
                conn,
                "select coalesce(sum(n_tup_ins), 0) from pg_stat_xact_user_tables where relname = 'lanes'",
            )
        passes.append(after - before)
    assert len(passes) >= 3
    assert max(passes) <= 5100, passes
    assert_sound(conn)


def test_one_call_with_many_new_groups_is_heard_in_portions(conn: Conn) -> None:
    """A pass may end in the middle of a transaction, and the next one goes on there."""
    bob = register(conn)
    run(
        conn,
        "select count(*)"
        " from fairq.create_tasks((select array_agg('g' || n) from generate_series(1, 12000) n),"
        " array_fill('{}'::jsonb, array[12000]))",
    )
    with conn.transaction():
        assert len(pop(conn, bob, 10)) == 10
        assert one(conn, "select count(*) from fairq.lanes") <= 5000
    served: list[str] = []
    while held := pop(conn, bob, 2000):
        served += groups_of(held)
        finish(conn, bob, held)
    assert len(served) == 11990
    assert len(set(served)) == len(served)


@pytest.mark.new_database
def test_twenty_thousand_priorities_cost_what_one_does(conn: Conn) -> None:
    bob = register(conn)
    costs = {}
    for levels in (1, 4000):
        group = f"of {levels}"
        run(
            conn,
            "select fairq.create_tasks(array_fill(%s::text, array[4000]),"
            " array_fill('{}'::jsonb, array[4000]),"
            " p_priorities => (select array_agg((n %% %s)::integer) from generate_series(1, 4000) n))",
            group,
            levels,
        )
        for _ in range(3):
            pop(conn, bob, 10)
        run(conn, "analyze fairq.tasks")
        costs[levels] = sum(
            shared_buffers(explain(conn, "select * from fairq.pop_tasks('default', %s, %s)", [10, bob]))
            for _ in range(10)
        )
        order = []
        while held := pop(conn, bob, 1000):
            order += [one(conn, "select priority from fairq.tasks where id = %s", id_) for id_ in held][:5]
            finish(conn, bob, held)
        assert order == sorted(order, reverse=True)
    assert costs[4000] < 2 * costs[1], costs


# --- Limits bind what is ready ---


def test_a_rate_that_is_set_holds_at_once(conn: Conn) -> None:
    bob = register(conn)
    create_many(conn, "bob", 2000)
    promote(conn)
    assert one(conn, "select count(*) from fairq.ready") > 0
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 day", rate_burst=3)
    assert len(pop(conn, bob, 100)) == 3
    assert pop(conn, bob, 100) == []


def test_after_a_pause_of_the_workers_a_burst_starts_and_no_more(conn: Conn) -> None:
    run(conn, CLOCK, "2030-01-01 00:00:00+00")
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 second", rate_burst=1)
    bob = register(conn, lease="1 day")
    create_many(conn, "bob", 200)
    call(conn, "pause_queue", "default")
    for second in range(1, 121, 2):
        run(conn, CLOCK, f"2030-01-01 00:{second // 60:02}:{second % 60:02}+00")
        maintain(conn)
    call(conn, "resume_queue", "default")
    assert len(pop(conn, bob, 200)) == 1


def test_a_weight_reaches_what_is_ready(conn: Conn) -> None:
    bob = register(conn)
    call(conn, "configure_queue", "default", ready_target=1000)
    for group in ("bob", "alice"):
        create_many(conn, group, 600)
    promote(conn)
    call(conn, "configure_group", "default", "alice", weight=9)
    served = Counter(groups_of(pop(conn, bob, 100)))
    assert 88 <= served["alice"] <= 92, served


def test_settings_do_not_wait_for_an_open_pop_with_the_domain_in_hand(database: Database) -> None:
    conn, other, hung = (database.connect(autocommit=True) for _ in range(3))
    bob = register(conn)
    create(conn, "bob")
    promote(conn)
    hung.autocommit = False
    assert len(pop(hung, bob, 1)) == 1
    done: list[Any] = []
    setting = threading.Thread(
        target=lambda: done.append(call(other, "configure_group", "default", "bob", max_running=1))
    )
    setting.start()
    setting.join(20)
    assert done, "configure_group waits for the pop"
    create(conn, "alice")
    create(conn, "bob")
    assert groups_of(pop(conn, bob, 5)) == ["alice"], "bob's one place is taken by the pop that is open"
    hung.commit()
    assert pop(conn, bob, 5) == []
    assert_sound(conn)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_first_cap_counts_a_task_that_is_being_finished(database: Database, end: str) -> None:
    conn, finishing = database.connect(autocommit=True), database.connect()
    bob = register(conn)
    create_many(conn, "bob", 5)
    held = pop(conn, bob, 1)
    finish(finishing, bob, held)
    call(conn, "configure_group", "default", "bob", max_running=1)
    assert pop(conn, bob, 5) == [], "until it is said how that ends, its place is taken"
    getattr(finishing, end)()
    run(conn, "select pg_sleep(0.11)")
    popped = pop(conn, bob, 5)
    assert len(popped) == (1 if end == "commit" else 0)
    if end == "rollback":
        finish(conn, bob, held)
        assert len(pop(conn, bob, 5)) == 1
    assert_sound(conn)


# --- Coming back ---


@pytest.mark.parametrize("how", ["released", "retried", "lost"])
def test_a_task_that_comes_back_is_served_before_younger_ones(conn: Conn, how: str) -> None:
    run(conn, CLOCK, "2030-01-01 00:00:00+00")
    bob, carol = register(conn, lease="1 minute"), register(conn, lease="1 day")
    first, *_ = create_many(conn, "bob", 3000)
    held = pop(conn, bob, 1)
    assert held == [first]
    promote(conn)
    if how == "released":
        release(conn, bob, held)
    elif how == "retried":
        finish(conn, bob, held, "retry", delay="0")
    else:
        run(conn, CLOCK, "2030-01-01 00:05:00+00")
        maintain(conn)
        assert state(conn, first) != "running"
    run(conn, CLOCK, "2030-01-01 00:05:01+00")
    assert pop(conn, carol, 1) == [first]


def test_a_claim_that_commits_long_after_its_lease_is_given_up(database: Database) -> None:
    conn, slow = database.connect(autocommit=True), database.connect()
    for session in (conn, slow):
        session.execute("select set_config('fairq.now', '2030-01-01 00:00:00+00', false)")
    bob = register(conn, lease="1 day")
    slow.commit()
    create(conn, "bob")
    promote(conn)
    slow.execute("select set_config('fairq.now', '2030-01-01 00:00:00+00', false)")
    assert len(pop(slow, bob, 1, lease="10 seconds")) == 1
    for minute in range(1, 6):
        run(conn, CLOCK, f"2030-01-01 00:{minute:02}:00+00")
        maintain(conn)
    slow.commit()
    for minute in range(6, 9):
        run(conn, CLOCK, f"2030-01-01 00:{minute:02}:00+00")
        maintain(conn)
    assert one(conn, "select count(*) from fairq.held") == 0
    assert one(conn, "select outcome from fairq.attempts") == "lease_expired"


def test_an_idempotency_key_that_commits_behind_younger_ones_is_forgotten_in_time(database: Database) -> None:
    conn, slow = database.connect(autocommit=True), database.connect()
    for session in (conn, slow):
        run(session, CLOCK, "2030-01-01 00:00:00+00")
    slow.commit()
    bob = register(conn, lease="300 days")
    late = create(slow, "bob", idempotency_key="late")
    run(conn, CLOCK, "2030-01-01 00:00:05+00")
    create(conn, "bob", idempotency_key="younger")
    for minute in range(1, 4):
        run(conn, CLOCK, f"2030-01-01 00:{minute:02}:00+00")
        maintain(conn)
    slow.commit()
    drain(conn, bob)
    for day in (3, 9, 20):
        run(conn, CLOCK, f"2030-01-{day:02} 00:00:00+00")
        maintain(conn)
    assert one(conn, "select count(*) from fairq.idempotency_keys") == 0
    assert create(conn, "bob", idempotency_key="late") != late


# --- Upkeep ---


def test_a_part_of_upkeep_that_fails_is_noted_and_the_others_go_on(conn: Conn) -> None:
    bob = register(conn, lease="1 minute")
    create(conn, "bob")
    pop(conn, bob, 1)
    run(conn, "alter table fairq.ticks add constraint broken check (queue <> 'default') not valid")
    create(conn, "bob")
    run(conn, CLOCK, "2099-01-01 00:00:00+00")
    done = maintain(conn)
    assert done["recovered"] == 1, "recovery comes first"
    assert done["failed"] == 1
    ((part, message),) = run(conn, "select part, message from fairq.upkeep_failures")
    assert part == "queue default"
    assert "broken" in message
    run(conn, "alter table fairq.ticks drop constraint broken")
    maintain(conn)
    assert run(conn, "select from fairq.upkeep_failures") == []


def test_a_worker_whose_tasks_were_taken_is_told_by_its_next_call(conn: Conn) -> None:
    run(conn, CLOCK, "2030-01-01 00:00:00+00")
    bob = register(conn, lease="1 minute")
    create_many(conn, "bob", 5)
    pop(conn, bob, 5)
    run(conn, CLOCK, "2030-01-01 01:00:00+00")
    # More than one round of recovery can take.
    assert one(conn, "select fairq.maintain(2)")["recovered"] == 2
    for query in ("select fairq.heartbeat(%s)", "select fairq.pop_tasks('default', 1, %s)"):
        with pytest.raises(psycopg.DatabaseError) as refused:
            run(conn, query, bob)
        assert refused.value.sqlstate == "QF004"
    assert one(conn, "select fairq.maintain()")["recovered"] == 3


def test_an_idle_turn_leaves_no_trace(conn: Conn) -> None:
    bob = register(conn)
    create(conn, "bob")
    turn = "select id, due_in from fairq.turn(%s, '{default}', '{5}', 5)"
    assert [row[0] for row in run(conn, turn, bob)] == [1, None]
    with conn.transaction():
        assert run(conn, turn, bob) == [(None, None)]
        assert one(conn, "select pg_current_xact_id_if_assigned() is null")


@pytest.mark.new_database
def test_a_rebuild_goes_on_in_portions_and_loses_nothing(conn: Conn) -> None:
    bob = register(conn)
    ids = create_many(conn, "bob", 12000)
    held = pop(conn, bob, 10)
    call(conn, "rebuild", "default")
    with conn.transaction():
        before = written(conn)
        served = pop(conn, bob, 10)
        assert written(conn) - before < 1000, "one portion: a ring per group and level, however many tasks"
    while more := pop(conn, bob, 1000):
        served += more
    assert sorted(served + held) == ids
    assert_sound(conn)
