"""An app that knows none of the tasks, on a queue of its own."""

from __future__ import annotations

from typing import Any

import fairq

app = fairq.App(queue="other")


@app.task
def something(payload: Any) -> None: ...
