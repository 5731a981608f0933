"""Every state that can be reached, by the shortest way."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

S = TypeVar("S", bound=Hashable)
Step = tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """How many states there are, and if one of them is wrong: what, and the steps that lead there."""

    states: int
    wrong: str | None = None
    trace: tuple[Step, ...] = ()


def explore(
    start: S, steps: Callable[[S], Iterable[tuple[Step, S]]], wrong: Callable[[S], str | None]
) -> Found:
    """Breadth first, so the first wrong state has a shortest trace. A state is looked at once."""
    came_from: dict[S, tuple[S, Step] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if what := wrong(state):
            trace: list[Step] = []
            while (last := came_from[state]) is not None:
                state, step = last
                trace.append(step)
            return Found(len(came_from), what, tuple(reversed(trace)))
        for step, after in steps(state):
            if after not in came_from:
                came_from[after] = (state, step)
                queue.append(after)
    return Found(len(came_from))
