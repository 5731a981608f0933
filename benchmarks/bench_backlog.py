"""Pop and finish with much waiting, beside little."""

import time

from benchmarks.cycles import BATCH, FAIRQ, FIFO, PAYLOAD, Conn, Queue, register
from benchmarks.harness import Scale, Session, clear, hear
from benchmarks.measures import percentile

BASELINES = ("fifo",)
GROUPS = 1_000


def estimate(scale: Scale) -> float:
    return 2 + scale.backlog * 20e-6 + 4 * scale.repetitions * scale.seconds


def run(session: Session) -> None:
    for queue in (FAIRQ, FIFO):
        for waiting in (max(session.scale.backlog // 100, 10 * BATCH), session.scale.backlog):
            session.say(f"{waiting:,} waiting, {queue.name}")
            with session.connect() as conn:
                backlog(session, conn, queue, waiting)


def backlog(session: Session, conn: Conn, queue: Queue, waiting: int) -> None:
    """Pop and finish for a while, with so many tasks waiting; served tasks are enqueued again."""
    clear(conn)
    worker = register(conn, queue)
    fill(conn, queue, waiting)
    conn.execute("vacuum analyze")
    for _ in session.repetitions():
        # Hear the rings of what was enqueued again first; the first pop promotes.
        hear(conn)
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
        scenario = {"waiting": waiting, "groups": GROUPS}
        rate = BATCH / (sum(times) / len(times) / 1000)
        session.record(queue.name, "pop and finish from a backlog", rate, "tasks/s", **scenario)
        session.record(queue.name, "a hundred of a backlog, p50", percentile(times, 0.5), "ms", **scenario)
        session.record(queue.name, "a hundred of a backlog, p99", percentile(times, 0.99), "ms", **scenario)
        fill(conn, queue, served)


def take(conn: Conn, queue: Queue, worker: int) -> list[int]:
    """Pop a hundred and finish them; pops promote when they have to."""
    popped = conn.execute(queue.pop.encode(), (BATCH, worker)).fetchall()
    ids, attempts = [task[0] for task in popped], [task[1] for task in popped]
    conn.execute(queue.finish.encode(), (worker, ids, attempts))
    return ids


def fill(conn: Conn, queue: Queue, tasks: int) -> None:
    for start in range(0, tasks, 10_000):
        number = min(10_000, tasks - start)
        conn.execute(queue.create.encode(), {"groups": GROUPS, "tasks": number, "payload": PAYLOAD})
