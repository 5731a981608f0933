"""A database that a test had is as new for the next one, or is not used again."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.contract.test_plans import no_autovacuum
from tests.support.calls import contents, create_many, maintain, one, pop, register, run
from tests.support.kept import KEEPS, KeptDatabase
from tests.support.server import TestServer, create_database

pytestmark = pytest.mark.skipif(not KEEPS, reason="each test has a new one")

Conn = psycopg.Connection[Any]


@pytest.fixture
def kept(server: TestServer, template: str, logins: dict[str, str]) -> Iterator[KeptDatabase]:
    name = f"fairq_test_{server.run_id}_{uuid.uuid4().hex[:8]}"
    create_database(server, name, template)
    database = KeptDatabase(server, name, logins, no_autovacuum)  # it changes statistics
    yield database
    database.close()
    database.drop(server)


def rows(database: KeptDatabase) -> list[Any]:
    """All but which transaction wrote a tick."""
    with database.keeper.transaction(force_rollback=True):
        database.keeper.execute("update fairq.ticks set written_by = '1'")
        return contents(database.keeper)


def test_rows_numbers_and_sessions_begin_anew(kept: KeptDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.kept.PATIENCE_SECONDS", 60)
    first = rows(kept)
    conn, left = kept.connect(autocommit=True), kept.connect()
    pid = conn.info.backend_pid
    run(conn, "select fairq.configure_group('default', 'bob', '{\"max_running\": 1}')")
    run(conn, "select fairq.configure_queue('other')")
    create_many(conn, "bob", 3)
    pop(conn, register(conn), 2)
    maintain(conn)
    run(conn, "set lock_timeout = '1s'")
    run(conn, "listen here")
    run(left, "select pg_advisory_lock(1)")
    run(left, "select from fairq.tasks for update")
    kept.close()
    assert conn.closed
    assert rows(kept) != first
    assert kept.is_as_new()
    assert rows(kept) == first
    conn = kept.connect(autocommit=True)
    assert conn.info.backend_pid == pid
    assert one(conn, "show lock_timeout") == "0"
    assert run(conn, "select pg_listening_channels()") == []
    # Of this database: other tests have theirs.
    ours = "database = (select oid from pg_database where datname = current_database())"
    assert one(conn, f"select count(*) from pg_locks where locktype = 'advisory' and {ours}") == 0  # noqa: S608
    # Promotion trusts what is written there, and does not start anew.
    assert one(conn, "select count(*) from fairq._tick(0, 'default')") == 1
    assert create_many(conn, "bob", 1) == [1]


def test_who_connects_anew_has_a_session_that_was_closed(kept: KeptDatabase) -> None:
    """In a new object, and as if it were new; under another name, as another user, it is another one."""
    shown = "select pg_backend_pid(), current_setting('application_name'), current_setting('lock_timeout')"

    async def of_an_application() -> tuple[Any, ...] | None:
        async with await psycopg.AsyncConnection.connect(kept.dsn, application_name="shop") as conn:
            return await (await conn.execute(shown)).fetchone()

    with kept.lends():
        with psycopg.connect(kept.dsn, application_name="shop") as first:
            pid = first.info.backend_pid
            run(first, "set lock_timeout = '1s'")
            run(first, "set application_name = 'mine'")
        assert first.closed
        waiting = "select application_name from pg_stat_activity where pid = %s"
        assert run(kept.keeper, waiting, pid) == [("",)]
        assert asyncio.run(of_an_application()) == (pid, "shop", "0")
        with psycopg.connect(kept.dsn) as other, psycopg.connect(kept.dsn_as("fairq_work")) as role:
            assert pid not in (other.info.backend_pid, role.info.backend_pid)
        run(kept.keeper, "select pg_terminate_backend(%s, 5000)", pid)
        with psycopg.connect(kept.dsn, application_name="shop") as new:
            assert new.info.backend_pid != pid
            new.execute("select 1 / 1")
    kept.close()
    assert kept.is_as_new()


@pytest.mark.parametrize(
    "statement",
    [
        "create table mine ()",
        "create temporary table mine ()",
        "alter function fairq.create_task set work_mem = '1MB'",
        "comment on table fairq.tasks is 'mine'",
        "analyze fairq.settings",
        "drop function fairq.metrics",
        "alter database {} set work_mem = '1MB'",
    ],
)
def test_a_changed_catalogue_is_seen(kept: KeptDatabase, statement: str) -> None:
    run(kept.connect(autocommit=True), statement.format(kept.name))
    kept.close()
    assert not kept.is_as_new()


def test_somebody_else_keeps_it_from_being_used_again(
    kept: KeptDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.kept.PATIENCE_SECONDS", 0)
    with psycopg.connect(kept.dsn):
        assert not kept.is_as_new()
