"""Held xmin contract: dead rows that vacuum may not remove cost the hot calls nothing.

One session keeps a snapshot open, as a long report or pg_dump does. Meanwhile 200,000 tasks (a tenth of it
here, all of it with `FAIRQ_TEST_ROWS=1000000`, as `make test-long` does) are created, promoted, popped and
finished. Then each call is measured in buffers beside the same call on a fresh queue: at most twice as many.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as counting
from random import Random
from typing import Any

import psycopg
import pytest

from tests.contract.loads import LONG
from tests.support.calls import FINISH, POP, Held, column, ending, finish, pop, register
from tests.support.plans import explain, shared_buffers
from tests.support.server import private_server

TASKS = 200_000 if LONG else 20_000
BATCH = 500
WISHES = 10  # one of so many tasks is cancelled, under that load

Conn = psycopg.Connection[Any]
Groups = Callable[[Random], str]

CREATE = (
    "select fairq.create_tasks(%s::text[], array_fill('{}'::jsonb, array[%s]), p_priorities => %s::int[])"
)
WISH = "select fairq.cancel_task(w.id) from unnest(%s::bigint[]) w(id)"


@dataclass
class Queue:
    """A session that acts as application and worker."""

    conn: Conn
    worker: int = 0
    random: Random = field(default_factory=lambda: Random(1))

    def register(self) -> None:
        self.worker = register(self.conn, lease="1 day")

    def create(self, groups: list[str], priorities: list[int] | None = None) -> list[int]:
        return column(self.conn, CREATE, groups, len(groups), priorities)

    def pop(self, limit: int) -> list[Held]:
        return pop(self.conn, self.worker, limit)

    def finish(self, tasks: list[Held]) -> None:
        finish(self.conn, self.worker, tasks)

    def travel(self, minutes: int) -> None:
        ahead = "select set_config('fairq.now', (clock_timestamp() + %s * interval '1 minute')::text, false)"
        self.conn.execute(ahead, [minutes])

    def buffers(self, query: str, *params: Any) -> int:
        return shared_buffers(explain(self.conn, query, params))


@dataclass(frozen=True)
class Load:
    """The churn."""

    group: Groups
    priorities: tuple[int, ...] = (0,)
    heartbeats: bool = False
    retries: bool = False
    cancels: bool = False
    backlog: int = 0


LOADS = {
    "50 groups": Load(lambda r: f"g{r.randrange(50)}"),
    "mixed priorities": Load(lambda r: f"g{r.randrange(50)}", priorities=(0, 1, 5)),
    "sparse newcomers": Load(lambda r: f"new {r.random()}"),
    "10,000 groups": Load(lambda r: f"g{r.randrange(10_000)}"),
    "a flooding group": Load(lambda r: "bob" if r.random() < 0.9 else f"g{r.randrange(50)}", backlog=5000),
    "heartbeats": Load(lambda r: f"g{r.randrange(50)}", heartbeats=True),
    "retries": Load(lambda r: f"g{r.randrange(50)}", retries=True),
    "cancellations": Load(lambda r: f"g{r.randrange(50)}", cancels=True),
}


def turn(queue: Queue, load: Load, size: int) -> None:
    """As many tasks in as out."""
    created = queue.create(
        [load.group(queue.random) for _ in range(size)],
        [queue.random.choice(load.priorities) for _ in range(size)],
    )
    if load.cancels:
        wished = created[: size // WISHES]
        queue.conn.execute(WISH, [wished])
    queue.conn.execute("select fairq.promote_overflow()")
    held = queue.pop(size)
    if load.retries:
        finish(queue.conn, queue.worker, held[:50], "retry", delay="0 s")
        held = held[50:]
    queue.finish(held)
    if load.heartbeats:
        for second in range(20):
            queue.conn.execute(
                "select set_config('fairq.now', (clock_timestamp() + %s * interval '1 second')::text, false)",
                [second],
            )
            queue.conn.execute("select fairq.heartbeat(%s)", [queue.worker])
        queue.conn.execute("reset fairq.now")


def settle(queue: Queue) -> None:
    """Run the upkeep until it has caught up."""
    for _ in range(1000):
        row = queue.conn.execute("select fairq.maintain() - 'promoted'").fetchone()
        assert row is not None
        if not row[0]:
            return
    raise AssertionError("maintenance never comes to an end")


def measure(queue: Queue) -> dict[str, int]:
    """Buffers of each hot call, on a queue with the same few tasks in it."""
    costs = {}
    groups = [f"m{number % 50}" for number in range(1500)]
    costs["create_tasks(1500)"] = queue.buffers(CREATE, groups, len(groups), None)
    costs["promote_overflow"] = queue.buffers("select fairq.promote_overflow()")
    queue.pop(1)
    costs["pop_tasks(100)"] = queue.buffers(POP, "default", 100, queue.worker, None, None)
    held = queue.pop(100)
    costs["finish_tasks(100)"] = queue.buffers(FINISH, *ending(queue.worker, held))
    queue.create(["newcomer 1", "newcomer 2"])
    costs["promote_overflow of newcomers"] = queue.buffers("select fairq.promote_overflow()")
    costs["pop_tasks(10)"] = queue.buffers(
        "select t.id from fairq.pop_tasks('default', 10, %s) t", queue.worker
    )
    costs["an idle promote_overflow"] = queue.buffers("select fairq.promote_overflow()")
    wished = queue.create(groups[:40])
    queue.conn.execute("select fairq.promote_overflow()")
    queue.conn.execute(WISH, [wished])
    costs["promote_overflow of 40 wishes to cancel"] = queue.buffers("select fairq.promote_overflow()")
    costs["heartbeat that names tasks"] = queue.buffers(
        "select fairq.heartbeat(%s, %s::bigint[])", queue.worker, [int(task) for task in held[:8]]
    )
    costs["heartbeat"] = queue.buffers("select fairq.heartbeat(%s)", queue.worker)
    settle(queue)
    costs["maintain"] = queue.buffers("select fairq.maintain()")
    for minute in (4, 5):  # the parts of the ledger in which all this happened
        queue.travel(minute)
        settle(queue)
    queue.travel(6)
    costs["maintain and two parts of the ledger"] = queue.buffers("select fairq.maintain()")
    return costs


def drain(queue: Queue) -> None:
    while held := queue.pop(BATCH):
        queue.finish(held)


def prepare(conn: Conn, load: Load) -> Queue:
    queue = Queue(conn)
    queue.register()
    conn.execute("select fairq.promote_overflow()")
    if load.backlog:
        queue.create(["bob"] * load.backlog)
    turn(queue, load, 100)  # plans are made, catalogues are read
    settle(queue)
    return queue


@pytest.fixture(scope="module")
def databases() -> Iterator[Iterator[str]]:
    """New databases, on a server where nobody else makes or analyzes any table: a session that falls behind
    with such news forgets its catalogue and its plans, and what it reads to have them again would count.
    """
    with private_server({"autovacuum": False}) as server:

        def made() -> Iterator[str]:
            for number in counting():
                with psycopg.connect(server.dsn(), autocommit=True) as conn:
                    conn.execute(f"create database fairq{number} template fairq".encode())
                yield server.dsn(f"fairq{number}")

        yield made()


def fresh(dsn: str, load: Load) -> dict[str, int]:
    """The costs on a queue that has seen a hundred tasks."""
    # A transaction begins with the measuring and holds no dead rows: for it, too, the ledger waits.
    with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn) as other:
        queue = prepare(conn, load)
        other.execute("select pg_current_xact_id()")
        return measure(queue)


def churn(queue: Queue, load: Load) -> None:
    for number in range(TASKS // BATCH):
        turn(queue, load, BATCH)
        if number % 10 == 9:
            queue.conn.execute("select fairq.maintain()")
    settle(queue)
    if not load.backlog:
        drain(queue)


@pytest.mark.parametrize("kind", LOADS)
def test_dead_rows_under_a_held_snapshot_cost_the_hot_calls_nothing(
    databases: Iterator[str], kind: str
) -> None:
    """I9: every call within twice the buffers of the same call on a fresh queue."""
    load = LOADS[kind]
    usual = fresh(next(databases), load)
    dsn = next(databases)
    with psycopg.connect(dsn) as report, psycopg.connect(dsn, autocommit=True) as conn:
        report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        report.execute("select pg_current_xact_id(), count(*) from fairq.tasks").fetchone()
        queue = prepare(conn, load)
        churn(queue, load)
        costs = measure(queue)
        assert report.execute("select count(*) from fairq.tasks").fetchone() == (0,), "the snapshot was held"

    # Who reads all open wishes to cancel reads the dead ones, too: the house, and a heartbeat that names no
    # tasks. That is a buffer for many of them, and no worker of ours sends such a heartbeat.
    allowed = {what: 2 * count for what, count in usual.items()}
    if load.cancels:
        for what in ("heartbeat", "maintain", "maintain and two parts of the ledger"):
            allowed[what] += TASKS // WISHES // 20
    # The ledger reads everything held: an entry, and a hundredth of a page, for each dead row in each part.
    allowed["maintain and two parts of the ledger"] += 2 * TASKS // 60
    # The clock is found by walking over what was popped since the last tick, two hundred tasks here: on a few
    # pages on a fresh queue, on some more where rows lie as they came.
    allowed["promote_overflow of newcomers"] += 200 // 8
    dear = {
        what: f"{count} instead of {usual[what]}" for what, count in costs.items() if count > allowed[what]
    }
    assert not dear, f"of {costs}"
