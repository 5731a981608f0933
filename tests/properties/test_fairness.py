"""The promises to tenants, checked on what was served and on nothing else."""

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.engine import Engine
from tests.properties.profile import PROFILE
from tests.support.calls import create_all
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


def leads(served: list[tuple[str, float]], weights: dict[str, float]) -> dict[tuple[str, str], float]:
    """Of each two lines, how far their service by weight went apart in any interval in which both waited."""
    found: dict[tuple[str, str], float] = {}
    for f, g in combinations(weights, 2):
        last = min(max((k for k, (line, _) in enumerate(served) if line == n), default=0) for n in (f, g))
        lead, lowest, highest = 0.0, 0.0, 0.0
        for line, cost in served[:last]:
            for sign, n in ((1, f), (-1, g)):
                lead += sign * cost / weights[n] if line == n else 0
            lowest, highest = min(lowest, lead), max(highest, lead)
        found[f, g] = highest - lowest
    return found


@PROFILE
@given(
    tenants=st.lists(
        st.tuples(
            weights,
            st.lists(st.tuples(weights, st.lists(costs, min_size=2, max_size=9)), min_size=1, max_size=4),
        ),
        min_size=2,
        max_size=3,
    ),
    flat=st.lists(costs, min_size=1, max_size=15),
    target=ready,
    size=st.integers(1, 7),
)
def test_two_levels_keep_the_bound_on_both(
    engine: Engine,
    tenants: list[tuple[float, list[tuple[float, list[float]]]]],
    flat: list[float],
    target: int | None,
    size: int,
) -> None:
    """I14, I4: between groups, whatever the number of their users, and inside each between its users."""
    engine.reset()
    engine.run("update fairq.queues set ready_target = %s", [target])
    worker = engine.worker()
    groups, users = {"flat": 1.0}, dict[str, dict[str, float]]()
    tasks: list[tuple[str, str | None, float]] = [("flat", None, cost) for cost in flat]
    for n, (weight, its_users) in enumerate(tenants):
        group = f"g{n}"
        groups[group] = weight
        users[group] = {f"u{u}": user_weight for u, (user_weight, _) in enumerate(its_users)}
        tasks += [(group, f"u{u}", cost) for u, (_, its_costs) in enumerate(its_users) for cost in its_costs]
    settings = [(group, "", weight) for group, weight in groups.items()]
    settings += [(group, user, weight) for group, its in users.items() for user, weight in its.items()]
    engine.run(
        "insert into fairq.groups (shard_no, queue, group_key, user_key, weight)"
        " select 0, 'default', g, u, w from unnest(%s::text[], %s::text[], %s::float8[]) x(g, u, w)",
        [*map(list, zip(*settings, strict=True))],
    )
    # By one call: ten thousand examples are a matter of minutes, not of hours.
    keys, user_keys, costs_of = zip(*tasks, strict=True)
    ids = create_all(engine.on(), *keys, user_keys=list(user_keys), costs=list(costs_of))
    cost_of: dict[int, float] = dict(zip(ids, costs_of, strict=True))
    served = []
    while popped := engine.pop(worker, size):
        served += [(task.group_key, task.user_key or "", cost_of[task]) for task in popped]
    assert len(served) == len(cost_of)

    def largest(group: str, user: str | None = None) -> float:
        return max(cost for g, u, cost in served if g == group and user in (None, u))

    for (f, g), lead in leads([(group, cost) for group, _, cost in served], groups).items():
        assert lead <= largest(f) / groups[f] + largest(g) / groups[g] + 1e-3, (f, g)
    for group, its in users.items():
        inside = [(user, cost) for g, user, cost in served if g == group]
        for (a, b), lead in leads(inside, its).items():
            assert lead <= largest(group, a) / its[a] + largest(group, b) / its[b] + 1e-3, (group, a, b)


@PROFILE
@given(
    tenants=st.lists(st.tuples(weights, st.lists(costs, min_size=3, max_size=20)), min_size=2, max_size=4),
    size=st.integers(1, 7),
    by_user=st.booleans(),
)
def test_nobody_gets_far_ahead_of_his_share(
    engine: Engine, tenants: list[tuple[float, list[float]]], size: int, by_user: bool
) -> None:
    """I4, I14: never more than one's largest task and one's share of the others' largest ones."""
    engine.reset()
    worker = engine.worker()
    cost_of: dict[int, float] = {}
    weight_of = {f"n{n}": weight for n, (weight, _) in enumerate(tenants)}
    for n, (weight, its_costs) in enumerate(tenants):
        engine.run(
            "insert into fairq.groups (shard_no, queue, group_key, user_key, weight)"
            " values (0, 'default', %s, %s, %s)",
            ["bob" if by_user else f"n{n}", f"n{n}" if by_user else "", weight],
        )
        for cost in its_costs:
            options: dict[str, Any] = {"user_key": f"n{n}"} if by_user else {}
            cost_of[engine.create(["bob" if by_user else f"n{n}"], cost=cost, **options)[0]] = cost
    served: list[tuple[str, float]] = []
    while popped := engine.pop(worker, size):
        served += [(str(task.user_key if by_user else task.group_key), cost_of[task]) for task in popped]
    all_wait = min(max(k for k, (name, _) in enumerate(served) if name == n) for n in weight_of)
    most = {n: max(cost for name, cost in served if name == n) for n in weight_of}
    total = sum(weight_of.values())
    for first in range(all_wait):
        got, of_all = dict.fromkeys(weight_of, 0.0), 0.0
        for name, cost in served[first:all_wait]:
            got[name] += cost
            of_all += cost
            share = weight_of[name] / total
            others = sum(most[n] for n in weight_of if n != name)
            assert got[name] <= share * of_all + most[name] + share * others + 1e-3


@PROFILE
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from([("g", "jane"), ("g", "joe"), ("g", None), ("h", "jane")]),
                st.sampled_from([1, 2, 8]),
            ),
            st.tuples(st.sampled_from(["pop", "promote"]), st.sampled_from([1, 3, 12])),
        ),
        max_size=30,
    )
)
def test_users_who_come_and_go_stay_within_the_bound(engine: Engine, steps: list[tuple[Any, int]]) -> None:
    """I14, I4: also from the moment when a group's only user is not alone any more."""
    engine.reset()
    worker = engine.worker()
    left = Counter[tuple[str, str | None]]()
    leads_of: dict[tuple[Any, Any], tuple[int, int, int]] = {}

    def serve(most: int) -> bool:
        popped = engine.pop(worker, most)
        for task in popped:
            line = (task.group_key, task.user_key)
            for f, g in combinations(sorted(left, key=str), 2):
                if f[0] == g[0] and left[f] and left[g]:
                    lead, lowest, highest = leads_of.get((f, g), (0, 0, 0))
                    lead += (line == f) - (line == g)
                    leads_of[f, g] = lead, min(lowest, lead), max(highest, lead)
                    assert max(highest, lead) - min(lowest, lead) <= 2, (f, g)
            left[line] -= 1
            for pair in [pair for pair in leads_of if line in pair and not left[line]]:
                del leads_of[pair]
        return bool(popped)

    for what, count in steps:
        if what == "pop":
            serve(count)
        elif what == "promote":
            engine.promote(count)
        else:
            create_all(engine.on(), *[what[0]] * count, user_keys=[what[1]] * count)
            left[what] += count
    while serve(50):
        pass
    assert not left.total()
