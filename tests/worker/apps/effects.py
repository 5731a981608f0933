"""Handlers for worker processes; the table `effects` counts what they do."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import psycopg

import fairq

app = fairq.App()
DSN = os.environ["FAIRQ_DSN"]


def note(what: str, ctx: fairq.Context) -> None:
    with psycopg.connect(DSN, autocommit=True) as conn:
        conn.execute(
            "insert into effects (what, task_id, attempt, pid, worker_id) values (%s, %s, %s, %s, %s)",
            (what, ctx.id, ctx.attempt, os.getpid(), ctx.worker_id),
        )


@app.task
async def nothing(payload: Any) -> None:
    pass


@app.task
def count(payload: Any, ctx: fairq.Context) -> None:
    note("ran", ctx)


def connection() -> psycopg.Connection[Any]:
    """This thread's connection, or a new one if it does not answer."""
    conn: psycopg.Connection[Any] | None = getattr(kept, "conn", None)
    with contextlib.suppress(psycopg.Error):
        if conn is not None:
            conn.execute("select")
            return conn
    kept.conn = conn = psycopg.connect(DSN, autocommit=True, prepare_threshold=None)
    return conn


kept = threading.local()


@app.task
def once(payload: Any, ctx: fairq.Context) -> None:
    """Its effect and its end are one transaction."""
    conn = connection()
    with conn.transaction():
        conn.execute(
            "insert into effects (what, task_id, attempt, pid, worker_id) values ('once', %s, %s, %s, %s)",
            (ctx.id, ctx.attempt, os.getpid(), ctx.worker_id),
        )
        ctx.finish_in(conn)


@app.task
async def waits(payload: float, ctx: fairq.Context) -> None:
    await asyncio.to_thread(note, "began", ctx)
    await asyncio.sleep(payload)
    await asyncio.to_thread(note, "ended", ctx)


@app.task
def sleeps(payload: float, ctx: fairq.Context) -> None:
    note("began", ctx)
    time.sleep(payload)
    note("ended", ctx)


@app.task
async def blocks(payload: float, ctx: fairq.Context) -> None:
    """Starves the loop."""
    note("began", ctx)
    time.sleep(payload)  # noqa: ASYNC251


@app.task
async def blocks_until(payload: str, ctx: fairq.Context) -> None:
    """Starves the loop until that file is there."""
    note("began", ctx)
    while not os.path.exists(payload):  # noqa: ASYNC240
        time.sleep(0.01)  # noqa: ASYNC251


@app.task
async def waits_for_a_thread(payload: float, ctx: fairq.Context) -> None:
    """Its coroutine can be cancelled, but the call that it awaits cannot."""
    await asyncio.to_thread(note, "began", ctx)
    await asyncio.to_thread(time.sleep, payload)


@app.task
async def starts_a_thread(payload: float) -> None:
    """Python waits for such threads when a process ends."""
    threading.Thread(target=time.sleep, args=(payload,), name="of-a-handler").start()


@app.task
def forks(payload: Any, ctx: fairq.Context) -> None:
    """Ends a child as anybody would."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    note(f"ended with {child.exitcode}", ctx)
    child.kill()


@app.task
def has_a_child(payload: int, ctx: fairq.Context) -> None:
    """Which ends as in a program of its own."""
    if not (child := os.fork()):
        return sys.exit(payload) if payload else None
    note(f"ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", ctx)
    return None


@app.task
async def has_a_child_on_the_loop(payload: int, ctx: fairq.Context) -> None:
    has_a_child(payload, ctx)


@app.task
async def crashes(payload: Any, ctx: fairq.Context) -> None:
    """Kills its process, at the first attempt."""
    note("ran", ctx)
    if ctx.attempt == 1:
        os._exit(9)


if os.environ.get("TERM_AT_THE_END"):
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
