"""Which of DATABASES fairq uses, and its connection string."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import connections, router
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from fairq.errors import ConfigurationError

__all__ = ["alias", "connection", "dsn"]


def alias() -> str:
    """FAIRQ_DATABASE, else where the routers write this app's models: without routers, `default`."""
    chosen: str | None = getattr(settings, "FAIRQ_DATABASE", None)
    return chosen or router.db_for_write(apps.get_model("fairq", "Task"))


def connection() -> Any:
    """Django's connection in this thread. Tasks enqueued on it commit with the models."""
    return connections[alias()]


def dsn(using: str | None = None) -> str:
    """The DSN of the database for libpq, including its OPTIONS."""
    conn = connections[using or alias()]
    if conn.vendor != "postgresql":
        raise ConfigurationError(
            f"the database {conn.alias!r} of DATABASES is not PostgreSQL",
            "Set FAIRQ_DATABASE to the alias of a PostgreSQL database.",
        )
    parameters = conn.get_connection_params()
    known = {each.keyword.decode() for each in Conninfo.get_defaults()}
    found = {name: value for name, value in parameters.items() if name in known and value is not None}
    if role := conn.settings_dict["OPTIONS"].get("assume_role"):
        escaped = role.replace("\\", "\\\\").replace(" ", "\\ ")
        found["options"] = f"{found.get('options', '')} -c role={escaped}".strip()
    return make_conninfo(**found)
