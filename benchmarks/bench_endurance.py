"""What time does: a snapshot held open, churn, and a large backlog.

A steady rate is served while one transaction keeps vacuum from removing anything, beside the same without,
and for a while after it ended. Then a worker with as much as it can do: its memory, and the size of the
tables. Then promote, pop and finish with much waiting beside little.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from benchmarks.bench_worker import enqueue, memory, wait_until_empty, workers
from benchmarks.harness import Scale, Session, clear, median
from benchmarks.measures import percentile

BASELINES = ("fifo",)
PAYLOAD = '{"file": "a.pdf", "note": "' + "x" * 60 + '"}'
RATE = 1_000
BATCH = 100
GROUPS = 50
MANY_GROUPS = 1_000
WINDOWS = 24
MAINTAIN_SECONDS = 5.0
CHURN = 2_000  # tasks in flight, between waits

Conn = psycopg.Connection[Any]


@dataclass(frozen=True)
class Queue:
    """A queue that one connection fills and empties."""

    name: str
    create: str  # groups, tasks, payload
    promote: str | None
    pop: str  # limit, worker
    finish: str  # worker, ids, attempts
    schema: str


FAIRQ = Queue(
    "fairq",
    "select count(*) from fairq.create_tasks("
    " array(select 'group ' || i %% %(groups)s::int from generate_series(1, %(tasks)s::int) i),"
    " array_fill(%(payload)s::jsonb, array[%(tasks)s::int]))",
    "select fairq.promote_overflow()",
    "select p.id, p.attempt from fairq.pop_tasks('default', %s, %s) p",
    "select count(*) from fairq.finish_tasks(%s, %s::bigint[], %s::integer[])",
    "fairq",
)
FIFO = Queue(
    "fifo",
    "insert into bench_fifo.tasks (group_key, payload)"
    " select 'group ' || i %% %(groups)s::int, %(payload)s::jsonb from generate_series(1, %(tasks)s::int) i",
    None,
    "select p.id, p.attempt from bench_fifo.pop_tasks('default', %s, %s) p",
    "select count(*) from bench_fifo.finish_tasks(%s, %s::bigint[], %s::integer[])",
    "bench_fifo",
)


def estimate(scale: Scale) -> float:
    held = scale.repetitions * 4 * (after(scale) + scale.held_seconds)
    backlog = scale.backlog * 20e-6 + 4 * scale.repetitions * scale.seconds
    return 5 + held + scale.churn_seconds + backlog


def after(scale: Scale) -> float:
    """How long the steady rate goes on when the snapshot has ended."""
    return max(scale.held_seconds / 3, 0.1)


def run(session: Session) -> None:
    for repetition in session.repetitions():
        for queue in (FAIRQ, FIFO):
            for held in (False, True):
                name = f"{queue.name} {'held' if held else 'free'}"
                session.say(f"steady rate, {name}, {repetition + 1}")
                with session.connect() as conn:
                    clear(conn)
                    steady(session, conn, queue, name, held)
    session.repetition = 0
    session.say("churn")
    churn(session)
    for queue in (FAIRQ, FIFO):
        for waiting in (max(session.scale.backlog // 100, 10 * BATCH), session.scale.backlog):
            session.say(f"{waiting:,} waiting, {queue.name}")
            with session.connect() as conn:
                backlog(session, conn, queue, waiting)


# --- A snapshot held open --------------------------------------------------------------------------


@dataclass
class Times:
    """Milliseconds of each call, with when it ended; by what was called."""

    start: float
    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.add(name, begun)

    def add(self, name: str, begun: float) -> None:
        now = time.perf_counter()
        self.calls.setdefault(name, []).append((now - self.start, (now - begun) * 1000))

    def between(self, name: str, start: float, end: float) -> list[float]:
        """Those that ended then; on a machine that is behind, the last one."""
        inside = [took for at, took in self.calls[name] if start <= at < end]
        return inside or [self.calls[name][-1][1]]


def steady(session: Session, conn: Conn, queue: Queue, name: str, held: bool) -> None:
    """Tasks arrive and are served at a fixed rate; what counts is the last quarter of the time held."""
    held_seconds, seconds = session.scale.held_seconds, session.scale.held_seconds + after(session.scale)
    worker = register(conn, queue)
    dead: list[tuple[float, float]] = []
    buffers: list[tuple[float, float]] = []
    served = 0
    next_look = next_maintain = 0.0
    with snapshot(session, held) as reader:
        times = Times(time.perf_counter())
        for turn in range(int(seconds * RATE / BATCH)):
            now = time.perf_counter() - times.start
            if now < turn * BATCH / RATE:
                time.sleep(turn * BATCH / RATE - now)
            if turn * BATCH / RATE >= held_seconds and reader.info.transaction_status:
                reader.rollback()
            with times.of("create"):
                conn.execute(queue.create.encode(), {"groups": GROUPS, "tasks": BATCH, "payload": PAYLOAD})
            created = time.perf_counter()
            if queue.promote:
                with times.of("promote"):
                    conn.execute(queue.promote.encode())
            now = time.perf_counter() - times.start
            if looks := now >= next_look:
                buffers.append((now, pop_buffers(conn, queue, worker)))
                dead.append((now, dead_rows(conn, queue)))
                next_look = now + seconds / WINDOWS
            with times.of("pop"):
                popped = conn.execute(queue.pop.encode(), (BATCH, worker)).fetchall()
            if not looks:
                times.add("wait", created)
            ids, attempts = [task[0] for task in popped], [task[1] for task in popped]
            with times.of("finish"):
                conn.execute(queue.finish.encode(), (worker, ids, attempts))
            served += len(popped)
            if queue is FAIRQ and now >= next_maintain:
                conn.execute("select fairq.maintain()")
                next_maintain = now + MAINTAIN_SECONDS
    scenario = {"rate": RATE, "seconds": held_seconds}
    session.record(name, "served", served / (int(seconds * RATE / BATCH) * BATCH), "share", **scenario)
    for call in times.calls:
        late = times.between(call, held_seconds * 3 / 4, held_seconds)
        session.record(name, f"{call} p50", percentile(late, 0.5), "ms", **scenario)
        session.record(name, f"{call} p99", percentile(late, 0.99), "ms", **scenario)
    recovered = times.between("pop", (held_seconds + seconds) / 2, seconds + 1)
    session.record(name, "pop p50 afterwards", percentile(recovered, 0.5), "ms", **scenario)
    in_time = [value for at, value in buffers if at < held_seconds]
    session.record(name, "buffers of a pop, at the end", in_time[-1], "buffers", **scenario)
    session.record(name, "dead rows at the end", max(value for _, value in dead), "rows", **scenario)
    session.series(name, "pop", by_window(times.calls["pop"], seconds), "ms", **scenario)
    session.series(name, "dead rows", dead, "rows", **scenario)
    session.series(name, "buffers of a pop", buffers, "buffers", **scenario)


@contextlib.contextmanager
def snapshot(session: Session, held: bool) -> Iterator[Conn]:
    with psycopg.connect(session.dsn) as reader:
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


def by_window(calls: list[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    """The median of each window, at its end."""
    points = []
    for number in range(WINDOWS):
        start, end = number * seconds / WINDOWS, (number + 1) * seconds / WINDOWS
        if inside := [took for at, took in calls if start <= at < end]:
            points.append((end, median(inside)))
    return points


def register(conn: Conn, queue: Queue) -> int:
    if queue is not FAIRQ:
        return 1
    row = conn.execute("select fairq.register_worker('bench', '{default}', 100, '1 day')").fetchone()
    assert row is not None
    return int(row[0])


# --- Churn -----------------------------------------------------------------------------------------


def churn(session: Session) -> None:
    """A worker that never rests: its resident memory, and the tables that should not grow."""
    seconds = session.scale.churn_seconds
    resident: list[tuple[float, float]] = []
    sizes: list[tuple[float, float]] = []
    tasks = 0
    with session.connect() as conn:
        clear(conn)
        with workers(conn, session.dsn, 1, 50) as pids:
            start = time.perf_counter()
            while (now := time.perf_counter() - start) < seconds or len(sizes) < 3:
                for kind in ("nothing", "nothing_in_thread"):
                    enqueue(conn, kind, CHURN // 2)
                    tasks += CHURN // 2
                wait_until_empty(conn)
                if not sizes or now - sizes[-1][0] >= seconds / WINDOWS:
                    resident.append((now, memory(pids)))
                    sizes.append((now, live_size(conn)))
    scenario = {"seconds": seconds}
    session.record("fairq", "tasks of the churn", tasks / seconds, "tasks/s", **scenario)
    early = len(sizes) // 4
    for what, points in (("memory of the worker", resident), ("live tables and indexes", sizes)):
        session.record("fairq", f"{what}, early", points[early][1], "MB", **scenario)
        session.record("fairq", f"{what}, at the end", points[-1][1], "MB", **scenario)
        session.series("fairq", what, points, "MB", **scenario)


def live_size(conn: Conn) -> float:
    """Megabytes of all tables but the history, with their indexes and TOAST."""
    row = conn.execute(
        "select sum(pg_total_relation_size(c.oid))"
        " from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'fairq' and c.relkind = 'r'"
        " and c.relname not like 'finished\\_tasks%' and c.relname not like 'attempts%'"
    ).fetchone()
    return float(row[0]) / 1e6 if row else 0.0


# --- A large backlog -------------------------------------------------------------------------------


def backlog(session: Session, conn: Conn, queue: Queue, waiting: int) -> None:
    """Pops and finishes for a while, with so many tasks waiting; what is served is put back."""
    clear(conn)
    worker = register(conn, queue)
    fill(conn, queue, waiting)
    conn.execute("vacuum analyze")
    for _ in session.repetitions():
        # The first pop hears of what was put back, and promotes.
        served = len(take(conn, queue, worker))
        begun = time.perf_counter()
        times: list[float] = []
        while (before := time.perf_counter()) - begun < session.scale.seconds or not times:
            popped = take(conn, queue, worker)
            if len(popped) < BATCH:
                served += len(popped)
                break
            times.append((time.perf_counter() - before) * 1000)
            served += BATCH
        scenario = {"waiting": waiting, "groups": MANY_GROUPS}
        rate = BATCH / (sum(times) / len(times) / 1000)
        session.record(queue.name, "pop and finish from a backlog", rate, "tasks/s", **scenario)
        session.record(queue.name, "a hundred of a backlog, p50", percentile(times, 0.5), "ms", **scenario)
        session.record(queue.name, "a hundred of a backlog, p99", percentile(times, 0.99), "ms", **scenario)
        fill(conn, queue, served)


def take(conn: Conn, queue: Queue, worker: int) -> list[int]:
    """Pops a hundred and finishes them; pops promote when they have to."""
    popped = conn.execute(queue.pop.encode(), (BATCH, worker)).fetchall()
    ids, attempts = [task[0] for task in popped], [task[1] for task in popped]
    conn.execute(queue.finish.encode(), (worker, ids, attempts))
    return ids


def fill(conn: Conn, queue: Queue, tasks: int) -> None:
    for start in range(0, tasks, 10_000):
        number = min(10_000, tasks - start)
        conn.execute(queue.create.encode(), {"groups": MANY_GROUPS, "tasks": number, "payload": PAYLOAD})
