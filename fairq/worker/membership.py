"""Under which number the database knows a worker, and what it holds there by the book."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg

from fairq.errors import ConfigurationError
from fairq.queries import workers
from fairq.worker import log

if TYPE_CHECKING:
    from fairq.worker.node import Node

# When to look again whether a connection that broke left tasks behind that we were given and never got.
RECONCILE_AFTER: Final = (0.0, 10.0, 60.0)


class Membership:
    """`worker_id` is None until it registers, at the end, and once the database has given us up."""

    def __init__(self, node: Node) -> None:
        self.worker_id: int | None = None
        self.reconcile_at: list[float] = []
        self._node = node

    @property
    def is_in_order(self) -> bool:
        return self.worker_id is not None and not self._ought_to_reconcile()

    async def check_caps(self, conn: psycopg.AsyncConnection[Any]) -> None:
        cap = await workers.cluster_cap(conn) if self._node.settings.prefetch else None
        if cap is not None:
            raise ConfigurationError(
                f"prefetch cannot be used together with the cluster cap of {cap}: tasks that wait in a"
                " buffer would take up places and do nothing",
                "Leave out --prefetch and --claim-lease, or lift the cap with fairq.configure_cluster().",
            )

    async def register(self, conn: psycopg.AsyncConnection[Any]) -> None:
        if self.worker_id is None:
            settings, engine = self._node.settings, self._node.engine
            self.worker_id = await workers.register_worker(
                conn,
                name=settings.name or f"{socket.gethostname()}:{os.getpid()}"[:200],
                queues=engine.queues,
                slots=engine.slots,
                lease=timedelta(seconds=settings.lease),
                kinds=json.dumps({task.kind: task.options.get("max_attempts") for task in engine.app}),
            )
            log.debug("registered", "registered as worker %d", self.worker_id, worker=self.worker_id)

    async def retire(self, conn: psycopg.AsyncConnection[Any]) -> None:
        worker_id, self.worker_id = self.worker_id, None  # so the keeper gives no more signs of life
        if worker_id is not None:
            await workers.retire_worker(conn, worker_id=worker_id)

    def lost(self, worker_id: int) -> None:
        """The database does not know that number any more: what it held is with others."""
        if worker_id != self.worker_id:
            return
        log.warning(
            "worker_lost",
            "worker %d counts as lost; registering anew. What it ran is with others now",
            worker_id,
            worker=worker_id,
        )
        self.worker_id = None
        self._node.held.drop_claims(self._node.outbox)
        self._node.waking.rung()

    # --- What was handed out in an answer that never came ---

    def broke_off(self) -> None:
        """A connection broke in the middle of a pop. Was it done? The answer is in the database."""
        now = time.monotonic()
        self.reconcile_at = sorted([*self.reconcile_at, *(now + each for each in RECONCILE_AFTER)])

    def _ought_to_reconcile(self) -> bool:
        return bool(self.reconcile_at) and self.reconcile_at[0] <= time.monotonic()

    async def put_in_order(self, conn: psycopg.AsyncConnection[Any]) -> None:
        await self.register(conn)
        if self._ought_to_reconcile():
            await self._reconcile(conn)
            self.reconcile_at.pop(0)

    async def _reconcile(self, conn: psycopg.AsyncConnection[Any]) -> None:
        assert self.worker_id is not None
        held = self._node.held
        known = held.known(self._node.outbox)
        rows = await workers.tasks_of_worker(conn, worker_id=self.worker_id)
        strange = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) not in known]
        if strange:
            log.warning(
                "reconciled",
                "giving back %d tasks that were handed out while the connection broke",
                len(strange),
            )
            ids, attempts = zip(*strange, strict=True)
            await workers.release_tasks(conn, worker_id=self.worker_id, ids=ids, attempts=attempts)
        # A start whose answer never came: it happened, or it did not.
        running = {row.id for row in rows if row.state == "running"}
        for entry in [each for each in (*held.claimed, *held.solo.waiting) if each.row.id in running]:
            held.started(entry, ours=True)
        held.loopside.go()
