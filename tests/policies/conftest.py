import pytest

from tests.support.calls import Conn, at
from tests.support.database import Database


@pytest.fixture(autouse=True)
def _no_statement_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race that is lost shows as an error, not as a run that hangs.

    Deadlocks are looked for after a second, as by default: a pop waits for others a fifth of that.
    """
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=60s -c deadlock_timeout=1s")


@pytest.fixture
def source(noon: str) -> str:
    return noon


@pytest.fixture
def conn(database: Database) -> Conn:
    """One session in autocommit, at noon: every call is a transaction, as it is for a worker."""
    conn = database.connect(autocommit=True)
    at(conn, "12:00:00")
    return conn


@pytest.fixture(autouse=True)
def _by_roles(by_roles: None) -> None:
    """Whatever the test calls by tests.support.calls."""
