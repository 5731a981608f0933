"""The statements of docs/explanation/the-fairness-bound.md, tested on a real queue's order."""

import itertools
import random
from fractions import Fraction

import pytest

from tests.support.database import Database
from tests.support.shards import neighbours

WEIGHTS = {"bob": 1.0, "alice": 1.0, "carol": 0.5, "dave": 2.0, "erin": 3.0}
COSTS = (0.5, 1.0, 2.0, 4.0)
TASKS = 200


@pytest.mark.parametrize("ready_target", [10, 60, None])
def test_backlogged_groups_never_drift_further_apart_than_the_bound(
    database: Database, ready_target: int | None
) -> None:
    """I4, over every interval in which all have work. One worker, so no pop is in flight: F = 0.

    Pops of changing size and a ready set smaller than the backlog: neither may show in the order.
    """
    chance = random.Random(4)
    conn = database.connect(autocommit=True)
    conn.execute("update fairq.queues set ready_target = %s", (ready_target,))
    costs: dict[int, float] = {}
    weights = dict(zip(neighbours(conn, *WEIGHTS), WEIGHTS.values(), strict=True))
    for group, weight in weights.items():
        conn.execute(
            "select fairq.configure_group('default', %s, jsonb_build_object('weight', %s::float8))",
            (group, weight),
        )
        mine = [chance.choice(COSTS) for _ in range(TASKS)]
        ids = conn.execute(
            "select * from fairq.create_tasks(%s::text[], %s::text[]::jsonb[], p_costs => %s::float8[])",
            ([group] * TASKS, ["{}"] * TASKS, mine),
        )
        costs |= zip((row[0] for row in ids), mine, strict=True)

    order: list[tuple[str, int]] = []
    worker = conn.execute("select fairq.register_worker('bound', array['default'], 50)").fetchone()
    assert worker is not None
    while len(order) < len(costs):
        popped = conn.execute(
            "select t.group_key, t.id from fairq.pop_tasks('default', %s, %s) t",
            (chance.choice((1, 3, 7, 50)), worker[0]),
        ).fetchall()
        assert popped
        order += popped
    last = {group: max(n for n, (each, _) in enumerate(order) if each == group) for group in weights}
    backlogged = order[: min(last.values())]
    assert len(backlogged) > TASKS

    # An address is rounded up to 1/2^20 of a round.
    rounding = Fraction(2 * TASKS, 2**20)
    for f, g in itertools.combinations(weights, 2):
        apart = [Fraction(0)]
        for group, task in backlogged:
            served = Fraction(costs[task]) / Fraction(weights[group])
            apart.append(apart[-1] + served * ((group == f) - (group == g)))
        bound = Fraction(max(COSTS)) / Fraction(weights[f]) + Fraction(max(COSTS)) / Fraction(weights[g])
        assert max(apart) - min(apart) <= bound + rounding, (f, g)


def test_groups_of_one_weight_take_exactly_one_turn_in_every_round(database: Database) -> None:
    """I3."""
    conn = database.connect(autocommit=True)
    bob, alice, carol = neighbours(conn, "bob", "alice", "carol")
    groups = [bob] * 90 + [alice] * 30 + [carol] * 30
    conn.execute("update fairq.queues set ready_target = 20")
    conn.execute("select fairq.create_tasks(%s::text[], array_fill('{}'::jsonb, array[150]))", (groups,))
    worker = conn.execute("select fairq.register_worker('rounds', array['default'], 7)").fetchone()
    assert worker is not None
    order: list[str] = []
    while len(order) < 150:
        popped = conn.execute("select t.group_key from fairq.pop_tasks('default', 7, %s) t", worker)
        order += [row[0] for row in popped]
    rounds = [sorted(order[n : n + 3]) for n in range(0, 90, 3)]
    assert rounds == [sorted([alice, bob, carol])] * 30
    assert order[90:] == [bob] * 60
