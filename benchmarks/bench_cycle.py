"""Promote, pop and finish on one connection, beside a FIFO queue with the same durability and history.

Also what a task writes ahead in its whole life, from its creation on, one by one and in batches.
"""

import time
from typing import Any

import psycopg

from benchmarks.bench_create_task import PAYLOAD, PAYLOADS
from benchmarks.harness import Scale, Session, clear

BASELINES = ("fifo",)
LARGER = {"2 KB": 5, "50 KB": 50}  # payloads, and how many times fewer tasks


def estimate(scale: Scale) -> float:
    return 1 + scale.repetitions * min(scale.tasks, 100_000) * 11 * 70e-6


def run(session: Session) -> None:
    tasks = min(session.scale.tasks, 100_000)
    for _ in session.repetitions():
        with session.connect() as conn:
            for batch, some in ((1, max(tasks // 20, 200)), (100, tasks), (200, tasks), (500, tasks)):
                session.say(f"batches of {batch}")
                measure(session, conn, "fifo", some, batch, 100)
                for groups in (100, 1_000, 100_000) if batch > 100 else (100,):
                    measure(session, conn, "fairq", some, batch, groups)
            for size, fewer in LARGER.items():
                session.say(f"payloads of {size}")
                for subject in ("fifo", "fairq"):
                    measure(session, conn, subject, max(tasks // fewer, 200), 200, 100, size)


def measure(
    session: Session,
    conn: psycopg.Connection[Any],
    subject: str,
    tasks: int,
    batch: int,
    groups: int,
    size: str | None = None,
) -> None:
    """The rate of cycles over existing tasks, and a task's WAL from its creation on."""
    payload = PAYLOADS[size] if size else PAYLOAD
    before = "select pg_current_wal_insert_lsn()"
    start = scalar(conn, before)
    cycle = {"fifo": fifo, "fairq": fairq}[subject]
    seconds = cycle(conn, tasks, batch, groups, payload)
    written = scalar(conn, "select pg_current_wal_insert_lsn() - %s::pg_lsn", start)
    scenario: dict[str, Any] = {"payload": size} if size else {"batch": batch, "groups": groups}
    what = "cycle of larger payloads" if size else "cycle"
    session.record(subject, what, tasks / seconds, "tasks/s", **scenario)
    session.record(subject, f"WAL, {what}", float(written) / tasks, "B/task", **scenario)


def fairq(conn: psycopg.Connection[Any], tasks: int, batch: int, groups: int, payload: str) -> float:
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


def fifo(conn: psycopg.Connection[Any], tasks: int, batch: int, groups: int, payload: str) -> float:
    clear(conn)
    conn.execute(
        "insert into bench_fifo.tasks (group_key, payload)"
        " select 'group ' || i %% %s::int, %s::jsonb from generate_series(1, %s::int) i",
        (groups, payload, tasks),
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


def scalar(conn: psycopg.Connection[Any], statement: str, *params: Any) -> Any:
    row = conn.execute(statement, params).fetchone()
    return row[0] if row else None
