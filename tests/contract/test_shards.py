"""A call touches the shards it names and no other (DESIGN 12).

The engine's own text is loaded with one change: each table of it is partitioned by shard_no. Then pg_locks
says which partitions a call opened. Generic plans would lock every partition before they choose one, so a
layout like this asks for custom ones.
"""

import re
from typing import Any

import psycopg
import pytest

from fairq import install
from tests.support.calls import register
from tests.support.database import Database

Conn = psycopg.Connection[Any]

SHARDS = 4


def partitioned(text: str) -> str:
    """The same tables, each with a partition per shard."""

    def rewrite(match: re.Match[str]) -> str:
        name = match[1]
        parts = "".join(
            f"create table fairq.{name}_s{shard} partition of fairq.{name} for values in ({shard});\n"
            for shard in range(SHARDS)
        )
        return f"create table fairq.{name} (\n  shard_no{match[2]}\n) partition by list (shard_no);\n{parts}"

    # The history is partitioned by day already; here by shard instead.
    text = re.sub(r"\) partition by range \(\w+\);", ");", text)
    text = re.sub(r"(?m)^create table fairq\.\w+_default partition of [^;]*;\n", "", text)
    text = re.sub(r"(?m)^alter table fairq\.\w+_default [^;]*;\n", "", text)
    text = re.sub(r"(?m)^comment on table fairq\.\w+_default [^;]*;\n", "", text)
    text = re.sub(r"(?m)^create index \w+ on fairq\.\w+_default [^;]*;\n", "", text)
    text = text.replace("select fairq._rotate_partitions();\n", "")
    text = re.sub(r"create table fairq\.(\w+) \(\n  shard_no(.*?)\n\);\n", rewrite, text, flags=re.DOTALL)
    return text.replace("force_generic_plan", "force_custom_plan")


@pytest.fixture
def conn(empty_database: Database) -> Conn:
    conn = empty_database.connect(autocommit=True)
    conn.execute("set check_function_bodies = off")
    for file in install.sql_files():
        if file.name != "grants.sql":
            conn.execute(partitioned(file.read_text("utf-8")).encode())
    conn.execute("reset check_function_bodies")
    conn.execute("select fairq.configure_cluster(jsonb_build_object('shard_count', %s::int))", [SHARDS])
    conn.execute("""select fairq.configure_queue('default', '{"notify": false}')""")
    return conn


def key_of(conn: Conn, shard: int) -> str:
    """A group of that shard."""
    row = conn.execute(
        "select 'g' || n from generate_series(1, 1000) n where fairq._shard_of('g' || n, %s) = %s limit 1",
        [SHARDS, shard],
    ).fetchone()
    assert row is not None
    return str(row[0])


def touched(conn: Conn, query: str, *params: Any) -> set[int]:
    """Run it in a transaction; the shards whose partitions it locked in any way."""
    with conn.transaction():
        conn.execute(query, params)
        rows = conn.execute(
            r"""
            select distinct substring(c.relname from '_s(\d)')::int
            from pg_locks l join pg_class c on c.oid = l.relation
            where l.pid = pg_backend_pid() and c.relnamespace = 'fairq'::regnamespace and c.relname ~ '_s\d'
            """
        ).fetchall()
    return {row[0] for row in rows}


POP = "select t.id, t.attempt from fairq.pop_tasks('default', 10, %s, p_shard_no => %s) t"


def test_the_layout_is_what_this_test_says_it_is(conn: Conn) -> None:
    rows = conn.execute(
        """
        select c.relname, (select count(*) from pg_inherits i where i.inhparent = c.oid)
        from pg_class c
        where c.relnamespace = 'fairq'::regnamespace and c.relkind = 'p'
        """
    ).fetchall()
    assert {"tasks", "lanes", "rings", "ticks", "domains", "heartbeats", "finished_tasks"} <= dict(
        rows
    ).keys()
    assert {row[1] for row in rows} == {SHARDS}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_each_call_opens_only_its_own_partitions(conn: Conn, shard: int) -> None:
    """DESIGN 12: create, promote, pop, finish and retry, release, due tasks, all on one shard."""
    worker = register(conn)
    group = key_of(conn, shard)
    own = {shard}
    for _ in range(3):  # the first round rebuilds, the later ones have ticks, lanes and rings behind them
        assert touched(conn, "select fairq.create_task(%s, '{}')", group) == own
        assert (
            touched(
                conn,
                "select fairq.create_tasks(array_fill(%s::text, array[9]),"
                " array_fill('{}'::jsonb, array[9]))",
                group,
            )
            == own
        )
        assert touched(conn, "select fairq.promote_overflow('default', p_shard_no => %s)", shard) == own
        assert touched(conn, POP, worker, shard) == own
        held = conn.execute(
            "select id, attempt from fairq.live_tasks where state = 'running' order by id"
        ).fetchall()
        assert len(held) == 10
        for part, query in (
            (held[:3], "select fairq.finish_tasks(%s, %s::bigint[], %s::int[], p_shard_no => %s)"),
            (held[3:6], "select fairq.release_tasks(%s, %s::bigint[], %s::int[], p_shard_no => %s)"),
            (
                held[6:],
                "select fairq.finish_tasks(%s, %s::bigint[], %s::int[], array_fill('retry'::text, array[4]),"
                " p_retry_delays => array_fill(interval '0', array[4]), p_shard_no => %s)",
            ),
        ):
            ids, attempts = [row[0] for row in part], [row[1] for row in part]
            assert touched(conn, query, worker, ids, attempts, shard) == own
        assert touched(conn, POP, worker, shard) == own
        held = conn.execute(
            "select id, attempt from fairq.live_tasks where state = 'running' order by id"
        ).fetchall()
        assert len(held) == 7
        ids, attempts = [row[0] for row in held], [row[1] for row in held]
        query = "select fairq.finish_tasks(%s, %s::bigint[], %s::int[], p_shard_no => %s)"
        assert touched(conn, query, worker, ids, attempts, shard) == own
    assert conn.execute("select count(*) from fairq.tasks").fetchone() == (0,)
    assert conn.execute("select count(*) from fairq.finished_tasks").fetchone() == (30,)


def test_prefetched_tasks_stay_in_their_shard(conn: Conn) -> None:
    worker = register(conn)
    shard = 2
    conn.execute("select fairq.create_task(%s, '{}')", [key_of(conn, shard)])
    query = "select fairq.pop_tasks('default', 10, %s, interval '1 minute', p_shard_no => %s)"
    assert touched(conn, query, worker, shard) == {shard}
    ids, attempts = zip(*conn.execute("select id, attempt from fairq.live_tasks").fetchall(), strict=True)
    query = "select fairq.start_tasks(%s, %s::bigint[], %s::int[], p_shard_no => %s)"
    assert touched(conn, query, worker, list(ids), list(attempts), shard) == {shard}
    assert conn.execute("select state from fairq.live_tasks").fetchone() == ("running",)


def test_a_call_without_a_shard_goes_through_all_of_them(conn: Conn) -> None:
    """One database, several shards: nothing is out of reach for those who do not care."""
    worker = register(conn)
    created = []
    for shard in range(SHARDS):
        row = conn.execute("select fairq.create_task(%s, '{}')", [key_of(conn, shard)]).fetchone()
        assert row is not None
        created.append(row[0])
    held = conn.execute(
        "select t.id, t.attempt from fairq.pop_tasks('default', 10, %s) t", [worker]
    ).fetchall()
    assert sorted(row[0] for row in held) == created
    ended = conn.execute(
        "select fairq.finish_tasks(%s, %s::bigint[], %s::int[])",
        [worker, [row[0] for row in held], [row[1] for row in held]],
    ).fetchall()
    assert sorted(row[0] for row in ended) == created


def test_a_tick_written_in_a_savepoint_is_trusted_in_a_partition_too(conn: Conn) -> None:
    """The engine reads xmin of the row it inserted; a partitioned table must not stand in the way."""
    shard = 1
    with conn.transaction():
        conn.execute("savepoint s")
        conn.execute("select fairq.create_task(%s, '{}')", [key_of(conn, shard)])
        conn.execute("select fairq.promote_overflow('default', p_shard_no => %s)", [shard])
        conn.execute("release s")
    assert conn.execute("select count(*) from fairq._tick(%s, 'default')", [shard]).fetchone() == (1,)
