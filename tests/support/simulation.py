"""Workers and producers in simulated time: the engine is real, its clock is set (see `fairq._test_clock`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.support.calls import Conn, Held, finish, maintain, pop, register, run

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@dataclass
class Ran:
    """An attempt, as its worker saw it. `ended` is None while it runs."""

    task: Held
    worker: int
    began: float
    ends: float
    ended: float | None = None


@dataclass
class Simulation:
    """Advances the time in steps, with the upkeep every five seconds, as workers do."""

    conn: Conn
    slots: Sequence[int] = (8,)
    step: float = 0.5
    length: Callable[[Held], float] = lambda task: 1.0
    outcome: Callable[[Held], str] = lambda task: "succeeded"
    now: float = 0.0
    workers: list[int] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.set_time()
        self.workers = [register(self.conn, slots=slots) for slots in self.slots]
        maintain(self.conn)

    def set_time(self) -> None:
        at = NOON + timedelta(seconds=self.now)
        run(self.conn, "select set_config('fairq.now', %s, false)", at.isoformat(sep=" "))

    def until(self, seconds: float, arrive: Callable[[], object] = lambda: None) -> None:
        running = {
            worker: [each for each in self.ran if each.ended is None and each.worker == worker]
            for worker in self.workers
        }
        while self.now < seconds:
            self.now = round(self.now + self.step, 6)
            self.set_time()
            arrive()
            for worker, slots in zip(self.workers, self.slots, strict=True):
                held = running[worker]
                done = [each for each in held if each.ends <= self.now]
                for outcome in {self.outcome(each.task) for each in done}:
                    finish(
                        self.conn,
                        worker,
                        [each.task for each in done if self.outcome(each.task) == outcome],
                        outcome,
                    )
                for each in done:
                    each.ended = self.now
                    held.remove(each)
                if len(held) < slots:
                    for task in pop(self.conn, worker, slots - len(held)):
                        held.append(Ran(task, worker, self.now, self.now + self.length(task)))
                        self.ran.append(held[-1])
            if self.now % 5 < self.step:
                maintain(self.conn)
