"""What policies cost a queue that has none: its cycle with and without ten thousand limited groups nearby."""

from typing import Any

import psycopg

from benchmarks.bench_create_task import PAYLOAD
from benchmarks.bench_cycle import drain, scalar
from benchmarks.harness import Scale, Session, clear

BASELINES = ()
BATCH = 200
GROUPS = 100  # of the queue that is measured
OTHER = "limited"

# Writes what configure_group would, without a promotion for each.
LIMITED = """
insert into fairq.groups (shard_no, queue, group_key, weight, max_running, rate_limit, rate_period,
  rate_burst, breaker_threshold, breaker_cooldown)
select 0, %(queue)s, 'limited ' || i, 1 + i %% 3, %(cap)s, 5, interval '1 minute', 5, 3, interval '1 minute'
from generate_series(1, %(count)s::int) i
"""
KEYS = """
insert into fairq.groups (shard_no, queue, group_key, max_running)
select 0, '#keys', 'key ' || i, 2 from generate_series(1, %s::int) i
"""
# Two tasks for each of them: one gets a place, the other waits for it.
WAITING = """
select count(*) from fairq.create_tasks(
  array(select 'limited ' || 1 + i / 2 from generate_series(%(first)s::int, %(last)s::int) i),
  array_fill(%(payload)s::jsonb, array[%(last)s::int - %(first)s::int + 1]),
  p_queue => %(queue)s,
  p_concurrency_keys => %(keys)s)
"""


def estimate(scale: Scale) -> float:
    tasks, limited = sizes(scale)
    return 1 + scale.repetitions * (tasks * 3 * 80e-6 + limited * 2 * 3 * 100e-6)


def sizes(scale: Scale) -> tuple[int, int]:
    """Tasks of the measured queue, and limited groups beside it."""
    return min(scale.tasks, 100_000), min(scale.tasks, 10_000)


def run(session: Session) -> None:
    tasks, limited = sizes(session.scale)
    for repetition in session.repetitions():
        with session.connect() as conn:
            subjects = {
                "without policies": lambda: None,
                "policies of another queue": lambda: limit_another_queue(conn, limited),
                "policies of other groups of the queue": lambda: limit_other_groups(conn, limited),
            }
            # Each is first once, so that none has the warmer cache every time.
            names = [*subjects]
            start = repetition % len(names)
            for subject in names[start:] + names[:start]:
                forget(conn)
                subjects[subject]()
                seconds = cycle(conn, tasks)
                session.record(
                    subject,
                    "cycle of an uncapped queue",
                    tasks / seconds,
                    "tasks/s",
                    batch=BATCH,
                    groups=GROUPS,
                )
            forget(conn)


def forget(conn: psycopg.Connection[Any]) -> None:
    """A database in which nobody ever had a policy."""
    clear(conn)
    conn.execute("delete from fairq.groups")
    conn.execute("delete from fairq.queues where queue = %s", (OTHER,))
    conn.execute("delete from fairq.domains where queue = %s", (OTHER,))


def limit_another_queue(conn: psycopg.Connection[Any], count: int) -> None:
    """Limited groups with tasks ready and waiting, some with keys; a cap and a rate of the whole queue."""
    conn.execute(
        """select fairq.configure_queue(%s,
          '{"group_max_running": 1, "max_running": 99, "rate_limit": 99}')""",
        (OTHER,),
    )
    conn.execute(LIMITED, {"queue": OTHER, "cap": 1, "count": count})
    conn.execute(KEYS, (count,))
    wait(conn, OTHER, count, with_keys=True)


def limit_other_groups(conn: psycopg.Connection[Any], count: int) -> None:
    """Groups of the same queue with a cap of nothing: their tasks wait all the while, and stay."""
    conn.execute(LIMITED, {"queue": "default", "cap": 0, "count": count})
    wait(conn, "default", count, with_keys=False)


def wait(conn: psycopg.Connection[Any], queue: str, groups: int, with_keys: bool) -> None:
    for first in range(0, 2 * groups, 10_000):
        last = min(first + 10_000, 2 * groups) - 1
        keys = [f"key {1 + number // 20}" if number % 10 == 0 else None for number in range(first, last + 1)]
        conn.execute(
            WAITING,
            {
                "first": first,
                "last": last,
                "payload": PAYLOAD,
                "queue": queue,
                "keys": keys if with_keys else None,
            },
        )
    # Every group is heard of before the clock runs: what is measured is to have policies, not to get them.
    while scalar(conn, f"select fairq.promote_overflow('{queue}', 100000)"):
        pass


def cycle(conn: psycopg.Connection[Any], tasks: int) -> float:
    worker_id = scalar(conn, "select fairq.register_worker('bench', '{default}', 100, '1 hour')")
    for first in range(0, tasks, 10_000):
        count = min(10_000, tasks - first)
        conn.execute(
            "select count(*) from fairq.create_tasks("
            " array(select 'group ' || i %% %s::int from generate_series(1, %s::int) i),"
            " array_fill(%s::jsonb, array[%s::int]))",
            (GROUPS, count, PAYLOAD, count),
        )
    return drain(
        conn,
        tasks,
        ("select id, attempt from fairq.pop_tasks('default', %s, %s)", (BATCH, worker_id)),
        "select f from fairq.finish_tasks(%s, %s::bigint[], %s::integer[]) f",
        worker_id,
    )
