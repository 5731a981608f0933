"""pgqueuer: LISTEN/NOTIFY, jobs fetched and logged in batches."""

from __future__ import annotations

import json

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers import protocol

uvloop.install()


class Pgqueuer(protocol.Peer):
    about = protocol.About(
        package="pgqueuer",
        configuration="uvloop, pool of asyncpg connections, batches of 100, 1,000 jobs at once",
        lacks=("groups", "a fairness option (limits are per entrypoint, which are declared beforehand)"),
        docs=(
            "https://janbjorge.github.io/pgqueuer/ (Drivers)",
            "https://janbjorge.github.io/pgqueuer/ (Concurrency control)",
        ),
    )
    left = "select count(*) from pgqueuer"

    async def setup(self) -> None:
        await Queries(AsyncpgDriver(await asyncpg.connect(self.dsn))).install()

    async def open(self) -> None:
        self.queries = Queries(AsyncpgDriver(await asyncpg.connect(self.dsn)))

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        count = len(payloads)
        bodies: list[bytes | None] = [json.dumps(each).encode() for each in payloads]
        await self.queries.enqueue(["work"] * count, bodies, [0] * count)

    async def work(self, slots: int | None) -> None:
        pool = await asyncpg.create_pool(self.dsn, min_size=4, max_size=8)
        worker = PgQueuer(AsyncpgPoolDriver(pool))

        @worker.entrypoint("work")
        async def work(job: Job) -> None:
            await protocol.handle(json.loads(job.payload or b"{}"))

        most = slots or 1_000
        await worker.run(batch_size=min(100, most // 2), max_concurrent_tasks=most)


PEER = Pgqueuer
