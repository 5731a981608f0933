"""A steady rate with the vacuum horizon held by one open snapshot, beside the same run without it."""

import time
from typing import Any

import psycopg

from benchmarks.harness import Scale, Session, clear, median

PAYLOAD = '{"file": "a.pdf"}'
BASELINES = ()
RATE = 1_000
BATCH = 100
GROUPS = 50


def estimate(scale: Scale) -> float:
    return 1 + scale.repetitions * 2 * scale.held_seconds


def run(session: Session) -> None:
    seconds = session.scale.held_seconds
    for _ in session.repetitions():
        for held in (False, True):
            with session.connect() as conn, psycopg.connect(session.dsn) as reader:
                clear(conn)
                if held:
                    reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                    reader.execute("select count(*) from fairq.tasks")
                steady(session, conn, seconds, held)
                reader.rollback()


def steady(session: Session, conn: psycopg.Connection[Any], seconds: float, held: bool) -> None:
    """Tasks arrive and are served at a fixed rate; the times of the last quarter are what counts."""
    row = conn.execute("select fairq.register_worker('bench', '{default}', 100, '1 hour')").fetchone()
    assert row is not None
    worker_id = row[0]
    times: dict[str, list[float]] = {"create": [], "promote": [], "pop": [], "finish": []}
    turns = int(seconds * RATE / BATCH)
    served = 0
    start = time.perf_counter()
    for turn in range(turns):
        delay = start + turn * BATCH / RATE - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        marks = [time.perf_counter()]
        conn.execute(
            "select count(*) from fairq.create_tasks("
            " array(select 'group ' || i %% %s::int from generate_series(1, %s::int) i),"
            " array_fill(%s::jsonb, array[%s::int]))",
            (GROUPS, BATCH, PAYLOAD, BATCH),
        )
        marks.append(time.perf_counter())
        conn.execute("select fairq.promote_overflow()")
        marks.append(time.perf_counter())
        popped = conn.execute(
            "select id, attempt from fairq.pop_tasks('default', %s, %s)", (BATCH, worker_id)
        ).fetchall()
        marks.append(time.perf_counter())
        ids, attempts = [task[0] for task in popped], [task[1] for task in popped]
        conn.execute(
            "select count(*) from fairq.finish_tasks(%s, %s::bigint[], %s::integer[])",
            (worker_id, ids, attempts),
        )
        marks.append(time.perf_counter())
        served += len(popped)
        for name, begin, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(end - begin)
        if turn % 50 == 49:
            conn.execute("select fairq.maintain()")
    scenario = {"held": held, "seconds": seconds, "rate": RATE}
    session.record("fairq", "served", served / (turns * BATCH), "share", **scenario)
    for name, values in times.items():
        last = values[-max(1, len(values) // 4) :]
        session.record("fairq", f"{name} p50", median(last) * 1000, "ms", **scenario)
    dead = conn.execute(
        "select sum(n_dead_tup) from pg_stat_user_tables where schemaname = 'fairq'"
    ).fetchone()
    session.record("fairq", "dead rows", float(dead[0] or 0) if dead else 0, "rows", **scenario)
