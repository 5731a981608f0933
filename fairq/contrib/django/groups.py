"""Functions that choose a task's group: `OPTIONS={"GROUP": "fairq.contrib.django.groups.current"}`.

Such a function may have an attribute `inside`, a context manager of the group, in which workers run the
tasks. So tasks that Bob's tasks enqueue are Bob's.
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
    """Tasks enqueued inside belong to this group; for a middleware that knows the request's tenant."""
    before = _current.get()
    _current.set(group)
    try:
        yield
    finally:
        _current.set(before)  # not a token, because a worker leaves a coroutine in another context


def current(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The group of the surrounding `use()`; without one, enqueueing is refused."""
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
    """The current schema of django-tenants, or of any package that sets the connection's `schema_name`."""
    return str(database.connection().schema_name)


current.inside = use  # type: ignore[attr-defined]
schema.inside = _in_schema  # type: ignore[attr-defined]
