"""absurd: a durable workflow system in one SQL file; polls, one call for each task spawned and ended."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from absurd_sdk import AsyncAbsurd
from psycopg import AsyncConnection

from benchmarks.peers import protocol

POLL_SECONDS = 0.02


class Absurd(protocol.Peer):
    about = protocol.About(
        package="absurd-sdk",
        configuration=f"AsyncAbsurd worker, concurrency 100, poll_interval {POLL_SECONDS * 1e3:g} ms",
        lacks=("groups", "a fairness option", "enqueueing in bulk (1,000 spawns in one transaction here)"),
        docs=(
            "https://github.com/earendil-works/absurd/blob/main/docs/sdks/python.md",
            "https://github.com/earendil-works/absurd/blob/main/docs/database.md",
        ),
    )
    left = "select count(*) from absurd.t_work where state in ('pending', 'running', 'sleeping')"

    async def setup(self) -> None:
        tool = Path(os.environ["PEER_FOLDER"]) / "bin" / "absurdctl"
        env = os.environ | {"ABSURD_DATABASE_URL": self.dsn}
        for command in (["init"], ["create-queue", "work"]):
            process = await asyncio.create_subprocess_exec(tool, *command, env=env)
            if await process.wait():
                raise RuntimeError(f"absurdctl {command[0]} failed")

    async def open(self) -> None:
        self.conn: AsyncConnection[Any] = await AsyncConnection.connect(self.dsn, autocommit=True)
        self.absurd = AsyncAbsurd(self.conn, queue_name="work")

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        async with self.conn.transaction():
            for each in payloads:
                await self.absurd.spawn("work", each, queue="work")

    async def work(self, slots: int | None) -> None:
        absurd = AsyncAbsurd(self.dsn, queue_name="work")

        @absurd.register_task("work")
        async def work(params: Any, ctx: Any) -> None:
            await protocol.handle(params)

        await absurd.start_worker(concurrency=slots or 100, poll_interval=POLL_SECONDS)


PEER = Absurd
