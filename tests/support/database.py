"""A database for one test, and the connections that test opens to it."""

from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

PASSWORD = "fairq"


@dataclass
class Database:
    """Connections made here are closed at the end of the test; pass `application_name` to name a session."""

    name: str
    dsn: str
    logins: dict[str, str] = field(default_factory=dict)
    connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    def connect(self, **kwargs: Any) -> psycopg.Connection[Any]:
        conn = psycopg.connect(self.dsn, **kwargs)
        self.connections.append(conn)
        return conn

    def dsn_as(self, role: str) -> str:
        """As a user that was granted this role of fairq, or "another …", and nothing else."""
        return make_conninfo(self.dsn, user=self.logins[role], password=PASSWORD)

    def connect_as(self, role: str, **kwargs: Any) -> psycopg.Connection[Any]:
        conn = psycopg.connect(self.dsn_as(role), **kwargs)
        self.connections.append(conn)
        return conn

    def close(self) -> None:
        for conn in self.connections:
            conn.close()
