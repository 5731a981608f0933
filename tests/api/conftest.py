"""One database for all tests of a module here: they commit, each under group keys of its own.

Connections of psycopg, whoever makes them, are new for each test; the sessions behind them need not be.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.api.kinds import KINDS, Opened
from tests.support.database import Database
from tests.support.kept import KEEPS, KeptDatabase
from tests.support.server import TestServer, create_database, drop_database


@pytest.fixture(scope="module")
def shared(server: TestServer, template: str, logins: dict[str, str]) -> Iterator[Database]:
    name = f"fairq_test_{server.run_id}_{uuid.uuid4().hex[:8]}"
    create_database(server, name, template)
    if KEEPS:
        kept = KeptDatabase(server, name, logins)
        with kept.lends():
            yield kept
        kept.close()
        kept.drop(server)
        return
    database = Database(name, server.dsn(name), logins)
    yield database
    database.close()
    drop_database(server, name)


@pytest.fixture(scope="module")
def observer(shared: Database) -> psycopg.Connection[Any]:
    """Another session, which sees only what is committed."""
    return shared.connect(autocommit=True)


@pytest.fixture
def group() -> str:
    return f"group {uuid.uuid4().hex}"


@pytest.fixture
def role() -> str:
    """The role of the application; modules about other roles override it."""
    return "fairq_enqueue"


@pytest.fixture(params=list(KINDS))
def opened(request: pytest.FixtureRequest, shared: Database, role: str) -> Iterator[Opened]:
    """A connection of each kind, in a transaction."""
    with KINDS[request.param](shared.dsn_as(role)) as connection:
        yield connection
