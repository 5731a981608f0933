"""The queues that `held` and `backlog` measure: one connection fills and empties them."""

from dataclasses import dataclass
from typing import Any

import psycopg

PAYLOAD = '{"file": "a.pdf", "note": "' + "x" * 60 + '"}'
BATCH = 100

Conn = psycopg.Connection[Any]


@dataclass(frozen=True)
class Queue:
    """A queue that one connection fills and empties."""

    name: str
    create: str  # groups, tasks, payload
    promote: str | None
    pop: str  # limit, worker
    finish: str  # worker, ids, attempts
    schema: str


FAIRQ = Queue(
    "fairq",
    "select count(*) from fairq.create_tasks("
    " array(select 'group ' || i %% %(groups)s::int from generate_series(1, %(tasks)s::int) i),"
    " array_fill(%(payload)s::jsonb, array[%(tasks)s::int]))",
    "select fairq.promote_overflow()",
    "select p.id, p.attempt from fairq.pop_tasks('default', %s, %s) p",
    "select count(*) from fairq.finish_tasks(%s, %s::bigint[], %s::integer[])",
    "fairq",
)
FIFO = Queue(
    "fifo",
    "insert into bench_fifo.tasks (group_key, payload)"
    " select 'group ' || i %% %(groups)s::int, %(payload)s::jsonb from generate_series(1, %(tasks)s::int) i",
    None,
    "select p.id, p.attempt from bench_fifo.pop_tasks('default', %s, %s) p",
    "select count(*) from bench_fifo.finish_tasks(%s, %s::bigint[], %s::integer[])",
    "bench_fifo",
)


def register(conn: Conn, queue: Queue) -> int:
    if queue is not FAIRQ:
        return 1
    row = conn.execute("select fairq.register_worker('bench', '{default}', 100, '1 day')").fetchone()
    assert row is not None
    return int(row[0])
