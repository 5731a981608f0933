"""Handlers that write down when each of their runs began and ended: see test_chaos.py.

What they write survives any fault but their own death: they try again until the database is back.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg

import fairq

app = fairq.App()
DSN = os.environ["FAIRQ_DSN"]
PATIENCE_SECONDS = 120.0

_own = threading.local()


def _persist(step: Callable[[psycopg.Connection[Any]], object]) -> None:
    """Do it in a transaction, however often the connection breaks or cannot be had."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            conn = getattr(_own, "conn", None)
            if conn is None or conn.closed:
                conn = _own.conn = psycopg.connect(DSN, application_name="handler", connect_timeout=5)
            with conn.transaction():
                step(conn)
                return
        except Exception as exc:
            if conn is not None:
                conn.close()
            if not fairq.is_retryable(exc) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _begin(ctx: fairq.Context, payload: dict[str, Any]) -> str:
    token, now = str(uuid.uuid4()), datetime.now(UTC)
    row = (
        token,
        ctx.id,
        ctx.attempt,
        ctx.kind,
        ctx.worker_id,
        os.getpid(),
        ctx.group_key,
        payload["key"],
        now,
    )
    query = "insert into runs values (%s, %s, %s, %s, %s, %s, %s, %s, %s) on conflict do nothing"
    _persist(lambda conn: conn.execute(query, row))
    return token


def _end(token: str) -> None:
    row = (datetime.now(UTC), token)
    _persist(lambda conn: conn.execute("update runs set ended_at = %s where token = %s", row))


@app.task
def works(payload: dict[str, Any], ctx: fairq.Context) -> None:
    token = _begin(ctx, payload)
    time.sleep(random.random() * 0.03)
    _end(token)


@app.task
async def awaits(payload: dict[str, Any], ctx: fairq.Context) -> None:
    token = await asyncio.to_thread(_begin, ctx, payload)
    await asyncio.sleep(random.random() * payload["seconds"])
    await asyncio.to_thread(_end, token)


@app.task
def settles(payload: dict[str, Any], ctx: fairq.Context) -> None:
    """Its effect and its end are one transaction."""
    token = _begin(ctx, payload)

    def both(conn: psycopg.Connection[Any]) -> None:
        conn.execute("insert into effects values (%s, %s)", (ctx.id, ctx.attempt))
        conn.execute("update runs set ended_at = %s where token = %s", (datetime.now(UTC), token))
        ctx.finish_in(conn)

    try:
        _persist(both)
    except fairq.NotHeld:
        # Others have it; or this very transaction committed, and the answer was lost.
        _end(token)
        raise
