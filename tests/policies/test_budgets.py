"""Budgets: the most that the tasks of a group use per period, in what the groups of the queue share."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.calls import (
    Conn,
    Held,
    at,
    call,
    create,
    create_many,
    explain,
    finish,
    groups_of,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    run,
    states,
)
from tests.support.invariants import assert_sound, hear_all

pytestmark = pytest.mark.usefixtures("one_shard")


def share_cost(conn: Conn, **options: Any) -> None:
    call(conn, "configure_queue", "default", fairness="cost", **options)


def usage(conn: Conn, group: str = "bob") -> tuple[float, float, float]:
    """Spent, reserved, left."""
    hear_all(conn)
    query = "select spent, reserved, available from fairq.budget_usage('default', %s)"
    (row,) = run(conn, query, group)
    return row


def end(conn: Conn, worker: int, held: Sequence[Held], each: float) -> None:
    finish(conn, worker, held, costs=[float(each)] * len(held))


@pytest.mark.parametrize(("weight", "spent"), [(1000, 0.9999), (1, 0.9999988)])
@pytest.mark.parametrize("user", [None, "jane"])
def test_a_budget_that_is_nearly_used_up_stops_nobody_else(
    conn: Conn, weight: float, spent: float, user: str | None
) -> None:
    """I8, I15: what is left is less than one unit of virtual time. The first task that finds some goes."""
    share_cost(conn)
    call(conn, "configure_group", "default", "bob", budget=1, budget_period="1 day", weight=weight)
    if user:
        call(conn, "configure_user", "default", "bob", user, max_running=5)
    worker = register(conn)
    create_many(conn, "bob", 5, user_keys=[user] * 5)
    end(conn, worker, pop(conn, worker, 1), spent)
    create_many(conn, "alice", 5)
    held = groups_of(pop(conn, worker))
    assert (held.count("alice"), held.count("bob")) == (5, 1)


def test_no_more_is_begun_than_the_budget_is_expected_to_be_enough_for(conn: Conn) -> None:
    share_cost(conn)
    call(conn, "configure_group", "default", "bob", budget=100, budget_period="1 hour")
    worker = register(conn)
    create_many(conn, "bob", 30, costs=[10.0] * 30)
    create_many(conn, "alice", 30, costs=[10.0] * 30)
    held = pop(conn, worker, 60)
    assert groups_of(held).count("bob") == 10
    assert groups_of(held).count("alice") == 30
    assert usage(conn) == (0, 100, 0)
    waiting = one(conn, "select max(id) from fairq.tasks where group_key = 'bob'")
    assert "its budget of 100 is used up until 2030-01-01 13:00:00+00" in explain(conn, waiting)
    look_at = one(conn, "select next_look_at from fairq.explain_task(%s)", waiting)
    assert look_at == datetime(2030, 1, 1, 13, tzinfo=UTC)
    assert run(
        conn, "select budget_left, budget_renews_at from fairq.group_stats where group_key = 'bob'"
    ) == [(0, look_at)]
    assert one(conn, "select extract(epoch from fairq.next_due_at('default') - fairq._now())") == 3600
    assert_sound(conn)


def test_the_end_settles_what_is_left(conn: Conn) -> None:
    """Ten that used half of what was expected leave room for as much again; the last one may exceed it."""
    share_cost(conn)
    call(conn, "configure_group", "default", "bob", budget=100)
    worker = register(conn)
    create_many(conn, "bob", 40, costs=[10.0] * 40)
    end(conn, worker, pop(conn, worker, 40), 5)
    assert usage(conn)[0] == 50
    held = pop(conn, worker, 40)
    assert len(held) == 10
    end(conn, worker, held, 3.5)
    assert usage(conn)[0] == 85
    held = pop(conn, worker, 40)
    assert len(held) == 4
    end(conn, worker, held, 4)
    assert usage(conn) == (101, 0, 0)
    assert pop(conn, worker, 40) == []
    assert_sound(conn)


def test_more_is_spent_only_by_what_is_in_flight(conn: Conn) -> None:
    share_cost(conn)
    call(conn, "configure_group", "default", "bob", budget=100)
    worker = register(conn)
    create_many(conn, "bob", 60, costs=[10.0] * 60)
    spent = 0
    held = pop(conn, worker, 5)
    for _ in range(10):
        end(conn, worker, held, 30)
        spent += 30 * len(held)
        held = pop(conn, worker, 5)
        if not held:
            break
    assert usage(conn) == (spent, 0, 0)
    assert 100 <= spent <= 100 + 5 * 30
    assert_sound(conn)


def test_it_renews_at_the_boundary_whoever_asks(conn: Conn) -> None:
    """Days and hours of UTC. What is in flight then counts in the next period, where it ends."""
    share_cost(conn, group_budget=100, group_budget_period="1 hour")
    worker = register(conn)
    create_many(conn, "bob", 60, costs=[50.0] * 60)
    held = pop(conn, worker, 10)
    assert len(held) == 2
    at(conn, "12:59:59.9")
    end(conn, worker, held[:1], 50)
    assert pop(conn, worker, 10) == []
    assert usage(conn) == (50, 50, 0)
    at(conn, "13:00:00")
    assert usage(conn) == (0, 100, 0)
    assert len(pop(conn, worker, 10)) == 1
    end(conn, worker, held[1:], 70)
    assert usage(conn)[0] == 70
    assert pop(conn, worker, 10) == []
    at(conn, "17:30:00")
    assert len(pop(conn, worker, 10)) == 1
    assert_sound(conn)


def test_seconds_have_budgets_too(conn: Conn) -> None:
    call(conn, "configure_queue", "default", fairness="time", group_budget=60)
    worker = register(conn)
    create_many(conn, "bob", 10, costs=[20.0] * 10)
    held = pop(conn, worker, 1)
    assert usage(conn) == (0, 60, 0)
    at(conn, "12:00:50")
    finish(conn, worker, held)
    held = pop(conn, worker, 10)
    assert len(held) == 1
    at(conn, "12:01:40")
    finish(conn, worker, held)
    assert usage(conn) == (100, 0, 0)
    assert pop(conn, worker, 10) == []


@pytest.mark.parametrize("how", ["smaller", "used up"])
def test_what_is_ready_is_recalled(conn: Conn, how: str) -> None:
    """Limits bind what is ready: also where nobody promoted since."""
    share_cost(conn, ready_target=20)
    call(conn, "configure_group", "default", "bob", budget=1000)
    worker = register(conn)
    create_many(conn, "bob", 60, costs=[10.0] * 60)
    create_many(conn, "alice", 20, costs=[10.0] * 20)
    held = [each for each in pop(conn, worker, 6) if each.group_key == "bob"]
    assert list(states(conn).values()).count("queued") >= 10
    if how == "smaller":
        call(conn, "configure_group", "default", "bob", budget=10)
    else:
        end(conn, worker, held, 990 / len(held))
        held = []
    popped = groups_of(pop(conn, worker, 60))
    assert popped.count("alice") >= 2
    assert popped.count("bob") <= 2
    assert usage(conn)[2] == 0
    assert_sound(conn)


def test_a_larger_budget_and_none_let_go_at_once(conn: Conn) -> None:
    share_cost(conn, group_budget=20)
    worker = register(conn)
    create_many(conn, "bob", 30, costs=[10.0] * 30)
    assert len(pop(conn, worker, 50)) == 2
    call(conn, "configure_group", "default", "bob", budget=50)
    assert len(pop(conn, worker, 50)) == 3
    call(conn, "configure_group", "default", "bob", budget=None)
    assert pop(conn, worker, 50) == []
    call(conn, "configure_queue", "default", group_budget=None)
    assert len(pop(conn, worker, 50)) == 25
    assert_sound(conn)


def test_a_first_budget_counts_what_is_in_flight(conn: Conn) -> None:
    share_cost(conn)
    worker = register(conn)
    create_many(conn, "bob", 30, costs=[10.0] * 30)
    held = pop(conn, worker, 6)
    call(conn, "configure_group", "default", "bob", budget=100)
    assert usage(conn)[:2] == (0, 100)
    assert len(pop(conn, worker, 50)) == 4
    end(conn, worker, held, 10)
    assert usage(conn)[:2] == (60, 40)
    assert_sound(conn)


def test_a_task_dearer_than_all_of_it_goes_when_something_is_left(conn: Conn) -> None:
    share_cost(conn, group_budget=100)
    worker = register(conn)
    create(conn, "bob", cost=5000)
    create(conn, "bob", cost=1)
    assert len(pop(conn, worker, 5)) == 1
    call(conn, "configure_queue", "default", group_budget=0)
    create(conn, "alice")
    assert pop(conn, worker, 5) == []


def test_tasks_with_keys_keep_to_it(conn: Conn) -> None:
    share_cost(conn, group_budget=30)
    worker = register(conn)
    for number in range(8):
        create(conn, "bob", cost=10, concurrency_key=f"k{number}")
    held = pop(conn, worker, 8)
    assert len(held) == 3
    end(conn, worker, held, 1)
    assert len(pop(conn, worker, 8)) == 5
    assert_sound(conn)


def test_a_place_of_a_key_that_the_budget_keeps_from_use_goes_to_others(conn: Conn) -> None:
    """I13: a more urgent task uses the budget up in the pass in which the key was given."""
    share_cost(conn, group_budget=30)
    worker = register(conn)
    create(conn, "alice", cost=1, concurrency_key="k")
    held = pop(conn, worker, 8)
    create(conn, "bob", cost=10, concurrency_key="k")
    assert pop(conn, worker, 8) == []
    end(conn, worker, held, 1)
    urgent = create(conn, "bob", cost=50, priority=5)
    other = create(conn, "carol", cost=1, concurrency_key="k")
    assert sorted(pop(conn, worker, 8)) == [urgent, other]
    assert_sound(conn)


def test_what_was_rolled_back_is_not_used(conn: Conn, database: Any) -> None:
    share_cost(conn, group_budget=100)
    worker = register(conn)
    create_many(conn, "bob", 30, costs=[10.0] * 30)
    other = database.connect()
    at(other, "12:00:00")
    held = pop(other, worker, 8)
    end(other, worker, held, 90)
    other.rollback()
    assert usage(conn)[0] == 0
    assert len(pop(conn, worker, 30)) == 10
    assert_sound(conn)


@pytest.mark.parametrize("how", ["rebuild", "restore"])
@pytest.mark.parametrize("heard", [True, False])
def test_what_was_used_survives_a_rebuild(conn: Conn, how: str, heard: bool) -> None:
    """I11: nobody else knows what was spent; what is in flight is added up anew."""
    share_cost(conn, group_budget=100)
    worker = register(conn)
    create_many(conn, "bob", 30, costs=[10.0] * 30)
    held = pop(conn, worker, 6)
    end(conn, worker, held[:4], 11)
    if heard:
        assert usage(conn)[0] == 44
    if how == "rebuild":
        call(conn, "rebuild", "default")
    else:
        run(conn, "update fairq.ticks set written_by = '3'")
    assert usage(conn)[0] == 44
    assert one(conn, "select ((fairq._lane(0, 'default', 'bob')).pace).reserved") >= 20
    assert len(pop(conn, worker, 30)) == 4
    assert usage(conn)[2] == 0
    end(conn, worker, held[4:], 11)
    assert usage(conn)[0] == 66
    assert_sound(conn)


def test_upkeep_forgets_nothing_before_the_period_ends(conn: Conn) -> None:
    share_cost(conn, group_budget=100, group_budget_period="1 hour")
    worker = register(conn)
    create_many(conn, "bob", 2, costs=[10.0] * 2)
    end(conn, worker, pop(conn, worker, 2), 45)
    at(conn, "12:30:00")
    hear_all(conn)
    maintain(conn)
    maintain(conn)
    assert usage(conn) == (90, 0, 10)
    at(conn, "13:00:00")
    assert usage(conn) == (0, 0, 100)
    maintain(conn)
    assert one(conn, "select count(*) from fairq.lanes where group_key = 'bob'") == 0


def test_another_unit_begins_anew(conn: Conn) -> None:
    share_cost(conn, group_budget=100)
    worker = register(conn)
    create_many(conn, "bob", 5)
    end(conn, worker, pop(conn, worker, 1), 90)
    assert usage(conn)[0] == 90
    call(conn, "configure_queue", "default", fairness="time")
    assert usage(conn)[0] == 0
    assert_sound(conn)


def test_a_budget_needs_a_unit(conn: Conn) -> None:
    """Where tasks are only counted, a rate says how many may start."""
    with refused(conn, "QF014"):
        call(conn, "configure_queue", "default", group_budget=100)
    with refused(conn, "QF014"):
        call(conn, "configure_group", "default", "bob", budget=100)
    call(conn, "configure_queue", "default", fairness="cost", group_budget=100)
    with refused(conn, "QF014"):
        call(conn, "configure_queue", "default", fairness="count")
    call(conn, "configure_queue", "default", group_budget=None)
    call(conn, "configure_group", "default", "bob", budget=100)
    with refused(conn, "QF014"):
        call(conn, "configure_queue", "default", fairness=None)
    call(conn, "configure_group", "default", "bob", budget=None)
    call(conn, "configure_queue", "default", fairness="count")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"budget": -1}, "QF007"),
        ({"budget": 1e16}, "QF007"),
        ({"budget": "many"}, "QF007"),
        ({"budget_period": "1 day"}, "QF007"),
        ({"budget": 5, "budget_period": 0}, "QF009"),
        ({"budget": 5, "budget_period": "0.5 seconds"}, "QF009"),
        ({"budget": 5, "budget_period": "infinity"}, "QF009"),
        ({"budget": 5, "budget_period": "400 days"}, "QF009"),
    ],
)
def test_odd_budgets_are_refused(conn: Conn, settings: dict[str, Any], code: str) -> None:
    share_cost(conn)
    with refused(conn, code):
        call(conn, "configure_group", "default", "bob", **settings)
    promote(conn)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_tenant_has_one_budget_for_its_users(conn: Conn, rebuilt: bool) -> None:
    share_cost(conn)
    call(conn, "configure_group", "default", "bob", budget=100)
    worker = register(conn)
    for number in range(30):
        create(conn, "bob", user_key=f"u{number % 3}", cost=10)
    held = pop(conn, worker, 30)
    assert len(held) == 10
    end(conn, worker, held[:4], 11)
    if rebuilt:
        call(conn, "rebuild", "default")
    assert usage(conn)[:2] == (44, 60)
    end(conn, worker, held[4:], 5)
    assert usage(conn)[0] == 74
    assert 3 <= len(pop(conn, worker, 30)) <= 7
    assert usage(conn)[2] == 0
    assert_sound(conn)
