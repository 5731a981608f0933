"""A side of the demo: a queue, a feeder, and a worker with slots. Both sides run the same code."""

import contextlib
import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import median

import psycopg

from fairq.demo.engines import Connection, Engine, Held
from fairq.demo.scenario import FLOOD, Scenario, handler_seconds

IDLE_SECONDS = 0.004  # between looks at an empty queue
FRAME_SECONDS = 0.125


@dataclass(frozen=True)
class Standing:
    """The state of one or more tenants at a moment. Waiting tasks count with their age so far."""

    tenant: str
    waits: list[float]
    started: int

    @property
    def arrived(self) -> int:
        return len(self.waits)

    @property
    def waiting(self) -> int:
        return self.arrived - self.started

    @property
    def p50(self) -> float | None:
        return median(self.waits) if self.waits else None

    @property
    def longest(self) -> float | None:
        return max(self.waits, default=None)


@dataclass(frozen=True)
class Standings:
    """The state of a side at a moment."""

    engine: str
    tenants: tuple[Standing, ...]
    others: Standing  # all but the flooding tenant, together
    started: int
    total: int


Show = Callable[[float, list[Standings]], None]


class Board:
    """What has happened on a side. Its threads write it, and the view reads it.

    On both sides a tenant's tasks start in the order of their arrival, so the n-th start belongs to the n-th
    arrival, and no ids are needed.
    """

    def __init__(self, engine: str, scenario: Scenario) -> None:
        self._engine = engine
        self._total = scenario.tasks
        self._guard = threading.Lock()
        self._arrivals: dict[str, list[float]] = {tenant: [] for tenant in scenario.tenants}
        self._waits: dict[str, list[float]] = {tenant: [] for tenant in scenario.tenants}

    def arrived(self, tenant: str, count: int, at: float) -> None:
        with self._guard:
            self._arrivals[tenant] += [at] * count

    def started(self, tasks: list[Held]) -> None:
        with self._guard:
            for task in tasks:
                self._waits[task.tenant].append(task.waited)

    def standings(self, now: float) -> Standings:
        with self._guard:
            tenants = tuple(
                Standing(
                    tenant, [*done, *(now - at for at in self._arrivals[tenant][len(done) :])], len(done)
                )
                for tenant, done in self._waits.items()
            )
        others = [each for each in tenants if each.tenant != FLOOD]
        waits = [wait for each in others for wait in each.waits]
        together = Standing("others", waits, sum(each.started for each in others))
        return Standings(self._engine, tenants, together, sum(each.started for each in tenants), self._total)


def feed(
    engine: Engine, board: Board, scenario: Scenario, conn: Connection, begin: float, stop: threading.Event
) -> None:
    """Enqueue the scenario's arrivals at their times."""
    for arrival in scenario.arrivals:
        if stop.wait(max(0.0, begin + arrival.at - time.monotonic())):
            return
        engine.enqueue(conn, arrival.tenant, arrival.count)
        board.arrived(arrival.tenant, arrival.count, time.monotonic())


def work(
    engine: Engine, board: Board, scenario: Scenario, conn: Connection, begin: float, stop: threading.Event
) -> None:
    """A worker: end what is done and take as many tasks as there are free slots, until everything is served.

    The handler only sleeps, so a busy slot is just the time at which it becomes free, and one thread can hold
    them all.
    """
    stop.wait(max(0.0, begin - time.monotonic()))
    busy: list[tuple[float, int, Held]] = []
    naps = handler_seconds()
    served = 0
    while not stop.is_set():
        now = time.monotonic()
        done: list[Held] = []
        while busy and busy[0][0] <= now:
            done.append(heapq.heappop(busy)[2])
        if free := scenario.slots - len(busy):
            taken = engine.turn(conn, done, free)
            served += len(done)
            board.started(taken)
            now = time.monotonic()
            for task in taken:
                heapq.heappush(busy, (now + next(naps), task.id, task))
            if served == scenario.tasks:
                return
        pause = max(0.0, busy[0][0] - time.monotonic()) if busy else IDLE_SECONDS
        stop.wait(pause if len(busy) == scenario.slots else min(pause, IDLE_SECONDS))


def run(dsn: str, engines: tuple[Engine, Engine], scenario: Scenario, show: Show) -> None:
    """Run both sides at once and show their state. However this ends, its threads have ended too."""
    stop = threading.Event()
    boards = [Board(engine.name, scenario) for engine in engines]
    with contextlib.ExitStack() as ending:
        connections: list[Connection] = []
        for _ in range(4):
            conn = psycopg.connect(dsn, autocommit=True, application_name="fairq demo")
            connections.append(ending.enter_context(conn))
            conn.execute("set statement_timeout = '30s'")
        begin = time.monotonic() + 0.1
        threads = ending.enter_context(ThreadPoolExecutor(4, "fairq-demo"))
        ending.callback(stop.set)
        pending = {
            threads.submit(job, engine, board, scenario, connections.pop(), begin, stop)
            for engine, board in zip(engines, boards, strict=True)
            for job in (feed, work)
        }
        while pending:
            ended, pending = wait(pending, timeout=FRAME_SECONDS, return_when=FIRST_EXCEPTION)
            for each in ended:
                each.result()
            now = time.monotonic()
            show(max(0.0, now - begin), [board.standings(now) for board in boards])
