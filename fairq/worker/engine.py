"""The run of a worker: it starts, takes one turn after the other while handlers run, and ends.

What the parts are that it is made of, `fairq.worker` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import psycopg

from fairq import install
from fairq.app import App
from fairq.around import living, name_of
from fairq.errors import translate
from fairq.worker import log
from fairq.worker.config import Settings, banner, limits
from fairq.worker.connect import FAILURES, conninfo, is_worth_a_try
from fairq.worker.database import Database
from fairq.worker.ending import AFTER_SECONDS, Ending, LifespanFailed, Stuck
from fairq.worker.held import Held, tell_to_stop
from fairq.worker.keeper import Keeper
from fairq.worker.membership import Membership
from fairq.worker.turn import Turn, one_transaction
from fairq.worker.turns import Turns
from fairq.worker.waking import Waking

# What a worker tells about itself; the command line prints it.
Announce = Callable[[str], None]
T = TypeVar("T")

# Handlers that were told to stop get this long to do so before their tasks are given back.
UNWIND_SECONDS: Final = 1.0
PULSE_SECONDS: Final = 0.5
# Who is to end anyway gives up after so many tries to start: a wrong password stays wrong.
START_ATTEMPTS: Final = 5


class Engine:
    """The state of one run. Everything happens on the loop, but for `request_stop`."""

    def __init__(
        self,
        app: App,
        dsn: str,
        settings: Settings,
        queues: tuple[str, ...],
        announce: Announce,
        owns_process: bool,
    ) -> None:
        self.settings = settings
        self._lifespan = app.lifespan
        self._limit: asyncio.Timeout | None = None
        """Of the lifespan, while it starts or ends."""
        self.queues = queues
        self.dsn = dsn
        self.announce = announce
        self.loop = asyncio.get_running_loop()
        self.pulse = time.monotonic()
        slots = limits(settings).slots
        self.database = Database(dsn, settings)
        self.ending = Ending(settings.grace, owns_process=owns_process)
        self.waking = Waking(dsn, settings, queues, self.database)
        self.held = Held(
            app,
            slots,
            self.loop,
            hanging_after=settings.hanging_after,
            wake=self.waking.wake.set,
            stuck=self._stuck,
        )
        self.membership = Membership(app, settings, queues, slots, self.held)
        self.turns = Turns(settings, queues, self.database, self.held, self.membership, self.waking)
        self.keeper: Keeper | None = None

    def request_stop(self, level: int) -> None:
        """From any thread, and from a signal handler."""
        if self.ending.request(level):
            self._call(self._hurry)

    def _hurry(self) -> None:
        if self.ending.at is not None:
            self.database.hurry(self.ending.at + AFTER_SECONDS)
            if self._limit is not None and not self._limit.expired():
                left = max(self.ending.at - time.monotonic(), UNWIND_SECONDS)
                self._limit.reschedule(self.loop.time() + left)
        self.waking.wake.set()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody needs it any more
            self.loop.call_soon_threadsafe(function, *args)

    def _stuck(self) -> None:
        if self.ending.fatal is None:
            self.ending.fatal = Stuck(
                f"{self.held.overdue} handlers hang, and nothing else can run; the worker ends",
                "Handlers should look at ctx.cancelled, or wait with a timeout of their own.",
            )
            self.request_stop(2)

    # --- The run ---

    async def run(self) -> None:
        with self.ending.watched():
            pulse = asyncio.create_task(self._beat_pulse(), name="fairq-pulse")
            try:
                await self._live()
            finally:
                await self._close(pulse)
        if self.ending.fatal is not None:
            raise self.ending.fatal

    async def _live(self) -> None:
        """The run, and the app's lifespan around it."""
        manager = living(self._lifespan)
        try:
            self.held.state = await self._limited("start", manager.__aenter__())
        except LifespanFailed:
            if self.ending.level:  # it was to end anyway
                return
            raise
        try:
            await self._run()
        except BaseException as exc:
            if not await self._limited("end", manager.__aexit__(type(exc), exc, exc.__traceback__)):
                raise
        else:
            await self._limited("end", manager.__aexit__(None, None, None))

    async def _limited(self, what: str, step: Coroutine[Any, Any, T]) -> T:
        """A step of the lifespan. Once the worker is told to end it has until the grace time is over."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limit = limit
                self._hurry()
                return await step
        except Exception as exc:
            how = " within the grace time" if limit.expired() else f": {type(exc).__name__}: {exc}"
            error = LifespanFailed(f"the lifespan {name_of(self._lifespan)} did not {what}{how}")
            log.error("lifespan_failed", "%s", error, exc_info=exc)
            raise error from exc
        finally:
            self._limit = None

    async def _run(self) -> None:
        try:
            if await self._start():
                await self._work()
                await self._wind_down()
        except BaseException:
            # Somebody ends us on his own loop, the database failed too often, or this is a mistake of ours:
            # give back what we can, quickly.
            self.ending.at_once()
            ending = self.loop.create_task(self._wind_down(), name="fairq-end")
            try:
                with contextlib.suppress(Exception):
                    await asyncio.shield(ending)
            finally:  # cancelled once more: nothing of ours goes on behind the caller's back
                ending.cancel()
                await asyncio.wait([ending])
            raise

    async def _beat_pulse(self) -> None:
        while True:
            self.pulse = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)

    async def _start(self) -> bool:
        """Connect, look at the database, register, listen. False: told to stop before that succeeded."""
        while not self.ending.level:
            if not await self._pause_over():
                continue
            try:
                async with self.database.answering() as conn:
                    await install.acheck_version(conn)
                    await self.membership.check_caps(conn)
                    await self.membership.register(conn)
                self.database.succeeded()
                break
            except FAILURES as exc:
                if isinstance(exc, psycopg.Error) and exc.sqlstate and not is_worth_a_try(exc):
                    raise translate(exc) from exc
                self.database.failed(
                    exc, "to start", START_ATTEMPTS if self.settings.mode != "forever" else 0
                )
                await self.database.disconnect()
        else:
            return False
        self._start_keeper()
        await self.waking.start_listening()
        worker_id, listening = self.membership.worker_id, self.waking.is_listening
        assert worker_id is not None
        self.announce(banner(worker_id, self.queues, self.settings, self.turns.limits, listening=listening))
        return True

    def _start_keeper(self) -> None:
        self.keeper = Keeper(
            # Notices a dead peer, and is back on another connection, while the lease still holds.
            conninfo(self.dsn, "fairq keeper", min(60.0, self.settings.lease / 3)),
            self.settings,
            self.turns.limits,
            worker_ids=lambda: [id for id in (self.membership.worker_id,) if id is not None],
            held=lambda: list(self.held.by_id),
            circuit=lambda: (self.database.state != "closed", self.database.trips),
            answered=self._answered,
            pulse=lambda: self.pulse,
            cancel=lambda ids: self._call(self.held.cancel, ids),
            lost=lambda worker_id: self._call(self.turns.lost, worker_id),
            give_up_at=self.ending.give_up_at,
            last_words=self.turns.last_words,
            give_up=self.ending.give_up,
        )
        self.keeper.start()

    def _answered(self, after_failures: bool) -> None:
        """From the keeper's thread: its sign of life got through."""
        if after_failures or self.database.state != "closed":
            self._call(self.waking.answered)

    async def _pause_over(self) -> bool:
        """Whether the database may be tried now; else wait, until that is over or we are told to stop."""
        now = time.monotonic()
        pause = self.database.pause(now)
        if self.ending.level:
            pause = min(self.database.pause_at_the_end(now), 1.0)
        if pause > 0:
            await self.waking.sleep(pause)
            return False
        return self.ending.level > 0 or self.database.may_pass(now)

    async def _work(self) -> None:
        while not self.ending.level:
            if not await self._pause_over():
                continue
            if not self.membership.is_in_order:
                await self._put_in_order()
            elif turn := self.turns.next():
                await self.turns.take(turn)
            elif self._is_done():
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

    def _is_done(self) -> bool:
        """once, drain: whether all is said."""
        mode = self.settings.mode
        if mode == "forever" or self.held.may_end or self.held.unwritten:
            return False
        lookout = self.waking.lookout
        done = lookout.looked if mode == "once" else lookout.nothing_left
        if done and self.held.overdue:
            self._stuck()
        return done

    # --- The end ---

    async def _wind_down(self) -> None:
        """Let handlers end, give back the rest, write everything, sign off."""
        held = self.held
        self._hurry()
        if self.ending.level == 1 and held.taken:
            log.info(
                "ending",
                "ending: no new tasks, %d handlers have %g s; a second signal gives them back now",
                held.taken,
                self.settings.grace,
            )
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
        while held.unwritten and self.database.has_time():
            await self._flush_some()
        if held.unwritten:
            log.error(
                "unwritten",
                "the database is away: %d ended tasks could not be written and will run again",
                len(held.ends),
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
            pause = min(self.database.pause_at_the_end(now), 0.5)
            if pause > 0:
                await self.waking.sleep(pause)
            else:
                await self.turns.take(turn)
        elif self.held.later_checks:
            await self.waking.sleep(0.05)
        else:
            pause = 0.5 if self.ending.at is None else self.ending.at - now
            await self.waking.sleep(min(max(pause, 0.001), 0.5))

    async def _close(self, pulse: asyncio.Task[Any]) -> None:
        pulse.cancel()
        self.held.threads.close()
        await asyncio.gather(self.waking.close(), self._dismiss_keeper())
        await self.database.disconnect()

    async def _dismiss_keeper(self) -> None:
        if self.keeper is not None:
            self.keeper.stop()
            await asyncio.to_thread(self.keeper.join)
