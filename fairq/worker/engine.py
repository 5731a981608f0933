"""The run of a worker: the app's lifespan, in it the work until it ends, and who may end it.

What the parts are that it is made of, `fairq.worker` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from fairq.app import App
from fairq.around import living, name_of
from fairq.worker import log
from fairq.worker.config import Settings, banner, limits
from fairq.worker.ending import Ending, LifespanFailed, Stuck
from fairq.worker.held import Held
from fairq.worker.node import UNWIND_SECONDS, Node

# What a worker tells about itself; the command line prints it.
Announce = Callable[[str], None]
T = TypeVar("T")

PULSE_SECONDS: Final = 0.5


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
        self._app = app
        self._limit: asyncio.Timeout | None = None
        """Of the lifespan, while it starts or ends."""
        self.queues = queues
        self.dsn = dsn
        self.announce = announce
        self.loop = asyncio.get_running_loop()
        self.pulse = time.monotonic()
        self.ending = Ending(settings.grace, owns_process=owns_process)
        self.held = Held(
            app,
            limits(settings).slots,
            self.loop,
            hanging_after=settings.hanging_after,
            wake=self._wake,
            stuck=self._stuck,
        )
        self.node = Node(
            dsn,
            app,
            settings,
            queues,
            self.held,
            self.ending,
            pulse=lambda: self.pulse,
            registered=self._registered,
            is_done=self._is_done,
        )

    def request_stop(self, level: int) -> None:
        """From any thread, and from a signal handler."""
        if self.ending.request(level):
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody needs it any more
                self.loop.call_soon_threadsafe(self._told)

    def _told(self) -> None:
        if self.ending.level == 1 and self.held.taken:
            log.info(
                "ending",
                "ending: no new tasks, %d handlers have %g s; a second signal gives them back now",
                self.held.taken,
                self.settings.grace,
            )
        self._hurry()

    def _hurry(self) -> None:
        if self.ending.at is not None and self._limit is not None and not self._limit.expired():
            left = max(self.ending.at - time.monotonic(), UNWIND_SECONDS)
            self._limit.reschedule(self.loop.time() + left)
        self.node.hurry()

    def _wake(self) -> None:
        self.node.waking.wake.set()

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
                pulse.cancel()
                self.held.threads.close()
                await self.node.close()
        if self.ending.fatal is not None:
            raise self.ending.fatal

    async def _live(self) -> None:
        """The run, and the app's lifespan around it."""
        manager = living(self._app.lifespan)
        try:
            self.held.state = await self._limited("start", manager.__aenter__())
        except LifespanFailed:
            if self.ending.level:  # it was to end anyway
                return
            raise
        try:
            await self.node.run()
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
            error = LifespanFailed(f"the lifespan {name_of(self._app.lifespan)} did not {what}{how}")
            log.error("lifespan_failed", "%s", error, exc_info=exc)
            raise error from exc
        finally:
            self._limit = None

    async def _beat_pulse(self) -> None:
        while True:
            self.pulse = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)

    def _registered(self, node: Node) -> None:
        worker_id, listening = node.membership.worker_id, node.waking.is_listening
        assert worker_id is not None
        self.announce(banner(worker_id, self.queues, self.settings, node.turns.limits, listening=listening))

    def _is_done(self) -> bool:
        """once, drain: whether all is said."""
        mode = self.settings.mode
        if mode == "forever" or self.held.may_end or self.node.outbox.unwritten:
            return False
        lookout = self.node.waking.lookout
        done = lookout.looked if mode == "once" else lookout.nothing_left
        if done and self.held.overdue:
            self._stuck()
        return done
