"""Slots kept for short tasks: long ones share the others in fair order, and what is lent comes back."""

import heapq
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.policies.test_time import set_time
from tests.support.calls import (
    Conn,
    Held,
    call,
    column,
    create,
    create_all,
    create_many,
    drain,
    explain,
    finish,
    groups_of,
    maintain,
    one,
    pop,
    refused,
    register,
    run,
    state,
)
from tests.support.invariants import assert_sound

pytestmark = pytest.mark.usefixtures("one_shard")

SHORT, LONG = 0.01, 60.0


def keep(conn: Conn, slots: int = 2, **options: Any) -> None:
    call(conn, "configure_queue", "default", short_slots=slots, **options)


def long_ones(conn: Conn, group: str, count: int, **options: Any) -> list[int]:
    return create_many(conn, group, count, costs=[LONG] * count, **options)


@dataclass
class Play:
    """Simulated seconds: who ran when. Tasks arrive as `arrivals` say: when, whose, how long, their cost."""

    waits: list[float] = field(default_factory=list)  # of short ones
    begun: Counter[str] = field(default_factory=Counter)  # long ones, by group
    most_long: int = 0
    idle: float = 0.0  # longest time for which a slot idled while tasks waited


def play(
    conn: Conn, arrivals: Iterable[tuple[float, str, float, float]], until: float, slots: int = 8
) -> Play:
    set_time(conn, 0)
    worker = register(conn, slots=slots)
    played = Play()
    length: dict[int, float] = {}
    came: dict[int, float] = {}
    events: list[tuple[float, int, Any]] = []
    for at, group, seconds, cost in arrivals:
        heapq.heappush(events, (at, len(events), (group, seconds, cost)))
    number = len(events)
    running: dict[int, float] = {}
    idle_since: float | None = None
    while events and events[0][0] <= until:
        now = events[0][0]
        set_time(conn, now)
        ended = []
        while events and events[0][0] <= now:
            what = heapq.heappop(events)[2]
            if isinstance(what, Held):
                ended.append(what)
                del running[what]
            elif what is not None:
                group, seconds, cost = what
                task = create(conn, group, cost=cost, kind="long" if seconds > SHORT else "short")
                length[task], came[task] = seconds, now
        if idle_since is not None:
            played.idle = max(played.idle, now - idle_since)
        if ended:
            finish(conn, worker, ended)
        for held in pop(conn, worker, slots - len(running)) if len(running) < slots else ():
            running[held] = length[held]
            if length[held] == SHORT:
                played.waits.append(now - came.pop(held))
            else:
                played.begun[held.group_key] += 1
                del came[held]
            number += 1
            heapq.heappush(events, (now + length[held], number, held))
        played.most_long = max(played.most_long, sum(each > SHORT for each in running.values()))
        is_idle = len(running) < slots and bool(came)
        idle_since = (now if idle_since is None else idle_since) if is_idle else None
        due = one(conn, "select extract(epoch from fairq.next_due_at('default') - '2030-01-01 12:00+00')")
        if due is not None and len(running) < slots and float(due) > now:
            number += 1
            heapq.heappush(events, (float(due), number, None))
    return played


def mixed(until: float, every: float) -> list[tuple[float, str, float, float]]:
    """Ten tenants: each has long tasks waiting all the time, and now and then a short one."""
    tasks = [(0.0, f"t{n % 10}", LONG, LONG) for n in range(80)]
    count = int(until / every)
    return tasks + [(1 + n * every, f"t{n % 10}", SHORT, SHORT) for n in range(count)]


def test_a_slow_start_makes_no_short_task_long(conn: Conn) -> None:
    """One odd attempt is all that is known: it takes more to be behind minutes for good. A minute is more."""
    keep(conn, 2, fairness="time", short_under=0.1)
    worker = register(conn)
    set_time(conn, 0)
    quick, slow = create(conn, "bob", kind="quick", cost=SHORT), create(conn, "bob", kind="slow", cost=SHORT)
    held = pop(conn, worker)
    assert held == [quick, slow]
    set_time(conn, 1)
    finish(conn, worker, held[:1])
    set_time(conn, LONG)
    finish(conn, worker, held[1:])
    create_many(conn, "bob", 8, kind="slow", costs=[SHORT] * 8)
    last = create(conn, "bob", kind="quick", cost=SHORT)
    held = pop(conn, worker)
    assert last in held
    assert len(held) == 7
    assert_sound(conn)


@pytest.mark.parametrize("fairness", ["count", "time"])
def test_short_ones_do_not_wait_for_long_ones(conn: Conn, fairness: str) -> None:
    """Eight slots, 10 ms and 60 s, ten tenants: no short task waits at all, and the long ones are shared."""
    keep(conn, 2, fairness=fairness)
    played = play(conn, mixed(360, 5), 360)
    assert len(played.waits) == 72
    assert max(played.waits) <= 0.25
    assert played.most_long == 6
    # Six minutes of six slots for ten tenants: 3.6 tasks for each.
    assert played.begun.total() == 7 * 6
    assert set(played.begun.values()) <= {4, 5}
    assert_sound(conn)


def test_without_the_setting_they_do(conn: Conn) -> None:
    """The same load in a fair queue that keeps none, which shows what the setting does."""
    call(conn, "configure_queue", "default", fairness="time")
    played = play(conn, mixed(120, 2.5), 120)
    assert len(played.waits) <= 2  # of 48
    assert played.most_long == 8


def test_what_is_kept_is_lent_after_a_while_and_comes_back(conn: Conn) -> None:
    keep(conn, 3, short_idle="10 seconds")
    set_time(conn, 0)
    worker = register(conn, slots=8)
    long_ones(conn, "bob", 30)
    running = pop(conn, worker, 8)
    assert len(running) == 5
    assert one(conn, "select fairq.next_due_at('default') = '2030-01-01 12:00:10+00'")
    set_time(conn, 9.9)
    assert pop(conn, worker, 3) == []
    set_time(conn, 10)
    running += pop(conn, worker, 3)
    assert len(running) == 8
    # A short one comes: it has the next slot that is free, and long ones the slots of theirs only.
    short = create(conn, "alice")
    finish(conn, worker, [running.pop()])
    assert pop(conn, worker, 1) == [short]
    finish(conn, worker, [running.pop(), running.pop()])
    assert pop(conn, worker, 2) == []
    finish(conn, worker, [running.pop()])
    assert len(pop(conn, worker, 4)) == 1
    assert_sound(conn)


def test_no_slot_idles_longer_than_the_setting(conn: Conn) -> None:
    """I8: short ones come in a burst each two minutes; in between only long ones wait."""
    keep(conn, 2, short_idle="20 seconds")
    arrivals = [(0.0, f"t{n % 3}", LONG, LONG) for n in range(60)]
    arrivals += [(120.0 * n + 7, "alice", SHORT, SHORT) for n in range(1, 4) for _ in range(5)]
    played = play(conn, arrivals, 480)
    assert 0 < played.idle <= 20
    assert played.most_long == 8


def test_long_ones_are_served_in_fair_order_not_in_that_of_arrival(conn: Conn) -> None:
    keep(conn, 7)
    worker = register(conn, slots=8)
    call(conn, "configure_group", "default", "carol", weight=2)
    long_ones(conn, "bob", 30)
    first = pop(conn, worker, 8)
    long_ones(conn, "alice", 30)
    long_ones(conn, "carol", 30)
    order = []
    for _ in range(20):
        finish(conn, worker, first)
        first = pop(conn, worker, 8)
        assert len(first) == 1
        order += groups_of(first)
    assert Counter(order) == pytest.approx({"bob": 5, "alice": 5, "carol": 10}, abs=1)
    # A newcomer is among the next.
    long_ones(conn, "dora", 1)
    finish(conn, worker, first)
    seen: list[str] = []
    for _ in range(4):
        first = pop(conn, worker, 8)
        seen += groups_of(first)
        finish(conn, worker, first)
    assert "dora" in seen
    assert_sound(conn)


def test_long_ones_that_are_equally_far_come_in_the_order_of_arrival(conn: Conn) -> None:
    """And not in that of their rows, which depends on when somebody vacuumed."""
    keep(conn, 7)
    worker = register(conn, slots=8)
    long_ones(conn, "bob", 1)
    running = pop(conn, worker, 8)
    waiting = [*long_ones(conn, "alice", 1), *long_ones(conn, "carol", 1)]
    pop(conn, worker, 8)
    assert one(conn, "select count(distinct turn) from fairq.parked") == 1
    for elsewhere in (1, -1):
        query = "update fairq.parked set turn = turn + %s where id = %s"
        run(conn, query, elsewhere, waiting[0])
    order = []
    while running:
        finish(conn, worker, running)
        running = pop(conn, worker, 8)
        order += running
    assert order == waiting


@pytest.mark.parametrize("wait", ["for a slot", "for a key"])
def test_who_is_next_of_many_equally_far_is_one_step_away(conn: Conn, wait: str) -> None:
    """I9: as many groups as come at once have the same turn."""
    groups = [f"g{number}" for number in range(300)]
    options: dict[str, Any] = {"concurrency_keys": ["k"] * len(groups)}
    if wait == "for a slot":
        keep(conn, 7)
        options = {"costs": [LONG] * len(groups)}
    worker = register(conn, slots=8)
    create_all(conn, *groups, **options)
    running = pop(conn, worker, 8)
    while pop(conn, worker, 8):
        pass
    assert one(conn, "select count(*) from fairq.parked") == 299
    read = "select idx_tup_fetch from pg_stat_xact_user_tables where relid = 'fairq.parked'::regclass"
    with conn.transaction():
        before = one(conn, read)
        finish(conn, worker, running)
        assert len(pop(conn, worker, 1)) == 1
        assert one(conn, read) - before < 50


def test_in_seconds_a_tenant_of_longer_ones_has_fewer(conn: Conn) -> None:
    """I4 in seconds, among long ones: by turns at the slots, 120 s would have four times what 30 s has."""
    keep(conn, 2, fairness="time", short_under=5, short_idle="1 day")
    set_time(conn, 0)
    worker = register(conn, slots=6)
    lengths = {"slow": 120.0, "quick": 30.0}
    for group, seconds in lengths.items():
        create_many(conn, group, 120, costs=[seconds] * 120)
    running: list[tuple[float, Held]] = []
    now, used = 0.0, Counter[str]()
    while now < 1800:
        for held in pop(conn, worker, 6 - len(running)):
            heapq.heappush(running, (now + lengths[held.group_key], held))
            used[held.group_key] += int(lengths[held.group_key])
        assert len(running) == 4
        now = running[0][0]
        set_time(conn, now)
        ended = []
        while running and running[0][0] <= now:
            ended.append(heapq.heappop(running)[1])
        finish(conn, worker, ended)
    assert abs(used["slow"] - used["quick"]) <= 4 * 150


def test_estimates_say_what_is_long(conn: Conn) -> None:
    """A time queue learns per tenant and kind; what was created says nothing any more."""
    keep(conn, 7, fairness="time", short_under=1)
    set_time(conn, 0)
    worker = register(conn, slots=8)
    for seconds, kind in ((30, "import"), (30.1, "mail")):
        create(conn, "bob", kind=kind)
        held = pop(conn, worker, 8)
        set_time(conn, seconds)
        finish(conn, worker, held)
    create_many(conn, "bob", 2, kind="import")
    create_many(conn, "bob", 2, kind="mail")
    held = pop(conn, worker, 8)
    assert sorted(column(conn, "select kind from fairq.live_tasks where worker_id is not null")) == [
        "import",
        "mail",
        "mail",
    ]
    (waiting,) = column(conn, "select id from fairq.parked")
    assert state(conn, waiting) == "blocked"
    assert "long" in explain(conn, waiting)
    assert_sound(conn)


def test_a_long_one_with_a_key_needs_both(conn: Conn) -> None:
    """I13: it takes the slot last and keeps its key meanwhile, so nobody is starved of either."""
    keep(conn, 7)
    worker = register(conn, slots=8)
    first = long_ones(conn, "alice", 1)
    keyed = create_many(conn, "bob", 4, costs=[LONG] * 4, concurrency_keys=["k"] * 4)
    short = create(conn, "bob", concurrency_key="k")
    free = create(conn, "bob")
    running = pop(conn, worker, 8)
    assert free in running
    served = list(running)
    for _ in range(12):
        finish(conn, worker, running)
        assert_sound(conn)
        running = pop(conn, worker, 8)
        assert len([task for task in running if task in [*first, *keyed]]) <= 1
        assert len([task for task in running if task in [*keyed, short]]) <= 1
        served += running
        if not running:
            break
    assert {*keyed, short} <= {int(task) for task in served}


@pytest.mark.parametrize("keys", [None, ["k1", "k2", "k3"]])
def test_a_long_one_that_is_cancelled_passes_its_turn_and_its_key_on(
    conn: Conn, keys: list[str] | None
) -> None:
    keep(conn, 7)
    worker = register(conn, slots=8)
    long_ones(conn, "alice", 1)
    running = pop(conn, worker, 8)
    options = {"concurrency_keys": keys} if keys else {}
    waiting = long_ones(conn, "bob", 3, **options)
    create(conn, "bob", concurrency_key="k1")
    pop(conn, worker, 8)
    call(conn, "cancel_task", waiting[0])
    assert_sound(conn)
    finish(conn, worker, running)
    assert waiting[1] in pop(conn, worker, 8)
    call(conn, "purge_group", "default", "bob")
    assert state(conn, waiting[2]) == "cancelled"
    assert_sound(conn)


def test_a_long_one_that_waits_with_a_place_of_its_key_does_not_run_while_that_is_held(conn: Conn) -> None:
    keep(conn, 7)
    worker = register(conn, slots=8)
    long_ones(conn, "alice", 1)
    running = pop(conn, worker, 8)
    waiting = long_ones(conn, "bob", 2, concurrency_keys=["k", "k"])
    assert pop(conn, worker, 8) == []
    call(conn, "hold_key", "k", one(conn, "select fairq._now() + interval '1 hour'"))
    finish(conn, worker, running)
    assert pop(conn, worker, 8) == []
    assert_sound(conn)
    call(conn, "hold_key", "k", None)
    assert pop(conn, worker, 8) == waiting[:1]
    assert_sound(conn)


def test_a_group_that_cannot_go_on_gives_its_turn_to_others(conn: Conn) -> None:
    keep(conn, 7)
    worker = register(conn, slots=8)
    long_ones(conn, "bob", 3)
    running = pop(conn, worker, 8)
    long_ones(conn, "alice", 3)
    pop(conn, worker, 8)
    call(conn, "pause_group", "default", "bob")
    finish(conn, worker, running)
    for _ in range(3):
        running = pop(conn, worker, 8)
        assert groups_of(running) == ["alice"]
        finish(conn, worker, running)
    assert pop(conn, worker, 8) == []
    call(conn, "resume_group", "default", "bob")
    assert groups_of(pop(conn, worker, 8)) == ["bob"]
    assert_sound(conn)


def test_a_restored_queue_and_one_that_keeps_none_any_more_lose_nothing(conn: Conn) -> None:
    """I11."""
    keep(conn, 7)
    worker = register(conn, slots=8)
    tasks = long_ones(conn, "bob", 5) + long_ones(conn, "alice", 5, concurrency_keys=["k"] * 5)
    running = pop(conn, worker, 8)
    call(conn, "rebuild", "default")
    assert len(running) == 1
    assert pop(conn, worker, 8) == []
    assert_sound(conn)
    finish(conn, worker, running)
    keep(conn, None)  # type: ignore[arg-type]
    assert len({*running, *drain(conn, worker)} & {*tasks}) == 10
    assert_sound(conn)


def test_a_lost_worker_s_long_ones_go_on_elsewhere(conn: Conn) -> None:
    keep(conn, 1)
    set_time(conn, 0)
    lost = register(conn, slots=2, lease="10 seconds")
    long_ones(conn, "bob", 4)
    assert len(pop(conn, lost, 2)) == 1
    set_time(conn, 20)
    worker = register(conn, slots=3)
    maintain(conn)
    assert len(pop(conn, worker, 3)) == 2
    assert_sound(conn)


def test_one_long_task_always_may_run(conn: Conn) -> None:
    keep(conn, 50)
    worker = register(conn, slots=1)
    long_ones(conn, "bob", 2)
    assert len(pop(conn, worker, 1)) == 1


def test_a_metered_queue_keeps_slots_of_its_cap(conn: Conn) -> None:
    keep(conn, 2, max_running=4)
    worker = register(conn, slots=8)
    long_ones(conn, "bob", 5)
    assert len(pop(conn, worker, 8)) == 2
    create_many(conn, "bob", 5)
    assert len(pop(conn, worker, 8)) == 2
    assert_sound(conn)


def test_what_cannot_be_kept_is_refused(conn: Conn) -> None:
    call(conn, "configure_queue", "default", max_running=2)
    before = run(conn, "select * from fairq.queues order by queue")
    for wrong in (
        {"short_slots": 2},
        {"short_slots": 0},
        {"short_slots": 1, "short_under": -1},
        {"short_idle": 5},
    ):
        with refused(conn, "QF007"):
            call(conn, "configure_queue", "default", **wrong)
    with refused(conn, "QF009"):
        call(conn, "configure_queue", "default", short_slots=1, short_idle="-1 second")
    assert run(conn, "select * from fairq.queues order by queue") == before


def test_short_ones_do_not_cost_others_their_turns(conn: Conn) -> None:
    """I4 in seconds: whoever's short task moves the clock, the long ones of all others keep their order."""
    keep(conn, 2, fairness="time", short_idle="1 day", short_under=10)
    chance = random.Random(5)
    arrivals = [(0.0, f"t{n % 10}", LONG + chance.random(), LONG) for n in range(100)]
    arrivals += [(1 + n * 4.0, f"t{chance.randrange(10)}", SHORT, SHORT) for n in range(150)]
    played = play(conn, arrivals, 600)
    assert max(played.begun.values()) - min(played.begun.values()) <= 1
