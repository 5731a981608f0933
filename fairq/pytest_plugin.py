"""Fixtures for applications that use fairq. pytest finds them wherever fairq is installed.

fairq_server    DSN of a PostgreSQL server for this run: FAIRQ_TEST_DSN, or an embedded one
fairq_dsn       URL of a new database with fairq installed, and with the queues of the app that the setting
                fairq_app names (fairq_app = "myapp.tasks:app" in pytest's configuration)
fairq_db        psycopg connection to it; what the test does is rolled back

Nothing is started or imported, except pytest, until a test uses one of them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import psycopg

__all__ = ["fairq_db", "fairq_dsn", "fairq_server"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("fairq_app", "The fairq.App whose queues the tests need: myapp.tasks:app", default="")


@pytest.fixture(scope="session")
def fairq_server() -> Iterator[str]:
    """The DSN of a server on which to create databases. Each pytest-xdist process has its own."""
    from fairq import dsn, embedded

    given = os.environ.get("FAIRQ_TEST_DSN")
    if given:
        yield dsn.to_libpq(given)
        return
    try:
        server = embedded.start()
    except embedded.EmbeddedError as exc:
        pytest.fail(f"fairq found no PostgreSQL for the tests. {exc}\nOr set FAIRQ_TEST_DSN.", pytrace=False)
    with server:
        yield server.dsn()


@pytest.fixture(scope="session")
def fairq_dsn(fairq_server: str, pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of a database with fairq installed, created for this run and dropped after it."""
    import psycopg

    from fairq import dsn, embedded, install
    from fairq.worker.loading import load_app

    with embedded.database(fairq_server, f"fairq_test_{uuid.uuid4().hex[:12]}") as where:
        with psycopg.connect(where) as conn:
            install.load_sql(conn)
            if app := pytestconfig.getini("fairq_app"):
                load_app(app).install(conn)
            conn.execute("update fairq.settings set test_clock = true")
        yield dsn.to_url(where)


@pytest.fixture
def fairq_db(fairq_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection whose transaction is rolled back at the end. Pass it to the code under test."""
    import contextlib

    import psycopg

    with contextlib.closing(psycopg.connect(fairq_dsn, application_name="fairq_db")) as conn:
        yield conn
        conn.rollback()
