"""The app that `bench_worker`'s workers run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import fairq

app = fairq.App()


@app.task
async def nothing(payload: Any) -> None: ...


@app.task
def nothing_in_thread(payload: Any) -> None: ...


@app.task(store_result=True)
async def delay(payload: float) -> float:
    """Seconds from before the enqueue to the first line of the handler."""
    return time.time() - payload


@app.task
async def nap(payload: dict[str, float]) -> None:
    await asyncio.sleep(payload["ms"] / 1000)


@app.task
async def long_nap(payload: dict[str, float]) -> None:
    await asyncio.sleep(payload["ms"] / 1000)
