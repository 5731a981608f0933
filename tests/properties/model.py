"""Start-time fair queueing in memory, written down independently of the engine.

No addresses are given out ahead of time, there is no ready set, no horizon and no budget: each lane knows
where in virtual time its next task starts, and the lane that starts first is served next. The engine has to
serve in this order whatever it has promoted in advance.
"""

import hashlib
import math
from dataclasses import dataclass, field

ROUND = 2**20
# Places within a block: newcomers, in the order in which they were heard, before all lane numbers.
NEWCOMER, REGULAR = 0, 1


def shard_of(group: str, shards: int) -> int:
    return int(hashlib.md5(group.encode()).hexdigest()[:15], 16) % shards


def step(cost: float, weight: float) -> int:
    return max(1, math.ceil(ROUND * cost / weight))


@dataclass(frozen=True, order=True)
class Waiting:
    """Order within a group: higher priority, then the order of becoming runnable."""

    rank: int
    sequence: float
    id: int = field(compare=False)
    cost: float = field(compare=False)


@dataclass
class Lane:
    weight: float
    lane_no: int
    start: int = 0
    position: tuple[int, float] = (REGULAR, 0)
    tasks: list[Waiting] = field(default_factory=list)


@dataclass
class Domain:
    """One queue in one shard."""

    weights: dict[str, float]
    clock: int = 0
    top: int = 0
    lane_count: int = 0
    newcomers: int = 0
    lanes: dict[str, Lane] = field(default_factory=dict)
    rings: list[tuple[str, Waiting]] = field(default_factory=list)

    def ring(self, group: str, task: Waiting) -> None:
        """The task became visible; the group counts as waiting from the next promotion on."""
        self.rings.append((group, task))

    def hear(self) -> None:
        starts = [lane.start for lane in self.lanes.values() if lane.tasks]
        self.clock = max(self.clock, min(starts, default=self.top))
        heard: dict[str, list[Waiting]] = {}
        for group, task in self.rings:
            heard.setdefault(group, []).append(task)
        self.rings = []
        for group in sorted(heard, key=lambda g: min(t.sequence for t in heard[g])):
            lane = self.lanes.get(group)
            if lane is None:
                self.lane_count += 1
                lane = self.lanes[group] = Lane(self.weights.get(group, 1.0), self.lane_count)
            if not lane.tasks:
                sparse = lane.start <= self.clock
                lane.start = max(self.clock, lane.start)
                self.newcomers += sparse
                lane.position = (NEWCOMER, self.newcomers) if sparse else (REGULAR, lane.lane_no)
            lane.tasks = sorted(lane.tasks + heard[group])

    def pop(self) -> tuple[str, int] | None:
        waiting = [(lane.start, lane.position, group) for group, lane in self.lanes.items() if lane.tasks]
        if not waiting:
            return None
        _, _, group = min(waiting)
        lane = self.lanes[group]
        task = lane.tasks.pop(0)
        lane.start += step(task.cost, lane.weight)
        self.top = max(self.top, lane.start)
        lane.position = (REGULAR, lane.lane_no)
        return group, task.id
