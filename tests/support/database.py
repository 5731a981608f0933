"""A database for one test, and the connections that test opens to it."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

# `make test-managed`; see tests/support/managed.py.
MANAGED = "FAIRQ_TEST_MANAGED" in os.environ
PASSWORD = "fairq"
ROLES = ("enqueue", "work", "observe", "admin")

_numbers = itertools.count(1)


def session(dsn: str, **kwargs: Any) -> psycopg.Connection[Any]:
    """A test's own connection. Through PgBouncer it prepares nothing, and has a name that identifies it."""
    if MANAGED:
        name = f"session {os.getpid()}.{next(_numbers)}"
        kwargs = {"prepare_threshold": None, "application_name": name, **kwargs}
    return psycopg.connect(dsn, **kwargs)


Preparation = Callable[[psycopg.Connection[Any]], object]


@dataclass
class Database:
    """A test's database. Its connections are closed at the end; pass `application_name` to name a session."""

    name: str
    dsn: str
    logins: dict[str, str] = field(default_factory=dict)
    connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    def connect(self, **kwargs: Any) -> psycopg.Connection[Any]:
        return self.open(self.dsn, **kwargs)

    def dsn_as(self, role: str) -> str:
        """The DSN of a user that was granted only this role of fairq, or "another …"."""
        return make_conninfo(self.dsn, user=self.logins[role], password=PASSWORD)

    def connect_as(self, role: str, **kwargs: Any) -> psycopg.Connection[Any]:
        return self.open(self.dsn_as(role), **kwargs)

    def open(self, dsn: str, **kwargs: Any) -> psycopg.Connection[Any]:
        conn = session(dsn, **kwargs)
        self.connections.append(conn)
        return conn

    def close(self) -> None:
        for conn in self.connections:
            conn.close()


def prepare(database: Database, preparation: Preparation | None) -> None:
    if preparation:
        with session(database.dsn, autocommit=True) as conn:
            preparation(conn)
