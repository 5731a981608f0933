"""What a worker has to send to a database: ends, checks of ends, and progress."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Final

from fairq.outcome import Outcome
from fairq.worker.handlers import Entry

# When to check again whether a handler's own transaction ended its task.
CHECK_AGAIN_AFTER: Final = (0.2, 10.0)


class Outbox:
    """Calls `wake` when there is something new. Everything happens on the loop, except `report`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        # Ended and not written.
        self.ends: list[Entry] = []
        self.checks: list[tuple[float, Entry]] = []
        """When to check whether a handler's own transaction has ended its task, in order."""
        self.reports: dict[int, Entry] = {}

    @property
    def unwritten(self) -> bool:
        return bool(self.ends) or any(entry.checked <= 1 for _, entry in self.checks)

    def write_down(self, entry: Entry, outcome: Outcome) -> None:
        entry.outcome = outcome
        self.ends.append(entry)
        self.wake()

    def due_checks(self, now: float) -> list[Entry]:
        return [entry for _, entry in self.checks[: bisect(self.checks, now, key=itemgetter(0))]]

    def check(self, entry: Entry) -> None:
        """Its handler ended it in a transaction of its own: check whether that committed."""
        self.checks.insert(0, (0.0, entry))
        self.wake()

    def check_again(self, entry: Entry, now: float) -> None:
        """Check later again, because its transaction may be open still, and roll back."""
        if entry.checked < len(CHECK_AGAIN_AFTER):
            insort(self.checks, (now + CHECK_AGAIN_AFTER[entry.checked], entry), key=itemgetter(0))
            entry.checked += 1

    def report(self, entry: Entry) -> bool:
        """From the handler's thread. Whether it is the only report, so that the loop must be woken."""
        self.reports[entry.row.id] = entry
        # Checked afterwards, because in between the loop may take the others.
        return len(self.reports) == 1

    def report_again(self, entries: Iterable[Entry]) -> None:
        """Keep reports that were not sent, except of tasks that ended meanwhile."""
        for entry in entries:
            if not entry.ended:
                self.reports.setdefault(entry.row.id, entry)
