"""procrastinate: LISTEN/NOTIFY, one statement to fetch a job and one to finish it."""

from __future__ import annotations

import os
from typing import Any

import procrastinate

from benchmarks.peers import protocol

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ.get("PEER_DSN", ""), max_size=20)
)


@app.task(name="work")
async def work(**payload: Any) -> None:
    await protocol.handle(payload)


class Procrastinate(protocol.Peer):
    about = protocol.About(
        package="procrastinate",
        configuration="asyncio worker, concurrency 20, pool of 20, listen_notify, delete_jobs=never",
        fairness="lock = group: one job of a group at a time, in order",
        lacks=("fair order between groups", "a cap above one per group", "fetching in batches"),
        docs=(
            "https://procrastinate.readthedocs.io/en/stable/howto/production/concurrency.html",
            "https://procrastinate.readthedocs.io/en/stable/howto/advanced/locks.html",
            "https://procrastinate.readthedocs.io/en/stable/howto/advanced/batch.html",
        ),
    )
    left = "select count(*) from procrastinate_jobs where status in ('todo', 'doing')"

    async def setup(self) -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await app.open_async()

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        if not self.fair:
            await work.batch_defer_async(*payloads)
            return
        groups: dict[str, list[protocol.Payload]] = {}
        for each in payloads:
            groups.setdefault(each["group"], []).append(each)
        for group, members in groups.items():
            await work.configure(lock=group).batch_defer_async(*members)

    async def work(self, slots: int | None) -> None:
        async with app.open_async():
            await app.run_worker_async(concurrency=slots or 20, install_signal_handlers=False)


PEER = Procrastinate
