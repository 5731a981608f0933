"""Creating tasks: one by one, inside transactions, and in bulk, beside plain inserts of the same payload."""

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg.types.array import ListBinaryDumper

from benchmarks.harness import Scale, Session, clear, timed

PAYLOAD = '{"file": "a.pdf", "note": "' + "x" * 60 + '"}'
BASELINES = ("fifo", "article")

PLAIN = "insert into bench_fifo.tasks (group_key, payload) values (%s, %s::jsonb)"
FAIRQ = "select fairq.create_task(%s, %s::jsonb)"
ARTICLE = "select bench_article.create_task(%s, %s::jsonb)"
SUBJECTS = {"plain insert": PLAIN, "fairq": FAIRQ, "article": ARTICLE}


def estimate(scale: Scale) -> float:
    return scale.repetitions * (6 * scale.seconds + 6) + 1


def run(session: Session) -> None:
    with session.connect() as conn:
        for _ in session.repetitions():
            for subject, statement in SUBJECTS.items():
                clear(conn)
                rate = autocommit(session.dsn, statement, session.scale.seconds)
                session.record(subject, "single", rate, "tasks/s", connections=4)
            for subject, statement in SUBJECTS.items():
                clear(conn)
                rate = in_transactions(session, statement, session.scale.seconds)
                session.record(subject, "in 20 ms transactions", rate, "tasks/s", clients=16, groups=1)
            bulk(session, conn)


def autocommit(dsn: str, statement: str, seconds: float) -> float:
    """Four processes, each creating one task after the other."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        counts = pool.starmap(_autocommit, [(dsn, statement, seconds, client) for client in range(4)])
    return sum(counts) / seconds


def _autocommit(dsn: str, statement: str, seconds: float, client: int) -> int:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select 1")
        end = time.perf_counter() + seconds
        for count in itertools.count():
            if time.perf_counter() > end:
                return count
            conn.execute(statement, (f"group {client} {count % 25}", PAYLOAD))
    raise AssertionError("unreachable")


def in_transactions(session: Session, statement: str, seconds: float) -> float:
    """Sixteen clients, one tenant, transactions that last 20 ms after the insert."""
    counts: list[int] = []

    def client() -> None:
        with psycopg.connect(session.dsn) as conn:
            end = time.perf_counter() + seconds
            count = 0
            while time.perf_counter() < end:
                conn.execute(statement, ("bob", PAYLOAD))
                time.sleep(0.02)
                conn.commit()
                count += 1
            counts.append(count)

    _together([client] * 16)
    return sum(counts) / seconds


def _together(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bulk(session: Session, conn: psycopg.Connection[Any]) -> None:
    size = min(session.scale.tasks, 10_000)
    keys = [f"group {number % 100}" for number in range(size)]
    payloads = [PAYLOAD] * size
    calls = {
        "plain insert": "insert into bench_fifo.tasks (group_key, payload)"
        " select * from unnest(%s::text[], %s::text[]::jsonb[])",
        "fairq": "select count(*) from fairq.create_tasks(%s::text[], %s::text[]::jsonb[])",
    }
    rounds = max(1, min(10, session.scale.tasks // size))
    for subject, statement in calls.items():
        clear(conn)
        with psycopg.connect(session.dsn, autocommit=True) as own:
            own.adapters.register_dumper(list, ListBinaryDumper)
            seconds = 0.0
            for _ in range(rounds):
                seconds += timed(partial(own.execute, statement, (keys, payloads)))
        session.record(subject, "bulk", size * rounds / seconds, "tasks/s", size=size)
