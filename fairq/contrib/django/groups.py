"""Ways to say whose a task is: `OPTIONS={"GROUP": "fairq.contrib.django.groups.current"}`.

A function that GROUP names may have an attribute `inside`: a context manager of the tenant, in which workers
run the tasks of a backend with that GROUP. So what a task of Bob's enqueues is Bob's.
"""

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
    before = _current.get()
    _current.set(group)
    try:
        yield
    finally:
        _current.set(before)  # not by a token: a coroutine's worker leaves in another context


def current(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The tenant of the `use()` that we are in; without one, enqueueing is refused."""
    return _current.get()


@contextlib.contextmanager
def _in_schema(name: str) -> Iterator[None]:
    conn = database.connection()
    before = conn.schema_name
    conn.set_schema(name)
    try:
        yield
    finally:
        conn.set_schema(before)


def schema(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The schema of django-tenants, and of others that give the connection a `schema_name`."""
    return str(database.connection().schema_name)


current.inside = use  # type: ignore[attr-defined]
schema.inside = _in_schema  # type: ignore[attr-defined]
