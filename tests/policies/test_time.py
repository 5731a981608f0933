"""Groups that share worker seconds: fairness = 'time'. The engine's test clock makes the seconds exact."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.calls import (
    Conn,
    Held,
    call,
    create,
    create_many,
    empty,
    finish,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
)
from tests.support.invariants import hear_all

NOON = datetime(2030, 1, 1, 12)
SLOTS = 4

pytestmark = pytest.mark.usefixtures("one_shard")


def share_time(conn: Conn, **options: Any) -> None:
    call(conn, "configure_queue", "default", fairness="time", **options)


def set_time(conn: Conn, seconds: float) -> None:
    moment = NOON + timedelta(seconds=seconds)
    run(conn, "select set_config('fairq.now', %s, false)", moment.isoformat(sep=" ") + "+00")


def simulate(
    conn: Conn,
    duration: Callable[[str, int], float],
    until: float,
    *,
    slots: int = SLOTS,
    watch: Callable[[Mapping[str, float]], None] = lambda used: None,
) -> dict[str, float]:
    """One worker; tasks take what `duration(group, id)` says. Returns the seconds of each group."""
    set_time(conn, 0)
    worker_id = register(conn, slots=slots)
    running: list[tuple[float, Held]] = []
    used: defaultdict[str, float] = defaultdict(float)
    now = 0.0
    while now < until:
        for held in pop(conn, worker_id, slots - len(running)):
            heapq.heappush(running, (now + duration(held.group_key, held), held))
        if not running:
            break
        ends, _ = running[0]
        for _, held in running:
            used[held.group_key] += min(ends, until) - now
        now = ends
        set_time(conn, now)
        done = []
        while running and running[0][0] <= now:
            done.append(heapq.heappop(running)[1])
        finish(conn, worker_id, done)
        watch(used)
    return dict(used)


def estimates(conn: Conn) -> dict[tuple[str, str], tuple[float, int]]:
    hear_all(conn)
    rows = run(conn, "select group_key, kind, used, tasks from fairq.estimates")
    return {(group, kind): (seconds, count) for group, kind, seconds, count in rows}


def finish_of(conn: Conn, group: str) -> float:
    """How many rounds of the lane lie ahead of the clock. A group without a lane stands at it."""
    query = (
        "select coalesce(fairq._rounds((fairq._lane(0, 'default', %s)).finish - k.clock), 0)"
        " from fairq._tick(0, 'default') k"
    )
    return float(one(conn, query, group))


def test_a_minute_and_a_second_get_the_same_worker_seconds(conn: Conn) -> None:
    """F1, I4 in seconds: by count, the tenant of long tasks would have 98 % of the workers."""
    share_time(conn, ready_target=20)
    create_many(conn, "long", 100)
    create_many(conn, "short", 1500)
    used = simulate(conn, lambda group, _: 60.0 if group == "long" else 1.0, until=600)
    assert sum(used.values()) == pytest.approx(600 * SLOTS)
    # The longest task of each, per slot, and what was promoted before its length was known.
    assert abs(used["long"] - used["short"]) <= 2 * SLOTS * 60


def test_by_count_they_do_not(conn: Conn) -> None:
    """The same load in a queue that counts, which shows what the setting does."""
    call(conn, "configure_queue", "default", ready_target=20)
    create_many(conn, "long", 100)
    create_many(conn, "short", 1500)
    used = simulate(conn, lambda group, _: 60.0 if group == "long" else 1.0, until=600)
    assert used["long"] > 20 * used["short"]


def test_weights_are_shares_of_the_time(conn: Conn) -> None:
    share_time(conn, ready_target=20)
    for group, weight in (("one", 1), ("two", 2), ("five", 5)):
        call(conn, "configure_group", "default", group, weight=weight)
        create_many(conn, group, 800)
    lengths = {"one": 1.0, "two": 10.0, "five": 3.0}
    used = simulate(conn, lambda group, _: lengths[group], until=300)
    assert used["one"] == pytest.approx(300 * SLOTS / 8, rel=0.1)
    assert used["two"] == pytest.approx(300 * SLOTS / 4, rel=0.1)
    assert used["five"] == pytest.approx(300 * SLOTS * 5 / 8, rel=0.1)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.lists(st.floats(0.01, 30), min_size=1, max_size=5), min_size=2, max_size=4))
@example(lengths=[[10.0], [0.125, 0.25, 9.0]])
def test_nobody_is_apart_by_more_than_the_bound(conn: Conn, lengths: list[list[float]]) -> None:
    """I4 in seconds: whatever the tasks of each group take, in whatever pattern."""
    empty(conn, "tasks", "rings", "lanes", "ticks", "workers")
    share_time(conn, ready_target=8)
    groups = [f"g{n}" for n in range(len(lengths))]
    for group in groups:
        create_many(conn, group, 150)
    longest = max(max(each) for each in lengths)
    shortest_total = min(sum(each) / len(each) for each in lengths) * 150

    def duration(group: str, task: int) -> float:
        pattern = lengths[int(group[1:])]
        return pattern[task % len(pattern)]

    worst = 0.0

    def watch(used: Mapping[str, float]) -> None:
        nonlocal worst
        seconds = [used.get(group, 0.0) for group in groups]
        worst = max(worst, max(seconds) - min(seconds))

    simulate(conn, duration, until=min(15 * longest, shortest_total / SLOTS), watch=watch)
    # One task of each; those in flight and ready (up to twice the target) were charged by the estimate.
    assert worst <= 2 * longest + (SLOTS + 2 * 8) * max(longest, 1)


def test_the_estimate_is_the_mean_and_follows(conn: Conn) -> None:
    share_time(conn)
    simple = {"short": 2.0, "long": 50.0}
    for kind in simple:
        create_many(conn, "bob", 20, kind=kind)
    kinds: dict[int, str] = dict(run(conn, "select id, kind from fairq.tasks"))
    simulate(conn, lambda _, task: simple[kinds[task]], until=10_000)
    known = estimates(conn)
    assert known["bob", "short"][0] == pytest.approx(2.0)
    assert known["bob", "long"][0] == pytest.approx(50.0)
    assert {count for _, count in known.values()} == {16}


def test_before_anything_is_known_the_cost_is_the_guess(conn: Conn) -> None:
    share_time(conn)
    create(conn, "bob", cost=30)
    create(conn, "bob")
    promote(conn)
    assert run(conn, "select charge from fairq.live_tasks order by id") == [(30.0,), (1.0,)]
    assert finish_of(conn, "bob") == pytest.approx(31)


def test_a_hang_makes_the_next_tasks_little_dearer_but_is_paid_for(conn: Conn) -> None:
    """Without a clamp the estimate winds up: a task that hung would banish its group for days."""
    share_time(conn, ready_target=1)
    create_many(conn, "alice", 50)
    create_many(conn, "bob", 200)
    calm = simulate(conn, lambda *_: 1.0, until=20)
    assert calm["bob"] == pytest.approx(calm["alice"], abs=SLOTS + 1)
    before = next(seconds for (group, _), (seconds, _) in estimates(conn).items() if group == "bob")
    worker_id = register(conn)
    hung = next(held for held in iter(lambda: pop(conn, worker_id, 1)[0], None) if held.group_key == "bob")
    set_time(conn, 20 + 1800)
    finish(conn, worker_id, [hung])
    hear_all(conn)
    after = next(seconds for (group, _), (seconds, _) in estimates(conn).items() if group == "bob")
    assert after <= before * 1.25
    assert finish_of(conn, "bob") > 1700


def test_an_attempt_counts_for_an_hour_at_most(conn: Conn) -> None:
    share_time(conn)
    create_many(conn, "bob", 2)
    set_time(conn, 0)
    worker_id = register(conn)
    held = pop(conn, worker_id, 1)
    set_time(conn, 10 * 86400)
    finish(conn, worker_id, held)
    assert next(iter(estimates(conn).values())) == (3600.0, 1)


def test_what_was_charged_too_much_comes_back(conn: Conn) -> None:
    """Down to the last address given out, and no further: tasks of a group keep their order."""
    share_time(conn)
    create(conn, "bob", cost=100)
    create(conn, "alice", cost=100)
    set_time(conn, 0)
    worker_id = register(conn)
    (held,) = pop(conn, worker_id, 1)
    set_time(conn, 2)
    before = one(conn, "select (fairq._lane(0, 'default', 'bob')).finish")
    finish(conn, worker_id, [held])
    hear_all(conn)
    lane = one(conn, "select fairq._rounds(%s - (fairq._lane(0, 'default', 'bob')).finish)", before)
    assert lane == pytest.approx(98, abs=0.01)


@pytest.mark.parametrize("leave", ["release", "lost", "cancel", "expired"])
def test_who_did_not_run_is_not_charged(conn: Conn, leave: str) -> None:
    """The ways out of flight but a finish: nothing of the charge of 50 stays, and nothing is learned."""
    share_time(conn)
    set_time(conn, 0)
    deadline = {"expires_at": f"{NOON + timedelta(seconds=30)}+00"} if leave == "expired" else {}
    create(conn, "bob", cost=50, **deadline)
    keeper = register(conn, lease="1 minute")
    create_many(conn, "alice", 2)
    if leave in {"release", "lost"}:
        held = [each for each in pop(conn, keeper, 2) if each.group_key == "bob"]
        assert held
        if leave == "release":
            release(conn, keeper, held)
        else:
            set_time(conn, 0.001)
            run(conn, "select fairq.retire_worker(%s)", keeper)
    else:
        promote(conn)
        bob = one(conn, "select id from fairq.tasks where group_key = 'bob'")
        if leave == "cancel":
            run(conn, "select fairq.cancel_task(%s)", bob)
        else:
            set_time(conn, 31)
            maintain(conn)
    hear_all(conn)
    assert finish_of(conn, "bob") <= 50.01
    assert not any(group == "bob" for group, _ in estimates(conn))


def test_a_lone_groups_long_past_costs_nothing(conn: Conn) -> None:
    """I5: an hour of worker time that nobody else asked for is not held against it."""
    share_time(conn)
    create(conn, "bob")
    simulate(conn, lambda *_: 3600.0, until=10_000)
    hear_all(conn)
    assert finish_of(conn, "bob") <= 0
    create_many(conn, "bob", 3)
    create_many(conn, "alice", 3)
    worker_id = register(conn)
    assert {held.group_key for held in pop(conn, worker_id, 2)} == {"alice", "bob"}


def test_tasks_that_come_one_by_one_are_not_all_charged_as_they_come(conn: Conn) -> None:
    """F1: more come than are served, so the backlog grows; then tasks of one group grow long."""
    share_time(conn, ready_target=8)
    lengths = {"long": 0.5, "short": 0.5}
    come = 1  # of each group with every task that starts: as many as a pass promotes

    def duration(group: str, _: int) -> float:
        for each in lengths:
            create_many(conn, each, come)
        ready = one(conn, "select count(*) from fairq.live_tasks where state = 'queued'")
        assert ready <= 2 * 8 + 2 * come
        return lengths[group]

    for group in lengths:
        create_many(conn, group, 1)
    simulate(conn, duration, until=80)
    lengths["long"] = 5.0
    come = 0
    used = simulate(conn, duration, until=60)
    assert sum(used.values()) == pytest.approx(60 * SLOTS)
    assert abs(used["long"] - used["short"]) <= 2 * SLOTS * 5 + 2 * 8 * 5


@pytest.mark.parametrize("how", ["cancel", "priority", "pause"])
def test_what_a_group_owes_is_not_forgotten_by_a_recall(conn: Conn, how: str) -> None:
    """F1: an hour of debt is not worth one task to cancel; nor is credit lost."""
    share_time(conn, ready_target=8)
    create_many(conn, "bob", 60)
    create_many(conn, "alice", 60)
    simulate(conn, lambda *_: 1.0, until=10)
    worker_id = register(conn)
    hung = next(held for held in iter(lambda: pop(conn, worker_id, 1)[0], None) if held.group_key == "bob")
    set_time(conn, 10 + 1000)
    finish(conn, worker_id, [hung])
    hear_all(conn)
    assert finish_of(conn, "bob") > 990
    if how == "cancel":
        call(
            conn,
            "cancel_task",
            one(conn, "select max(id) from fairq.live_tasks where group_key = 'bob' and state = 'queued'"),
        )
    elif how == "priority":
        create(conn, "bob", priority=5)
    else:
        call(conn, "pause_group", "default", "bob")
    hear_all(conn)
    call(conn, "resume_group", "default", "bob")
    hear_all(conn)
    assert finish_of(conn, "bob") > 990
    assert [each.group_key for each in pop(conn, worker_id, 30)].count("bob") <= 1


def test_what_recalled_tasks_were_charged_too_much_is_credit(conn: Conn) -> None:
    """F1: three at ten seconds each, of which one took a second; then the other two go back in line."""
    share_time(conn, ready_target=3)
    set_time(conn, 0)
    create_many(conn, "bob", 6, costs=[10.0] * 6)
    worker_id = register(conn)
    held = pop(conn, worker_id, 1)
    set_time(conn, 1)
    finish(conn, worker_id, held)
    hear_all(conn)
    create(conn, "bob", priority=5)
    hear_all(conn)
    lane = "fairq._rounds(l.finish - (l.pace).credit) from fairq._lane(0, 'default', 'bob') l"
    # The one that ran; now a unit of cost is worth a tenth.
    assert one(conn, "select " + lane) == pytest.approx(1 + 0.1 + 5 * 1, abs=0.01)


def test_a_group_with_nothing_waiting_keeps_no_credit(conn: Conn) -> None:
    """I5: what was charged too much for its last tasks is not saved up for the next time."""
    share_time(conn)
    set_time(conn, 0)
    create_many(conn, "bob", 2, costs=[100.0] * 2)
    worker_id = register(conn)
    held = pop(conn, worker_id, 2)
    set_time(conn, 2)
    finish(conn, worker_id, held)
    hear_all(conn)
    assert one(conn, "select ((fairq._lane(0, 'default', 'bob')).pace).credit") == 0


def test_the_setting_changes_at_run_time(conn: Conn) -> None:
    """Tasks queued before are not measured; with the setting gone, charges and estimates mean nothing."""
    call(conn, "configure_queue", "default", ready_target=3)
    create_many(conn, "bob", 40)
    worker_id = register(conn)
    set_time(conn, 0)
    held = pop(conn, worker_id, 3)
    share_time(conn)
    held += pop(conn, worker_id, 20)
    held += pop(conn, worker_id, 7)
    set_time(conn, 9)
    charged = one(conn, "select count(charge) from fairq.live_tasks where worker_id is not null")
    assert 0 < charged < len(held)
    finish(conn, worker_id, held)
    assert estimates(conn) == {("bob", "default"): (9.0, min(charged, 16))}
    held = pop(conn, worker_id, 5)
    call(conn, "configure_queue", "default", fairness="count")
    assert len(finish(conn, worker_id, held)) == 5
    assert estimates(conn) == {}
    assert len(finish(conn, worker_id, pop(conn, worker_id, 10))) == 5


def test_order_within_the_group_survives_every_correction(conn: Conn) -> None:
    share_time(conn, ready_target=5)
    ids = [create(conn, "bob", cost=[0.01, 300, 5][n % 3]) for n in range(60)]
    create_many(conn, "alice", 60)
    seen: list[int] = []

    def duration(group: str, task: int) -> float:
        if group == "bob":
            seen.append(task)
        return 0.5 + task % 7

    simulate(conn, duration, until=2000)
    assert seen == ids


def test_a_rebuild_keeps_the_charges_of_what_is_in_flight(conn: Conn) -> None:
    """I11: estimates are learned anew, charges are in the tasks."""
    share_time(conn)
    bob = register(conn)
    for _ in range(3):
        create(conn, "bob", cost=7)
    held = pop(conn, bob, 2)
    run(conn, "update fairq.ticks set written_by = '3'")
    hear_all(conn)
    assert run(conn, "select charge from fairq.live_tasks order by id") == [(7.0,)] * 3
    set_time(conn, 3)
    finish(conn, bob, held)
    assert run(conn, "select used - charged from fairq.rings where used is not null") == [(-8.0,)]


def test_another_word_is_refused(conn: Conn) -> None:
    with refused(conn, "QF014"):
        call(conn, "configure_queue", "default", fairness="luck")
    assert one(conn, "select fairness from fairq.queues where queue = 'default'") == "count"


@pytest.mark.parametrize("slow", [0.05, 2.0])
def test_a_guess_that_was_too_dear_does_not_leave_anyone_behind(conn: Conn, slow: float) -> None:
    """F1: before anything is known a task is charged a second; nine tenants learn soon that it was 5 ms."""
    share_time(conn)
    for number in range(9):
        create_many(conn, f"quick {number}", 700)
    create_many(conn, "slow", 100)
    used = simulate(conn, lambda group, _: slow if group == "slow" else 0.005, until=2, slots=8)
    quick = [used[f"quick {number}"] for number in range(9)]
    assert max(quick) - min(quick) <= 0.2
    assert used["slow"] >= 1.2  # of 1.6; what it had before anything was known counts for it
