"""When a task that was lost with its worker gets a worker to itself. Nothing in here talks to anybody.

A process that dies takes all that it runs along, and nobody can tell whose fault it was. So what was lost is
suspected: it runs only with nothing else in flight, until it ends an attempt by itself. The worker takes no
other tasks then, waits until those it has are through, and runs its suspects one after the other.

Neither side may starve the other. Suspects get half of a worker's time at most: after such a phase others
get as long. Handlers that are not through in time are not waited for: the suspect goes back, to another
worker or for the next try, which has twice the patience.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from fairq.worker.handlers import Entry

FIRST_PATIENCE: Final = 5.0
# A phase may go on for so long after the others are through, or as long as they were waited for.
SHORTEST_SECONDS: Final = 1.0


class Solo:
    """`now` is the caller's clock, `others` how many run beside the suspects."""

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
        """Until when the others are waited for."""
        return self._began_at + self.patience if self.waiting and self._free_at is None else None

    def admit(self, suspects: Iterable[Entry], now: float, others: int) -> list[Entry]:
        """After a pop that also brought these. Returns those that cannot stay: others have their time now."""
        if now < self._rest_until and not others:
            self.nobody_else_comes(now)
        # A shorter time they wait here: to come back takes longer.
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
        """It ended, or is ours no more."""
        if entry is self.running:
            self.running = None
            self.patience = FIRST_PATIENCE
        elif entry in self.waiting:
            self.waiting.remove(entry)
        else:
            return
        began, free = self._began_at, self._free_at
        if not self.waiting or (free is not None and now >= free + max(SHORTEST_SECONDS, free - began)):
            # The next look shows whether there are others. If not, the next suspect has its turn at once.
            self._rest_until = now + (now - began)
            self._begin(self._rest_until)

    def give_up(self, now: float) -> list[Entry]:
        """Those that are given back because the others are not through in time."""
        if self.gives_up_at is None or now < self.gives_up_at:
            return []
        self._rest_until = now + (now - self._began_at)
        self.patience *= 2
        return self._turn_out()

    def nobody_else_comes(self, now: float) -> None:
        """Then there is nobody to rest for."""
        if now < self._rest_until:
            self._rest_until = now
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._began_at, self._free_at = now, None

    def _turn_out(self) -> list[Entry]:
        found = list(self.waiting)
        self.waiting.clear()
        return found
