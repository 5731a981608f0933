"""Who had the slots, from one look to the next, and the picture of it. No clock, no I/O."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

__all__ = ["Band", "Look", "Looks", "Picture", "draw", "totals"]

LENGTH = timedelta(minutes=2)
LONGEST_GAP = timedelta(seconds=5)  # of a longer one nothing is known: it stays empty
WIDTH, HEIGHT = 1200, 200
COLORS = 7  # and one more for all others


@dataclass(frozen=True, slots=True)
class Look:
    """The slots of a queue at a moment, by group."""

    at: datetime
    slots: Mapping[str, int]


class Looks:
    """The looks of the last two minutes, of every queue. For threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._of: dict[str, deque[Look]] = {}
        self._last: datetime | None = None

    def is_due(self, now: datetime, every: timedelta) -> bool:
        return self._last is None or now - self._last >= every

    def add(self, now: datetime, queues: Iterable[str], held: Iterable[tuple[str, str, int]]) -> None:
        by_queue: dict[str, dict[str, int]] = {queue: {} for queue in queues}
        for queue, group_key, slots in held:
            by_queue.setdefault(queue, {})[group_key] = slots
        with self._guard:
            if self._last is not None and now <= self._last:
                return
            self._last = now
            for queue, slots_of in by_queue.items():
                looks = self._of.setdefault(queue, deque())
                looks.append(Look(now, slots_of))
                while looks[0].at < now - LENGTH:
                    looks.popleft()
            for gone in self._of.keys() - by_queue.keys():
                del self._of[gone]

    def of(self, queue: str) -> list[Look]:
        with self._guard:
            return list(self._of.get(queue, ()))


def totals(looks: Sequence[Look]) -> Counter[str]:
    """Slot seconds of each group between the first look and the last."""
    found: Counter[str] = Counter()
    for look, seconds in _stretches(looks):
        for group_key, slots in look.slots.items():
            found[group_key] += slots * seconds  # type: ignore[assignment]  # seconds, in parts
    return found


def _stretches(looks: Sequence[Look]) -> list[tuple[Look, float]]:
    """Each look, and for how long it stands: until the next one."""
    return [
        (look, (following.at - look.at).total_seconds())
        for look, following in pairwise(looks)
        if following.at - look.at <= LONGEST_GAP
    ]


@dataclass(frozen=True, slots=True)
class Band:
    """What belongs to a group: an SVG path, and the number of its color."""

    group_key: str | None  # None: all others
    path: str
    color: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Bands from the bottom to the top, and where the line of the slots there are is drawn."""

    bands: list[Band]
    top: int
    slots_at: float | None
    seconds: float
    color_of: Mapping[str, int]


def draw(looks: Sequence[Look], slots: int, now: datetime) -> Picture:
    """The last two minutes, newest at the right edge. The groups that had most have colors of their own."""
    had = totals(looks)
    # Who has a color keeps it while others come and go: by name, among those with the most.
    shown = sorted(key for key, _ in sorted(had.items(), key=lambda each: (-each[1], each[0]))[:COLORS])
    color_of = {key: number for number, key in enumerate(shown)}
    top = max([slots, 1, *(sum(look.slots.values()) for look in looks)])
    bands = [
        Band(key, path, color_of[key])
        for key in shown
        if (path := _band(looks, now, top, below=shown[: color_of[key]], own=[key]))
    ]
    others = [key for key in had if key not in color_of]
    if others and (path := _band(looks, now, top, below=shown, own=others)):
        bands.append(Band(None, path, COLORS))
    return Picture(
        bands,
        top,
        HEIGHT * (1 - slots / top) if slots else None,
        (now - looks[0].at).total_seconds() if looks else 0.0,
        color_of,
    )


def _band(looks: Sequence[Look], now: datetime, top: int, below: Sequence[str], own: Sequence[str]) -> str:
    """One rectangle for each stretch in which it had slots, those side by side of equal height as one."""
    boxes: list[list[float]] = []  # left, right, upper, lower
    for look, seconds in _stretches(looks):
        amount = sum(look.slots.get(key, 0) for key in own)
        if not amount:
            continue
        under = sum(look.slots.get(key, 0) for key in below)
        left = WIDTH * (1 - (now - look.at) / LENGTH)
        right = left + WIDTH * seconds / LENGTH.total_seconds()
        upper, lower = HEIGHT * (1 - (under + amount) / top), HEIGHT * (1 - under / top)
        if boxes and boxes[-1][2:] == [upper, lower] and abs(boxes[-1][1] - left) < 0.5:
            boxes[-1][1] = right
        else:
            boxes.append([left, right, upper, lower])
    return "".join(
        f"M{max(left, 0):.1f} {upper:.1f}H{max(right, 0):.1f}V{lower:.1f}H{max(left, 0):.1f}Z"
        for left, right, upper, lower in boxes
        if right > 0
    )
