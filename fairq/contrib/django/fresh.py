"""No task meets a connection that is lost, nor what another one left behind.

Django looks after its connections at both ends of a request; a worker has none. Around each task the same is
done, and one thing more: a connection that was kept (CONN_MAX_AGE) is asked whether it is still there. A
request that meets a lost one is repeated by whoever sent it; a task would have lost an attempt.

`middleware` does it around the handlers of an app. The functions are about the connections of the calling
thread. One in `atomic()` is left alone: it is a test's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections, reset_queries

from fairq.context import Context

__all__ = ["close_obsolete", "close_stale", "middleware"]


def _around(ctx: Context, call_next: Callable[[], Any]) -> Any:
    close_stale()
    try:
        return call_next()
    finally:
        close_obsolete()


async def _around_async(ctx: Context, call_next: Callable[[], Any]) -> Any:
    """The ORM of a coroutine works in a thread; each attempt has one of its own, as a request has in ASGI, so
    coroutines do not wait for each other's queries.
    """
    async with ThreadSensitiveContext():
        try:
            return await call_next()
        finally:
            await sync_to_async(connections.close_all)()


middleware = (_around, _around_async)


def close_stale() -> None:
    """Before a task."""
    close_obsolete()
    for conn in _open():
        if not conn.is_usable():
            conn.close()


def close_obsolete() -> None:
    """After one: what is broken or has been kept for long enough. And what DEBUG notes of each query, which a
    request forgets when it begins.
    """
    reset_queries()
    for conn in _open():
        conn.close_if_unusable_or_obsolete()


def _open() -> Iterator[Any]:
    for conn in connections.all(initialized_only=True):
        if conn.connection is not None and not conn.in_atomic_block:
            yield conn
