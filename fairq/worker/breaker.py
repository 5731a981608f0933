"""The circuit breaker in front of the database, as pure functions. Failing handlers do not concern it.

closed     everything passes; failures in a row are counted, and a success resets the count
open       nothing passes until the cool-down is over
half_open  one probe is on its way; its result closes the breaker, or opens it again
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

State = Literal["closed", "open", "half_open"]
# The most by which a cool-down is shortened, so that not all workers come back at once.
JITTER: Final = 0.25


@dataclass(frozen=True, slots=True)
class Breaker:
    """A `threshold` of 0 never opens."""

    threshold: int
    cooldown: float
    state: State = "closed"
    failures: int = 0
    open_until: float = 0.0


def wait(breaker: Breaker, now: float) -> float:
    """Seconds until something may pass; 0: now. In half_open, the cool-down: a probe is on its way."""
    if breaker.state == "closed":
        return 0.0
    if breaker.state == "half_open":
        return breaker.cooldown
    return max(0.0, breaker.open_until - now)


def may_pass(breaker: Breaker, now: float) -> tuple[Breaker, bool]:
    """Whether a try may pass. The first one after the cool-down is the probe, and the only one."""
    if breaker.state == "closed":
        return breaker, True
    if breaker.state == "open" and now >= breaker.open_until:
        return replace(breaker, state="half_open"), True
    return breaker, False


def succeeded(breaker: Breaker) -> Breaker:
    return replace(breaker, state="closed", failures=0)


def failed(breaker: Breaker, now: float, draw: Callable[[], float] = random.random) -> Breaker:
    failures = breaker.failures + 1
    trips = breaker.state == "half_open" or (breaker.threshold > 0 and failures >= breaker.threshold)
    if breaker.state == "open":  # a try that was under way when the breaker opened
        return replace(breaker, failures=failures)
    if trips:
        open_until = now + breaker.cooldown * (1 - JITTER * draw())
        return replace(breaker, state="open", failures=failures, open_until=open_until)
    return replace(breaker, failures=failures)
