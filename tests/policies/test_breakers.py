"""Breakers of groups: a broken credential stops burning attempts."""

import pytest

from tests.support.calls import (
    FINISH,
    Conn,
    at,
    call,
    create,
    create_many,
    finish,
    groups_of,
    held_by,
    maintain,
    one,
    pop,
    register,
    release,
    run,
    state,
)
from tests.support.invariants import assert_sound


def breaker(conn: Conn, threshold: int = 3, cooldown: str = "1 minute", **more: object) -> None:
    call(
        conn,
        "configure_group",
        "default",
        "bob",
        breaker_threshold=threshold,
        breaker_cooldown=cooldown,
        **more,
    )


def opened(conn: Conn, count: int = 10) -> int:
    """A worker, and a group whose breaker opened after three of so many tasks failed."""
    breaker(conn)
    bob = register(conn)
    create_many(conn, "bob", count)
    finish(conn, bob, pop(conn, bob, 3), "retry", delay="10 minutes")
    assert pop(conn, bob) == []
    return bob


def test_failures_in_a_row_open_it_and_queued_tasks_keep_their_attempts(conn: Conn) -> None:
    """D17, D19: what was ready goes back in line; nobody else notices."""
    bob = opened(conn)
    assert run(conn, "select state, sum(attempt), count(*) from fairq.live_tasks group by 1 order by 1") == [
        ("overflow", 0, 7),
        ("scheduled", 3, 3),
    ]
    create(conn, "alice")
    assert groups_of(pop(conn, bob)) == ["alice"]
    assert str(one(conn, "select fairq.next_due_at('default')")) == "2030-01-01 12:01:00+00:00"
    assert_sound(conn)


@pytest.mark.parametrize("outcome", ["succeeded", "cancelled", "expired", "released"])
def test_only_failures_count_and_a_success_starts_anew(conn: Conn, outcome: str) -> None:
    """D19, D24."""
    breaker(conn)
    bob = register(conn)
    create_many(conn, "bob", 30)
    for _ in range(2):
        finish(conn, bob, pop(conn, bob, 1), "failed")
    held = pop(conn, bob, 1)
    release(conn, bob, held) if outcome == "released" else finish(conn, bob, held, outcome)
    finish(conn, bob, pop(conn, bob, 1), "failed")
    assert len(pop(conn, bob, 1)) == (1 if outcome == "succeeded" else 0)


def test_order_within_one_call_counts(conn: Conn) -> None:
    """Two failures, a success, two failures, told at once: two in a row."""
    breaker(conn)
    bob = register(conn)
    create_many(conn, "bob", 10)
    held = pop(conn, bob, 5)
    outcomes = ["failed", "failed", "succeeded", "failed", "failed"]
    run(conn, FINISH, *held_by(bob, held), outcomes)
    (again,) = pop(conn, bob, 1)
    finish(conn, bob, [again], "failed")
    assert pop(conn, bob) == []


def test_half_open_lets_exactly_one_probe_through(conn: Conn) -> None:
    """D20, D21, however many workers ask, and however much they ask for."""
    bob = opened(conn)
    at(conn, "12:00:59.999")
    assert pop(conn, bob) == []
    at(conn, "12:01:00")
    probe = pop(conn, bob, 100)
    assert len(probe) == 1
    assert pop(conn, register(conn), 100) == []
    finish(conn, bob, probe, "failed")
    assert pop(conn, bob) == []
    at(conn, "12:01:59")
    assert pop(conn, bob) == []
    at(conn, "12:02:00")
    probe = pop(conn, bob)
    assert len(probe) == 1
    finish(conn, bob, probe)
    assert len(pop(conn, bob)) == 5, "closed: all that waits"
    assert_sound(conn)


@pytest.mark.parametrize("of", ["group", "queue"])
@pytest.mark.parametrize("outcome", ["failed", "succeeded"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rebuild_lets_no_second_probe_through(conn: Conn, of: str, outcome: str, when: str) -> None:
    """D21, I11: and how the first one ends is heard, before or after."""
    if of == "queue":
        call(conn, "configure_queue", "default", breaker_threshold=3, breaker_cooldown=60)
        bob = register(conn)
        create_many(conn, "bob", 10)
        finish(conn, bob, pop(conn, bob, 3), "failed")
        assert pop(conn, bob) == []
    else:
        bob = opened(conn)
    at(conn, "12:01:00")
    probe = pop(conn, bob)
    assert len(probe) == 1
    if when == "before":
        finish(conn, bob, probe, outcome)
    call(conn, "rebuild", "default")
    if when == "after":
        assert pop(conn, bob) == []
        finish(conn, bob, probe, outcome)
    assert len(pop(conn, bob)) == (6 if outcome == "succeeded" else 0)
    assert_sound(conn)


def test_a_lost_probe_times_out(conn: Conn) -> None:
    bob = opened(conn)
    at(conn, "12:01:00")
    assert len(pop(conn, bob)) == 1
    at(conn, "12:01:59")
    assert pop(conn, bob) == []
    at(conn, "12:02:00")
    assert len(pop(conn, bob)) == 1, "the first one was never heard of again"
    assert_sound(conn)


@pytest.mark.parametrize("how", ["release", "lost", "paused"])
def test_a_probe_that_comes_back_unfinished_is_tried_again(conn: Conn, how: str) -> None:
    """I8: it blocks its group for one cooldown at most."""
    bob = opened(conn)
    at(conn, "12:01:00")
    if how == "paused":
        run(conn, "select fairq.promote_overflow()")
        call(conn, "pause_group", "default", "bob")
        assert pop(conn, bob) == []
        call(conn, "resume_group", "default", "bob")
        assert len(pop(conn, bob)) == 1, "it never ran, so its turn is not used up"
        return
    probe = pop(conn, bob)
    if how == "release":
        release(conn, bob, probe)
    else:
        call(conn, "retire_worker", bob)
        bob = register(conn)
    at(conn, "12:02:00")
    assert len(pop(conn, bob)) == 1
    assert_sound(conn)


def test_failures_of_tasks_that_ran_before_it_opened_prolong_nothing(conn: Conn) -> None:
    breaker(conn)
    bob = register(conn)
    create_many(conn, "bob", 20)
    held = pop(conn, bob, 8)
    finish(conn, bob, held[:3], "failed")
    assert pop(conn, bob) == []
    at(conn, "12:00:30")
    finish(conn, bob, held[3:7], "failed")
    assert pop(conn, bob) == []
    at(conn, "12:01:00")
    assert len(pop(conn, bob)) == 1
    assert_sound(conn)


def test_a_breaker_that_is_lifted_closes(conn: Conn) -> None:
    bob = opened(conn)
    call(conn, "configure_group", "default", "bob", breaker_threshold=None)
    assert len(pop(conn, bob)) == 7
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_a_breaker_for_every_group_of_a_queue_counts_each_by_itself(conn: Conn) -> None:
    call(conn, "configure_queue", "default", group_breaker_threshold=2, group_breaker_cooldown="1 minute")
    bob = register(conn)
    for group in ("a", "b"):
        create_many(conn, group, 5)
    held = pop(conn, bob, 2)
    finish(conn, bob, held, "failed")
    assert sorted(groups_of(held)) == ["a", "b"]
    held = pop(conn, bob, 2)
    finish(conn, bob, [each for each in held if each.group_key == "a"], "failed")
    finish(conn, bob, [each for each in held if each.group_key == "b"])
    assert groups_of(pop(conn, bob)) == ["b"] * 3
    assert_sound(conn)


def test_a_tenant_whose_tasks_always_fail_burns_few_attempts(conn: Conn) -> None:
    """An hour of a broken credential: three attempts, then one a minute; the others are served."""
    breaker(conn)
    bob = register(conn)
    create_many(conn, "bob", 500)
    create_many(conn, "alice", 600)
    failed = served = 0
    for minute in range(60):
        at(conn, f"12:{minute:02}:00")
        held = pop(conn, bob, 10)
        mine = [each for each in held if each.group_key == "bob"]
        failed += len(finish(conn, bob, mine, "failed"))
        served += len(finish(conn, bob, [each for each in held if each.group_key == "alice"]))
    assert failed <= 5 + 59
    assert served == 600 - failed
    assert one(conn, "select count(*) from fairq.tasks where group_key = 'bob'") == 500 - failed
    maintain(conn)
    assert_sound(conn)


def test_attempts_of_a_lost_worker_are_no_failures_of_the_handler(conn: Conn) -> None:
    breaker(conn, threshold=1)
    bob = register(conn, lease="1 minute")
    ids = create_many(conn, "bob", 3)
    pop(conn, bob)
    at(conn, "12:30:00")
    assert maintain(conn)["recovered"] == 3
    assert len(pop(conn, register(conn))) == 3
    assert {state(conn, i) for i in ids} == {"running"}
    assert_sound(conn)
