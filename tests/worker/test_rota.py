"""Which of several nodes is asked next: pure decisions, and their effect in the long run."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from fairq.worker import rota as module
from fairq.worker.rota import LATE, LONGEST, REBASE, ROUND, Place, Rota, ahead


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@dataclass(eq=False)
class Queue:
    """Groups that always have tasks, one each in every round."""

    groups: list[str]
    start: int = 0
    served: int = 0

    @property
    def block(self) -> int | None:
        return self.start + self.served // len(self.groups) * ROUND if self.groups else None

    def pop(self, count: int) -> list[str]:
        if not self.groups:
            return []
        popped = [self.groups[(self.served + n) % len(self.groups)] for n in range(count)]
        self.served += count
        return popped


@dataclass(eq=False)
class Database:
    """`queues` are served in their order, or by turns. `look_at`: when it is to be asked although it had
    nothing.
    """

    rota: Rota
    queues: list[Queue]
    is_near: bool = False
    is_away: bool = False
    hungry: bool = True
    look_at: float = 0.0
    woken: int = 0
    turns: int = 0
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = Place(self.wants, self.wake, lambda: None, self.is_near)
        self.rota.places.append(self.place)

    def wants(self, now: float) -> bool:
        return not self.is_away and (self.hungry or now >= self.look_at)

    def wake(self) -> None:
        self.woken += 1

    def ask(self, room: int, now: float) -> list[str]:
        with self.rota.busy(self.place, room):
            popped: list[str] = []
            self.turns += 1
            first = self.turns % len(self.queues) * (not self.rota.strict)
            for queue in self.queues[first:] + self.queues[:first]:
                popped += queue.pop(room - len(popped))
        self.hungry = len(popped) == room
        if not self.hungry:
            self.look_at = now + 1.0
        self.rota.answered(self.place, len(popped), full=self.hungry)
        self.rota.stands(self.place, [queue.block for queue in self.queues])
        return popped


def databases(rota: Rota, *sizes: int, start: int = 0) -> list[Database]:
    """Nodes with these numbers of groups in one queue."""
    names = (f"g{number}" for number in itertools.count())
    return [
        Database(rota, [Queue(list(itertools.islice(names, size)), start * number * ROUND)])
        for number, size in enumerate(sizes)
    ]


def work(
    clock: Clock, those: list[Database], slots: int, tasks: int, freed: int = 1, seconds: float = 0.01
) -> Counter[str]:
    """What a worker serves if so many of its slots come free at a time."""
    rota = those[0].rota
    served: Counter[str] = Counter()
    running: deque[str] = deque()
    while served.total() < tasks:
        clock.now += seconds
        for _ in range(min(freed, len(running))):
            running.popleft()
        while room := slots - len(running):
            first = rota.first(clock.now)
            if first is None:
                break
            (asked,) = [each for each in those if each.place is first]
            popped = asked.ask(room, clock.now)
            running.extend(popped)
            served.update(popped)
    return served


@pytest.mark.parametrize("slots", [1, 8, 50])
@pytest.mark.parametrize("sizes", [(10, 10, 10), (1, 10, 40), (1, 1, 300)])
def test_groups_have_the_same_share_however_many_others_are_where_they_are(
    clock: Clock, slots: int, sizes: tuple[int, ...]
) -> None:
    """At most two pops apart, as between shards, wherever the clocks began."""
    rota = Rota(slots)
    served = work(clock, databases(rota, *sizes, start=977), slots, 60 * sum(sizes), seconds=0.0001)
    assert len(served) == sum(sizes)
    assert max(served.values()) - min(served.values()) <= 2 * slots + 1, served


def test_an_idle_node_has_neither_credit_nor_debt(clock: Clock) -> None:
    rota = Rota(4)
    busy, resting = those = databases(rota, 5, 5)
    groups, resting.queues[0].groups = resting.queues[0].groups, []
    work(clock, those, 4, 1000)
    resting.queues[0].groups = groups
    resting.look_at = 0.0
    served = work(clock, those, 4, 200)
    assert max(served.values()) - min(served.values()) <= 2 * 4 + 1, served
    assert set(busy.queues[0].groups) <= set(served)


def test_a_node_that_had_nothing_goes_first_when_it_is_due(clock: Clock) -> None:
    rota = Rota(4)
    busy, resting = those = databases(rota, 5, 0)
    work(clock, those, 4, 20)
    assert not resting.hungry
    assert rota.first(clock.now) is busy.place
    resting.look_at = clock.now
    assert rota.first(clock.now) is resting.place


def test_a_node_gives_as_many_tasks_as_there_are_slots_before_the_next(clock: Clock) -> None:
    """So the same turns write its ends and take its next tasks."""
    rota = Rota(4)
    one, other = databases(rota, 10, 10)
    order = []
    for _ in range(42):
        clock.now += 0.01
        first = rota.first(clock.now)
        asked = one if first is one.place else other
        asked.ask(1, clock.now)
        order.append(asked is one)
    _, _, *runs, _ = [len(list(those)) for _, those in itertools.groupby(order)]
    assert len(runs) > 3
    assert min(runs) == 4


def test_only_one_is_asked_at_a_time_unless_it_does_not_answer(clock: Clock) -> None:
    rota = Rota(8)
    one, other = databases(rota, 5, 5)
    with rota.busy(one.place, 3):
        assert rota.asked_for(clock.now) == 3
        assert not rota.is_turn_of(other.place, True, clock.now)
        clock.now += LATE
        assert rota.is_turn_of(other.place, True, clock.now)
        assert rota.asked_for(clock.now) == 0


def test_a_slow_node_is_asked_beside_the_others_and_its_slots_are_kept(clock: Clock) -> None:
    rota = Rota(8)
    one, other = databases(rota, 5, 5)
    with rota.busy(one.place, 3):
        clock.now += 2 * LATE
        rota.answered(one.place, 3, full=True)
    assert rota.room_for(one.place, 8) == 4
    assert rota.room_for(one.place, 1) == 1
    with rota.busy(one.place, 3):
        assert rota.is_turn_of(other.place, True, clock.now)
        clock.now += 3 * LATE
        assert rota.asked_for(clock.now) == 3
        clock.now += LATE
        assert rota.asked_for(clock.now) == 0, "it takes longer than ever"
    with rota.busy(one.place, 4):
        rota.answered(one.place, 4, full=True)
    assert rota.room_for(one.place, 8) == 8
    with rota.busy(one.place, 3):
        assert not rota.is_turn_of(other.place, True, clock.now)


def test_a_writing_node_is_waited_for_in_its_turn_but_not_for_long(clock: Clock) -> None:
    rota = Rota(8)
    one, other = databases(rota, 5, 5)
    other.ask(8, clock.now)
    with rota.busy(one.place, 0):
        assert not rota.is_turn_of(other.place, True, clock.now)
        assert one.woken == 0, "it looks by itself when it has written"
        clock.now += LATE
        assert rota.is_turn_of(other.place, True, clock.now)


def test_the_node_whose_turn_it_is_is_woken(clock: Clock) -> None:
    rota = Rota(8)
    one, other = databases(rota, 5, 5)
    other.ask(8, clock.now)
    assert not rota.is_turn_of(other.place, True, clock.now)
    assert (one.woken, other.woken) == (1, 0)


def test_a_lost_node_is_skipped_and_does_not_catch_up_for_long(clock: Clock) -> None:
    rota = Rota(4)
    one, away = those = databases(rota, 5, 5)
    away.is_away = True
    assert set(work(clock, those, 4, 10000)) == set(one.queues[0].groups)
    assert clock.now > 1000 + LONGEST
    away.is_away = False
    served = work(clock, those, 4, 200)
    assert max(served.values()) - min(served.values()) <= 2 * 4 + 1, served


def test_a_node_that_others_brought_far_is_not_passed_over_for_long(clock: Clock) -> None:
    """Other workers, which are gone, served it."""
    rota = Rota(1)
    far, other = those = databases(rota, 5, 5)
    work(clock, those, 1, 20)
    far.queues[0].served += 10**6
    far.ask(1, clock.now)
    assert set(work(clock, those, 1, 1000)) == set(other.queues[0].groups)
    clock.now += LONGEST
    served = work(clock, those, 1, 1000)
    assert max(served.values()) - min(served.values()) <= 3, served


def test_the_near_one_comes_first_and_others_have_what_it_leaves(clock: Clock) -> None:
    rota = Rota(4)
    near, far = Database(rota, [Queue(["near"])], is_near=True), Database(rota, [Queue(["far"])])
    assert work(clock, [near, far], 4, 100) == {"near": 100}
    near.queues[0].groups = []
    served = work(clock, [near, far], 4, 100)
    assert served["far"] == 100
    near.queues[0].groups, near.look_at = ["near"], 0.0
    assert work(clock, [near, far], 4, 100)["far"] <= 4


def test_queues_in_order_are_so_over_all(clock: Clock) -> None:
    """The second queue waits while the first has tasks in line anywhere, except for one pop."""
    rota = Rota(4, strict=True)
    both = Database(rota, [Queue(["first here"]), Queue(["second here"])])
    one = Database(rota, [Queue([]), Queue(["second there"])])
    served = work(clock, [both, one], 4, 400)
    assert served["second there"] + served["second here"] <= 4
    both.queues[0].groups = []
    served = work(clock, [both, one], 4, 400)
    assert abs(served["second there"] - served["second here"]) <= 9


def test_queues_by_turns_are_compared_each(clock: Clock) -> None:
    """One node has a third of the groups in one queue, and half of them in the other."""
    rota = Rota(1)
    one = Database(rota, [Queue(["a"]), Queue(["e", "f"])])
    other = Database(rota, [Queue(["b", "c", "d"]), Queue(["g", "h"])])
    served = work(clock, [one, other], 1, 600)
    assert len(served) == 8
    assert max(served.values()) <= 2 * min(served.values()), served


def test_a_clock_that_was_taken_back_has_not_moved_far() -> None:
    assert ahead(5, 2**61 - 2) == 7 - (2**61 % REBASE)
    assert ahead(10, 4) == 6
    assert ahead(4, 10) == -6
    assert ahead(2**60 + 3 - 2**60, 2**60) == 3
