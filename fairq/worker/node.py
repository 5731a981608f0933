"""One database that a worker serves: it registers there, takes turn after turn, and retires.

There is one node or, on Citus, several, which share the handlers. A task ends on the node it came from.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from fairq import install
from fairq.errors import ConfigurationError, translate
from fairq.queries import workers
from fairq.worker import log
from fairq.worker.config import limits
from fairq.worker.connect import FAILURES, is_worth_a_try
from fairq.worker.database import Database
from fairq.worker.ending import AFTER_SECONDS
from fairq.worker.held import tell_to_stop
from fairq.worker.keeper import Keeper
from fairq.worker.listen import Listener
from fairq.worker.outbox import Outbox
from fairq.worker.turns import Turn, Turns, one_transaction
from fairq.worker.waking import Waking

if TYPE_CHECKING:
    from fairq.worker.engine import Engine

T = TypeVar("T")

# How long handlers that were told to stop may take before their tasks are given back.
UNWIND_SECONDS: Final = 1.0
# Modes once and drain give up after this many tries to start, because a wrong password stays wrong.
START_ATTEMPTS: Final = 5
# How long to wait for the keeper, which may be in the middle of a call.
CLOSE_SECONDS: Final = 0.5
# When to look for tasks that a broken connection handed out and that never arrived.
RECONCILE_AFTER: Final = (0.0, 10.0, 60.0)

Conn = psycopg.AsyncConnection[Any]


class Node:
    """`name` is for the log, if there are several. The node that `is_near` is asked for tasks first."""

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
        self.worker_id: int | None = None
        """Our id in the database. None: not registered yet, retired, or considered lost."""
        self.reconcile_at: list[float] = []
        self.turns = Turns(self, is_near)
        self.keeper: Keeper | None = None
        self._listener: Listener | None = None

    def lead_to(self, dsn: str, name: str) -> None:
        """The node has moved."""
        self.dsn, self.name = dsn, name
        self.database.lead_to(dsn, name)

    def hurry(self) -> None:
        """The worker is ending."""
        if self.ending.at is not None:
            self.database.hurry(self.ending.at + AFTER_SECONDS)
        self.waking.wake.set()

    def answered(self) -> None:
        """The keeper got an answer of the database."""
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
            # The caller cancelled us, the database failed too often, or this is a bug: give back what we can.
            self.ending.at_once()
            ending = asyncio.create_task(self._wind_down(), name="fairq-end")
            try:
                with contextlib.suppress(Exception):
                    await asyncio.shield(ending)
            finally:  # after a second cancellation, too, leave nothing running
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.keeper.ended.wait(), CLOSE_SECONDS)
        await self.database.disconnect()

    # --- The start ---

    async def _start(self) -> bool:
        """Connect, check the database, register, listen. False: told to stop before that succeeded."""
        if not await self.answer(self._first_look):
            return False
        worker_id = self.worker_id
        assert worker_id is not None
        self.keeper = Keeper(self)  # from here on the lease counts
        self.keeper.start()
        if self.settings.listen and self.settings.mode == "forever":
            self._listener = Listener(self)
            await self._listener.settle()
        self.engine.registered(self, worker_id)
        return True

    async def _first_look(self, conn: Conn) -> bool:
        await install.acheck_version(conn)
        cap = await workers.cluster_cap(conn) if self.settings.prefetch else None
        if cap is not None:
            raise ConfigurationError(
                f"prefetch does not work with the cluster cap of {cap}: claimed tasks would take up places"
                " without running",
                "Leave out --prefetch and --claim-lease, or remove the cap with fairq.configure_cluster().",
            )
        await self._register(conn)
        return True

    async def answer(self, ask: Callable[[Conn], Awaitable[T]]) -> T | None:
        """The database's answer, with retries. None: told to stop before there was one."""
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
        """Whether the database may be tried now; if not, wait for that, or for being told to stop."""
        now = time.monotonic()
        pause = self.database.pause(now)
        if self.ending.level:  # there is no time for long pauses
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
            if not self.is_in_order:
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
                await self._register(conn)
                if self._ought_to_reconcile():
                    await self._reconcile(conn)
                    self.reconcile_at.pop(0)
        except FAILURES as exc:
            await self.turns.failed(exc, Turn())
        else:
            self.database.succeeded()

    # --- What the database knows of us ---

    @property
    def is_in_order(self) -> bool:
        return self.worker_id is not None and not self._ought_to_reconcile()

    async def _register(self, conn: Conn) -> None:
        if self.worker_id is None:
            settings, engine = self.settings, self.engine
            self.worker_id = await workers.register_worker(
                conn,
                name=settings.name or f"{socket.gethostname()}:{os.getpid()}"[:200],
                queues=engine.queues,
                slots=engine.slots,
                lease=timedelta(seconds=settings.lease),
                kinds=json.dumps({task.kind: task.options.get("max_attempts") for task in engine.app}),
            )
            log.debug("registered", "registered as worker %d", self.worker_id, worker=self.worker_id)

    def lost(self, worker_id: int) -> None:
        """The database considers that worker lost, and its tasks are with others."""
        if worker_id != self.worker_id:
            return
        log.warning(
            "worker_lost",
            "worker %d is considered lost, and others get its tasks; registering again",
            worker_id,
            worker=worker_id,
        )
        self.worker_id = None
        self.held.drop_claims(self.outbox)
        self.waking.rung()

    def broke_off(self) -> None:
        """A connection broke during a pop: look in the database whether that was done."""
        now = time.monotonic()
        self.reconcile_at = sorted([*self.reconcile_at, *(now + each for each in RECONCILE_AFTER)])

    def _ought_to_reconcile(self) -> bool:
        return bool(self.reconcile_at) and self.reconcile_at[0] <= time.monotonic()

    async def _reconcile(self, conn: Conn) -> None:
        assert self.worker_id is not None
        held = self.held
        known = held.known(self.outbox)
        rows = await workers.tasks_of_worker(conn, worker_id=self.worker_id)
        strange = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) not in known]
        if strange:
            log.warning(
                "reconciled",
                "giving back %d tasks that were handed out when the connection broke",
                len(strange),
            )
            ids, attempts = zip(*strange, strict=True)
            await workers.release_tasks(conn, worker_id=self.worker_id, ids=ids, attempts=attempts)
        # Starts whose answer never came, but that happened.
        running = {row.id for row in rows if row.state == "running"}
        for entry in [each for each in (*held.claimed, *held.solo.waiting) if each.row.id in running]:
            held.started(entry, ours=True)
        held.loopside.go()

    # --- The end ---

    async def _wind_down(self) -> None:
        """Let handlers end, give back the rest, write everything, retire."""
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
                "the database does not answer: %d ended tasks could not be written and will run again",
                len(outbox.ends),
            )
        elif self.worker_id is not None:
            with contextlib.suppress(*FAILURES):
                async with (
                    self.database.answering() as conn,
                    one_transaction(conn, self.database.sets_terms),
                ):
                    worker_id, self.worker_id = self.worker_id, None  # the keeper sends no more heartbeats
                    if worker_id is not None:
                        await workers.retire_worker(conn, worker_id=worker_id)

    async def _flush_some(self) -> None:
        """Take a turn without a pop if there is something to write, else sleep a little."""
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
