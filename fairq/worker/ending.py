"""How a worker comes to its end: who asked for it, how urgently, and until when."""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from fairq.errors import FairqError

__all__ = ["Ending", "Stuck"]

log = logging.getLogger("fairq.worker")

# A loop that stands still past the grace time is ended by the keeper after so long.
LAST_RESORT_SECONDS: Final = 5.0


class Stuck(FairqError):
    """As many handlers hang as there are slots. A fresh process can work, this one cannot."""

    code = "stuck"
    exit_code = 1


class Ending:
    """`level` 0: go on; 1: no new tasks, handlers have the grace time; 2: at once. From any thread."""

    def __init__(self, grace: float, *, owns_process: bool) -> None:
        self.level = 0
        self.at: float | None = None
        self.fatal: FairqError | None = None
        self._grace = grace
        self._owns_process = owns_process

    def request(self, level: int) -> bool:
        """Whether that is more than was asked before."""
        if level <= self.level:
            return False
        self.level = level
        if self.at is None or level == 2:
            self.at = time.monotonic() + (self._grace if level == 1 else 0.0)
        return True

    def at_once(self) -> None:
        self.level = 2
        self.at = time.monotonic()

    @property
    def is_past_grace(self) -> bool:
        return self.level == 2 or (self.at is not None and time.monotonic() >= self.at)

    # --- For the keeper ---

    def give_up_at(self) -> float | None:
        if not self._owns_process or self.at is None:
            return None
        return self.at + LAST_RESORT_SECONDS

    def give_up(self, dead: bool) -> None:
        """`dead`: the loop has not moved for a whole lease."""
        if dead:
            why = "a handler blocked the loop for longer than the lease, and its tasks are with others now"
        else:
            why = "a handler blocks the loop, or the database hangs, past the grace time"
        if not self._owns_process:
            log.error("%s", why, extra={"action": "gave_up"})
            return
        log.error("%s; the process ends now", why, extra={"action": "gave_up"})
        logging.shutdown()
        os._exit(Stuck.exit_code)
