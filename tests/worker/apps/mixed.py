"""What `test_alarms.py` lets workers do: nothing, for some time, with some result."""

from __future__ import annotations

import asyncio

import fairq

app = fairq.App()


@app.task
async def sleeps(payload: float) -> None:
    await asyncio.sleep(payload)


@app.task(max_attempts=3)
async def fails(payload: float) -> None:
    await asyncio.sleep(payload)
    raise ValueError("as it was told to")
