"""Users inside groups, beside as many groups without: what that costs, and what a tenant of many users gets.

The same tasks of the same thousand, each of whom is a group, or a user in a group of one to a hundred.
*promotion* is a pass as large as pops make it, four more addresses for each, once all tasks were heard of;
*promotion of one task each* is one where so many wait that each gets one. *cycle* is all there is, from the
first pass to the last end.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg

from benchmarks.bench_create_task import PAYLOAD
from benchmarks.bench_cycle import scalar
from benchmarks.harness import Scale, Session, clear

BASELINES = ()
HEARD = 5_000  # rings that a pass hears
USERS = (1, 2, 10, 100)
PASSES = {"promotion": 4, "promotion of one task each": 1}
CROWD = 1_000
FLAT = "flat"
OUTSIDE, INSIDE = "a group for each user", "fairq, users inside groups"

Conn = psycopg.Connection[Any]


def estimate(scale: Scale) -> float:
    return 2 + scale.repetitions * (
        (1 + len(USERS)) * len(PASSES) * scale.tasks * 100e-6 + 2 * crowd(scale) * 800e-6
    )


def crowd(scale: Scale) -> int:
    return min(CROWD, scale.tasks // 3)


def run(session: Session) -> None:
    subjects = {FLAT: 0, **{f"fairq, {users} user{'s'[: users - 1]} a group": users for users in USERS}}
    for repetition in session.repetitions():
        with session.connect() as conn:
            # Each goes first once, so that none always has the warmer cache.
            names = [*subjects]
            start = repetition % len(names)
            for subject in names[start:] + names[:start]:
                for what in PASSES:
                    session.say(f"{subject}, {what}, {repetition + 1}")
                    cost(session, conn, subject, subjects[subject], what)
            for subject in (OUTSIDE, INSIDE):
                session.say(f"{subject}, {repetition + 1}")
                share(session, conn, subject)


def cost(session: Session, conn: Conn, subject: str, users: int, what: str) -> None:
    tasks = session.scale.tasks
    count = min(CROWD, tasks // 10)
    clear(conn)
    names = [(f"group {n // users}", f"user {n}") if users else (f"group {n}", None) for n in range(count)]
    create(conn, [names[n % count] for n in range(tasks)])
    conn.execute("analyze")
    worker_id = register(conn)
    begin = time.perf_counter()
    passes: list[tuple[float, int]] = []
    left = tasks
    while left:
        before = time.perf_counter()
        promoted = scalar(conn, "select fairq.promote_overflow('default', %s)", PASSES[what] * count)
        passes.append((time.perf_counter() - before, promoted))
        left -= len(serve(conn, worker_id, max(promoted, 1)))
    seconds = time.perf_counter() - begin
    heard = passes[-(-tasks // HEARD) :]
    scenario = {"groups or users": count, "tasks each": tasks // count}
    took = sum(each for each, _ in heard) / sum(promoted for _, promoted in heard)
    session.record(subject, what, took * 1e6, "µs/task", **scenario)
    if what == "promotion":
        session.record(subject, "cycle", tasks / seconds, "tasks/s", **scenario)


def share(session: Session, conn: Conn, subject: str) -> None:
    """Serve half of both tenants' tasks: how many of those belong to the tenant with a single user?"""
    count = crowd(session.scale)
    clear(conn)
    keys: Sequence[tuple[str, str | None]]
    if subject == INSIDE:
        keys = [("many", f"user {n}") for n in range(count)] + [("one", "user")] * count
    else:
        keys = [(f"many {n}", None) for n in range(count)] + [("one", None)] * count
    create(conn, keys)
    worker_id = register(conn)
    got: Counter[str] = Counter()
    while got.total() < count:
        got.update(group.split()[0] for group in serve(conn, worker_id, 20))
    what = f"share of the tenant with one user, beside {count:,}"
    session.record(subject, what, got["one"] / got.total(), "share")


def create(conn: Conn, keys: Sequence[tuple[str, str | None]]) -> None:
    for start in range(0, len(keys), 10_000):
        groups, users = map(list, zip(*keys[start : start + 10_000], strict=True))
        conn.execute(
            "select count(*) from fairq.create_tasks(%s::text[], array_fill(%s::jsonb, array[%s::int]),"
            " p_user_keys => %s::text[])",
            (groups, PAYLOAD, len(groups), users),
        )


def register(conn: Conn) -> int:
    return int(scalar(conn, "select fairq.register_worker('bench', '{default}', 100, '1 hour')"))


def serve(conn: Conn, worker_id: int, most: int) -> list[str]:
    """Pop and finish, and return the groups of the served tasks."""
    pop = "select id, attempt, group_key from fairq.pop_tasks('default', %s, %s)"
    popped = conn.execute(pop.encode(), (most, worker_id)).fetchall()
    if not popped:
        raise RuntimeError("tasks are left, but none is popped")
    ids, attempts, groups = map(list, zip(*popped, strict=True))
    finish = "select count(*) from fairq.finish_tasks(%s, %s::bigint[], %s::integer[])"
    conn.execute(finish.encode(), (worker_id, ids, attempts))
    return groups
