"""What producers, workers and operators may do, in an order that a seed decides; one transaction stays open.

After each step the tables must say nothing wrong, and now and then all that can go must go, no later than a
sleeping worker looks. At the end, when nothing limits anybody, all tasks end.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from tests.support.calls import Conn, call, column, one, pop, run
from tests.support.database import Database
from tests.support.invariants import hear_all, violations

QUEUES = ("default", "mail")
GROUPS = ("a", "b", "c", "d", "e")
USERS = ("u", "v", "w")
KEYS = ("k", "l", "m")
KINDS = ("x", "y")
OUTCOMES = (
    *("succeeded",) * 5,
    *("failed", "retry", "retry", "cancelled", "expired", "released", "postponed", "declined", "interrupted"),
)
# Where rates stay: of a group, or of a user of one, the seconds that a task takes of it, and the burst.
RATES: dict[tuple[str, str | None], tuple[int, int]] = {
    ("a", None): (1, 3),
    ("b", None): (10, 1),
    ("c", "u"): (2, 2),
}
LIMITS = ("max_running", "rate_limit", "breaker_threshold")
FINISH = """select fairq.finish_tasks(%s, %s, %s, %s, p_retry_delays => %s::interval[], p_holds => %s::text[],
  p_costs => %s::float8[])"""
SOON = 0.02  # there may be more already
STARVED_AFTER = 30  # rounds without an end, each of several seconds of the engine's clock


class Walk:
    def __init__(self, database: Database, seed: int, moves: bool, rates_stay: bool = False) -> None:
        self.chance = Random(seed)
        self.moves, self.rates_stay = moves, rates_stay
        self.paid_at: dict[tuple[str, str, str | None], datetime] = {}
        self.now = datetime(2030, 1, 1, 12, tzinfo=UTC)
        self.done: list[str] = []
        self.conn = database.connect(autocommit=True)
        self.other = database.connect()
        for conn in (self.conn, self.other):
            run(conn, "set statement_timeout = '20s'")
            run(conn, "set lock_timeout = '300ms'")
        self.workers: list[int] = []
        self.wait(0)
        for queue in QUEUES:
            call(self.conn, "configure_queue", queue)
        self.workers = [self.register(), self.register()]
        for (group, user), (seconds, burst) in RATES.items() if rates_stay else ():
            name, rate = [group, user] if user else [group], {"rate_limit": 1, "rate_period": seconds}
            for queue in QUEUES:
                kind = "user" if user else "group"
                call(self.conn, f"configure_{kind}", queue, *name, rate_burst=burst, **rate)

    # --- Around the steps --------------------------------------------------------------------------

    def go(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
                self.check()
            self.set_free()
            self.drain()
            self.check()
            hear_all(self.conn)
            assert not run(self.conn, "select * from fairq.lanes where (gate).in_flight <> 0")
        finally:
            self.other.rollback()
            print("\n".join(self.done))

    def step(self) -> None:
        (what,) = self.chance.choices(list(STEPS), list(STEPS.values()))
        self.attempt(lambda: what(self))

    def attempt(self, what: Callable[[], Any]) -> None:
        """Make a call; expect a clear refusal, or no wait for a lock."""
        try:
            what()
        except psycopg.Error as exc:
            self.done.append(f"  refused: {exc.sqlstate} {exc.diag.message_primary}")
            if exc.sqlstate != "55P03" and not (exc.sqlstate or "").startswith("QF"):
                raise
            if self.other.info.transaction_status == TransactionStatus.INERROR:
                self.other.rollback()

    def call(self, function: str, *args: Any, conn: Conn | None = None, **named: Any) -> list[Any]:
        where = " (stays open)" if conn is self.other else ""
        self.done.append(f"{function}{where} {args} {named}")
        return call(self.conn if conn is None else conn, function, *args, **named)

    def check(self) -> None:
        """Hear the current rings first, and roll back."""
        run(self.conn, "begin")
        idle = self.other.info.transaction_status == TransactionStatus.IDLE
        try:
            if idle:
                hear_all(self.conn)
            wrong = violations(self.conn)
            if not wrong and idle and self.chance.random() < 0.2:
                self.check_that_all_that_can_go_does()
        finally:
            run(self.conn, "rollback")
        assert not wrong, wrong

    def check_that_all_that_can_go_does(self) -> None:
        """Whatever is left has a reason to wait, and nothing more may go before a sleeping worker looks.

        For the caller to roll back.
        """
        if one(self.conn, "select moving_from is not null from fairq.settings"):
            return
        worker = self.register()
        self.pop_all(worker)
        waiting = """
            select t.id, e.reason
            from fairq.live_tasks t
            cross join fairq.explain_task(t.id) e
            where t.worker_id is null"""
        left = run(self.conn, waiting)
        lying = [row for row in left if row[1].startswith(("behind", "due since", "cancelled, to be"))]
        assert not lying, lying
        query = "select due_in from fairq.turn(%s, %s, '{9,9}', 9) where id is null"
        due_in = one(self.conn, query, worker, list(QUEUES))
        if due_in is None or due_in > SOON:
            later = self.now + timedelta(seconds=3000 if due_in is None else due_in - 0.002)
            run(self.conn, "select set_config('fairq.now', %s, true)", later.isoformat())
            assert self.pop_all(worker) == [], (due_in, left)

    def pop_all(self, worker: int) -> list[int]:
        taken: list[int] = []
        for queue in QUEUES:
            in_vain = 0
            while in_vain < 3:  # a call makes a bounded number of rounds
                found = pop(self.conn, worker, 50, queue=queue)
                taken += found
                in_vain = 0 if found else in_vain + 1
        return taken

    def register(self) -> int:
        query = "select fairq.register_worker('w', %s::text[], 8, '1 minute')"
        return int(one(self.conn, query, list(QUEUES)))

    def wait(self, seconds: float, without: int | None = None) -> None:
        self.done.append(f"{seconds} s")
        self.now += timedelta(seconds=seconds)
        for conn in (self.conn, self.other):
            idle = conn.info.transaction_status == TransactionStatus.IDLE
            run(conn, "select set_config('fairq.now', %s, false)", self.now.isoformat())
            if idle and conn is self.other:
                conn.commit()
        for worker in self.workers:
            if worker != without:
                call(self.conn, "heartbeat", worker)

    def held(self) -> dict[int, list[tuple[int, int, bool]]]:
        """By worker: its tasks, their attempts, whether they run."""
        found: dict[int, list[tuple[int, int, bool]]] = {}
        query = "select worker_id, id, attempt, started_at is not null from fairq.held order by 1, 2"
        for worker, *task in run(self.conn, query):
            found.setdefault(worker, []).append((task[0], task[1], task[2]))
        return found

    def one_of(self, query: str) -> int | None:
        found = column(self.conn, query)
        return int(self.chance.choice(found)) if found else None

    def options(self) -> dict[str, Any]:
        said: dict[str, tuple[float, Callable[[Random], Any]]] = {
            "priority": (0.5, lambda r: r.choice([0, 0, 5, -3, r.randint(-12, 12)])),
            "run_at": (0.1, lambda r: self.now + timedelta(seconds=r.randint(1, 20))),
            "expires_at": (0.1, lambda r: self.now + timedelta(seconds=r.randint(1, 30))),
            "cost": (0.3, lambda r: r.choice([0.01, 0.5, 1.0, 3.0, 100.0])),
            "kind": (0.3, lambda r: r.choice(KINDS)),
            "max_attempts": (0.2, lambda r: r.choice([1, 2, 5])),
        }
        given = {
            name: make(self.chance) for name, (often, make) in said.items() if self.chance.random() < often
        }
        return {"queue": self.chance.choice(QUEUES), **given}

    def maybe(self, values: tuple[str, ...], often: float) -> str | None:
        return self.chance.choice(values) if self.chance.random() < often else None

    # --- Producers ---------------------------------------------------------------------------------

    def create(self, conn: Conn | None = None) -> None:
        group, options = self.chance.choice(GROUPS), self.options()
        options |= {"user_key": self.maybe(USERS, 0.6), "concurrency_key": self.maybe(KEYS, 0.4)}
        if self.chance.random() < 0.2:
            options |= {"idempotency_key": self.chance.choice(KEYS), "unique": self.maybe(("waiting",), 0.6)}
        self.call("create_task", group, "{}", conn=conn, **options)

    def create_many(self) -> None:
        count, options = self.chance.randint(1, 30), self.options()
        options |= {
            "user_keys": [self.maybe(USERS, 0.6) for _ in range(count)],
            "priorities": [self.chance.choice([0, 0, 5, self.chance.randint(-12, 12)]) for _ in range(count)],
        }
        if self.chance.random() < 0.4:
            options["concurrency_keys"] = [self.maybe(KEYS, 0.5) for _ in range(count)]
        groups = [self.chance.choice(GROUPS) for _ in range(count)]
        self.call("create_tasks", groups, ["{}"] * count, **options)

    def leave_open(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            live = self.one_of("select id from fairq.tasks order by id")
            if live and self.chance.random() < 0.2:
                self.call("cancel_task", live, conn=self.other)
            else:
                self.create(self.other)

    def close(self) -> None:
        commits = self.chance.random() < 0.7
        self.done.append("commit" if commits else "rollback")
        (self.other.commit if commits else self.other.rollback)()

    def cancel(self) -> None:
        self.call("cancel_task", self.one_of("select id from fairq.tasks order by id"))

    def retry(self) -> None:
        ended = "select id from fairq.finished_tasks where outcome <> 'succeeded'"
        task = self.one_of(f"{ended} union select id from fairq.tasks where scheduled order by id")  # noqa: S608
        self.call("retry_task", task, strict=self.chance.random() < 0.5)

    # --- Workers -----------------------------------------------------------------------------------

    def pop(self) -> None:
        queue, most = self.chance.choice(QUEUES), self.chance.choice([1, 2, 5, 30])
        lease = self.maybe(("20 s",), 0.25)
        taken = self.call("pop_tasks", queue, most, self.chance.choice(self.workers), claim_lease=lease)
        self.done.append(f"  {[task for _, task, *_ in taken]}")
        for task in taken if self.rates_stay else ():
            for name in {(task[5], None), (task[5], task[-1])} & RATES.keys():
                self.charge(queue, *name)

    def charge(self, queue: str, group: str, user: str | None) -> None:
        seconds, burst = RATES[group, user]
        paid_at = max(self.now, self.paid_at.get((queue, group, user), self.now))
        assert paid_at <= self.now + timedelta(seconds=(burst - 1) * seconds), (queue, group, user)
        self.paid_at[queue, group, user] = paid_at + timedelta(seconds=seconds)

    def start(self) -> None:
        for worker, tasks in self.held().items():
            claimed = [each for each in tasks if not each[2]]
            self.call("start_tasks", worker, [each[0] for each in claimed], [each[1] for each in claimed])

    def finish(self) -> None:
        r = self.chance
        for worker, tasks in self.held().items():
            some = [each for each in tasks if r.random() < 0.7]
            outcomes = [r.choice(OUTCOMES) for _ in some]
            delays = [
                f"{r.choice([1, 5])} s" if outcome == "postponed" or r.random() < 0.5 else None
                for outcome in outcomes
            ]
            holds = [
                self.maybe(("group", "key"), 0.2) if outcome in ("retry", "postponed") and delay else None
                for outcome, delay in zip(outcomes, delays, strict=True)
            ]
            costs = [r.choice([None, 0.0, 0.5, 1.0, 10.0, 1000.0]) for _ in some]
            ids, attempts = [each[0] for each in some], [each[1] for each in some]
            said = (ids, attempts, outcomes, delays, holds, costs)
            self.done.append(f"finish_tasks {worker} {said}")
            self.attempt(partial(run, self.conn, FINISH, worker, *said))

    def report(self) -> None:
        for worker, tasks in self.held().items():
            some = [each for each in tasks if each[2]]
            used = [self.chance.choice([None, 1.0, 50.0]) for _ in some]
            query = "select fairq.report_progress(%s, %s, %s, %s::float8[], p_costs => %s::float8[])"
            run(
                self.conn, query, worker, [e[0] for e in some], [e[1] for e in some], [None] * len(some), used
            )

    def lose_a_worker(self) -> None:
        lost, self.workers[0] = self.workers[0], self.register()
        if self.chance.random() < 0.5:
            self.call("retire_worker", lost)
        else:
            self.wait(40, without=lost)
            self.wait(40, without=lost)
            self.call("maintain")

    # --- Operators ---------------------------------------------------------------------------------

    def pass_time(self) -> None:
        self.wait(self.chance.choice([1, 1, 3, 10, 30]))

    def maintain(self) -> None:
        self.call("maintain")

    def promote(self) -> None:
        self.call("promote_overflow", self.chance.choice(QUEUES), self.chance.choice([None, 1, 3]))

    def rebuild(self) -> None:
        self.call("rebuild", self.chance.choice(QUEUES))

    def lose_what_is_derived(self) -> None:
        if self.rates_stay:
            return  # Only lanes know what was used of them.
        self.done.append("ticks, lanes and rings are lost")
        for table in ("ticks", "lanes", "rings"):
            run(self.conn, f"delete from fairq.{table}")  # noqa: S608

    def purge(self) -> None:
        user = self.maybe(USERS, 0.5)
        self.call("purge_group", self.chance.choice(QUEUES), self.chance.choice(GROUPS), user)

    def pause(self) -> None:
        queue, group = self.chance.choice(QUEUES), self.chance.choice(GROUPS)
        verb = self.chance.choice(("pause", "resume", "resume"))
        if self.chance.random() < 0.3:
            self.call(f"{verb}_queue", queue)
        else:
            self.call(f"{verb}_group", queue, group, self.maybe(USERS, 0.5))

    def hold(self) -> None:
        until = self.chance.choice([None, self.now + timedelta(seconds=self.chance.randint(1, 20))])
        if self.chance.random() < 0.5:
            self.call("hold_group", self.chance.choice(QUEUES), self.chance.choice(GROUPS), until)
        else:
            self.call("hold_key", self.chance.choice(KEYS), until)

    def limits(self, prefix: str = "") -> dict[str, Any]:
        r = self.chance
        known: list[dict[str, Any]] = [
            {"max_running": r.choice([None, 0, 1, 2, 5])},
            {
                "rate_limit": r.choice([1, 3, 20]),
                "rate_period": r.choice([1, 10]),
                "rate_burst": r.choice([None, 1, 4]),
            },
            {"rate_limit": None},
            {"breaker_threshold": r.choice([1, 2]), "breaker_cooldown": r.choice([1, 10])},
            {"breaker_threshold": None},
        ]
        said = r.choice([each for each in known if not (self.rates_stay and "rate_limit" in each)])
        return {prefix + name: value for name, value in said.items()}

    def set_queue(self) -> None:
        r = self.chance
        settings: list[dict[str, Any]] = [
            {"fairness": r.choice(["count", "time", "cost"])},
            {"ready_target": r.choice([None, 1, 3, 50])},
            {"short_slots": r.choice([None, 1, 3])},
            {"group_budget": r.choice([1, 5, 1000]), "group_budget_period": r.choice([10, 60])},
            {"group_budget": None},
            *(self.limits(prefix) for prefix in ("", "group_", "user_")),
        ]
        self.call("configure_queue", r.choice(QUEUES), **r.choice(settings))

    def set_group(self) -> None:
        queue, group = self.chance.choice(QUEUES), self.chance.choice(GROUPS)
        settings = self.chance.choice([self.limits(), {"weight": self.chance.choice([None, 0.1, 5])}])
        if self.chance.random() < 0.5:
            self.call("configure_group", queue, group, **settings)
        else:
            self.call("configure_user", queue, group, self.chance.choice(USERS), **settings)

    def set_what_is_shared(self) -> None:
        most = self.chance.choice([None, 0, 1, 2, 5])
        if self.chance.random() < 0.7:
            self.call("configure_key", self.chance.choice(KEYS), max_running=most)
        else:
            self.call("configure_cluster", max_running=most or None)

    def set_schedule(self) -> None:
        r = self.chance
        name, group = r.choice("st"), r.choice(GROUPS)
        if r.random() < 0.6:
            said: dict[str, Any] = {"every": f"{r.choice([5, 30])} s", "queue": r.choice(QUEUES)}
            self.call("configure_schedule", name, group, **said)
        else:
            self.call(r.choice(("run_schedule", "remove_schedule")), name, group)
        self.call("fire_schedules")

    def move(self) -> None:
        if self.moves and self.chance.random() < 0.15:
            self.call("configure_cluster", shard_count=self.chance.choice([1, 2, 3, 4]))
        for _ in range(self.chance.randint(1, 4) if self.moves else 0):
            self.call("move_groups")

    # --- The end -----------------------------------------------------------------------------------

    def set_free(self) -> None:
        self.other.commit()
        while self.moves and one(self.conn, "select fairq.move_groups() ->> 'state'") != "done":
            self.finish_all()
            self.wait(5)
            call(self.conn, "maintain")
        nothing = dict.fromkeys(LIMITS)
        of = {f"{prefix}{name}": None for prefix in ("group_", "user_") for name in nothing}
        call(self.conn, "configure_cluster", max_running=None)
        for name, group in run(self.conn, "select name, group_key from fairq.schedules"):
            call(self.conn, "remove_schedule", name, group)
        for key in KEYS:
            call(self.conn, "hold_key", key, None)
            call(self.conn, "configure_key", key, max_running=None)
        for queue in QUEUES:
            call(self.conn, "resume_queue", queue)
            call(self.conn, "configure_queue", queue, group_budget=None, **nothing, **of)
            for group in GROUPS:
                call(self.conn, "hold_group", queue, group, None)
                call(self.conn, "resume_group", queue, group)
                call(self.conn, "configure_group", queue, group, **nothing)
                for user in USERS:
                    call(self.conn, "resume_group", queue, group, user)
                    call(self.conn, "configure_user", queue, group, user, **nothing)

    def finish_all(self) -> int:
        query = "select fairq.finish_tasks(%s, %s, %s)"
        return sum(
            len(run(self.conn, query, worker, [each[0] for each in tasks], [each[1] for each in tasks]))
            for worker, tasks in self.held().items()
        )

    def drain(self) -> None:
        self.finish_all()
        in_vain = 0
        while left := column(self.conn, "select id from fairq.tasks order by id"):
            for queue in QUEUES:
                pop(self.conn, self.workers[0], queue=queue)
            if self.finish_all():
                in_vain = 0
                continue
            in_vain += 1
            said = [run(self.conn, "select * from fairq.explain_task(%s)", each) for each in left[:5]]
            assert in_vain < STARVED_AFTER, said
            self.wait(6)
            call(self.conn, "maintain")


# How often each is done, beside the others.
STEPS: dict[Callable[[Walk], None], float] = {
    Walk.create: 30,
    Walk.create_many: 5,
    Walk.leave_open: 3,
    Walk.close: 4,
    Walk.cancel: 3,
    Walk.retry: 3,
    Walk.pop: 14,
    Walk.start: 2,
    Walk.finish: 14,
    Walk.report: 1,
    Walk.lose_a_worker: 1,
    Walk.pass_time: 7,
    Walk.maintain: 3,
    Walk.promote: 4,
    Walk.rebuild: 1,
    Walk.lose_what_is_derived: 0.4,
    Walk.purge: 1.5,
    Walk.pause: 3,
    Walk.hold: 2,
    Walk.set_queue: 3,
    Walk.set_group: 5,
    Walk.set_what_is_shared: 2,
    Walk.set_schedule: 1,
    Walk.move: 1,
}
