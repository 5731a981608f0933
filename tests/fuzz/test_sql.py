"""Whatever is sent to whichever function: an answer or a refusal; nothing lost, and the queue works on (I1,
I7, I13, I15)."""

import os
from collections import Counter
from typing import Any

import psycopg
import pytest

from tests.fuzz.sql import fuzz
from tests.support.calls import drain, maintain, register
from tests.support.database import Database
from tests.support.invariants import assert_sound, hear_all, violations

CALLS = int(os.environ.get("FAIRQ_TEST_FUZZ", "1000"))
ROUND = 5000

Conn = psycopg.Connection[Any]


def make_plain(conn: Conn) -> None:
    """As an operator would: no worker but those to come, no limits, nothing paused."""
    for (worker,) in conn.execute(
        "select worker_id from fairq.workers where lost_at is null group by 1"
    ).fetchall():
        conn.execute("select fairq.retire_worker(%s)", [worker])
    held = "select distinct queue, group_key from fairq.lanes where (gate).held_until is not null"
    for queue, name in conn.execute(held).fetchall():
        if queue == "#keys":
            conn.execute("select fairq.hold_key(%s, null)", [name])
        else:
            conn.execute("select fairq.hold_group(%s, %s, null)", [queue, name])
    nulls = "select jsonb_object_agg(n, null) from unnest(%s::text[]) n"
    limits = [
        "max_running",
        "rate_limit",
        "rate_burst",
        "rate_period",
        "breaker_threshold",
        "breaker_cooldown",
    ]
    conn.execute(f"select fairq.configure_cluster(({nulls}))", [["max_running", "payload_limit"]])
    groups = "select distinct queue, group_key from fairq.groups where queue !~ '^#'"
    for queue, group in conn.execute(groups).fetchall():
        conn.execute("select fairq.resume_group(%s, %s)", [queue, group])
        conn.execute(f"select fairq.configure_group(%s, %s, ({nulls}))", [queue, group, [*limits, "budget"]])
    for (queue,) in conn.execute("select queue from fairq.queues where not internal").fetchall():
        conn.execute("select fairq.resume_queue(%s)", [queue])
        named = [*limits, *(f"group_{name}" for name in limits), "group_budget", "fairness", "ready_target"]
        conn.execute(f"select fairq.configure_queue(%s, ({nulls}))", [queue, named])
    for (key,) in conn.execute(
        "select distinct group_key from fairq.groups where queue = '#keys'"
    ).fetchall():
        conn.execute(f"select fairq.configure_key(%s, ({nulls}))", [key, limits[:1]])


def serve_all(conn: Conn) -> None:
    """One plain worker serves what is runnable; what is for later is canceled, and nothing is left."""
    for number in range(3):
        maintain(conn)
        if number == 1:
            conn.execute("select fairq.cancel_task(id) from fairq.tasks")
        for (queue,) in conn.execute("select queue from fairq.queues where not internal").fetchall():
            drain(conn, register(conn, queue), queue)
    query = "select l.queue, l.id, e.* from fairq.live_tasks l, fairq.explain_task(l.id) e limit 5"
    left = conn.execute(query).fetchall()
    assert not left, left


@pytest.mark.parametrize("number", range((CALLS + ROUND - 1) // ROUND))
def test_every_function_answers_or_refuses_whatever_it_is_sent(database: Database, number: int) -> None:
    world = fuzz(database.dsn, min(CALLS, ROUND), number, most=1 + 3 * (number % 2))
    conn = database.connect(autocommit=True)
    totals = Counter[str]()
    for outcomes in world.outcomes.values():
        totals.update(outcomes)
    print(dict(totals), *sorted(world.outcomes.items()), sep="\n")
    wrong = violations(conn)
    assert not world.found, "\n\n".join([*world.found.values(), str(wrong)])
    assert not wrong, wrong
    make_plain(conn)
    hear_all(conn)
    assert_sound(conn)
    serve_all(conn)
    assert_sound(conn)
    maintain(conn)
    failing = conn.execute("select * from fairq.upkeep_failures").fetchall()
    assert not failing, failing
    ended = {row[0] for row in conn.execute("select id from fairq.finished_tasks").fetchall()}
    assert world.created <= ended, sorted(world.created - ended)[:10]
