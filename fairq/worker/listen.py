"""LISTEN on a connection of its own. It only shortens the wait: without it the worker polls.

A pooler that hands out connections by transaction accepts LISTEN and delivers nothing, or to somebody else.
So the worker first listens on a channel that nobody else has, rings it from another connection, and does
without LISTEN when it does not hear it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

import psycopg
from psycopg import sql

from fairq.dsn import describe
from fairq.worker import log, plan
from fairq.worker.connect import FAILURES, explain, hang_up

CHANNEL: Final = "fairq"
# Who has heard nothing for so long asks whether anybody is there.
ASK_SECONDS: Final = 30.0
TEST_SECONDS: Final = 3.0
CLOSE_SECONDS: Final = 0.5
# A pooler hands out the session used last first, mostly.
UNLISTEN_TRIES: Final = 20

Conn = psycopg.AsyncConnection[tuple[object, ...]]


@dataclass(eq=False)
class Listener:
    """On the loop, `rung` is called for each notice about one of our queues, and, as `answered`, after each
    new connection; `proven` once, when a notice from `bell` arrived: both lead to sessions.
    """

    conninfo: str = field(repr=False)
    bell: str = field(repr=False)
    queues: Collection[str]
    rung: Callable[[], None]
    _: KW_ONLY
    answered: Callable[[], None]
    proven: Callable[[], None]
    pauses: tuple[float, float]
    """The first one after a failure, and the longest."""
    patience: float
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether it is known if notices arrive."""
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="fairq-listen")

    @property
    def is_listening(self) -> bool:
        return self.connected.is_set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)  # others have to be closed, too
            self._task = None

    async def _run(self) -> None:
        failures, proven = 0, False
        while True:
            try:
                async with await _connect(self.conninfo) as conn:
                    if not proven:
                        with self._limited(conn, 2 * TEST_SECONDS):
                            proven = await self._hears(conn)
                        if not proven:
                            self.settled.set()
                            return
                        self.proven()
                    with self._limited(conn):
                        await conn.execute(sql.SQL("listen {}").format(sql.Identifier(CHANNEL)))
                    failures = 0
                    self.connected.set()
                    self.settled.set()
                    self.answered()
                    # What was announced while nobody listened is found by looking.
                    self.rung()
                    while True:
                        async for notice in conn.notifies(timeout=ASK_SECONDS):
                            if notice.payload in self.queues:
                                self.rung()
                        # A server that hangs is as silent as an idle queue.
                        with self._limited(conn):
                            await conn.execute("select")
            except FAILURES as exc:
                failures += 1
                log.warning("listener_lost", "LISTEN is interrupted, polling meanwhile: %s", explain(exc))
            finally:
                self.connected.clear()
            await asyncio.sleep(plan.retry_delay(failures, *self.pauses))

    @contextlib.contextmanager
    def _limited(self, conn: Conn, more: float = 0.0) -> Iterator[None]:
        """Within, who waits in vain for an answer gets an error."""
        timer = asyncio.get_running_loop().call_later(self.patience + more, hang_up, conn)
        try:
            yield
        finally:
            timer.cancel()

    async def _hears(self, conn: Conn) -> bool:
        """Whether a notice arrives. If not, LISTEN is taken back: whoever had that session of the pooler next
        would be sent what is not his.
        """
        channel = f"fairq_test_{secrets.token_hex(8)}"
        async with conn.transaction():
            await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
            session = await _session(conn)
        async with await _connect(self.bell) as bell:
            await bell.execute("select pg_catalog.pg_notify(%s, '')", [channel])
        if [notice async for notice in conn.notifies(timeout=TEST_SECONDS, stop_after=1)]:
            await conn.execute("unlisten *")
            return True
        log.warning(
            "listen_silent",
            "LISTEN on %s is accepted but hears nothing, as behind a pooler that hands out connections by"
            " transaction; the worker polls."
            " Name a way around the pooler with --listen-dsn, or say --no-listen",
            describe(self.conninfo),
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
