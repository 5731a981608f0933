"""`fairq sql`: the same steps as plain SQL, through a real psql."""

import os
import shutil
import subprocess

import psycopg
import pytest

from fairq import embedded, install
from tests.migrations.conftest import TRICKY, History
from tests.support.catalog import catalog, differences
from tests.support.database import Database


def program() -> str:
    """The psql beside the server's programs, or the system's."""
    beside = embedded.find_binaries().bin_dir / "psql"
    found = str(beside) if beside.exists() else shutil.which("psql")
    return found or pytest.skip("there is no psql here")


def psql(dsn: str, script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [program(), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn],
        input=script,
        capture_output=True,
        text=True,
        env={**os.environ, "PGCLIENTENCODING": "UTF8"},
        check=False,
    )


def run(dsn: str, script: str) -> None:
    done = psql(dsn, script)
    assert (done.returncode, done.stderr) == (0, "")


def version(database: Database) -> str | None:
    with psycopg.connect(database.dsn) as conn:
        return install.schema_version(conn)


def test_psql_builds_the_same_catalogue_as_migrate(history: History, empty_database: Database) -> None:
    conn = empty_database.connect(autocommit=True)
    run(empty_database.dsn, install.script())
    by_psql = catalog(conn)
    assert conn.execute("select fairq.probe()").fetchone() == (TRICKY,)
    install.migrate(empty_database.dsn, to="base")
    install.migrate(empty_database.dsn)
    assert differences(by_psql, catalog(conn), "psql", "migrate") == []


def test_both_ways_can_be_mixed(history: History, empty_database: Database) -> None:
    conn = empty_database.connect(autocommit=True)
    run(empty_database.dsn, install.script("base", "1"))
    install.migrate(empty_database.dsn, to="2")
    at_two = catalog(conn)
    run(empty_database.dsn, install.script("2", "3"))
    assert version(empty_database) == history.head
    run(empty_database.dsn, install.script("head", "2"))
    assert differences(at_two, catalog(conn), "before", "after") == []
    run(empty_database.dsn, install.script("2", "base"))
    assert catalog(conn) == {}


@pytest.mark.parametrize(("at", "start"), [("base", "1"), ("1", "base"), ("1", "2"), ("3", "2")])
def test_a_script_refuses_a_database_at_another_revision(
    history: History, empty_database: Database, at: str, start: str
) -> None:
    install.migrate(empty_database.dsn, to=at)
    conn = empty_database.connect(autocommit=True)
    before = catalog(conn)
    done = psql(empty_database.dsn, install.script(start, "head"))
    assert done.returncode != 0
    assert "this script expects fairq at" in done.stderr
    assert differences(before, catalog(conn), "before", "after") == []


def test_a_script_that_would_lose_tasks_is_refused_by_the_server(
    history: History, database: Database
) -> None:
    conn = database.connect(autocommit=True)
    conn.execute("insert into fairq.groups (shard_no, queue, group_key) values (0, 'default', 'bob')")
    conn.execute("update fairq.schema_version set version_num = %s", (history.initial,))
    assert psql(database.dsn, install.script("1", "base")).returncode != 0
    assert conn.execute("select count(*) from fairq.groups").fetchone() == (1,)


def test_a_script_from_a_revision_to_itself_does_nothing(history: History) -> None:
    lines = install.script("2", "2").splitlines()
    assert all(line.startswith("--") for line in lines)
