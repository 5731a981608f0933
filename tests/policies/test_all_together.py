"""All policies at once, in any sequence: caps hold, places are freed once, nobody waits for nothing.

What may run is worked out from the tasks and the settings alone: no lane, ring or tick is looked at.
FAIRQ_HYPOTHESIS_PROFILE=thorough runs longer, and elsewhere each time.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.calls import RELEASE, Conn, call, empty, one, run
from tests.support.calls import START as START_TASKS
from tests.support.database import Database
from tests.support.invariants import hear_all, violations

QUEUES = ["default", "mail"]
# "slow" has a rate, "broken" a breaker: what they may have is checked by bounds, not by the model.
GROUPS = ["a", "b", "c", "slow", "broken"]
KEYS = {"one": 1, "two": 2}
RATE_SECONDS, BURST = 5, 3
THRESHOLD, COOLDOWN = 2, timedelta(seconds=10)
START = datetime(2030, 1, 1, tzinfo=UTC)
TABLES = (
    "tasks held ready parked finished_tasks attempts rings lanes ticks groups idempotency_keys cancellations"
    " workers heartbeats sweeps upkeep_failures"
)
ENDS = ["failed", "retry", "cancelled", "expired", "succeeded"]
IN_FLIGHT = ("queued", "claimed", "running")

THOROUGH = os.environ.get("FAIRQ_HYPOTHESIS_PROFILE", "quick") != "quick"
# Every step looks at every domain, of which each shard has its own.
EXAMPLES = 8 if "FAIRQ_TEST_SHARDS" in os.environ else 16
PROFILE = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    derandomize=not THOROUGH,
    database=None,
    # Shrinking forty steps takes minutes, so a quick run shows the steps as they came.
    phases=list(Phase) if THOROUGH else [Phase.generate],
    max_examples=600 if THOROUGH else EXAMPLES,
    stateful_step_count=80 if THOROUGH else 40,
)


@dataclass(frozen=True)
class Task:
    id: int
    shard: int
    queue: str
    group: str
    key: str | None
    state: str
    worker: int | None
    attempt: int
    run_at: datetime
    expires_at: datetime | None

    @property
    def held(self) -> bool:
        return self.worker is not None


@dataclass
class Caps:
    """The settings, as the test made them."""

    group: dict[tuple[str, str], int] = field(default_factory=dict)
    every_group: dict[str, int] = field(default_factory=dict)
    queue: dict[str, int] = field(default_factory=dict)
    cluster: int | None = None
    paused_groups: set[tuple[str, str]] = field(default_factory=set)
    paused_queues: set[str] = field(default_factory=set)

    def of(self, queue: str, group: str) -> int:
        return self.group.get((queue, group), self.every_group.get(queue, 10**9))


OUT_OF_ORDER = """
with lane as (
  select distinct on (l.shard_no, l.queue, l.group_key) l.shard_no, l.queue, l.group_key, l.finish, l.pace
  from fairq.lanes l
  where left(l.queue, 1) <> '#'
  order by l.shard_no, l.queue, l.group_key, l.version desc
)
select l.queue, l.group_key, l.finish, l.pace, max(t.block)
from lane l
left join fairq.live_tasks t on (t.shard_no, t.queue, t.group_key) = (l.shard_no, l.queue, l.group_key)
  and t.state = 'queued'
where l.pace is distinct from null
group by l.queue, l.group_key, l.finish, l.pace
having max(t.block) >= l.finish or (l.pace).last_block >= l.finish or (l.pace).credit < 0
"""


class Policies(RuleBasedStateMachine):
    def __init__(self, conn: Conn) -> None:
        super().__init__()
        self.conn = conn
        self.now = START
        self.caps = Caps()
        self.doomed: set[int] = set()
        self.served_slowly: Counter[str] = Counter()
        # What may have started beside the rate: a burst, and one more whenever its state was lost.
        self.bursts = Counter(dict.fromkeys(QUEUES, 1))
        self.started_at = START
        # Failures of "broken" since its last success, and until when its breaker is open then.
        self.failures: Counter[str] = Counter()
        self.open_until = dict.fromkeys(QUEUES, START)
        self.tell_time()
        empty(conn, *TABLES.split())
        for queue in QUEUES:
            call(conn, "configure_queue", queue)
        run(
            conn,
            "update fairq.queues set ready_target = null, group_max_running = null, max_running = null,"
            " metered = false, fairness = 'count', paused_at = null where not internal",
        )
        run(conn, "update fairq.settings set max_running = null")
        for key, places in KEYS.items():
            if places > 1:
                call(conn, "configure_key", key, max_running=places)
        for queue in QUEUES:
            call(
                conn,
                "configure_group",
                queue,
                "slow",
                rate_limit=1,
                rate_period=f"{RATE_SECONDS} s",
                rate_burst=BURST,
            )
            call(
                conn,
                "configure_group",
                queue,
                "broken",
                breaker_threshold=THRESHOLD,
                breaker_cooldown=COOLDOWN.total_seconds(),
            )
        self.workers = [self.worker(), self.worker()]

    def tell_time(self) -> None:
        run(self.conn, "select set_config('fairq.now', %s, false)", self.now.isoformat())

    def worker(self) -> int:
        return int(one(self.conn, "select fairq.register_worker('w', %s, 8, '1 minute')", QUEUES))

    def tasks(self) -> list[Task]:
        query = """
            select id, shard_no, queue, group_key, concurrency_key, state, worker_id, attempt, run_at,
              expires_at
            from fairq.live_tasks order by id"""
        return [Task(*row) for row in run(self.conn, query)]

    # Applications

    @initialize(
        ready=st.sampled_from([None, 1, 3]),
        cap=st.sampled_from([None, 2, 3]),
        busy=st.sampled_from([None, 0, 12]),
    )
    def begin(self, ready: int | None, cap: int | None, busy: int | None) -> None:
        """Often in the middle of things: else most steps of a run would find nothing to end."""
        run(self.conn, "update fairq.queues set ready_target = %s where not internal", ready)
        if cap is not None:
            for queue in QUEUES:
                self.cap_every_group(queue, cap)
        if busy is None:
            return
        for queue in QUEUES:
            for group in GROUPS:
                self.create(queue, group, 8 if group == "slow" else 2, None, 0, None, None)
                self.create(queue, group, 1, "two", 0, None, None if group == "slow" else 10)
            if busy:  # some are ready when their deadline passes
                call(self.conn, "promote_overflow", queue)
                self.pass_time(busy)
            self.pop(0, queue, 7, False)
            self.pop(1, queue, 2, True)
            running = [t for t in self.tasks() if t.state == "running" and t.queue == queue]
            for task, how in zip(running, ENDS, strict=False):
                self.say(task, how)

    @rule(
        queue=st.sampled_from(QUEUES),
        group=st.sampled_from(GROUPS),
        count=st.integers(1, 5),
        key=st.sampled_from([None, None, *KEYS]),
        user=st.sampled_from([None, None, "jane", "joe"]),
        priority=st.sampled_from([0, 0, 0, 5]),
        delay=st.sampled_from([None, None, None, 5]),
        deadline=st.sampled_from([None, None, None, 10]),
    )
    def create(
        self,
        queue: str,
        group: str,
        count: int,
        key: str | None,
        priority: int,
        delay: int | None,
        deadline: int | None,
        user: str | None = None,
    ) -> None:
        if group == "slow":
            deadline = None  # an expired task was charged, and nobody can tell from outside
        for _ in range(count):
            call(
                self.conn,
                "create_task",
                group,
                "{}",
                queue=queue,
                priority=priority,
                concurrency_key=key,
                user_key=user,
                run_at=delay and self.now + timedelta(seconds=delay),
                expires_at=deadline and self.now + timedelta(seconds=deadline),
            )

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if ids := [task.id for task in self.tasks()]:
            id_ = data.draw(st.sampled_from(ids))
            call(self.conn, "cancel_task", id_)
            self.doomed.add(id_)

    # Operators

    @rule(queue=st.sampled_from(QUEUES))
    def drain_a_queue(self, queue: str) -> None:
        """Nothing comes in; nothing else changes. Resumed at once, or the rest of the run would be empty."""
        before = self.tasks()
        call(self.conn, "drain_queue", queue)
        with pytest.raises(psycopg.Error) as caught:
            self.create(queue, "a", 1, None, 0, None, None)
        assert caught.value.sqlstate == "QF016"
        assert self.tasks() == before
        call(self.conn, "resume_queue", queue)
        self.caps.paused_queues.discard(queue)

    @rule(queue=st.sampled_from(QUEUES), fairness=st.sampled_from(["count", "time"]))
    def share(self, queue: str, fairness: str) -> None:
        call(self.conn, "configure_queue", queue, fairness=fairness)

    @rule(queue=st.sampled_from(QUEUES))
    def forget_a_rate(self, queue: str) -> None:
        call(self.conn, "reset_rate", queue, "slow")
        ((free,),) = run(self.conn, "select available from fairq.rate_usage(%s, 'slow')", queue)
        assert 0 <= free <= BURST
        self.bursts[queue] += 1

    @rule(
        queue=st.sampled_from(QUEUES), group=st.sampled_from(GROUPS), cap=st.sampled_from([None, 0, 1, 2, 4])
    )
    def cap_a_group(self, queue: str, group: str, cap: int | None) -> None:
        if cap is None:
            self.caps.group.pop((queue, group), None)
            call(self.conn, "configure_group", queue, group, max_running=None)
        else:
            self.caps.group[queue, group] = cap
            call(self.conn, "configure_group", queue, group, max_running=cap)

    @rule(queue=st.sampled_from(QUEUES), cap=st.sampled_from([None, None, 1, 3]))
    def cap_every_group(self, queue: str, cap: int | None) -> None:
        if cap is None:
            self.caps.every_group.pop(queue, None)
            call(self.conn, "configure_queue", queue, group_max_running=None)
        else:
            self.caps.every_group[queue] = cap
            call(self.conn, "configure_queue", queue, group_max_running=cap)

    @rule(queue=st.sampled_from(QUEUES), cap=st.sampled_from([None, 1, 3, 6]))
    def cap_a_queue(self, queue: str, cap: int | None) -> None:
        if cap is None:
            self.caps.queue.pop(queue, None)
            call(self.conn, "configure_queue", queue, max_running=None)
        else:
            self.caps.queue[queue] = cap
            call(self.conn, "configure_queue", queue, max_running=cap)

    @rule(cap=st.sampled_from([None, 2, 5]))
    def cap_the_cluster(self, cap: int | None) -> None:
        self.caps.cluster = cap
        call(self.conn, "configure_cluster", max_running=cap)

    @rule(queue=st.sampled_from(QUEUES), group=st.sampled_from(GROUPS), resume=st.booleans())
    def pause_a_group(self, queue: str, group: str, resume: bool) -> None:
        call(self.conn, "resume_group" if resume else "pause_group", queue, group)
        (self.caps.paused_groups.discard if resume else self.caps.paused_groups.add)((queue, group))

    @rule(queue=st.sampled_from(QUEUES), resume=st.sampled_from([True, True, False]))
    def pause_a_queue(self, queue: str, resume: bool) -> None:
        call(self.conn, "resume_queue" if resume else "pause_queue", queue)
        (self.caps.paused_queues.discard if resume else self.caps.paused_queues.add)(queue)

    @rule(queue=st.sampled_from(QUEUES), group=st.sampled_from(GROUPS))
    def purge(self, queue: str, group: str) -> None:
        mine = [t for t in self.tasks() if (t.queue, t.group) == (queue, group)]
        ((ended,),) = call(self.conn, "purge_group", queue, group)
        assert ended <= sum(not t.held for t in mine)
        assert {t.id for t in self.tasks() if (t.queue, t.group) == (queue, group)} == {
            t.id for t in mine if t.held
        }

    # Workers

    @rule(
        number=st.integers(0, 1),
        queue=st.sampled_from(QUEUES),
        limit=st.sampled_from([1, 2, 5, 100]),
        claim=st.sampled_from([False, False, True]),
        then=st.sampled_from([None, *ENDS]),
    )
    def pop_and_work(self, number: int, queue: str, limit: int, claim: bool, then: str | None) -> None:
        before = {t.id for t in self.tasks() if t.held}
        self.pop(number, queue, limit, claim)
        for task in self.tasks():
            if then and task.state == "running" and task.id not in before:
                assert self.say(task, then)

    def pop(self, number: int, queue: str, limit: int, claim: bool) -> None:
        lease = "20 s" if claim and self.caps.cluster is None else None
        query = "select id, group_key from fairq.pop_tasks(%s, %s, %s, %s::interval)"
        popped = run(self.conn, query, queue, limit, self.workers[number], lease)
        after = self.tasks()
        held = [t for t in after if t.held]
        for id_, group in popped:
            assert id_ not in self.doomed, "cancelled before it was popped"
            assert (queue, group) not in self.caps.paused_groups
            if group == "slow":
                self.served_slowly[queue] += 1
        assert not popped or queue not in self.caps.paused_queues
        if self.failures[queue] >= THRESHOLD:
            probes = sum(group == "broken" for _, group in popped)
            assert probes <= (self.now >= self.open_until[queue]), "the breaker is open"
        self.caps_hold(queue, {group for _, group in popped}, held)
        room = min(
            limit,
            self.caps.queue.get(queue, 10**9) - sum(t.queue == queue for t in held) + len(popped),
            10**9 if self.caps.cluster is None else self.caps.cluster - len(held) + len(popped),
        )
        if len(popped) < room and queue not in self.caps.paused_queues:
            left = self.runnable(queue, after)
            assert not left, f"{len(popped)} popped of {room}, and these might run: {left}"

    def caps_hold(self, queue: str, popped: set[str], held: list[Task]) -> None:
        """I7: nothing was popped into a scope that is over its cap now. (A lowered cap drains.)"""
        if popped:
            assert sum(t.queue == queue for t in held) <= self.caps.queue.get(queue, 10**9)
            assert self.caps.cluster is None or len(held) <= self.caps.cluster
        for group in popped:
            assert sum((t.queue, t.group) == (queue, group) for t in held) <= self.caps.of(queue, group)

    def runnable(self, queue: str, tasks: list[Task]) -> list[Task]:
        """I8: what could be popped now, by tasks and settings alone."""
        in_flight = Counter((t.queue, t.group) for t in tasks if t.state in IN_FLIGHT)
        keys = Counter((t.shard, t.key) for t in tasks if t.key and t.state in IN_FLIGHT)
        return [
            t
            for t in tasks
            if t.queue == queue
            and t.group not in ("slow", "broken")
            and not t.held
            and t.id not in self.doomed
            and t.run_at <= self.now
            and (t.expires_at is None or t.expires_at > self.now)
            and (queue, t.group) not in self.caps.paused_groups
            and (
                t.state == "queued"
                or (
                    in_flight[queue, t.group] < self.caps.of(queue, t.group)
                    and (t.key is None or keys[t.shard, t.key] < KEYS[t.key])
                )
            )
        ]

    @precondition(lambda self: any(t.held for t in self.tasks()))
    @rule(
        data=st.data(),
        how=st.sampled_from(
            ["succeeded", "succeeded", "failed", "retry", "cancelled", "expired", "release", "start"]
        ),
        again=st.booleans(),
    )
    def leave(self, data: st.DataObject, how: str, again: bool) -> None:
        """I10: each way out once, and a second message of the same holder changes nothing."""
        held = [t for t in self.tasks() if t.held]
        chosen = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=4, unique_by=lambda t: t.id))
        for task in chosen:
            said = self.say(task, how)
            before = self.tasks()
            if again and said:
                assert how == "start" or self.say(task, how) == []
                assert self.say(task, "succeeded" if how == "release" else "release") == [] or how == "start"
                assert self.tasks() == before or how == "start"

    @precondition(lambda self: any(t.held for t in self.tasks()))
    @rule(
        number=st.integers(0, 1),
        how=st.sampled_from(ENDS),
    )
    def leave_together(self, number: int, how: str) -> None:
        """All that a worker runs ends by one call, and again, and by a call of somebody else: once."""
        worker, other = self.workers[number], self.workers[1 - number]
        running = [t for t in self.tasks() if t.worker == worker and t.state == "running"]
        ids = [(t.id, t.attempt) for t in running]
        query = (
            "select fairq.finish_tasks(%s, %s, %s, array_fill(%s::text, array[%s]),"
            " p_retry_delays => array_fill('3 s'::interval, array[%s]))"
        )

        def said(who: int, attempt: int = 0) -> set[int]:
            attempts = [each + attempt for _, each in ids]
            rows = run(self.conn, query, who, [id_ for id_, _ in ids], attempts, how, len(ids), len(ids))
            return {row[0] for row in rows}

        assert said(other) == said(worker, attempt=-1) == said(worker, attempt=1) == set()
        assert said(worker) == {id_ for id_, _ in ids}
        assert said(worker) == set()
        self.heed(running, how)

    def say(self, task: Task, how: str) -> list[Any]:
        held = [task.worker, [task.id], [task.attempt]]
        if how in ("release", "start"):
            return run(self.conn, RELEASE if how == "release" else START_TASKS, *held)
        ended = run(
            self.conn,
            "select fairq.finish_tasks(%s, %s, %s, %s, p_retry_delays => array['3 s'::interval])",
            *held,
            [how],
        )
        self.heed([task] if ended else [], how)
        return ended

    def heed(self, ended: list[Task], how: str) -> None:
        """What the breaker of "broken" makes of it. Failures are heard at once: its cooldown begins then."""
        for queue in {t.queue for t in ended if t.group == "broken"}:
            if how == "succeeded":
                self.failures[queue] = 0
                self.open_until[queue] = self.now
            elif how in ("failed", "retry"):
                call(self.conn, "promote_overflow", queue)
                self.failures[queue] += sum((t.queue, t.group) == (queue, "broken") for t in ended)
                if self.failures[queue] >= THRESHOLD and self.open_until[queue] <= self.now:
                    self.open_until[queue] = self.now + COOLDOWN

    @rule(queue=st.sampled_from(QUEUES), limit=st.sampled_from([5, 100]), seconds=st.sampled_from([0, 9, 10]))
    def fail_in_a_row(self, queue: str, limit: int, seconds: int) -> None:
        """A credential has expired: what "broken" runs fails, and more of it stands ready."""
        self.create(queue, "broken", 6, None, 5, None, None)
        self.pop(0, queue, limit, False)
        for task in self.tasks():
            if (task.queue, task.group, task.state) == (queue, "broken", "running"):
                self.say(task, "failed")
        self.pass_time(seconds)
        self.pop(1, queue, 100, False)

    @rule(number=st.integers(0, 1), retire=st.booleans())
    def lose_a_worker(self, number: int, retire: bool) -> None:
        lost, self.workers[number] = self.workers[number], self.worker()
        if retire:
            call(self.conn, "retire_worker", lost)
        else:
            self.pass_time(40, lost)
            self.pass_time(40, lost)
            call(self.conn, "maintain")
        assert not [t for t in self.tasks() if t.worker == lost]

    # Time and the house

    def pass_time(self, seconds: int, without: int | None = None) -> None:
        self.now += timedelta(seconds=seconds)
        self.tell_time()
        for worker in self.workers:
            if worker != without:
                call(self.conn, "heartbeat", worker)

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.pass_time(seconds)

    @rule()
    def maintain(self) -> None:
        call(self.conn, "maintain")

    @rule(queue=st.sampled_from(QUEUES), limit=st.sampled_from([1, 3, None]))
    def promote(self, queue: str, limit: int | None) -> None:
        call(self.conn, "promote_overflow", queue, limit)

    @rule()
    def lose_derived_state(self) -> None:
        """I11."""
        for table in ("ticks", "lanes", "rings"):
            run(self.conn, f"delete from fairq.{table}")  # noqa: S608
        self.bursts.update(QUEUES)
        self.failures.clear()
        self.open_until = dict.fromkeys(QUEUES, START)

    # What must always hold

    @invariant()
    def keys_are_never_shared(self) -> None:
        """I7: sampled at every step; queued tasks hold their key, too."""
        taken = Counter((t.shard, t.key) for t in self.tasks() if t.key and t.state in IN_FLIGHT)
        assert all(count <= KEYS[key or ""] for (_, key), count in taken.items()), taken

    @invariant()
    def rates_hold(self) -> None:
        """What was ready in time may be popped late, so up to two bursts meet; never more."""
        elapsed = (self.now - self.started_at).total_seconds()
        for queue, served in self.served_slowly.items():
            assert served <= (1 + self.bursts[queue]) * BURST + elapsed / RATE_SECONDS, queue

    @invariant()
    def every_lane_counts_the_tasks_in_flight(self) -> None:
        """I7, I11: looked at in a transaction that is rolled back, so that looking changes nothing."""
        run(self.conn, "begin")
        try:
            hear_all(self.conn)
            wrong = violations(self.conn)
        finally:
            run(self.conn, "rollback")
        assert not wrong, wrong

    @invariant()
    def corrections_go_behind_nothing(self) -> None:
        """Where groups share time: the next address lies behind all the group has; credit is no debt."""
        wrong = run(self.conn, OUT_OF_ORDER)
        assert not wrong, f"queue, group, finish, pace, last queued block: {wrong}"

    def teardown(self) -> None:
        """No starvation: with caps that let anything through, and time, everything that was created ends."""
        for queue in QUEUES:
            call(self.conn, "resume_queue", queue)
            for group in GROUPS:
                call(self.conn, "resume_group", queue, group)
                if self.caps.group.get((queue, group)) == 0:
                    call(self.conn, "configure_group", queue, group, max_running=None)
        worker = self.workers[0]
        idle = 0
        for task in self.tasks():
            if task.held:
                self.say(task, "release")
        for task in self.tasks():
            if task.held:
                self.say(task, "failed")
        while (tasks := self.tasks()) and idle < 20:
            ended = 0
            for queue in QUEUES:
                rows = run(self.conn, "select id, attempt from fairq.pop_tasks(%s, 100, %s)", queue, worker)
                ended += len(
                    run(
                        self.conn,
                        "select fairq.finish_tasks(%s, %s, %s)",
                        worker,
                        [row[0] for row in rows],
                        [row[1] for row in rows],
                    )
                )
            idle = 0 if ended else idle + 1
            if not ended:
                self.pass_time(6)
                call(self.conn, "maintain")
        assert not tasks, f"starved: {tasks}"
        self.every_lane_counts_the_tasks_in_flight()
        hear_all(self.conn)
        wrong = run(self.conn, "select queue, group_key from fairq.lanes where (gate).in_flight <> 0")
        assert not wrong


@pytest.fixture
def session(database: Database) -> Conn:
    conn = database.connect(autocommit=True)
    conn.execute("set synchronous_commit = off")
    return conn


@pytest.mark.new_database
def test_caps_hold_places_come_back_once_and_nobody_waits_for_nothing(session: Conn) -> None:
    """I7, I8, I10, I11, H17, H34, H35, H38, D7, S23."""
    run_state_machine_as_test(lambda: Policies(session), settings=PROFILE)  # type: ignore[arg-type]
