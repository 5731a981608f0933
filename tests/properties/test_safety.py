"""Nothing lost, nothing twice, nothing stuck: everything that can happen to a task, in any sequence."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.properties.engine import Engine
from tests.properties.model import shard_of
from tests.properties.profile import PROFILE
from tests.support.calls import Held, finish, release, start
from tests.support.database import Database
from tests.support.invariants import violations

CAPPED = "capped"
CAP = 2
CAPPED_USER, USER_CAP = "jane", 1
GROUPS = ["a", "b", "c", "d", CAPPED]
groups = st.sampled_from(GROUPS)
LEASE_SECONDS = 30
WORKER_LEASE_SECONDS = 60


@dataclass
class Task:
    group: str
    max_attempts: int
    user: str | None = None
    attempts: int = 0
    # open, gone, waiting, popping, claimed, running; else how it ended
    state: str = "waiting"
    session: int | None = None
    worker: int | None = None
    run_at: int = 0
    expires_at: int | None = None
    lease_until: int = 0
    doomed: bool = False
    wished: bool = False
    spared: int = 0
    losses: int = 0

    @property
    def tried_only_once(self) -> bool:
        return self.max_attempts - self.spared == 1

    def spare(self) -> None:
        self.state, self.max_attempts, self.spared = "waiting", self.max_attempts + 1, self.spared + 1


class Safety(RuleBasedStateMachine):
    """I1, I7, I8, I10, I11, I12 while several workers and application transactions come and go."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.engine.reset()
        self.seconds = 0
        self.tasks: dict[int, Task] = {}
        self.workers = [self.worker(), self.worker()]
        self.popping_worker = self.worker()
        self.open: set[int] = set()
        self.popping: list[int] = []
        self.pop_is_open = False
        self.broken = False

    def worker(self) -> int:
        return self.engine.worker(f"{WORKER_LEASE_SECONDS} seconds")

    def check(self, condition: bool, what: object) -> None:
        self.broken = self.broken or not condition
        assert condition, what

    # What the model thinks

    def expired(self, task: Task) -> bool:
        return task.expires_at is not None and task.expires_at <= self.seconds

    def in_state(self, *states: str) -> list[int]:
        return [id_ for id_, task in self.tasks.items() if task.state in states]

    def runnable(self, certainly: bool) -> int:
        """How many tasks a pop can hand out; a wish that met a pop in flight may take effect or not."""
        found = dict.fromkeys(GROUPS, 0)
        of_user = 0
        for task in self.tasks.values():
            if task.state == "waiting" and task.run_at <= self.seconds and not self.expired(task):
                runs = not (task.wished if certainly else task.doomed)
                found[task.group] += runs
                of_user += runs and (task.group, task.user) == (CAPPED, CAPPED_USER)
        held = [self.tasks[i] for i in self.in_state("claimed", "running", "popping")]
        held_of_user = sum((task.group, task.user) == (CAPPED, CAPPED_USER) for task in held)
        found[CAPPED] += min(of_user, USER_CAP - held_of_user) - of_user
        found[CAPPED] = min(found[CAPPED], CAP - sum(task.group == CAPPED for task in held))
        return sum(found.values())

    # Applications

    @initialize(ready=st.one_of(st.integers(1, 5), st.none()))
    def configure(self, ready: int | None) -> None:
        self.engine.run("update fairq.queues set ready_target = %s", [ready])
        shard = shard_of(CAPPED, self.engine.shards)
        self.engine.run(
            "insert into fairq.groups (shard_no, queue, group_key, user_key, max_running)"
            " values (%s, 'default', %s, '', %s), (%s, 'default', %s, %s, %s)",
            [shard, CAPPED, CAP, shard, CAPPED, CAPPED_USER, USER_CAP],
        )

    @rule(
        names=st.lists(groups, min_size=1, max_size=8),
        users=st.lists(st.sampled_from([None, None, CAPPED_USER, "joe"]), min_size=8, max_size=8),
        session=st.sampled_from([0, 0, 0, 1, 2]),
        delay=st.sampled_from([None, None, None, 0, 5, 20]),
        deadline=st.sampled_from([None, None, None, 0, 10, 30]),
        attempts=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, 1, 9]),
        cost=st.sampled_from([1.0, 1.0, 0.01, 50.0]),
    )
    def create(
        self,
        names: list[str],
        users: list[str | None],
        session: int,
        delay: int | None,
        deadline: int | None,
        attempts: int,
        priority: int,
        cost: float,
    ) -> None:
        conn = self.engine.sessions[session]
        if session and session not in self.open:
            conn.autocommit = False
            self.open.add(session)
        ids = self.engine.create(
            names,
            conn,
            run_at=None if delay is None else self.engine.at(delay),
            expires_at=None if deadline is None else self.engine.at(deadline),
            max_attempts=attempts,
            priority=priority,
            cost=cost,
            **({"user_key": users[0]} if len(names) == 1 else {"user_keys": users[: len(names)]}),
        )
        for id_, group, user in zip(ids, names, users, strict=False):
            self.tasks[id_] = Task(
                group,
                attempts,
                user,
                state="open" if session else "waiting",
                session=session or None,
                run_at=self.seconds + (delay or 0),
                expires_at=None if deadline is None else self.seconds + deadline,
            )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.booleans())
    def end_transaction(self, data: st.DataObject, commit: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.open))), commit)

    def end(self, session: int, commit: bool) -> None:
        conn = self.engine.sessions[session]
        if commit:
            conn.commit()
        else:
            conn.rollback()
        conn.autocommit = True
        self.open.discard(session)
        for task in self.tasks.values():
            if task.session == session and task.state == "open":
                task.state = "waiting" if commit else "gone"

    @precondition(lambda self: self.in_state("waiting", "popping", "claimed", "running"))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(self.in_state("waiting", "popping", "claimed", "running")))
        task = self.tasks[id_]
        live = bool(self.engine.run("select 1 from fairq.tasks where id = %s", [id_]))
        (found,) = self.engine.one("select fairq.cancel_task(%s)", [id_])
        self.check(found == live, "cancel_task says whether the task is live")
        task.wished = True
        # A held one goes on until its holder hears of it.
        task.doomed = task.doomed or task.state == "waiting"

    @precondition(lambda self: self.tasks and not self.pop_is_open)
    @rule(data=st.data())
    def retry_by_hand(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.tasks)))
        task = self.tasks[id_]
        rows = self.engine.run(
            "select outcome from fairq.finished_tasks where id = %s"
            " union all select state from fairq.live_tasks where id = %s and state = 'scheduled'",
            [id_, id_],
        )
        state = rows[0][0] if rows else None
        (done,) = self.engine.one("select fairq.retry_task(%s)", [id_])
        self.check(done == (state is not None and state != "succeeded"), f"retry_task of {state}")
        if done and state != "scheduled":
            task.state, task.expires_at = "waiting", None
            task.max_attempts = max(task.max_attempts, task.attempts + 1)
            task.spared, task.losses = task.attempts, 0
            task.doomed = task.wished = False
        if done:
            task.run_at = self.seconds

    # Workers

    def take(self, popped: list[Held], worker: int, state: str) -> None:
        for id_ in popped:
            task, group, attempt = self.tasks[id_], id_.group_key, id_.attempt
            self.check(task.state == "waiting", f"{id_} was handed out while {task.state}")
            self.check(task.group == group and task.run_at <= self.seconds, f"{id_} is not due")
            self.check(not self.expired(task) and not task.doomed, f"{id_} must not run: {task}")
            self.check(
                attempt == task.attempts + 1 <= task.max_attempts, f"{id_} has attempt {attempt}: {task}"
            )
            task.state, task.worker, task.attempts = state, worker, attempt
            task.lease_until = self.seconds + LEASE_SECONDS

    @rule(number=st.integers(0, 1), limit=st.integers(1, 9), claim=st.booleans())
    def pop(self, number: int, limit: int, claim: bool) -> None:
        lease = f"{LEASE_SECONDS} seconds" if claim else None
        least, most = (min(limit, self.runnable(certainly)) for certainly in (True, False))
        popped = self.engine.pop(self.workers[number], limit, lease=lease)
        self.take(popped, self.workers[number], "claimed" if claim else "running")
        if not self.pop_is_open:
            self.check(least <= len(popped) <= most, f"popped {len(popped)}, {least} to {most} can run")

    @precondition(lambda self: not self.pop_is_open)
    @rule(limit=st.integers(1, 5))
    def pop_and_stay_open(self, limit: int) -> None:
        conn = self.engine.sessions[3]
        conn.autocommit = False
        self.pop_is_open = True
        popped = self.engine.pop(self.popping_worker, limit, conn)
        self.take(popped, self.popping_worker, "popping")
        self.popping = [*popped]

    @precondition(lambda self: self.pop_is_open)
    @rule(commit=st.booleans())
    def end_open_pop(self, commit: bool) -> None:
        conn = self.engine.sessions[3]
        if commit:
            conn.commit()
        else:
            conn.rollback()
        conn.autocommit = True
        self.pop_is_open = False
        for id_ in self.popping:
            task = self.tasks[id_]
            task.state = "running" if commit else "waiting"
            task.attempts -= not commit

    def held(self, data: st.DataObject, *states: str) -> tuple[int, Task]:
        id_ = data.draw(st.sampled_from(self.in_state(*states)))
        return id_, self.tasks[id_]

    @precondition(lambda self: self.in_state("claimed"))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        id_, task = self.held(data, "claimed")
        started = start(self.engine.on(), task.worker, [id_], task.attempts)
        if self.expired(task):
            self.check(started == [], "an expired task starts")
            task.state = "expired"
        elif task.lease_until <= self.seconds:
            self.check(started == [], "a task starts after its lease")
        else:
            self.check(started == [id_], "a claimed task does not start")
            task.state = "running"

    @precondition(lambda self: self.in_state("claimed", "running"))
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["succeeded", "failed", "cancelled", "expired", "retry", "interrupted"]),
    )
    def finish(self, data: st.DataObject, outcome: str) -> None:
        id_, task = self.held(data, "claimed", "running")
        assert task.worker is not None
        accepted = finish(
            self.engine.on(), task.worker, [id_], outcome, attempt=task.attempts, delay="5 seconds"
        )
        fits = task.state == "running" or outcome in ("cancelled", "interrupted")
        self.check(accepted == ([id_] if fits else []), "only running tasks are finished")
        if fits and outcome == "interrupted":
            if task.state == "running" and task.tried_only_once:
                task.state = "failed"
            else:
                task.spare()
        elif fits:
            in_time = task.expires_at is None or self.seconds + 5 < task.expires_at
            if outcome == "retry" and task.attempts < task.max_attempts and in_time:
                task.state, task.run_at, task.losses = "waiting", self.seconds + 5, 0
            else:
                task.state = "failed" if outcome == "retry" else outcome

    @precondition(lambda self: self.in_state("claimed", "running", "waiting"))
    @rule(data=st.data(), wrong_worker=st.booleans(), gives_back=st.booleans())
    def stale_calls_change_nothing(self, data: st.DataObject, wrong_worker: bool, gives_back: bool) -> None:
        id_, task = self.held(data, "claimed", "running", "waiting")
        worker = self.popping_worker + 1000 if wrong_worker else (task.worker or self.workers[0])
        attempt = task.attempts + (0 if wrong_worker else 1)
        call = release if gives_back else finish
        self.check(
            call(self.engine.on(), worker, [id_], attempt=attempt) == [], f"a stale call was accepted: {task}"
        )

    @precondition(lambda self: self.in_state("claimed", "running"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id_, task = self.held(data, "claimed", "running")
        given_back = release(self.engine.on(), task.worker, [id_], task.attempts)
        self.check(given_back == [id_], "a holder may release")
        task.spare()

    @precondition(lambda self: not self.pop_is_open)
    @rule(number=st.integers(0, 1), retire=st.booleans())
    def lose_worker(self, number: int, retire: bool) -> None:
        lost = self.workers[number]
        self.workers[number] = self.worker()
        if retire:
            self.engine.run("select fairq.retire_worker(%s)", [lost])
        else:
            self.advance(WORKER_LEASE_SECONDS - 20, without=lost)
            self.advance(30, without=lost)
            self.engine.run("select fairq.maintain()")
        for id_ in self.in_state("claimed", "running"):
            task = self.tasks[id_]
            if task.worker != lost:
                continue
            if task.state == "running" and (task.tried_only_once or (not retire and task.losses == 2)):
                task.state = "failed"
                continue
            task.losses += task.state == "running" and not retire
            task.spare()
        self.unclaim()

    def unclaim(self) -> None:
        """maintain() ends claims whose lease is over."""
        for id_ in self.in_state("claimed"):
            task = self.tasks[id_]
            if task.lease_until <= self.seconds:
                task.spare()

    # Time and the house

    def advance(self, seconds: int, without: int | None = None) -> None:
        self.seconds += seconds
        self.engine.now = self.engine.at(seconds)
        for worker in [*self.workers, self.popping_worker]:
            if worker != without:
                told = self.engine.run("select fairq.heartbeat(%s)", [worker])
                wished = {i for i in self.in_state("claimed", "running") if self.tasks[i].wished}
                mine = {(i,) for i in wished if self.tasks[i].worker == worker}
                self.check(set(told) == mine, f"worker {worker} is told {told}, wished {mine}")

    @precondition(lambda self: not self.pop_is_open)
    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.advance(seconds)

    @precondition(lambda self: not self.pop_is_open)
    @rule(limit=st.one_of(st.none(), st.integers(1, 4)))
    def promote(self, limit: int | None) -> None:
        self.engine.promote(limit)

    @precondition(lambda self: not self.pop_is_open)
    @rule()
    def maintain(self) -> None:
        self.engine.run("select fairq.maintain()")
        self.unclaim()

    @precondition(lambda self: not self.pop_is_open)
    @rule(rings=st.booleans())
    def lose_derived_state(self, rings: bool) -> None:
        """I11: it is made anew from the tasks."""
        self.engine.run("delete from fairq.ticks")
        self.engine.run("delete from fairq.lanes")
        if rings:
            self.engine.run("delete from fairq.rings")

    # What must always hold

    @invariant()
    def every_task_is_where_the_model_says(self) -> None:
        live = {
            r[0]: r[1:] for r in self.engine.run("select id, state, worker_id, attempt from fairq.live_tasks")
        }
        ended = self.engine.run("select id, outcome from fairq.finished_tasks")
        outcomes: dict[int, str] = {row[0]: row[1] for row in ended}
        self.check(len(outcomes) == len(ended), "a task ended twice")
        self.check(not live.keys() & outcomes.keys(), "a task is live and ended")
        self.check(live.keys() | outcomes.keys() <= self.tasks.keys(), "there is a task nobody made")
        for id_, task in self.tasks.items():
            seen: Any = live.get(id_, outcomes.get(id_))
            if task.state in ("open", "gone"):
                self.check(seen is None, f"{id_} is seen: {seen}")
            elif task.state in ("claimed", "running"):
                self.check(seen == (task.state, task.worker, task.attempts), f"{id_} is {seen}: {task}")
            elif task.state == "popping":
                self.check(isinstance(seen, tuple) and seen[1] is None, f"{id_} is {seen}: {task}")
            elif task.state == "waiting":
                allowed = {"expired"} if self.expired(task) else set()
                allowed |= {"cancelled"} if task.wished else set()
                waits = isinstance(seen, tuple) and seen[1] is None and seen[2] == task.attempts
                self.check(waits or seen in allowed, f"{id_} is {seen}: {task}")
            else:
                self.check(seen == task.state, f"{id_} is {seen}: {task}")

    @invariant()
    def the_clock_never_passes_a_queued_task_and_caps_hold(self) -> None:
        (behind,) = self.engine.one(
            "select count(*) from fairq.live_tasks t cross join lateral fairq._tick(t.shard_no, t.queue) k"
            " where t.state = 'queued' and t.block < k.clock"
        )
        self.check(behind == 0, "a queued task lies before the clock")
        (counted,) = self.engine.one(
            "select count(*) from fairq.live_tasks"
            " where group_key = %s and state in ('queued', 'claimed', 'running')",
            [CAPPED],
        )
        self.check(counted <= CAP, f"{counted} places of {CAP} are taken")
        (counted,) = self.engine.one(
            "select count(*) from fairq.live_tasks"
            " where group_key = %s and user_key = %s and state in ('queued', 'claimed', 'running')",
            [CAPPED, CAPPED_USER],
        )
        self.check(counted <= USER_CAP, f"{counted} places of {USER_CAP} are taken by a user")

    @invariant()
    def lanes_agree_with_the_tasks(self) -> None:
        if self.pop_is_open:
            return
        self.engine.run("select")  # the time
        wrong = violations(self.engine.main)
        self.check(not wrong, wrong)

    def teardown(self) -> None:
        if self.broken:
            return
        for session in list(self.open):
            self.end(session, True)
        if self.pop_is_open:
            self.end_open_pop(True)
        self.advance(50)
        for round_ in range(1000):
            for id_ in self.in_state("claimed", "running"):
                task = self.tasks[id_]
                release(self.engine.on(), task.worker, [id_], task.attempts)
                task.spare()
            if round_ == 0:
                continue
            popped = self.engine.pop(self.workers[0], 3)
            self.take(popped, self.workers[0], "running")
            finish(self.engine.on(), self.workers[0], popped)
            for id_ in popped:
                self.tasks[id_].state = "succeeded"
            if not popped:
                break
        self.engine.run("select fairq.maintain()")
        self.every_task_is_where_the_model_says()
        assert self.engine.run("select id, state from fairq.live_tasks") == [], "tasks are stuck"
        # The house is clean: nothing grows with the number of tasks that ever were.
        for _ in range(3):
            self.engine.promote()
            self.engine.run("select fairq.maintain()")
        failures = self.engine.run("select part, message from fairq.upkeep_failures")
        assert failures == [], failures
        shards = self.engine.shards
        for table, most in {
            "lanes": 4 * len(GROUPS),
            "rings": 2 * shards,
            # Of the queue and of the keys in each shard, and of the meters.
            "ticks": 2 * shards + 1,
            "held": 0,
            "ready": 0,
            "parked": 0,
            "cancellations": 0,
        }.items():
            (count,) = self.engine.one(f"select count(*) from fairq.{table}")  # noqa: S608
            assert count <= most, f"{count} rows are left in {table}"
        assert (
            self.engine.run(
                "select 1 from fairq.lanes where coalesce((gate).in_flight, 0) <> 0 or cursors <> '{}'"
            )
            == []
        )


@pytest.fixture
def engine(database: Database) -> Engine:
    return Engine(database, sessions=4)


def test_no_task_is_lost_or_handed_out_twice_whatever_happens(engine: Engine) -> None:
    """I1, I7, I8, I10, I11, I12, S13, D7, HR11, HR12."""
    run_state_machine_as_test(cast(Any, lambda: Safety(engine)), settings=PROFILE)
