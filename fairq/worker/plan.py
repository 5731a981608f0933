"""A worker's decisions as pure functions: how many tasks to ask for, when to look again, what to write."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from fairq.backoff import Backoff
from fairq.worker.config import Limits

T = TypeVar("T")
Draw = Callable[[], float]

# The most ends, and bytes of JSON, in one statement, which is sent and parsed as a whole.
MOST_ENDS: Final = 2_000
MOST_BYTES: Final = 8 * 1024 * 1024
# The first pause after tasks were found, or a notice came; doubled while nothing is found. Also with LISTEN,
# because producers send no notice while an earlier one is pending, and an early look finds what they commit.
FIRST_PAUSE: Final = 0.05
FIRST_PAUSE_LISTENING: Final = 0.01
# What is due this soon counts as due. The engine also answers so when somebody else is promoting.
SOON: Final = 0.05


def pop_limit(limits: Limits, *, held: int, waiting: int) -> int:
    """How many tasks to ask for. `held` are popped and not ended; `waiting` of these have not begun."""
    budget = limits.slots + limits.prefetch - held
    return max(0, min(budget, limits.claim_per_worker - waiting))


def to_start(limits: Limits, *, running: int, claimed: int) -> int:
    """How many claimed tasks to start."""
    return max(0, min(limits.slots - running, claimed))


def ought_to_gather(limits: Limits, *, ended: int, ready: int) -> bool:
    """Whether to run more of the tasks in hand before the next turn.

    A turn costs the same for 1 task as for 20. While handlers are in line for the processor, the turn may
    wait until a quarter of the slots have ended. Otherwise all handlers wait for something else, and the turn
    goes.
    """
    return ready > 0 and ended < limits.slots // 4


def retry_delay(failures: int, initial: float, cap: float, draw: Draw = random.random) -> float:
    """The pause after so many failures in a row: doubled each time, capped, varied by up to 25 %."""
    return Backoff(initial, cap).delay(failures, draw)


def poll_delay(
    quiet: int, *, listening: bool, interval: float, due_in: float | None, draw: Draw = random.random
) -> float:
    """The pause after so many looks in a row without a notice or tasks; it ends when a task is due."""
    pause = retry_delay(quiet, FIRST_PAUSE_LISTENING if listening else FIRST_PAUSE, interval, draw)
    return pause if due_in is None else max(0.0, min(pause, due_in))


def ticks_at_a_time(slots: int, late: float, stalls: int) -> int:
    """How many due schedules to fire before the next look: half of the slots, more the later they are, and
    twice as many each time that earlier ones did not begin.

    A fired task of an idle group comes before what others enqueue later; a tick that waits does not.
    """
    return min((max(slots // 2, 4) * (1 + int(late / 10))) << min(stalls, 5), 100)


def standstill(before: float, elapsed: float, lease: float) -> float:
    """How long the loop has been blocked, if it has not run since the last look, `elapsed` seconds ago.

    If the looks themselves are late, the whole process may have been stopped, which proves nothing about the
    loop.
    """
    return before + min(elapsed, lease / 3)


def batch_size(sizes: Sequence[int], most: int = MOST_ENDS, most_bytes: int = MOST_BYTES) -> int:
    """How many of these fit into one statement; at least one, whatever its size."""
    total = 0
    for count, size in enumerate(sizes[:most]):
        total += size
        if total > most_bytes and count:
            return count
    return min(len(sizes), most)


def halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Two parts of a batch that the database refuses for its data, to find the culprit."""
    middle = (len(batch) + 1) // 2
    return batch[:middle], batch[middle:]
