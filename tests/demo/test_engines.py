"""The two queues of the demo, on a real database."""

from collections import Counter
from typing import Any

import psycopg
import pytest

from fairq.demo.engines import Engine, set_up
from tests.support.shards import neighbours


@pytest.fixture(params=["FIFO", "fairq"])
def engine(request: pytest.FixtureRequest, conn: psycopg.Connection[Any]) -> Engine:
    return {each.name: each for each in set_up(conn, 4)}[request.param]


def test_every_task_is_served_once_and_written_to_the_history(
    engine: Engine, conn: psycopg.Connection[Any]
) -> None:
    """I1, for the baseline as for fairq."""
    engine.enqueue(conn, "bob", 25)
    engine.enqueue(conn, "alice", 2)
    served, held = [], engine.turn(conn, [], 4)
    while held:
        served += [task.id for task in held]
        assert len(held) <= 4
        held = engine.turn(conn, held, 4)
    assert len(served) == len(set(served)) == 27
    history = engine.history(conn)
    assert Counter(record.tenant for record in history) == {"bob": 25, "alice": 2}
    assert all(record.waited >= 0 and record.created >= 0 for record in history)


def test_fifo_serves_alice_after_all_of_bob_and_fairq_serves_her_next(conn: psycopg.Connection[Any]) -> None:
    """I6: what the demo shows, tested without a clock."""
    order: dict[str, list[str]] = {}
    bob, alice = neighbours(conn, "bob", "alice")
    for engine in set_up(conn, 1):
        engine.enqueue(conn, bob, 50)
        held = engine.turn(conn, [], 1)
        engine.enqueue(conn, alice, 3)
        order[engine.name] = []
        while held:
            held = engine.turn(conn, held, 1)
            order[engine.name] += [task.tenant for task in held]
    assert order["FIFO"] == [bob] * 49 + [alice] * 3
    assert order["fairq"][0] == alice
    assert order["fairq"][:6].count(alice) == 3
