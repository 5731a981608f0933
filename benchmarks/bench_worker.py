"""`fairq work`: no-op tasks through one and two processes, and the way from enqueue to handler."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

import fairq
from benchmarks.harness import ROOT, Scale, Session, clear
from fairq.worker.supervisor import LIFELINE

BASELINES = ()
PAYLOAD = {"file": "a.pdf", "note": "x" * 60}
SLOTS = 500
# Slots that people use, and how many times fewer tasks.
FEW = {1: 40, 2: 20, 8: 8, 50: 3}
PATIENCE_SECONDS = 600.0

Conn = psycopg.Connection[Any]


def estimate(scale: Scale) -> float:
    drains = 4 * min(scale.tasks, 200_000) * 80e-6 + 2 * scale.seconds
    few = 2 * min(scale.tasks, 200_000) * sum(500e-6 / fewer for fewer in FEW.values())
    return 3 + scale.backlog * 15e-6 + scale.repetitions * (20 + drains + few + scale.seconds * 3)


def run(session: Session) -> None:
    tasks = min(session.scale.tasks, 200_000)
    for _ in session.repetitions():
        for processes in (1, 2):
            drain(session, "nothing", tasks, processes, SLOTS)
        for slots, fewer in list(FEW.items())[-1 if session.scale.name == "tiny" else 0 :]:
            for kind in ("nothing", "nothing_in_thread"):
                drain(session, kind, max(tasks // fewer, 50), 1, slots)
        latency(session, max(20, min(2_000, int(session.scale.seconds * 200))))
    large_backlog(session)


def drain(session: Session, kind: str, tasks: int, processes: int, slots: int) -> None:
    """From the commit that creates all tasks at once to the end of the last."""
    with session.connect() as conn:
        clear(conn)
        with workers(conn, session.dsn, processes, slots) as pids:
            with conn.transaction():
                enqueue(conn, kind, tasks)
            start, busy = time.perf_counter(), cpu(pids)
            wait_until_empty(conn)
            seconds = last_end(conn, time.perf_counter() - start)
            used = cpu(pids) - busy
        ended = scalar(conn, "select count(*) from fairq.finished_tasks where outcome = 'succeeded'")
    if ended != tasks:
        raise RuntimeError(f"{ended} of {tasks} tasks succeeded")
    scenario: dict[str, Any] = {"handler": kind, "processes": processes, "slots": slots}
    session.record("fairq", "drain", tasks / seconds, "tasks/s", **scenario)
    session.record("fairq", "processor time of the worker", used / tasks * 1e6, "µs/task", **scenario)


def large_backlog(session: Session) -> None:
    """Run for a while with many tasks waiting: the rate between the first and the last end."""
    with session.connect() as conn:
        clear(conn)
        enqueue(conn, "nothing", session.scale.backlog)
        for _ in session.repetitions():
            begin = scalar(conn, "select clock_timestamp()")
            with workers(conn, session.dsn, 1, SLOTS):
                time.sleep(2 * session.scale.seconds)
            found = conn.execute(
                "select count(*), extract(epoch from max(finished_at) - min(finished_at))::float8"
                " from fairq.finished_tasks where finished_at > %s",
                (begin,),
            ).fetchone()
            if not found or not found[1]:
                break  # so few that the worker is already done
            rate = found[0] / found[1]
            session.record(
                "fairq", "drain of a large backlog", rate, "tasks/s", waiting=session.scale.backlog
            )


def latency(session: Session, count: int) -> None:
    """One task at a time, on an idle worker."""
    with session.connect() as conn:
        clear(conn)
        with workers(conn, session.dsn, 1, 8):
            for _ in range(count):
                fairq.enqueue(conn, "alice", time.time(), kind="delay")
                time.sleep(0.01)
            wait_until_empty(conn)
        delays = sorted(
            row[0] * 1e3 for row in conn.execute("select result::float8 from fairq.finished_tasks").fetchall()
        )
    session.record("fairq", "enqueue to start, p50", statistics.median(delays), "ms", tasks=count)
    session.record("fairq", "enqueue to start, p99", delays[int(len(delays) * 0.99)], "ms", tasks=count)


# --- Parts -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def workers(conn: Conn, dsn: str, processes: int, slots: int) -> Iterator[list[int]]:
    """So many processes of `fairq work`, registered and idle."""
    command = [
        sys.executable,
        "-m",
        "fairq",
        "work",
        "benchmarks.worker_app",
        "-c",
        str(slots),
        "--log-level",
        "error",
    ]
    # Only this process holds the other end of the pipe, so the workers end when it does.
    lifeline, held = os.pipe()
    env = {**os.environ, "FAIRQ_DSN": dsn, "PYTHONPATH": str(ROOT.parent), LIFELINE: str(lifeline)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            started.append(
                subprocess.Popen(
                    command, env=env, cwd=ROOT.parent, stdout=subprocess.DEVNULL, pass_fds=(lifeline,)
                )
            )
        ready = "select count(*) from pg_stat_activity where application_name = 'fairq listen'"
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while (
            scalar(conn, ready) < processes or scalar(conn, "select count(*) from fairq.workers") < processes
        ):
            if time.perf_counter() > deadline or any(each.poll() is not None for each in started):
                raise RuntimeError("the workers do not start")
            time.sleep(0.05)
        time.sleep(0.3)
        yield [each.pid for each in started]
    finally:
        for each in started:
            each.send_signal(signal.SIGTERM)
        for each in started:
            each.wait()
        os.close(held)
        os.close(lifeline)


def enqueue(conn: Conn, kind: str, tasks: int) -> None:
    for start in range(0, tasks, 10_000):
        count = min(10_000, tasks - start)
        fairq.enqueue_many(conn, [(f"group {number % 100}", PAYLOAD) for number in range(count)], kind=kind)


def wait_until_empty(conn: Conn) -> None:
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while scalar(conn, "select exists (select from fairq.tasks)"):
        if time.perf_counter() > deadline:
            raise RuntimeError("tasks are left")
        time.sleep(0.02)


def last_end(conn: Conn, most: float) -> float:
    """Seconds from the first start to the last end, by the database's clock."""
    found = scalar(
        conn,
        "select extract(epoch from max(finished_at) - min(started_at))::float8 from fairq.finished_tasks",
    )
    return min(float(found), most) or most


def scalar(conn: Conn, statement: str) -> Any:
    row = conn.execute(statement.encode()).fetchone()
    return row[0] if row else None


def cpu(pids: list[int]) -> float:
    """Processor seconds so far; 0 if the system does not tell."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def memory(pids: list[int]) -> float:
    """Resident megabytes; 0 if the system does not tell."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return total
