"""An app that several test files run in a worker of their own process."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from typing import Any

import fairq
from tests.worker.running import Desk, drain

app = fairq.App()


@dataclass
class File:
    name: str


class Rude(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


@app.task(store_result=True)
def measure(payload: File, ctx: fairq.Context) -> dict[str, Any]:
    return {
        "name": payload.name,
        "attempt": ctx.attempt,
        "queue": ctx.queue,
        "thread": threading.current_thread().name,
    }


@app.task(store_result=True)
async def ameasure(payload: File, ctx: fairq.Context) -> dict[str, Any]:
    current = asyncio.current_task()
    await asyncio.sleep(0)
    assert asyncio.current_task() is current
    return {"name": payload.name, "headers": dict(ctx.headers)}


@app.task(max_attempts=1)
async def breaks(payload: str) -> None:
    raise {
        "value": ValueError("broken"),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "rude": Rude(),
    }[payload]


@app.task(max_attempts=1)
def breaks_in_thread(payload: str) -> None:
    if payload == "exit":
        sys.exit("bye")
    raise {"interrupt": KeyboardInterrupt(), "rude": Rude()}[payload]


def run_all(desk: Desk, **options: Any) -> None:
    drain(app, desk.dsn, **{"concurrency": 4, **options})
    assert desk.workers == 0, "it does not sign off"
