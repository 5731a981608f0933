"""Migrations through PgBouncer in transaction mode, where sessions are shared."""

import psycopg
import pytest

from fairq import install
from tests.migrations.conftest import History
from tests.support.catalog import catalog, differences
from tests.support.database import Database
from tests.support.pooler import pooler
from tests.support.sessions import call_in_background, result


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
        install.migrate(dsn, to="1")
        calls = [call_in_background(lambda: install.migrate(dsn)) for _ in range(8)]
        assert sum(len(result(call).steps) for call in calls) == 2
    assert install.check_version(empty_database.connect()) == history.head


def test_behind_a_pooler_the_holder_of_a_lock_is_named_as_well(
    history: History, empty_database: Database
) -> None:
    """It asks through the only connection, between two tries."""
    install.migrate(empty_database.dsn, to="1")
    holder = empty_database.connect()
    holder.execute("select count(*) from fairq.groups")
    with (
        pooler(empty_database.dsn, connections=1) as dsn,
        pytest.raises(install.SchemaBusy, match=f"pid {holder.info.backend_pid} "),
    ):
        install.migrate(dsn, lock_timeout=0.2, patience=0)
