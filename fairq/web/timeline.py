"""Who had the slots over time, and the chart of it. No clock, no I/O."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, pairwise
from math import ceil

from fairq.queries.web import MinutesRow

LENGTH = timedelta(minutes=2)  # of looks
HOUR = timedelta(hours=1)  # of the ledger
LONGEST_GAP = timedelta(seconds=5)  # longer gaps between looks stay empty
WIDTH, HEIGHT = 1200, 200
COLORS = 7  # and one more for all others

Limit = tuple[datetime, float, int]  # start, seconds, number of slots
Box = tuple[float, float, float, float]  # left, right, upper, lower


@dataclass(frozen=True, slots=True)
class Look:
    """A queue's slots at a moment, by group."""

    at: datetime
    slots: Mapping[str, int]


class Looks:
    """The looks of the last two minutes, for every queue. Thread-safe."""

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


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time, and how many slots each group had in it, on average."""

    at: datetime
    seconds: float
    slots: Mapping[str, float]


def stretches(looks: Sequence[Look]) -> list[Stretch]:
    """The looks, each lasting until the next one."""
    return [
        Stretch(look.at, (following.at - look.at).total_seconds(), look.slots)
        for look, following in pairwise(looks)
        if following.at - look.at <= LONGEST_GAP
    ]


def minutes(rows: Iterable[MinutesRow], until: datetime) -> tuple[list[Stretch], list[Limit]]:
    """The ledger's worker seconds, written up to `until`, as slots; and how many slots there were."""
    found: list[Stretch] = []
    limits: list[Limit] = []
    for minute, of_minute in groupby(rows, lambda row: row.minute):
        seconds = min((until - minute).total_seconds(), 60.0)
        had = [*of_minute]
        if seconds > 0:
            found.append(Stretch(minute, seconds, {each.group_key: each.seconds / seconds for each in had}))
            limits.append((minute, seconds, had[0].slots))
    return found, limits


def totals(found: Iterable[Stretch]) -> Counter[str]:
    had: Counter[str] = Counter()
    for each in found:
        for group_key, slots in each.slots.items():
            had[group_key] += slots * each.seconds  # type: ignore[assignment]  # seconds, in parts
    return had


@dataclass(frozen=True, slots=True)
class Band:
    """A group's part of the chart: an SVG path, the number of its color, and its part of all."""

    group_key: str | None  # None: all others
    path: str
    color: int
    part: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Bands from bottom to top, and the line of available slots, as SVG paths."""

    bands: list[Band]
    top: int
    limit: str
    color_of: Mapping[str, int]


def draw(found: Sequence[Stretch], limits: Sequence[Limit], now: datetime, length: timedelta) -> Picture:
    """The chart of `length`, up to now. The groups with the most have their own colors; '' has none."""
    had = totals(found)
    everything = sum(had.values()) or 1
    # Colors go by name among the groups with the most, so they stay while other groups come and go.
    named = sorted((each for each in had.items() if each[0]), key=lambda each: (-each[1], each[0]))
    shown = sorted(key for key, _ in named[:COLORS])
    color_of = {key: number for number, key in enumerate(shown)}
    # Sums of fractions may end slightly above the available slots.
    top = ceil(
        max([1, *(slots for *_, slots in limits), *(sum(each.slots.values()) for each in found)]) - 0.01
    )

    def x(at: datetime) -> float:
        return min(max(WIDTH * (1 - (now - at) / length), 0), WIDTH)

    def y(slots: float) -> float:
        return HEIGHT * (1 - slots / top)

    def box(each: Stretch, low: float, high: float) -> Box:
        return x(each.at), x(each.at + timedelta(seconds=each.seconds)), y(high), y(low)

    bands: list[Band] = []
    below = [0.0] * len(found)
    others = [key for key in had if key not in color_of]
    for keys, color in [*(([key], color_of[key]) for key in shown), (others, COLORS)]:
        above = [
            under + sum(each.slots.get(key, 0) for key in keys)
            for under, each in zip(below, found, strict=True)
        ]
        boxes = [box(*each) for each in zip(found, below, above, strict=True) if each[1] < each[2]]
        if path := _path(boxes):
            part = sum(had[key] for key in keys) / everything
            bands.append(Band(keys[0] if color < COLORS else None, path, color, part))
        below = above
    line = "".join(
        f"M{x(at):.1f} {y(slots):.1f}H{x(at + timedelta(seconds=seconds)):.1f}"
        for at, seconds, slots in limits
    )
    return Picture(bands, top, line, color_of)


def _path(boxes: Iterable[Box]) -> str:
    """The SVG path of rectangles; adjacent ones of equal height are joined."""
    joined: list[Box] = []
    for left, right, upper, lower in boxes:
        if joined and joined[-1][2:] == (upper, lower) and abs(joined[-1][1] - left) < 0.5:
            joined[-1] = (joined[-1][0], right, upper, lower)
        elif right > left:
            joined.append((left, right, upper, lower))
    return "".join(
        f"M{left:.1f} {upper:.2f}H{right:.1f}V{lower:.2f}H{left:.1f}Z" for left, right, upper, lower in joined
    )
