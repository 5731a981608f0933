"""How a worker ends: how urgently, and until when."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Final, NoReturn

from fairq.errors import FairqError
from fairq.worker import log
from fairq.worker.handlers import whereabouts

# After the grace time: how long handlers have to stop, and the worker to write what has ended.
AFTER_SECONDS: Final = 5.0
# After the grace time: when the keeper gives up a blocked loop, and gives its tasks back.
STILL_SECONDS: Final = 3.0
# After the grace time: when a process that the worker owns ends, whatever holds it up.
LAST_RESORT_SECONDS: Final = 9.0


class Stuck(FairqError):
    """As many handlers hang as there are slots, so the process can do no more work."""


class LifespanFailed(FairqError):
    """The app's lifespan failed to start or end: see `__cause__`."""


class Ending:
    """`level` 0: go on; 1: no new tasks, handlers have the grace time; 2: end at once. Thread-safe."""

    def __init__(self, grace: float, *, owns_process: bool) -> None:
        self.level = 0
        self.at: float | None = None
        self.fatal: FairqError | None = None
        self._grace = grace
        self._owns_process = owns_process

    def request(self, level: int) -> bool:
        """Ask for the end. Return whether that is more urgent than before."""
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

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a thread makes sure that a process that the worker owns ends, even if a lifespan blocks the
        loop when there is no keeper.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                if self.at is not None and time.monotonic() > self.at + LAST_RESORT_SECONDS:
                    self._exit(f"the worker did not end in time: {whereabouts(threading.main_thread())}")

        if self._owns_process:
            threading.Thread(target=watch, name="fairq-last-resort", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    # --- For the keeper ---

    def give_up_at(self) -> float | None:
        if not self._owns_process or self.at is None:
            return None
        return self.at + STILL_SECONDS

    def give_up(self, dead: bool) -> None:
        """`dead`: the loop has not moved for a whole lease."""
        if dead:
            why = "a handler blocked the loop for longer than the lease, so other workers get the tasks"
        else:
            why = "a handler blocks the loop past the grace time"
        if self._owns_process:
            self._exit(why)
        log.error("gave_up", "%s", why)

    def _exit(self, why: str) -> NoReturn:
        log.error("gave_up", "%s; the process ends now", why)
        logging.shutdown()
        os._exit(Stuck.exit_code)
