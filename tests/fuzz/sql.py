"""Sessions that call every public function, with sense and without, all at once.

What may be called, with which arguments and by which role, the catalogue says. Most arguments make sense, so
that calls get somewhere, and one in a few does not. Calls come alone or several in a transaction, in every
isolation level, behind savepoints; transactions roll back, fail, run out of time, lose their connection.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg
from psycopg.types.string import TextLoader

from tests.fuzz.values import array, nasty

Conn = psycopg.Connection[Any]

# Sessions: a role, and how much of all calls it makes.
SESSIONS = (
    *(("fairq_work", 0.2), ("fairq_work", 0.2), ("fairq_enqueue", 0.2), ("fairq_enqueue", 0.15)),
    *(("fairq_admin", 0.2), ("fairq_observe", 0.05)),
)
QUEUES = ("default", "other", "third")
GROUPS = ("ada", "bob", "cyd", "\u00e4 b")
KEYS = ("key 1", "key 2")
LEVELS = ("read committed",) * 6 + ("repeatable read", "serializable")
# What gets somewhere is called often, what stops others seldom.
OFTEN = {
    **dict.fromkeys(["create_task", "create_tasks", "pop_tasks", "turn", "finish_tasks"], 12),
    **dict.fromkeys(
        ["drain_queue", "pause_queue", "pause_group", "retire_worker", "purge_group", "rebuild"], 1
    ),
}
OUTCOMES = ("succeeded", "succeeded", "failed", "retry", "cancelled", "expired", "declined", "interrupted")

# A call that takes longer hangs: nothing here waits for anybody that long.
PATIENCE = "60s"

CATALOGUE = """
select p.proname, r.rolname, p.pronargs - p.pronargdefaults,
  p.proargnames[1:p.pronargs], array(select format_type(t, null) from unnest(p.proargtypes) t)
from pg_proc p
join pg_roles r on r.rolname like 'fairq\\_%' and has_function_privilege(r.oid, p.oid, 'execute')
where p.pronamespace = 'fairq'::regnamespace and p.proname !~ '^_'
order by 1, 2
"""

SETTINGS = """
select c.relname, a.attname, format_type(a.atttypid, null)
from pg_class c join pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'fairq'::regnamespace and c.relname in ('settings', 'queues', 'groups')
  and a.attnum > 0 and not a.attisdropped
"""


@dataclass(frozen=True)
class Function:
    name: str
    roles: frozenset[str]
    needed: int
    arguments: tuple[tuple[str, str], ...]


def public_functions(conn: Conn) -> list[Function]:
    found: dict[str, Function] = {}
    for name, role, needed, names, types in conn.execute(CATALOGUE.encode()).fetchall():
        known = found.get(name)
        roles = (known.roles if known else frozenset()) | {role}
        found[name] = Function(name, roles, needed, tuple(zip(names or [], types, strict=True)))
    return list(found.values())


@dataclass
class World:
    """What the sessions know in common; ids come in as calls commit."""

    functions: list[Function]
    settings: dict[str, list[tuple[str, str]]]
    # How many calls a transaction has at most: with one, no two may wait for each other.
    most: int
    tasks: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    # Worker, task, attempt.
    held: list[tuple[int, int, int]] = field(default_factory=list)
    created: set[int] = field(default_factory=set)
    # What happened that may not, by function and complaint: once each, with the call.
    found: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)

    def note(self, function: str, outcome: str) -> None:
        counts = self.outcomes.setdefault(function, {})
        counts[outcome] = counts.get(outcome, 0) + 1


class Arguments:
    """The arguments of one call, which belong together: one worker's ids and attempts, arrays of a length."""

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random = world, random
        self.length = random.choice([1, 1, 2, 3])
        self.worker: int | None = random.choice(world.workers[-8:]) if world.workers else None
        held: list[tuple[int, int, int]] = []
        if world.held and random.random() < 0.8:
            self.worker = random.choice(world.held[-40:])[0]
            held = [one for one in world.held[-60:] if one[0] == self.worker][-4:]
            random.shuffle(held)
        self.ids = [task for _, task, _ in held]
        self.attempts = [attempt for _, _, attempt in held]

    def text_of(self, name: str, type_name: str, function: str) -> str | None:
        """One that makes sense, if this knows how."""
        known: dict[str, Callable[[], str | None]] = {
            "p_queue": lambda: self.random.choice(QUEUES),
            "p_queues": lambda: array(self.random.sample(QUEUES, self.random.randint(1, 3))),
            "p_mosts": lambda: array([str(self.random.randint(1, 5)) for _ in range(3)]),
            "p_group_key": lambda: self.random.choice(GROUPS),
            "p_group_keys": lambda: array(self.random.choices(GROUPS, k=self.length)),
            "p_payload": lambda: '{"a": 1}',
            "p_payloads": lambda: array(["{}"] * self.length),
            "p_concurrency_key": lambda: self.random.choice(KEYS),
            "p_concurrency_keys": lambda: array(self.random.choices([*KEYS, None], k=self.length)),
            "p_idempotency_key": lambda: f"once {self.random.randrange(50)}",
            "p_idempotency_keys": lambda: array(
                [f"once {self.random.randrange(50)}" for _ in range(self.length)]
            ),
            "p_priority": lambda: str(self.random.choice([0, 0, 1, -5])),
            "p_priorities": lambda: array([str(self.random.randrange(3)) for _ in range(self.length)]),
            "p_costs": lambda: array([str(self.random.choice([1, 0.5, 7])) for _ in range(self.length)]),
            "p_cost": lambda: str(self.random.choice([1, 0.01, 1000])),
            "p_run_at": lambda: self.random.choice(["now", "2000-01-01", "tomorrow"]),
            "p_expires_at": lambda: self.random.choice(["2000-01-01", "tomorrow", "9999-01-01"]),
            "p_max_attempts": lambda: str(self.random.randint(1, 3)),
            "p_timeout": lambda: "1 minute",
            "p_headers": lambda: "{}",
            "p_kind": lambda: "kind",
            "p_id": lambda: str(self.random.choice(self.world.tasks[-100:])) if self.world.tasks else None,
            "p_for": lambda: "1 minute",
            "p_worker_id": lambda: None if self.worker is None else str(self.worker),
            "p_ids": lambda: array(list(map(str, self.ids))),
            "p_attempts": lambda: array(list(map(str, self.attempts))),
            "p_outcomes": lambda: array(self.random.choices(OUTCOMES, k=len(self.ids))),
            "p_results": lambda: array(["{}"] * len(self.ids)),
            "p_errors": lambda: array([None] * len(self.ids)),
            "p_retry_delays": lambda: array(["0"] * len(self.ids)),
            "p_done": lambda: array(["1"] * len(self.ids)),
            "p_totals": lambda: array(["2"] * len(self.ids)),
            "p_notes": lambda: array(["{}"] * len(self.ids)),
            "p_name": lambda: "fuzz",
            "p_kinds": lambda: self.random.choice(['{"kind": 2}', '{"default": null}', "{}"]),
            "p_slots": lambda: "4",
            "p_lease": lambda: self.random.choice(["1 minute", "1 hour", "1 hour", "50 milliseconds"]),
            "p_limit": lambda: str(self.random.randint(1, 8)),
            "p_claim_lease": lambda: self.random.choice(["1 minute", "5 milliseconds", None]),
            "p_shard_no": lambda: self.random.choice(["0", None]),
            "p_part": lambda: self.random.choice([None, "recovery", "expiry", "rings", "partitions"]),
            "p_settings": lambda: self.settings(function),
            # Of what a turn says, one half is about tasks that it also names elsewhere.
            "p_ended_ids": lambda: array(list(map(str, self.ids))),
            "p_ended_attempts": lambda: array(list(map(str, self.attempts))),
            "p_started_ids": lambda: array(list(map(str, self.ids[:2]))),
            "p_started_attempts": lambda: array(list(map(str, self.attempts[:2]))),
        }
        return known[name]() if name in known else nasty(self.random, type_name)

    def settings(self, function: str) -> str:
        """Some settings of this scope; a value in five is odd, and so is a name in ten."""
        scope = {"configure_cluster": "settings", "configure_queue": "queues"}.get(function, "groups")
        sane = {
            "integer": ["1", "2", "5", "null"],
            "double precision": ["1", "2.5", "null"],
            "interval": ['"1 second"', "60", "null", '"10 days"'],
            "boolean": ["true", "false"],
            "text": ['"count"', '"time"', '"fairq_work"', "null"],
        }
        parts = {}
        for name, type_name in self.random.sample(self.world.settings[scope], self.random.randint(0, 3)):
            value = self.random.choice(sane.get(type_name, ["1"]))
            # 4096 shards are allowed, and each call then asks all of them.
            if self.random.random() < 0.2 and name != "shard_count":
                text = nasty(self.random, type_name if type_name in sane else "text")
                value = json.dumps(text)
                if self.random.random() < 0.5 and type_name in ("integer", "double precision", "interval"):
                    value = self.random.choice(
                        ["1e400", "-1", "0", "1e-400", "2147483648", "[]", "1.5", "1e99999"]
                    )
            parts[name if self.random.random() < 0.9 else f"{name}x"] = value
        return "{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}"


class Session(threading.Thread):
    """One connection, one role, one call or transaction after the other until enough have been made."""

    def __init__(self, world: World, dsn: str, role: str, calls: int, seed: str) -> None:
        super().__init__(daemon=True)
        self.world, self.dsn, self.role, self.random = world, dsn, role, Random(seed)
        self.calls_left = calls
        self.functions = [one for one in world.functions if role in one.roles]
        self.weights = [OFTEN.get(one.name, 4) for one in self.functions]
        self.failure: BaseException | None = None
        self.may_time_out = False
        self.level = "read committed"

    def run(self) -> None:
        try:
            while self.calls_left > 0:
                with contextlib.closing(self.connect()) as conn:
                    self.make_calls(conn)
        except BaseException as exc:
            self.failure = exc

    def make_calls(self, conn: Conn) -> None:
        """Until enough have been made, or the connection is gone."""
        try:
            while self.calls_left > 0:
                self.step(conn)
        except psycopg.OperationalError as exc:
            if not conn.closed:
                raise
            if exc.sqlstate != "57P01":
                self.complain("connection", "", exc)

    def connect(self) -> Conn:
        conn = psycopg.connect(self.dsn, autocommit=True, application_name=f"fuzz {self.role}")
        # Numbers of 131,000 digits are no business of this test.
        conn.adapters.register_loader("jsonb", TextLoader)
        # PostgreSQL's own: longer than a pop waits for anything, shorter than what hangs.
        conn.execute("set deadlock_timeout = '1s'")
        conn.execute(f"set role {self.role}".encode())
        conn.execute(f"set statement_timeout = '{PATIENCE}'".encode())
        return conn

    def step(self, conn: Conn) -> None:
        self.level, self.may_time_out = "read committed", False
        if self.random.random() < 0.6:
            self.commit(self.call(conn, alone=True))
            return
        done: list[Callable[[], None]] = []
        self.level = self.random.choice(LEVELS)
        conn.execute(f"begin isolation level {self.level}".encode())
        if self.random.random() < 0.05:
            # Canceled wherever it stands.
            self.may_time_out = True
            conn.execute(f"set local statement_timeout = {self.random.randint(1, 8)}".encode())
        try:
            for _ in range(self.random.randint(1, self.world.most)):
                is_guarded = self.random.random() < 0.7
                if is_guarded:
                    conn.execute("savepoint before")
                news = self.call(conn, alone=False)
                if conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                    if not is_guarded:
                        break
                    conn.execute("rollback to before")
                elif is_guarded and self.random.random() < 0.1:
                    conn.execute("rollback to before")
                else:
                    done += news
            end = self.random.random()
            if end < 0.1 or conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                conn.execute("rollback")
            elif end < 0.13:
                conn.execute("reset role")
                conn.execute("select pg_terminate_backend(pg_backend_pid())")
            else:
                conn.execute("commit")
                self.commit(done)
        except psycopg.Error as exc:
            if conn.closed:
                raise
            # The end of the transaction, or a savepoint, that ran out of time or came too late.
            self.judge("transaction", "", exc, alone=False)
            conn.execute("rollback")

    def commit(self, done: list[Callable[[], None]]) -> None:
        for what in done:
            what()

    def call(self, conn: Conn, *, alone: bool) -> list[Callable[[], None]]:
        """Returns what is to be noted when it commits."""
        self.calls_left -= 1
        function = self.random.choices(self.functions, self.weights)[0]
        arguments = Arguments(self.world, self.random)
        # Most calls have no odd argument, or one.
        odds = self.random.choice([0, 0, 0.1, 0.1, 0.4])
        said: dict[str, str | None] = {}
        for number, (name, type_name) in enumerate(function.arguments):
            if number >= function.needed and self.random.random() < 0.6:
                continue
            is_odd = self.random.random() < odds
            said[name] = (
                nasty(self.random, type_name) if is_odd else arguments.text_of(name, type_name, function.name)
            )
        types = dict(function.arguments)
        named = ", ".join(f"{name} => %({name})s::{types[name]}" for name in said)
        query = f"select * from fairq.{function.name}({named})"  # noqa: S608
        try:
            rows = conn.execute(query.encode(), said).fetchall()
        except psycopg.Error as exc:
            if conn.closed:
                raise
            shown = {name: value and value[:200] for name, value in said.items()}
            self.judge(function.name, f"{shown}", exc, alone=alone)
            return []
        self.world.note(function.name, "ok")
        return list(self.news(function.name, said, rows))

    def news(self, name: str, said: dict[str, str | None], rows: list[Any]) -> Iterator[Callable[[], None]]:
        world = self.world
        if name in ("create_task", "create_tasks"):
            ids = [row[0] for row in rows]
            yield lambda: world.tasks.extend(ids[-20:])
            yield lambda: world.created.update(ids)
        elif name == "register_worker":
            yield lambda: world.workers.append(rows[0][0])
        elif name == "pop_tasks":
            worker = int(said["p_worker_id"] or 0)
            yield lambda: world.held.extend((worker, row[0], row[1]) for row in rows[:20])
        elif name == "turn":
            worker = int(said["p_worker_id"] or 0)
            yield lambda: world.held.extend((worker, row[4], row[5]) for row in rows[:20] if row[4])

    def judge(self, function: str, call: str, exc: psycopg.Error, *, alone: bool) -> None:
        """A refusal in users' words, or what a transaction of several calls has to expect."""
        code = exc.sqlstate or ""
        message = exc.diag.message_primary or ""
        self.world.note(function, code)
        expected = {
            "57014": self.may_time_out,
            "25P02": not alone,
            "40001": self.level != "read committed",
            # Two transactions called several functions each, in different orders.
            "40P01": self.world.most > 1,
        }
        # Whose worker or queue it is, the engine checks itself, and says what to do.
        is_refused = code == "42501" and exc.diag.message_hint is not None
        if code.startswith("QF") or is_refused:
            if message and exc.diag.message_hint and "<NULL>" not in message and len(message) < 700:
                return
        elif expected.get(code):
            return
        self.complain(function, call, exc)

    def complain(self, function: str, call: str, exc: psycopg.Error) -> None:
        message = re.sub(r"[0-9]+", "9", exc.diag.message_primary or str(exc))
        key = f"{function} {exc.sqlstate} {message[:80]}"
        self.world.found.setdefault(
            key,
            f"{self.role}, {self.level}: {function}({call}): {exc.sqlstate} {exc}\n{exc.diag.context}",
        )


def fuzz(dsn: str, calls: int, seed: int, most: int) -> World:
    """Make this many calls, as each of the roles at once, at most so many in a transaction."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for queue in QUEUES:
            conn.execute("select fairq.configure_queue(%s)", [queue])
        for key in KEYS:
            conn.execute("""select fairq.configure_key(%s, '{"max_running": 1}')""", [key])
        settings: dict[str, list[tuple[str, str]]] = {}
        for table, name, type_name in conn.execute(SETTINGS.encode()).fetchall():
            settings.setdefault(table, []).append((name, type_name))
        world = World(public_functions(conn), settings, most)
    sessions = [
        Session(world, dsn, role, round(calls * share), f"{seed} {n}")
        for n, (role, share) in enumerate(SESSIONS)
    ]
    for session in sessions:
        session.start()
    for session in sessions:
        session.join(60 + calls / 10)
        assert not session.is_alive(), f"{session.role} hangs"
    for session in sessions:
        if session.failure:
            raise session.failure
    return world
