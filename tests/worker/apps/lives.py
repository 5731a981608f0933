"""A lifespan that fails when and how LIFESPAN says."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fairq
from fairq.worker import ending

ending.LAST_RESORT_SECONDS = 1.0  # type: ignore[misc]  # tests have no time
WHEN, HOW = os.environ["LIFESPAN"].split()


async def goes_wrong(when: str) -> None:
    if when != WHEN:
        return
    print(when, HOW, flush=True)
    if HOW == "raises":
        raise OSError("no model here")
    while HOW == "blocks":
        time.sleep(1)  # noqa: ASYNC251
    while HOW != "blocks":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if HOW == "waits":
                raise


@asynccontextmanager
async def model() -> AsyncIterator[None]:
    await goes_wrong("start")
    yield
    await goes_wrong("end")


app = fairq.App(lifespan=model)


@app.task
def nothing(payload: None) -> None: ...
