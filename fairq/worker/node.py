"""One database that a worker serves: it registers there, takes one turn after the other, and signs off.

Tasks end where they came from. There is one node, or on Citus several, which share the handlers and the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from fairq import install
from fairq.errors import translate
from fairq.worker import log
from fairq.worker.config import limits
from fairq.worker.connect import FAILURES, is_worth_a_try
from fairq.worker.database import Database
from fairq.worker.ending import AFTER_SECONDS
from fairq.worker.held import tell_to_stop
from fairq.worker.keeper import Keeper
from fairq.worker.listen import Listener
from fairq.worker.membership import Membership
from fairq.worker.outbox import Outbox
from fairq.worker.turns import Turn, Turns, one_transaction
from fairq.worker.waking import Waking

if TYPE_CHECKING:
    from fairq.worker.engine import Engine

T = TypeVar("T")

# Handlers that were told to stop get this long to do so before their tasks are given back.
UNWIND_SECONDS: Final = 1.0
# Who is to end anyway gives up after so many tries to start: a wrong password stays wrong.
START_ATTEMPTS: Final = 5


class Node:
    """`name` is for the log, where there are several; the one that `is_near` is asked for tasks first."""

    def __init__(self, engine: Engine, dsn: str, name: str, is_near: bool) -> None:
        self.engine = engine
        self.settings = engine.settings
        self.limits = limits(engine.settings)
        self.dsn = dsn
        self.name = name
        self.held = engine.held
        self.ending = engine.ending
        self.rota = engine.rota
        self.database = Database(dsn, engine.settings, name, lambda: engine.is_last(self))
        self.waking = Waking(engine.settings)
        self.outbox = Outbox(self.waking.wake.set)
        self.membership = Membership(self)
        self.turns = Turns(self, is_near)
        self.keeper: Keeper | None = None
        self._listener: Listener | None = None

    def lead_to(self, dsn: str, name: str) -> None:
        """It is somewhere else now."""
        self.dsn, self.name = dsn, name
        self.database.lead_to(dsn, name)

    def hurry(self) -> None:
        """The worker is told to end."""
        if self.ending.at is not None:
            self.database.hurry(self.ending.at + AFTER_SECONDS)
        self.waking.wake.set()

    def answered(self) -> None:
        """The database, to the keeper."""
        self.database.answered()
        self.waking.wake.set()

    async def run(self) -> None:
        try:
            if await self._start():
                await self._work()
                await self._wind_down()
        except BaseException:
            if self.keeper is None:  # it never worked
                raise
            # Somebody ends us on his own loop, the database failed too often, or this is a mistake of ours:
            # give back what we can, quickly.
            self.ending.at_once()
            ending = asyncio.create_task(self._wind_down(), name="fairq-end")
            try:
                with contextlib.suppress(Exception):
                    await asyncio.shield(ending)
            finally:  # cancelled once more: nothing of ours goes on behind the caller's back
                ending.cancel()
                await asyncio.wait([ending])
            raise

    async def close(self) -> None:
        self.rota.places.remove(self.turns.place)
        if self.keeper is not None:
            self.keeper.stop()
        if self._listener is not None:
            await self._listener.close()
        if self.keeper is not None:
            await asyncio.to_thread(self.keeper.join)
        await self.database.disconnect()

    # --- The start ---

    async def _start(self) -> bool:
        """Connect, look at the database, register, listen. False: told to stop before that succeeded."""
        if not await self.answer(self._register):
            return False
        self.keeper = Keeper(self)
        self.keeper.start()
        if self.settings.listen and self.settings.mode == "forever":
            self._listener = Listener(self)
            await self._listener.settle()
        self.engine.registered(self)
        return True

    async def _register(self, conn: psycopg.AsyncConnection[Any]) -> bool:
        await install.acheck_version(conn)
        await self.membership.check_caps(conn)
        await self.membership.register(conn)
        return True

    async def answer(self, ask: Callable[[psycopg.AsyncConnection[Any]], Awaitable[T]]) -> T | None:
        """What the database says, as soon as it can be had. None: told to stop before that."""
        while not self.ending.level:
            if not await self._pause_over():
                continue
            try:
                async with self.database.answering() as conn:
                    answer = await ask(conn)
                self.database.succeeded()
                return answer
            except FAILURES as exc:
                if isinstance(exc, psycopg.Error) and exc.sqlstate and not is_worth_a_try(exc):
                    raise translate(exc) from exc
                self.database.failed(
                    exc, "to start", START_ATTEMPTS if self.settings.mode != "forever" else 0
                )
                await self.database.disconnect()
        return None

    # --- The work ---

    async def _pause_over(self) -> bool:
        """Whether the database may be tried now; else wait, until that is over or we are told to stop."""
        now = time.monotonic()
        pause = self.database.pause(now)
        if self.ending.level:  # no time to leave anybody alone
            pause = min(self.database.not_before - now, 1.0)
        if pause > 0:
            await self.waking.sleep(pause)
        elif not self.ending.level:
            self.database.probe(now)
        return pause <= 0

    async def _work(self) -> None:
        while not self.ending.level:
            if not await self._pause_over():
                continue
            if not self.membership.is_in_order:
                await self._put_in_order()
            elif turn := self.turns.next():
                await self.turns.take(turn)
            elif self.engine.is_done():
                return
            else:
                await self.waking.sleep(self.turns.until_next())

    async def _put_in_order(self) -> None:
        try:
            async with self.database.answering() as conn:
                await self.membership.put_in_order(conn)
        except FAILURES as exc:
            await self.turns.failed(exc, Turn())
        else:
            self.database.succeeded()

    # --- The end ---

    async def _wind_down(self) -> None:
        """Let handlers end, give back the rest, write everything, sign off."""
        held, outbox = self.held, self.outbox
        self.hurry()
        held.release_waiting()
        while held.taken and not self.ending.is_past_grace:
            await self._flush_some()
        if held.taken:
            for entry in held.entries:
                tell_to_stop(entry, "shutdown")
            until = time.monotonic() + UNWIND_SECONDS
            while held.taken and time.monotonic() < until:
                await self.waking.sleep(0.02)
        held.release_running()
        self.database.hurry((self.ending.at or time.monotonic()) + AFTER_SECONDS)
        while outbox.unwritten and self.database.has_time():
            await self._flush_some()
        if outbox.unwritten:
            log.error(
                "unwritten",
                "the database is away: %d ended tasks could not be written and will run again",
                len(outbox.ends),
            )
        elif self.membership.worker_id is not None:
            with contextlib.suppress(*FAILURES):
                async with (
                    self.database.answering() as conn,
                    one_transaction(conn, self.database.sets_terms),
                ):
                    await self.membership.retire(conn)

    async def _flush_some(self) -> None:
        """A turn without a pop if there is something to write, else a short sleep."""
        now = time.monotonic()
        turn = self.turns.to_write()
        if turn:
            pause = min(self.database.not_before - now, 0.5)
            if pause > 0:
                await self.waking.sleep(pause)
            else:
                await self.turns.take(turn)
        elif self.outbox.checks:
            await self.waking.sleep(0.05)
        else:
            pause = 0.5 if self.ending.at is None else self.ending.at - now
            await self.waking.sleep(min(max(pause, 0.001), 0.5))
