"""Creating tasks: one by one, inside transactions, and in bulk, beside plain inserts of the same payload."""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import Pool
from typing import Any

import psycopg
from psycopg.types.array import ListBinaryDumper

from benchmarks.engines import PROCESSES
from benchmarks.harness import Scale, Session, clear, timed
from benchmarks.measures import percentile

BASELINES = ("fifo", "article")
CONNECTIONS = 4
WORK_SECONDS = 0.02  # what an application's transaction does after it has enqueued
TENANTS = 100
BULK = 10_000
SOME = 100  # tasks of a bulk call within an application's transaction

SINGLE = {
    "plain insert": "insert into bench_fifo.tasks (group_key, payload) values (%s, %s::jsonb)",
    "fairq": "select fairq.create_task(%s, %s::jsonb)",
    "article": "select bench_article.create_task(%s, %s::jsonb)",
}
MANY = {
    "plain insert": "insert into bench_fifo.tasks (group_key, payload)"
    " select * from unnest(%s::text[], %s::text[]::jsonb[])",
    "fairq": "select count(*) from fairq.create_tasks(%s::text[], %s::text[]::jsonb[])",
    "article": "select count(bench_article.create_task(u.group_key, u.payload::jsonb))"
    " from unnest(%s::text[], %s::text[]) as u(group_key, payload)",
}


def payload(size: int) -> str:
    """JSON of that many bytes that compresses as badly as real payloads."""
    blocks = (hashlib.sha256(number.to_bytes(4)).hexdigest() for number in range(size // 64 + 1))
    head = '{"file": "a.pdf", "note": "'
    return head + "".join(blocks)[: max(size - len(head) - 2, 0)] + '"}'


PAYLOADS = {"100 B": payload(100), "2 KB": payload(2_000), "50 KB": payload(50_000)}
PAYLOAD = PAYLOADS["100 B"]


def estimate(scale: Scale) -> float:
    return 1 + scale.repetitions * (7 * (scale.seconds + 0.2) + 15 * (scale.seconds + 0.2) + 4)


def run(session: Session) -> None:
    with session.connect() as conn, PROCESSES.Pool(CONNECTIONS) as pool:
        for _ in session.repetitions():
            for size, text in PAYLOADS.items():
                for subject, statement in SINGLE.items():
                    if size == "100 B" or subject != "article":
                        session.say(f"single, {size}, {subject}")
                        clear(conn)
                        single(session, pool, subject, statement, size, text)
            for tenants in (1, TENANTS):
                for subject in SINGLE:
                    session.say(f"in transactions, {tenants} tenants, {subject}")
                    clear(conn)
                    in_transactions(session, subject, SINGLE[subject], tenants)
                    clear(conn)
                    bulk_in_transactions(session, subject, MANY[subject], tenants)
            for subject, statement in SINGLE.items():
                session.say(f"two tenants in a transaction, {subject}")
                clear(conn)
                two_tenants(session, subject, statement)
            for size, text in PAYLOADS.items():
                session.say(f"bulk, {size}")
                bulk(session, conn, size, text)


# --- One a call ------------------------------------------------------------------------------------


def single(session: Session, pool: Pool, subject: str, statement: str, size: str, text: str) -> None:
    """Four processes, each creating one task after the other."""
    seconds = session.scale.seconds
    calls = [(session.dsn, statement, seconds, client, text) for client in range(CONNECTIONS)]
    times = [each for found in pool.starmap(_autocommit, calls, 1) for each in found]
    scenario: dict[str, Any] = {"payload": size, "connections": CONNECTIONS}
    session.record(subject, "single", len(times) / seconds, "tasks/s", **scenario)
    session.record(subject, "single call, p50", percentile(times, 0.5) * 1000, "ms", **scenario)
    session.record(subject, "single call, p99", percentile(times, 0.99) * 1000, "ms", **scenario)


def _autocommit(dsn: str, statement: str, seconds: float, client: int, text: str) -> list[float]:
    times: list[float] = []
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select 1")
        at = time.perf_counter()
        end = at + seconds
        while at < end:
            conn.execute(statement.encode(), (f"group {client} {len(times) % 25}", text))
            before, at = at, time.perf_counter()
            times.append(at - before)
    return times


# --- Inside an application's transaction -----------------------------------------------------------


def in_transactions(session: Session, subject: str, statement: str, tenants: int) -> None:
    """Several clients; transactions that last 20 ms after the insert."""

    def enqueue(conn: psycopg.Connection[Any], chance: random.Random) -> int:
        conn.execute(statement.encode(), (tenant(chance, tenants), PAYLOAD))
        return 1

    rate, _ = at_once(session, enqueue)
    session.record(
        subject, "in 20 ms transactions", rate, "tasks/s", clients=session.scale.clients, tenants=tenants
    )


def bulk_in_transactions(session: Session, subject: str, statement: str, tenants: int) -> None:
    """The same with a hundred tasks in one call, with tenants in order to avoid deadlocks."""

    def enqueue(conn: psycopg.Connection[Any], chance: random.Random) -> int:
        keys = sorted(tenant(chance, tenants) for _ in range(SOME))
        conn.execute(statement.encode(), (keys, [PAYLOAD] * SOME))
        return SOME

    rate, _ = at_once(session, enqueue)
    session.record(
        subject,
        "bulk in 20 ms transactions",
        rate,
        "tasks/s",
        clients=session.scale.clients,
        tenants=tenants,
        tasks=SOME,
    )


def two_tenants(session: Session, subject: str, statement: str) -> None:
    """Transactions that enqueue for two of four tenants in any order: queues that lock tenants deadlock."""

    def enqueue(conn: psycopg.Connection[Any], chance: random.Random) -> int:
        for name in chance.sample(["alice", "bob", "carol", "dave"], 2):
            conn.execute(statement.encode(), (name, PAYLOAD))
        return 2

    rate, deadlocks = at_once(session, enqueue)
    scenario = {"clients": session.scale.clients, "tenants": 4}
    session.record(subject, "for two tenants in 20 ms transactions", rate, "tasks/s", **scenario)
    session.record(subject, "deadlocks meanwhile", deadlocks, "deadlocks", **scenario)


def tenant(chance: random.Random, tenants: int) -> str:
    return f"tenant {chance.randrange(tenants)}"


def at_once(
    session: Session, enqueue: Callable[[psycopg.Connection[Any], random.Random], int]
) -> tuple[float, int]:
    """Tasks per second that the clients committed, and how many transactions met a deadlock.

    A new session compiles what it calls first, for ten times as long as the call takes: before the start.
    """
    seconds, clients = session.scale.seconds, session.scale.clients
    counts: list[int] = []
    deadlocks: list[int] = []
    begun: list[float] = []
    warming = threading.Lock()  # one after the other: two tenants in any order would deadlock
    ready = threading.Barrier(clients, action=lambda: begun.append(time.perf_counter()))

    def client(number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(session.dsn) as conn:
            conn.adapters.register_dumper(list, ListBinaryDumper)
            with warming:
                for _ in range(6):
                    enqueue(conn, chance)
                    conn.rollback()
            ready.wait(60)
            end = begun[0] + seconds
            count = 0
            while time.perf_counter() < end:
                try:
                    number_of_tasks = enqueue(conn, chance)
                    time.sleep(WORK_SECONDS)
                    conn.commit()
                    count += number_of_tasks
                except psycopg.errors.DeadlockDetected:
                    conn.rollback()
                    deadlocks.append(number)
            counts.append(count)

    together([partial(client, number) for number in range(clients)])
    if len(counts) < clients:
        raise RuntimeError("a client failed")
    # A client that waits for a lock overruns the end, and that time counts.
    return sum(counts) / max(seconds, time.perf_counter() - begun[0]), len(deadlocks)


def together(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- Many a call -----------------------------------------------------------------------------------


def bulk(session: Session, conn: psycopg.Connection[Any], size: str, text: str) -> None:
    """Calls of ten thousand tasks, fewer when they are large: ten megabytes a call at most."""
    tasks = max(1, min(session.scale.tasks, BULK, 10_000_000 // len(text)))
    keys, payloads = [f"group {number % TENANTS}" for number in range(tasks)], [text] * tasks
    rounds = max(1, min(10, session.scale.tasks // BULK))
    for subject in ("plain insert", "fairq"):
        clear(conn)
        with psycopg.connect(session.dsn, autocommit=True) as own:
            own.adapters.register_dumper(list, ListBinaryDumper)
            seconds = 0.0
            for _ in range(rounds):
                seconds += timed(partial(own.execute, MANY[subject].encode(), (keys, payloads)))
        session.record(subject, "bulk", tasks * rounds / seconds, "tasks/s", payload=size, tasks=tasks)
