"""An app without any of the tasks, on its own queue."""

from __future__ import annotations

from typing import Any

import fairq

app = fairq.App(queue="other")


@app.task
def something(payload: Any) -> None: ...
