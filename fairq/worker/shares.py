"""Several queues by weight: how many tasks to ask of each. Pure functions.

Each queue has a tag: how far it has come, in tasks per weight. The next task comes from the queue whose tag
would be smallest afterwards; `quotas` computes that for a whole batch. While all queues have tasks, two of
them never differ by more than one task of the one with the smaller weight.

What a queue leaves unused goes to the others, who owe nothing for it. A queue gains nothing by having been
empty: its tag moves up to theirs. In the turn that finds it empty, the first of the others takes what it
left, and the next turns make that even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

# Tolerance for sums of fractions.
NEARLY = 1e-9


@dataclass(frozen=True, slots=True)
class Shares:
    """`tags` are relative to the smallest, which is 0. An `empty` queue gave less than it was asked for."""

    queues: tuple[str, ...]
    weights: tuple[float, ...]
    tags: tuple[float, ...]
    empty: tuple[bool, ...]


def shares_of(weights: Mapping[str, float]) -> Shares:
    count = len(weights)
    return Shares(tuple(weights), tuple(weights.values()), (0.0,) * count, (False,) * count)


def quotas(shares: Shares, places: Sequence[int], room: int) -> dict[int, int]:
    """How many tasks to ask of each of these queues, if all have enough."""
    tags, weights = shares.tags, shares.weights
    level = _level([(tags[place], weights[place]) for place in places], room)
    given = {place: max(0, floor((level - tags[place]) * weights[place] + NEARLY)) for place in places}

    def tag(place: int, more: int) -> tuple[float, int]:
        return round(tags[place] + (given[place] + more) / weights[place], 9), place  # ties: the first named

    while sum(given.values()) < room:  # runs fewer times than there are queues
        given[min(places, key=lambda place: tag(place, 1))] += 1
    while sum(given.values()) > room:
        given[max((place for place in places if given[place]), key=lambda place: tag(place, 0))] -= 1
    return given


def _level(parts: Sequence[tuple[float, float]], room: int) -> float:
    """The tag that all would reach if tasks could be split: fill the queues up, lowest first."""
    tag_sum = weight_sum = level = 0.0
    for tag, weight in sorted(parts):
        if weight_sum and level <= tag:
            break
        tag_sum += tag * weight
        weight_sum += weight
        level = (room + tag_sum) / weight_sum
    return level


def steps(shares: Shares, room: int) -> list[tuple[int, int]]:
    """Which queues to ask for how many tasks, in order, until the room is used up.

    First the queues that were empty, for their share, though they will mostly give nothing. Then the others,
    as if they were alone. Then all for what is left.
    """
    places = sorted(range(len(shares.queues)), key=lambda place: shares.tags[place])
    if not any(shares.empty) or all(shares.empty):
        own = quotas(shares, places, room)
    else:
        own = {place: most for place, most in quotas(shares, places, room).items() if shares.empty[place]}
        own |= quotas(shares, [place for place in places if not shares.empty[place]], room)

    def next_tag(place: int) -> float:
        return shares.tags[place] + (own[place] + 1) / shares.weights[place]

    rest = sorted(places, key=next_tag)
    return [*((place, most) for place, most in own.items() if most), *((place, room) for place in rest)]


def served(shares: Shares, asked: Sequence[tuple[int, int]], counts: Sequence[int], room: int) -> Shares:
    """The shares after these steps gave so many tasks of each queue."""
    empty = list(shares.empty)
    left, still = room, list(counts)
    for place, most in asked:
        wanted = min(most, left)
        if wanted:
            got = min(wanted, still[place])
            empty[place] = got < wanted
            still[place] -= got
            left -= got
    if left:  # all were asked for the rest, so all are empty and start afresh together
        return replace(shares, tags=(0.0,) * len(counts), empty=tuple(empty))
    parts = zip(shares.tags, counts, shares.weights, strict=True)
    tags = [tag + count / weight for tag, count, weight in parts]
    # Empty queues move up to the tag of the one whose turn is next.
    others = [place for place, is_empty in enumerate(empty) if not is_empty]
    level = tags[min(others, key=lambda place: tags[place] + 1 / shares.weights[place])]
    tags = [max(tag, level) if is_empty else tag for tag, is_empty in zip(tags, empty, strict=True)]
    least = min(tags)
    return replace(shares, tags=tuple(tag - least for tag in tags), empty=tuple(empty))
