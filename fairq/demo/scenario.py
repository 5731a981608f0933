"""Who enqueues how many tasks, and when. Nothing here touches a database or a clock."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

FLOOD = "bob"
_NAMES = ("alice", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy")

HANDLER_SECONDS = 0.040  # on average, from half of it to half as much again
FLOOD_STARTS = 0.08  # of the span: long enough to see that all is well before
OVERHEAD = 1.2  # the span is what the handlers take, and what the machine takes, about
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
    """Bob, and as many others."""
    more = (f"tenant{number}" for number in range(len(_NAMES) + 2, tenants + 1))
    return (FLOOD, *_NAMES[: tenants - 1], *more)


def handler_seconds(seed: int = SEED) -> Iterator[float]:
    """How long one handler after the other sleeps; the same for both queues."""
    chance = random.Random(seed)
    while True:
        yield HANDLER_SECONDS * chance.uniform(0.5, 1.5)


def plan(tasks: int, tenants: int, slots: int) -> Scenario:
    """Bob floods once; the others come by with one to three tasks at a time until he is nearly served."""
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
