"""When a worker looks for work: at once when a bell rang or the last look found some, else after a pause."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Lookout"]


@dataclass(slots=True)
class Lookout:
    """What the worker's last looks at its queues came to."""

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
    was_full: bool = False
    looked: bool = False
    nothing_left: bool = False

    def ring(self) -> None:
        self.rings += 1
        self.hungry = True

    def found(self, count: int, *, full: bool, rings: int, holds: bool) -> None:
        """A look that was sent when `rings` notices had come found so many; `full`: there may be more."""
        self.looked = True
        self.was_full = full
        self.hungry = full or rings != self.rings
        self.empties = 0 if count else self.empties + 1
        self.quiet = 0 if count or rings != self.heeded else self.quiet + 1
        self.heeded = rings
        # Three times in a row: an empty answer may mean that somebody else is promoting right now.
        self.nothing_left = self.empties >= 3 and not holds

    def due_at(self, at: float) -> None:
        """Something is due then."""
        self.look_at = min(self.look_at, at)
