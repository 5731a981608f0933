"""Ways to say whose a task is: `OPTIONS={"GROUP": "fairq.contrib.django.groups.current"}`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fairq.contrib.django import database

__all__ = ["current", "schema", "use"]

_current: ContextVar[str] = ContextVar("fairq_group", default="")


@contextlib.contextmanager
def use(group: str) -> Iterator[None]:
    """Tasks that are enqueued within are this tenant's: for a middleware that knows whose a request is."""
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)


def current(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The tenant of the `use()` that we are in; without one, enqueueing is refused."""
    return _current.get()


def schema(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The schema of django-tenants, and of others that give the connection a `schema_name`."""
    return str(database.connection().schema_name)
