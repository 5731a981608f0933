"""Plan contracts: which way the engine's statements reach their rows, and how many they visit.

A queue's statistics are always wrong: it is empty when they are taken and full a minute later, or the other
way round. So each call is looked at under each of these, with 10 groups and with 100,000:

- never: tables that nobody ever analyzed (a new installation);
- fresh: analyzed as they are;
- empty: vacuumed and analyzed while empty, filled since;
- full: analyzed while full, nearly emptied since;
- cached: as empty, and the session made its plans while the tables had no pages at all. It keeps them.

And in each plan cache mode: the functions ask for generic plans; a layout by partitions asks for custom ones.

What must hold: no sequential scan of a table that grows, the intended indexes, and a number of rows bounded
by what was asked for.
`FAIRQ_TEST_ROWS=1000000` (`make test-long`) runs the same with a million tasks.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.contract.loads import LONG, ROWS, analyze, fill
from tests.support.calls import RELEASE, Held, finish, held_by, pop, register
from tests.support.database import Database
from tests.support.plans import (
    Recording,
    index_names,
    recorded_plans,
    relation_names,
    require_auto_explain,
    rows_visited,
    shared_buffers,
)
from tests.support.server import TestServer, create_database, drop_database
from tests.support.shards import shard_count

STATISTICS = ("never", "fresh", "empty", "full", "cached")
MODES = ("force_generic_plan", "force_custom_plan", *(["auto"] if LONG else []))
GROUPS = (10, 100_000)

GROWING = {
    "tasks",
    "ready",
    "held",
    "parked",
    "lanes",
    "rings",
    "ticks",
    "heartbeats",
    "cancellations",
    "watches",
    "workers",
    "groups",
    "progress",
    "idempotency_keys",
    "sweeps",
}
CATALOGUE = (
    2000  # pages of the system's own tables that a session reads before its first plan of each statement
)
TARGET = 1000  # ready target: the budget of a promotion
BATCH = 100

Conn = psycopg.Connection[Any]

_numbers = itertools.count(1)


@contextlib.contextmanager
def clone(server: TestServer, source: str) -> Iterator[str]:
    name = f"fairq_plans_{server.run_id}_{os.getpid()}_{next(_numbers)}"
    create_database(server, name, source)
    try:
        yield name
    finally:
        drop_database(server, name)


def use_mode(conn: Conn, mode: str) -> None:
    """All functions plan in this mode, even those that set another."""
    signatures = conn.execute(
        """
        select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace = 'fairq'::regnamespace
          and 'plan_cache_mode=force_generic_plan' = any(p.proconfig)
        """
    ).fetchall()
    for (signature,) in signatures:
        statement = sql.SQL("alter function {} set plan_cache_mode = {}")
        conn.execute(statement.format(sql.SQL(signature), sql.Literal(mode)))
    conn.execute("select set_config('plan_cache_mode', %s, false)", [mode])


def no_autovacuum(conn: Conn) -> None:
    """Statistics stay as the test left them."""
    conn.execute(
        """
        do $$
        declare r regclass;
        begin
          for r in
            select c.oid from pg_class c where c.relnamespace = 'fairq'::regnamespace and c.relkind = 'r'
          loop
            execute format('alter table %s set (autovacuum_enabled = off)', r);
          end loop;
        end $$;
        """
    )


@pytest.fixture(scope="session")
def auto_explain(server: TestServer, template: str) -> None:
    """Before anything is filled."""
    with clone(server, template) as name, psycopg.connect(server.dsn(name)) as conn:
        require_auto_explain(conn)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda groups: f"{groups} groups")
def filled(request: pytest.FixtureRequest, server: TestServer, template: str) -> Iterator[tuple[str, int]]:
    """A database with all tasks waiting, no ring heard, nothing analyzed; and the number of groups."""
    with clone(server, template) as name:
        with psycopg.connect(server.dsn(name), autocommit=True) as conn:
            no_autovacuum(conn)
            conn.execute(
                "select fairq.configure_queue('default', jsonb_build_object('ready_target', %s::int))",
                [TARGET],
            )
            conn.execute("select fairq.promote_overflow()")
            fill(conn, ROWS, request.param)
        yield name, request.param


def one_turn(conn: Conn) -> None:
    """Each hot function once, on a queue that is empty before and after."""
    conn.execute("select fairq.create_task('warm', '{}')")
    conn.execute("select fairq.promote_overflow()")
    worker = register(conn)
    held = pop(conn, worker, 10)
    finish(conn, worker, held, "retry")
    conn.execute("select set_config('fairq.now', (clock_timestamp() + interval '1 hour')::text, false)")
    conn.execute("select fairq.maintain()")
    worker = register(conn)
    finish(conn, worker, pop(conn, worker, 10))
    conn.execute("reset fairq.now")
    conn.execute("select fairq.heartbeat(%s)", [worker])
    conn.execute("select fairq.retire_worker(%s)", [worker])


@contextlib.contextmanager
def prepared(
    server: TestServer, template: str, filled: tuple[str, int], statistics: str, mode: str
) -> Iterator[Conn]:
    """A session on a database with that kind of statistics."""
    source, groups = filled
    with (
        clone(server, template if statistics in ("empty", "cached") else source) as name,
        psycopg.connect(server.dsn(name), autocommit=True) as conn,
    ):
        with psycopg.connect(server.dsn(name), autocommit=True) as other:
            if statistics == "fresh":
                other.execute("select fairq.promote_overflow()")
                analyze(other)
            elif statistics == "full":
                other.execute("select fairq.promote_overflow('default', 50000)")
                analyze(other)
                other.execute("truncate fairq.tasks, fairq.ready, fairq.rings, fairq.lanes, fairq.ticks")
                other.execute("select fairq.promote_overflow()")
                fill(other, 5000, groups)
            elif statistics in ("empty", "cached"):
                no_autovacuum(other)
                other.execute(
                    "select fairq.configure_queue('default', jsonb_build_object('ready_target', %s::int))",
                    [TARGET],
                )
                other.execute("select fairq.promote_overflow()")
                analyze(other)
            if statistics != "cached":
                if statistics == "empty":
                    fill(other, ROWS, groups)
                use_mode(other, mode)
            else:
                use_mode(other, mode)
                for _ in range(8):  # a plan is generic from the sixth execution on, in mode auto
                    one_turn(conn)
                fill(other, ROWS, groups)
        conn.execute("select set_config('plan_cache_mode', %s, false)", [mode])
        conn.execute("select fairq.promote_overflow()")
        yield conn


@dataclass(frozen=True)
class Step:
    """A call, the indexes its statements go through, and the most rows one statement visits of one table."""

    name: str
    call: Callable[["Session"], None]
    indexes: frozenset[str]
    most: int
    buffers: int


class Session:
    """The state between steps: the worker and its tasks."""

    def __init__(self, conn: Conn) -> None:
        self.conn = conn
        self.worker = register(conn)
        self.held: list[Held] = []

    def run(self, query: str, *params: Any) -> None:
        self.conn.execute(query, params)

    def pop(self) -> None:
        self.held = pop(self.conn, self.worker, BATCH)
        assert len(self.held) == BATCH

    def finish(self, outcome: str) -> None:
        assert len(finish(self.conn, self.worker, self.held, outcome)) == BATCH

    def travel(self, ahead: str) -> None:
        self.run("select set_config('fairq.now', (clock_timestamp() + %s::interval)::text, false)", ahead)

    def promote_later(self) -> None:
        self.travel("1 minute")
        self.run("select fairq.promote_overflow()")
        self.run("reset fairq.now")

    def lose(self) -> None:
        """The worker falls silent, and the upkeep notices."""
        self.travel("2 hours")
        self.run("select fairq.maintain()")
        self.run("reset fairq.now")
        self.worker = register(self.conn)


TICK = {"ticks_pkey"}
NEWS = {*TICK, "rings_xid_idx"}
PROMOTE = {*NEWS, "ready_order_idx", "tasks_line_idx", "lanes_order_idx", "lanes_pkey", "groups_pkey"}
PROMOTE |= {"lanes_look_at_idx", "parked_turn_idx", "parked_line_idx", "parked_granted_idx"}
PROMOTE |= {"rings_notable_idx"}  # settings that it has not heard of
PROMOTE |= {"tasks_due_idx"}  # a back-off may be over by then
ALIVE = {"workers_pkey", "heartbeats_pkey"}
BEAT = {*ALIVE, "cancellations_task_idx", "held_pkey"}
FINISH = {"held_pkey", "tasks_pkey", "watches_until_idx", "watches_task_idx"}
# One id or name at a time, in any call.
LOOK_UPS = {
    "tasks_pkey",
    "ready_pkey",
    "held_pkey",
    "parked_pkey",
    "cancellations_task_idx",
    "groups_pkey",
    "workers_pkey",
}
# Who waits for a result: entries that are not over yet, whatever ended.
LOOK_UPS |= {"watches_until_idx", "watches_task_idx"}
# A promotion hears five thousand rings at most, and looks at its budget of lanes and tasks, and one more.
PROMOTED = 5000 + 2 * (TARGET + 2 * BATCH) + 10

# Whether a ring that nobody heard yet has been announced by NOTIFY.
ANNOUNCED = {*TICK, "rings_notable_idx"}

STEPS = [
    Step("create_task", lambda s: s.run("select fairq.create_task('x', '{}')"), frozenset(ANNOUNCED), 3, 60),
    Step(
        "create_tasks",
        lambda s: s.run(
            "select fairq.create_tasks(array_fill('y'::text, array[100]),"
            " array_fill('{}'::jsonb, array[100]))"
        ),
        frozenset(ANNOUNCED),
        3,
        1500,
    ),
    Step(
        "promote_overflow",
        lambda s: s.run("select fairq.promote_overflow()"),
        frozenset(PROMOTE | ALIVE),
        PROMOTED,
        150_000,
    ),
    Step("pop_tasks", Session.pop, frozenset(PROMOTE | ALIVE), PROMOTED, 150_000),
    Step("heartbeat", lambda s: s.run("select fairq.heartbeat(%s)", s.worker), frozenset(BEAT), 5, 60),
    Step(
        "finish_tasks",
        lambda s: s.finish("succeeded"),
        frozenset(FINISH),
        BATCH + 5,
        6000,
    ),
    Step("pop_tasks again", Session.pop, frozenset(PROMOTE | ALIVE), PROMOTED, 150_000),
    Step(
        "finish_tasks: retry",
        lambda s: s.finish("retry"),
        frozenset(FINISH),
        BATCH + 5,
        6000,
    ),
    Step(
        "retry_task, before its back-off is over",
        lambda s: s.run("select fairq.retry_task(%s)", s.held[0]),
        frozenset({"tasks_pkey"}),
        3,
        60,
    ),
    Step(
        "due tasks",
        Session.promote_later,
        frozenset({*PROMOTE, *ALIVE, "tasks_due_idx"}),
        PROMOTED,
        150_000,
    ),
    Step("pop_tasks a third time", Session.pop, frozenset(PROMOTE | ALIVE), PROMOTED, 150_000),
    Step(
        "cancel_task",
        lambda s: s.run("select fairq.cancel_task(%s)", s.held[0]),
        frozenset({"tasks_pkey"}),
        3,
        60,
    ),
    Step(
        "heartbeat with a wish to cancel",
        lambda s: s.run("select fairq.heartbeat(%s)", s.worker),
        frozenset(BEAT),
        5,
        60,
    ),
    Step(
        "finish_tasks, released",
        lambda s: s.run(RELEASE, *held_by(s.worker, s.held)),
        frozenset({"tasks_pkey"}),
        2 * BATCH + 5,  # locked, then changed
        6000,
    ),
    Step("pop_tasks and a wish to cancel", Session.pop, frozenset(PROMOTE | BEAT), PROMOTED, 150_000),
    Step(
        "recovery, expiry, sweeps",
        Session.lose,
        frozenset(
            {
                *PROMOTE,
                *ALIVE,
                "tasks_expiry_idx",
                "held_claim_lease_idx",
                "lanes_keyed_idx",
                "lanes_users_idx",
                "tasks_due_idx",
                "tasks_pkey",
                "sweeps_pkey",
                "cancellations_task_idx",
                "watches_until_idx",
                "watches_task_idx",
                "idempotency_keys_pkey",
                "idempotency_keys_age_idx",
                "progress_pkey",
            }
        ),
        10_010,  # maintain's own limit
        200_000,
    ),
    Step("pop_tasks after a loss", Session.pop, frozenset(PROMOTE | ALIVE), PROMOTED, 150_000),
    Step(
        "retire_worker",
        lambda s: s.run("select fairq.retire_worker(%s)", s.worker),
        frozenset({"held_pkey", *ALIVE}),
        # No index leads from a worker to its tasks: every entry since the last vacuum, of all popped above.
        6 * BATCH,
        6000,
    ),
]


def assert_popped(recording: Recording) -> None:
    """At most 110 rows of the ready index for a batch of 100; each body is looked up by its id afterwards."""
    for pick in recording.of("for update skip locked"):
        if "from fairq.ready" in pick.query and "order by r.block, r.position" in pick.query:
            assert index_names(pick.plan) == {"ready_order_idx"}
            assert rows_visited(pick.plan, "ready") <= 110
    for hold in recording.of("insert into fairq.held"):
        assert index_names(hold.plan) <= {"tasks_pkey", "ready_pkey"}
        assert rows_visited(hold.plan, "tasks") <= 110


def assert_contract(step: Step, recording: Recording) -> None:
    used: dict[str, str] = {}
    for statement in recording.statements:
        text = " ".join(statement.query.split())[:160]
        scanned = relation_names(statement.plan, "Seq Scan") & GROWING
        assert not scanned, f"{step.name}: sequential scan of {scanned}: {text}"
        for table in GROWING:
            visited = rows_visited(statement.plan, table)
            assert visited <= step.most, f"{step.name}: {visited} rows of {table}: {text}"
        for name in index_names(statement.plan):
            used[name] = text
    foreign = {
        name: text
        for name, text in used.items()
        if name not in step.indexes | LOOK_UPS
        and name.split("_")[0] in {table.split("_")[0] for table in GROWING}
    }
    assert not foreign, f"{step.name}: went through {foreign}"
    buffers = shared_buffers(recording.statements[-1].plan)
    assert buffers <= step.buffers + CATALOGUE, f"{step.name}: {buffers} buffers"


@pytest.mark.usefixtures("auto_explain")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("statistics", STATISTICS)
def test_every_statement_goes_its_way_whatever_the_statistics(
    server: TestServer, template: str, filled: tuple[str, int], statistics: str, mode: str
) -> None:
    """I9, S17, F14, F26: indexes and rows of each statement inside the functions."""
    with prepared(server, template, filled, statistics, mode) as conn:
        session = Session(conn)
        for step in STEPS:
            with recorded_plans(conn) as recording:
                step.call(session)
            assert_contract(step, recording)
            if step.call is Session.pop:
                assert_popped(recording)


COUNTERS = """
select 'sequential scans of ' || relname, seq_scan from pg_stat_user_tables
where schemaname = 'fairq' and relname = any(%(growing)s)
union all
select 'entries of ' || indexrelname, idx_tup_read from pg_stat_user_indexes
where schemaname = 'fairq' and relname = any(%(growing)s)
"""


def counters(conn: Conn) -> dict[str, int]:
    conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select pg_stat_clear_snapshot()")
    return dict(conn.execute(COUNTERS, {"growing": list(GROWING)}).fetchall())


@pytest.mark.parametrize("statistics", STATISTICS)
def test_the_servers_own_counters_say_the_same(
    server: TestServer, template: str, filled: tuple[str, int], statistics: str
) -> None:
    """I9, also on a server without auto_explain: no sequential scan, a bounded number of index entries."""
    with prepared(server, template, filled, statistics, "force_generic_plan") as conn:
        session = Session(conn)
        shards = shard_count(conn)  # a worker is known in each, whatever it does
        for step in STEPS:
            before = counters(conn)
            step.call(session)
            after = counters(conn)
            for what, count in after.items():
                grown = count - before[what]
                allowed = 0 if what.startswith("sequential") else 4 * step.most + 20 * shards
                assert grown <= allowed, f"{step.name}: {grown} {what}"


LIFE = """
select fairq.register_worker('w', array['default'], 8);
insert into fairq.groups (shard_no, queue, group_key, max_running) values (0, 'default', 'capped', 1);
select fairq.create_task('g', '{}', p_idempotency_key => 'k');
select fairq.create_task('g', '{}', p_idempotency_key => 'k');
select fairq.create_task('g', '{}', p_run_at => clock_timestamp() + interval '1 minute');
select fairq.create_task('g', '{}', p_expires_at => clock_timestamp() + interval '1 minute');
select fairq.create_tasks(array_fill('capped'::text, array[3]), array_fill('{}'::jsonb, array[3]));
select fairq.create_task('g', '{}', p_concurrency_key => 'c');
select fairq.create_task('h', '{}', p_concurrency_key => 'c');
select fairq.create_tasks(array['u', 'u'], array['{}', '{}']::jsonb[], p_user_keys => array['jane', 'joe']);
select fairq.promote_overflow();
select fairq.cancel_task((select min(id) from fairq.tasks));
select fairq.watch_task(id) from fairq.tasks;
select fairq.pop_tasks('default', 2, 1, interval '1 minute');
select fairq.start_tasks(1, array(select id from fairq.live_tasks where state = 'claimed'), array[1, 1]);
select fairq.report_progress(1, array(select id from fairq.live_tasks where state = 'running'), array[1, 1],
  array[1, 1]);
select fairq.heartbeat(1);
select fairq.finish_tasks(1, array(select id from fairq.live_tasks where state = 'running'), array[1, 1],
  array['failed', 'retry']);
select fairq.explain_task(f.id) from fairq.finished_tasks f;
select fairq.retry_task((select max(id) from fairq.finished_tasks where outcome <> 'succeeded'));
select fairq.pop_tasks('default', 10, 1);
select fairq.configure_queue('default', '{"short_slots": 7}');
select fairq.create_tasks(array['g', 'g'], array['{}', '{}']::jsonb[], p_cost => 60);
select fairq.pop_tasks('default', 10, 1);
select set_config('fairq.now', (clock_timestamp() + interval '1 hour')::text, false);
select fairq.maintain();
select fairq.maintain();
select fairq.configure_schedule('s', 'g', '{"every": 1}');
select fairq.fire_schedules();
select fairq.explain_task(t.id) from fairq.tasks t;
select fairq.promote_overflow();
select set_config('fairq.now', (clock_timestamp() + interval '62 minutes')::text, false);
select fairq.maintain();
select set_config('fairq.now', (clock_timestamp() + interval '64 minutes')::text, false);
select fairq.maintain();
select fairq.shares(), fairq.fairness();
"""

UNUSED = """
select s.indexrelname from pg_stat_user_indexes s
where s.schemaname = 'fairq' and s.idx_scan = 0 and s.relname !~ '_[0-9]{8}$'
order by 1
"""

# Used by statements that this short life has no need of.
ELSEWHERE = {
    "schema_version_pkey",  # migrations
    "attempts_default_shard_no_task_id_idx",  # the command fairq explain
    "settings_pkey",  # one row
    # The ledger, in partitions of days.
    "attempts_default_shard_no_ended_at_idx",
    "finished_tasks_default_shard_no_finished_at_idx",
}


@pytest.mark.usefixtures("one_shard")
def test_every_index_serves_a_statement(database: Database) -> None:
    """An unused index costs every insert."""
    conn = database.connect(autocommit=True)
    analyze(conn)
    for statement in LIFE.strip().rstrip(";").split(";\n"):
        conn.execute(statement.encode())
    counters(conn)
    unused = {row[0] for row in conn.execute(UNUSED).fetchall()} - ELSEWHERE
    assert not unused
