"""A generated psycopg call beside the same call written by hand: what the wrapper costs."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8

from benchmarks.harness import Scale, Session, clear, median
from fairq.queries import client, workers

BASELINES: tuple[str, ...] = ()
BLOCK = 20  # calls of one kind in a row
PAYLOAD = {"file": "a.pdf", "note": "x" * 60}


def estimate(scale: Scale) -> float:
    return 1 + scale.repetitions * 4 * scale.seconds


def run(session: Session) -> None:
    with session.connect() as conn:
        for _ in session.repetitions():
            clear(conn)
            fill(conn)
            one_row(session, conn)
            many_rows(session, conn)
            arrays(session, conn)
            asyncio.run(one_row_async(session))


def fill(conn: psycopg.Connection[Any]) -> None:
    client.enqueue_many(
        conn,
        group_keys=[f"group {number % 10}" for number in range(100)],
        payloads=[json.dumps(PAYLOAD)] * 100,
        queue="default",
        kind="default",
        priority=0,
        cost=1.0,
    )


def one_row(session: Session, conn: psycopg.Connection[Any]) -> None:
    """The cheapest call: the server has nothing to do, and returns one boolean."""

    def by_hand() -> object:
        cursor = psycopg.RawCursor(conn)
        cursor.execute(client.cancel.statement.sql, (Int8(-1),), binary=True)
        row = cursor.fetchone()
        return row[0] if row else None

    beside(session, "one row", by_hand, lambda: client.cancel(conn, id=-1))


def many_rows(session: Session, conn: psycopg.Connection[Any]) -> None:
    """A hundred rows of twelve columns, read as dataclasses."""

    def by_hand() -> object:
        cursor = psycopg.RawCursor(conn)
        cursor.execute(client.live_tasks.statement.sql, (None, None, None), binary=True)
        return [client.LiveTasksRow(*row) for row in cursor.fetchall()]

    beside(session, "100 rows", by_hand, lambda: client.live_tasks(conn), block=5)


def arrays(session: Session, conn: psycopg.Connection[Any]) -> None:
    """Two arrays of a thousand numbers in binary form, from a worker that holds nothing."""
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(list, ListBinaryDumper)
    ids, attempts = list(range(1000)), [1] * 1000

    class Cursor(psycopg.RawCursor[Any]):
        @property
        def adapters(self) -> AdaptersMap:
            return adapters

    def by_hand() -> object:
        cursor = Cursor(conn)
        cursor.execute(workers.release_tasks.statement.sql, (Int8(-1), ids, attempts), binary=True)
        return [row[0] for row in cursor.fetchall()]

    def generated() -> object:
        return workers.release_tasks(conn, worker_id=-1, ids=ids, attempts=attempts)

    beside(session, "2,000 array elements", by_hand, generated, block=5)


async def one_row_async(session: Session) -> None:
    async with await psycopg.AsyncConnection.connect(session.dsn, autocommit=True) as conn:

        async def by_hand() -> object:
            cursor = psycopg.AsyncRawCursor(conn)
            await cursor.execute(client.cancel.statement.sql, (Int8(-1),), binary=True)
            row = await cursor.fetchone()
            return row[0] if row else None

        seconds: dict[str, list[float]] = {"by hand": [], "generated": []}
        end = time.perf_counter() + session.scale.seconds
        while time.perf_counter() < end:
            begun = time.perf_counter()
            for _ in range(BLOCK):
                await by_hand()
            half = time.perf_counter()
            for _ in range(BLOCK):
                await client.cancel(conn, id=-1)
            seconds["by hand"].append((half - begun) / BLOCK)
            seconds["generated"].append((time.perf_counter() - half) / BLOCK)
        report(session, "one row, async", seconds)


def beside(
    session: Session,
    what: str,
    by_hand: Callable[[], object],
    generated: Callable[[], object],
    block: int = BLOCK,
) -> None:
    """Run both in turns, block by block, so that disturbances affect both."""
    assert type(by_hand()) is type(generated())
    seconds: dict[str, list[float]] = {"by hand": [], "generated": []}
    subjects = [("by hand", by_hand), ("generated", generated)]
    end = time.perf_counter() + session.scale.seconds
    while time.perf_counter() < end:
        for subject, call in subjects:
            begun = time.perf_counter()
            for _ in range(block):
                call()
            seconds[subject].append((time.perf_counter() - begun) / block)
        subjects.reverse()
    report(session, what, seconds)


def report(session: Session, what: str, seconds: dict[str, list[float]]) -> None:
    for subject, each in seconds.items():
        # The fastest quarter: blocks that had the processor to themselves.
        quiet = sorted(each)[: max(1, len(each) // 4)]
        session.record(subject, what, median(quiet) * 1e6, "µs")
