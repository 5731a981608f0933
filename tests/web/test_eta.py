"""Estimates of when a tenant's tasks are done, made during a skewed mix and compared with the truth."""

import random
from statistics import median
from typing import Any

import psycopg
import pytest

from fairq import web
from tests.support.calls import create, run
from tests.support.database import Database
from tests.support.simulation import Simulation


@pytest.fixture
def conn(database: Database) -> psycopg.Connection[Any]:
    conn = database.connect(autocommit=True)
    run(conn, "update fairq.settings set test_clock = true")
    return conn


def test_half_of_the_estimates_are_within_a_fifth(conn: psycopg.Connection[Any]) -> None:
    """Backlogs of 10 to 120 tasks of 0.5 to 4 seconds, weights of 1 to 3; others come and go."""
    chance = random.Random(5)
    lengths = {f"tenant {number}": chance.choice([0.5, 1, 2, 4]) for number in range(8)}
    work = Simulation(
        conn,
        slots=(8,),
        step=1.0,
        length=lambda task: lengths.get(task.group_key, 1) * chance.uniform(0.5, 1.5),
    )
    for number, group in enumerate(lengths):
        run(conn, "select fairq.configure_group('default', %s, %s)", group, f'{{"weight": {1 + number % 3}}}')
        for _ in range(round(10 * 1.43**number)):
            create(conn, group)

    def arrive() -> None:
        for visitor in ("alice", "carol", "dave"):
            if chance.random() < 0.15:
                create(conn, visitor)

    said: list[tuple[float, float, set[int]]] = []
    for at in (20, 30, 40, 55, 70, 90):
        work.until(at, arrive)
        for group in lengths:
            stands = web.standing(conn, "default", group)
            if stands.waiting >= 5 and stands.eta_seconds is not None:
                waiting = (
                    "select id from fairq.live_tasks where group_key = %s and state in ('overflow', 'queued')"
                )
                ids = {row[0] for row in run(conn, waiting, group)}
                said.append((work.now, stands.eta_seconds, ids))
    while any(each.ended is None for each in work.ran):
        work.until(work.now + 10)
    ended = {int(each.task): each.ended for each in work.ran if each.ended is not None}
    errors = []
    for now, eta, ids in said:
        took = max(ended[id] for id in ids) - now
        errors.append(abs(eta - took) / took)
    assert len(errors) > 10
    assert median(errors) <= 0.2
