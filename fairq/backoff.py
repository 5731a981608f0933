"""Which failed attempts are tried again, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from fairq.errors import LONGEST_PAUSE, ConfigurationError, is_within

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """Which failed attempts are tried again, and after how many seconds.

    The pause after attempt n is `base * factor ** (n - 1)` seconds, at most `cap`, varied at random by up to
    `jitter` of itself. Exceptions in `on` are retried unless they are also in `never`.
    """

    base: float = 1.0
    cap: float = 600.0
    factor: float = 2.0
    jitter: float = 0.25
    on: tuple[type[BaseException], ...] = (Exception,)
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        numbers = {"base": self.base, "cap": self.cap, "factor": self.factor, "jitter": self.jitter}
        bounds = {"factor": (1, LONGEST_PAUSE), "jitter": (0, 1)}
        wrong = [
            name
            for name, value in numbers.items()
            if not is_within(value, *bounds.get(name, (0, LONGEST_PAUSE)))
        ]
        if wrong:
            shown = ", ".join(f"{name}={numbers[name]!r}" for name in wrong)
            raise ConfigurationError(
                f"Backoff({shown}) is out of range",
                "base and cap: seconds, 0 to ten years; factor: 1 or more; jitter: 0 to 1.",
            )
        for name, classes in (("on", self.on), ("never", self.never)):
            if not isinstance(classes, tuple) or not all(
                isinstance(each, type) and issubclass(each, BaseException) for each in classes
            ):
                raise ConfigurationError(
                    f"Backoff({name}=…) is not a tuple of exception types: {classes!r:.80}",
                    f"Pass a tuple, also of one: Backoff({name}=(ConnectionError,))",
                )

    def retries(self, exception: BaseException) -> bool:
        return isinstance(exception, self.on) and not isinstance(exception, self.never)

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after attempt number `attempt`; `draw` returns a number from 0 to 1."""
        try:
            pause = self.base * self.factor ** (max(attempt, 1) - 1)
        except OverflowError:
            pause = self.cap
        return min(pause, self.cap) * (1 + self.jitter * (2 * draw() - 1))
