"""Migrations through PgBouncer in transaction mode, where a session belongs to nobody."""

import psycopg
import pytest

from fairq import _migration, install
from tests.migrations.conftest import History, waiters
from tests.support.catalog import catalog, differences
from tests.support.database import Database
from tests.support.pooler import pooler
from tests.support.sessions import call_in_background, result, wait_until


def test_a_migration_through_a_pooler_leaves_nothing_in_its_sessions(
    history: History, empty_database: Database
) -> None:
    conn = empty_database.connect(autocommit=True)
    with pooler(empty_database.dsn, connections=1) as dsn:
        assert install.migrate(dsn, lock_timeout=1).after == history.head
        built = catalog(conn)
        with psycopg.connect(dsn, prepare_threshold=None) as client:
            for setting in ("lock_timeout", "statement_timeout", "search_path", "check_function_bodies"):
                row = client.execute("select setting, boot_val from pg_settings where name = %s", (setting,))
                left, initial = row.fetchone() or ("", "?")
                assert left == initial, setting
        locks = """
            select count(*) from pg_locks
             where locktype = 'advisory'
               and database = (select oid from pg_database where datname = current_database())"""
        assert conn.execute(locks).fetchone() == (0,)
        assert install.migrate(dsn, to="base").after is None
    install.migrate(empty_database.dsn)
    assert differences(built, catalog(conn), "pooler", "direct") == []


def test_many_take_turns_through_one_connection(history: History, empty_database: Database) -> None:
    with pooler(empty_database.dsn, connections=1) as dsn:
        calls = [call_in_background(lambda: install.migrate(dsn)) for _ in range(8)]
        assert sum(len(result(call).steps) for call in calls) == len(history.ids)
    assert install.check_version(empty_database.connect()) == history.head


def test_a_pool_without_room_for_a_second_look_does_not_stop_a_migration(
    history: History, empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch waits for the one connection, which the migration has; so the migration must not wait."""
    monkeypatch.setattr(_migration._Watch, "first_look", 0.0)
    monkeypatch.setattr(_migration._Watch, "farewell", 3600.0)
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect()
    holder.execute("select count(*) from fairq.groups")
    observer = empty_database.connect(autocommit=True)
    with pooler(empty_database.dsn, connections=1) as dsn:
        call = call_in_background(lambda: install.migrate(dsn, lock_timeout=60))
        wait_until(lambda: bool(waiters(observer, "fairq.groups")), "the migration waits")
        holder.rollback()
        assert result(call).after == history.head
