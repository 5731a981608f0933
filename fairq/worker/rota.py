"""Several nodes and one set of slots: which node to ask for tasks next. No I/O.

One node is asked at a time, for as many tasks as there are free slots; slow nodes are asked beside the
others. A node keeps its turn until it has given as many tasks as there are slots, or has no more. The next
turn goes to the node whose groups have had the fewest rounds, so groups get the same share, however many
others are on their node. How far a node has come is known from its last answer. A node that had nothing, or
was not asked for a long time, goes on from where the hindmost of the others is, without credit or debt.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

# A round of a group of weight 1, in the unit of block addresses.
ROUND: Final = 2**20
# The engine may set a clock back by this much.
REBASE: Final = 2**59
# A node that has not answered for this long is not waited for. A node whose last answer took longer is slow:
# slots are kept for its answer for twice that time, at most LATEST.
LATE: Final = 1.0
LATEST: Final = 10.0
# A node that is ahead is passed over for this long at most, because workers that are gone may have brought it
# there.
LONGEST: Final = 60.0


@dataclass(eq=False)
class Place:
    """A node. `wants` says whether to ask it now, `wake` tells it that it may be its turn, `stirred` tells it
    that another node had tasks.
    """

    wants: Callable[[float], bool]
    wake: Callable[[], None]
    stirred: Callable[[], None]
    is_near: bool = False
    blocks: Sequence[int | None] = ()
    """The next block of each queue in the last answer; None: nothing was in line."""
    rounds: Sequence[float] = ()
    """How far each queue has come, compared with the other nodes."""
    asked_at: float = -math.inf
    asked_for: int = 0
    busy_since: float | None = None
    took: float = 0.0
    """How long its last answer took."""

    def has(self, queue: int) -> bool:
        """Whether that queue had tasks in line."""
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
    """Decides whose turn it is. `strict`: queues are served in order of priority."""

    slots: int
    strict: bool = False
    places: list[Place] = field(default_factory=list)
    _current: Place | None = None
    _left: int = 0

    def asked_for(self, now: float) -> int:
        """How many slots are kept free for answers."""
        return sum(place.asked_for for place in self.places if place.is_expected(now))

    def room_for(self, me: Place, room: int) -> int:
        """How many of the free slots to ask for; a slow node leaves half of them to the others."""
        return (room + 1) // 2 if me.is_slow and len(self.places) > 1 else room

    def is_turn_of(self, me: Place, wants: bool, now: float) -> bool:
        """Whether `me` may ask now. If it is another node's turn, wake that."""
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
        # A node that had nothing may have tasks now, and goes first.
        rank = -1 if not queues else queues[0] if self.strict else 0
        stays = place is self._current and self._left > 0
        lead = sum(place.rounds[queue] - hindmost(willing, queue) for queue in queues)
        return not place.is_near, rank, not stays, lead, place.asked_at

    @contextlib.contextmanager
    def busy(self, me: Place, room: int) -> Iterator[None]:
        """Inside, a turn is on its way that asks for so many tasks."""
        me.busy_since = time.monotonic()
        me.asked_for = room
        if room:
            me.asked_at = me.busy_since
        try:
            yield
        finally:
            me.busy_since, me.asked_for = None, 0

    def answered(self, me: Place, count: int, full: bool) -> None:
        """It gave `count` tasks; `full`: as many as it was asked for."""
        if me.busy_since is not None:
            me.took = time.monotonic() - me.busy_since
        if me is not self._current:
            self._current, self._left = me, self.slots
        self._left = self._left - count if full else 0

    def stands(self, me: Place, blocks: Sequence[int | None]) -> None:
        """Record how far its queues have come."""
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
    """How far `block` is ahead of `other` on the same clock, which may have been set back in between."""
    return (block - other + REBASE // 2) % REBASE - REBASE // 2
