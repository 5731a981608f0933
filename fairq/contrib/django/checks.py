"""Checks for `manage.py check`. Backends of Django's tasks add their own, see `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections
from django.db.utils import ConnectionDoesNotExist, DatabaseError

from fairq import install
from fairq.contrib.django import database

__all__ = ["check_database", "check_schema"]


@register()
def check_database(**_: Any) -> list[CheckMessage]:
    alias = database.alias()
    try:
        vendor = connections[alias].vendor
    except ConnectionDoesNotExist:
        return [Error(f"FAIRQ_DATABASE is {alias!r}, which is not in DATABASES", id="fairq.E004")]
    if vendor != "postgresql":
        hint = "Set FAIRQ_DATABASE to the alias of a PostgreSQL database."
        return [Error(f"the database {alias!r} is not PostgreSQL", hint=hint, id="fairq.E005")]
    return []


@register(Tags.database)
def check_schema(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the version, with `--database`. Only a warning, because `migrate`, which helps, also runs checks.
    If fairq is not installed, Django itself reports unapplied migrations.
    """
    alias = database.alias()
    if alias not in (databases or ()) or connections[alias].vendor != "postgresql":
        return []
    conn = connections[alias]
    try:
        conn.ensure_connection()
        install.check_version(conn.connection)
    except (DatabaseError, install.SchemaMissing):  # Django reports these itself
        return []
    except install.InstallError as exc:
        return [Warning(str(exc), hint=exc.hint, id="fairq.W001")]
    return []
