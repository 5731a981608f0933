"""The fixtures every other test stands on."""

import os
from typing import Any

import psycopg

from tests.support.database import Database
from tests.support.server import TestServer


def test_the_database_of_a_test_is_its_own(database: Database, empty_database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute("create table mine (id int)")
    with empty_database.connect() as conn:
        assert conn.execute("select to_regclass('mine')").fetchone() == (None,)
        assert conn.execute("select to_regnamespace('fairq')").fetchone() == (None,)


def test_what_db_writes_is_rolled_back_one(db: psycopg.Connection[Any]) -> None:
    db.execute("create table only_here (id int)")


def test_what_db_writes_is_rolled_back_two(db: psycopg.Connection[Any]) -> None:
    db.execute("create table only_here (id int)")


def test_leftover_connections_do_not_keep_a_database(server: TestServer, database: Database) -> None:
    forgotten = database.connect()
    forgotten.execute("select 1")
    with psycopg.connect(server.admin_dsn) as conn:
        assert conn.execute(
            "select count(*) from pg_database where datname = %s", [database.name]
        ).fetchone() == (1,)


def test_the_engine_has_as_many_shards_as_the_run_asks_for(db: psycopg.Connection[Any]) -> None:
    asked = int(os.environ.get("FAIRQ_TEST_SHARDS") or 1)
    assert db.execute("select shard_count from fairq.settings").fetchone() == (asked,)
