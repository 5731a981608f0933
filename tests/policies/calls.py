"""The engine as the tests of policies call it, and what must hold of its counts whatever happened."""

from collections.abc import Sequence
from typing import Any

from psycopg.types.json import Jsonb

from tests.sql.calls import Conn, at, one, refused, run
from tests.support.invariants import assert_sound, hear_all

__all__ = [
    "Conn",
    "Held",
    "assert_counted",
    "at",
    "call",
    "create",
    "explain",
    "finish",
    "groups_of",
    "ids_of",
    "in_flight",
    "maintain",
    "one",
    "pop",
    "promote",
    "refused",
    "release",
    "run",
    "settle",
    "state",
    "tasks",
    "worker",
    "written",
]

# (id, attempt, group) of a task that a worker holds
Held = tuple[int, int, str]


def call(conn: Conn, function: str, *args: Any, **named: Any) -> Any:
    """A function of the public SQL. Named arguments go without their p_; configure_… takes settings."""
    if function.startswith("configure_"):
        args, named = (*args, Jsonb(named)), {}
    parts = ["%s"] * len(args) + [f"p_{name} => %s" for name in named]
    return run(conn, f"select * from fairq.{function}({', '.join(parts)})", *args, *named.values())  # noqa: S608


def create(conn: Conn, group: str = "bob", **options: Any) -> int:
    names = "".join(f", p_{name} => %s" for name in options)
    return int(one(conn, f"select fairq.create_task(%s, '{{}}'{names})", group, *options.values()))


def tasks(conn: Conn, group: str, count: int, **options: Any) -> list[int]:
    """Many tasks of a group by one call."""
    names = "".join(f", p_{name} => %s" for name in options)
    groups, payloads = "array_fill(%s::text, array[%s])", "array_fill('{}'::jsonb, array[%s])"
    query = f"select fairq.create_tasks({groups}, {payloads}{names})"
    return [row[0] for row in run(conn, query, group, count, count, *options.values())]


def worker(conn: Conn, *queues: str, slots: int = 8, lease: str = "1 hour") -> int:
    return int(
        one(conn, "select fairq.register_worker('w', %s, %s, %s)", list(queues or ("default",)), slots, lease)
    )


def pop(
    conn: Conn, worker_id: int, limit: int = 100, *, queue: str = "default", lease: str | None = None
) -> list[Held]:
    query = "select id, attempt, group_key from fairq.pop_tasks(%s, %s, %s, %s)"
    return [(row[0], row[1], row[2]) for row in run(conn, query, queue, limit, worker_id, lease)]


def ids_of(held: Sequence[Held]) -> list[int]:
    return [each[0] for each in held]


def groups_of(held: Sequence[Held]) -> list[str]:
    return [each[2] for each in held]


def finish(
    conn: Conn, worker_id: int, held: Sequence[Held], outcome: str = "succeeded", delay: str | None = None
) -> list[int]:
    query = (
        "select fairq.finish_tasks(%s, %s, %s, array_fill(%s::text, array[%s]),"
        " p_retry_delays => array_fill(%s::interval, array[%s]))"
    )
    attempts = [each[1] for each in held]
    return sorted(
        row[0]
        for row in run(conn, query, worker_id, ids_of(held), attempts, outcome, len(held), delay, len(held))
    )


def release(conn: Conn, worker_id: int, held: Sequence[Held]) -> list[int]:
    query = "select fairq.release_tasks(%s, %s, %s)"
    return sorted(row[0] for row in run(conn, query, worker_id, ids_of(held), [each[1] for each in held]))


def promote(conn: Conn, queue: str = "default", limit: int | None = None) -> int:
    return int(one(conn, "select fairq.promote_overflow(%s, %s)", queue, limit))


def maintain(conn: Conn) -> dict[str, int]:
    return dict(one(conn, "select fairq.maintain()"))


def state(conn: Conn, task: int) -> str:
    return str(
        one(
            conn,
            "select state from fairq.live_tasks where id = %s"
            " union all select outcome from fairq.finished_tasks where id = %s",
            task,
            task,
        )
    )


def explain(conn: Conn, task: int) -> str:
    return str(one(conn, "select reason from fairq.explain_task(%s)", task))


def settle(conn: Conn) -> None:
    """Every domain hears what there is to hear. Until then counts are behind."""
    hear_all(conn)


def in_flight(conn: Conn, lane: str, queue: str = "default") -> int:
    """Places taken in a lane: of a group, of a key (queue #keys), of 'queue x' or 'cluster' (#meters)."""
    query = """
        select coalesce((l.gate).in_flight, 0) from fairq.lanes l
        where l.queue = %s and l.group_key = %s order by l.version desc limit 1"""
    rows = run(conn, query, queue, lane)
    return int(rows[0][0]) if rows else 0


def assert_counted(conn: Conn) -> None:
    """I7, I11, I13: lanes say as many places as rows hold, and nothing is stuck. No transaction is open."""
    assert_sound(conn)


def written(conn: Conn) -> dict[str, int]:
    """Rows written so far, per table, as this session counts them. Compare two of one transaction."""
    return {
        row[0]: row[1]
        for row in run(
            conn,
            "select relname, n_tup_ins + n_tup_upd + n_tup_del from pg_stat_xact_user_tables"
            " where schemaname = 'fairq'",
        )
    }
