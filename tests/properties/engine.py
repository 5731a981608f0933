"""The engine as the property tests drive it: sessions whose clock the test sets."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.calls import Conn, Held, Row, create_all, create_each, empty, pop, promote, register, run
from tests.support.database import Database

START = datetime(2030, 1, 1, tzinfo=UTC)
TABLES = (
    "tasks",
    "held",
    "ready",
    "parked",
    "finished_tasks",
    "attempts",
    "rings",
    "lanes",
    "ticks",
    "groups",
    "idempotency_keys",
    "cancellations",
    "workers",
    "heartbeats",
    "sweeps",
    "upkeep_failures",
    "ledger",
    "ledger_queues",
    "ledger_marks",
)


class Engine:
    """Some sessions of one database, and the time that all of them see."""

    def __init__(self, database: Database, sessions: int) -> None:
        self.now = START
        self.sessions = [database.connect(autocommit=True) for _ in range(sessions)]
        for session in self.sessions:
            # Nothing here may wait: a wait for another session of the same test would never end.
            session.execute("set lock_timeout = '2s'")
        self.main = self.sessions[0]
        (self.shards,) = self.one("select shard_count from fairq.settings")

    def reset(self) -> None:
        for session in self.sessions:
            session.rollback()
            session.autocommit = True
            # The shard that a pop begins with, and each back-off, are the same whenever an example runs.
            session.execute("select setseed(0)")
        for sequence in ("task_ids", "worker_ids", "ring_ids"):
            self.main.execute("select setval(%s, 1, false)", [f"fairq.{sequence}"])
        self.now = START
        empty(self.main, *TABLES)
        self.main.execute("update fairq.queues set ready_target = null")
        # The first promotion of a domain rebuilds it; what follows is what is meant to be looked at.
        self.promote()

    def on(self, session: Conn | None = None) -> Conn:
        """A session, the first if none is said, at this time."""
        session = session or self.main
        session.execute("select set_config('fairq.now', %s, false)", [self.now.isoformat()])
        return session

    def run(self, query: str, params: Sequence[Any] = (), session: Conn | None = None) -> list[Row]:
        return run(self.on(session), query, *params)

    def one(self, query: str, params: Sequence[Any] = (), session: Conn | None = None) -> Row:
        (row,) = self.run(query, params, session)
        return row

    def at(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)

    def create(self, groups: Sequence[str], session: Conn | None = None, **options: Any) -> list[int]:
        """With one group create_task, with more create_tasks, with the same options."""
        make = create_each if len(groups) == 1 else create_all
        return make(self.on(session), *groups, **options)

    def worker(self, lease: str = "1 minute") -> int:
        return register(self.on(), slots=4, lease=lease)

    def promote(self, limit: int | None = None) -> int:
        return promote(self.on(), limit=limit)

    def pop(self, worker: int, limit: int, session: Conn | None = None, **options: Any) -> list[Held]:
        return pop(self.on(session), worker, limit, **options)
