"""Data for plan contracts: many tasks by few statements, with every state of statistics."""

import os
from typing import Any

import psycopg

# `make test-long` sets 1,000,000: the whole size of the contract. The plans are the same at a tenth of it.
ROWS = int(os.environ.get("FAIRQ_TEST_ROWS", "100000"))
LONG = ROWS >= 1_000_000

TABLES = (
    "tasks",
    "ready",
    "held",
    "parked",
    "lanes",
    "rings",
    "ticks",
    "heartbeats",
    "cancellations",
    "workers",
    "sweeps",
    "idempotency_keys",
)

FILL = """
with made as (
  insert into fairq.tasks (shard_no, id, sequence, queue, group_key, kind, scheduled, priority,
    created_at, run_at, expires_at, cost, max_attempts, payload)
  select 0, n.id, n.id, 'default', n.group_key, 'default',
    %(scheduled)s, n.id %% %(priorities)s, clock_timestamp(),
    clock_timestamp() + case when %(scheduled)s then interval '1 day' else interval '0' end,
    case when %(expiring)s then clock_timestamp() + interval '1 day' end, 1, 5, '{}'
  from (
    select nextval('fairq.task_ids') as id, 'group ' || (g.n %% %(groups)s) as group_key
    from generate_series(1, %(tasks)s) g(n)
  ) n
  returning group_key, priority, id, run_at
)
insert into fairq.rings (shard_no, queue, group_key, priority, sequence, due_at)
select 0, 'default', m.group_key,
  case when not %(scheduled)s then m.priority end, case when not %(scheduled)s then min(m.id) end,
  case when %(scheduled)s then min(m.run_at) end
from made m
group by m.group_key, m.priority
"""


def fill(
    conn: psycopg.Connection[Any],
    tasks: int,
    groups: int,
    *,
    priorities: int = 1,
    scheduled: bool = False,
    expiring: bool = False,
) -> None:
    """Many waiting tasks and their rings, as create_tasks writes them, set by set."""
    conn.execute(
        FILL,
        {
            "tasks": tasks,
            "groups": groups,
            "priorities": priorities,
            "scheduled": scheduled,
            "expiring": expiring,
        },
    )


def analyze(conn: psycopg.Connection[Any]) -> None:
    for table in TABLES:
        conn.execute(f"vacuum (analyze) fairq.{table}")
