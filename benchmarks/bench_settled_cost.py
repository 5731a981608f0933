"""What is known only at the end: two tenants share tokens, or seconds, whatever was expected of their tasks.

*tokens*: answers of 10 to 10,000 tokens, log-normal. The one tenant has short answers and announces up to ten
times as much, the other has long ones and announces up to ten times less. *seconds*: a task of the one tenant
takes 34 seconds, of the other one second; a clock of our own makes hours of that pass in a moment.
"""

import heapq
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from benchmarks.bench_create_task import PAYLOAD
from benchmarks.bench_cycle import scalar
from benchmarks.harness import Scale, Session, clear

BASELINES = ()
SLOTS = 8
TOKENS = {"brief": 100.0, "wordy": 500.0}  # tenants, and the median of their answers
WRONG = {"brief": (0.0, 1.0), "wordy": (-1.0, 0.0)}  # powers of ten between what is announced and the truth
LENGTHS = {"slow": 34.0, "quick": 1.0}  # tenants, and the seconds of a task
COUNT, ESTIMATE, SETTLED = "by count", "by estimate", "fairq, settled"
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)

Conn = psycopg.Connection[Any]


def estimate(scale: Scale) -> float:
    return 2 + scale.repetitions * served(scale) * 8 * 1.5e-3


def served(scale: Scale) -> int:
    """The fewest tasks of each tenant to serve."""
    return min(1_000, scale.tasks // 10)


def run(session: Session) -> None:
    for repetition in session.repetitions():
        with session.connect() as conn:
            for subject in (COUNT, ESTIMATE, SETTLED):
                session.say(f"tokens, {subject}, {repetition + 1}")
                tokens(session, conn, subject)
            for subject in (COUNT, SETTLED):
                session.say(f"seconds, {subject}, {repetition + 1}")
                seconds(session, conn, subject)


def tokens(session: Session, conn: Conn, subject: str) -> None:
    """Serve until each tenant has had so many tasks."""
    least = served(session.scale)
    chance = random.Random(7 + session.repetition)
    prepare(conn, "cost" if subject == SETTLED else "count")
    used: dict[int, float] = {}
    for group, median in TOKENS.items():
        truth = [min(1e4, max(10.0, median * chance.lognormvariate(0, 1.2))) for _ in range(12 * least)]
        announced = [each * 10 ** chance.uniform(*WRONG[group]) for each in truth]
        ids = create(conn, [group] * len(truth), None if subject == COUNT else announced)
        used.update(zip(ids, truth, strict=True))
    worker_id = register(conn)
    got = dict.fromkeys(TOKENS, 0.0)
    count: Counter[str] = Counter()
    share: list[tuple[float, float]] = []
    while min(count[group] for group in TOKENS) < least:
        popped = pop(conn, worker_id, SLOTS)
        finish(conn, worker_id, popped, [used[each] for each, _, _ in popped] if subject == SETTLED else None)
        for each, _, group in popped:
            got[group] += used[each]
            count[group] += 1
        share.append((float(count.total()), got["wordy"] / sum(got.values())))
    show(session, subject, share, "tokens")


def seconds(session: Session, conn: Conn, subject: str) -> None:
    """Serve for so many seconds of the engine's clock; both tenants always have tasks."""
    until = max(300.0, served(session.scale) * 2.0)
    conn.execute("update fairq.settings set test_clock = true")
    prepare(conn, "time" if subject == SETTLED else "count")
    # Thirteen of twenty tasks are long: by count they would take 98 % of the seconds.
    create(conn, ["slow" if n % 20 < 13 else "quick" for n in range(int(SLOTS * until * 1.6))], None)
    set_time(conn, 0)
    worker_id = register(conn)
    got = dict.fromkeys(LENGTHS, 0.0)
    share: list[tuple[float, float]] = []
    running: list[tuple[float, int, int, str]] = []
    now = 0.0
    while now < until:
        for each, attempt, group in pop(conn, worker_id, SLOTS - len(running)):
            heapq.heappush(running, (now + LENGTHS[group], each, attempt, group))
        ends = running[0][0]
        for _, _, _, group in running:
            got[group] += ends - now
        now = ends
        set_time(conn, now)
        ended = [heapq.heappop(running)[1:] for _ in range(sum(each[0] <= now for each in running))]
        finish(conn, worker_id, ended, None)
        share.append((now, got["slow"] / sum(got.values())))
    conn.execute("reset fairq.now")
    conn.execute("update fairq.settings set test_clock = false")
    show(session, subject, share, "seconds")


def show(
    session: Session,
    subject: str,
    share: list[tuple[float, float]],
    unit: str,
) -> None:
    """The share of one of the two over time, and its distance from a half at the end."""
    session.record(subject, f"{unit}, worst share", abs(share[-1][1] / 0.5 - 1), "error")
    session.series(subject, f"share of the {unit}", share, "share")


# --- Parts -----------------------------------------------------------------------------------------


def prepare(conn: Conn, fairness: str) -> None:
    clear(conn)
    given = f'{{"fairness": "{fairness}", "ready_target": {SLOTS}}}'
    conn.execute("select fairq.configure_queue('default', %s::jsonb)", (given,))


def create(conn: Conn, groups: list[str], costs: list[float] | None) -> list[int]:
    ids: list[int] = []
    for start in range(0, len(groups), 10_000):
        some = groups[start : start + 10_000]
        made = conn.execute(
            "select c from fairq.create_tasks(%s::text[], array_fill(%s::jsonb, array[%s::int]),"
            " p_costs => %s::float8[]) c",
            (some, PAYLOAD, len(some), costs[start : start + 10_000] if costs else None),
        )
        ids += [each for (each,) in made.fetchall()]
    return ids


def register(conn: Conn) -> int:
    return int(scalar(conn, "select fairq.register_worker('bench', '{default}', 100, '1 day')"))


def pop(conn: Conn, worker_id: int, most: int) -> list[tuple[int, int, str]]:
    query = "select id, attempt, group_key from fairq.pop_tasks('default', %s, %s)"
    return conn.execute(query.encode(), (most, worker_id)).fetchall() if most else []


def finish(conn: Conn, worker_id: int, ended: Any, costs: list[float] | None) -> None:
    ids, attempts = [each[0] for each in ended], [each[1] for each in ended]
    query = (
        "select count(*) from fairq.finish_tasks(%s, %s::bigint[], %s::integer[], p_costs => %s::float8[])"
    )
    conn.execute(query.encode(), (worker_id, ids, attempts, costs))


def set_time(conn: Conn, seconds: float) -> None:
    moment = (NOON + timedelta(seconds=seconds)).isoformat(sep=" ")
    conn.execute("select set_config('fairq.now', %s, false)", (moment,))
