"""The served order against the model: whatever was promoted in advance, it is start-time fair queueing."""

from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.properties.engine import Engine
from tests.properties.model import Domain, Waiting, shard_of
from tests.properties.profile import PROFILE
from tests.support.calls import Held, finish
from tests.support.database import Database

GROUPS = [f"g{i}" for i in range(8)]
groups = st.sampled_from(GROUPS)
# Open transactions have groups of their own: a task that commits after later ones of its group were promoted
# comes after those, and the model promotes nothing ahead of time.
LATE_GROUPS = ["late0", "late1", "late2", "late3"]
late_groups = st.sampled_from(LATE_GROUPS)
costs = st.sampled_from([1.0, 1.0, 1.0, 0.25, 0.001, 2.5, 7.0, 100.0, 1000.0])
weights = st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0, 3.0, 0.1, 10.0])
MAX_ATTEMPTS = 5  # the default of a queue
priorities = st.sampled_from([0, 0, 0, 1, 5, -3])


class ServedOrder(RuleBasedStateMachine):
    """Tasks are created, promoted, popped and finished; nothing is cancelled, released or lost.

    I3, I4, I5, I6, I8, I12: each pop hands out exactly what the model serves next, and as many as there are.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.engine.reset()
        self.worker = engine.worker()
        self.held: list[Held] = []
        self.known: dict[int, tuple[str, int, float]] = {}
        self.scheduled: dict[int, int] = {}
        self.sequences: dict[int, float] = {}
        self.most_scheduled = 0
        self.open: dict[int, list[int]] = {}
        self.microseconds = 0
        self.broken = False
        self.last_id = 0.0
        self.domains: list[Domain] = []

    def teardown(self) -> None:
        if self.broken:
            return
        for number in list(self.open):
            self.end_transaction(number, True)
        self.time_passes(10_000)
        for shard in range(self.engine.shards):
            while self.pop(7, shard):
                pass
        for domain in self.domains:
            assert not [lane for lane in domain.lanes.values() if lane.tasks], "the model has tasks left"
        (left,) = self.engine.one("select count(*) from fairq.live_tasks where worker_id is null")
        assert left == 0, "the engine has tasks left"

    @initialize(
        ready=st.one_of(st.integers(1, 5), st.just(12), st.none()),
        weight=st.dictionaries(
            st.sampled_from([*GROUPS, *(f"{g} of 1" for g in LATE_GROUPS)]), weights, max_size=4
        ),
    )
    def configure(self, ready: int | None, weight: dict[str, float]) -> None:
        self.engine.run("update fairq.queues set ready_target = %s", [ready])
        # A pass wakes no more due tasks than it promotes; below that all wake at once.
        self.most_scheduled = ready or 1000
        for group, value in weight.items():
            shard = shard_of(group, self.engine.shards)
            self.engine.run(
                "insert into fairq.groups (shard_no, queue, group_key, weight)"
                " values (%s, 'default', %s, %s)",
                [shard, group, value],
            )
        self.domains = [Domain(weight) for _ in range(self.engine.shards)]

    def domain(self, group: str) -> Domain:
        return self.domains[shard_of(group, self.engine.shards)]

    def ring(self, ids: list[int]) -> None:
        for id_ in ids:
            group, priority, cost = self.known[id_]
            self.sequences[id_] = id_
            self.domain(group).ring(group, Waiting(-priority, id_, id_, cost))

    def hear(self, shard: int) -> None:
        """What every promotion does first: due tasks join their groups; one tried before keeps its place."""
        for id_ in sorted(self.scheduled, key=self.scheduled.__getitem__):
            group, priority, cost = self.known[id_]
            if self.scheduled[id_] <= self.microseconds and shard_of(group, self.engine.shards) == shard:
                del self.scheduled[id_]
                if id_ not in self.sequences:
                    self.last_id += 1e-6
                    self.sequences[id_] = self.last_id
                self.domain(group).ring(group, Waiting(-priority, self.sequences[id_], id_, cost))
        self.domains[shard].hear()

    def remember(self, ids: list[int], names: list[str], priority: int, cost: float) -> None:
        for id_, group in zip(ids, names, strict=True):
            self.known[id_] = (group, priority, cost)
        self.last_id = float(max(ids))

    @rule(
        names=st.lists(groups, min_size=1, max_size=12),
        priority=priorities,
        cost=costs,
    )
    def create(self, names: list[str], priority: int, cost: float) -> None:
        ids = self.engine.create(names, priority=priority, cost=cost)
        self.remember(ids, names, priority, cost)
        self.ring(ids)

    @rule(group=groups, count=st.integers(20, 60), cost=costs)
    def flood(self, group: str, count: int, cost: float) -> None:
        names = [group] * count
        ids = self.engine.create(names, cost=cost)
        self.remember(ids, names, 0, cost)
        self.ring(ids)

    @rule(
        number=st.integers(1, 2),
        names=st.lists(late_groups, min_size=1, max_size=5),
        priority=priorities,
        cost=costs,
    )
    def create_in_open_transaction(self, number: int, names: list[str], priority: int, cost: float) -> None:
        session = self.engine.sessions[number]
        names = [f"{name} of {number}" for name in names]
        if number not in self.open:
            session.autocommit = False
            self.open[number] = []
        ids = self.engine.create(names, session, priority=priority, cost=cost)
        self.remember(ids, names, priority, cost)
        self.open[number] += ids

    @rule(number=st.integers(1, 2), names=st.lists(groups, min_size=1, max_size=3))
    def create_in_savepoint_that_rolls_back(self, number: int, names: list[str]) -> None:
        session = self.engine.sessions[number]
        if number not in self.open:
            session.autocommit = False
            self.open[number] = []
        session.execute("savepoint s")
        self.last_id = float(max(self.engine.create(names, session)))
        session.execute("rollback to savepoint s")

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.sampled_from([True, True, False]))
    def commit_or_roll_back(self, data: st.DataObject, commit: bool) -> None:
        self.end_transaction(data.draw(st.sampled_from(sorted(self.open))), commit)

    def end_transaction(self, number: int, commit: bool) -> None:
        session = self.engine.sessions[number]
        ids = self.open.pop(number)
        if commit:
            session.commit()
            self.ring(ids)
        else:
            session.rollback()
        session.autocommit = True

    @precondition(lambda self: len(self.scheduled) < self.most_scheduled)
    @rule(group=groups, priority=priorities, delay=st.integers(1, 20))
    def schedule(self, group: str, priority: int, delay: int) -> None:
        # Equal times have no order, so each task has a fraction of its own, here and in finish.
        due = delay * 1_000_000 + len(self.known)
        (id_,) = self.engine.create([group], priority=priority, run_at=self.engine.at(due / 1e6))
        self.remember([id_], [group], priority, 1.0)
        self.scheduled[id_] = self.microseconds + due
        self.hear_of_schedule()

    def hear_of_schedule(self) -> None:
        # A promotion wakes what earlier ones have heard of.
        for _ in range(2):
            self.engine.promote()
            for shard in range(self.engine.shards):
                self.hear(shard)

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.microseconds += seconds * 1_000_000
        self.engine.now = self.engine.at(seconds)
        self.engine.run("select fairq.heartbeat(%s)", [self.worker])

    @rule(limit=st.one_of(st.none(), st.integers(1, 3)))
    def promote(self, limit: int | None) -> None:
        self.engine.promote(None if self.scheduled else limit)
        for shard in range(self.engine.shards):
            self.hear(shard)

    @rule(limit=st.integers(1, 12), data=st.data())
    def pop_some(self, limit: int, data: st.DataObject) -> None:
        shard = data.draw(st.integers(0, self.engine.shards - 1)) if self.engine.shards > 1 else 0
        self.pop(limit, shard)

    def pop(self, limit: int, shard: int) -> int:
        expected: list[tuple[int, str]] = []
        self.hear(shard)
        while len(expected) < limit and (next_ := self.domains[shard].pop()):
            expected.append((next_[1], next_[0]))
        popped = self.engine.pop(self.worker, limit, shard=shard if self.engine.shards > 1 else None)
        served = [(task, task.group_key) for task in popped]
        self.broken = served != expected
        assert not self.broken, f"popped {served}, expected {expected}"
        self.held += popped
        return len(popped)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["succeeded", "failed", "cancelled", "retry"]),
        delay=st.integers(0, 10),
    )
    def finish(self, data: st.DataObject, outcome: str, delay: int) -> None:
        id_ = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        again = outcome == "retry" and id_.attempt < MAX_ATTEMPTS
        if again and len(self.scheduled) >= self.most_scheduled:
            return
        self.held.remove(id_)
        due = delay * 1_000_000 + len(self.known) + id_ % 1000
        delay_ = f"{due} microseconds"
        assert finish(self.engine.on(), self.worker, [id_], outcome, delay=delay_) == [id_]
        if again:
            self.scheduled[id_] = self.microseconds + due
            self.hear_of_schedule()


@pytest.fixture
def engine(database: Database) -> Engine:
    return Engine(database, sessions=3)


def test_pops_follow_the_model_of_start_time_fair_queueing(engine: Engine) -> None:
    """I3, I4, I5, I6, I8, I12, F8, F18, F19, F32: weights, costs, priorities, newcomers, schedules."""
    run_state_machine_as_test(cast(Any, lambda: ServedOrder(engine)), settings=PROFILE)
