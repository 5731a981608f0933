"""LISTEN on a connection of its own. It only shortens the wait: without it the worker polls.

A pooler that hands out connections by transaction accepts LISTEN and never delivers anything. So the worker
rings its own bell at the start, on a channel that nobody else has, and does without LISTEN when it does not
hear it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Final

import psycopg
from psycopg import sql

from fairq.worker import plan
from fairq.worker.connect import FAILURES, explain

__all__ = ["CHANNEL", "TEST_SECONDS", "Listener"]

log = logging.getLogger("fairq.worker")

CHANNEL: Final = "fairq"
TEST_SECONDS: Final = 3.0


class Listener:
    """On the loop, `rung` is called for each notice about one of our queues, and, as `answered`, after each
    new connection.
    """

    def __init__(
        self,
        conninfo: str,
        queues: Collection[str],
        rung: Callable[[], None],
        *,
        answered: Callable[[], None],
        first_pause: float,
        longest_pause: float,
    ) -> None:
        self.test_channel = f"fairq_test_{secrets.token_hex(8)}"
        self.connected = asyncio.Event()
        self.heard = asyncio.Event()
        self._conninfo = conninfo
        self._queues = frozenset(queues)
        self._rung = rung
        self._answered = answered
        self._pauses = (first_pause, longest_pause)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="fairq-listen")

    @property
    def is_listening(self) -> bool:
        return self.connected.is_set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])  # whatever became of it: others have to be closed, too
            self._task = None

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._conninfo, autocommit=True, prepare_threshold=None
                ) as conn:
                    for channel in (CHANNEL, self.test_channel):
                        await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
                    failures = 0
                    self.connected.set()
                    self._answered()
                    # What was announced while nobody listened is found by looking.
                    self._rung()
                    await self._hear(conn)
            except FAILURES as exc:
                failures += 1
                log.warning(
                    "LISTEN is interrupted, polling meanwhile: %s",
                    explain(exc),
                    extra={"action": "listener_lost"},
                )
            finally:
                self.connected.clear()
            await asyncio.sleep(plan.retry_delay(failures, *self._pauses))

    async def _hear(self, conn: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        async for notice in conn.notifies():
            if notice.channel == self.test_channel:
                self.heard.set()
            elif notice.payload in self._queues:
                self._rung()
