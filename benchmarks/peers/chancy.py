"""chancy: LISTEN/NOTIFY, jobs fetched in batches of free slots, ends written once a second."""

from __future__ import annotations

from typing import Any

from chancy import Chancy, Job, Queue, Worker

from benchmarks.peers import protocol


async def run_task(**payload: Any) -> None:
    await protocol.handle(payload)


class ChancyPeer(protocol.Peer):
    about = protocol.About(
        package="chancy",
        configuration="AsyncExecutor, concurrency 200, eager_polling, polling_interval 1 s",
        lacks=("groups", "a fairness option (rate limits are per queue, which are declared beforehand)"),
        docs=(
            "https://tkte.ch/chancy/ (Queue, Worker, Executors)",
            "https://github.com/TkTech/chancy#readme",
        ),
    )
    left = "select count(*) from chancy_jobs where state in ('pending', 'running', 'retrying')"

    async def setup(self) -> None:
        async with Chancy(self.dsn) as chancy:
            await chancy.migrate()

    async def open(self) -> None:
        self.chancy = await Chancy(self.dsn).__aenter__()

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        jobs = [Job(func="benchmarks.peers.chancy.run_task", kwargs=each) for each in payloads]
        async for _ in self.chancy.push_many(jobs):
            pass

    async def work(self, slots: int | None) -> None:
        queue = Queue(
            name="default",
            concurrency=slots or 200,
            executor=Chancy.Executor.Async,
            eager_polling=True,
            polling_interval=1,
        )
        async with Chancy(self.dsn) as chancy:
            await chancy.declare(queue, upsert=True)
            async with Worker(chancy) as worker:
                await worker.wait_for_shutdown()


PEER = ChancyPeer
