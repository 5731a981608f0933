"""What the database knows of a task, in one query: where it is, and every attempt it has had."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fairq.contrib.django import database

__all__ = ["Attempt", "Found", "look_up"]


@dataclass(frozen=True, slots=True)
class Attempt:
    worker_id: int
    started_at: datetime
    outcome: str | None
    error: dict[str, Any] | None


@dataclass(slots=True)
class Found:
    kind: str
    queue: str
    headers: dict[str, Any]
    payload: Any
    created_at: datetime
    finished_at: datetime | None
    outcome: str | None
    """How it ended; None: it has not."""
    result: Any
    error: dict[str, Any] | None
    attempts: list[Attempt] = field(default_factory=list)
    """Those that began, oldest first, and the one that runs; its outcome is None."""


_LOOK_UP = """
select h.kind, h.queue, h.headers::text, h.payload::text, h.created_at, h.finished_at, h.outcome,
  h.result::text, h.error::text, h.worker_id, h.started_at
from fairq.task_history(%(id)s) h
"""
# The function of such an attempt was never called.
_NOT_BEGUN = ("declined", "lease_expired")


def look_up(id: int) -> Found | None:
    """The task of that id; None: there is none, or its retention is over."""
    with database.connection().cursor() as cursor:
        cursor.execute(_LOOK_UP, {"id": id})
        rows = cursor.fetchall()
    found = None
    attempts = []
    for kind, queue, *texts, created_at, finished_at, outcome, result, error, worker_id, started_at in rows:
        headers, payload, result, error = map(_parsed, (*texts, result, error))
        if kind is not None:
            found = Found(
                kind, queue, headers or {}, payload, created_at, finished_at, outcome, result, error
            )
        if started_at is not None and outcome not in _NOT_BEGUN:
            attempts.append(Attempt(worker_id, started_at, outcome, error))
    if found is not None:
        found.attempts = sorted(attempts, key=lambda each: each.started_at)
    return found


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)
