"""Four roles, each with what it needs and no more; nothing for PUBLIC."""

from typing import Any

import psycopg
import pytest

from tests.support.calls import Conn, create, create_many, one, register, run

pytestmark = pytest.mark.new_database

ENQUEUE, WORK, OBSERVE, ADMIN = "fairq_enqueue", "fairq_work", "fairq_observe", "fairq_admin"
ROLES = [ENQUEUE, WORK, OBSERVE, ADMIN]

# Every public function: who may call it, and a call that succeeds.
CALLS: dict[str, tuple[set[str], str]] = {
    "create_task": ({ENQUEUE, WORK, ADMIN}, "select fairq.create_task('g', '{}', p_idempotency_key => 'k')"),
    "create_tasks": ({ENQUEUE, WORK, ADMIN}, "select fairq.create_tasks('{a,b}', array['1', '2']::jsonb[])"),
    "cancel_task": ({ENQUEUE, WORK, ADMIN}, "select fairq.cancel_task(%(waiting)s)"),
    "task_result": ({ENQUEUE, WORK, ADMIN}, "select live from fairq.task_result(%(waiting)s)"),
    "task_history": ({WORK, ADMIN}, "select payload from fairq.task_history(%(waiting)s)"),
    "task_progress": ({ENQUEUE, WORK, ADMIN}, "select done from fairq.task_progress(%(running)s)"),
    "watch_task": ({ENQUEUE, WORK, ADMIN}, "select fairq.watch_task(%(waiting)s)"),
    "promote_overflow": ({WORK, ADMIN}, "select fairq.promote_overflow()"),
    "pop_tasks": ({WORK, ADMIN}, "select id from fairq.pop_tasks('default', 1, %(worker)s)"),
    "turn": ({WORK, ADMIN}, "select id from fairq.turn(%(worker)s, '{default}', '{1}', 1)"),
    "register_worker": ({WORK, ADMIN}, "select fairq.register_worker('w', '{default}', 1)"),
    "heartbeat": ({WORK, ADMIN}, "select fairq.heartbeat(%(worker)s)"),
    "start_tasks": ({WORK, ADMIN}, "select fairq.start_tasks(%(worker)s, array[%(claimed)s::bigint], '{1}')"),
    "finish_tasks": (
        {WORK, ADMIN},
        "select fairq.finish_tasks(%(worker)s, array[%(running)s]::bigint[], '{1}', '{retry}')",
    ),
    "held_tasks": ({WORK, ADMIN}, "select fairq.held_tasks(%(worker)s, array[%(running)s]::bigint[], '{1}')"),
    "report_progress": (
        {WORK, ADMIN},
        "select fairq.report_progress(%(worker)s, array[%(running)s]::bigint[], '{1}', '{0.5}')",
    ),
    "retire_worker": ({WORK, ADMIN}, "select fairq.retire_worker(%(worker)s)"),
    "retry_task": ({ADMIN}, "select fairq.retry_task(%(waiting)s)"),
    "maintain": ({WORK, ADMIN}, "select fairq.maintain()"),
    "upkeep_parts": ({WORK, OBSERVE, ADMIN}, "select fairq.upkeep_parts()"),
    "shares": ({WORK, OBSERVE, ADMIN}, "select group_key from fairq.shares()"),
    "fairness": ({WORK, OBSERVE, ADMIN}, "select worst_debt from fairq.fairness()"),
    "metrics": ({WORK, OBSERVE, ADMIN}, "select name from fairq.metrics()"),
    "rebuild": ({ADMIN}, "select fairq.rebuild('default')"),
    "explain_task": ({WORK, OBSERVE, ADMIN}, "select reason from fairq.explain_task(%(waiting)s)"),
    "next_due_at": ({WORK, OBSERVE, ADMIN}, "select fairq.next_due_at('default')"),
    "standings": ({WORK, ADMIN}, "select fairq.standings('{default}')"),
    "configure_queue": ({ADMIN}, """select fairq.configure_queue('docs', '{"group_max_running": 3}')"""),
    "configure_user": (
        {ADMIN},
        """select fairq.configure_user('default', 'bob', 'jane', '{"weight": 2}')""",
    ),
    "configure_group": ({ADMIN}, """select fairq.configure_group('default', 'bob', '{"weight": 2}')"""),
    "configure_key": ({ADMIN}, """select fairq.configure_key('k', '{"max_running": 2}')"""),
    "configure_kind": ({ADMIN}, """select fairq.configure_kind('default', 'k', '{"priority": 2}')"""),
    "move_groups": ({ADMIN}, "select fairq.move_groups()"),
    "configure_cluster": ({ADMIN}, """select fairq.configure_cluster('{"max_running": 5}')"""),
    "pause_queue": ({ADMIN}, "select fairq.pause_queue('default')"),
    "resume_queue": ({ADMIN}, "select fairq.resume_queue('default')"),
    "hold_group": ({ADMIN}, "select fairq.hold_group('default', 'bob', null)"),
    "hold_key": ({ADMIN}, "select fairq.hold_key('api', null)"),
    "pause_group": ({ADMIN}, "select fairq.pause_group('default', 'bob')"),
    "resume_group": ({ADMIN}, "select fairq.resume_group('default', 'bob')"),
    "drain_queue": ({ADMIN}, "select fairq.drain_queue('default')"),
    "budget_usage": (
        {WORK, OBSERVE, ADMIN},
        "select available from fairq.budget_usage('default', 'bob')",
    ),
    "rate_usage": ({WORK, OBSERVE, ADMIN}, "select available from fairq.rate_usage('default', 'bob')"),
    "reset_rate": ({ADMIN}, "select fairq.reset_rate('default', 'bob')"),
    "purge_group": ({ADMIN}, "select fairq.purge_group('default', 'bob')"),
    "configure_schedule": ({ADMIN}, """select fairq.configure_schedule('n', 'bob', '{"every": 1}')"""),
    "pause_schedule": ({ADMIN}, "select fairq.pause_schedule('s')"),
    "resume_schedule": ({ADMIN}, "select fairq.resume_schedule('s')"),
    "remove_schedule": ({ADMIN}, "select fairq.remove_schedule('s')"),
    "run_schedule": ({ADMIN}, "select fairq.run_schedule('s')"),
    "fire_schedules": ({WORK, ADMIN}, "select fairq.fire_schedules()"),
    "unplanned_schedules": ({WORK, ADMIN}, "select fairq.unplanned_schedules()"),
    "plan_schedule": ({WORK, ADMIN}, "select fairq.plan_schedule('s', 'bob', now(), '{}')"),
}  # fmt: skip


@pytest.fixture
def ids(db: Conn) -> dict[str, Any]:
    run(db, "set local role fairq_work")
    holder = register(db)
    run(db, "reset role")
    tasks = create_many(db, "bob", 3)
    run(db, """select fairq.configure_schedule('s', 'bob', '{"every": 1}')""")
    run(db, "select id from fairq.pop_tasks('default', 1, %s)", holder)
    run(db, "select id from fairq.pop_tasks('default', 1, %s, '1 hour')", holder)
    return {"worker": holder, "running": tasks[0], "claimed": tasks[1], "waiting": tasks[2]}


def call_as(db: Conn, role: str, query: str, ids: dict[str, Any]) -> str | None:
    """The SQLSTATE, or None when it worked."""
    try:
        with db.transaction(force_rollback=True):
            db.execute(f"set local role {role}")
            db.execute(query, ids)
    except psycopg.Error as exc:
        return exc.sqlstate
    return None


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("function", CALLS)
def test_each_role_may_call_what_it_needs_and_nothing_else(
    db: Conn, ids: dict[str, Any], function: str, role: str
) -> None:
    allowed, query = CALLS[function]
    assert call_as(db, role, query, ids) == (None if role in allowed else "42501")


def test_every_public_function_is_in_the_list(db: Conn) -> None:
    found = run(
        db,
        "select distinct proname::text from pg_proc"
        " where pronamespace = 'fairq'::regnamespace and proname !~ '^_'",
    )
    assert {name for (name,) in found} == set(CALLS)


def test_nothing_is_granted_to_public(db: Conn) -> None:
    run(db, "create role fairq_test_nobody")
    for schema_right in ("usage", "create"):
        assert not one(db, "select has_schema_privilege('fairq_test_nobody', 'fairq', %s)", schema_right)
    functions = run(
        db,
        """
        select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace = 'fairq'::regnamespace
          and has_function_privilege('fairq_test_nobody', p.oid, 'execute')
        """,
    )
    assert functions == []
    relations = run(
        db,
        """
        select c.oid::regclass::text from pg_class c
        where c.relnamespace = 'fairq'::regnamespace and case when c.relkind in ('r', 'p', 'v') then
          has_table_privilege('fairq_test_nobody', c.oid,
            'select, insert, update, delete, truncate, references, trigger')
        end
        """,
    )
    assert relations == []
    sequences = run(
        db,
        """
        select c.oid::regclass::text from pg_class c
        where c.relnamespace = 'fairq'::regnamespace
          and case when c.relkind = 'S' then
            has_sequence_privilege('fairq_test_nobody', c.oid, 'usage, select, update')
          end
        """,
    )
    assert sequences == []


def test_new_partitions_are_not_for_public_either(db: Conn) -> None:
    run(db, "create role fairq_test_nobody")
    run(db, "set local role fairq_work")
    run(db, "select fairq.maintain()")
    run(db, "reset role")
    open_ones = run(
        db,
        """
        select c.oid::regclass::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'fairq.finished_tasks'::regclass
          and has_table_privilege('fairq_test_nobody', c.oid, 'select')
        """,
    )
    assert open_ones == []


@pytest.mark.parametrize("role", ROLES)
def test_no_role_can_log_in(db: Conn, role: str) -> None:
    assert run(db, "select rolcanlogin, rolsuper, rolbypassrls from pg_roles where rolname = %s", role) == [
        (False, False, False)
    ]


@pytest.mark.parametrize(
    ("role", "query"),
    [
        (OBSERVE, "select payload from fairq.tasks"),
        (OBSERVE, "select payload from fairq.finished_tasks"),
        (OBSERVE, "select result from fairq.finished_tasks"),
        (OBSERVE, "delete from fairq.tasks"),
        (ENQUEUE, "select payload from fairq.tasks"),
        (ENQUEUE, "update fairq.tasks set priority = 1"),
        (ENQUEUE, "delete from fairq.tasks"),
        (ENQUEUE, "select * from fairq.groups"),
        (WORK, "update fairq.queues set max_attempts = 1"),
        (WORK, "update fairq.settings set shard_count = 2"),
        (WORK, "insert into fairq.groups (shard_no, queue, group_key) values (0, 'default', 'x')"),
        (WORK, "drop table fairq.rings"),
        (WORK, "truncate fairq.tasks"),
    ],
)
def test_tables_are_closed_where_no_need_is(db: Conn, ids: dict[str, Any], role: str, query: str) -> None:
    assert call_as(db, role, query, ids) == "42501"


@pytest.mark.parametrize("view", ["queue_stats", "group_stats", "worker_stats", "estimates"])
@pytest.mark.parametrize("role", [OBSERVE, WORK, ADMIN])
def test_the_views_are_for_those_who_watch(db: Conn, ids: dict[str, Any], role: str, view: str) -> None:
    assert call_as(db, role, f"select * from fairq.{view}", ids) is None  # noqa: S608


def test_a_worker_lives_its_whole_life_with_its_role_alone(db: Conn) -> None:
    run(db, "set local role fairq_enqueue")
    create(db)
    run(db, "set local role fairq_work")
    worker = register(db)
    assert len(run(db, "select id from fairq.pop_tasks('default', 1, %s)", worker)) == 1
    run(db, "select fairq.retire_worker(%s)", worker)
    run(db, "select fairq.maintain()")
