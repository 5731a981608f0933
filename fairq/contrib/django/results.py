"""A task's state and all its attempts, from one query."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NamedTuple

from fairq.contrib.django import database

__all__ = ["Row", "look_up"]


class Row(NamedTuple):
    """A row of `fairq.task_history`: a task with its last attempt or, without a kind, an earlier attempt."""

    kind: str | None
    queue: str
    created_at: datetime
    finished_at: datetime | None
    outcome: str | None
    worker_id: int
    started_at: datetime
    headers: dict[str, Any] | None
    payload: Any
    result: Any
    error: dict[str, Any] | None


# As text, because a project may change how Django reads jsonb.
_LOOK_UP = """
select h.kind, h.queue, h.created_at, h.finished_at, h.outcome, h.worker_id, h.started_at, h.headers::text,
  h.payload::text, h.result::text, h.error::text
from fairq.task_history(%s) h
"""
# Outcomes of attempts whose function was never called.
_NOT_BEGUN = ("declined", "lease_expired")


def look_up(id: int) -> tuple[Row, list[Row]] | None:
    """A task and its attempts that began, oldest first; the running one has the outcome None. None: there is
    no such task, or its retention is over.
    """
    with database.connection().cursor() as cursor:
        cursor.execute(_LOOK_UP, [id])
        rows = [
            Row(*each[:7], *(json.loads(text or "null") for text in each[7:])) for each in cursor.fetchall()
        ]
    began = [row for row in rows if row.started_at is not None and row.outcome not in _NOT_BEGUN]
    attempts = sorted(began, key=lambda row: row.started_at)
    return next(((row, attempts) for row in rows if row.kind is not None), None)
