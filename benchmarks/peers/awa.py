"""awa: append-only storage, a Rust runtime that calls Python handlers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import awa

from benchmarks.peers import protocol

PARTITIONS = 8


@dataclass
class Work:
    group: str
    ms: float
    sent: float
    note: str


class Awa(protocol.Peer):
    about = protocol.About(
        package="awa-pg",
        configuration="asyncio handlers, 200 workers, queue storage by default, polls every 20 ms",
        fairness=f"{PARTITIONS} partitions by group: the workers are shared by weight",
        lacks=("groups (a partition holds many)", "fair order within a partition"),
        docs=(
            "https://github.com/hardbyte/awa#readme",
            "the README of the Python package (COPY ingestion, Partitioned queues)",
        ),
    )
    left = "select count(*) from awa.jobs where state in ('available', 'running', 'retryable', 'scheduled')"

    def __init__(self, dsn: str, fair: bool) -> None:
        super().__init__(dsn, fair)
        self.client = awa.AsyncClient(dsn.replace("@/", "@localhost/"), max_connections=20)
        self.partitions = awa.PartitionedQueue("work", PARTITIONS)

    async def setup(self) -> None:
        await self.client.migrate()
        await self.client.install_queue_storage()

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        if not self.fair:
            await self.client.enqueue_many_copy([Work(**each) for each in payloads], queue="work")
            return
        for queue, members in groupby(sorted(payloads, key=self._queue), key=self._queue):
            await self.client.enqueue_many_copy([Work(**each) for each in members], queue=queue)

    def _queue(self, payload: protocol.Payload) -> str:
        return str(self.partitions.queue_for_key(payload["group"]))

    async def work(self, slots: int | None) -> None:
        queues: list[Any] = [("work", slots or 200)]
        options: dict[str, Any] = {"poll_interval_ms": 20}
        if self.fair:
            queues = self.partitions.queue_configs(min_workers_per_partition=0, weight=1)
            options["global_max_workers"] = slots or 200
        name = queues[0]["name"] if self.fair else "work"

        @self.client.task(Work, queue=name)
        async def work(job: Any) -> None:
            await protocol.handle(asdict(job.args))

        await self.client.start(queues, **options)
        await asyncio.Event().wait()


PEER = Awa
