"""dbos: durable workflows; a queue starts them by polling."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from dbos import DBOS, DBOSClient

from benchmarks.peers import protocol

POLL_SECONDS = 0.05
PARTITION_LIMIT = 4


class Dbos(protocol.Peer):
    about = protocol.About(
        package="dbos",
        configuration=f"async workflows, worker_concurrency 100, polling_interval_sec {POLL_SECONDS:g}",
        fairness=f"partitioned queue: a partition for each group, at most {PARTITION_LIMIT} of it at once",
        lacks=("fair order between partitions", "enqueueing in bulk", "waking by NOTIFY"),
        docs=(
            "https://docs.dbos.dev/python/tutorials/queue-tutorial",
            "https://docs.dbos.dev/python/reference/queues",
        ),
    )
    left = "select count(*) from dbos.workflow_status where status in ('ENQUEUED', 'PENDING')"

    def _launch(self, slots: int) -> None:
        DBOS(
            config={
                "name": "work",
                "system_database_url": self.dsn,
                "application_version": "1",
                "executor_id": str(os.getpid()),
                "log_level": "ERROR",
            }
        )

        @DBOS.workflow(name="work")
        async def work(payload: Any) -> None:
            await protocol.handle(payload)

        DBOS.launch()
        limits: dict[str, Any] = {"worker_concurrency": slots, "polling_interval_sec": POLL_SECONDS}
        if self.fair:
            limits["partition_worker_concurrency"] = PARTITION_LIMIT
        DBOS.register_queue("work", on_conflict="always_update", **limits)

    async def setup(self) -> None:
        await asyncio.to_thread(self._launch, 100)
        await asyncio.to_thread(DBOS.destroy)

    async def open(self) -> None:
        self.client = await asyncio.to_thread(
            DBOSClient, system_database_url=self.dsn, system_database_pool_size=10, application_name="work"
        )

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        await asyncio.gather(*(self.client.enqueue_async(self._options(each), each) for each in payloads))

    def _options(self, payload: protocol.Payload) -> Any:
        options = {"queue_name": "work", "workflow_name": "work", "app_version": "1"}
        return options | ({"queue_partition_key": payload["group"]} if self.fair else {})

    async def work(self, slots: int | None) -> None:
        await asyncio.to_thread(self._launch, slots or 100)
        await asyncio.Event().wait()


PEER = Dbos
