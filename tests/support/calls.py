"""The engine's calls for tests, with the same names in every folder; and what they can look at."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self
from weakref import WeakSet

import psycopg
import pytest
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.types.json import Jsonb

from tests.support.database import MANAGED

Conn = psycopg.Connection[Any]
Row = tuple[Any, ...]

NOON = "2030-01-01 12:00:00+00"

# For calls in the background; the last two take what `held_by` gives, FINISH what `ending` does.
POP = "select id, attempt, group_key, user_key from fairq.pop_tasks(%s, %s, %s, %s::interval, %s)"
START = "select s from fairq.start_tasks(%s, %s, %s) s order by 1"
FINISH = "select f from fairq.finish_tasks(%s, %s, %s, %s::text[]) f order by 1"
LOCK_DOMAIN = (
    "select from fairq.domains where queue = %s for update"  # what promotion and maintenance wait for
)
RELEASE = (
    "select f from (values (%s::bigint, %s::bigint[], %s::integer[])) a(worker, ids, attempts), "
    "fairq.finish_tasks(a.worker, a.ids, a.attempts, "
    "array_fill('released'::text, array[cardinality(a.ids)])) f order by 1"
)


class Held(int):
    """A task that a worker holds: its id, worker and attempt."""

    attempt: int
    group_key: str
    user_key: str | None

    def __new__(cls, id_: int, attempt: int, group_key: str, user_key: str | None = None) -> Self:
        held = super().__new__(cls, id_)
        held.attempt, held.group_key, held.user_key = attempt, group_key, user_key
        return held


# Who calls what, where a suite says that roles call: the fixture `by_roles`.
ROLES = dict.fromkeys(
    ("create_task", "create_tasks", "cancel_task", "watch_task", "task_result", "task_progress"),
    "fairq_enqueue",
) | dict.fromkeys(
    (
        *("register_worker", "retire_worker", "heartbeat", "report_progress", "maintain", "promote_overflow"),
        *("turn", "pop_tasks", "start_tasks", "held_tasks", "finish_tasks", "release_tasks"),
        *("fire_schedules", "unplanned_schedules", "plan_schedule"),
    ),
    "fairq_work",
)
by_roles = False
_have_their_own: WeakSet[Conn] = WeakSet()


@contextmanager
def in_role(conn: Conn, query: str) -> Iterator[None]:
    """Use the role that may call the function that the query names; else the session's own."""
    if query.startswith("set role"):
        _have_their_own.add(conn)
    names = re.findall(r"fairq\.(\w+)", query)
    role = ROLES.get(names[0]) if by_roles and len(names) == 1 and conn not in _have_their_own else None
    if role is None:
        yield
        return
    with conn.transaction() if MANAGED and conn.autocommit else nullcontext():
        _say(conn, f"set role {role}")
        try:
            yield
        finally:
            # With the statement that failed its role is undone.
            if not conn.closed and conn.info.transaction_status != TransactionStatus.INERROR:
                _say(conn, "reset role")


def _say(conn: Conn, command: str) -> None:
    """As conn.execute(), in half the time: most calls come with two of these."""
    begins = conn.info.transaction_status == TransactionStatus.IDLE and not conn.autocommit
    if begins or conn.pgconn.exec_(command.encode()).status != ExecStatus.COMMAND_OK:
        conn.execute(command.encode())


def run(conn: Conn, query: str, *params: Any) -> list[Row]:
    with in_role(conn, query):
        return _run(conn, query, *params)


def _run(conn: Conn, query: str, *params: Any) -> list[Row]:
    cursor = conn.execute(query.encode(), params)
    # Rows without columns ("select from …") are rows, though such a result has no description.
    return cursor.fetchall() if cursor.rownumber is not None else []


def column(conn: Conn, query: str, *params: Any) -> list[Any]:
    """The only value of each row."""
    return [value for (value,) in run(conn, query, *params)]


def one(conn: Conn, query: str, *params: Any) -> Any:
    """The only value of the only row."""
    (value,) = column(conn, query, *params)
    return value


def call(conn: Conn, function: str, *args: Any, **named: Any) -> list[Row]:
    """A function of the public SQL. Named arguments go without their p_; configure_… takes settings."""
    if function.startswith("configure_"):
        args, named = (*args, Jsonb(named)), {}
    parts = ["%s"] * len(args) + [f"p_{name} => %s" for name in named]
    return run(conn, f"select * from fairq.{function}({', '.join(parts)})", *args, *named.values())  # noqa: S608


def empty(conn: Conn, *tables: str) -> None:
    """Delete all rows between two examples. Truncating costs new files, and all plans of all sessions."""
    conn.execute(";".join(f"delete from fairq.{table}" for table in tables).encode())  # noqa: S608


def at(conn: Conn, time: str) -> None:
    """The session's clock, such as 12:00:30."""
    run(conn, "select set_config('fairq.now', %s, false)", f"2030-01-01 {time}+00")


# --- A task's life --------------------------------------------------------------------------------


def create(conn: Conn, group: str = "bob", payload: str = "{}", **options: Any) -> int:
    names = "".join(f", p_{name} => %s" for name in options)
    return int(one(conn, f"select fairq.create_task(%s, %s{names})", group, payload, *options.values()))


def create_each(conn: Conn, *groups: str, **options: Any) -> list[int]:
    """Create a task for each group, in this order, one per call."""
    return [create(conn, group, **options) for group in groups]


def create_all(conn: Conn, *groups: str, **options: Any) -> list[int]:
    """Create a task for each group, all in one call."""
    names = "".join(f", p_{name} => %s" for name in options)
    query = f"select fairq.create_tasks(%s::text[], array_fill('{{}}'::jsonb, array[%s]){names})"
    return column(conn, query, list(groups), len(groups), *options.values())


def create_of(conn: Conn, group: str, *users: str | None, **options: Any) -> list[int]:
    """Create a task for each of these users of a group, in this order, in one call."""
    return create_all(conn, *[group] * len(users), user_keys=list(users), **options)


def create_many(conn: Conn, group: str, count: int, **options: Any) -> list[int]:
    """Create many tasks of a group in one call."""
    return create_all(conn, *[group] * count, **options)


def register(conn: Conn, *queues: str, slots: int = 8, lease: str = "1 hour") -> int:
    query = "select fairq.register_worker('w', %s::text[], %s, %s)"
    return int(one(conn, query, list(queues or ("default",)), slots, lease))


def promote(conn: Conn, queue: str = "default", limit: int | None = None) -> int:
    return int(one(conn, "select fairq.promote_overflow(%s, %s)", queue, limit))


def pop(
    conn: Conn,
    worker: int | None,
    limit: int | None = 100,
    *,
    queue: str = "default",
    lease: str | None = None,
    shard: int | None = None,
) -> list[Held]:
    """In served order."""
    return [Held(*row) for row in run(conn, POP, queue, limit, worker, lease, shard)]


def held_by(worker: int | None, tasks: Sequence[int], attempt: int | None = None) -> list[Any]:
    """What names tasks in a call: their holder, ids and attempts; of a bare id the first, if none is said."""
    attempts = [getattr(task, "attempt", 1) if attempt is None else attempt for task in tasks]
    return [worker, [int(task) for task in tasks], attempts]


def ending(
    worker: int | None, tasks: Sequence[int], outcome: str | None = None, attempt: int | None = None
) -> list[Any]:
    """The parameters of FINISH: all with one outcome, or none for success."""
    return [*held_by(worker, tasks, attempt), None if outcome is None else [outcome] * len(tasks)]


def start(conn: Conn, worker: int | None, tasks: Sequence[int], attempt: int | None = None) -> list[int]:
    return column(conn, START, *held_by(worker, tasks, attempt))


def finish(
    conn: Conn,
    worker: int | None,
    tasks: Sequence[int],
    outcome: str | None = "succeeded",
    *,
    attempt: int | None = None,
    delay: str | None = None,
    **options: Any,
) -> list[int]:
    """Finish all with one outcome; `delay` is the pause before a retry, `options` are arrays."""
    if delay is not None:
        options["retry_delays"] = [delay] * len(tasks)
    casts = {
        "results": "::jsonb[]",
        "errors": "::jsonb[]",
        "retry_delays": "::interval[]",
        "costs": "::float8[]",
        "holds": "::text[]",
    }
    names = "".join(f", p_{name} => %s{casts.get(name, '')}" for name in options)
    query = f"select f from fairq.finish_tasks(%s, %s, %s, %s::text[]{names}) f order by 1"  # noqa: S608
    return column(conn, query, *ending(worker, tasks, outcome, attempt), *options.values())


def release(conn: Conn, worker: int | None, tasks: Sequence[int], attempt: int | None = None) -> list[int]:
    return column(conn, RELEASE, *held_by(worker, tasks, attempt))


def maintain(conn: Conn, limit: int = 10000) -> dict[str, int]:
    return dict(one(conn, "select fairq.maintain(%s)", limit))


def drain(conn: Conn, worker: int, queue: str = "default") -> list[int]:
    """Pop and finish until nothing is left, and return the ids in served order."""
    served: list[int] = []
    while held := pop(conn, worker, 50, queue=queue):
        served += held
        assert len(finish(conn, worker, held)) == len(held)
    return served


# --- What there is to see -------------------------------------------------------------------------


def groups_of(held: Sequence[Held]) -> list[str]:
    return [each.group_key for each in held]


def users_of(held: Sequence[Held]) -> list[str | None]:
    return [each.user_key for each in held]


def states(conn: Conn) -> dict[int, str]:
    """The states of live tasks and the outcomes of ended ones, by id."""
    query = "select id, state from fairq.live_tasks union all select id, outcome from fairq.finished_tasks"
    rows = run(conn, query)
    assert len({row[0] for row in rows}) == len(rows), "a task is live and ended at once"
    return dict(rows)


def state(conn: Conn, task: int) -> str | None:
    """The task's state or outcome; None: there is no such task."""
    return states(conn).get(task)


def field(conn: Conn, task: int, name: str) -> Any:
    """A live task's body and state."""
    query = "select l.*, b.headers, b.payload from fairq.live_tasks l join fairq.tasks b using (shard_no, id)"
    return one(conn, f"select {name} from ({query}) t where id = %s", task)  # noqa: S608


def explain(conn: Conn, task: int) -> str:
    return str(one(conn, "select reason from fairq.explain_task(%s)", task))


def in_flight(conn: Conn, lane: str, queue: str = "default") -> int:
    """The places taken of a group, a key (#keys), 'queue x' (#queue x) or 'cluster' (#cluster)."""
    query = """
        select coalesce((l.gate).in_flight, 0) from fairq.lanes l
        where l.queue = %s and l.group_key = %s order by l.version desc limit 1"""
    rows = run(conn, query, queue, lane)
    return int(rows[0][0]) if rows else 0


def written(conn: Conn) -> dict[str, int]:
    """The rows written so far per table, as this session counts them. Compare two in one transaction."""
    query = (
        "select relname, n_tup_ins + n_tup_upd + n_tup_del from pg_stat_xact_user_tables"
        " where schemaname = 'fairq'"
    )
    return dict(run(conn, query))


def contents(conn: Conn) -> list[Row]:
    """All rows of the engine, to compare before and after."""
    tables = column(
        conn,
        "select c.oid::regclass::text from pg_class c where c.relnamespace = 'fairq'::regnamespace"
        " and c.relkind in ('r', 'p') and not c.relispartition order by 1",
    )
    query = " union all ".join(
        f"select '{name}', array(select t::text from {name} t order by 1)"  # noqa: S608
        for name in tables
    )
    # The same one before and after, often in one session.
    return conn.execute(query.encode(), prepare=True).fetchall()


@contextmanager
def refused(conn: Conn, code: str) -> Iterator[None]:
    """Assert that the call raises this code with a hint, and changes nothing."""
    before = contents(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        yield
    assert caught.value.sqlstate == code, caught.value
    if code.startswith("QF"):
        assert caught.value.diag.message_primary
        assert "<NULL>" not in caught.value.diag.message_primary, "what people read of a missing value"
        assert caught.value.diag.message_hint
    assert contents(conn) == before


def needs_one_order(conn: Conn) -> None:
    """Skip a test about the order of several groups if there are shards, each with its own order."""
    if one(conn, "select shard_count from fairq.settings") > 1:
        pytest.skip("these groups are in several shards")
