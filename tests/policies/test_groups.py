"""Weights, costs, caps, priorities, pauses and purges of groups."""

from collections import Counter

import pytest

from tests.support.calls import (
    Conn,
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
    run,
    state,
    users_of,
    written,
)
from tests.support.invariants import assert_sound

# Weights and costs


@pytest.mark.usefixtures("one_shard")
def test_weights_share_the_order_exactly(conn: Conn) -> None:
    """I3, I4: in every whole round three groups of weights 1, 2 and 5 have 1, 2 and 5 tasks."""
    shares = {"one": 1, "two": 2, "five": 5}
    for group, weight in shares.items():
        call(conn, "configure_group", "default", group, weight=weight)
        create_many(conn, group, 20 * weight)
    served = groups_of(pop(conn, register(conn), 1000))
    for rounds in (1, 5, 13, 20):
        assert Counter(served[: 8 * rounds]) == {group: rounds * weight for group, weight in shares.items()}


@pytest.mark.usefixtures("one_shard")
def test_the_weight_of_a_queue_holds_for_groups_without_one(conn: Conn) -> None:
    call(conn, "configure_queue", "default", weight=4)
    call(conn, "configure_group", "default", "light", weight=1)
    for group in ("light", "heavy"):
        create_many(conn, group, 40)
    assert Counter(groups_of(pop(conn, register(conn), 40))) == {"light": 8, "heavy": 32}


@pytest.mark.usefixtures("one_shard")
def test_a_weight_changes_at_run_time_and_back(conn: Conn) -> None:
    """I5: only what is promoted from now on counts, nothing is made up for."""
    call(conn, "configure_queue", "default", ready_target=4)
    bob = register(conn)
    for group in ("a", "b"):
        create_many(conn, group, 200)
    assert Counter(groups_of(pop(conn, bob, 20))) == {"a": 10, "b": 10}
    call(conn, "configure_group", "default", "a", weight=3)
    pop(conn, bob, 8)  # what had its address already
    assert Counter(groups_of(pop(conn, bob, 40)))["a"] in (29, 30, 31)
    call(conn, "configure_group", "default", "a", weight=None)
    pop(conn, bob, 8)
    assert Counter(groups_of(pop(conn, bob, 20)))["a"] in (9, 10, 11)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("of", ["group", "user"])
@pytest.mark.parametrize("fairness", ["count", "cost"])
@pytest.mark.parametrize("seen", ["when it is heard of", "before it is heard of"])
@pytest.mark.parametrize("weights", [(0.1, 1), (1, 0.1)])
def test_a_new_weight_is_for_turns_to_come(
    conn: Conn, fairness: str, seen: str, weights: tuple[float, float], of: str
) -> None:
    """I4, I14: what is ready goes back in line, and costs what it did. One may promote as it commits."""

    def set_weight(weight: float) -> None:
        name = ["bob"] if of == "group" else ["g", "bob"]
        call(conn, f"configure_{of}", "default", *name, weight=weight)

    def add(name: str, count: int) -> None:
        create_many(conn, name if of == "group" else "g", count, user_keys=[name] * count)

    call(conn, "configure_queue", "default", fairness=fairness)
    set_weight(weights[0])
    add("bob", 60)
    add("alice", 1)  # Users have an order among them only where there are several.
    promote(conn)
    if seen == "before it is heard of":
        run(conn, "update fairq.groups set weight = %s", weights[1])
        add("bob", 1)
        promote(conn)
    add("alice", 60)
    set_weight(weights[1])
    bobs = users_of(pop(conn, register(conn), 40)).count("bob")
    assert bobs == pytest.approx(40 * weights[1] / (weights[1] + 1), abs=1)
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_costs_are_shared_not_counts(conn: Conn) -> None:
    """I4: tasks of cost 10 come a tenth as often as tasks of cost 1."""
    create_many(conn, "dear", 20, cost=10)
    create_many(conn, "cheap", 200, cost=1)
    assert Counter(groups_of(pop(conn, register(conn), 110))) == {"dear": 10, "cheap": 100}


# Caps


def test_a_cap_counts_claimed_and_running_and_a_raised_one_fills_at_once(conn: Conn) -> None:
    """I7, H7, H14, H17, S10, F30."""
    call(conn, "configure_group", "default", "bob", max_running=2)
    bob = register(conn)
    create_many(conn, "bob", 10)
    held = pop(conn, bob) + pop(conn, bob, lease="1 minute")
    assert len(held) == 2
    assert one(conn, "select count(*) from fairq.live_tasks where state = 'queued'") == 0, (
        "gated work is not ready"
    )
    call(conn, "configure_group", "default", "bob", max_running=5)
    assert len(pop(conn, bob, lease="1 minute")) == 3
    assert pop(conn, bob) == []
    assert_sound(conn)


def test_a_lowered_cap_drains_and_recalls_what_is_only_queued(conn: Conn) -> None:
    """I7: tasks that were ready to be popped under the old cap go back in line."""
    call(conn, "configure_group", "default", "bob", max_running=6)
    bob = register(conn)
    create_many(conn, "bob", 10)
    held = pop(conn, bob, 4)
    call(conn, "configure_group", "default", "bob", max_running=3)
    assert one(conn, "select count(*) from fairq.live_tasks where state = 'queued'") == 0
    for number in range(4):
        # One of four ends: three are left, which is the cap. Each further end lets one in.
        assert len(pop(conn, bob)) == (1 if number > 1 else 0)
        finish(conn, bob, held[number : number + 1])
    assert_sound(conn)


def test_a_cap_on_a_running_group_counts_what_is_in_flight(conn: Conn) -> None:
    """I7: neither tasks that run nor tasks that are queued escape a cap that comes later."""
    bob = register(conn)
    create_many(conn, "bob", 50)
    held = pop(conn, bob, 3)
    call(conn, "configure_group", "default", "bob", max_running=4)
    assert in_flight(conn, "bob") == 4
    assert len(pop(conn, bob)) == 1
    finish(conn, bob, held)
    assert len(pop(conn, bob)) == 3
    assert_sound(conn)


@pytest.mark.parametrize("another_limit", [{}, {"rate_limit": 1000}, {"breaker_threshold": 9}])
def test_a_cap_that_is_lifted_and_set_again_counts_right(conn: Conn, another_limit: dict[str, int]) -> None:
    """I7: a limit that stays must not keep the places of one that went."""
    call(conn, "configure_group", "default", "bob", max_running=3, **another_limit)
    bob = register(conn)
    create_many(conn, "bob", 40)
    held = pop(conn, bob)
    assert len(held) == 3
    call(conn, "configure_group", "default", "bob", max_running=None)
    held += pop(conn, bob, 4)
    assert len(held) == 7
    assert_sound(conn)
    call(conn, "configure_group", "default", "bob", max_running=8)
    assert_sound(conn)
    assert len(pop(conn, bob)) == 1
    finish(conn, bob, held)
    assert len(pop(conn, bob)) == 7
    assert_sound(conn)


def test_a_rate_alone_takes_no_places(conn: Conn) -> None:
    """I7: tasks let through by a rate are not counted, so a cap that comes later is not full of ghosts."""
    call(conn, "configure_group", "default", "bob", rate_limit=100, rate_burst=100)
    bob = register(conn)
    create_many(conn, "bob", 30)
    finish(conn, bob, pop(conn, bob, 20))
    call(conn, "configure_group", "default", "bob", max_running=5)
    assert_sound(conn)
    assert len(pop(conn, bob)) == 5


@pytest.mark.usefixtures("one_shard")
def test_a_queue_gives_all_groups_a_cap_and_a_group_may_have_its_own(conn: Conn) -> None:
    """H11, H38."""
    bob = register(conn)
    for group in ("a", "b", "c"):
        create_many(conn, group, 20)
    pop(conn, bob, 3)
    call(conn, "configure_queue", "default", group_max_running=2)
    call(conn, "configure_group", "default", "c", max_running=5)
    create_many(conn, "new", 20)
    pop(conn, bob)
    running: dict[str, int] = dict(
        run(conn, "select group_key, count(*) from fairq.live_tasks where state = 'running' group by 1")
    )
    assert running == {"a": 2, "b": 2, "c": 5, "new": 2}
    assert_sound(conn)
    call(conn, "configure_group", "default", "c", max_running=None)
    call(conn, "configure_queue", "default", group_max_running=None)
    assert len(pop(conn, bob)) == 69, "without a cap spare slots are always used (F31)"
    assert_sound(conn)


def test_a_cap_of_nothing_stops_a_group(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", max_running=0)
    create_many(conn, "bob", 3)
    create(conn, "alice")
    bob = register(conn)
    assert groups_of(pop(conn, bob)) == ["alice"]
    call(conn, "configure_group", "default", "bob", max_running=9)
    assert groups_of(pop(conn, bob)) == ["bob"] * 3


def test_capped_groups_hold_nobody_up(conn: Conn) -> None:
    """I8, S10: with one slot each, ten capped groups and one free one, the free one uses all that is left."""
    call(conn, "configure_queue", "default", group_max_running=1)
    call(conn, "configure_group", "default", "free", max_running=1000)
    for number in range(10):
        create_many(conn, f"g{number}", 30)
    create_many(conn, "free", 30)
    assert Counter(groups_of(pop(conn, register(conn), 40))) == {"free": 30} | {f"g{n}": 1 for n in range(10)}


# Priority


@pytest.mark.usefixtures("one_shard")
def test_priority_is_strict_in_its_group_also_against_queued_tasks_and_nothing_outside(conn: Conn) -> None:
    """H30, S16, I3, I12: the higher number first."""
    low = create_many(conn, "bob", 6)
    create_many(conn, "alice", 6)
    promote(conn)
    high = create(conn, "bob", priority=9)
    bob = register(conn)
    served = pop(conn, bob, 14)
    assert [i for i in served if i in {high, *low}] == [high, *low]
    assert Counter(groups_of(served[:12])) == {"bob": 6, "alice": 6}, "the others wait no longer for it"


def test_a_recall_keeps_places_of_a_capped_group(conn: Conn) -> None:
    """I7, I12: the recalled tasks give back their places and take them again."""
    call(conn, "configure_group", "default", "bob", max_running=3)
    low = create_many(conn, "bob", 5)
    promote(conn)
    high = create(conn, "bob", priority=9)
    bob = register(conn)
    assert pop(conn, bob) == [high, *low[:2]]
    assert_sound(conn)


# Pause and purge


@pytest.mark.usefixtures("one_shard")
def test_a_paused_group_is_not_served_and_its_queued_tasks_go_back_in_line(conn: Conn) -> None:
    """S14, S18, S19."""
    bob = register(conn)
    ids = create_many(conn, "bob", 6)
    create_many(conn, "alice", 2)
    held = pop(conn, bob, 2)
    call(conn, "pause_group", "default", "bob")
    call(conn, "pause_group", "default", "bob")
    assert groups_of(pop(conn, bob)) == ["alice"]
    assert [state(conn, i) for i in ids[1:]] == ["overflow"] * 5
    assert len(finish(conn, bob, held)) == 2, "running ones go on"
    call(conn, "resume_group", "default", "bob")
    assert pop(conn, bob) == ids[1:], "at their old places"
    assert pop(conn, bob) == []
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_what_a_paused_group_missed_is_not_made_up_for(conn: Conn) -> None:
    """I5."""
    create_many(conn, "bob", 100)
    create_many(conn, "alice", 200)
    bob = register(conn)
    call(conn, "pause_group", "default", "bob")
    assert set(groups_of(pop(conn, bob, 100))) == {"alice"}
    call(conn, "resume_group", "default", "bob")
    assert Counter(groups_of(pop(conn, bob, 100))) == {"alice": 50, "bob": 50}


def test_a_paused_queue_gives_nothing_but_takes_everything(conn: Conn) -> None:
    """S14."""
    bob = register(conn)
    create_many(conn, "bob", 3)
    held = pop(conn, bob, 1)
    call(conn, "pause_queue", "default")
    assert pop(conn, bob) == []
    create_many(conn, "alice", 1)
    assert promote(conn) >= 1
    assert len(finish(conn, bob, held)) == 1
    call(conn, "resume_queue", "default")
    assert sorted(groups_of(pop(conn, bob))) == ["alice", "bob", "bob"]


@pytest.mark.parametrize("what", ["pause_group", "resume_group"])
def test_pausing_writes_as_much_for_a_million_tasks_as_for_one(conn: Conn, what: str) -> None:
    """S18: one row of settings, one ring, and a note for the ledger; the call touches no task."""
    create_many(conn, "bob", 5000)
    call(conn, "pause_group", "default", "bob")
    with conn.transaction():
        before = written(conn)
        call(conn, what, "default", "bob")
        after = written(conn)
    assert {
        table: after[table] - before.get(table, 0) for table in after if after[table] != before.get(table, 0)
    } == {
        "groups": 1,
        "rings": 1,
        "limit_changes": 1,
    }


def test_a_recall_moves_at_most_the_ready_set(conn: Conn) -> None:
    """S18: pausing a group with 3,000 tasks puts back those few that were ready."""
    call(conn, "configure_queue", "default", ready_target=50)
    create_many(conn, "bob", 3000)
    promote(conn)
    ready = one(conn, "select count(*) from fairq.live_tasks where state = 'queued'")
    assert 0 < ready <= 60
    call(conn, "pause_group", "default", "bob")
    with conn.transaction():
        before = written(conn)
        promote(conn)
        after = written(conn)
        assert after["ready"] - before["ready"] == ready
        assert after["tasks"] == before["tasks"], "bodies do not move"


@pytest.mark.usefixtures("one_shard")
def test_purging_ends_what_waits_in_every_state_and_leaves_what_runs(conn: Conn) -> None:
    bob = register(conn)
    call(conn, "configure_group", "default", "bob", max_running=4)
    ids = create_many(conn, "bob", 6)
    create(conn, "carol", concurrency_key="k")
    held = pop(conn, bob, 2)
    assert groups_of(held) == ["bob", "carol"]
    scheduled = create(conn, "bob", run_at="2030-01-02 00:00:00+00")
    blocked = [create(conn, "bob", concurrency_key="k", priority=1) for _ in range(3)]
    other = create(conn, "alice")
    assert pop(conn, bob, 1) == [other]
    assert {state(conn, i) for i in blocked} == {"blocked"}
    assert {state(conn, i) for i in ids[1:]} == {"queued", "overflow"}
    assert call(conn, "purge_group", "default", "bob") == [(9,)]
    assert {state(conn, i) for i in [*ids[1:], scheduled, *blocked]} == {"cancelled"}
    assert (state(conn, ids[0]), state(conn, other)) == ("running", "running")
    finish(conn, bob, held)
    assert call(conn, "purge_group", "default", "bob") == [(0,)]
    assert_sound(conn)
    create(conn, "alice", concurrency_key="k")
    assert len(pop(conn, bob)) == 1, "the key is free again"


@pytest.mark.usefixtures("one_shard")
def test_a_purged_group_owes_nothing(conn: Conn) -> None:
    """I5: tasks that were never run do not push the group back."""
    bob = register(conn)
    create_many(conn, "alice", 1)
    create_many(conn, "bob", 500)
    promote(conn)
    call(conn, "purge_group", "default", "bob")
    create_many(conn, "alice", 99)
    create_many(conn, "bob", 100)
    assert Counter(groups_of(pop(conn, bob, 100)))["bob"] in (49, 50, 51)


def test_a_purge_reads_the_group_and_not_the_queue(conn: Conn) -> None:
    """I9: what it costs does not depend on how much others have waiting."""
    create_all(conn, *[f"group {n % 1000}" for n in range(20000)])
    create_many(conn, "bob", 20)
    run(conn, "analyze fairq.tasks")
    read = "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relname = 'tasks'"
    before = one(conn, read)
    assert call(conn, "purge_group", "default", "bob") == [(20,)]
    assert one(conn, read) - before < 1000


def test_limits_survive_maintenance_and_the_loss_of_derived_state(conn: Conn) -> None:
    """I11: a swept lane, and a restored dump, leave every cap as it was."""
    call(conn, "configure_group", "default", "bob", max_running=2)
    call(conn, "configure_queue", "default", max_running=3)
    call(conn, "configure_key", "free", max_running=2)
    call(conn, "configure_key", "shut", max_running=0)
    bob = register(conn)
    for lose in (False, True):
        if lose:
            for table in ("ticks", "lanes", "rings"):
                run(conn, f"delete from fairq.{table}")  # noqa: S608
        else:
            maintain(conn)
            maintain(conn)
        create_many(conn, "bob", 3)
        for _ in range(3):
            create(conn, "alice", concurrency_key="free")
        shut = create(conn, "carol", concurrency_key="shut")
        held = pop(conn, bob)
        assert len(held) == 3
        assert_sound(conn)
        finish(conn, bob, held)
        while held := pop(conn, bob):
            assert len(held) <= 3
            assert groups_of(held).count("bob") <= 2
            assert groups_of(held).count("alice") <= 2
            finish(conn, bob, held)
        assert state(conn, shut) == "blocked"
        assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_tasks_lost_with_the_derived_state_are_counted_again(conn: Conn) -> None:
    """I11: what is in flight when a dump is restored keeps its places."""
    call(conn, "configure_group", "default", "bob", max_running=3)
    call(conn, "configure_queue", "default", max_running=4)
    bob = register(conn)
    create_many(conn, "bob", 9)
    create(conn, "alice", concurrency_key="k")
    create(conn, "carol", concurrency_key="k")
    held = pop(conn, bob)
    assert len(held) == 4
    for table in ("ticks", "lanes", "rings"):
        run(conn, f"delete from fairq.{table}")  # noqa: S608
    assert pop(conn, bob) == []
    assert_sound(conn)
    finish(conn, bob, held)
    assert len(pop(conn, bob)) == 4
    assert_sound(conn)
    at(conn, "12:00:01")


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("fairness", ["count", "time", "cost"])
@pytest.mark.parametrize("how", ["pop", "upkeep"])
@pytest.mark.parametrize("users", [None, ["a", "b"]], ids=["groups", "users"])
def test_tasks_that_expire_while_they_are_ready_cost_no_turn(
    conn: Conn, fairness: str, how: str, users: list[str] | None
) -> None:
    """I4: what is served instead comes as soon as if they had expired in line."""
    call(conn, "configure_queue", "default", fairness=fairness)
    bob = register(conn, slots=1000)
    at(conn, "12:00:00")
    options = {"user_keys": users * 50} if users else {}
    late = create_many(conn, "late", 100, expires_at="2030-01-01 12:00:10+00", **options)
    create_many(conn, "other", 300)
    promote(conn, limit=200)
    assert in_flight(conn, "late") == 0
    at(conn, "12:00:11")
    create_many(conn, "late", 100, **({"user_keys": users * 50} if users else {}))
    if how == "upkeep":
        assert maintain(conn)["expired"] == 100
        assert_sound(conn)
    served = pop(conn, bob, 40)
    assert Counter(groups_of(served)) == {"late": 20, "other": 20}
    if users:
        assert Counter(users_of(served)) == {None: 20, "a": 10, "b": 10}
    assert {state(conn, each) for each in late} == {"expired"}
    assert Counter(groups_of(pop(conn, bob, 40))) == {"late": 20, "other": 20}
    assert_sound(conn)
