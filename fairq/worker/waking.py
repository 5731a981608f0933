"""When a worker wakes up: a notice, something to write, or the time to look again."""

from __future__ import annotations

import asyncio
import time

from fairq.worker import log, plan
from fairq.worker.config import Settings, poll_interval


class Waking:
    """The results of the last looks at the queues. Setting `wake`, on the loop, ends `sleep`."""

    def __init__(self, settings: Settings) -> None:
        self.wake = asyncio.Event()
        self.is_listening = False
        self.rings = 0
        """Notices so far. One that comes during a look makes another look due."""
        self.look_at = 0.0
        """When to look again without a notice."""
        self.looked = False
        self.nothing_left = False
        self._settings = settings
        self._hungry = True
        """There may be tasks."""
        self._empties = 0
        """Looks in a row that found nothing."""
        self._quiet = 0
        """Those of them since the last notice."""
        self._heeded = 0
        """How many notices came before the last look."""

    def rung(self) -> None:
        """A notice: there may be tasks. However many come, the next turn looks once."""
        self.rings += 1
        self._hungry = True
        self.wake.set()

    def is_due(self, now: float) -> bool:
        return self._hungry or now >= self.look_at

    def stirred(self) -> None:
        """Some node had tasks, which may enqueue more here, so earlier looks no longer count."""
        self._empties, self._quiet, self.look_at, self.nothing_left = 0, 0, 0.0, False

    def found(self, count: int, *, full: bool, rings: int, holds: bool, due_in: float | None) -> None:
        """A look, sent after `rings` notices, found so many tasks. `full`: there may be more; `holds`:
        handlers run, which may enqueue more; `due_in`: seconds until something is due.
        """
        soon = due_in is not None and due_in <= plan.SOON
        self.looked = True
        self._hungry = full or rings != self.rings
        self._empties = 0 if count else self._empties + 1
        self._quiet = 0 if count or rings != self._heeded else self._quiet + 1
        self._heeded = rings
        # Three times in a row, because somebody else may promote in between.
        self.nothing_left = self._empties >= 3 and not holds and not soon
        if self._empties == 3 and soon:
            log.logger.debug("busy: somebody else is promoting, or has what is due; looking again")
        self.look_at = time.monotonic() + plan.poll_delay(
            self._quiet,
            listening=self.is_listening,
            interval=poll_interval(self._settings, self.is_listening),
            due_in=due_in + 0.001 if due_in is not None and due_in > 0 else None,
        )

    async def sleep(self, seconds: float) -> None:
        """Sleep until woken, at most so long."""
        timer = asyncio.get_running_loop().call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()
            self.wake.clear()
