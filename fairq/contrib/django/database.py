"""Which of DATABASES fairq lives in, and its connection string."""

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
    """FAIRQ_DATABASE, else where the routers write models of this app: `default` without any."""
    chosen: str | None = getattr(settings, "FAIRQ_DATABASE", None)
    return chosen or router.db_for_write(apps.get_model("fairq", "Task"))


def connection() -> Any:
    """Django's connection of this thread: what is enqueued on it commits with the models."""
    return connections[alias()]


def dsn(using: str | None = None) -> str:
    """The same database for libpq, with what OPTIONS say of it."""
    conn = connections[using or alias()]
    if conn.vendor != "postgresql":
        raise ConfigurationError(
            f"the database {conn.alias!r} of DATABASES is not PostgreSQL",
            "Name the one that is: FAIRQ_DATABASE.",
        )
    parameters = conn.get_connection_params()
    known = {each.keyword.decode() for each in Conninfo.get_defaults()}
    found = {name: value for name, value in parameters.items() if name in known and value is not None}
    if role := conn.settings_dict["OPTIONS"].get("assume_role"):
        escaped = role.replace("\\", "\\\\").replace(" ", "\\ ")
        found["options"] = f"{found.get('options', '')} -c role={escaped}".strip()
    return make_conninfo(**found)
