"""Rates of groups: GCRA with burst, exact, charged per task."""

import pytest

from tests.support.calls import (
    Conn,
    at,
    call,
    create,
    create_many,
    finish,
    groups_of,
    one,
    pop,
    promote,
    register,
    run,
    written,
)
from tests.support.invariants import assert_sound


def due(conn: Conn) -> str | None:
    value = one(conn, "select fairq.next_due_at('default')")
    return None if value is None else f"{value:%H:%M:%S.%f}".rstrip("0").rstrip(".")


def test_a_burst_and_then_one_by_one(conn: Conn) -> None:
    """D27, D28, D31."""
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 minute", rate_burst=4)
    bob = register(conn)
    create_many(conn, "bob", 30)
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
    """D29, D31: however workers poll, n per period plus one burst, and not one more."""
    call(conn, "configure_group", "default", "bob", rate_limit=7, rate_period="10 seconds", rate_burst=5)
    bob = register(conn)
    create_many(conn, "bob", 600)
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
    bob = register(conn)
    create_many(conn, "bob", 3)
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
    create_many(conn, "bob", 50)
    create_many(conn, "alice", 50)
    assert sorted(groups_of(pop(conn, register(conn)))) == ["alice"] * 50 + ["bob"]


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
    bob = register(conn)
    for group in ("a", "b", "c"):
        create_many(conn, group, 10)
    held = groups_of(pop(conn, bob))
    assert {g: held.count(g) for g in "abc"} == {"a": 2, "b": 2, "c": 5}
    call(conn, "configure_group", "default", "c", rate_limit=None)
    call(conn, "configure_queue", "default", group_rate_limit=None)
    assert len(pop(conn, bob)) == 21


def test_every_lane_that_is_due_wakes_however_small_the_pass(conn: Conn) -> None:
    """I8: a promotion that takes one lane leaves the other lanes due."""
    groups = [f"g{n}" for n in range(6)]
    call(conn, "configure_queue", "default", group_rate_limit=1, group_rate_period="1 second")
    bob = register(conn)
    for group in groups:
        create_many(conn, group, 2)
    assert len(pop(conn, bob)) == 6
    at(conn, "12:00:02")
    promote(conn, limit=1)
    call(conn, "configure_group", "default", "someone", max_running=1)
    assert sorted(groups_of(pop(conn, bob))) == groups
    assert due(conn) is None


def test_a_raised_rate_forgets_the_debt_of_the_old_one(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour", rate_burst=10)
    bob = register(conn)
    create_many(conn, "bob", 30)
    assert len(pop(conn, bob)) == 10
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 second", rate_burst=10)
    at(conn, "12:00:01")
    assert len(pop(conn, bob)) == 10


def test_recalled_tasks_are_not_charged_twice(conn: Conn) -> None:
    """I12: neither by priority nor by a pause."""
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 minute", rate_burst=10)
    bob = register(conn)
    ids = create_many(conn, "bob", 20)
    promote(conn)
    high = create(conn, "bob", priority=5)
    promote(conn)
    call(conn, "pause_group", "default", "bob")
    promote(conn)
    call(conn, "resume_group", "default", "bob")
    assert pop(conn, bob) == [high, *ids[:9]]
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("user", [None, "jane"])
def test_a_clock_that_is_set_back_does_not_stop_the_queue(conn: Conn, user: str | None) -> None:
    """I8: bob's turn, or that of one of his users, was due, and waits behind the horizon; then it is no
    longer due.
    """
    call(conn, "configure_queue", "default", ready_target=2)
    rate = {"rate_limit": 1, "rate_period": "10 s", "rate_burst": 1}
    if user:
        call(conn, "configure_user", "default", "bob", user, **rate)
    else:
        call(conn, "configure_group", "default", "bob", **rate)
    create_many(conn, "bob", 3, costs=[5.0] * 3, user_keys=[user] * 3)
    create_many(conn, "alice", 10)
    bob = register(conn)
    assert sorted(groups_of(pop(conn, bob, 2))) == ["alice", "bob"]
    at(conn, "12:00:10")
    promote(conn)
    at(conn, "12:00:05")
    assert groups_of(pop(conn, bob)) == ["alice"] * 9
    assert due(conn) == "12:00:10"
    at(conn, "12:00:10")
    assert groups_of(pop(conn, bob)) == ["bob"]


def test_extreme_rates_do_not_stop_the_queue(conn: Conn) -> None:
    """The fastest and the slowest that is accepted, with all they may have ahead."""
    call(conn, "configure_group", "default", "fast", rate_limit=2147483647, rate_period="1 microsecond")
    call(conn, "configure_group", "default", "slow", rate_limit=1, rate_period="366 days", rate_burst=100000)
    bob = register(conn)
    run(
        conn,
        "update fairq.lanes set gate.rate_at = '2030-01-01'::timestamptz + 99999 * interval '366 days'"
        " where group_key = 'slow'",
    )
    for group in ("fast", "slow", "else"):
        create_many(conn, group, 5)
    held = groups_of(pop(conn, bob))
    assert {g: held.count(g) for g in ("fast", "slow", "else")} == {"fast": 5, "slow": 1, "else": 5}
    assert pop(conn, bob) == []


def test_a_fast_rate_does_not_stop_the_queue_when_the_clock_is_set_back(conn: Conn) -> None:
    """I15: a second ahead of it is more tasks than a number can say."""
    call(conn, "configure_group", "default", "fast", rate_limit=2147483647, rate_period="1 microsecond")
    create_many(conn, "fast", 3)
    bob = register(conn)
    assert groups_of(pop(conn, bob, 1)) == ["fast"]
    at(conn, "11:59:59")
    create(conn, "else")
    assert groups_of(pop(conn, bob)) == ["else"]
    at(conn, "12:00:01")
    assert groups_of(pop(conn, bob)) == ["fast"] * 2


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
    bob = register(conn)
    create_many(conn, "bob", 20)
    held = pop(conn, bob)
    assert len(held) == 3
    at(conn, "12:00:10")
    assert pop(conn, bob) == []
    run(conn, "select fairq.finish_tasks(%s, %s, %s)", bob, held, [1, 1, 1])
    assert len(pop(conn, bob)) == 3
    assert_sound(conn)


def usage(conn: Conn, *scope: str) -> tuple[int, int, str | None, str | None] | None:
    """Used, available, when the next task may go, when all of the burst is there again."""
    times = (
        "to_char(next_at at time zone 'UTC', 'HH24:MI:SS'), to_char(full_at at time zone 'UTC', 'HH24:MI:SS')"
    )
    query = f"select used, available, {times} from fairq.rate_usage({', '.join(['%s'] * len(scope))})"  # noqa: S608
    rows = run(conn, query, *scope)
    return rows[0] if rows else None


def test_usage_says_what_is_left_and_when_the_next_may_go(conn: Conn) -> None:
    """D32: and what it says is what promotion does, at every moment."""
    call(conn, "configure_group", "default", "bob", rate_limit=10, rate_period="1 minute", rate_burst=4)
    assert usage(conn, "default", "bob") == (0, 4, None, None)
    bob = register(conn)
    create_many(conn, "bob", 30)
    assert len(pop(conn, bob, 100)) == 4
    assert usage(conn, "default", "bob") == (4, 0, "12:00:06", "12:00:24")
    for moment, left, full in (
        ("12:00:06", 1, "12:00:24"),
        ("12:00:17", 1, "12:00:30"),
        ("12:00:29", 2, "12:00:36"),
    ):
        at(conn, moment)
        before = usage(conn, "default", "bob")
        assert before is not None
        assert (before[1], before[3]) == (left, full)
        assert len(pop(conn, bob)) == left
        at(conn, moment)
    at(conn, "12:05:00")
    assert usage(conn, "default", "bob") == (0, 4, None, None)
    assert usage(conn, "default", "alice") is None, "no rate, nothing to say"
    assert usage(conn, "default") is None


def test_looking_at_a_rate_changes_nothing(conn: Conn) -> None:
    """D32."""
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="10 seconds")
    create_many(conn, "bob", 3)
    with conn.transaction():
        before = written(conn)
        for _ in range(10):
            usage(conn, "default", "bob")
        assert written(conn) == before
    assert len(pop(conn, register(conn))) == 1


def test_usage_knows_settings_that_its_lane_has_not_heard_of(conn: Conn) -> None:
    """D32: of a group without a row of its own, and one whose queue changed the rate a moment ago."""
    call(
        conn,
        "configure_queue",
        "default",
        group_rate_limit=2,
        group_rate_period="1 minute",
        group_rate_burst=3,
    )
    assert usage(conn, "default", "bob") == (0, 3, None, None)
    create_many(conn, "bob", 10)
    assert len(pop(conn, register(conn))) == 3
    assert usage(conn, "default", "bob") == (3, 0, "12:00:30", "12:01:30")
    call(conn, "configure_queue", "default", group_rate_limit=60)
    assert usage(conn, "default", "bob") == (3, 0, "12:00:01", "12:00:03"), "never more than a burst is owed"
    call(conn, "configure_queue", "default", group_rate_limit=None)
    assert usage(conn, "default", "bob") is None


def test_usage_tells_of_the_rate_and_of_nothing_else(conn: Conn) -> None:
    """D32: what the rate would let through, while a pause and a cap do not."""
    call(
        conn,
        "configure_group",
        "default",
        "bob",
        rate_limit=1,
        rate_period="1 minute",
        rate_burst=5,
        max_running=0,
    )
    call(conn, "pause_group", "default", "bob")
    create_many(conn, "bob", 3)
    assert pop(conn, register(conn)) == []
    assert usage(conn, "default", "bob") == (0, 5, None, None)


def test_a_reset_wakes_the_group_within_one_promotion(conn: Conn) -> None:
    """D32."""
    call(
        conn,
        "configure_group",
        "default",
        "bob",
        rate_limit=1,
        rate_period="1 hour",
        rate_burst=3,
        max_running=4,
    )
    bob = register(conn)
    create_many(conn, "bob", 10)
    held = pop(conn, bob)
    assert len(held) == 3
    call(conn, "reset_rate", "default", "bob")
    assert usage(conn, "default", "bob") == (0, 3, None, None), "nothing is charged before it is popped"
    assert len(pop(conn, bob)) == 1, "a fresh burst, and the cap holds all the same"
    assert_sound(conn)
    finish(conn, bob, held)
    assert len(pop(conn, bob)) == 2
    assert pop(conn, bob) == []
    assert_sound(conn)


def test_a_reset_of_nothing_does_nothing(conn: Conn) -> None:
    call(conn, "reset_rate", "default", "nobody")
    call(conn, "reset_rate", "default")
    call(conn, "configure_group", "default", "bob", max_running=2)
    create_many(conn, "bob", 5)
    assert len(pop(conn, register(conn))) == 2
    call(conn, "reset_rate", "default", "bob")
    assert_sound(conn)


def test_a_reset_is_heard_once(conn: Conn) -> None:
    """D32: what was popped already is not charged to the new burst."""
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour", rate_burst=2)
    create_many(conn, "bob", 10)
    promote(conn)
    bob = register(conn)
    for _ in range(2):
        assert len(pop(conn, bob)) == 2
        assert pop(conn, bob) == []
        call(conn, "reset_rate", "default", "bob")
        call(conn, "reset_rate", "default", "bob")
    assert len(pop(conn, bob)) == 2
    assert pop(conn, bob) == []


def test_the_rate_of_a_whole_queue_is_seen_and_reset_too(conn: Conn) -> None:
    """D32: and a worker that sleeps until the next one is due is woken."""
    call(conn, "configure_queue", "default", rate_limit=1, rate_period="1 minute", rate_burst=2)
    bob = register(conn)
    create_many(conn, "bob", 3)
    create_many(conn, "alice", 3)
    assert len(pop(conn, bob)) == 2
    assert usage(conn, "default") == (2, 0, "12:01:00", "12:02:00")
    assert usage(conn, "default", "bob") is None
    run(conn, "listen fairq")
    call(conn, "reset_rate", "default")
    assert "default" in [n.payload for n in conn.notifies(timeout=1, stop_after=2)]
    assert usage(conn, "default") == (0, 2, None, None)
    assert len(pop(conn, bob)) == 2
    assert pop(conn, bob) == []


def test_observers_may_look_at_rates(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", rate_limit=5)
    call(conn, "configure_queue", "default", rate_limit=7)
    run(conn, "set role fairq_observe")
    assert usage(conn, "default", "bob") == (0, 5, None, None)
    assert usage(conn, "default") == (0, 7, None, None)


def test_a_group_that_came_once_leaves_no_lane_when_its_rate_is_paid_for(conn: Conn) -> None:
    """I9: a sweep that passes by in between comes back for it."""
    call(conn, "configure_queue", "default", group_rate_limit=1, group_rate_period="1 minute")
    bob = register(conn)
    for number in range(10):
        create(conn, f"once {number}")
    create(conn, "alice")
    finish(conn, bob, pop(conn, bob))
    call(conn, "configure_group", "default", "carol", rate_limit=1000)
    for second in (10, 20, 30):  # the clock goes on, and carol's lane is swept
        create_many(conn, "carol", 2)
        finish(conn, bob, pop(conn, bob))
        at(conn, f"12:00:{second}")
        promote(conn)
        call(conn, "maintain")
    assert one(conn, "select count(*) from fairq.lanes where group_key = 'carol'") == 0
    lanes = "select count(*) from fairq.lanes where queue = 'default' and starts_with(group_key, 'once')"
    assert one(conn, lanes) == 10, "else it could come again at once"
    at(conn, "12:02:00")
    create_many(conn, "carol", 2)
    finish(conn, bob, pop(conn, bob))
    promote(conn)
    call(conn, "maintain")
    assert one(conn, lanes) == 0
