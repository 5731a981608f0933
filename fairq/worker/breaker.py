"""The circuit breaker in front of the database: values and transitions, no clock and no I/O.

closed     everything passes; failures in a row are counted, a success forgets them
open       nothing passes until the cool-down is over
half_open  one probe is on its way; its end closes the breaker, or opens it again

It is about the database. A handler that fails has nothing to do with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Breaker", "State", "failed", "may_pass", "succeeded", "wait"]

State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class Breaker:
    """`threshold` 0 never opens."""

    threshold: int
    cooldown: float
    state: State = "closed"
    failures: int = 0
    opened_at: float = 0.0


def wait(breaker: Breaker, now: float) -> float:
    """Seconds until something may pass; 0: now. In half_open the one probe is out: ask again after its
    end.
    """
    if breaker.state == "closed":
        return 0.0
    if breaker.state == "half_open":
        return breaker.cooldown
    return max(0.0, breaker.opened_at + breaker.cooldown - now)


def may_pass(breaker: Breaker, now: float) -> tuple[Breaker, bool]:
    """Ask before each try. Who is let through when the cool-down is over is the probe, and the only one."""
    if breaker.state == "closed":
        return breaker, True
    if breaker.state == "open" and now >= breaker.opened_at + breaker.cooldown:
        return replace(breaker, state="half_open"), True
    return breaker, False


def succeeded(breaker: Breaker) -> Breaker:
    return replace(breaker, state="closed", failures=0)


def failed(breaker: Breaker, now: float) -> Breaker:
    failures = breaker.failures + 1
    trips = breaker.state == "half_open" or (breaker.threshold > 0 and failures >= breaker.threshold)
    if breaker.state == "open":  # a try that was under way when the breaker opened
        return replace(breaker, failures=failures)
    if trips:
        return replace(breaker, state="open", failures=failures, opened_at=now)
    return replace(breaker, failures=failures)
