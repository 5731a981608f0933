"""The promises to tenants, checked on what was served and on nothing else."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.engine import Engine
from tests.properties.profile import PROFILE
from tests.support.database import Database

weights = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0])
costs = st.sampled_from([0.01, 0.5, 1.0, 1.0, 3.0, 20.0])
ready = st.one_of(st.none(), st.integers(1, 6))


@pytest.fixture
def engine(database: Database) -> Engine:
    engine = Engine(database, sessions=1)
    if engine.shards > 1:
        pytest.skip("fairness holds within a shard; these groups are in several")
    return engine


def set_weight(engine: Engine, group: str, weight: float) -> None:
    engine.run(
        "insert into fairq.groups (shard_no, queue, group_key, weight) values (0, 'default', %s, %s)",
        [group, weight],
    )


def drain(engine: Engine, worker: int, size: int) -> list[tuple[int, str]]:
    served: list[tuple[int, str]] = []
    while popped := engine.pop(worker, size):
        served += [(task, task.group_key) for task in popped]
    return served


@PROFILE
@given(
    tenants=st.lists(st.tuples(weights, st.lists(costs, min_size=5, max_size=25)), min_size=2, max_size=4),
    target=ready,
    size=st.integers(1, 7),
)
def test_service_by_weight_differs_by_at_most_one_task_each(
    engine: Engine, tenants: list[tuple[float, list[float]]], target: int | None, size: int
) -> None:
    """I4: over every interval in which both wait, |Wf/wf - Wg/wg| <= cf/wf + cg/wg."""
    engine.reset()
    engine.run("update fairq.queues set ready_target = %s", [target])
    worker = engine.worker()
    cost_of: dict[int, float] = {}
    names = [f"g{n}" for n in range(len(tenants))]
    for name, (weight, its_costs) in zip(names, tenants, strict=True):
        set_weight(engine, name, weight)
        for cost in its_costs:
            cost_of[engine.create([name], cost=cost)[0]] = cost
    served = drain(engine, worker, size)
    assert len(served) == len(cost_of)
    for f, g in combinations(range(len(tenants)), 2):
        bound = sum(max(tenants[n][1]) / tenants[n][0] for n in (f, g))
        # Both wait up to the moment when the first of them is served for the last time.
        last = min(max(k for k, (_, group) in enumerate(served) if group == names[n]) for n in (f, g))
        lead, lowest, highest = 0.0, 0.0, 0.0
        for id_, group in served[:last]:
            for sign, n in ((1, f), (-1, g)):
                lead += sign * cost_of[id_] / tenants[n][0] if group == names[n] else 0
            lowest, highest = min(lowest, lead), max(highest, lead)
        assert highest - lowest <= bound + 1e-3


@PROFILE
@given(
    backlog=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    before=st.integers(0, 20),
    own=st.integers(1, 10),
    target=ready,
    cost=costs,
)
def test_a_newcomer_is_next_whatever_the_backlog_and_then_takes_turns(
    engine: Engine, backlog: list[int], before: int, own: int, target: int | None, cost: float
) -> None:
    """I5, I6, F1, F18: it neither waits nor catches up on what it missed."""
    engine.reset()
    engine.run("update fairq.queues set ready_target = %s", [target])
    worker = engine.worker()
    for n, size in enumerate(backlog):
        engine.create([f"old{n}"] * size, cost=cost)
    # Whoever came earlier and was not served yet is a newcomer, too, and goes first.
    for _ in range(len(backlog) + before):
        engine.pop(worker, 1)
    engine.create(["new"] * own, cost=cost)
    served = [group for _, group in drain(engine, worker, 1)]
    assert served[0] == "new"
    last = max(k for k, group in enumerate(served) if group == "new")
    for name in {group for group in served if group != "new"}:
        while_both_wait = served[: min(last, max(k for k, group in enumerate(served) if group == name)) + 1]
        assert abs(while_both_wait.count("new") - while_both_wait.count(name)) <= 1


@PROFILE
@given(
    busy=st.integers(1, 40),
    other=st.integers(1, 30),
    idle=st.booleans(),
    again=st.integers(1, 10),
    target=ready,
)
def test_a_busy_past_costs_nothing(
    engine: Engine, busy: int, other: int, idle: bool, again: int, target: int | None
) -> None:
    """I5, F19: on return a tenant starts at the clock, however much it was served while it was alone."""
    engine.reset()
    engine.run("update fairq.queues set ready_target = %s", [target])
    worker = engine.worker()
    engine.create(["bob"] * busy)
    drain(engine, worker, 5)
    engine.create(["alice"] * other)
    if idle:
        engine.pop(worker, 1)
    engine.create(["bob"] * again)
    served = [group for _, group in drain(engine, worker, 3)]
    places = [k for k, group in enumerate(served) if group == "bob"]
    # Bob's first is at most one round away, and from there on he has every second turn while both wait.
    assert places[0] <= 2
    assert all(place <= 2 * n + 2 for n, place in enumerate(places))
