"""Promote, pop and finish on one connection, beside a FIFO queue with the same durability and history."""

import time
from typing import Any

import psycopg

from benchmarks.bench_create_task import PAYLOAD, PAYLOADS
from benchmarks.harness import Scale, Session, clear

BASELINES = ("fifo",)
LARGER = {"2 KB": 5, "50 KB": 50}  # payloads, and how many times fewer tasks


def estimate(scale: Scale) -> float:
    return 1 + scale.repetitions * min(scale.tasks, 100_000) * 7 * 70e-6


def run(session: Session) -> None:
    tasks = min(session.scale.tasks, 100_000)
    for _ in session.repetitions():
        with session.connect() as conn:
            for batch in (200, 500):
                session.say(f"batches of {batch}")
                seconds = fifo(conn, tasks, batch)
                session.record("fifo", "cycle", tasks / seconds, "tasks/s", batch=batch, groups=100)
                for groups in (100, 100_000):
                    seconds = fairq(conn, tasks, batch, groups)
                    session.record("fairq", "cycle", tasks / seconds, "tasks/s", batch=batch, groups=groups)
            for size, fewer in LARGER.items():
                session.say(f"payloads of {size}")
                some = max(tasks // fewer, 200)
                for subject, seconds in (
                    ("fifo", fifo(conn, some, 200, PAYLOADS[size])),
                    ("fairq", fairq(conn, some, 200, 100, PAYLOADS[size])),
                ):
                    session.record(
                        subject, "cycle of larger payloads", some / seconds, "tasks/s", payload=size
                    )


def fairq(
    conn: psycopg.Connection[Any], tasks: int, batch: int, groups: int, payload: str = PAYLOAD
) -> float:
    clear(conn)
    worker_id = scalar(conn, "select fairq.register_worker('bench', '{default}', 100, '1 hour')")
    for start in range(0, tasks, 10_000):
        conn.execute(
            "select count(*) from fairq.create_tasks("
            " array(select 'group ' || i %% %s::int from generate_series(%s::int, %s::int) i),"
            " array_fill(%s::jsonb, array[%s::int]))",
            (groups, start, min(start + 10_000, tasks) - 1, payload, min(10_000, tasks - start)),
        )
    return drain(
        conn,
        tasks,
        ("select id, attempt from fairq.pop_tasks('default', %s, %s)", (batch, worker_id)),
        "select f from fairq.finish_tasks(%s, %s::bigint[], %s::integer[]) f",
        worker_id,
    )


def fifo(conn: psycopg.Connection[Any], tasks: int, batch: int, payload: str = PAYLOAD) -> float:
    clear(conn)
    conn.execute(
        "insert into bench_fifo.tasks (group_key, payload)"
        " select 'group ' || i %% 100, %s::jsonb from generate_series(1, %s::int) i",
        (payload, tasks),
    )
    return drain(
        conn,
        tasks,
        ("select id, attempt from bench_fifo.pop_tasks('default', %s, %s)", (batch, 1)),
        "select f from bench_fifo.finish_tasks(%s, %s::bigint[], %s::integer[]) f",
        1,
    )


def drain(
    conn: psycopg.Connection[Any], tasks: int, pop: tuple[str, tuple[int, int]], finish: str, worker_id: int
) -> float:
    done = 0
    start = time.perf_counter()
    while popped := conn.execute(*pop).fetchall():
        ids, attempts = zip(*popped, strict=True)
        done += len(conn.execute(finish, (worker_id, list(ids), list(attempts))).fetchall())
    seconds = time.perf_counter() - start
    if done != tasks:
        raise RuntimeError(f"{done} of {tasks} tasks were finished")
    return seconds


def scalar(conn: psycopg.Connection[Any], statement: str) -> Any:
    row = conn.execute(statement).fetchone()
    return row[0] if row else None
