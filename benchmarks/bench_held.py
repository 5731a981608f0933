"""A snapshot held open at a steady rate: what a pop costs, dead rows, recovery; beside the same without.

While one transaction keeps its snapshot, vacuum may remove nothing that died since. A snapshot counts in its
own database only, so queues with and without one are served at the same time, in databases of one server:
what disturbs one disturbs the others.
"""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psycopg

from benchmarks.cycles import BATCH, FAIRQ, FIFO, PAYLOAD, Conn, Queue, register
from benchmarks.harness import Scale, Session, database, median
from benchmarks.measures import percentile

BASELINES: tuple[str, ...] = ()
RATE = 1_000
GROUPS = 50
WINDOWS = 24
MAINTAIN_SECONDS = 5.0

# Seconds since the start, and a value.
Points = list[tuple[float, float]]


def estimate(scale: Scale) -> float:
    return 3 + scale.repetitions * (after(scale) + scale.held_seconds + 2)


def after(scale: Scale) -> float:
    """How long the steady rate goes on after the snapshot."""
    return max(scale.held_seconds / 3, 0.1)


def run(session: Session) -> None:
    subjects = [(queue, held) for queue in (FAIRQ, FIFO) for held in (False, True)]
    for _ in session.repetitions():
        session.say(f"steady rate, {session.scale.held_seconds:.0f} s held")
        with ThreadPoolExecutor(len(subjects)) as threads:
            # At different moments of a turn, or they would always coincide.
            waiting = [
                threads.submit(serve, session.dsn, session.scale, queue, held, nth / len(subjects))
                for nth, (queue, held) in enumerate(subjects)
            ]
            for (queue, held), served in zip(subjects, waiting, strict=True):
                record(session, f"{queue.name} {'held' if held else 'free'}", served.result())


@dataclass
class Served:
    """The measurements at the steady rate: by call, when each ended and how many milliseconds it took."""

    share: float = 0
    calls: dict[str, Points] = field(default_factory=dict)
    dead: Points = field(default_factory=list)
    buffers: Points = field(default_factory=list)

    def between(self, call: str, start: float, end: float) -> list[float]:
        """Those that ended in the window; if there is none, the last one before."""
        inside = [took for at, took in self.calls[call] if start <= at < end]
        return inside or [self.calls[call][-1][1]]


def serve(server: str, scale: Scale, queue: Queue, held: bool, phase: float) -> Served:
    """Enqueue and serve tasks at a fixed rate, batch by batch, in a database of their own."""
    seconds = scale.held_seconds + after(scale)
    turns = int(seconds * RATE / BATCH)
    found = Served()
    tasks = 0
    next_look = next_maintain = 0.0
    with contextlib.ExitStack() as stack:
        name = f"held_{queue.name}_{'held' if held else 'free'}"
        dsn = stack.enter_context(database(server, *([] if queue is FAIRQ else [queue.name]), name=name))
        conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        worker = register(conn, queue)
        reader = stack.enter_context(snapshot(dsn, held))
        start = time.perf_counter()

        @contextlib.contextmanager
        def timed(call: str) -> Iterator[None]:
            begun = time.perf_counter()
            yield
            add(call, begun)

        def add(call: str, begun: float) -> None:
            now = time.perf_counter()
            found.calls.setdefault(call, []).append((now - start, (now - begun) * 1000))

        for turn in range(turns):
            due = (turn + phase) * BATCH / RATE
            time.sleep(max(0, due - (time.perf_counter() - start)))
            if due >= scale.held_seconds and reader.info.transaction_status:
                reader.rollback()
            with timed("create"):
                conn.execute(queue.create.encode(), {"groups": GROUPS, "tasks": BATCH, "payload": PAYLOAD})
            created = time.perf_counter()
            if queue.promote:
                with timed("promote"):
                    conn.execute(queue.promote.encode())
            now = time.perf_counter() - start
            if looks := now >= next_look:
                found.buffers.append((now, pop_buffers(conn, queue, worker)))
                found.dead.append((now, dead_rows(conn, queue)))
                next_look = now + seconds / WINDOWS
            with timed("pop"):
                popped = conn.execute(queue.pop.encode(), (BATCH, worker)).fetchall()
            if not looks:
                add("wait", created)
            ids, attempts = [task[0] for task in popped], [task[1] for task in popped]
            with timed("finish"):
                conn.execute(queue.finish.encode(), (worker, ids, attempts))
            tasks += len(popped)
            if queue is FAIRQ and now >= next_maintain:
                conn.execute("select fairq.maintain()")
                next_maintain = now + MAINTAIN_SECONDS
    found.share = tasks / (turns * BATCH)
    return found


def record(session: Session, name: str, served: Served) -> None:
    """The values of the last quarter of the time held, and of the second half of what came after it."""
    held = session.scale.held_seconds
    seconds = held + after(session.scale)
    scenario = {"rate": RATE, "seconds": held}
    session.record(name, "served", served.share, "share", **scenario)
    for call in served.calls:
        late = served.between(call, held * 3 / 4, held)
        session.record(name, f"{call} p50", percentile(late, 0.5), "ms", **scenario)
        session.record(name, f"{call} p99", percentile(late, 0.99), "ms", **scenario)
    recovered = served.between("pop", (held + seconds) / 2, seconds + 1)
    session.record(name, "pop p50 afterwards", percentile(recovered, 0.5), "ms", **scenario)
    in_time = [value for at, value in served.buffers if at < held]
    session.record(name, "buffers of a pop, at the end", in_time[-1], "buffers", **scenario)
    most = max(value for _, value in served.dead)
    session.record(name, "dead rows at the end", most, "rows", **scenario)
    session.series(name, "pop", by_window(served.calls["pop"], seconds), "ms", **scenario)
    session.series(name, "dead rows", served.dead, "rows", **scenario)
    session.series(name, "buffers of a pop", served.buffers, "buffers", **scenario)


@contextlib.contextmanager
def snapshot(dsn: str, held: bool) -> Iterator[Conn]:
    with psycopg.connect(dsn) as reader:
        if held:
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("select count(*) from pg_class")
        yield reader
        reader.rollback()


def pop_buffers(conn: Conn, queue: Queue, worker: int) -> float:
    """Buffers of a pop that is rolled back."""
    with conn.transaction(force_rollback=True):
        row = conn.execute(
            f"explain (analyze, buffers, format json) {queue.pop}".encode(), (BATCH, worker)
        ).fetchone()
    assert row is not None
    top = row[0][0]["Plan"]
    return float(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def dead_rows(conn: Conn, queue: Queue) -> float:
    row = conn.execute(
        "select coalesce(sum(n_dead_tup), 0) from pg_stat_user_tables where schemaname = %s", (queue.schema,)
    ).fetchone()
    return float(row[0]) if row else 0.0


def by_window(calls: Points, seconds: float) -> Points:
    """The median of each window, at its end."""
    points = []
    for number in range(WINDOWS):
        start, end = number * seconds / WINDOWS, (number + 1) * seconds / WINDOWS
        if inside := [took for at, took in calls if start <= at < end]:
            points.append((end, median(inside)))
    return points
