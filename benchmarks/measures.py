"""Measures of fairness, as pure functions."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.engines import Record

__all__ = ["by_class", "evenness", "jain", "percentile", "service", "share_error", "windows"]


def jain(service: Iterable[float]) -> float:
    """Jain's index: 1 if all (or none) got the same, 1/n if one of n got everything."""
    values = list(service)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def evenness(service: Iterable[float]) -> float:
    """The smallest over the largest."""
    values = list(service)
    return min(values) / max(values) if max(values, default=0) else 1.0


def share_error(service: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The largest deviation of a share from the one by weight, relative to that."""
    total, all_weights = sum(service.values()), sum(weights.values())
    if not total:
        return 1.0
    return max(
        abs(service.get(name, 0) / total * all_weights / weight - 1) for name, weight in weights.items()
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this part of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def service(
    records: Iterable[Record], groups: Iterable[str], start: float, end: float, *, by_seconds: bool
) -> dict[str, float]:
    """What each group got between two moments: started tasks, or worker seconds."""
    got: dict[str, float] = dict.fromkeys(groups, 0.0)
    for record in records:
        if record.group not in got or record.started is None:
            continue
        if by_seconds:
            until = end if record.finished is None else record.finished
            got[record.group] += max(0.0, min(until, end) - max(record.started, start))
        elif start <= record.started < end:
            got[record.group] += 1
    return got


def windows(start: float, end: float, count: int) -> list[tuple[float, float]]:
    step = (end - start) / count
    return [(start + number * step, start + (number + 1) * step) for number in range(count)]


def by_class(records: Iterable[Record], end: float) -> dict[str, list[float]]:
    """Waits in milliseconds, by the first word of the group's name."""
    waits: dict[str, list[float]] = defaultdict(list)
    for record in records:
        waits[record.group.split()[0]].append(record.waited(end) * 1000)
    return waits
