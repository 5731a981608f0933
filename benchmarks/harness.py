"""What every benchmark shares: a server, repetitions, noise, JSON lines.

A benchmark is a function that takes a `Session` and records values. Numbers of one run are compared with
numbers of the same run only: each repetition measures every subject, one after the other, so what disturbs
one disturbs the others.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psycopg
from psycopg import sql

from fairq import embedded, install

ROOT = Path(__file__).parent
BASELINES = ROOT / "baselines"

# Settings that a small production server would have; fsync stays on.
SETTINGS: dict[str, str | int | bool] = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "max_connections": 200,
    "autovacuum_naptime": "5s",
}


@dataclass(frozen=True)
class Scale:
    """How large a run is: `tiny` proves that a benchmark works, `quick` takes minutes, `full` publishes."""

    name: str
    tasks: int
    seconds: float
    repetitions: int


SCALES = {
    "tiny": Scale("tiny", tasks=300, seconds=0.2, repetitions=1),
    "quick": Scale("quick", tasks=50_000, seconds=3, repetitions=3),
    "full": Scale("full", tasks=1_000_000, seconds=20, repetitions=5),
}


@dataclass
class Session:
    """One run of one benchmark against one database."""

    benchmark: str
    dsn: str
    scale: Scale
    out: TextIO | None = None
    repetition: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def connect(self, **kwargs: Any) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.dsn, autocommit=True, **kwargs)

    def repetitions(self) -> Iterator[int]:
        """Repetitions with the machine's noise measured beside each."""
        for repetition in range(self.scale.repetitions):
            self.repetition = repetition
            before = spin()
            yield repetition
            self.record("machine", "spin", max(before, spin()), "s")

    def record(self, subject: str, what: str, value: float, unit: str, **scenario: Any) -> None:
        row = {
            "benchmark": self.benchmark,
            "subject": subject,
            "what": what,
            "value": value,
            "unit": unit,
            "scenario": scenario,
            "repetition": self.repetition,
            "scale": self.scale.name,
        }
        self.records.append(row)
        if self.out:
            self.out.write(json.dumps(row) + "\n")
            self.out.flush()


def spin() -> float:
    """Seconds for a fixed piece of work: how much of the machine was ours just now."""
    start = time.perf_counter()
    sum(number * number for number in range(200_000))
    return time.perf_counter() - start


def facts(dsn: str) -> dict[str, Any]:
    """What a reader needs to judge the numbers: versions, settings, commit, machine."""
    with psycopg.connect(dsn) as conn:
        names = [*SETTINGS, "fsync", "synchronous_commit", "full_page_writes", "jit"]
        settings = conn.execute(
            "select name, current_setting(name) from pg_settings where name = any(%s) order by name", (names,)
        ).fetchall()
        postgres = conn.info.parameter_status("server_version")
    return {
        "postgresql": postgres,
        "psycopg": psycopg.__version__,
        "python": platform.python_version(),
        "settings": dict(settings),
        "commit": _commit(),
        "machine": {"system": platform.system(), "arch": platform.machine(), "cores": os.cpu_count()},
    }


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


@contextlib.contextmanager
def server(dsn: str | None = None) -> Iterator[str]:
    """A DSN to measure on: the one given, or an embedded PostgreSQL with fsync on, kept in the clone."""
    if dsn:
        yield dsn
        return
    folder = ROOT.parent / ".cache" / "benchmarks"
    with embedded.start(folder, settings=SETTINGS) as own:
        yield own.dsn()


@contextlib.contextmanager
def database(admin_dsn: str, *baselines: str) -> Iterator[str]:
    """A fresh database with fairq as it is in sql/ and the baselines named; dropped at the end."""
    name = f"fairq_bench_{os.getpid()}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        drop = sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
        admin.execute(drop)
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            dsn = psycopg.conninfo.make_conninfo(admin_dsn, dbname=name)
            with psycopg.connect(dsn) as conn:
                install.load_sql(conn)
                for baseline in baselines:
                    conn.execute((BASELINES / f"{baseline}.sql").read_bytes())
                conn.execute("select fairq.maintain()")
            yield dsn
        finally:
            admin.execute(drop)


def clear(conn: psycopg.Connection[Any]) -> None:
    """Empties fairq and the baselines, and makes the next measurement start on tables without dead rows."""
    conn.execute(
        "truncate fairq.tasks, fairq.rings, fairq.lanes, fairq.ticks, fairq.finished_tasks, fairq.attempts,"
        " fairq.workers, fairq.heartbeats, fairq.sweeps, fairq.cancellations, fairq.idempotency_keys"
    )
    for (table,) in conn.execute(
        "select format('%I.%I', n.nspname, c.relname)"
        " from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname in ('bench_fifo', 'bench_article') and c.relkind = 'r' and c.relname <> 'served'"
    ).fetchall():
        conn.execute(f"truncate {table}".encode())
    if conn.execute("select to_regclass('bench_article.served') is not null").fetchone() == (True,):
        conn.execute("update bench_article.served set block = 0")


def median(values: list[float]) -> float:
    return statistics.median(values)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
