"""The engine as the property tests drive it: sessions whose clock the test sets."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

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
)
Row = tuple[Any, ...]


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
        for sequence in ("task_ids", "worker_ids", "ring_ids"):
            self.main.execute(f"alter sequence fairq.{sequence} restart")
        self.now = START
        self.main.execute(f"truncate {', '.join(f'fairq.{t}' for t in TABLES)}")
        self.main.execute("update fairq.queues set ready_target = null")
        # The first promotion of a domain rebuilds it; what follows is what is meant to be looked at.
        self.promote()

    def run(
        self, query: str, params: Sequence[Any] = (), session: psycopg.Connection[Any] | None = None
    ) -> list[Row]:
        session = session or self.main
        session.execute("select set_config('fairq.now', %s, false)", [self.now.isoformat()])
        cursor = session.execute(query, params)
        return cursor.fetchall() if cursor.description else []

    def one(
        self, query: str, params: Sequence[Any] = (), session: psycopg.Connection[Any] | None = None
    ) -> Row:
        (row,) = self.run(query, params, session)
        return row

    def at(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)

    def create(
        self, groups: Sequence[str], session: psycopg.Connection[Any] | None = None, **options: Any
    ) -> list[int]:
        """With one group create_task, with more create_tasks, with the same options."""
        names = "".join(f", p_{name} => %s" for name in options)
        if len(groups) == 1:
            rows = self.run(
                f"select fairq.create_task(%s, '{{}}'{names})", [groups[0], *options.values()], session
            )
        else:
            query = f"select fairq.create_tasks(%s, array_fill('{{}}'::jsonb, array[%s]){names})"
            rows = self.run(query, [list(groups), len(groups), *options.values()], session)
        return [row[0] for row in rows]

    def worker(self, lease: str = "1 minute") -> int:
        (worker,) = self.one("select fairq.register_worker('w', '{default}', 4, %s)", [lease])
        return int(worker)

    def promote(self, limit: int | None = None) -> int:
        (promoted,) = self.one("select fairq.promote_overflow('default', %s)", [limit])
        return int(promoted)

    def pop(
        self,
        worker: int,
        limit: int,
        session: psycopg.Connection[Any] | None = None,
        *,
        lease: str | None = None,
        shard: int | None = None,
    ) -> list[tuple[int, str, int]]:
        """Ids, groups and attempts."""
        query = "select id, group_key, attempt from fairq.pop_tasks('default', %s, %s, %s, %s)"
        return [(r[0], r[1], r[2]) for r in self.run(query, [limit, worker, lease, shard], session)]

    def finish(
        self, worker: int, ids: Sequence[int], attempts: Sequence[int], outcome: str, delay: str | None = None
    ) -> list[int]:
        count = len(ids)
        query = (
            "select fairq.finish_tasks(%s, %s, %s, array_fill(%s::text, array[%s]),"
            " p_retry_delays => array_fill(%s::interval, array[%s]))"
        )
        rows = self.run(query, [worker, list(ids), list(attempts), outcome, count, delay, count])
        return sorted(row[0] for row in rows)
