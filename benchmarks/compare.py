"""Compares two runs: is the second slower by more than the measurements themselves vary?

Rates and times are compared as ratios to the reference of their own run (a FIFO queue, a plain insert), so a
machine that is busier today makes nobody slower. Where there is no reference, a fixed piece of work that ran
beside each repetition takes its place. Rows and buffers are counted, and compared as they are.
"""

import statistics
from dataclasses import dataclass

from benchmarks.results import COUNTED, Key, Results, better, median, pairs, reference, spread

LEAST_TOLERANCE = 0.10
SPREADS = 2.0


@dataclass(frozen=True)
class Change:
    """How a subject's value changed. `worse` is relative: 0.5 is 50 % worse, a negative value is better."""

    key: Key
    subject: str
    old: float
    new: float
    worse: float
    tolerance: float
    against: str

    @property
    def regressed(self) -> bool:
        return self.worse > self.tolerance


def compare(old: Results, new: Results, least: float = LEAST_TOLERANCE) -> list[Change]:
    """Every value that both runs have, the worst first."""
    changes = []
    for key, subjects in new.values.items():
        direction = better(key.unit)
        if not direction or key not in old.values:
            continue
        for subject in subjects:
            if subject not in old.values[key]:
                continue
            before, after, against = _sides(old, new, key, subject)
            if not before or not after:
                continue
            first, second = median(before), median(after)
            if first <= 0 or second <= 0:
                continue
            worse = first / second - 1 if direction > 0 else second / first - 1
            tolerance = max(least, SPREADS * (spread(before) + spread(after)))
            changes.append(Change(key, subject, first, second, worse, tolerance, against))
    return sorted(changes, key=lambda change: change.tolerance - change.worse)


def _sides(
    old: Results, new: Results, key: Key, subject: str
) -> tuple[dict[int, float], dict[int, float], str]:
    """The values of both runs in comparable form, and what they are relative to."""
    before, after = old.values[key][subject], new.values[key][subject]
    if key.unit in COUNTED or key.unit in ("share", "index", "error", "kB", "MB"):
        return before, after, "as counted"
    bases = reference(old, key, subject), reference(new, key, subject)
    if bases[0] and bases[1] and bases[0][0] == bases[1][0]:
        return pairs(before, bases[0][1]), pairs(after, bases[1][1]), bases[0][0]
    speed = _spin(new, key) / _spin(old, key)
    factor = speed if better(key.unit) > 0 else 1 / speed
    return before, {number: value * factor for number, value in after.items()}, "the machine's speed"


def _spin(results: Results, key: Key) -> float:
    spins = results.spins.get(key.benchmark) or [each for many in results.spins.values() for each in many]
    return statistics.median(spins) if spins else 1.0
