"""fairq beside other PostgreSQL queues: bulk enqueue, drain, latency, newcomers in a flood, a held snapshot.

Every queue is an adapter in peers/, a process of its own with the queue's own worker. Each scenario gets a
fresh database and goes through all queues before the next scenario begins, so what disturbs one is likely to
disturb its neighbours. See peers/README.md.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql

from benchmarks.harness import Scale, Session
from benchmarks.peers.places import OURS, Missing, Place, places
from benchmarks.peers.processes import Adapter, Failed, running, said_once

BASELINES = ()
BATCH = 1_000
FLOOD_SLOTS = 8
NEWCOMERS = 9
NEWCOMER_TASKS = 10
NEWCOMER_PAUSE = 0.1
BACKLOG = 2_000
ENV_NAMES = "FAIRQ_BENCH_PEERS"


@dataclass(frozen=True)
class Sizes:
    """How much each scenario does, and when it stops for a peer that is slower."""

    tasks: int  # to enqueue in bulk and to drain
    enqueue_seconds: float
    drain_seconds: float
    latency_tasks: int
    flood: int  # Bob's tasks
    flood_seconds: float
    held_seconds: float


SIZES = {
    "tiny": Sizes(100, 0.5, 10, 5, 100, 10, 0.3),
    "quick": Sizes(30_000, 2.5, 3, 150, 20_000, 6, 6),
    "report": Sizes(50_000, 6, 8, 500, 20_000, 40, 20),
    "full": Sizes(200_000, 20, 20, 1_000, 20_000, 90, 60),
}


@dataclass
class Subject:
    """A queue in this run: where it is, its facts, and its database to copy."""

    place: Place
    about: dict[str, Any]
    template: str
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.place.name

    def text(self) -> str:
        """What readers of its numbers must know."""
        about = self.about
        parts = [
            about["version"],
            about["configuration"],
            f"fairness: {about['fairness'] or 'none'}",
            f"lacks: {', '.join(about['lacks']) or 'nothing measured here'}",
            *self.failures,
        ]
        return "; ".join(parts)


def estimate(scale: Scale) -> float:
    sizes = SIZES[scale.name]
    queues = sum(1 for place in _chosen(scale.name) if place.is_here)
    drains = 2 * (sizes.enqueue_seconds + sizes.drain_seconds)
    floods = 1.5 * (sizes.enqueue_seconds + sizes.flood_seconds / 2)
    each = 15 + drains / 2 + sizes.latency_tasks * 0.02 + floods + sizes.held_seconds
    return scale.repetitions * queues * each


def run(session: Session) -> None:
    sizes = SIZES[session.scale.name]
    chosen = list(_chosen(session.scale.name))
    for _ in session.repetitions():
        measure(session, sizes, chosen)


def measure(session: Session, sizes: Sizes, chosen: list[Place]) -> None:
    """One repetition: every scenario for every queue; a failure costs another queue that scenario, not
    the run.
    """
    with contextlib.ExitStack() as stack:
        subjects = []
        for place in chosen:
            session.say(f"{place.name}: setup")
            try:
                subjects.append(stack.enter_context(prepared(session, place)))
            except (Missing, Failed) as exc:
                if place.is_ours:
                    raise
                session.note(place.name, f"not measured: {exc}")
        for scenario in (drain, drain_by_two, latency, newcomers, held_snapshot):
            for subject in subjects:
                session.say(f"{subject.name}: {scenario.__name__.replace('_', ' ')}")
                try:
                    scenario(session, sizes, subject)
                except Failed as exc:
                    if subject.place.is_ours:
                        raise
                    subject.failures.append(f"{scenario.__name__} failed: {exc}")
                    session.note(subject.name, subject.text())


def _chosen(scale: str) -> Iterator[Place]:
    """The peers named in the environment, else all; in the tests' tiny run those without installation."""
    known = places()
    named = os.environ.get(ENV_NAMES, "").replace(",", " ").split()
    for name in named or (OURS if scale == "tiny" else known):
        if name not in known:
            raise ValueError(f"{ENV_NAMES} names {name}; known are: {', '.join(known)}")
        yield known[name]


# --- Scenarios ---------------------------------------------------------------------------------------


def drain(session: Session, sizes: Sizes, subject: Subject, processes: int = 1) -> None:
    """Enqueue tasks of 100 groups in calls of 1,000; then workers start and run them as no-ops."""
    with fresh(session, subject) as dsn, contextlib.ExitStack() as stack:
        with enqueuer(subject, dsn) as producer:
            done = enqueue(producer, sizes.tasks, seconds=sizes.enqueue_seconds)
        analyze(dsn)
        enqueued, seconds = done["enqueued"], done["seconds"]
        if processes == 1:
            session.record(subject.name, "bulk enqueue", enqueued / seconds, "tasks/s", call=BATCH)
        workers = [stack.enter_context(running(subject.place, "work", dsn)) for _ in range(processes)]
        wait(workers, lambda: starts(workers) > 0, 30, "no handler starts")
        with contextlib.suppress(Failed):
            wait(workers, lambda: starts(workers) >= enqueued, sizes.drain_seconds, "")
        end = None
        if starts(workers) >= enqueued:
            end = wait_until_finished(dsn, subject, workers)
        rate = drain_rate(workers, end)
    session.record(subject.name, "drain, no-op handlers", rate, "tasks/s", processes=processes)


def drain_by_two(session: Session, sizes: Sizes, subject: Subject) -> None:
    drain(session, sizes, subject, processes=2)


def drain_rate(workers: list[Adapter], finished: float | None) -> float:
    """Tasks a second since all workers were running, or since the first when one had nothing to do: until
    all were finished in the database, or until the last start when time was up before.
    """
    reports = [worker.report for worker in workers if worker.report.count]
    end = finished or max(report.last for report in reports)
    begin = max(report.first for report in reports)
    count = sum(report.count - report.count_at(begin) for report in reports)
    if len(reports) < len(workers) or end - begin < 0.2:
        begin = min(report.first for report in reports)
        count = sum(report.count for report in reports)
    return count / max(end - begin, 1e-3)


def latency(session: Session, sizes: Sizes, subject: Subject) -> None:
    """A task every 10 ms for an idle worker: from before the enqueue to the first line of the handler."""
    with fresh(session, subject) as dsn, worker_and_enqueuer(subject, dsn) as (worker, producer):
        warm_up(worker, producer)
        first = len(worker.report.watched)
        count = sizes.latency_tasks
        enqueue(producer, count, group="alice", watched=True, batch=1, pause=0.01, seconds=30)
        wait([worker], lambda: len(worker.report.watched) >= first + count, 30, "tasks do not start")
        delays = sorted((start - sent) * 1e3 for _, sent, start in worker.report.watched[first:])
    session.record(subject.name, "enqueue to start, p50", percentile(delays, 0.50), "ms")
    session.record(subject.name, "enqueue to start, p99", percentile(delays, 0.99), "ms")


def newcomers(session: Session, sizes: Sizes, subject: Subject) -> None:
    """Bob's tasks of 1 ms keep 8 slots busy, and nine others come with 10 tasks each: as the queue is by
    default, and with its own fairness option if it has one.
    """
    option = subject.about["fairness"].split(":")[0]
    if subject.about["always_fair"]:
        flood(session, sizes, subject, subject.name, fair=True)
        return
    flood(session, sizes, subject, subject.name, fair=False)
    if option:
        flood(session, sizes, subject, f"{subject.name}, {option}", fair=True)


def flood(session: Session, sizes: Sizes, subject: Subject, name: str, *, fair: bool) -> None:
    with fresh(session, subject) as dsn, enqueuer(subject, dsn, fair=fair) as producer:
        enqueue(producer, sizes.flood, group="bob", ms=1, seconds=sizes.enqueue_seconds * 2)
        analyze(dsn)
        with running(subject.place, "work", dsn, fair=fair, slots=FLOOD_SLOTS) as worker:
            wait([worker], lambda: worker.report.count > 0, 30, "no handler starts")
            time.sleep(0.3)
            begin, before = worker.report.last, worker.report.count
            for number in range(NEWCOMERS):
                group = f"newcomer {number}"
                enqueue(producer, NEWCOMER_TASKS, group=group, ms=1, watched=True, batch=NEWCOMER_TASKS)
                time.sleep(NEWCOMER_PAUSE)
            expected = NEWCOMERS * NEWCOMER_TASKS
            with contextlib.suppress(Failed):
                wait([worker], lambda: len(worker.report.watched) >= expected, sizes.flood_seconds, "")
            worker.check()
            waits = sorted((start - sent) * 1e3 for _, sent, start in worker.report.watched)
            rate = (worker.report.count - before) / max(worker.report.last - begin, 1e-3)
    # What has not started when time is up counts with the wait so far, the same limit for all.
    longest = sizes.flood_seconds * 1e3
    waits = [min(each, longest) for each in waits] + [longest] * (expected - len(waits))
    session.record(name, "newcomers' wait, p50", percentile(waits, 0.50), "ms", limit=longest)
    session.record(name, "newcomers' wait, p99", percentile(waits, 0.99), "ms", limit=longest)
    session.record(name, "tasks a second in the flood", rate, "tasks/s")


def held_snapshot(session: Session, sizes: Sizes, subject: Subject) -> None:
    """Run as many no-op tasks as possible, with a small backlog, while an open snapshot stops vacuum."""
    with fresh(session, subject) as dsn, worker_and_enqueuer(subject, dsn) as (worker, producer):
        warm_up(worker, producer)
        with psycopg.connect(dsn) as reader:
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("select pg_current_snapshot()")
            before, begin, enqueued = worker.report.count, time.time(), worker.report.count
            while time.time() < begin + sizes.held_seconds:
                if enqueued - worker.report.count < BACKLOG:
                    enqueued += enqueue(producer, BATCH, seconds=sizes.held_seconds)["enqueued"]
                else:
                    worker.check()
                    time.sleep(0.005)
            served = worker.report.count - before
            reader.rollback()
        if not served:
            raise Failed("nothing was served")
        time.sleep(1.1)  # until the sessions have reported their statistics
        dead = dead_rows(dsn)
    early, late = first_and_last_quarter(worker.report.steps, begin, sizes.held_seconds)
    scenario = {"seconds": sizes.held_seconds}
    session.record(subject.name, "held snapshot: first quarter", early, "tasks/s", **scenario)
    session.record(subject.name, "held snapshot: last quarter", late, "tasks/s", **scenario)
    session.record(subject.name, "held snapshot: dead rows", dead / served, "rows/task", **scenario)


def first_and_last_quarter(
    steps: list[tuple[float, int]], begin: float, seconds: float
) -> tuple[float, float]:
    """Starts per second at the beginning and at the end of a span."""
    marks = [begin, begin + seconds / 4, begin + seconds * 3 / 4, begin + seconds]
    counts = [max((count for at, count in steps if at <= mark), default=0) for mark in marks]
    rates = [(late - early) / (seconds / 4) for early, late in pairwise(counts)]
    return rates[0], rates[2]


def dead_rows(dsn: str) -> float:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("select sum(n_dead_tup)::float8 from pg_stat_user_tables").fetchone()
    return float(row[0] or 0) if row else 0.0


# --- Parts -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def prepared(session: Session, place: Place) -> Iterator[Subject]:
    """Install a queue in a database that the scenarios copy, and record its facts in the results."""
    about = said_once(place, "about")
    template = f"fairq_peers_{os.getpid()}_{place.name}".replace("-", "_")
    with database(session.dsn, template) as dsn:
        said_once(place, "setup", dsn)
        subject = Subject(place, about, template)
        session.note(subject.name, subject.text())
        yield subject


@contextlib.contextmanager
def fresh(session: Session, subject: Subject) -> Iterator[str]:
    with database(session.dsn, f"{subject.template}_run", subject.template) as dsn:
        yield dsn


@contextlib.contextmanager
def database(dsn: str, name: str, template: str = "template1") -> Iterator[str]:
    """A new database beside that of `dsn`, which is dropped at the end."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        drop = sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
        admin.execute(drop)
        statement = sql.SQL("create database {} template {}")
        admin.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))
        try:
            yield url(dsn, name)
        finally:
            admin.execute(drop)


def url(dsn: str, name: str) -> str:
    """The DSN in a form that every driver reads."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    login = quote(str(parts.get("user", "postgres")), safe="")
    if parts.get("password"):
        login += ":" + quote(str(parts["password"]), safe="")
    host, port = str(parts.get("host", "localhost")), parts.get("port", 5432)
    if host.startswith("/"):
        return f"postgresql://{login}@/{name}?host={quote(host, safe='')}&port={port}"
    return f"postgresql://{login}@{host}:{port}/{name}"


@contextlib.contextmanager
def enqueuer(subject: Subject, dsn: str, fair: bool = False) -> Iterator[Adapter]:
    with running(subject.place, "enqueue", dsn, fair=fair) as adapter:
        adapter.answer()
        yield adapter


@contextlib.contextmanager
def worker_and_enqueuer(subject: Subject, dsn: str) -> Iterator[tuple[Adapter, Adapter]]:
    with running(subject.place, "work", dsn) as worker, enqueuer(subject, dsn) as producer:
        yield worker, producer


def enqueue(producer: Adapter, count: int, **options: Any) -> dict[str, Any]:
    request = {"group": "", "ms": 0, "watched": False, "batch": BATCH, "pause": 0, "seconds": 60.0}
    return producer.ask(request | {"count": count} | options, options.get("seconds", 60.0) + 60)


def warm_up(worker: Adapter, producer: Adapter) -> None:
    """Wait until the worker runs tasks."""
    enqueue(producer, 10)
    wait([worker], lambda: worker.report.count >= 10, 30, "no handler starts")
    time.sleep(0.3)


def analyze(dsn: str) -> None:
    """Analyze the tables, as autovacuum would within a minute: no queue runs with plans for empty tables."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("analyze")


def starts(workers: list[Adapter]) -> int:
    return sum(worker.report.count for worker in workers)


def wait(workers: list[Adapter], is_so: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        for worker in workers:
            worker.check()
        if time.monotonic() > deadline:
            raise Failed(f"{otherwise} within {seconds:g} s")
        time.sleep(0.005)


def wait_until_finished(dsn: str, subject: Subject, workers: list[Adapter]) -> float:
    """Wait until everything that started has ended in the database, and return when it had."""
    with psycopg.connect(dsn, autocommit=True) as conn:

        def is_empty() -> bool:
            time.sleep(0.01)
            return conn.execute(subject.about["left"].encode()).fetchone() == (0,)

        wait(workers, is_empty, 15, "what has started is not finished")
    return time.time()


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]
