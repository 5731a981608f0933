"""fairq for the open harness hardbyte/postgresql-job-queue-benchmarking: scenario `long_horizon`.

One process enqueues and works until SIGTERM. Standard output is telemetry, one JSON object a line: first a
descriptor, then every SAMPLE_EVERY_S seconds one record for each metric. Needs fairq and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

import fairq
from fairq.worker import Worker

MANIFEST: dict[str, Any] = json.loads((Path(__file__).parent / "adapter.json").read_text())
WINDOW_SECONDS = 30
GROWTH = math.log(1.005)  # of the buckets of delays: values are off by at most a quarter of a percent
HISTORY = (
    "select inhrelid::regclass::text from pg_inherits"
    " where inhparent in ('fairq.finished_tasks'::regclass, 'fairq.attempts'::regclass) order by 1"
)
# Bodies stay until their task ends; those that no worker holds are waiting.
DEPTH = """
select (select count(*) from fairq.tasks t where not t.scheduled) - (select count(*) from fairq.held)
"""
GROUPS = 10  # the harness knows no tenants


@dataclass(frozen=True)
class Settings:
    """What the harness asks for, from its environment variables."""

    dsn: str
    mode: str  # "fixed" or "depth-target"
    paced_by_harness: bool
    rate: float
    rate_file: str
    depth: int
    batch: int
    batch_seconds: float
    workers: int
    payload_bytes: int
    work_seconds: float
    sample_seconds: int
    instance: int


def settings(env: Mapping[str, str]) -> Settings:
    mode = env.get("PRODUCER_MODE", "fixed")
    return Settings(
        dsn=env["DATABASE_URL"],
        mode=mode,
        paced_by_harness=mode == "fixed" and env.get("PRODUCER_PACING") == "harness",
        rate=float(env.get("PRODUCER_RATE", "800")),
        rate_file=env.get("PRODUCER_RATE_CONTROL_FILE", ""),
        depth=int(env.get("TARGET_DEPTH", "1000")),
        batch=max(1, int(env.get("PRODUCER_BATCH_MAX", "128"))),
        batch_seconds=max(1, int(env.get("PRODUCER_BATCH_MS", "10"))) / 1e3,
        workers=int(env.get("WORKER_COUNT", "32")),
        payload_bytes=int(env.get("JOB_PAYLOAD_BYTES", "256")),
        work_seconds=int(env.get("JOB_WORK_MS", "1")) / 1e3,
        sample_seconds=max(1, int(env.get("SAMPLE_EVERY_S", "5"))),
        instance=int(env.get("BENCH_INSTANCE_ID", "0")),
    )


class Delays:
    """Delays of the last 30 seconds: one histogram for each second, so memory does not grow."""

    def __init__(self) -> None:
        self.seconds: deque[tuple[int, Counter[int]]] = deque(maxlen=WINDOW_SECONDS)

    def add(self, now: float, milliseconds: float) -> None:
        if not self.seconds or self.seconds[-1][0] != int(now):
            self.seconds.append((int(now), Counter()))
        self.seconds[-1][1][round(math.log(max(milliseconds, 1e-3)) / GROWTH)] += 1

    def percentiles(self, now: float, shares: tuple[float, ...]) -> list[float]:
        recent: Counter[int] = Counter()
        for second, counts in self.seconds:
            if second > now - WINDOW_SECONDS:
                recent += counts
        ordered, total = sorted(recent.items()), recent.total()
        return [self._percentile(ordered, share * total) for share in shares]

    def _percentile(self, ordered: list[tuple[int, int]], rank: float) -> float:
        passed = 0
        for bucket, count in ordered:
            passed += count
            if passed >= rank:
                return math.exp(bucket * GROWTH)
        return 0.0


@dataclass
class State:
    """What the producer, the handlers and the sampler share."""

    settings: Settings
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    delays: Delays = field(default_factory=Delays)
    enqueued: int = 0
    completed: int = 0
    depth: int = 0
    target: float = 0.0


def credited(credit: float, rate: float, elapsed: float, most: int) -> tuple[int, float]:
    """How many tasks are due after so much real time, and the credit that is left."""
    credit += rate * elapsed
    due = min(most, int(credit))
    return due, credit - due


def metrics(state: State, before: tuple[int, int], seconds: float) -> dict[str, tuple[float, float]]:
    """One sample: per metric the value and the window it is about."""
    p50, p95, p99 = state.delays.percentiles(time.time(), (0.50, 0.95, 0.99))
    window = float(state.settings.sample_seconds)
    sample = {
        "claim_p50_ms": (p50, float(WINDOW_SECONDS)),
        "claim_p95_ms": (p95, float(WINDOW_SECONDS)),
        "claim_p99_ms": (p99, float(WINDOW_SECONDS)),
        "enqueue_rate": ((state.enqueued - before[0]) / seconds, window),
        "completion_rate": ((state.completed - before[1]) / seconds, window),
    }
    if state.settings.instance == 0:  # what is true of all replicas is said by one
        sample |= {"queue_depth": (float(state.depth), 0.0), "producer_target_rate": (state.target, 0.0)}
    return sample


# --- Parts -----------------------------------------------------------------------------------------


async def produce(state: State) -> None:
    chosen = state.settings
    async with await psycopg.AsyncConnection.connect(chosen.dsn, autocommit=True) as conn:
        if chosen.paced_by_harness:
            await follow_tokens(state, conn)
            return
        credit, last = 0.0, time.monotonic()
        while not state.stop.is_set():
            await asyncio.sleep(chosen.batch_seconds)
            now = time.monotonic()
            if chosen.mode == "depth-target":
                due = min(chosen.batch, chosen.depth - state.depth)
            else:
                state.target = target_rate(chosen)
                due, credit = credited(credit, state.target, now - last, chosen.batch)
            last = now
            await enqueue(state, conn, due)


async def follow_tokens(state: State, conn: psycopg.AsyncConnection[Any]) -> None:
    """The harness keeps the pace: each line `ENQUEUE n` is one call."""
    state.target = state.settings.rate
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        word, _, count = line.decode().strip().partition(" ")
        if word == "ENQUEUE":
            await enqueue(state, conn, int(count))
    await state.stop.wait()


async def enqueue(state: State, conn: psycopg.AsyncConnection[Any], count: int) -> None:
    if count <= 0:
        return
    note, now = "x" * state.settings.payload_bytes, time.time()
    items = [(f"group {number % GROUPS}", {"at": now, "note": note}) for number in range(count)]
    await fairq.enqueue_many(conn, items, kind="job")
    state.enqueued += count


def target_rate(chosen: Settings) -> float:
    try:
        return float(Path(chosen.rate_file).read_text()) if chosen.rate_file else chosen.rate
    except (OSError, ValueError):
        return chosen.rate


async def watch_depth(state: State) -> None:
    if state.settings.instance:
        await state.stop.wait()
    async with await psycopg.AsyncConnection.connect(state.settings.dsn, autocommit=True) as conn:
        while not state.stop.is_set():
            row = await (await conn.execute(DEPTH)).fetchone()
            state.depth = row[0] if row else 0
            await asyncio.sleep(0.2)


async def sample(state: State, emit: Callable[[dict[str, Any]], None]) -> None:
    """A sample at every wall-clock multiple of the interval, and one at the end."""
    every = state.settings.sample_seconds
    before, last = (state.enqueued, state.completed), time.monotonic()
    while not state.stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.stop.wait(), every - time.time() % every)
        seconds = max(time.monotonic() - last, 1e-3)
        for metric, (value, window) in metrics(state, before, seconds).items():
            emit({**common(), "subject": "", "metric": metric, "value": value, "window_s": window})
        before, last = (state.enqueued, state.completed), time.monotonic()


def common() -> dict[str, Any]:
    return {"t": now_iso(), "system": MANIFEST["system"], "kind": "adapter", "subject_kind": "adapter"}


def descriptor(dsn: str) -> dict[str, Any]:
    """What the manifest says, and the partitions of the history: those of today have no name beforehand."""
    with psycopg.connect(dsn) as conn:
        partitions = [row[0] for row in conn.execute(HISTORY)]
    return {
        "kind": "descriptor",
        **{key: MANIFEST[key] for key in ("system", "event_indexes", "extensions")},
        "event_tables": [*MANIFEST["event_tables"], *partitions],
        "version": version("fairq"),
        "schema_version": version("fairq"),
        "db_name": psycopg.conninfo.conninfo_to_dict(dsn).get("dbname", MANIFEST["db_name"]),
        "started_at": now_iso(),
    }


def now_iso() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def main() -> None:
    state = State(settings(os.environ))
    chosen, app = state.settings, fairq.App()

    @app.task
    async def job(payload: Any) -> None:
        now = time.time()
        state.delays.add(now, (now - payload["at"]) * 1e3)
        if chosen.work_seconds:
            await asyncio.sleep(chosen.work_seconds)
        state.completed += 1

    def emit(record: dict[str, Any]) -> None:
        print(json.dumps(record | {"instance_id": chosen.instance}), flush=True)

    migrate = [sys.executable, "-m", "fairq", "migrate", "--dsn", chosen.dsn]
    await asyncio.to_thread(subprocess.run, migrate, check=True, stdout=sys.stderr)
    if os.environ.get("SCENARIO") == "migrate_only":
        return
    worker = Worker(app, chosen.dsn, concurrency=chosen.workers)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, state.stop.set)
    emit(descriptor(chosen.dsn))
    sampling = asyncio.create_task(sample(state, emit))
    others = [asyncio.create_task(each) for each in (worker.arun(), produce(state), watch_depth(state))]
    ended = asyncio.create_task(state.stop.wait())
    await asyncio.wait([ended, *others], return_when=asyncio.FIRST_COMPLETED)
    state.stop.set()
    await sampling
    worker.stop(now=True)
    for each in others[1:]:
        each.cancel()
    results = await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 4)
    for result in results:
        if isinstance(result, Exception):
            raise result


if __name__ == "__main__":
    asyncio.run(main())
