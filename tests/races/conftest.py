import pytest

from tests.support.calls import Conn, promote
from tests.support.database import Database


@pytest.fixture(autouse=True)
def _no_statement_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race that is lost shows as an error, not as a run that hangs."""
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=30s")


@pytest.fixture(autouse=True)
def _by_roles(by_roles: None) -> None:
    """Whatever the test calls by tests.support.calls."""


@pytest.fixture
def observer(database: Database) -> Conn:
    """Autocommit, on an engine that has promoted before."""
    conn = database.connect(autocommit=True, application_name="observer")
    promote(conn)
    return conn
