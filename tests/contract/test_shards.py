"""A call touches the shards it names and no other, and so does each statement of it.

The engine's own text is loaded with one change: each table of it is partitioned by shard_no. Then pg_locks
says which partitions a call opened. Generic plans would lock every partition before they choose one, so a
layout like this asks for custom ones.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from fairq import install
from tests.contract.test_catalogue import public_names
from tests.support.calls import column, one, register, run
from tests.support.database import Database
from tests.support.moves import set_shards
from tests.support.stops import plpgsql_functions, with_stops

Conn = psycopg.Connection[Any]

SHARDS = 2


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
    text = re.sub(r"\) with \(toast_tuple_target = \d+\);", ");", text)
    text = re.sub(r"create table fairq\.(\w+) \(\n  shard_no(.*?)\n\);\n", rewrite, text, flags=re.DOTALL)
    text = re.sub(r"\b(finished_tasks|attempts)_default\b", r"\1", text)
    # Which leads past indexes within a day.
    text = text.replace("shard_no + 0 =", "shard_no =")
    return text.replace("force_generic_plan", "force_custom_plan")


@pytest.fixture
def conn(empty_database: Database) -> Conn:
    conn = empty_database.connect(autocommit=True)
    conn.execute("set check_function_bodies = off")
    for file in install.sql_files():
        if file.name != "grants.sql":
            conn.execute(partitioned(file.read_text("utf-8")).encode())
    conn.execute("reset check_function_bodies")
    conn.execute("set plan_cache_mode = force_custom_plan")
    set_shards(conn, SHARDS)
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
    """Run it in a transaction, and return the shards whose partitions it locked in any way."""
    with conn.transaction():
        if one(conn, "select to_regproc('stops.pass') is not null"):
            conn.execute("select stops.pass('begin')")
        conn.execute(query, params)
        rows = conn.execute(
            r"""
            select distinct substring(c.relname from '_s(\d)')::int
            from pg_locks l join pg_class c on c.oid = l.relation
            where l.pid = pg_backend_pid() and c.relnamespace = 'fairq'::regnamespace and c.relname ~ '_s\d'
            """
        ).fetchall()
    return {row[0] for row in rows}


# A stop after each statement says which shards it opened for the first time in its transaction, and which it
# scanned or wrote: where that is more than one, no single shard could have answered it.
LOOK = r"""
create schema stops;
create table stops.parts as
  select c.oid, c.relkind = 'r' as is_table, substring(c.relname from '_s(\d)')::integer as shard
  from pg_class c
  where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'i') and c.relname ~ '_s\d';
create function stops.pass(p_point text) returns boolean
language plpgsql set search_path = pg_catalog set plan_cache_mode = force_generic_plan as $$
declare
  v_before jsonb := coalesce(nullif(current_setting('stops.seen', true), ''), '{}')::jsonb;
  v_now jsonb := coalesce((
    select jsonb_object_agg(u.what, u.times)
    from (
      select p.shard || ' used' as what,
        sum(pg_stat_get_xact_numscans(p.oid)
          + case when p.is_table then pg_stat_get_xact_tuples_inserted(p.oid) else 0 end) as times
      from stops.parts p
      group by p.shard
      union all
      select distinct p.shard || ' locked', 1
      from pg_locks l
      join stops.parts p on p.oid = l.relation
      where l.pid = pg_backend_pid()
    ) u
    where u.times > 0
  ), '{}');
  v_shards text[] := array(
    select distinct left(n.key, 1)
    from jsonb_each(v_now) n
    where n.value is distinct from v_before -> n.key
    order by 1
  );
begin
  if cardinality(v_shards) > 1 and p_point <> 'begin' then
    raise notice 'at once % at %', v_shards, p_point;
  end if;
  perform set_config('stops.seen', v_now::text, true);
  return false;
end;
$$;
"""


@contextmanager
def watched(conn: Conn) -> Iterator[list[str]]:
    """Statements that touch several shards at once."""
    notices: list[str] = []
    conn.add_notice_handler(lambda diagnostic: notices.append(diagnostic.message_primary or ""))
    conn.execute(LOOK)
    for name, definition, body in plpgsql_functions(conn):
        if not re.search(r"\b(from|join|into|update) fairq\.", body):
            continue
        conn.execute(definition.replace(body, with_stops(name, body)).encode())
    yield notices


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


def test_a_call_without_a_shard_goes_through_all_of_them(conn: Conn) -> None:
    """One database, several shards: callers that do not name shards reach everything."""
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


# --- Every function ---------------------------------------------------------------------------------

# Calls that cannot know which shard is meant, or mean all of them. On several machines each goes to all; a
# worker's own calls can be told the shard.
ALL_SHARDS = {
    # A task by its id: the shard is not in it.
    "cancel_task",
    "explain_task",
    "retry_task",
    "task_history",
    "task_progress",
    "task_result",
    "watch_task",
    # Settings of queues and keys hold in every shard.
    "configure_cluster",
    "configure_key",
    "configure_queue",
    "hold_key",
    "rebuild",
    # From shard to shard: it is the one that has to.
    "move_groups",
    # A worker works in all of them, and so does upkeep.
    "fire_schedules",
    "heartbeat",
    "maintain",
    "next_due_at",
    "register_worker",
    "retire_worker",
    "standings",
    "turn",
    "unplanned_schedules",
    # Sums.
    "fairness",
    "metrics",
    "shares",
    # Without a group: the schedules of that name.
    "pause_schedule",
    "remove_schedule",
    "resume_schedule",
    "run_schedule",
}

# Those of them with a statement that asks several shards at once. Every other goes through them one by one.
AT_ONCE = {
    # One look by id into all shards: one snapshot must see a task that is moving.
    "cancel_task",
    "explain_task",
    "task_history",
    "task_progress",
    "task_result",
    "watch_task",
    # Who is hindmost, and who is next: compared over all shards.
    "next_due_at",
    "standings",
    "turn",
    "register_worker",
    # The meters of a queue and of the cluster are in shard 0, and count what is held in all.
    "configure_cluster",
    "move_groups",
    "configure_queue",
    "rebuild",
    # Sums.
    "fairness",
    "metrics",
    "shares",
    # Without a group: the schedules of that name.
    "pause_schedule",
    "remove_schedule",
    "resume_schedule",
    "run_schedule",
}

# They read and write settings, which are the same everywhere.
NO_SHARD = {"configure_kind", "drain_queue", "pause_queue", "resume_queue", "upkeep_parts"}


def test_each_function_opens_the_shard_of_its_group_or_goes_through_all_one_by_one(conn: Conn) -> None:
    """Each public function is called, for one shard where it may be."""
    if conn.info.server_version < 180000:
        pytest.skip(
            "SQL functions are planned without their arguments here, and lock the parts they do not open"
        )
    shard = 1
    group = key_of(conn, shard)
    worker = register(conn)
    opened: dict[str, set[int]] = {}
    at_once: dict[str, list[str]] = {}

    def call(function: str, arguments: str, *params: Any) -> None:
        notices.clear()
        shards = touched(conn, f"select f.* from fairq.{function}({arguments}) f", *params)  # noqa: S608
        opened[function] = opened.get(function, set()) | shards
        if notices:
            at_once[function] = list(notices)

    def held(but: int = 0) -> list[Any]:
        """The worker, and what it has, but for so many."""
        rows = run(conn, "select id, attempt from fairq.held where shard_no = %s order by id", shard)[but:]
        return [worker, [row[0] for row in rows], [row[1] for row in rows]]

    with watched(conn) as notices:
        for options in (
            "",
            ", p_idempotency_key => 'once'",
            ", p_concurrency_key => 'key', p_user_key => 'user'",
            ", p_concurrency_key => 'key', p_user_key => 'user'",
            ", p_run_at => clock_timestamp() + interval '1 hour'",
            ", p_expires_at => clock_timestamp() + interval '0.1 seconds'",
        ):
            call("create_task", "%s, '{}'" + options, group)
        call("create_tasks", "array_fill(%s::text, array[20]), array_fill('{}'::jsonb, array[20])", group)
        for settings in ('{"max_running": 15, "rate_limit": 1000}', '{"user_max_running": 5}'):
            call("configure_group", "'default', %s, %s", group, settings)
        call("configure_user", "'default', %s, 'user', %s", group, '{"max_running": 4}')
        call("configure_schedule", "'tick', %s, %s", group, '{"every": "1 second", "payload": 1}')
        call("hold_group", "'default', %s, clock_timestamp() + interval '1 hour'", group)
        call("hold_group", "'default', %s, null", group)
        for outcome in ("retry", "failed"):
            call("promote_overflow", "'default', p_shard_no => %s", shard)
            call("pop_tasks", "'default', 3, %s, p_shard_no => %s, p_claim_lease => '1 hour'", worker, shard)
            call("start_tasks", "%s, %s::bigint[], %s::integer[], %s", *held(), shard)
            call("pop_tasks", "'default', 3, %s, p_shard_no => %s", worker, shard)
            assert len(held()[1]) == 6
            for part in column(conn, "select fairq.upkeep_parts()"):
                call("_upkeep", "%s, %s, 1000", shard, part)
            arrays = "%s, %s::bigint[], %s::integer[]"
            call("report_progress", arrays + ", array[1, 1, 1, 1, 1, 1], p_shard_no => %s", *held(), shard)
            call("held_tasks", arrays + ", %s", *held(), shard)
            call(
                "finish_tasks",
                arrays + ", array_fill(%s::text, array[4]), p_shard_no => %s",
                *held(2),
                outcome,
                shard,
            )
            released = ["released"] * len(held()[1])
            call("finish_tasks", arrays + ", %s, p_shard_no => %s", *held(), released, shard)
            assert held()[1] == []
        for function in ("pause_group", "resume_group", "reset_rate", "rate_usage", "budget_usage"):
            call(function, "'default', %s", group)
        call("plan_schedule", "'tick', %s, clock_timestamp(), '{}'", group)
        assert {name: shards for name, shards in opened.items() if shards - {shard}} == {}
        assert at_once == {}
        outcomes = set(column(conn, "select outcome from fairq.finished_tasks"))
        assert outcomes | set(column(conn, "select outcome from fairq.attempts")) == {
            "failed",
            "expired",
            "retry",
            "released",
        }

        failed = one(conn, "select min(id) from fairq.finished_tasks where outcome = 'failed'")
        for function in (
            "cancel_task",
            "explain_task",
            "watch_task",
            "task_history",
            "task_progress",
            "task_result",
            "retry_task",
        ):
            call(
                function,
                "%s",
                failed if function == "retry_task" else one(conn, "select min(id) from fairq.tasks"),
            )
        for function in ("pause_schedule", "resume_schedule", "run_schedule", "remove_schedule"):
            call(function, "'tick', %s", group)
        # Heard before the purge: a wish whose task has gone is looked for everywhere.
        call("promote_overflow", "'default', p_shard_no => %s", shard)
        call("purge_group", "'default', %s", group)
        call("register_worker", "'another', array['default'], 8")
        call("heartbeat", "%s", worker)
        call("turn", "%s, array['default'], array[3], 3", worker)
        call("turn", "%s, '{}', '{}', 0, p_ended_ids => %s, p_ended_attempts => %s", *held())
        call("retire_worker", "%s", worker)
        for function in ("fire_schedules", "unplanned_schedules", "maintain", "metrics", "upkeep_parts"):
            call(function, "")
        for function in ("pause_queue", "resume_queue", "drain_queue", "next_due_at", "rebuild"):
            call(function, "'default'")
        call("standings", "array['default']")
        for function in ("shares", "fairness"):
            call(function, "'default', interval '1 hour'")
        call("hold_key", "'key', clock_timestamp() + interval '1 hour'")
        call("configure_key", "'key', %s", '{"max_running": 2}')
        call("configure_kind", "'default', 'parse', %s", '{"max_attempts": 2}')
        call("configure_queue", "'default', %s", '{"max_running": 2}')
        call("configure_cluster", "%s", '{"max_running": 20}')
        call("configure_cluster", "%s", '{"shard_count": 1}')
        call("move_groups", "")
    assert opened.keys() - {"_upkeep"} == set(public_names())
    assert {name for name, shards in opened.items() if shards - {shard}} == ALL_SHARDS
    assert {name: said for name, said in at_once.items() if name not in AT_ONCE} == {}
    assert at_once.keys() == AT_ONCE
    assert {name for name, shards in opened.items() if not shards} == NO_SHARD
