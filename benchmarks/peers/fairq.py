"""fairq itself, as an application would run it."""

from __future__ import annotations

from typing import Any

import psycopg

import fairq
from benchmarks.peers import protocol
from fairq import install
from fairq.worker import Worker

app = fairq.App()


@app.task
async def work(payload: Any) -> None:
    await protocol.handle(payload)


class Fairq(protocol.Peer):
    about = protocol.About(
        package="fairq",
        configuration="500 slots in one process, everything else by default",
        fairness="always on",
        lacks=(),
        docs=("docs/reference/cli-work.md",),
        always_fair=True,
    )
    left = "select count(*) from fairq.tasks"

    async def setup(self) -> None:
        with psycopg.connect(self.dsn) as conn:
            install.load_sql(conn)
            conn.execute("select fairq.maintain()")

    async def open(self) -> None:
        self.conn = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    async def enqueue(self, payloads: list[protocol.Payload]) -> None:
        await fairq.enqueue_many(self.conn, [(each["group"], each) for each in payloads], kind="work")

    async def work(self, slots: int | None) -> None:
        await Worker(app, self.dsn, concurrency=slots or 500).arun()


PEER = Fairq
