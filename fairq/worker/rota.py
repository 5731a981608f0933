"""Several databases and one set of slots: who is asked for tasks next. Nothing in here talks to anybody.

One is asked at a time, for as many tasks as there are free slots; who takes long, beside the others. It goes
on being asked until it has given as many as there are slots, or has no more. Then it is the turn of the one
that has come least far, in rounds of its groups: so groups have the same share, however many others are in
line where they are. How far each has come is known from the last time it was asked. One that had nothing goes
on from where the hindmost of the others stands, without credit or debt, and so does one that was not asked
for a long time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

# Of a group of weight 1, as blocks count them.
ROUND: Final = 2**20
# A clock may be taken back by so much, once more or less often than when it was seen last.
REBASE: Final = 2**59
# Who has not answered for so long is not waited for, and no slots are kept for its answer. Whose last answer
# took longer is asked beside the others, and slots are kept for twice as long as that took, or so long.
LATE: Final = 1.0
LATEST: Final = 10.0
# Who has come further than others is passed over for so long at most: others may have brought it there, who
# are gone.
LONGEST: Final = 60.0


@dataclass(eq=False)
class Place:
    """One of them. `wants` says whether it should be asked now, `wake` makes it look whether it is its turn,
    `stirred` tells it that elsewhere there was something to do.
    """

    wants: Callable[[float], bool]
    wake: Callable[[], None]
    stirred: Callable[[], None]
    is_near: bool = False
    blocks: Sequence[int | None] = ()
    """The next one of each queue, when it was asked last; None: nothing was in line."""
    rounds: Sequence[float] = ()
    """How far each queue has come, beside those of the others."""
    asked_at: float = -math.inf
    asked_for: int = 0
    busy_since: float | None = None
    took: float = 0.0
    """How long its last answer took."""

    def has(self, queue: int) -> bool:
        """Whether something of that queue was in line."""
        return bool(self.blocks) and self.blocks[queue] is not None

    @property
    def is_slow(self) -> bool:
        return self.took >= LATE

    def is_late(self, now: float) -> bool:
        return self.busy_since is not None and (self.is_slow or now - self.busy_since >= LATE)

    def is_expected(self, now: float) -> bool:
        patience = max(LATE, min(2 * self.took, LATEST))
        return self.busy_since is not None and now - self.busy_since < patience


@dataclass(eq=False)
class Rota:
    """`strict`: queues are served in order, and not by turns."""

    slots: int
    strict: bool = False
    places: list[Place] = field(default_factory=list)
    _current: Place | None = None
    _left: int = 0

    def asked_for(self, now: float) -> int:
        """Slots that are kept free for answers."""
        return sum(place.asked_for for place in self.places if place.is_expected(now))

    def room_for(self, me: Place, room: int) -> int:
        """Of so many free slots; who keeps them for long leaves half of them to the others."""
        return (room + 1) // 2 if me.is_slow and len(self.places) > 1 else room

    def is_turn_of(self, me: Place, wants: bool, now: float) -> bool:
        """Whether `me`, who wants to, may ask; whose turn it is otherwise is told."""
        first = self.first(now)
        if first is None or first is me:
            return wants
        if first.busy_since is None:
            first.wake()
        return False

    def first(self, now: float) -> Place | None:
        if len(self.places) == 1:
            return self.places[0]
        waited_for = [place for place in self.places if place.asked_for and not place.is_late(now)]
        if waited_for:
            return waited_for[0]
        willing = [place for place in self.places if place.wants(now) and not place.is_late(now)]
        return min(willing, key=lambda place: self._order(place, willing, now), default=None)

    def _order(self, place: Place, willing: Sequence[Place], now: float) -> tuple[float, ...]:
        if now - place.asked_at > LONGEST:
            place.blocks = ()
        queues = [queue for queue in range(len(place.blocks)) if place.has(queue)]
        if self.strict:
            queues = queues[:1]
        # Where nothing was in line there may be something now, and it is not to wait for what is elsewhere.
        rank = -1 if not queues else queues[0] if self.strict else 0
        stays = place is self._current and self._left > 0
        lead = sum(place.rounds[queue] - hindmost(willing, queue) for queue in queues)
        return not place.is_near, rank, not stays, lead, place.asked_at

    @contextlib.contextmanager
    def busy(self, me: Place, room: int) -> Iterator[None]:
        """A turn is on its way, and asks for so many tasks."""
        me.busy_since = time.monotonic()
        me.asked_for = room
        if room:
            me.asked_at = me.busy_since
        try:
            yield
        finally:
            me.busy_since, me.asked_for = None, 0

    def answered(self, me: Place, count: int, full: bool) -> None:
        """It gave so many tasks; `full`: as many as it was asked for."""
        if me.busy_since is not None:
            me.took = time.monotonic() - me.busy_since
        if me is not self._current:
            self._current, self._left = me, self.slots
        self._left = self._left - count if full else 0

    def stands(self, me: Place, blocks: Sequence[int | None]) -> None:
        """How far its queues have come by now."""
        others = [place for place in self.places if place is not me]
        rounds = [
            me.rounds[queue] + max(0, ahead(new, me.blocks[queue] or 0)) / ROUND
            if me.has(queue) and new is not None
            else hindmost(others, queue)
            for queue, new in enumerate(blocks)
        ]
        me.blocks, me.rounds = blocks, rounds


def hindmost(places: Sequence[Place], queue: int) -> float:
    return min((place.rounds[queue] for place in places if place.has(queue)), default=0.0)


def ahead(block: int, other: int) -> int:
    """How far one is behind the other on the same clock, which may have been taken back in between."""
    return (block - other + REBASE // 2) % REBASE - REBASE // 2
