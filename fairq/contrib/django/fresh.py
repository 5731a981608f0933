"""Checks Django's connections around each task, so that none meets a lost one.

Django does so around each request, but a worker has no requests. `middleware` does the same around the
handlers of an app, and also checks whether a kept connection (CONN_MAX_AGE), or one of a pool, still works: a
user repeats a failed request, but a task would lose an attempt.

The functions work on the connections of the calling thread, except those in `atomic()`, which are a test's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections, reset_queries

from fairq.context import Context

__all__ = ["close_obsolete", "close_stale", "let_pools_check", "middleware"]


def _around(ctx: Context, call_next: Callable[[], Any]) -> Any:
    let_pools_check()
    close_stale()
    try:
        return call_next()
    finally:
        close_obsolete()


async def _around_async(ctx: Context, call_next: Callable[[], Any]) -> Any:
    """A coroutine's ORM works in a thread. As a request in ASGI, each attempt has its own, so coroutines do
    not wait for each other's queries.
    """
    let_pools_check()
    async with ThreadSensitiveContext():
        try:
            return await call_next()
        finally:
            await sync_to_async(connections.close_all)()


middleware = (_around, _around_async)


@functools.cache
def let_pools_check() -> None:
    """Let the pools of this process check each connection before they hand it out: the same query that
    `close_stale` sends where there is no pool.
    """
    for alias in connections:
        settings = connections.settings[alias]
        if settings["OPTIONS"].get("pool"):
            settings["CONN_HEALTH_CHECKS"] = True


def close_stale() -> None:
    """Before a task: close connections that do not work."""
    close_obsolete()
    for conn in _open():
        if not conn.is_usable():
            conn.close()


def close_obsolete() -> None:
    """After a task: close connections that are broken or have been kept long enough, and forget the queries
    that DEBUG records, as a request does when it begins.
    """
    reset_queries()
    for conn in _open():
        conn.close_if_unusable_or_obsolete()


def _open() -> Iterator[Any]:
    for conn in connections.all(initialized_only=True):
        if conn.connection is not None and not conn.in_atomic_block:
            yield conn
