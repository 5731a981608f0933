"""When a task that was lost with its worker runs alone. No I/O.

A process that dies takes all its tasks along, and nobody can tell which one is to blame. So all of them are
suspects: each runs only while nothing else is in flight, until it ends an attempt by itself. Then the worker
takes no other tasks, waits until those it has are done, and runs its suspects one after the other.

Neither side may starve the other. Suspects get at most half of a worker's time: after such a phase the others
get as long. If handlers are not done in time, the suspect is given back, to another worker or for the next
try, which waits twice as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from fairq.worker.handlers import Entry

FIRST_PATIENCE: Final = 5.0
# How long a phase may go on once the others are done, or as long as they were waited for.
SHORTEST_SECONDS: Final = 1.0


class Solo:
    """The suspects of a worker. `now` is the caller's clock, `others` how many other tasks are in flight."""

    def __init__(self) -> None:
        self.waiting: deque[Entry] = deque()
        self.running: Entry | None = None
        self.patience = FIRST_PATIENCE
        self._began_at = 0.0
        self._free_at: float | None = None
        self._rest_until = 0.0

    def keeps_others_out(self, now: float) -> bool:
        return self.running is not None or (bool(self.waiting) and now >= self._rest_until)

    @property
    def gives_up_at(self) -> float | None:
        """Until when to wait for the others."""
        return self._began_at + self.patience if self.waiting and self._free_at is None else None

    def admit(self, suspects: Iterable[Entry], now: float, others: int) -> list[Entry]:
        """Take in suspects from a pop. Return those to give back, because it is the others' time."""
        if now < self._rest_until and not others:
            self.nobody_else_comes(now)
        # If that time is short, they wait here, because coming back takes longer.
        if self._rest_until - now >= SHORTEST_SECONDS:
            return [*self._turn_out(), *suspects]
        if not self.waiting and self.running is None:
            self._begin(max(now, self._rest_until))
        self.waiting.extend(suspects)
        return []

    def next(self, now: float, others: int) -> Entry | None:
        """The suspect to start now."""
        if not self.waiting or self.running or others or now < self._rest_until:
            return None
        if self._free_at is None:
            self._free_at = now
        return self.waiting[0]

    def begin(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        self.running = entry

    def drop(self, entry: Entry, now: float) -> None:
        """It ended, or is no longer ours."""
        if entry is self.running:
            self.running = None
            self.patience = FIRST_PATIENCE
        elif entry in self.waiting:
            self.waiting.remove(entry)
        else:
            return
        began, free = self._began_at, self._free_at
        if not self.waiting or (free is not None and now >= free + max(SHORTEST_SECONDS, free - began)):
            # The next look shows whether there are others. If not, the next suspect runs at once.
            self._rest_until = now + (now - began)
            self._begin(self._rest_until)

    def give_up(self, now: float) -> list[Entry]:
        """Those to give back, because the others are not done in time."""
        if self.gives_up_at is None or now < self.gives_up_at:
            return []
        self._rest_until = now + (now - self._began_at)
        self.patience *= 2
        return self._turn_out()

    def nobody_else_comes(self, now: float) -> None:
        """End the others' time, because there are none."""
        if now < self._rest_until:
            self._rest_until = now
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._began_at, self._free_at = now, None

    def _turn_out(self) -> list[Entry]:
        found = list(self.waiting)
        self.waiting.clear()
        return found
