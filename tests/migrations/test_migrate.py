"""`fairq.install.migrate` against a real server."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from fairq import install
from fairq.install import Applied, Waiting
from tests.api.addresses import alchemy_url
from tests.migrations.conftest import TRICKY, History, waiters
from tests.support.catalog import catalog, differences
from tests.support.database import Database
from tests.support.server import TestServer, private_server, with_database
from tests.support.sessions import call_in_background, result, wait_until

HOLDER = "holder"


def version(database: Database) -> str | None:
    with psycopg.connect(database.dsn) as conn:
        return install.schema_version(conn)


def assert_same(one: psycopg.Connection[Any], before: dict[str, dict[str, str]]) -> None:
    found = differences(before, catalog(one), "before", "after")
    assert not found, "\n\n".join(found)


def test_each_revision_goes_up_and_down_and_up_again(history: History, empty_database: Database) -> None:
    """By catalogue: a downgrade restores what was there before, and an upgrade builds the same again."""
    conn = empty_database.connect(autocommit=True)
    assert len(history.ids) == 3
    for before, here in zip(["base", *history.ids], history.ids, strict=False):
        below = catalog(conn)
        install.migrate(empty_database.dsn, to=here)
        above = catalog(conn)
        assert above != below
        down = install.migrate(empty_database.dsn, to=before)
        assert [(a.step.revision.id, a.step.direction) for a in down.steps] == [(here, "down")]
        assert_same(conn, below)
        install.migrate(empty_database.dsn, to=here)
        assert_same(conn, above)


def test_nothing_of_fairq_is_left_at_base(history: History, empty_database: Database) -> None:
    install.migrate(empty_database.dsn)
    done = install.migrate(empty_database.dsn, to="base")
    assert (done.before, done.after) == (history.head, None)
    assert [applied.step.revision.id for applied in done.steps] == list(reversed(history.ids))
    assert catalog(empty_database.connect()) == {}


def test_migrating_twice_does_nothing_the_second_time(history: History, empty_database: Database) -> None:
    first = install.migrate(empty_database.dsn)
    second = install.migrate(empty_database.dsn)
    assert (first.before, first.after, len(first.steps)) == (None, history.head, 1)
    assert (second.before, second.after, second.steps) == (history.head, history.head, ())


def test_a_database_that_is_up_to_date_is_not_locked(history: History, empty_database: Database) -> None:
    """Every container of a deployment may call it when it starts, and none of them waits."""
    install.migrate(empty_database.dsn)
    holder = empty_database.connect()
    holder.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
    assert install.migrate(empty_database.dsn, lock_timeout=0.01, patience=0).steps == ()


def test_files_reach_the_server_byte_by_byte(history: History, empty_database: Database) -> None:
    install.migrate(empty_database.dsn)
    conn = empty_database.connect()
    assert conn.execute("select fairq.probe()").fetchone() == (TRICKY,)
    comment = (
        "select col_description('fairq.groups'::regclass, attnum) from pg_attribute where attname = 'notes'"
    )
    assert conn.execute(comment).fetchone() == (TRICKY,)


def test_the_database_knows_the_oldest_code_that_fits(history: History, empty_database: Database) -> None:
    conn = empty_database.connect(autocommit=True)
    query = "select version_num, oldest_code from fairq.schema_version"
    rows = []
    for to in ("1", "2", "3", "2", "base", "3"):
        install.migrate(empty_database.dsn, to=to)
        if to != "base":
            rows += conn.execute(query).fetchall()
    one, two, three = history.ids
    assert rows == [(one, one), (two, one), (three, three), (two, one), (three, three)]


def test_each_step_is_reported_when_it_is_done(history: History, empty_database: Database) -> None:
    events: list[Applied | Waiting] = []
    install.migrate(empty_database.dsn, to="2", report=events.append)
    install.migrate(empty_database.dsn, report=events.append)
    applied = [event for event in events if isinstance(event, Applied)]
    assert [(event.step.revision.id, event.remaining) for event in applied] == [
        (history.ids[0], 1),
        (history.ids[1], 0),
        (history.ids[2], 0),
    ]


def test_a_mistake_in_a_file_names_the_file(history: History, empty_database: Database) -> None:
    (history.folder / "sql/views/999_wrong.sql").write_text("select 1 / 0;\n")
    with pytest.raises(psycopg.errors.DivisionByZero) as caught:
        install.migrate(empty_database.dsn)
    assert caught.value.__notes__ == ["while running 999_wrong.sql"]
    assert catalog(empty_database.connect()) == {}


def test_a_step_that_fails_leaves_the_version_before_it(history: History, empty_database: Database) -> None:
    """Each step is its own transaction: earlier steps stay, and the failed one leaves nothing."""
    install.migrate(empty_database.dsn, to="1")
    history.file("0003_*.up.sql").write_text("create table fairq.half (id int);\nselect 1 / 0;\n")
    with pytest.raises(psycopg.errors.DivisionByZero):
        install.migrate(empty_database.dsn)
    conn = empty_database.connect()
    assert install.schema_version(conn) == history.ids[1]
    assert conn.execute("select to_regclass('fairq.half')").fetchone() == (None,)


# --- Many at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "steps"), [("base", ["fairq_0003"]), ("1", ["fairq_0002", "fairq_0003"])])
def test_twenty_at_once_do_no_harm(
    history: History, empty_database: Database, at: str, steps: list[str]
) -> None:
    """Processes that are held back until all of them wait for the same lock."""
    install.migrate(empty_database.dsn, to=at)
    gate = empty_database.connect()
    gate.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
    crowd = history.crowd(20, empty_database.dsn)
    observer = empty_database.connect(autocommit=True)
    wait_until(lambda: len(waiters(observer)) == 20, "twenty processes wait", 120)
    gate.commit()
    output, errors = crowd.communicate(timeout=120)
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer.get("after", answer) for answer in answers] == [history.head] * 20, errors + output
    applied = [step["revision"] for answer in answers for step in answer["steps"]]
    assert sorted(applied) == steps, "each revision is applied once, by somebody"
    assert version(empty_database) == history.head


def test_threads_of_one_process_take_turns(history: History, empty_database: Database) -> None:
    install.migrate(empty_database.dsn, to="1")
    gate = empty_database.connect()
    gate.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
    observer = empty_database.connect(autocommit=True)
    calls = [
        call_in_background(lambda: install.migrate(empty_database.dsn, lock_timeout=60)) for _ in range(4)
    ]
    wait_until(lambda: len(waiters(observer)) == 4, "four threads wait")
    gate.commit()
    assert sum(len(result(call).steps) for call in calls) == 2
    assert version(empty_database) == history.head


def test_a_migrator_reads_the_version_after_it_got_the_lock_whatever_its_isolation(
    history: History, empty_database: Database
) -> None:
    """In a serializable transaction it would still see what was true before it waited."""
    dsn = psycopg.conninfo.make_conninfo(
        empty_database.dsn, options="-c default_transaction_isolation=serializable"
    )
    gate = empty_database.connect()
    gate.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
    observer = empty_database.connect(autocommit=True)
    calls = [call_in_background(lambda: install.migrate(dsn, lock_timeout=60)) for _ in range(2)]
    wait_until(lambda: len(waiters(observer)) == 2, "both wait")
    gate.commit()
    assert sum(len(result(call).steps) for call in calls) == 1


def test_threads_that_migrate_different_databases_do_not_disturb_each_other(
    history: History, empty_database: Database, database: Database
) -> None:
    """The first is in the middle of a revision while the second begins one."""
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect()
    holder.execute("select count(*) from fairq.groups")
    observer = empty_database.connect(autocommit=True)
    first = call_in_background(lambda: install.migrate(empty_database.dsn, lock_timeout=60))
    wait_until(lambda: bool(waiters(observer, "fairq.groups")), "the first is in the middle")
    with database.connect() as conn:
        conn.execute("update fairq.schema_version set version_num = %s", (history.initial,))
    second = call_in_background(lambda: install.migrate(database.dsn, lock_timeout=60))
    begun = """
        select exists (select from pg_locks where locktype = 'advisory' and granted
           and database = (select oid from pg_database where datname = %s))"""
    wait_until(
        lambda: second.done() or observer.execute(begun, (database.name,)).fetchone() == (True,),
        "the second has begun",
    )
    holder.rollback()
    assert result(first).after == history.head
    assert result(second).after == history.head


# --- Locks ----------------------------------------------------------------------------------------


def test_behind_a_lock_it_steps_aside_again_and_again_until_the_lock_is_free(
    history: History, empty_database: Database
) -> None:
    """Others can use the table while the migration waits to lock it."""
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect(application_name=HOLDER)
    holder.execute("select count(*) from fairq.groups")
    observer = empty_database.connect(autocommit=True)
    events: list[Applied | Waiting] = []
    call = call_in_background(
        lambda: install.migrate(empty_database.dsn, lock_timeout=0.5, patience=60, report=events.append)
    )
    changes: list[bool] = [False]

    def came_twice() -> bool:
        waits = bool(waiters(observer, "fairq.groups"))
        if waits is not changes[-1]:
            changes.append(waits)
        return len(changes) >= 4

    wait_until(came_twice, "the migration has waited, stepped aside and come back")
    other = empty_database.connect()
    assert other.execute("select count(*) from fairq.groups").fetchone() == (0,)
    other.rollback()
    wait_until(lambda: any(isinstance(event, Waiting) for event in events), "it says whom it waits for")
    holder.rollback()
    assert result(call).after == history.head
    waits = [event for event in events if isinstance(event, Waiting)]
    assert waits[0].pids == (holder.info.backend_pid,)
    assert len(waits) == 1, "the same holder is named once"


def test_it_gives_up_when_patience_ends_and_names_the_holder(
    history: History, empty_database: Database
) -> None:
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect(application_name=HOLDER)
    holder.execute("lock table fairq.groups in share mode")
    with pytest.raises(install.SchemaBusy) as caught:
        install.migrate(empty_database.dsn, lock_timeout=0.2, patience=0)
    text = str(caught.value)
    assert f"pid {holder.info.backend_pid}" in text
    assert HOLDER in text
    assert "idle in transaction" in text
    assert "lock table fairq.groups in share mode" in text
    assert "--patience" in str(caught.value.hint)
    assert version(empty_database) == history.ids[0]


def test_a_prepared_transaction_that_holds_the_lock_is_named(
    history: History, empty_database: Database
) -> None:
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect(autocommit=True)
    if holder.execute("show max_prepared_transactions").fetchone() == ("0",):
        pytest.skip("this server has no prepared transactions")
    holder.execute("begin; lock table fairq.groups in share mode; prepare transaction 'fairq_test'")
    try:
        with pytest.raises(install.SchemaBusy, match="prepared transaction"):
            install.migrate(empty_database.dsn, lock_timeout=0.2, patience=0)
    finally:
        holder.execute("rollback prepared 'fairq_test'")


def test_a_deadlock_is_tried_again(history: History, empty_database: Database) -> None:
    """The server may choose the migration as victim; then the application's transaction goes on."""
    install.migrate(empty_database.dsn, to="1")
    up = history.file("0002_*.up.sql")
    up.write_text("lock table fairq.tasks;\nlock table fairq.groups;\n" + up.read_text("utf-8"), "utf-8")
    app = empty_database.connect()
    app.execute("set deadlock_timeout = '1h'")  # the other side finds it
    app.execute("select count(*) from fairq.groups")
    observer = empty_database.connect(autocommit=True)
    call = call_in_background(lambda: install.migrate(empty_database.dsn, lock_timeout=30, patience=60))
    wait_until(lambda: bool(waiters(observer, "fairq.groups")), "the migration waits")
    app.execute("select count(*) from fairq.tasks")
    app.rollback()
    assert result(call).after == history.head


def test_a_role_with_a_short_statement_timeout_may_migrate(
    history: History, empty_database: Database
) -> None:
    dsn = psycopg.conninfo.make_conninfo(empty_database.dsn, options="-c statement_timeout=60s")
    install.migrate(dsn, to="1")
    up = history.file("0002_*.up.sql")
    seen = "create table fairq.seen as select current_setting('statement_timeout') as value;\n"
    up.write_text(seen + up.read_text("utf-8"), "utf-8")
    install.migrate(dsn)
    conn = psycopg.connect(dsn)
    with conn:
        assert conn.execute("select value from fairq.seen").fetchone() == ("0",)
        assert conn.execute("show statement_timeout").fetchone() == ("1min",)


def test_a_killed_migration_leaves_the_database_as_it_was(history: History, empty_database: Database) -> None:
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect()
    holder.execute("select count(*) from fairq.groups")
    process = history.command("migrate", "--dsn", empty_database.dsn, "--lock-timeout", "60")
    observer = empty_database.connect(autocommit=True)
    wait_until(lambda: bool(waiters(observer, "fairq.groups")), "the migration waits")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    holder.rollback()
    assert version(empty_database) == history.ids[0]
    assert install.migrate(empty_database.dsn).after == history.head


# --- Other people's databases ---------------------------------------------------------------------


@pytest.mark.parametrize("to", ["head", "1", "base"])
def test_a_newer_database_is_refused_untouched(history: History, empty_database: Database, to: str) -> None:
    install.migrate(empty_database.dsn)
    conn = empty_database.connect(autocommit=True)
    conn.execute("update fairq.schema_version set version_num = 'fairq_0099'")
    before = catalog(conn)
    with pytest.raises(install.SchemaTooNew) as caught:
        install.migrate(empty_database.dsn, to=to)
    assert "fairq_0099" in str(caught.value)
    assert history.head in str(caught.value)
    assert_same(conn, before)


def test_a_schema_of_somebody_else_is_left_alone(empty_database: Database) -> None:
    conn = empty_database.connect(autocommit=True)
    conn.execute("create schema fairq")
    conn.execute("create table fairq.orders (id int)")
    with pytest.raises(install.SchemaForeign, match="orders"):
        install.migrate(empty_database.dsn)
    assert conn.execute("select to_regclass('fairq.schema_version')").fetchone() == (None,)


def test_a_database_without_an_encoding_is_refused(server: TestServer, empty_database: Database) -> None:
    """It could not store the JSON of an `ä`."""
    name = f"{empty_database.name}_ascii"
    with psycopg.connect(server.admin_dsn, autocommit=True) as admin:
        made = sql.SQL("create database {} encoding 'SQL_ASCII' template template0 locale 'C'")
        admin.execute(made.format(sql.Identifier(name)))
        try:
            with pytest.raises(install.WrongEncoding, match="SQL_ASCII"):
                install.migrate(with_database(server.admin_dsn, name))
            with (
                psycopg.connect(with_database(server.admin_dsn, name)) as conn,
                pytest.raises(install.WrongEncoding),
            ):
                install.upgrade(conn)
        finally:
            admin.execute(sql.SQL("drop database {}").format(sql.Identifier(name)))


PREPARED = [
    "create schema fairq authorization app",
    "create role fairq_enqueue nologin",
    "create role fairq_work nologin",
    "create role fairq_observe nologin",
    "create role fairq_admin nologin",
]


def test_a_role_without_rights_migrates_what_an_administrator_has_prepared() -> None:
    """Exactly what docs/how-to/migrate.md asks for. Needs its own server, because it makes roles."""
    page = (Path(__file__).parents[2] / "docs/how-to/migrate.md").read_text("utf-8")
    with private_server(load=False) as server:
        admin = psycopg.connect(server.dsn("fairq"), autocommit=True)
        with admin:
            admin.execute("create role app login")
            dsn = psycopg.conninfo.make_conninfo(server.dsn("fairq"), user="app")
            for statement in PREPARED:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    install.migrate(dsn)
                assert f"{statement};\n" in page
                admin.execute(statement.encode())
            assert install.migrate(dsn).after == install.head()
            assert install.migrate(dsn, to="base").after is None


@pytest.mark.parametrize(
    "options",
    [
        "-c search_path=nowhere",
        "-c default_transaction_isolation=serializable",
        "-c default_transaction_read_only=on",
        "-c standard_conforming_strings=off",
        "-c check_function_bodies=on",
        "-c client_encoding=LATIN1",
        "-c timezone=Asia/Kathmandu -c datestyle=German",
    ],
)
def test_settings_of_the_role_do_not_change_the_result(empty_database: Database, options: str) -> None:
    install.migrate(psycopg.conninfo.make_conninfo(empty_database.dsn, options=options))
    conn = empty_database.connect(autocommit=True)
    with_options = catalog(conn)
    install.migrate(empty_database.dsn, to="base")
    install.migrate(empty_database.dsn)
    assert_same(conn, with_options)


# --- Downgrades keep what is the user's -----------------------------------------------------------

TASK = "insert into fairq.groups (shard_no, queue, group_key) values (0, 'default', 'bob')"


@pytest.mark.parametrize(
    "row", [TASK, """select fairq.configure_schedule('report', 'bob', '{"every": "1 day"}')"""]
)
def test_a_downgrade_that_would_lose_rows_of_the_user_is_refused(database: Database, row: str) -> None:
    conn = database.connect(autocommit=True)
    conn.execute(row.encode())
    before = catalog(conn)
    with pytest.raises(install.WouldLoseData) as caught:
        install.migrate(database.dsn, to="base")
    assert "drop schema" in str(caught.value.hint)
    assert_same(conn, before)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_it_is_refused_the_same_in_the_callers_transaction(database: Database, driver: str) -> None:
    url = alchemy_url(database.dsn, driver)

    def downgrade(bind: Any) -> None:
        bind.exec_driver_sql(TASK)
        with pytest.raises(install.WouldLoseData) as caught:
            install.downgrade(bind)
        assert "drop schema" in str(caught.value.hint)

    async def downgrade_async() -> None:
        async with create_async_engine(url, poolclass=NullPool).connect() as conn:
            await conn.run_sync(downgrade)

    if driver == "asyncpg":
        asyncio.run(downgrade_async())
    else:
        with create_engine(url, poolclass=NullPool).connect() as conn:
            downgrade(conn)


def test_a_row_that_is_being_added_meanwhile_is_not_lost(database: Database) -> None:
    """Looking before locking would miss it."""
    app = database.connect()
    app.execute(TASK)
    call = call_in_background(lambda: install.migrate(database.dsn, to="base", lock_timeout=30))
    observer = database.connect(autocommit=True)
    wait_until(lambda: bool(waiters(observer, "fairq.groups")), "the downgrade waits")
    app.commit()
    with pytest.raises(install.WouldLoseData):
        result(call)
    assert observer.execute("select count(*) from fairq.groups").fetchone() == (1,)


def test_objects_that_others_built_on_fairq_stop_a_downgrade(database: Database) -> None:
    conn = database.connect(autocommit=True)
    conn.execute("create view public.waiting as select id from fairq.tasks")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        install.migrate(database.dsn, to="base")
    assert conn.execute("select count(*) from public.waiting").fetchone() == (0,)


# --- Reading the version --------------------------------------------------------------------------


def test_reading_the_version_changes_nothing_about_the_transaction(db: psycopg.Connection[Any]) -> None:
    db.row_factory = psycopg.rows.dict_row
    assert install.schema_version(db) == install.head() == install.check_version(db)
    assert db.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def test_a_database_without_fairq_has_no_version(empty_database: Database) -> None:
    conn = empty_database.connect()
    assert install.schema_version(conn) is None
    with pytest.raises(install.SchemaMissing):
        install.check_version(conn)


async def _version(dsn: str) -> str:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        return await install.acheck_version(conn)


def test_an_asynchronous_worker_reads_it_as_well(database: Database, empty_database: Database) -> None:
    assert asyncio.run(_version(database.dsn)) == install.head()
    with pytest.raises(install.SchemaMissing):
        asyncio.run(_version(empty_database.dsn))


@pytest.mark.parametrize("role", ["fairq_enqueue", "fairq_work", "fairq_observe", "fairq_admin"])
def test_each_of_the_roles_may_read_the_version(db: psycopg.Connection[Any], role: str) -> None:
    db.execute(f"set local role {role}".encode())
    assert install.check_version(db) == install.head()
