"""Several queues by weight: how many tasks to ask each for. Pure functions; strict order needs none of this.

Each queue has a tag: how far it is, in tasks per weight. The next task is taken from the queue whose tag
would be smallest afterwards, which is what `quotas` says of a whole batch at once. While all have work, any
two of them never differ by more than one task of the one with the smaller weight.

What a queue does not use goes to the others, who owe nothing for it, and it gains nothing by having been
empty: its tag moves up to that of the others. In the turn that finds it empty, the first of the others takes
what it left; the next turns make that even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

# Sums of fractions are off by a little; a task is no fraction.
NEARLY = 1e-9


@dataclass(frozen=True, slots=True)
class Shares:
    """`tags` are relative to the smallest, which is 0. `empty`: it gave less than it was asked for."""

    queues: tuple[str, ...]
    weights: tuple[float, ...]
    tags: tuple[float, ...]
    empty: tuple[bool, ...]


def shares_of(weights: Mapping[str, float]) -> Shares:
    count = len(weights)
    return Shares(tuple(weights), tuple(weights.values()), (0.0,) * count, (False,) * count)


def quotas(shares: Shares, places: Sequence[int], room: int) -> dict[int, int]:
    """How many each of the queues at these places is to give if all of them have enough."""
    tags, weights = shares.tags, shares.weights
    level = _level([(tags[place], weights[place]) for place in places], room)
    given = {place: max(0, floor((level - tags[place]) * weights[place] + NEARLY)) for place in places}

    def tag(place: int, more: int) -> tuple[float, int]:
        return round(tags[place] + (given[place] + more) / weights[place], 9), place  # ties: the first named

    while sum(given.values()) < room:  # fewer times than there are queues
        given[min(places, key=lambda place: tag(place, 1))] += 1
    while sum(given.values()) > room:
        given[max((place for place in places if given[place]), key=lambda place: tag(place, 0))] -= 1
    return given


def _level(parts: Sequence[tuple[float, float]], room: int) -> float:
    """The tag that all would have if tasks could be split: pour the room into the queues, lowest first."""
    tag_sum = weight_sum = level = 0.0
    for tag, weight in sorted(parts):
        if weight_sum and level <= tag:
            break
        tag_sum += tag * weight
        weight_sum += weight
        level = (room + tag_sum) / weight_sum
    return level


def steps(shares: Shares, room: int) -> list[tuple[int, int]]:
    """Whom to ask for how many, by place, one after the other and until the room is used up.

    First those that were empty, for their share: most likely they give nothing. Then the others, as if there
    were nobody else. Then all for what is left.
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
    """After the answer to these steps: so many tasks of each queue."""
    empty = list(shares.empty)
    left, still = room, list(counts)
    for place, most in asked:
        wanted = min(most, left)
        if wanted:
            got = min(wanted, still[place])
            empty[place] = got < wanted
            still[place] -= got
            left -= got
    if left:  # all were asked for the rest: all are empty, and start anew together
        return replace(shares, tags=(0.0,) * len(counts), empty=tuple(empty))
    parts = zip(shares.tags, counts, shares.weights, strict=True)
    tags = [tag + count / weight for tag, count, weight in parts]
    # Those that are empty move up to where the one stands whose turn is next.
    others = [place for place, is_empty in enumerate(empty) if not is_empty]
    level = tags[min(others, key=lambda place: tags[place] + 1 / shares.weights[place])]
    tags = [max(tag, level) if is_empty else tag for tag, is_empty in zip(tags, empty, strict=True)]
    least = min(tags)
    return replace(shares, tags=tuple(tag - least for tag in tags), empty=tuple(empty))
