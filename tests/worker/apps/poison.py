"""A handler that kills its process, and harmless ones."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from effects import note  # type: ignore[import-not-found]

import fairq

app = fairq.App()


@app.task
async def kills(payload: Any, ctx: fairq.Context) -> None:
    """Every time, and not before the others have begun."""
    await asyncio.to_thread(note, "kills", ctx)
    await asyncio.sleep(0.2)
    os._exit(9)


@app.task
async def harmless(payload: float, ctx: fairq.Context) -> None:
    await asyncio.to_thread(note, "harmless", ctx)
    await asyncio.sleep(payload)


@app.task(max_attempts=1)
async def only_once(payload: float, ctx: fairq.Context) -> None:
    await asyncio.to_thread(note, "only_once", ctx)
    await asyncio.sleep(payload)


@app.task(max_attempts=1)
def fails_once(payload: Any, ctx: fairq.Context) -> None:
    note("fails_once", ctx)
    raise RuntimeError("and that is all")


@app.task(batch=10)
def together(payloads: list[bool]) -> None:
    if any(payloads):
        os._exit(1)
