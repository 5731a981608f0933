"""A turn: what a worker sends in one round trip and one transaction, and the calls that it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg

from fairq.app import Outcome
from fairq.codec import encode
from fairq.queries import driver, workers
from fairq.worker import plan
from fairq.worker.connect import FAILURES
from fairq.worker.handlers import SUCCEEDED, Entry

__all__ = [
    "End",
    "Turn",
    "by_worker",
    "check_call",
    "cut",
    "finish_call",
    "one_transaction",
    "release_call",
    "report_call",
    "start_call",
    "timedelta_of",
]


@dataclass(slots=True)  # frozen ones take four times as long to make, and there is one for each task
class End:
    """An attempt that ended, not written yet."""

    worker_id: int
    id: int
    attempt: int
    outcome: Outcome
    before: End | None = None
    """As it was before the database refused its result."""

    @property
    def size(self) -> int:
        return len(self.outcome.result or "") + len(self.outcome.error or "")


@dataclass(slots=True)
class Turn:
    """What to send in one round trip."""

    ends: list[End] = field(default_factory=list)
    releases: list[Entry] = field(default_factory=list)
    checks: list[Entry] = field(default_factory=list)
    reports: list[Entry] = field(default_factory=list)
    starts: list[Entry] = field(default_factory=list)
    pop: int = 0
    ask_due: bool = False

    def __bool__(self) -> bool:
        return bool(self.pop or self.ends or self.releases or self.starts or self.checks or self.reports)


def cut(ends: list[End]) -> list[End]:
    """The first of these, as many as go into one statement."""
    if not ends:
        return []
    sizes = [0 if end.outcome is SUCCEEDED else end.size for end in ends[: plan.MOST_ENDS]]
    return ends[: plan.batch_size(sizes)]


def by_worker(items: Sequence[Any]) -> Iterable[tuple[int, Sequence[Any]]]:
    """Each under the worker number that it was popped with. Nearly always there is one."""
    if not items:
        return ()
    first = items[0].worker_id
    if all(item.worker_id == first for item in items):
        return ((first, items),)
    groups: dict[int, list[Any]] = {}
    for item in items:
        groups.setdefault(item.worker_id, []).append(item)
    return groups.items()


# --- The calls -------------------------------------------------------------------------------------


def finish_call(worker_id: int, ends: Sequence[End]) -> driver.Call[list[int]]:
    ids, attempts = [end.id for end in ends], [end.attempt for end in ends]
    outcomes = [end.outcome for end in ends if end.outcome is not SUCCEEDED]
    if not outcomes:
        return workers.finish_tasks_call(worker_id=worker_id, ids=ids, attempts=attempts)
    outcomes = [end.outcome for end in ends]
    return workers.finish_tasks_call(
        worker_id=worker_id,
        ids=ids,
        attempts=attempts,
        outcomes=[each.outcome for each in outcomes],
        results=_unless_empty([each.result for each in outcomes]),
        errors=_unless_empty([each.error for each in outcomes]),
        retry_delays=_unless_empty([timedelta_of(each.retry_delay) for each in outcomes]),
    )


def release_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    return workers.release_tasks_call(worker_id=worker_id, **_names(entries))


def check_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    return workers.held_tasks_call(worker_id=worker_id, **_names(entries))


def start_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    return workers.start_tasks_call(worker_id=worker_id, **_names(entries))


def report_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    told = [
        (entry.row.id, entry.row.attempt, entry.ctx.last_progress)
        for entry in entries
        if entry.ctx is not None and entry.ctx.last_progress is not None
    ]
    return workers.report_progress_call(
        worker_id=worker_id,
        ids=[id for id, _, _ in told],
        attempts=[attempt for _, attempt, _ in told],
        done=[progress.done for _, _, progress in told],
        totals=_unless_empty([progress.total for _, _, progress in told]),
        notes=_unless_empty([driver.maybe(_note, progress.note) for _, _, progress in told]),
    )


def timedelta_of(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=min(max(seconds, 0.0), 1e9))


def _names(entries: Sequence[Entry]) -> dict[str, list[int]]:
    return {
        "ids": [entry.row.id for entry in entries],
        "attempts": [entry.row.attempt for entry in entries],
    }


def _note(note: Any) -> str:
    return encode(note, "note")


def _unless_empty(values: list[Any]) -> list[Any] | None:
    return values if any(value is not None for value in values) else None


# --- The transaction -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def one_transaction(conn: psycopg.AsyncConnection[Any], explicit: bool) -> AsyncIterator[None]:
    """A pipeline is one transaction by itself; only another isolation level has to be asked for."""
    if not explicit:
        async with conn.pipeline():
            yield
        return
    try:
        async with conn.pipeline():
            await conn.execute("begin isolation level read committed")
            yield
            await conn.execute("commit")
    except BaseException:
        if not conn.closed:
            with contextlib.suppress(*FAILURES):
                await conn.rollback()
        raise
