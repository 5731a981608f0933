"""Who waits, and for how long: a flood, busy tenants, weights, tenants who come and go.

The same arrivals go through a FIFO queue, the article's block ids and fairq, all worked by one small loop
with eight slots, and through fairq with its own worker. Tasks are sleeps.
"""

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks import engines, measures
from benchmarks.bench_worker import workers
from benchmarks.engines import ARTICLE, FAIRQ, FIFO, Engine, Record
from benchmarks.harness import Scale, Session, clear

BASELINES = ("fifo", "article")
SLOTS = 8
NEWCOMERS = 9
TENANTS = 10
WINDOW_SECONDS = 0.5  # a window shorter than a few slow tasks would show only chance
QUICK, SLOW = 5.0, 50.0  # milliseconds
WEIGHTS = {"one": 1.0, "two": 2.0, "five": 5.0}
SUBJECTS = {"fifo": FIFO, "article": ARTICLE, "fairq": FAIRQ, "fairq work": FAIRQ}
PATIENCE_SECONDS = 600.0

Conn = psycopg.Connection[Any]


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds after the first task may start
    group: str
    tasks: int
    milliseconds: float = 1.0
    kind: str = "nap"


@dataclass(frozen=True)
class Run:
    """Every task, and between which moments tasks were served."""

    records: list[Record]
    start: float
    end: float


def estimate(scale: Scale) -> float:
    plays, long, short = len(SUBJECTS) + 4 + 2 + 3, 4 + 3, 2
    running = (3 * long + short) * scale.seconds + scale.flood / 2_500 * 5
    return 2 + scale.repetitions * (2.2 * plays + running)


def run(session: Session) -> None:
    for repetition in session.repetitions():
        for subject in SUBJECTS:
            session.say(f"a flood through {subject}, {repetition + 1}")
            flood(session, subject)
        for subject in ("fifo", "article", "fairq", "fairq by time"):
            session.say(f"busy tenants, {subject}, {repetition + 1}")
            busy(session, subject)
        for subject in ("fifo", "fairq"):
            session.say(f"weights, {subject}, {repetition + 1}")
            weighted(session, subject)
        for subject in ("fifo", "fairq", "fairq work"):
            session.say(f"coming and going, {subject}, {repetition + 1}")
            coming_and_going(session, subject)


# --- Scenarios -------------------------------------------------------------------------------------


def flood(session: Session, subject: str) -> None:
    """Bob's tasks wait already; three times nine newcomers bring ten tasks each, until their last ends."""
    bob = session.scale.flood
    waves = [share * bob / 2_000 for share in (0.15, 0.30, 0.45)]
    later = [
        Arrival(at, f"newcomer {wave}-{number}", 10)
        for wave, at in enumerate(waves)
        for number in range(NEWCOMERS)
    ]
    played = play(session, subject, [Arrival(0, "bob", bob)], later, until="newcomer %")
    waits = measures.by_class(played.records, played.end)
    scenario = {"tasks of Bob": bob, "slots": SLOTS}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        wait = measures.percentile(waits["newcomer"], share)
        session.record(subject, f"newcomers' wait, {name}", wait, "ms", **scenario)
    ended = sorted(record.finished for record in played.records if record.finished is not None)
    first = min(record.started for record in played.records if record.started is not None)
    session.record(subject, "throughput in a flood", len(ended) / (ended[-1] - first), "tasks/s", **scenario)


def busy(session: Session, subject: str) -> None:
    """Ten tenants always have tasks; Bob came first with the most. One has tasks ten times as long.

    The tasks are long enough to keep all slots busy, so the tenants share worker seconds.
    """
    seconds = 3 * session.scale.seconds
    each = int(300 * seconds) + 20
    tenants = [Arrival(0, "bob", int(1_800 * seconds) + 20, QUICK)]
    tenants += [Arrival(0, f"tenant {number}", each, QUICK) for number in range(TENANTS - 2)]
    tenants.append(Arrival(0, "slow", each, SLOW))
    names = [arrival.group for arrival in tenants]
    played = play(session, subject, tenants, [], seconds=seconds)
    scenario = {"tenants": TENANTS, "slots": SLOTS}
    for what, by_seconds in (("tasks", False), ("worker seconds", True)):
        got = measures.service(played.records, names, played.start, played.end, by_seconds=by_seconds)
        session.record(subject, f"Jain index by {what}", measures.jain(got.values()), "index", **scenario)
        least = measures.evenness(got.values())
        session.record(subject, f"least share beside the most, by {what}", least, "share", **scenario)
        index, share = [], []
        for start, end in measures.windows(played.start, played.end, max(2, int(seconds / WINDOW_SECONDS))):
            now = measures.service(played.records, names, start, end, by_seconds=by_seconds).values()
            index.append((end - played.start, measures.jain(now)))
            share.append((end - played.start, measures.evenness(now)))
        session.series(subject, f"Jain index by {what}", index, "index", **scenario)
        session.series(subject, f"least share beside the most, by {what}", share, "share", **scenario)


def weighted(session: Session, subject: str) -> None:
    """Three tenants of weights 1, 2 and 5 always have tasks. A FIFO queue has no weights."""
    seconds = session.scale.seconds
    each = int(6_000 * seconds) + 50  # more than the heaviest can get: 1 ms each, on eight slots

    def configure(conn: Conn) -> None:
        for name, weight in WEIGHTS.items():
            conn.execute(
                "select fairq.configure_group('default', %s, jsonb_build_object('weight', %s::float8))",
                (name, weight),
            )

    arrivals = [Arrival(0, name, each // 20) for _ in range(20) for name in WEIGHTS]
    played = play(session, subject, arrivals, [], seconds=seconds, configure=configure)
    got = measures.service(played.records, WEIGHTS, played.start, played.end, by_seconds=False)
    session.record(
        subject, "weights 1:2:5, worst share", measures.share_error(got, WEIGHTS), "error", slots=SLOTS
    )


def coming_and_going(session: Session, subject: str) -> None:
    """Two heavy tenants always have tasks; each second fifty others bring one task, and two bring fifty."""
    seconds = 3 * session.scale.seconds
    chance = random.Random(7 + session.repetition)
    later: list[Arrival] = []
    for rate, name, tasks in ((50.0, "small", 1), (2.0, "burst", 50)):
        at = chance.expovariate(rate)
        while at < seconds:
            later.append(Arrival(at, f"{name} {len(later)}", tasks))
            at += chance.expovariate(rate)
    if not any(arrival.group.startswith("burst") for arrival in later):
        later.append(Arrival(seconds / 2, "burst 0", 50))
    heavy = [Arrival(0, f"heavy {number}", int(2_500 * seconds) + 50) for number in range(2)]
    played = play(session, subject, heavy, sorted(later, key=lambda each: each.at), seconds=seconds)
    for name, waits in measures.by_class(played.records, played.end).items():
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            wait = measures.percentile(waits, share)
            session.record(subject, f"wait when tenants come and go, {label}", wait, "ms", tenant=name)


# --- Playing ---------------------------------------------------------------------------------------


def play(
    session: Session,
    subject: str,
    first: list[Arrival],
    later: list[Arrival],
    *,
    seconds: float = 0,
    until: str | None = None,
    configure: Callable[[Conn], None] | None = None,
) -> Run:
    """First waiting tasks, then a worker, then arrivals, until some groups' last task, or for a time."""
    engine = SUBJECTS.get(subject, FAIRQ)
    with session.connect() as conn:
        clear(conn)
        with configured(conn, subject, configure):
            for arrival in first:
                engines.create(conn, engine, arrival.group, arrival.tasks, arrival.milliseconds, arrival.kind)
            conn.execute("analyze")
            with worker(session, conn, subject, engine):
                start, begun = engines.now(conn), time.perf_counter()
                for arrival in later:
                    time.sleep(max(0, begun + arrival.at - time.perf_counter()))
                    engines.create(
                        conn, engine, arrival.group, arrival.tasks, arrival.milliseconds, arrival.kind
                    )
                time.sleep(max(0, begun + seconds - time.perf_counter()))
                while until and engines.left(conn, engine, until):
                    if time.perf_counter() - begun > PATIENCE_SECONDS:
                        raise RuntimeError("tasks are left")
                    time.sleep(0.02)
                end = engines.now(conn)
            return Run(engines.records(conn, engine), start, end)


@contextlib.contextmanager
def worker(session: Session, conn: Conn, subject: str, engine: Engine) -> Iterator[None]:
    if subject.startswith("fairq work"):
        with workers(conn, session.dsn, 1, SLOTS):
            yield
    else:
        with engines.served(session.dsn, engine, SLOTS):
            yield


@contextlib.contextmanager
def configured(conn: Conn, subject: str, configure: Callable[[Conn], None] | None) -> Iterator[None]:
    """Settings of fairq inside one run."""
    if subject == "fairq by time":
        conn.execute("""select fairq.configure_queue('default', '{"fairness": "time"}')""")
    if configure:
        configure(conn)
    try:
        yield
    finally:
        clear(conn)
        conn.execute("delete from fairq.groups where queue = 'default'")
        conn.execute("delete from fairq.kinds")
        none = json.dumps(dict.fromkeys(("fairness", "group_max_running", "short_slots", "short_under")))
        conn.execute("select fairq.configure_queue('default', %s)", (none,))
