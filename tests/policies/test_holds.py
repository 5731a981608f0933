"""'Not before then', said of a group or a concurrency key: by the holder of a task, or by an operator."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.calls import (
    Conn,
    Held,
    at,
    call,
    create,
    create_all,
    create_many,
    drain,
    explain,
    field,
    finish,
    groups_of,
    maintain,
    one,
    pop,
    refused,
    register,
    run,
    states,
)
from tests.support.invariants import assert_sound, hear_all

pytestmark = pytest.mark.usefixtures("one_shard")


def postpone(
    conn: Conn, worker: int, held: Sequence[Held], hold: str | None, delay: str = "5 minutes"
) -> list[int]:
    return finish(conn, worker, held, "postponed", delay=delay, holds=[hold] * len(held))


def test_a_group_waits_until_then_and_no_attempt_is_burned(conn: Conn) -> None:
    worker = register(conn)
    create_many(conn, "bob", 5, max_attempts=1)
    create_many(conn, "alice", 2)
    held = pop(conn, worker, 1)
    assert groups_of(held) == ["bob"]
    assert postpone(conn, worker, held, "group") == held
    assert set(groups_of(pop(conn, worker, 10))) == {"alice"}
    assert "held until 2030-01-01 12:05:00+00 by task 1" in explain(conn, 2)
    assert one(conn, "select next_look_at from fairq.explain_task(2)").minute == 5
    assert one(conn, "select extract(epoch from fairq.next_due_at('default') - fairq._now())") == 300
    assert_sound(conn)
    at(conn, "12:04:59")
    assert pop(conn, worker, 10) == []
    at(conn, "12:05:00")
    held = pop(conn, worker, 10)
    assert [int(each) for each in held] == [1, 2, 3, 4, 5]
    assert (held[0].attempt, field(conn, 1, "max_attempts")) == (2, 2)
    assert finish(conn, worker, held) == held
    assert_sound(conn)


def test_a_key_waits_over_groups_and_queues(conn: Conn) -> None:
    call(conn, "configure_queue", "other")
    call(conn, "configure_key", "api", max_running=3)
    worker = register(conn, "default", "other")
    for group in ("bob", "alice", "carol"):
        create(conn, group, concurrency_key="api")
        create(conn, group, queue="other", concurrency_key="api")
        create(conn, group)
    held = [each for each in pop(conn, worker, 1) if field(conn, each, "keyed")]
    assert len(held) == 1
    postpone(conn, worker, held, "key")
    others = pop(conn, worker, 10)
    assert len(others) == 3
    assert not any(field(conn, each, "keyed") for each in others)
    assert pop(conn, worker, 10, queue="other") == []
    assert "held until 2030-01-01 12:05:00+00 by task" in explain(conn, int(held[0]))
    due = "select extract(epoch from fairq.next_due_at(%s) - fairq._now())"
    assert one(conn, due, "default") == 300
    due_in = "select due_in from fairq.turn(%s, '{default,other}', '{5,5}', 5) where due_in is not null"
    assert one(conn, due_in, worker) == pytest.approx(300)
    assert_sound(conn)
    at(conn, "12:05:00")
    assert len(pop(conn, worker, 10) + pop(conn, worker, 10, queue="other")) == 3
    finish(conn, worker, others)
    assert_sound(conn)


@pytest.mark.parametrize("hold", ["group", "key"])
def test_what_is_ready_is_recalled(conn: Conn, hold: str) -> None:
    call(conn, "configure_key", "api", max_running=50)
    worker = register(conn)
    create_many(conn, "bob", 20, concurrency_keys=["api"] * 20)
    create_many(conn, "alice", 3)
    run(conn, "select fairq.promote_overflow('default', 20)")
    held = [each for each in pop(conn, worker, 3) if each.group_key == "bob"]
    postpone(conn, worker, held[:1], hold)
    assert "bob" not in groups_of(pop(conn, worker, 30))
    assert set(states(conn).values()) <= {"overflow", "blocked", "running"}
    assert_sound(conn)
    at(conn, "12:05:00")
    assert len(pop(conn, worker, 30)) == 20 - len(held) + 1
    assert_sound(conn)


def test_the_later_one_wins(conn: Conn) -> None:
    worker = register(conn)
    create_many(conn, "bob", 4)
    held = pop(conn, worker, 3)
    postpone(conn, worker, held[:1], "group", "10 minutes")
    postpone(conn, worker, held[1:2], "group", "5 minutes")
    hear_all(conn)
    assert "held until 2030-01-01 12:10:00+00 by task 1" in explain(conn, 4)
    postpone(conn, worker, held[2:], "group", "20 minutes")
    hear_all(conn)
    assert "held until 2030-01-01 12:20:00+00 by task 3" in explain(conn, 4)
    at(conn, "12:10:00")
    assert pop(conn, worker, 5) == []
    at(conn, "12:20:00")
    assert len(pop(conn, worker, 5)) == 4
    assert_sound(conn)


def test_a_task_may_put_off_only_itself(conn: Conn) -> None:
    worker = register(conn)
    create_many(conn, "bob", 2)
    held = pop(conn, worker, 1)
    postpone(conn, worker, held, None)
    assert field(conn, 1, "state") == "scheduled"
    assert [int(each) for each in pop(conn, worker, 5)] == [2]
    at(conn, "12:05:00")
    assert [int(each) for each in pop(conn, worker, 5)] == [1]
    # One that has no key to hold puts off itself, too.
    create(conn, "carol")
    held = pop(conn, worker, 1)
    postpone(conn, worker, held, "key")
    assert field(conn, held[0], "state") == "scheduled"
    assert_sound(conn)


def test_one_that_ended_well_may_hold_its_group(conn: Conn) -> None:
    """Its answer said that there is nothing left for the next minute."""
    worker = register(conn)
    create_many(conn, "bob", 3)
    finish(conn, worker, pop(conn, worker, 1), delay="1 minute", holds=["group"])
    assert pop(conn, worker, 5) == []
    at(conn, "12:01:00")
    assert len(pop(conn, worker, 5)) == 2


def test_only_who_holds_a_task_holds_its_group(conn: Conn) -> None:
    worker, stranger = register(conn), register(conn)
    create_many(conn, "bob", 3)
    held = pop(conn, worker, 1)
    assert postpone(conn, stranger, held, "group") == []
    assert finish(conn, worker, held) == held
    assert postpone(conn, worker, held, "group") == []
    assert len(pop(conn, worker, 5)) == 2


@pytest.mark.parametrize("how", ["rebuild", "restore"])
@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("hold", ["group", "key"])
def test_a_hold_survives_a_rebuild(conn: Conn, hold: str, heard: bool, how: str) -> None:
    """I11: nobody else knows."""
    worker = register(conn)
    create_many(conn, "bob", 3, concurrency_keys=["api"] * 3)
    postpone(conn, worker, pop(conn, worker, 1), hold)
    if heard:
        hear_all(conn)
    if how == "rebuild":
        call(conn, "rebuild", "default")
    else:
        run(conn, "update fairq.ticks set written_by = '3'")
    hear_all(conn)
    maintain(conn)
    assert pop(conn, worker, 5) == []
    assert_sound(conn)
    at(conn, "12:05:00")
    assert len(pop(conn, worker, 5)) == 1
    assert_sound(conn)


def test_an_operator_holds_and_lets_go(conn: Conn) -> None:
    worker = register(conn)
    create_many(conn, "bob", 3)
    create(conn, "alice", concurrency_key="api")
    call(conn, "hold_group", "default", "bob", "2030-02-01 00:00:00+00")
    call(conn, "hold_key", "api", "2030-02-01 00:00:00+00")
    assert pop(conn, worker, 5) == []
    assert "held until 2030-02-01 00:00:00+00 by an operator" in explain(conn, 1)
    maintain(conn)
    assert_sound(conn)
    call(conn, "hold_group", "default", "bob", None)
    call(conn, "hold_key", "api", None)
    assert len(pop(conn, worker, 5)) == 4
    call(conn, "hold_group", "default", "bob", None)
    call(conn, "hold_key", "api", None)
    assert_sound(conn)


def test_a_group_nobody_knew_is_held_too(conn: Conn) -> None:
    worker = register(conn)
    call(conn, "hold_group", "default", "new", "2030-01-01 12:30:00+00")
    at(conn, "12:20:00")
    maintain(conn)
    maintain(conn)
    create(conn, "new")
    assert pop(conn, worker, 5) == []
    at(conn, "12:30:00")
    assert len(pop(conn, worker, 5)) == 1
    finish(conn, worker, pop(conn, worker, 5))
    hear_all(conn)
    assert_sound(conn)


@pytest.mark.parametrize(
    ("holds", "delay", "code"),
    [
        (["tenant"], "1 minute", "QF012"),
        (["group"], None, "QF009"),
        (["group"], "0", "QF009"),
        (["key"], "-1 minute", "QF009"),
        (["key"], "infinity", "QF009"),
        (["group"], "400 days", "QF009"),
        ([None], None, "QF009"),
        (["group", "group"], "1 minute", "QF011"),
    ],
)
def test_odd_holds_are_refused(conn: Conn, holds: Any, delay: str | None, code: str) -> None:
    if delay == "infinity" and conn.info.server_version < 170000:
        pytest.skip("intervals end before PostgreSQL 17")
    worker = register(conn)
    create(conn, "bob")
    held = pop(conn, worker, 1)
    with refused(conn, code):
        finish(conn, worker, held, "postponed", delay=delay, holds=holds)
    for until in ("2030-01-01 12:00:00+00", "2031-06-01 00:00:00+00", "infinity", "-infinity"):
        with refused(conn, "QF009"):
            call(conn, "hold_group", "default", "bob", until)
        with refused(conn, "QF009"):
            call(conn, "hold_key", "api", until)


def test_any_number_of_holds_may_end_at_once(conn: Conn) -> None:
    """A pass wakes a thousand keys. The groups stand at one place then, and a hundred go in a pass."""
    worker = register(conn)
    keys = [f"key {n}" for n in range(1001)]
    run(conn, "select fairq.hold_key(k, '2030-01-01 12:00:10+00') from unnest(%s::text[]) k", keys)
    create_all(conn, *[f"group {n}" for n in range(1001)], concurrency_keys=keys)
    for _ in range(11):
        assert pop(conn, worker) == []
    at(conn, "12:00:10")
    # All that share a place are ready before the first of them goes: that takes more than one pop.
    assert sum(len(drain(conn, worker)) for _ in range(3)) == 1001
    assert_sound(conn)


def test_a_tenant_is_held_with_all_its_users(conn: Conn) -> None:
    worker = register(conn)
    for number in range(9):
        create(conn, "bob", user_key=f"u{number % 3}")
    postpone(conn, worker, pop(conn, worker, 1), "group")
    assert pop(conn, worker, 10) == []
    assert_sound(conn)
    at(conn, "12:05:00")
    assert len(pop(conn, worker, 10)) == 9
    assert_sound(conn)
