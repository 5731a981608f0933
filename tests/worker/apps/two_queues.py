"""Tasks on two queues; the one that would be served too late is last in the alphabet."""

from __future__ import annotations

from typing import Any

from effects import note  # type: ignore[import-not-found]

import fairq

app = fairq.App()


@app.task(queue="archive")
def store(payload: Any, ctx: fairq.Context) -> None:
    note("archive", ctx)


@app.task(queue="urgent")
def page(payload: Any, ctx: fairq.Context) -> None:
    note("urgent", ctx)
