"""Processes that use the engine all at once, and what each saw, line by line: see tests/races/test_storm.py.

python -m tests.support.storm produce|consume|operate DSN SEED FILE

Each writes down what it is about to do and what became of it, so a process that is killed in between leaves
no doubt about what is certain.
"""

import json
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any, TextIO

import psycopg

QUEUES = ("default", "other")
# These wait for nothing but their turn.
PLAIN = ("plain 2", "plain 3")
GROUPS = ("plain 1", "plain 2", "plain 3", "capped", "rated", "paused", "purged")
USERS = ("jane", "joe", None, None)
KEYS = ("key 1", "key 2", None, None, None)
MOST = {"capped": 3, "key 1": 1, "key 2": 1, "capped jane": 2}
RATE_SECONDS, RATE_BURST = 0.05, 3
LEVELS = [
    psycopg.IsolationLevel.READ_COMMITTED,
    psycopg.IsolationLevel.REPEATABLE_READ,
    psycopg.IsolationLevel.SERIALIZABLE,
]

SETTINGS = (
    """select fairq.configure_queue(%(queue)s, '{"max_attempts": 50}')""",
    """select fairq.configure_group(%(queue)s, 'capped', '{"max_running": 3}')""",
    """select fairq.configure_group(%(queue)s, 'rated',
         '{"rate_limit": 20, "rate_period": "1 second", "rate_burst": 3}')""",
    """select fairq.configure_user(%(queue)s, 'capped', 'jane', '{"max_running": 2}')""",
)

Conn = psycopg.Connection[Any]
Note = Callable[..., None]


def produce(conn: Conn, random: Random, note: Note) -> None:
    """One transaction of one to six calls with some tasks each; some roll back, partly or completely."""
    queue = random.choice(QUEUES)
    conn.autocommit = False
    conn.isolation_level = random.choice(LEVELS)
    ids, gone = [], []
    for _ in range(random.randint(1, 6)):
        group = random.choice(GROUPS)
        keys = random.choices(KEYS if group not in PLAIN else [None], k=random.choice([1, 1, 1, 5]))
        conn.execute("savepoint s")
        new = [
            row[0]
            for row in conn.execute(
                "select fairq.create_tasks(%s::text[], %s::jsonb[], %s, p_concurrency_keys => %s::text[],"
                " p_priority => %s, p_cost => %s, p_user_keys => %s::text[])",
                [
                    [group] * len(keys),
                    ["{}"] * len(keys),
                    queue,
                    keys,
                    random.choice([0, 0, 0, 5]),
                    1 if group in PLAIN else random.choice([1, 1, 5]),
                    random.choices(USERS if group != PLAIN[0] else [None], k=len(keys)),
                ],
            )
        ]
        if random.random() < 0.1:
            conn.execute("rollback to s")
            gone += new
        else:
            ids += new
    note("creates", ids=ids + gone)
    note("rolled back", ids=gone)
    if random.random() < 0.1:
        conn.rollback()
        note("rolled back", ids=ids)
    else:
        conn.commit()
        note("created", ids=ids)
    time.sleep(random.random() * 0.02)


class Consumer:
    """Pop, finish, retry, release, and sometimes try to end tasks that are no longer its own."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self.stale: list[tuple[int, int]] = []

    def __call__(self, conn: Conn, random: Random, note: Note) -> None:
        conn.autocommit = True
        try:
            if self.worker is None:
                row = conn.execute(
                    "select fairq.register_worker('storm', %s, 8, '2 seconds')", [list(QUEUES)]
                ).fetchone()
                assert row is not None
                self.worker = row[0]
            self.turn(conn, random, note)
        except psycopg.Error as exc:
            # Given up as lost: what it held is with others now.
            if exc.sqlstate != "QF004":
                raise
            self.worker = None

    def turn(self, conn: Conn, random: Random, note: Note) -> None:
        queue = random.choice(QUEUES)
        lease = random.choice([None, None, "300 milliseconds"])
        held = conn.execute(
            "select t.id, t.attempt, t.group_key, t.concurrency_key,"
            " extract(epoch from t.started_at)::float8, extract(epoch from clock_timestamp())::float8"
            " from fairq.pop_tasks(%s, %s, %s, %s::interval) t",
            [queue, random.randint(1, 6), self.worker, lease],
        ).fetchall()
        note("popped", queue=queue, tasks=held)
        if lease and held:
            started = conn.execute(
                "select s from fairq.start_tasks(%s, %s::bigint[], %s::int[]) s",
                [self.worker, [row[0] for row in held], [row[1] for row in held]],
            ).fetchall()
            held = [row for row in held if (row[0],) in started]
        if not held:
            time.sleep(0.01)
            return
        time.sleep(random.random() * 0.03)
        if self.stale and random.random() < 0.3:
            ids, attempts = [s[0] for s in self.stale], [s[1] for s in self.stale]
            ended = conn.execute(
                "select f from fairq.finish_tasks(%s, %s::bigint[], %s::int[]) f",
                [self.worker, ids, attempts],
            ).fetchall()
            note("stale", ids=[row[0] for row in ended])
            self.stale.clear()
        for outcome, part in (("succeeded", held[::2]), ("retry", held[1::4]), ("released", held[3::4])):
            ids, attempts = [row[0] for row in part], [row[1] for row in part]
            if not ids or random.random() < 0.02:
                continue  # Forgotten: held until its worker is gone.
            note("ends", ids=ids, outcome=outcome)
            query = (
                "select f from fairq.finish_tasks(%s, %s::bigint[], %s::int[], %s::text[],"
                " p_retry_delays => %s::interval[]) f"
            )
            delays = [random.choice(["0 s", "20 ms"])] * len(ids)
            outcomes = [outcome] * len(ids)
            ended = conn.execute(query, [self.worker, ids, attempts, outcomes, delays]).fetchall()
            note("ended", ids=[row[0] for row in ended], outcome=outcome)
            self.stale += [(row[0], row[1]) for row in part][:2]
        if random.random() < 0.01:
            conn.execute("select fairq.retire_worker(%s)", [self.worker])
            self.worker = None


def operate(conn: Conn, random: Random, note: Note) -> None:
    """One action of an operator."""
    conn.autocommit = True
    queue = random.choice(QUEUES)
    statement = random.choice(
        [
            "select fairq.maintain()",
            "select fairq.maintain()",
            """select fairq.configure_group(%(queue)s, 'capped', '{"max_running": 1}')""",
            """select fairq.configure_group(%(queue)s, 'capped', '{"max_running": 3}')""",
            """select fairq.configure_group(%(queue)s, 'plain 1', '{"max_running": 2}')""",
            """select fairq.configure_group(%(queue)s, 'plain 1', '{"max_running": null, "weight": 1}')""",
            """select fairq.configure_queue(%(queue)s, '{"max_running": 5}')""",
            """select fairq.configure_queue(%(queue)s, '{"max_running": null}')""",
            """select fairq.configure_queue(%(queue)s, '{"short_slots": 4, "short_idle": "1 second"}')""",
            """select fairq.configure_queue(%(queue)s, '{"short_slots": null}')""",
            "select fairq.pause_group(%(queue)s, 'paused')",
            "select fairq.resume_group(%(queue)s, 'paused')",
            """select fairq.configure_user(%(queue)s, 'plain 1', 'jane', '{"max_running": 1}')""",
            """select fairq.configure_user(%(queue)s, 'plain 1', 'jane',
                 '{"max_running": null, "weight": 2}')""",
            "select fairq.pause_group(%(queue)s, 'paused', 'joe')",
            "select fairq.resume_group(%(queue)s, 'paused', 'joe')",
            "select fairq.pause_queue(%(queue)s)",
            "select fairq.resume_queue(%(queue)s)",
            "select fairq.purge_group(%(queue)s, 'purged')",
            "select fairq.rebuild(%(queue)s)",
            "select fairq.cancel_task(t.id) from (select id from fairq.tasks order by random() limit 3) t",
            """select pg_terminate_backend(a.pid) from (
                 select pid from pg_stat_activity
                 where application_name = 'consume' and datname = current_database() order by random() limit 1
               ) a""",
        ]
    )
    try:
        conn.execute(statement.encode(), {"queue": queue})
    finally:
        if "pause_queue" in statement:
            time.sleep(0.05)
            conn.execute("select fairq.resume_queue(%s)", [queue])
    time.sleep(random.random() * 0.05)


def main(role: str, dsn: str, seed: str, file: TextIO) -> None:
    """Run until the process is ended."""
    random = Random(seed)
    steps: dict[str, Callable[[Conn, Random, Note], None]]
    steps = {"produce": produce, "consume": Consumer(), "operate": operate}
    step = steps[role]

    def note(what: str, **said: Any) -> None:
        file.write(json.dumps({"what": what, "at": time.time(), **said}) + "\n")
        file.flush()

    while True:
        try:
            with psycopg.connect(dsn, application_name=role) as conn:
                while True:
                    step(conn, random, note)
        except psycopg.OperationalError as exc:
            # The connection is gone; anything else that goes wrong is an error, deadlocks first of all.
            if exc.sqlstate not in (None, "57P01"):
                note("error", message=f"{type(exc).__name__}: {exc}")
        except psycopg.Error as exc:
            note("error", message=f"{type(exc).__name__}: {exc}")
        if isinstance(step, Consumer):
            step.worker = None


if __name__ == "__main__":
    with open(sys.argv[4], "a") as notes:
        main(sys.argv[1], sys.argv[2], sys.argv[3], notes)
