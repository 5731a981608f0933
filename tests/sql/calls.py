"""The engine's functions as the tests of this folder call them. Codes are compared, never texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

Conn = psycopg.Connection[Any]
Row = tuple[Any, ...]

NOON = "2030-01-01 12:00:00+00"


def run(conn: Conn, query: str, *params: Any) -> list[Row]:
    cursor = conn.execute(query, params)
    return cursor.fetchall() if cursor.description else []


def one(conn: Conn, query: str, *params: Any) -> Any:
    """The only value of the only row."""
    ((value,),) = run(conn, query, *params)
    return value


def at(conn: Conn, time: str) -> None:
    """The session's clock, such as 12:00:30."""
    run(conn, "select set_config('fairq.now', %s, false)", f"2030-01-01 {time}+00")


def create(conn: Conn, group: str = "bob", **options: Any) -> int:
    names = "".join(f", p_{name} => %s" for name in options if name != "payload")
    values = [value for name, value in options.items() if name != "payload"]
    return int(
        one(conn, f"select fairq.create_task(%s, %s{names})", group, options.get("payload", "{}"), *values)
    )


def create_many(conn: Conn, group: str, count: int, **options: Any) -> list[int]:
    names = "".join(f", p_{name} => %s" for name in options)
    arrays = "array_fill(%s::text, array[%s]), array_fill('{}'::jsonb, array[%s])"
    query = f"select fairq.create_tasks({arrays}{names})"
    return [row[0] for row in run(conn, query, group, count, count, *options.values())]


def register(conn: Conn, slots: int = 4, lease: str = "1 minute", queue: str = "default") -> int:
    return int(one(conn, "select fairq.register_worker('w', array[%s::text], %s, %s)", queue, slots, lease))


def promote(conn: Conn, limit: int | None = None) -> int:
    return int(one(conn, "select fairq.promote_overflow('default', %s)", limit))


def pop(conn: Conn, worker: int, limit: int = 1, lease: str | None = None) -> list[int]:
    return [
        row[0]
        for row in run(conn, "select id from fairq.pop_tasks('default', %s, %s, %s)", limit, worker, lease)
    ]


def finish(
    conn: Conn, worker: int, ids: Sequence[int], attempt: int = 1, outcome: str = "succeeded", **options: Any
) -> list[int]:
    names = "".join(f", p_{name} => %s" for name in options)
    query = (
        "select fairq.finish_tasks(%s, %s, array_fill(%s::int, array[%s]), array_fill(%s::text, array[%s])"
        + names
        + ")"
    )
    count = len(ids)
    return sorted(
        row[0]
        for row in run(conn, query, worker, list(ids), attempt, count, outcome, count, *options.values())
    )


def release(conn: Conn, worker: int, ids: Sequence[int], attempt: int = 1) -> list[int]:
    query = "select fairq.release_tasks(%s, %s, array_fill(%s::int, array[%s]))"
    return sorted(row[0] for row in run(conn, query, worker, list(ids), attempt, len(ids)))


def start(conn: Conn, worker: int, ids: Sequence[int], attempt: int = 1) -> list[int]:
    query = "select fairq.start_tasks(%s, %s, array_fill(%s::int, array[%s]))"
    return sorted(row[0] for row in run(conn, query, worker, list(ids), attempt, len(ids)))


def maintain(conn: Conn, limit: int = 10000) -> dict[str, int]:
    return dict(one(conn, "select fairq.maintain(%s)", limit))


def state(conn: Conn, id_: int) -> str | None:
    """The state of a live task, the outcome of an ended one; None for neither."""
    rows = run(
        conn,
        "select state from fairq.live_tasks where id = %s"
        " union all select outcome from fairq.finished_tasks where id = %s",
        id_,
        id_,
    )
    assert len(rows) <= 1, "a task is live and ended at once"
    return rows[0][0] if rows else None


def field(conn: Conn, id_: int, column: str) -> Any:
    """Of a live task: its body, and what it is doing."""
    query = "select l.*, b.headers, b.payload from fairq.live_tasks l join fairq.tasks b using (shard_no, id)"
    return one(conn, f"select {column} from ({query}) t where id = %s", id_)  # noqa: S608


def contents(conn: Conn) -> list[Row]:
    """Everything the engine stores: equal before and after means that nothing changed."""
    tables = run(
        conn,
        "select c.oid::regclass::text from pg_class c"
        " where c.relnamespace = 'fairq'::regnamespace and c.relkind = 'r' order by 1",
    )
    return [(name, *run(conn, f"select t::text from {name} t order by 1")) for (name,) in tables]  # noqa: S608


def needs_one_order(conn: Conn) -> None:
    """Skips a test about the order of several groups where each shard has an order of its own."""
    if one(conn, "select shard_count from fairq.settings") > 1:
        pytest.skip("these groups are in several shards")


@contextmanager
def refused(conn: Conn, code: str) -> Iterator[None]:
    """The call raises this code, with a hint, and changes nothing."""
    before = contents(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        yield
    assert caught.value.sqlstate == code, caught.value
    if code.startswith("QF"):
        assert caught.value.diag.message_primary
        assert "<NULL>" not in caught.value.diag.message_primary, "what people read of a missing value"
        assert caught.value.diag.message_hint
    assert contents(conn) == before
