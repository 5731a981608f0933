"""LISTEN on a connection of its own. It only shortens waits; without it the worker polls.

A pooler in transaction mode accepts LISTEN and delivers nothing, or to somebody else. So the worker first
listens on a channel of its own, notifies it from another connection, and does without LISTEN if it does not
hear that.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from fairq.dsn import describe, resolve
from fairq.queries import client
from fairq.worker import log, plan
from fairq.worker.connect import FAILURES, answering, conninfo, explain

if TYPE_CHECKING:
    from fairq.worker.node import Node

CHANNEL: Final = "fairq"
# After this long without a notice, check that the server still answers.
ASK_SECONDS: Final = 30.0
TEST_SECONDS: Final = 3.0
CLOSE_SECONDS: Final = 0.5
# A pooler mostly hands out the session that was used last.
UNLISTEN_TRIES: Final = 20

Conn = psycopg.AsyncConnection[tuple[object, ...]]


class Listener:
    """Wakes the worker at each notice about one of its queues, and at each new connection. On the loop."""

    def __init__(self, node: Node) -> None:
        settings = node.settings
        dsn = resolve(settings.listen_dsn) if settings.listen_dsn else node.dsn
        self._node = node
        self._conninfo = conninfo(dsn, "fairq listen")
        # Set once it is known whether notices arrive.
        self._settled = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="fairq-listen")

    async def settle(self) -> None:
        # If it takes longer, the listener goes on trying and the worker polls.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), 2 * TEST_SECONDS)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_SECONDS)

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
                        # Connections of this DSN are sessions, so prepared statements work.
                        if not settings.listen_dsn:
                            node.database.prepare_statements()
                    with answering(conn, patience):
                        await conn.execute(sql.SQL("listen {}").format(sql.Identifier(CHANNEL)))
                    failures = 0
                    waking.is_listening = True
                    self._settled.set()
                    node.database.answered()
                    # Look for tasks that were announced while nobody listened.
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
                log.warning("listener_lost", "LISTEN failed; polling meanwhile: %s", explain(exc))
            finally:
                waking.is_listening = False
            await asyncio.sleep(plan.retry_delay(failures, *pauses))

    async def _hears(self, conn: Conn) -> bool:
        """Whether a notice arrives. If not, undo LISTEN, or the next user of that session of the pooler would
        get our notices.
        """
        channel = f"fairq_test_{secrets.token_hex(8)}"
        async with conn.transaction():
            await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
            session = await client.backend_pid(conn)
        async with await _connect(conninfo(self._node.dsn, "fairq listen test")) as bell:
            await bell.execute("select pg_catalog.pg_notify(%s, '')", [channel])
        if await _comes(conn, channel):
            await conn.execute("unlisten *")
            return True
        log.warning(
            "listen_silent",
            "LISTEN on %s is accepted, but no notification arrives, as behind a pooler in transaction mode;"
            " the worker polls. Name a direct connection with --listen-dsn, or pass --no-listen",
            describe(self._conninfo),
        )
        for _ in range(UNLISTEN_TRIES):
            async with conn.transaction():
                if await client.backend_pid(conn) == session:
                    await conn.execute(sql.SQL("unlisten {}").format(sql.Identifier(channel)))
                    break
        return False


async def _comes(conn: Conn, channel: str) -> bool:
    """Whether a notice comes on that channel. Others may be for a worker that had the same session of a
    pooler a moment ago.
    """
    async with contextlib.aclosing(conn.notifies(timeout=TEST_SECONDS)) as notices:
        async for notice in notices:
            if notice.channel == channel:
                return True
    return False


async def _connect(conninfo: str) -> Conn:
    return await psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
