"""Everything that goes wrong around a queue, while three workers with default settings serve it.

Some seconds in `make test`, ten minutes in `make chaos` (FAIRQ_TEST_CHAOS=seconds). Judged afterwards, from
what producers noted, what handlers wrote down and what the database says: nothing that committed is lost,
nothing ended twice (I1); what was ended by who did not hold it had no effect (I10); no cap and no key was
exceeded in any sample, nor by handlers that ran at once (I7). How long each fault was felt is printed as a
table.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median

import psycopg

from tests.support.chaos import MOST, Conn, World, world
from tests.support.invariants import assert_sound, exceeded, violations
from tests.support.sessions import wait_until

SECONDS = float(os.environ.get("FAIRQ_TEST_CHAOS", "4"))
LONG = SECONDS >= 120
SETTLE_SECONDS = 8.0 if LONG else 0.7
SHORT_FAULTS = ("crash", "kill", "terminate", "cut", "full")
LONG_FAULTS = (
    "kill",
    "crash",
    "terminate",
    "cut",
    "freeze",
    "full",
    "crowd",
    "outage",
    "kill",
    "stop",
    "part",
)


class Sampler:
    """Looks at the queue whenever there is a database to look at."""

    def __init__(self, chaos: World) -> None:
        self.chaos = chaos
        self.conn: Conn | None = None
        self.samples = 0

    def watch(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.sample()
            if time.monotonic() >= deadline:
                return
            time.sleep(min(0.2, seconds))

    def sample(self) -> None:
        try:
            if self.conn is None:
                self.conn = self.chaos.observer()
            with self.conn.transaction():
                self.conn.execute("set transaction isolation level repeatable read")
                over = exceeded(self.conn, MOST)
                wrong = violations(self.conn)
        except psycopg.OperationalError:
            self.close()
            return
        assert not over, over
        assert not wrong, wrong
        self.samples += 1

    def close(self) -> None:
        if self.conn is not None:
            self.conn.close()
        self.conn = None


def rage(chaos: World, sampler: Sampler) -> None:
    chance = Random(os.environ.get("FAIRQ_TEST_SEED", "7"))
    deadline = time.monotonic() + SECONDS
    faults: list[str] = []

    def while_it_lasts(seconds: float) -> None:
        sampler.watch(seconds / 2)
        if seconds > 2 and chance.random() < 1 / 3:
            chaos.do("kill", chance, sampler.watch)
        sampler.watch(seconds / 2)

    while time.monotonic() < deadline or not LONG:
        if not faults:
            faults = list(LONG_FAULTS if LONG else SHORT_FAULTS)
            if LONG:
                chance.shuffle(faults)
        what = faults.pop(0)
        if what == "full" and chaos.disk is None:
            print("full: skipped, for a file system can be mounted by root only")
        else:
            chaos.do(what, chance, while_it_lasts)
            sampler.watch(SETTLE_SECONDS)
        if not LONG and not faults:
            return


def all_work(chaos: World) -> None:
    """Whatever each of them has been through."""
    now = datetime.now(UTC)
    with chaos.observer() as conn:

        def all_began() -> bool:
            query = "select distinct pid from runs where began_at > %s"
            pids = {row[0] for row in conn.execute(query, [now]).fetchall()}
            return pids >= {worker.pid for worker in chaos.workers}

        wait_until(all_began, "all workers work", 90)


def calm(chaos: World) -> None:
    """The producers stop, the workers serve what is left, and end."""
    for producer in chaos.producers:
        producer.send_signal(signal.SIGTERM)
        producer.wait()
    with chaos.observer() as conn:
        if not LONG:  # the lease of the killed ones would outlast all the rest
            shorten = "update fairq.workers set lease = '1 millisecond' where name like %s"
            for worker in chaos.dead:
                conn.execute(shorten, [f"%:{worker.pid}"])
            conn.execute("select fairq.maintain()")

        def nothing_is_left() -> bool:
            for worker in chaos.workers:
                assert worker.process.poll() is None, worker.output
            return conn.execute("select count(*) from fairq.tasks").fetchone() == (0,)

        wait_until(nothing_is_left, "all is served", 300 if LONG else 60)
        for worker in chaos.workers:
            worker.send(signal.SIGTERM)
        assert [worker.wait() for worker in chaos.workers] == [0, 0, 0]
        assert_sound(conn)


def judge(chaos: World) -> None:
    for worker in (*chaos.workers, *chaos.dead):
        assert not worker.says("Traceback"), worker.output
    notes = []
    for file in chaos.folder.glob("producer-*.jsonl"):
        notes += [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    errors = [note for note in notes if note["what"] == "error"]
    assert not errors, errors[:3]
    told = {one for note in notes if note["what"] == "told" for one in note["ids"]}
    with chaos.observer() as conn:
        asked = {row[0] for row in conn.execute("select task_id from asked").fetchall()}
        # I1: what was committed has ended, once; what was not committed never was.
        ends = conn.execute("select id, outcome, error from fairq.finished_tasks").fetchall()
        ended = Counter(row[0] for row in ends)
        assert len(told) > 20
        assert told <= asked
        assert ended == Counter(asked)
        assert not [row for row in ends if row[1] != "succeeded"]

        # I1: an attempt is given to one, and runs once.
        query = "select task_id, attempt, count(*) from runs group by 1, 2 having count(*) > 1"
        assert conn.execute(query).fetchall() == []
        # I10: an effect that commits with the end is there once.
        query = """
            select t.task_id, (select array_agg(e.attempt) from effects e where e.task_id = t.task_id)
            from runs t where t.kind = 'settles' group by 1
            having (select count(*) from effects e where e.task_id = t.task_id) <> 1"""
        assert conn.execute(query).fetchall() == []

        # I1, I7: of two runs at once of one task or key, the older is of a worker that was given up.
        runs = """
            with valid as (
              select r.*, coalesce(r.ended_at, 'infinity') as until
              from runs r
              where not exists (
                select from fairq.attempts a
                where a.task_id = r.task_id and a.attempt = r.attempt and a.outcome = 'worker_lost')
            )"""
        twice = """
            select a.task_id, a.attempt, b.task_id, b.attempt, a.began_at, a.ended_at, b.began_at, a.key
            from valid a
            join valid b on (a.task_id = b.task_id or a.key = b.key) and b.began_at < a.until
              and (a.began_at, a.token) < (b.began_at, b.token)"""
        assert conn.execute((runs + twice).encode()).fetchall() == []
        crowded = """
            select a.task_id, a.began_at, count(*)
            from valid a
            join valid b on b.group_key = a.group_key and a.began_at >= b.began_at and a.began_at < b.until
            where a.group_key = 'capped'
            group by 1, 2
            having count(*) > 3"""
        assert conn.execute((runs + crowded).encode()).fetchall() == []


def report(chaos: World, conn: Conn) -> Iterator[str]:
    """Of each kind of fault, in seconds, the median and the worst: how long it lasted; from its end to the
    first handler that began, and until one had begun in each worker; and from its beginning until the tasks
    whose worker could not end them were taken from it, and until they had ended.
    """
    yield "| fault | times | lasted | work again | all workers again | tasks lost | taken over | ended |"
    yield "|---|---|---|---|---|---|---|---|"
    began = """
        select pid, extract(epoch from min(began_at))::float8
        from runs
        where began_at > to_timestamp(%s) and pid = any(%s)
        group by 1"""
    lost = """
        select a.task_id, extract(epoch from min(a.ended_at))::float8,
          extract(epoch from f.finished_at)::float8
        from fairq.attempts a
        join fairq.finished_tasks f on f.id = a.task_id
        where a.task_id = any(%s) and a.outcome = 'worker_lost' and a.ended_at > to_timestamp(%s)
        group by a.task_id, f.finished_at"""
    for what in sorted({fault.what for fault in chaos.faults}):
        faults = [fault for fault in chaos.faults if fault.what == what]
        work, all_work, taken_over, ended = [], [], [], []
        for fault in faults:
            first = conn.execute(began, [fault.undone, fault.pids]).fetchall()
            work.append(min((row[1] - fault.undone for row in first), default=0.0))
            all_work.append(max((row[1] - fault.undone for row in first), default=0.0))
            for _, lost_at, ended_at in conn.execute(lost, [fault.stranded, fault.began]).fetchall():
                taken_over.append(lost_at - fault.began)
                ended.append(ended_at - fault.began)
        numbers = [[fault.undone - fault.began for fault in faults], work, all_work]
        columns = [str(getattr(World, what).__doc__), str(len(faults)), *map(middle_and_most, numbers)]
        columns += [str(len(ended) or ""), middle_and_most(taken_over), middle_and_most(ended)]
        yield f"| {' | '.join(columns)} |"


def middle_and_most(seconds: list[float]) -> str:
    return f"{median(seconds):.1f} / {max(seconds):.1f}" if seconds else ""


def test_after_everything_that_can_go_wrong_all_is_accounted_for(tmp_path: Path) -> None:
    with world(tmp_path, 5.0 if LONG else 0.5) as chaos, contextlib.ExitStack() as stack:
        sampler = stack.enter_context(contextlib.closing(Sampler(chaos)))
        for worker in chaos.workers:
            worker.wait_for("slot")
        try:
            rage(chaos, sampler)
            all_work(chaos)
            calm(chaos)
            judge(chaos)
        except BaseException:
            for worker in chaos.workers:
                print("\n".join(worker.lines[-40:]), end="\n\n")
            raise
        assert sampler.samples > 3
        with chaos.observer() as conn:
            count = conn.execute("select count(*) from asked").fetchone()
            print(f"{count and count[0]} tasks, {sampler.samples} samples", *report(chaos, conn), sep="\n")
