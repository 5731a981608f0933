from collections.abc import Iterator

import psycopg
import pytest

from tests.support.calls import Conn, at
from tests.support.cluster import ON_CITUS
from tests.support.database import Database
from tests.support.server import TestServer, create_database, drop_database, with_database


@pytest.fixture(autouse=True)
def _no_statement_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race that is lost shows as an error, not as a run that hangs.

    Deadlocks are looked for after a second, as by default: a pop waits for others a fifth of that.
    """
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=60s -c deadlock_timeout=1s")


@pytest.fixture(scope="session")
def source(server: TestServer, template: str, worker: str) -> Iterator[str]:
    """One whose history has the days around that noon. Else the first upkeep of a test would make them, and
    drop today's: sixteen tables each, and a database that no other test can have.
    """
    if ON_CITUS:
        yield template
        return
    name = f"fairq_test_{server.run_id}_{worker}_noon"
    create_database(server, name, template)
    with psycopg.connect(with_database(server.given or server.admin_dsn, name), autocommit=True) as conn:
        at(conn, "12:00:00")
        conn.execute("select fairq._rotate_partitions()")
    yield name
    drop_database(server, name)


@pytest.fixture
def conn(database: Database) -> Conn:
    """One session in autocommit, at noon: every call is a transaction, as it is for a worker."""
    conn = database.connect(autocommit=True)
    at(conn, "12:00:00")
    return conn


@pytest.fixture(autouse=True)
def _by_roles(by_roles: None) -> None:
    """Whatever the test calls by tests.support.calls."""
