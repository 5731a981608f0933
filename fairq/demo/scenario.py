"""Who enqueues how many tasks, and when. No clock, no I/O."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

FLOOD = "bob"
_NAMES = ("alice", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy")

HANDLER_SECONDS = 0.040  # on average; from 50 % to 150 % of it
FLOOD_STARTS = 0.08  # part of the span before Bob's flood, to show that all is well
OVERHEAD = 1.2  # the span is about this times what the handlers take
SEED = 20  # the same arrivals in every run


@dataclass(frozen=True)
class Arrival:
    """One call of one tenant: `count` tasks, `at` seconds after the start."""

    at: float
    tenant: str
    count: int


@dataclass(frozen=True)
class Scenario:
    """The load that both queues get."""

    tenants: tuple[str, ...]  # the flooding one first
    slots: int
    arrivals: tuple[Arrival, ...]

    @property
    def tasks(self) -> int:
        return sum(arrival.count for arrival in self.arrivals)

    @property
    def flood(self) -> int:
        return sum(arrival.count for arrival in self.arrivals if arrival.tenant == FLOOD)


def names(tenants: int) -> tuple[str, ...]:
    """Bob and the others."""
    more = (f"tenant{number}" for number in range(len(_NAMES) + 2, tenants + 1))
    return (FLOOD, *_NAMES[: tenants - 1], *more)


def handler_seconds(seed: int = SEED) -> Iterator[float]:
    """How long each handler sleeps; the same for both queues."""
    chance = random.Random(seed)
    while True:
        yield HANDLER_SECONDS * chance.uniform(0.5, 1.5)


def plan(tasks: int, tenants: int, slots: int) -> Scenario:
    """Bob floods once; the others enqueue one to three tasks at a time until his are nearly served."""
    chance = random.Random(SEED)
    everybody = names(tenants)
    span = tasks * HANDLER_SECONDS / slots * OVERHEAD
    few = max(3, round(tasks / 400))
    arrivals = [Arrival(span * FLOOD_STARTS, FLOOD, tasks)]
    for tenant in everybody[1:]:
        left = few
        while left:
            count = min(left, chance.randint(1, 3))
            arrivals.append(Arrival(chance.uniform(0, span), tenant, count))
            left -= count
    arrivals.sort(key=lambda arrival: arrival.at)
    return Scenario(everybody, slots, tuple(arrivals))
