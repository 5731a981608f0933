"""A turn: what a worker sends in one round trip and one transaction, and the calls that it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg

from fairq import driver
from fairq.codec import encode
from fairq.outcome import Outcome
from fairq.queries import workers
from fairq.worker import plan
from fairq.worker.connect import FAILURES
from fairq.worker.handlers import SUCCEEDED, Entry


@dataclass(slots=True)  # frozen ones take four times as long to make, and there is one for each task
class End:
    """An attempt that ended, not written yet."""

    worker_id: int
    id: int
    attempt: int
    entry: Entry
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
    checks: list[Entry] = field(default_factory=list)
    reports: list[Entry] = field(default_factory=list)
    starts: list[Entry] = field(default_factory=list)
    pop: int = 0

    def __bool__(self) -> bool:
        return bool(self.pop or self.ends or self.starts or self.checks or self.reports)


def cut(ends: list[End]) -> list[End]:
    """The first of these, as many as go into one statement."""
    if not ends:
        return []
    sizes = [0 if end.outcome is SUCCEEDED else end.size for end in ends[: plan.MOST_ENDS]]
    return ends[: plan.batch_size(sizes)]


def by_worker(*lists: Sequence[Any]) -> dict[int, list[list[Any]]]:
    """What is in these lists, under the worker number that it was popped with. Nearly always there is one."""
    groups: dict[int, list[list[Any]]] = {}
    for place, items in enumerate(lists):
        for item in items:
            group = groups.get(item.worker_id)
            if group is None:  # not setdefault: it would make the lists anew for each task
                group = groups[item.worker_id] = [[] for _ in lists]
            group[place].append(item)
    return groups


# --- The calls -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Steps:
    """Whom to ask for how many tasks, one after the other, and how many in all."""

    queues: Sequence[str]
    mosts: Sequence[int]
    room: int


NOBODY = Steps((), (), 0)


def turn_call(
    worker_id: int, ends: Sequence[End], starts: Sequence[Entry], steps: Steps, claim_lease: timedelta | None
) -> driver.Call[list[workers.TurnRow]]:
    outcomes = [end.outcome for end in ends]
    if all(outcome is SUCCEEDED for outcome in outcomes):
        outcomes = []
    started = _names(starts)
    return workers.turn.call(
        worker_id=worker_id,
        queues=steps.queues,
        mosts=steps.mosts,
        max_tasks=steps.room,
        claim_lease=claim_lease,
        ended_ids=[end.id for end in ends],
        ended_attempts=[end.attempt for end in ends],
        outcomes=[each.outcome for each in outcomes] or None,
        results=_unless_empty([each.result for each in outcomes]),
        errors=_unless_empty([each.error for each in outcomes]),
        retry_delays=_unless_empty([timedelta_of(each.retry_delay) for each in outcomes]),
        holds=_unless_empty([each.hold for each in outcomes]),
        costs=_unless_empty([None if end.entry.ctx is None else end.entry.ctx.charged for end in ends]),
        started_ids=started["ids"],
        started_attempts=started["attempts"],
    )


def check_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    return workers.held_tasks.call(worker_id=worker_id, **_names(entries))


def report_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    told = [
        (entry.row.id, entry.row.attempt, entry.ctx.last_progress, entry.ctx.charged)
        for entry in entries
        if entry.ctx is not None
    ]
    progress = [each for _, _, each, _ in told]
    return workers.report_progress.call(
        worker_id=worker_id,
        ids=[id for id, _, _, _ in told],
        attempts=[attempt for _, attempt, _, _ in told],
        done=[None if each is None else each.done for each in progress],
        totals=_unless_empty([None if each is None else each.total for each in progress]),
        notes=_unless_empty(
            [None if each is None or each.note is None else encode(each.note, "note") for each in progress]
        ),
        costs=_unless_empty([charged for _, _, _, charged in told]),
    )


def timedelta_of(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=min(max(seconds, 0.0), 1e9))


def _names(entries: Sequence[Entry]) -> dict[str, list[int]]:
    return {"ids": [entry.row.id for entry in entries], "attempts": [entry.row.attempt for entry in entries]}


def _unless_empty(values: list[Any]) -> list[Any] | None:
    return values if any(value is not None for value in values) else None


# --- The transaction -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def one_transaction(conn: psycopg.AsyncConnection[Any], on_terms: bool) -> AsyncIterator[None]:
    """A pipeline is one transaction by itself; only terms other than the role's have to be asked for."""
    if not on_terms:
        async with conn.pipeline():
            yield
        return
    try:
        async with conn.pipeline():
            await conn.execute("begin isolation level read committed")
            await conn.execute("set local statement_timeout = 0")
            yield
            await conn.execute("commit")
    except BaseException:
        if not conn.closed:
            with contextlib.suppress(*FAILURES):
                await conn.rollback()
        raise
