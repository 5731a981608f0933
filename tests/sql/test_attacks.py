"""What a role of fairq could try with SQL of its own.

Tables, columns and functions come from the catalogue, so a new one is tried, too.
"""

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.sql.test_roles import CALLS, ENQUEUE, OBSERVE, WORK
from tests.support.calls import Conn, call, column, create, finish, one, pop, refused, register, run
from tests.support.database import Database

pytestmark = pytest.mark.new_database

# Private functions that queries and views of these roles need.
HELPERS = {ENQUEUE: set[str](), WORK: {"_shards"}, OBSERVE: {"_shards"}}
# What nobody sees but operators: what tenants said, and what handlers answered.
SECRET = {"payload", "headers", "result", "error", "note"}

# Runs each statement as the session's role, undoes it, and returns those that were not refused.
TRY = """
create function pg_temp.try(p_statements text[]) returns setof text language plpgsql as $$
declare
  v_statement text;
begin
  foreach v_statement in array p_statements loop
    begin
      execute v_statement;
      return next v_statement;
      raise exception 'undone' using errcode = 'UNDUN';
    exception
      when insufficient_privilege or sqlstate 'UNDUN' then null;
    end;
  end loop;
end
$$"""

RELATIONS = """
select c.oid::regclass::text, c.relkind::text, array_agg(a.attname::text)
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'S', 'f')
group by c.oid"""

SEQUENCE = ("select nextval('{0}')", "select setval('{0}', 1)", "alter sequence {0} restart")
VIEW = ("alter table {0} rename to mine", "alter table {0} owner to current_user", "lock {0}")
TABLE = (
    *VIEW,
    "insert into {0} ({1}) values (null)",
    "update {0} set {1} = null",
    "delete from {0}",
    "merge into {0} using (values (1)) v on false when not matched then insert default values",
    "truncate {0}",
    "lock table {0} in row exclusive mode",
    "select from {0} for update",
    "alter table {0} add column mine integer",
    "create index on {0} ({1})",
    "create trigger mine before insert on {0} execute function suppress_redundant_updates_trigger()",
    "create rule mine as on insert to {0} do instead nothing",
    "drop table {0} cascade",
)
READ = "select {1} from {0}"


@pytest.fixture
def session(database: Database, request: pytest.FixtureRequest) -> Conn:
    """Of a user with this role and no other."""
    return database.connect_as(request.param, autocommit=True)


def attempts(conn: Conn, statements: list[str]) -> list[str]:
    conn.execute(TRY.encode())
    return column(conn, "select pg_temp.try(%s)", statements)


@pytest.mark.parametrize("session", [ENQUEUE, WORK, OBSERVE], indirect=True)
def test_no_role_writes_locks_or_changes_a_relation(session: Conn) -> None:
    tried = [
        each.format(name, columns[0])
        for name, kind, columns in run(session, RELATIONS)
        for each in (SEQUENCE if kind == "S" else VIEW if kind == "v" else TABLE)
    ]
    assert len(tried) > 500
    assert attempts(session, tried) == []


@pytest.mark.parametrize("session", [ENQUEUE, WORK, OBSERVE], indirect=True)
def test_no_role_makes_or_removes_anything_in_the_schema(session: Conn) -> None:
    functions = column(
        session,
        "select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'fairq'::regnamespace",
    )
    assert len(functions) > 100
    tried = [
        "create table fairq.mine ()",
        "create view fairq.mine as select 1",
        "create function fairq.mine() returns int language sql as 'select 1'",
        "create type fairq.mine as (a int)",
        "create domain fairq.mine as int",
        "create sequence fairq.mine",
        "create operator fairq.= (leftarg = int, rightarg = int, function = int4eq)",
        "alter schema fairq rename to mine",
        "drop schema fairq cascade",
        *(f"drop function {each}" for each in functions),
        *(f"alter function {each} reset all" for each in functions),
        *(f"alter function {each} security invoker" for each in functions),
    ]
    assert attempts(session, tried) == []


@pytest.mark.parametrize("session", [ENQUEUE], indirect=True)
def test_a_producer_reads_no_table(session: Conn) -> None:
    tried = [
        READ.format(name, column)
        for name, _, columns in run(session, RELATIONS)
        for column in [*columns, "count(*)"]
    ]
    assert len(tried) > 300
    assert [each for each in attempts(session, tried) if not each.endswith(" fairq.schema_version")] == []


@pytest.mark.parametrize("session", [WORK, OBSERVE], indirect=True)
def test_who_watches_reads_no_payload_result_error_or_note(session: Conn) -> None:
    tried = [
        READ.format(name, column)
        for name, _, columns in run(session, RELATIONS)
        for column in [*columns, "*"]
        if column in SECRET or (SECRET & set(columns) and column == "*")
    ]
    assert len(tried) > 8
    assert attempts(session, tried) == []


@pytest.mark.parametrize("session", [ENQUEUE, WORK, OBSERVE], indirect=True)
def test_no_role_calls_a_function_that_is_not_for_it(session: Conn) -> None:
    """With nulls for arguments, which would say something else if it were called."""
    role = next(each for each in HELPERS if session.info.user.endswith(each.removeprefix("fairq")))
    allowed = {name for name, (roles, _) in CALLS.items() if role in roles} | HELPERS[role]
    calls = run(
        session,
        """
        select p.proname::text, p.prokind::text, 'select fairq.' || p.proname || '(' || (
         select coalesce(string_agg('null::' || replace(t.type::regtype::text, 'anyelement', 'int'), ','), '')
          from unnest(p.proargtypes::oid[]) t(type)) || ')'
        from pg_proc p where p.pronamespace = 'fairq'::regnamespace""",
    )
    assert {kind for _, kind, _ in calls} == {"f"}
    forbidden = [call for name, _, call in calls if name not in allowed]
    assert len(forbidden) > 80
    assert attempts(session, forbidden) == []


# --- What is another's ------------------------------------------------------------------------------

# Calls of a worker, by another one who guessed its id, and the attempts of its tasks.
OF_A_WORKER = (
    "select fairq.heartbeat({worker})",
    "select fairq.pop_tasks('default', 1, {worker})",
    "select fairq.turn({worker}, array['default'], array[1], 1)",
    "select fairq.turn({worker}, array['default'], array[1], 0, null, array[{running}], array[1])",
    "select fairq.start_tasks({worker}, array[{claimed}], array[1])",
    "select fairq.finish_tasks({worker}, array[{running}], array[1])",
    "select fairq.finish_tasks({worker}, array[{running}], array[1], array['released'])",
    "select fairq.held_tasks({worker}, array[{running}], array[1])",
    "select fairq.report_progress({worker}, array[{running}], array[1], array[1])",
    "select fairq.retire_worker({worker})",
)


def test_nobody_speaks_for_a_worker_of_another_role(database: Database) -> None:
    """Ids of workers are numbers that anybody can guess."""
    mine = database.connect_as(WORK, autocommit=True)
    ids = {"worker": register(mine), "running": create(mine), "claimed": create(mine)}
    pop(mine, ids["worker"], 1)
    pop(mine, ids["worker"], 1, lease="1 hour")
    calls = [each.format(**ids) for each in OF_A_WORKER]
    owner = database.connect(autocommit=True)
    called = set(re.findall(r"fairq\.(\w+)", " ".join(calls)))
    names = "select proname::text from pg_proc where proname !~ '^_' and 'p_worker_id' = any(proargnames)"
    assert called == set(column(owner, names))
    other = database.connect_as(f"another {WORK}", autocommit=True)
    assert attempts(other, calls) == []
    admin = database.connect_as("fairq_admin", autocommit=True)
    assert attempts(admin, calls) == calls
    assert finish(mine, ids["worker"], [ids["running"]]) == [ids["running"]]


@pytest.mark.usefixtures("one_shard")
def test_a_queue_with_roles_is_for_their_members(database: Database) -> None:
    owner, admin = database.connect(autocommit=True), database.connect_as("fairq_admin", autocommit=True)
    app, worker = database.connect_as(ENQUEUE, autocommit=True), database.connect_as(WORK, autocommit=True)
    roles = {"enqueue_role": database.logins[ENQUEUE], "work_role": database.logins[WORK]}
    call(admin, "configure_queue", "docs", **roles)
    task, waiting = create(app, queue="docs"), create(app, queue="docs")
    run(app, "select fairq.create_tasks('{a}', array['1']::jsonb[], 'docs')")
    holder = register(worker, "docs", "default")
    assert pop(worker, holder, 1, queue="docs") == [task]
    report = "select fairq.report_progress(%s, array[%s::bigint], '{1}', '{0.5}')"
    assert column(worker, report, holder, task) == [task]
    finish(worker, holder, [task], results=['"done"'])
    for who in (app, worker, admin):
        assert run(who, "select result from fairq.task_result(%s)", task) == [("done",)]
        assert one(who, "select fairq.watch_task(%s)", waiting) is True
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        create(worker, queue="docs")

    for role in (f"another {ENQUEUE}", f"another {WORK}"):
        other = database.connect_as(role, autocommit=True)
        for query in (
            "select fairq.create_task('g', '1', 'docs')",
            "select fairq.create_tasks('{a}', array['1']::jsonb[], 'docs')",
            "select fairq.create_tasks('{a}', array['1']::jsonb[], 'docs', p_idempotency_keys => '{k}')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="docs") as caught:
                run(other, query)
            assert database.logins[role] in (caught.value.diag.message_hint or "")
        assert one(other, "select fairq.cancel_task(%s)", waiting) is False
        assert one(other, "select fairq.watch_task(%s)", waiting) is False
        assert run(other, "select outcome, result from fairq.task_result(%s)", task) == [(None, None)]
        assert run(other, "select live from fairq.task_result(%s)", waiting) == [(False,)]
        assert run(other, "select done from fairq.task_progress(%s)", task) == []
        create(other)
    holder = register(other)
    for query in (
        "select fairq.register_worker('w', '{default,docs}', 1)",
        f"select fairq.pop_tasks('docs', 1, {holder})",
        "select fairq.promote_overflow('docs')",
        f"select fairq.turn({holder}, '{{docs}}', '{{1}}', 1)",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="docs"):
            run(other, query)

    # A role that is gone has no members.
    run(owner, "update fairq.queues set enqueue_role = 'gone' where queue = 'docs'")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        create(app, queue="docs")
    assert create(admin, queue="docs")
    call(admin, "configure_queue", "docs", **dict.fromkeys(roles))
    assert create(other, queue="docs")


PLANS = (
    "select * from fairq.plan_schedule('s', 'bob', %s::timestamptz, array[%s::timestamptz + interval '1 ms'])"
)


def test_who_may_not_enqueue_to_a_queue_plans_no_tasks_of_its_schedules(database: Database) -> None:
    admin = database.connect_as("fairq_admin", autocommit=True)
    mine, other = (database.connect_as(role, autocommit=True) for role in (WORK, f"another {WORK}"))
    call(admin, "configure_queue", "docs")
    call(admin, "configure_schedule", "s", "bob", cron="0 3 1 1 *", queue="docs")
    (since,) = column(admin, "select done_until from fairq.schedules")
    due = "select (fairq.fire_schedules() ->> 'unplanned')::boolean"
    for roles in ({"enqueue_role": database.logins[ENQUEUE]}, {"work_role": database.logins[WORK]}):
        assert one(other, due) is True
        call(admin, "configure_queue", "docs", **roles)
    assert one(other, due) is False
    assert run(other, "select * from fairq.unplanned_schedules()") == []
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="docs"):
        run(other, PLANS, since, since)
    for who in (mine, admin):
        assert one(who, due) is True
        assert column(who, "select name from fairq.unplanned_schedules()") == ["s"]
    assert one(mine, PLANS, since, since) is True


@pytest.mark.parametrize("setting", ["enqueue_role", "work_role"])
def test_a_queue_is_for_a_role_that_exists(db: Conn, setting: str) -> None:
    for role in ("nobody at all", ""):
        with refused(db, "QF014"):
            call(db, "configure_queue", "docs", **{setting: role})


# --- Names of one's own in the way ------------------------------------------------------------------

SHADOWS = (Path(__file__).parents[1] / "support" / "shadows.sql").read_text()


@pytest.fixture
def stage(database: Database) -> Database:
    """For attackers who may make schemas and temporary objects as they like."""
    owner = database.connect(autocommit=True)
    owner.execute(f'grant create, temporary on database "{database.name}" to public'.encode())
    return database


@pytest.mark.parametrize("role", [ENQUEUE, WORK, OBSERVE])
def test_names_of_the_caller_stand_for_nothing_in_the_engine(stage: Database, role: str) -> None:
    """Public functions run with the rights of the owner: what they call by mistake would, too."""
    setup = stage.connect_as(WORK, autocommit=True)
    ids: dict[str, Any] = {name: create(setup) for name in ("running", "claimed", "waiting")}
    ids["worker"] = register(setup)
    session = stage.connect_as(role, autocommit=True)
    session.execute(SHADOWS.encode())
    heard: list[str] = []
    session.add_notice_handler(lambda notice: heard.append(notice.message_primary or ""))
    session.execute("select md5('x'), 'x'::text, 1 = 1")
    assert len(heard) == 3, "the trap is set"
    for name, (roles, query) in CALLS.items():
        if role in roles:
            done = session.execute(query.encode(), ids)
            assert done.statusmessage, name


def test_a_path_without_pg_temp_would_be_hijacked(stage: Database) -> None:
    """The control: what is in the way is in the way of a function that does not name pg_temp."""
    owner = stage.connect(autocommit=True)
    owner.execute(
        "create function public.careless() returns boolean language plpgsql security definer"
        " set search_path = '' as 'begin return ''x''::text is not null; end'"
    )
    session = stage.connect_as(ENQUEUE, autocommit=True)
    session.execute(SHADOWS.encode())
    with pytest.raises(psycopg.Error, match="hijacked"):
        session.execute("select public.careless()")


# --- What is said in arguments and settings ---------------------------------------------------------

BOMBS = (
    # Twelve bytes each, and 131,000 as text: every pop of the queue would fail.
    "(select jsonb_agg(1e131000::numeric) from generate_series(1, 1000))",
    "(select jsonb_agg(1e131000::numeric) from generate_series(1, 200))",
    "(select jsonb_build_object('a', repeat('x', 50000000)))",
    "(select packed from pg_temp.stored)",
)


@pytest.mark.parametrize("session", [ENQUEUE], indirect=True)
@pytest.mark.parametrize("bomb", BOMBS)
def test_json_that_is_longer_as_text_than_it_looks_is_refused(session: Conn, bomb: str) -> None:
    session.execute("create temp table stored (packed jsonb)")
    session.execute("insert into stored select jsonb_build_object('a', repeat('x', 10000000))")
    for call_ in (
        "select fairq.create_task('evil', {0})",
        "select fairq.create_task('evil', '1', p_headers => {0})",
        "select fairq.create_tasks('{{evil,evil}}', array['1', {0}])",
        "select fairq.create_tasks('{{evil}}', array['1'::jsonb], p_headers => {0})",
    ):
        with pytest.raises(psycopg.Error) as caught:
            session.execute(call_.format(bomb).encode())
        assert caught.value.sqlstate == "QF002"
        assert caught.value.diag.message_hint


@pytest.mark.parametrize("session", [ENQUEUE], indirect=True)
def test_a_session_does_not_move_the_clock_of_the_engine(session: Conn, database: Database) -> None:
    """A watch, a key or a task from the year 9000 would stay until then."""
    owner = database.connect(autocommit=True)
    owner.execute("update fairq.settings set test_clock = false")
    for moment in ("9000-01-01", "infinity", "0044-03-15 BC", "no time at all"):
        run(session, "select set_config('fairq.now', %s, false)", moment)
        task = create(session, idempotency_key=f"at {moment}", run_at="2500-01-01")
        assert one(session, "select fairq.watch_task(%s)", task)
        assert one(session, "select fairq.cancel_task(%s)", task)
    late = (
        "select max({}) < now() + interval '2 minutes' and min({}) > now() - interval '1 hour' from fairq.{}"
    )
    for table, name in (
        ("tasks", "created_at"),
        ("idempotency_keys", "created_at"),
        ("watches", "until"),
        ("cancellations", "requested_at"),
    ):
        assert one(owner, late.format(name, name, table)), table
    assert one(owner, "select bool_and(scheduled) from fairq.tasks")


@pytest.mark.parametrize("session", [ENQUEUE], indirect=True)
def test_asking_again_and_again_piles_nothing_up(session: Conn, database: Database) -> None:
    """300,000 watches of one task made every end of any task read them: 118 ms instead of 4."""
    owner = database.connect(autocommit=True)
    task = create(session, run_at="2500-01-01")
    session.execute(
        "select fairq.watch_task(%s), fairq.cancel_task(%s) from generate_series(1, 300)", [task, task]
    )
    for table in ("watches", "cancellations"):
        count = one(owner, f"select count(*) from fairq.{table}")  # noqa: S608
        assert 1 <= count <= 30, table  # one a second: on a slow machine they take their time
    assert one(owner, "select count(*) from fairq.rings where cancelled_id = %s", task) <= 30
