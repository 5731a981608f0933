"""A database for one test, and the connections that test opens to it."""

from dataclasses import dataclass, field
from typing import Any

import psycopg


@dataclass
class Database:
    """Connections made here are closed at the end of the test; pass `application_name` to name a session."""

    name: str
    dsn: str
    connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    def connect(self, **kwargs: Any) -> psycopg.Connection[Any]:
        conn = psycopg.connect(self.dsn, **kwargs)
        self.connections.append(conn)
        return conn

    def close(self) -> None:
        for conn in self.connections:
            conn.close()
