"""Rates of groups: GCRA with burst, exact, charged per task."""

import pytest

from tests.policies.calls import (
    Conn,
    assert_counted,
    at,
    call,
    create,
    groups_of,
    ids_of,
    one,
    pop,
    promote,
    run,
    tasks,
    worker,
    written,
)


def due(conn: Conn) -> str | None:
    value = one(conn, "select fairq.next_due_at('default')")
    return None if value is None else f"{value:%H:%M:%S.%f}".rstrip("0").rstrip(".")


def test_a_burst_and_then_one_by_one(conn: Conn) -> None:
    """D27, D28, D31."""
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 minute", rate_burst=4)
    bob = worker(conn)
    tasks(conn, "bob", 30)
    assert len(pop(conn, bob)) == 4
    assert due(conn) == "12:00:06"
    at(conn, "12:00:05.999")
    assert pop(conn, bob) == []
    at(conn, "12:00:06")
    assert len(pop(conn, bob)) == 1
    at(conn, "12:00:18")
    assert len(pop(conn, bob)) == 2
    at(conn, "13:00:00")
    assert len(pop(conn, bob)) == 4, "an idle hour is worth one burst"


@pytest.mark.parametrize("seconds", [1, 5, 60])
def test_over_a_long_time_the_rate_is_exact(conn: Conn, seconds: int) -> None:
    """D31: however workers poll, n per period plus one burst, and not one more."""
    call(conn, "configure_group", "default", "bob", rate_limit=7, rate_period="10 seconds", rate_burst=5)
    bob = worker(conn)
    tasks(conn, "bob", 600)
    served = 0
    for moment in range(0, 601, seconds):
        at(conn, f"12:{moment // 60:02}:{moment % 60:02}")
        served += len(pop(conn, bob))
        assert served <= 5 + moment * 0.7 + 0.000001
    # Five are saved up in seven seconds; who asks more seldom gets a burst each time.
    assert served == (425 if seconds <= 5 else 55)


def test_polls_charge_nothing_and_write_nothing(conn: Conn) -> None:
    """D28: a hundred empty polls later the rate is where it was."""
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="10 seconds")
    bob = worker(conn)
    tasks(conn, "bob", 3)
    assert len(pop(conn, bob)) == 1
    pop(conn, bob)
    with conn.transaction():
        before = written(conn)
        for _ in range(100):
            assert pop(conn, bob) == []
        assert written(conn) == before
    at(conn, "12:00:10")
    assert len(pop(conn, bob)) == 1


def test_the_others_are_not_limited_and_not_held_up(conn: Conn) -> None:
    """I8."""
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour")
    tasks(conn, "bob", 50)
    tasks(conn, "alice", 50)
    assert sorted(groups_of(pop(conn, worker(conn)))) == ["alice"] * 50 + ["bob"]


def test_the_rate_of_a_queue_for_each_group_and_one_of_its_own(conn: Conn) -> None:
    call(
        conn,
        "configure_queue",
        "default",
        group_rate_limit=2,
        group_rate_period="1 minute",
        group_rate_burst=2,
    )
    call(conn, "configure_group", "default", "c", rate_limit=5, rate_period="1 minute", rate_burst=5)
    bob = worker(conn)
    for group in ("a", "b", "c"):
        tasks(conn, group, 10)
    held = groups_of(pop(conn, bob))
    assert {g: held.count(g) for g in "abc"} == {"a": 2, "b": 2, "c": 5}
    call(conn, "configure_group", "default", "c", reset=["rate"])
    call(conn, "configure_queue", "default", reset=["group_rate"])
    assert len(pop(conn, bob)) == 21


def test_every_lane_that_is_due_wakes_however_small_the_pass(conn: Conn) -> None:
    """I8: a promotion that takes one lane leaves the other lanes due."""
    groups = [f"g{n}" for n in range(6)]
    call(conn, "configure_queue", "default", group_rate_limit=1, group_rate_period="1 second")
    bob = worker(conn)
    for group in groups:
        tasks(conn, group, 2)
    assert len(pop(conn, bob)) == 6
    at(conn, "12:00:02")
    promote(conn, limit=1)
    call(conn, "configure_group", "default", "someone", max_running=1)
    assert sorted(groups_of(pop(conn, bob))) == groups
    assert due(conn) is None


def test_a_raised_rate_forgets_the_debt_of_the_old_one(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour", rate_burst=10)
    bob = worker(conn)
    tasks(conn, "bob", 30)
    assert len(pop(conn, bob)) == 10
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 second", rate_burst=10)
    at(conn, "12:00:01")
    assert len(pop(conn, bob)) == 10


def test_recalled_tasks_are_not_charged_twice(conn: Conn) -> None:
    """I12: neither by priority nor by a pause."""
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 minute", rate_burst=10)
    bob = worker(conn)
    ids = tasks(conn, "bob", 20)
    promote(conn)
    high = create(conn, "bob", priority=5)
    promote(conn)
    call(conn, "pause_group", "default", "bob")
    promote(conn)
    call(conn, "resume_group", "default", "bob")
    assert ids_of(pop(conn, bob)) == [high, *ids[:9]]
    assert_counted(conn)


def test_extreme_rates_do_not_stop_the_queue(conn: Conn) -> None:
    """The fastest and the slowest that is accepted, with all they may have ahead."""
    call(conn, "configure_group", "default", "fast", rate_limit=2147483647, rate_period="1 microsecond")
    call(conn, "configure_group", "default", "slow", rate_limit=1, rate_period="366 days", rate_burst=100000)
    bob = worker(conn)
    run(
        conn,
        "update fairq.lanes set gate.rate_at = '2030-01-01'::timestamptz + 99999 * interval '366 days'"
        " where group_key = 'slow'",
    )
    for group in ("fast", "slow", "else"):
        tasks(conn, group, 5)
    held = groups_of(pop(conn, bob))
    assert {g: held.count(g) for g in ("fast", "slow", "else")} == {"fast": 5, "slow": 1, "else": 5}
    assert pop(conn, bob) == []


def test_a_rate_and_a_cap_hold_together(conn: Conn) -> None:
    """H38."""
    call(
        conn,
        "configure_group",
        "default",
        "bob",
        rate_limit=1,
        rate_period="1 second",
        rate_burst=5,
        max_running=3,
    )
    bob = worker(conn)
    tasks(conn, "bob", 20)
    held = pop(conn, bob)
    assert len(held) == 3
    at(conn, "12:00:10")
    assert pop(conn, bob) == []
    run(conn, "select fairq.finish_tasks(%s, %s, %s)", bob, ids_of(held), [1, 1, 1])
    assert len(pop(conn, bob)) == 3
    assert_counted(conn)
