"""What a worker decides: how many tasks to ask for, when to look again, what to write. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from fairq.worker.config import Limits

T = TypeVar("T")
Draw = Callable[[], float]

# One statement ends at most so many attempts, with at most so much JSON: a batch is sent and parsed as a
# whole.
MOST_ENDS: Final = 2_000
MOST_BYTES: Final = 8 * 1024 * 1024
# The first pauses after work was found, or a notice came; doubled while nothing is found. Also with LISTEN:
# who enqueues while an earlier notice is not heeded yet sends none; a look soon after finds what committed.
FIRST_PAUSE: Final = 0.05
FIRST_PAUSE_LISTENING: Final = 0.01
JITTER: Final = 0.25
# What is due so soon is not due later; the engine says so also of what somebody else is promoting.
SOON: Final = 0.05


def pop_limit(limits: Limits, *, held: int, waiting: int) -> int:
    """How many tasks to ask for. `held`: popped and not ended; of these, `waiting` have not begun."""
    budget = limits.slots + limits.prefetch - held
    return max(0, min(budget, limits.claim_per_worker - waiting))


def to_start(limits: Limits, *, running: int, claimed: int) -> int:
    """Prefetch: how many claimed tasks to start."""
    return max(0, min(limits.slots - running, claimed))


def ought_to_gather(limits: Limits, *, ended: int, ready: int) -> bool:
    """Whether to run more of the tasks that are here before the next turn.

    A turn costs the same for 1 task as for 20. While handlers are waiting for the processor, a turn may wait
    for a quarter of the slots; when none are waiting, all that runs is waiting for something else, and it
    goes now.
    """
    return ready > 0 and ended < limits.slots // 4


def retry_delay(failures: int, initial: float, cap: float, draw: Draw = random.random) -> float:
    """Pause after so many failures in a row: doubled each time, capped, moved by a quarter both ways."""
    exponent = min(max(failures, 1) - 1, 40)
    return min(initial * 2.0**exponent, cap) * (1 + JITTER * (2 * draw() - 1))


def poll_delay(
    quiet: int, *, listening: bool, interval: float, due_in: float | None, draw: Draw = random.random
) -> float:
    """Pause after so many looks in a row without a notice or work; never past the moment a task is due."""
    pause = retry_delay(quiet, FIRST_PAUSE_LISTENING if listening else FIRST_PAUSE, interval, draw)
    return pause if due_in is None else max(0.0, min(pause, due_in))


def ticks_at_a_time(slots: int, late: float, stalls: int) -> int:
    """How many due schedules to fire before the next look: half of what runs at a time; the later the more,
    and twice as many each time those before did not begin.

    A task of a group that had none stands before what others enqueue next. A tick that waits does not.
    """
    return min((max(slots // 2, 4) * (1 + int(late / 10))) << min(stalls, 5), 100)


def standstill(before: float, elapsed: float, lease: float) -> float:
    """For how long the loop has stood still, if it has not moved since the last look, `elapsed` seconds ago.

    Who looked much later than he wanted was stopped himself, perhaps with the whole process: then nothing is
    proved against the loop.
    """
    return before + min(elapsed, lease / 3)


def batch_size(sizes: Sequence[int], most: int = MOST_ENDS, most_bytes: int = MOST_BYTES) -> int:
    """How many of these, from the first on, go into one statement: at least one, whatever its size."""
    total = 0
    for count, size in enumerate(sizes[:most]):
        total += size
        if total > most_bytes and count:
            return count
    return min(len(sizes), most)


def halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """A batch that the database refuses for its data is tried in two parts, to find the culprit."""
    middle = (len(batch) + 1) // 2
    return batch[:middle], batch[middle:]
