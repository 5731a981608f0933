"""Concurrency keys: tasks that exclude each other wherever they wait."""

from collections.abc import Callable

import pytest

from tests.support.calls import (
    Conn,
    Held,
    at,
    call,
    create,
    create_all,
    create_many,
    finish,
    groups_of,
    in_flight,
    maintain,
    one,
    pop,
    promote,
    register,
    release,
    run,
    state,
)
from tests.support.invariants import assert_sound

pytestmark = pytest.mark.usefixtures("one_shard")


def test_one_at_a_time_and_the_next_when_it_ends(conn: Conn) -> None:
    """D2, D9, D10, D12, S22, S23: no attempt is burnt by waiting."""
    bob = register(conn)
    first, second, third = (create(conn, concurrency_key="report") for _ in range(3))
    for expected in (first, second, third):
        held = pop(conn, bob)
        assert [(task, task.attempt) for task in held] == [(expected, 1)]
        assert pop(conn, bob) == []
        assert in_flight(conn, "report", "#keys") == 1
        finish(conn, bob, held)
    assert_sound(conn)


def test_a_blocked_task_holds_nobody_up_not_even_its_own_group(conn: Conn) -> None:
    """I8, S10."""
    bob = register(conn)
    create(conn, "alice", concurrency_key="k")
    pop(conn, bob)
    blocked = [create(conn, "bob", concurrency_key="k") for _ in range(50)]
    free = create(conn, "bob")
    other = create(conn, "carol", concurrency_key="another")
    assert sorted(pop(conn, bob)) == [free, other]
    assert {state(conn, i) for i in blocked} == {"blocked"}
    assert_sound(conn)


def test_a_turn_that_parks_many_says_that_there_is_more(conn: Conn) -> None:
    """S10: a call parks a bounded amount, so the free task behind them comes some turns later, at once."""
    bob = register(conn)
    create(conn, "first", concurrency_key="k")
    pop(conn, bob)
    groups = [f"group {number}" for number in range(1200)]
    create_all(conn, *groups, concurrency_keys=["k"] * len(groups))
    free = create(conn, "carol")

    def turn() -> tuple[int | None, float | None]:
        rows = run(conn, "select id, due_in from fairq.turn(%s, '{default}', '{10}', 10)", bob)
        return rows[0][0], rows[-1][1]

    popped, due_in = turn()
    assert popped is None, "eight rounds of a hundred lanes"
    assert due_in == pytest.approx(0.02)
    for _ in range(8):
        popped, due_in = turn()
        if popped is not None:
            break
        assert due_in == pytest.approx(0.02)
    assert popped == free
    for _ in range(8):
        popped, due_in = turn()
    assert (popped, due_in) == (None, None)
    assert_sound(conn)


def test_a_promotion_of_several_groups_with_keys_leaves_no_cursor_open(conn: Conn) -> None:
    """Up to PostgreSQL 15 the second group would find the first one's in use; later ones pile up."""
    bob = register(conn)
    for group in ("a", "b", "c"):
        for key in (group, "shared"):
            create(conn, group, concurrency_key=key)
    with conn.transaction():
        assert len(pop(conn, bob)) == 4
        assert one(conn, "select count(*) from pg_cursors") == 0


def test_keys_hold_across_groups_and_queues(conn: Conn) -> None:
    """D5: equal names share one lock."""
    call(conn, "configure_queue", "mail")
    bob = register(conn, "default", "mail")
    here = create(conn, "alice", concurrency_key="smtp")
    there = create(conn, "bob", concurrency_key="smtp", queue="mail")
    held = pop(conn, bob)
    assert held == [here]
    assert pop(conn, bob, queue="mail") == []
    assert state(conn, there) == "blocked"
    finish(conn, bob, held)
    assert pop(conn, bob, queue="mail") == [there]
    assert_sound(conn)


def test_a_key_with_two_places(conn: Conn) -> None:
    call(conn, "configure_key", "gpu", max_running=2)
    bob = register(conn)
    ids = [create(conn, f"g{n % 3}", concurrency_key="gpu") for n in range(6)]
    held = pop(conn, bob)
    assert len(held) == 2
    call(conn, "configure_key", "gpu", max_running=4)
    held += pop(conn, bob)
    assert len(held) == 4
    call(conn, "configure_key", "gpu", max_running=1)
    finish(conn, bob, held[:3])
    assert pop(conn, bob) == []
    finish(conn, bob, held[3:])
    held = pop(conn, bob)
    assert len(held) == 1
    call(conn, "configure_key", "gpu", max_running=None)
    assert pop(conn, bob) == [], "one place is the default"
    assert len(ids) == 6
    assert_sound(conn)


def _succeed(conn: Conn, bob: int, held: list[Held]) -> None:
    finish(conn, bob, held)


def _fail(conn: Conn, bob: int, held: list[Held]) -> None:
    finish(conn, bob, held, "failed")


def _retry(conn: Conn, bob: int, held: list[Held]) -> None:
    finish(conn, bob, held, "retry", delay="1 hour")


def _cancel(conn: Conn, bob: int, held: list[Held]) -> None:
    call(conn, "cancel_task", held[0])
    assert run(conn, "select fairq.heartbeat(%s)", bob) == [(held[0],)]
    finish(conn, bob, held, "cancelled")


def _expire(conn: Conn, bob: int, held: list[Held]) -> None:
    finish(conn, bob, held, "expired")


def _retire(conn: Conn, bob: int, held: list[Held]) -> None:
    call(conn, "pause_group", "default", "holder")
    call(conn, "retire_worker", bob)


def _lose(conn: Conn, bob: int, held: list[Held]) -> None:
    call(conn, "pause_group", "default", "holder")
    at(conn, "14:00:00")
    assert maintain(conn)["recovered"] == 1
    assert "recovered" not in maintain(conn)


def _give_back(conn: Conn, bob: int, held: list[Held]) -> None:
    call(conn, "pause_group", "default", "holder")
    release(conn, bob, held)
    assert release(conn, bob, held) == [], "once"


@pytest.mark.parametrize("end", [_succeed, _fail, _retry, _cancel, _expire, _retire, _lose, _give_back])
def test_a_held_key_comes_free_however_its_task_leaves(
    conn: Conn, end: Callable[[Conn, int, list[Held]], None]
) -> None:
    """I7, I10, D3, D4, D7, D8, S23, S24: once, and the stale holder frees nothing a second time."""
    bob = register(conn)
    create(conn, "holder", concurrency_key="k")
    held = pop(conn, bob)
    first, second = create(conn, "next", concurrency_key="k"), create(conn, "next", concurrency_key="k")
    assert pop(conn, bob) == []
    end(conn, bob, held)
    carol = register(conn)
    assert pop(conn, carol) == [first]
    assert finish(conn, bob, held) == [], "stale"
    assert pop(conn, carol) == []
    assert state(conn, second) == "blocked"
    assert in_flight(conn, "k", "#keys") == 1
    assert_sound(conn)


@pytest.mark.parametrize("how", ["cancel", "expire", "pause", "priority", "purge"])
def test_a_queued_key_comes_free_when_its_task_leaves_the_order(conn: Conn, how: str) -> None:
    """I7: a task that was given its key holds it, until it is recalled, cancelled or too late."""
    bob = register(conn)
    create(conn, "before", concurrency_key="k")
    held = pop(conn, bob)
    first = create(conn, "holder", concurrency_key="k", expires_at="2030-01-01 12:00:10+00")
    assert pop(conn, bob) == []
    assert state(conn, first) == "blocked"
    finish(conn, bob, held)
    promote(conn)
    assert (state(conn, first), in_flight(conn, "k", "#keys")) == ("queued", 1)
    if how == "cancel":
        call(conn, "cancel_task", first)
    elif how == "expire":
        at(conn, "12:00:11")
    elif how == "pause":
        call(conn, "pause_group", "default", "holder")
    elif how == "purge":
        call(conn, "purge_group", "default", "holder")
    second = create(conn, "holder" if how == "priority" else "next", concurrency_key="k", priority=5)
    held = pop(conn, bob)
    assert held == [second]
    assert_sound(conn)
    finish(conn, bob, held)
    assert pop(conn, bob) == ([first] if how == "priority" else [])


def test_blocked_tasks_may_be_cancelled_purged_or_too_late(conn: Conn) -> None:
    bob = register(conn)
    create(conn, "a", concurrency_key="k")
    held = pop(conn, bob)
    cancelled = create(conn, "b", concurrency_key="k")
    late = create(conn, "c", concurrency_key="k", expires_at="2030-01-01 12:00:10+00")
    purged = create(conn, "d", concurrency_key="k")
    last = create(conn, "e", concurrency_key="k")
    assert pop(conn, bob) == []
    call(conn, "cancel_task", cancelled)
    call(conn, "purge_group", "default", "d")
    at(conn, "12:00:11")
    finish(conn, bob, held)
    assert pop(conn, bob) == [last]
    maintain(conn)
    assert [state(conn, i) for i in (cancelled, late, purged)] == ["cancelled", "expired", "cancelled"]
    assert_sound(conn)


def test_a_paused_group_does_not_keep_a_key_from_others(conn: Conn) -> None:
    """I8: its blocked task goes back in line, but does not take the key."""
    bob = register(conn)
    create(conn, "a", concurrency_key="k")
    held = pop(conn, bob)
    waits = create(conn, "paused", concurrency_key="k")
    other = create(conn, "z", concurrency_key="k")
    pop(conn, bob)
    call(conn, "pause_group", "default", "paused")
    finish(conn, bob, held)
    held = pop(conn, bob)
    assert held == [other]
    call(conn, "resume_group", "default", "paused")
    assert pop(conn, bob) == []
    finish(conn, bob, held)
    assert pop(conn, bob) == [waits]
    assert_sound(conn)


def test_a_key_and_a_cap_hold_together(conn: Conn) -> None:
    """H38: caps compose."""
    call(conn, "configure_group", "default", "bob", max_running=2)
    bob = register(conn)
    for number in range(6):
        create(conn, "bob", concurrency_key=f"k{number % 2}")
    create_many(conn, "bob", 2)
    ended = 0
    while held := pop(conn, bob):
        assert len(held) <= 2
        keys = run(conn, "select concurrency_key from fairq.tasks where id = any(%s)", held)
        named = [k for (k,) in keys if k]
        assert len(named) == len(set(named))
        ended += len(finish(conn, bob, held))
        assert_sound(conn)
    assert ended == 8


def test_waiting_for_a_key_is_fair_between_groups(conn: Conn) -> None:
    """No starvation: groups that share a key take turns, also where one has many more tasks."""
    bob = register(conn)
    for _ in range(30):
        create(conn, "many", concurrency_key="k")
    for _ in range(3):
        create(conn, "few", concurrency_key="k")
    served: list[str] = []
    while held := pop(conn, bob):
        served += groups_of(held)
        finish(conn, bob, held)
    assert len(served) == 33
    assert served[:12].count("few") == 3, served


def test_a_key_nobody_uses_leaves_nothing_behind(conn: Conn) -> None:
    bob = register(conn)
    for number in range(200):
        create(conn, concurrency_key=f"k{number}")
    last = pop(conn, bob, 1)
    while held := pop(conn, bob, 50):
        finish(conn, bob, held)
    at(conn, "12:05:00")
    for _ in range(3):
        promote(conn)
        maintain(conn)
    assert one(conn, "select array_agg(group_key) from fairq.lanes where queue = '#keys'") == ["k0"]
    finish(conn, bob, last)


@pytest.mark.parametrize(
    ("how", "others"),
    [(how, others) for how in ("cancel", "expire", "expire unseen") for others in ("next", "rest")]
    + [("purge", "rest")],
)
@pytest.mark.parametrize("when", ["blocked", "next in line"])
def test_the_key_goes_on_when_the_next_in_line_ends_without_it(
    conn: Conn, how: str, others: str, when: str
) -> None:
    """I7, I8: whoever waits behind a task that was cancelled, purged or too late is served all the same."""
    bob = register(conn)
    create(conn, "holder", concurrency_key="k")
    held = pop(conn, bob)
    gone = create(conn, "next", concurrency_key="k", expires_at="2030-01-01 12:00:10+00")
    rest = [create(conn, others, concurrency_key="k") for _ in range(2)]
    assert pop(conn, bob) == []
    if when == "next in line":
        # The key is free, and nobody has taken it yet: those who wait for it are paused.
        call(conn, "pause_group", "default", "next")
        call(conn, "pause_group", "default", "rest")
        finish(conn, bob, held)
        assert pop(conn, bob) == []

    if how == "cancel":
        call(conn, "cancel_task", gone)
    elif how == "purge":
        call(conn, "purge_group", "default", "next")
    else:
        at(conn, "12:00:11")
        if how == "expire":
            maintain(conn)

    if when == "next in line":
        call(conn, "resume_group", "default", "next")
        call(conn, "resume_group", "default", "rest")
    else:
        finish(conn, bob, held)
    for expected in rest:
        held = pop(conn, bob)
        assert held == [expected]
        assert pop(conn, bob) == []
        finish(conn, bob, held)
    maintain(conn)
    assert state(conn, gone) == ("expired" if "expire" in how else "cancelled")
    assert_sound(conn)
