"""A worker that never rests: its resident memory, and the size of the tables that should not grow."""

import time
from typing import Any

import psycopg

from benchmarks.bench_worker import enqueue, memory, wait_until_empty, workers
from benchmarks.harness import Scale, Session, clear

BASELINES: tuple[str, ...] = ()
WINDOWS = 24
CHURN = 2_000  # tasks in flight, between waits


def estimate(scale: Scale) -> float:
    return 3 + scale.churn_seconds


def run(session: Session) -> None:
    for _ in session.repetitions(1):
        churn(session)


def churn(session: Session) -> None:
    seconds = session.scale.churn_seconds
    resident: list[tuple[float, float]] = []
    sizes: list[tuple[float, float]] = []
    tasks = 0
    with session.connect() as conn:
        clear(conn)
        with workers(conn, session.dsn, 1, 50) as pids:
            start = time.perf_counter()
            while (now := time.perf_counter() - start) < seconds or len(sizes) < 3:
                for kind in ("nothing", "nothing_in_thread"):
                    enqueue(conn, kind, CHURN // 2)
                    tasks += CHURN // 2
                wait_until_empty(conn)
                if not sizes or now - sizes[-1][0] >= seconds / WINDOWS:
                    resident.append((now, memory(pids)))
                    sizes.append((now, live_size(conn)))
    scenario = {"seconds": seconds}
    session.record("fairq", "tasks of the churn", tasks / now, "tasks/s", **scenario)
    for what, points in (("memory of the worker", resident), ("live tables and indexes", sizes)):
        values = [value for _, value in points]
        half = len(values) // 2
        session.record("fairq", f"{what}, most in the first half", max(values[:half]), "MB", **scenario)
        session.record("fairq", f"{what}, most in the second half", max(values[half:]), "MB", **scenario)
        session.series("fairq", what, points, "MB", **scenario)


def live_size(conn: psycopg.Connection[Any]) -> float:
    """Megabytes of all tables but the history, with their indexes and TOAST."""
    row = conn.execute(
        "select sum(pg_total_relation_size(c.oid))"
        " from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'fairq' and c.relkind = 'r'"
        " and c.relname not like 'finished\\_tasks%' and c.relname not like 'attempts%'"
    ).fetchone()
    return float(row[0]) / 1e6 if row else 0.0
