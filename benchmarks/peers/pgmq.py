"""pgmq: a message queue of SQL functions, from its SQL file; it has no worker, so this one is ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psycopg
from pgmq.install import get_embedded_install_sql, get_embedded_sql_version
from psycopg import sql

from benchmarks.peers import protocol

POLL_MS = 5
HIDDEN_SECONDS = 60


class Pgmq(protocol.Peer):
    about = protocol.About(
        package="pgmq",
        configuration=f"SQL {get_embedded_sql_version()}, 2 loops: read_with_poll of 500, run, delete",
        fairness="read_grouped_rr: one message of each group in turn, one batch of a group at a time",
        lacks=("a worker", "retries with a limit", "history (messages are deleted)"),
        docs=(
            "https://pgmq.github.io/pgmq/api/sql/functions/",
            "https://github.com/pgmq/pgmq/blob/main/docs/fifo-queues.md",
        ),
    )
    left = "select count(*) from pgmq.q_work"

    async def setup(self) -> None:
        with psycopg.connect(self.dsn) as conn:
            conn.execute(get_embedded_install_sql().encode())
            conn.execute("select pgmq.create('work')")
            conn.execute("select pgmq.create_fifo_index('work')")

    async def open(self) -> None:
        self.conn = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        bodies = [json.dumps(each) for each in payloads]
        groups = [json.dumps({"x-pgmq-group": each["group"]}) for each in payloads]
        await self.conn.execute(
            "select count(*) from pgmq.send_batch('work', %s::text[]::jsonb[], %s::text[]::jsonb[])",
            (bodies, groups),
        )

    async def work(self, slots: int | None) -> None:
        """Enough loops to fill the slots: read, run all at once, delete."""
        if slots:
            await asyncio.gather(*(self._read(max(1, slots // 2)) for _ in range(2)))
        else:
            await asyncio.gather(*(self._read(500) for _ in range(2)))

    async def _read(self, batch: int) -> None:
        conn = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        read = "read_grouped_rr_with_poll" if self.fair else "read_with_poll"
        statement = sql.SQL("select msg_id, message from pgmq.{}('work', %s, %s, 5, %s)").format(
            sql.Identifier(read)
        )
        while True:
            rows = await (await conn.execute(statement, (HIDDEN_SECONDS, batch, POLL_MS))).fetchall()
            messages: dict[int, Any] = dict(rows)
            await asyncio.gather(*(protocol.handle(each) for each in messages.values()))
            if ids := list(messages):
                await conn.execute("select count(*) from pgmq.delete('work', %s::bigint[])", (ids,))


PEER = Pgmq
