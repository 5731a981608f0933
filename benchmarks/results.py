"""Reads results: JSON lines of one or more runs, grouped; and decides what to compare."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Key",
    "Results",
    "Values",
    "better",
    "gather",
    "load",
    "median",
    "newest",
    "pairs",
    "reference",
    "shown",
    "spread",
]

# The subjects that others are compared with: the first one that exists.
REFERENCES = ("fifo", "plain insert", "by hand", "without policies", "flat", "by count")
MORE_IS_BETTER = frozenset({"tasks/s", "share", "index"})
LESS_IS_BETTER = frozenset({"ms", "µs", "µs/task", "s", "buffers", "rows", "rows/task", "kB", "MB", "error"})
COUNTED = frozenset({"buffers", "rows", "tasks", "groups"})  # the same on every machine


@dataclass(frozen=True, order=True)
class Key:
    """What was measured, without the subject: values of the same key are compared."""

    benchmark: str
    what: str
    scenario: tuple[tuple[str, Any], ...]
    unit: str = field(compare=False)

    def text(self, without: Iterable[tuple[str, Any]] = ()) -> str:
        return ", ".join(
            f"{name} {value:,}" if _number(value) else f"{name} {value}"
            for name, value in self.scenario
            if (name, value) not in without
        )


# By subject, the values of its repetitions by number.
Values = dict[str, dict[int, float]]


@dataclass
class Results:
    """One run, or several that are read as one."""

    files: list[str] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    values: dict[Key, Values] = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))
    series: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    spins: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    limits: dict[Key, float] = field(default_factory=dict)

    def benchmarks(self) -> list[str]:
        return list(dict.fromkeys(key.benchmark for key in self.values))

    def of(self, benchmark: str, what: str | None = None) -> dict[Key, Values]:
        return {
            key: values
            for key, values in self.values.items()
            if key.benchmark == benchmark and what in (None, key.what)
        }

    def series_of(self, benchmark: str, what: str) -> list[dict[str, Any]]:
        return [each for each in self.series if each["benchmark"] == benchmark and each["what"] == what]

    def add(self, record: dict[str, Any]) -> None:
        if "facts" in record:
            self.facts.append(record["facts"])
        elif "note" in record:
            self.notes[record["benchmark"]][record["subject"]] = record["note"]
        elif "points" in record:
            self.series.append(record)
        elif record["subject"] == "machine":
            self.spins[record["benchmark"]].append(record["value"])
        else:
            conditions, subject = dict(record["scenario"]), record["subject"]
            # A queue with its own fairness option is a subject of its own, so that all are in one table.
            if (option := conditions.pop("option", None)) not in (None, "none", "always on"):
                subject = f"{subject}, {option}"
            scenario = tuple((name, _hashable(value)) for name, value in conditions.items())
            key = Key(record["benchmark"], record["what"], scenario, record["unit"])
            of_subject = self.values[key][subject]
            # A second file repeats the numbers, but its repetitions are further ones.
            number = record["repetition"]
            while number in of_subject:
                number += 1_000
            of_subject[number] = record["value"]
            if "limit" in record:
                self.limits[key] = record["limit"]

    def cut_off(self, key: Key, value: float) -> str:
        """A text instead of a value, if the measurement was cut off before; for waits in ms."""
        limit = self.limits.get(key)
        return f"not served in {limit / 1000:g} s" if limit is not None and value >= limit else ""


def load(paths: Iterable[Path]) -> Results:
    return gather(record for path in paths for record in _records(path))


def newest(paths: Sequence[Path]) -> Results:
    """Each benchmark from the last file that has it."""
    results = Results()
    taken: set[str] = set()
    for path in reversed(paths):
        records = _records(path)
        new = {record["benchmark"] for record in records if "facts" not in record} - taken
        if new:
            results.files.insert(0, path.name)
            for record in records:
                if "facts" in record or record["benchmark"] in new:
                    results.add(record)
        taken |= new
    return results


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def gather(records: Iterable[dict[str, Any]]) -> Results:
    results = Results()
    for record in records:
        results.add(record)
    return results


def median(values: dict[int, float]) -> float:
    return statistics.median(values.values())


def spread(values: dict[int, float]) -> float:
    """Half of the range relative to the median: how much a measurement varied within the run."""
    middle = median(values)
    return (max(values.values()) - min(values.values())) / 2 / abs(middle) if middle else 0.0


def better(unit: str) -> int:
    """1 if more is better, -1 if less is, else 0."""
    return 1 if unit in MORE_IS_BETTER else -1 if unit in LESS_IS_BETTER else 0


def reference(results: Results, key: Key, subject: str) -> tuple[str, dict[int, float]] | None:
    """What to compare a value with: the reference of its scenario, or else of the most similar one.

    A queue with a held snapshot is compared with itself without; a reference with nothing.
    """
    if subject.endswith(" held"):
        free = f"{subject.removesuffix(' held')} free"
        return (free, results.values[key][free]) if free in results.values[key] else None
    if subject in REFERENCES or subject.endswith(" free"):
        return None
    found: tuple[int, str, dict[int, float]] | None = None
    for other, values in results.values.items():
        if (other.benchmark, other.what) != (key.benchmark, key.what):
            continue
        for name in REFERENCES:
            if name in values:
                alike = len({*other.scenario} & {*key.scenario}) + 100 * (other == key)
                if found is None or alike > found[0]:
                    found = (alike, name, values[name])
                break
    return None if found is None else (found[1], found[2])


def pairs(values: dict[int, float], base: dict[int, float]) -> dict[int, float]:
    """Ratios by repetition, because a disturbance affects both of a pair."""
    return {number: value / base[number] for number, value in values.items() if base.get(number)}


def shown(value: float, unit: str = "") -> str:
    """A number for people."""
    rounded = float(f"{value:.3g}")
    whole = abs(rounded) >= 1000 or value == int(value)
    text = f"{value:,.0f}" if whole else f"{rounded:.3g}"
    return f"{text} {unit}".strip()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
