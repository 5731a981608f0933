"""A plain FIFO queue by `for update skip locked`, as durable as fairq and with its history."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.peers import protocol

SQL = Path(__file__).parent.parent / "baselines" / "fifo.sql"
PAUSE = 0.002

Conn = psycopg.AsyncConnection[Any]


class Fifo(protocol.Peer):
    about = protocol.About(
        package="fifo",
        configuration=f"500 slots, one connection, pops and finishes in turn, polls every {PAUSE * 1e3:g} ms",
        lacks=("groups", "a fairness option", "retries", "a worker that survives failures"),
        docs=("benchmarks/baselines/fifo.sql",),
    )
    left = "select count(*) from bench_fifo.tasks"

    async def setup(self) -> None:
        with psycopg.connect(self.dsn) as conn:
            conn.execute(SQL.read_bytes())

    async def open(self) -> None:
        self.conn: Conn = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        await self.conn.execute(
            "insert into bench_fifo.tasks (group_key, payload)"
            " select * from unnest(%s::text[], %s::text[]::jsonb[])",
            ([each["group"] for each in payloads], [json.dumps(each) for each in payloads]),
            binary=False,
        )

    async def work(self, slots: int | None) -> None:
        await self.open()
        free, running = slots or 500, set[asyncio.Task[None]]()
        ended: list[tuple[int, int]] = []

        async def run(task_id: int, attempt: int, payload: Any) -> None:
            await protocol.handle(payload)
            ended.append((task_id, attempt))

        while True:
            if ended:
                ids, attempts = [list(each) for each in zip(*ended, strict=True)]
                ended.clear()
                await self.conn.execute(
                    "select count(*) from bench_fifo.finish_tasks(1, %s::bigint[], %s::integer[])",
                    (ids, attempts),
                )
            popped = []
            if room := free - len(running):
                cursor = await self.conn.execute(
                    "select id, attempt, payload from bench_fifo.pop_tasks('default', %s, 1)", (room,)
                )
                popped = await cursor.fetchall()
            for row in popped:
                task = asyncio.create_task(run(*row))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(0 if popped or ended else PAUSE / 4 if running else PAUSE)


PEER = Fifo
