"""Groups of different shards have the same share, however many others are in theirs."""

from collections import Counter
from itertools import combinations
from random import Random

import pytest

from tests.support.calls import (
    Conn,
    call,
    create,
    create_all,
    create_many,
    finish,
    pop,
    promote,
    register,
    run,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound
from tests.support.moves import set_shards


def keys_of(conn: Conn, shard: int, shards: int, count: int) -> list[str]:
    rows = run(
        conn,
        "select 'g' || n from generate_series(1, 5000) n where fairq._shard_of('g' || n, %s) = %s",
        shards,
        shard,
    )
    return [row[0] for row in rows[:count]]


def shared_out(conn: Conn, groups: list[str], turns: int, slots: int) -> Counter[str]:
    """How many tasks each group got in so many turns of a worker."""
    run(conn, "set role fairq_work")  # once, not for each call
    worker = register(conn, slots=slots)
    served: Counter[str] = Counter()
    for _ in range(turns):
        held = pop(conn, worker, slots)
        assert len(held) == slots
        served.update(task.group_key for task in held)
        finish(conn, worker, held)
    return Counter({group: served[group] for group in groups})


@pytest.mark.parametrize("slots", [1, 8, 50])
def test_a_group_in_an_empty_shard_has_the_share_of_one_in_a_full_shard(conn: Conn, slots: int) -> None:
    set_shards(conn, 4)
    alone, crowd = (
        keys_of(conn, 0, 4, 1),
        [key for shard in (1, 2, 3) for key in keys_of(conn, shard, 4, 10 * shard)],
    )
    groups = alone + crowd
    turns = 3050 // slots
    create_all(conn, *groups * (2 * turns * slots // len(groups)))
    served = shared_out(conn, groups, turns, slots)
    # The pop that found the others without an address yet, and the last one.
    assert max(served.values()) - min(served.values()) <= 2 * slots + 1, served


def test_in_the_long_run_no_group_has_a_tenth_more_than_another(conn: Conn) -> None:
    """Where pops took blocks from the shards in turn, the one that is alone would have five times as much."""
    set_shards(conn, 2)
    groups = [*keys_of(conn, 0, 2, 1), *keys_of(conn, 1, 2, 5)]
    create_all(conn, *groups * 300)
    served = shared_out(conn, groups, 150, 8)
    assert max(served.values()) <= 1.1 * min(served.values()), served


@pytest.mark.parametrize("slots", [1, 7, 40])
def test_the_bound_holds_between_groups_of_any_weights_in_any_shards(conn: Conn, slots: int) -> None:
    """The fairness bound (I4) with the term for several shards: two pops, over the smaller weight."""
    set_shards(conn, 5)
    random = Random(slots)
    weights = {f"g{n}": random.choice([0.5, 1, 2, 3]) for n in range(17)}
    for group, weight in weights.items():
        call(conn, "configure_group", "default", group, weight=weight)
        create_many(conn, group, 250)
    worker = register(conn, slots=slots)
    served: Counter[str] = Counter()
    for _ in range(1200 // slots):
        held = pop(conn, worker, slots)
        served.update(task.group_key for task in held)
        finish(conn, worker, held)
        for f, g in combinations(weights, 2):
            apart = abs(served[f] / weights[f] - served[g] / weights[g])
            bound = 1 / weights[f] + 1 / weights[g] + 2 * slots / min(weights[f], weights[g])
            assert apart <= bound, (f, g, served)
    assert max(served.values()) < 250


def test_a_shard_where_nothing_was_left_gains_nothing_and_comes_at_once(conn: Conn) -> None:
    """It has the others' time when it comes back, neither credit for its rest nor a debt."""
    set_shards(conn, 2)
    busy, resting = keys_of(conn, 0, 2, 2), keys_of(conn, 1, 2, 2)
    create_all(conn, *busy * 300)
    worker = register(conn, slots=1)
    for _ in range(200):
        finish(conn, worker, pop(conn, worker, 1))
    create_all(conn, *resting * 100)
    served = []
    for _ in range(80):
        held = pop(conn, worker, 1)
        served += [task.group_key for task in held]
        finish(conn, worker, held)
    assert served[0] in resting
    assert set(served[:4]) >= set(resting)
    counts = Counter(served)
    assert max(counts.values()) - min(counts.values()) <= 2, counts


# All addresses, to some rounds before that.
FAR = """
with t as (select (2::numeric ^ 61 - 2 ^ 25)::bigint as far),
tick as (
  update fairq.ticks k set clock = k.clock + far, top = k.top + far, horizon = k.horizon + far,
    refill_block = k.refill_block + far, written_by = pg_current_xact_id()::xid
  from t
),
ready as (update fairq.ready r set block = r.block + far from t)
update fairq.lanes l set finish = l.finish + far from t
"""


def test_clocks_of_shards_are_compared_also_after_one_was_taken_back(conn: Conn) -> None:
    """Long before a bigint is full a domain's addresses move by 2^60, and each shard's when it gets there."""
    set_shards(conn, 2)
    groups = [*keys_of(conn, 0, 2, 1), *keys_of(conn, 1, 2, 3)]
    create_all(conn, *groups * 100)
    worker = register(conn, slots=1)
    served: Counter[str] = Counter()
    for turn in range(200):
        if turn == 20:
            run(conn, FAR)
        held = pop(conn, worker, 1)
        served.update(task.group_key for task in held)
        finish(conn, worker, held)
        counts = [served[group] for group in groups]
        assert max(counts) - min(counts) <= 3, served
    found = run(conn, "select distinct on (shard_no) clock from fairq.ticks order by shard_no, tick desc")
    assert all(2**60 < clock < 2**61 for (clock,) in found)


def test_addresses_stay_where_a_pass_gives_up(conn: Conn, database: Database) -> None:
    """A pass that hears of the first key, and finds the keys in other hands, must not have moved anything."""
    create_all(conn, *"abc" * 3)
    assert promote(conn) == 9
    run(conn, FAR.replace("- 2 ^ 25", "+ 2 ^ 25"))
    create(conn, "a", concurrency_key="k")
    other = database.connect()
    run(other, "select fairq._lock_domain(0, '#keys', true)")
    call(conn, "configure_group", "default", "b", weight=2)
    other.rollback()
    assert_sound(conn)
    assert len(pop(conn, register(conn), 20)) == 10
