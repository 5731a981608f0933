"""LISTEN on a connection of its own. It only shortens the wait: without it the worker polls.

A pooler that hands out connections by transaction accepts LISTEN and delivers nothing, or to somebody else.
So the worker first listens on a channel that nobody else has, rings it from another connection, and does
without LISTEN when it does not hear it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from fairq.dsn import describe, resolve
from fairq.worker import log, plan
from fairq.worker.connect import FAILURES, answering, conninfo, explain

if TYPE_CHECKING:
    from fairq.worker.node import Node

CHANNEL: Final = "fairq"
# Who has heard nothing for so long asks whether anybody is there.
ASK_SECONDS: Final = 30.0
TEST_SECONDS: Final = 3.0
CLOSE_SECONDS: Final = 0.5
# A pooler hands out the session used last first, mostly.
UNLISTEN_TRIES: Final = 20

Conn = psycopg.AsyncConnection[tuple[object, ...]]


class Listener:
    """On the loop. Each notice about one of our queues rings, and so does each new connection."""

    def __init__(self, node: Node) -> None:
        settings = node.settings
        dsn = resolve(settings.listen_dsn) if settings.listen_dsn else node.dsn
        self._node = node
        self._conninfo = conninfo(dsn, "fairq listen")
        # Whether it is known if notices arrive.
        self._settled = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="fairq-listen")

    async def settle(self) -> None:
        # Where that takes longer it goes on trying; meanwhile the worker polls.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), 2 * TEST_SECONDS)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_SECONDS)  # others have to be closed, too

    async def _run(self) -> None:
        node, settings, waking = self._node, self._node.settings, self._node.waking
        pauses = settings.db_retry_initial_ms / 1000, settings.db_retry_max_ms / 1000
        patience, failures, proven = node.limits.patience, 0, False
        while True:
            try:
                async with await _connect(self._conninfo) as conn:
                    if not proven:
                        with answering(conn, patience + 2 * TEST_SECONDS):
                            proven = await self._hears(conn)
                        if not proven:
                            self._settled.set()
                            return
                        # A DSN that leads to sessions, not to a pooler by transaction, is good for prepared
                        # statements.
                        if not settings.listen_dsn:
                            node.database.prepare_statements()
                    with answering(conn, patience):
                        await conn.execute(sql.SQL("listen {}").format(sql.Identifier(CHANNEL)))
                    failures = 0
                    waking.is_listening = True
                    self._settled.set()
                    node.database.answered()
                    # What was announced while nobody listened is found by looking.
                    waking.rung()
                    while True:
                        async for notice in conn.notifies(timeout=ASK_SECONDS):
                            if notice.payload in node.engine.queues:
                                waking.rung()
                        # A server that hangs is as silent as an idle queue.
                        with answering(conn, patience):
                            await conn.execute("select")
            except FAILURES as exc:
                failures += 1
                log.warning("listener_lost", "LISTEN is interrupted, polling meanwhile: %s", explain(exc))
            finally:
                waking.is_listening = False
            await asyncio.sleep(plan.retry_delay(failures, *pauses))

    async def _hears(self, conn: Conn) -> bool:
        """Whether a notice arrives. If not, LISTEN is taken back: whoever had that session of the pooler next
        would be sent what is not his.
        """
        channel = f"fairq_test_{secrets.token_hex(8)}"
        async with conn.transaction():
            await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
            session = await _session(conn)
        async with await _connect(conninfo(self._node.dsn, "fairq listen test")) as bell:
            await bell.execute("select pg_catalog.pg_notify(%s, '')", [channel])
        if [notice async for notice in conn.notifies(timeout=TEST_SECONDS, stop_after=1)]:
            await conn.execute("unlisten *")
            return True
        log.warning(
            "listen_silent",
            "LISTEN on %s is accepted but hears nothing, as behind a pooler that hands out connections by"
            " transaction; the worker polls."
            " Name a way around the pooler with --listen-dsn, or say --no-listen",
            describe(self._conninfo),
        )
        for _ in range(UNLISTEN_TRIES):
            async with conn.transaction():
                if await _session(conn) == session:
                    await conn.execute(sql.SQL("unlisten {}").format(sql.Identifier(channel)))
                    break
        return False


async def _connect(conninfo: str) -> Conn:
    return await psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)


async def _session(conn: Conn) -> Any:
    return await (await conn.execute("select pg_catalog.pg_backend_pid()")).fetchone()
