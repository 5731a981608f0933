"""When a worker wakes up: a notice, something to write, or the time to look again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from fairq.dsn import resolve
from fairq.worker import log, plan
from fairq.worker.config import Settings, limits, poll_interval
from fairq.worker.connect import conninfo
from fairq.worker.database import Database
from fairq.worker.listen import TEST_SECONDS, Listener


@dataclass(slots=True)
class Lookout:
    """What the last looks at the queues came to."""

    hungry: bool = True
    """There may be work."""
    rings: int = 0
    """Notices so far. One that comes while a look is on its way makes another look due."""
    look_at: float = 0.0
    """When to look again although nothing rings."""
    empties: int = 0
    """Looks in a row that found nothing."""
    quiet: int = 0
    """Those of them since the last notice."""
    heeded: int = 0
    """Notices before the last look."""
    looked: bool = False
    nothing_left: bool = False

    def ring(self) -> None:
        self.rings += 1
        self.hungry = True

    def is_due(self, now: float) -> bool:
        return self.hungry or now >= self.look_at

    def stirred(self) -> None:
        """What is done elsewhere may make work here: looks that found nothing say nothing any more."""
        self.empties, self.quiet, self.look_at, self.nothing_left = 0, 0, 0.0, False

    def found(self, count: int, *, full: bool, rings: int, holds: bool, soon: bool) -> None:
        """A look that was sent when `rings` notices had come found so many; `full`: there may be more;
        `soon`: there is, but somebody else has the queue, or what is due.
        """
        self.looked = True
        self.hungry = full or rings != self.rings
        self.empties = 0 if count else self.empties + 1
        self.quiet = 0 if count or rings != self.heeded else self.quiet + 1
        self.heeded = rings
        # Three times in a row: what somebody else promoted meanwhile is there for the next look.
        self.nothing_left = self.empties >= 3 and not holds and not soon
        if self.empties == 3 and soon:
            log.logger.debug("busy: somebody else has the queue, or what is due; looking again")

    def due_at(self, at: float) -> None:
        """Something is due then."""
        self.look_at = min(self.look_at, at)


class Waking:
    """`wake` may be set at any time, on the loop; `sleep` ends then."""

    def __init__(self, dsn: str, settings: Settings, queues: tuple[str, ...], database: Database) -> None:
        self.wake = asyncio.Event()
        self.lookout = Lookout()
        self._dsn = dsn
        self._settings = settings
        self._queues = queues
        self._database = database
        self._listener: Listener | None = None

    @property
    def is_listening(self) -> bool:
        return self._listener is not None and self._listener.is_listening

    def rung(self) -> None:
        """There may be work. However many notices come, the next turn looks once."""
        self.lookout.ring()
        self.wake.set()

    def answered(self) -> None:
        """The database, to the keeper or the listener."""
        self._database.answered()
        self.wake.set()

    def looked(self, count: int, *, full: bool, rings: int, holds: bool, due_in: float | None) -> None:
        """A look found so many tasks; when to look again."""
        now = time.monotonic()
        lookout, listening = self.lookout, self.is_listening
        soon = due_in is not None and due_in <= plan.SOON
        lookout.found(count, full=full, rings=rings, holds=holds, soon=soon)
        interval = poll_interval(self._settings, listening)
        lookout.look_at = now + plan.poll_delay(
            lookout.quiet, listening=listening, interval=interval, due_in=None
        )
        if due_in is not None and due_in > 0:
            lookout.due_at(now + due_in + 0.001)

    async def sleep(self, seconds: float) -> None:
        """Until woken, at most so long."""
        timer = asyncio.get_running_loop().call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()
            self.wake.clear()

    async def start_listening(self) -> None:
        settings = self._settings
        if not settings.listen or settings.mode != "forever":
            return
        dsn = resolve(settings.listen_dsn) if settings.listen_dsn else self._dsn
        listener = Listener(
            conninfo(dsn, "fairq listen"),
            conninfo(self._dsn, "fairq listen test"),
            self._queues,
            self.rung,
            answered=self.answered,
            # A DSN that leads to sessions, not to a pooler by transaction, is good for prepared statements.
            proven=lambda: None if settings.listen_dsn else self._database.prepare_statements(),
            pauses=(settings.db_retry_initial_ms / 1000, settings.db_retry_max_ms / 1000),
            patience=limits(settings).patience,
        )
        listener.start()
        self._listener = listener
        # Where that takes longer it goes on trying; meanwhile the worker polls.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(listener.settled.wait(), 2 * TEST_SECONDS)

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
