"""A turn: what a worker sends in one round trip and one transaction, and the calls that it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import psycopg

from fairq import driver
from fairq.codec import encode
from fairq.queries import workers
from fairq.worker import plan
from fairq.worker.connect import FAILURES
from fairq.worker.handlers import SUCCEEDED, Entry


@dataclass(slots=True)
class Turn:
    """What to send in one round trip."""

    ends: list[Entry] = field(default_factory=list)
    checks: list[Entry] = field(default_factory=list)
    reports: list[Entry] = field(default_factory=list)
    starts: list[Entry] = field(default_factory=list)
    pop: int = 0

    def __bool__(self) -> bool:
        return bool(self.pop or self.ends or self.starts or self.checks or self.reports)


def cut(ends: list[Entry]) -> list[Entry]:
    """The first of these, as many as go into one statement."""
    if not ends:
        return []
    outcomes = [entry.outcome for entry in ends[: plan.MOST_ENDS]]
    sizes = [0 if each is SUCCEEDED else len(each.result or "") + len(each.error or "") for each in outcomes]
    return ends[: plan.batch_size(sizes)]


def by_worker(*lists: Sequence[Entry]) -> dict[int, list[list[Entry]]]:
    """What is in these lists, under the worker number that it was popped with. Nearly always there is one."""
    groups: dict[int, list[list[Entry]]] = {}
    for place, items in enumerate(lists):
        for item in items:
            group = groups.get(item.worker_id)
            if group is None:  # not setdefault: it would make the lists anew for each task
                group = groups[item.worker_id] = [[] for _ in lists]
            group[place].append(item)
    return groups


# --- The calls -------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a pop is for, and what its answer is compared with."""

    queues: Sequence[str] = ()
    """Whom to ask, one after the other, for how many at most; and how many in all."""
    mosts: Sequence[int] = ()
    room: int = 0
    batch: int = 0
    places: Sequence[tuple[int, int]] = ()
    """The steps by the place of the queue."""
    rings: int = 0
    """Notices that had come before."""
    holds: bool = False
    """Whether handlers ran, which might make work that it does not see."""


NOTHING = Asked()


def turn_call(
    worker_id: int,
    ends: Sequence[Entry],
    starts: Sequence[Entry] = (),
    asked: Asked = NOTHING,
    claim_lease: timedelta | None = None,
) -> driver.Call[list[workers.TurnRow]]:
    outcomes = [entry.outcome for entry in ends]
    if all(outcome is SUCCEEDED for outcome in outcomes):
        outcomes = []
    ended, started = names(ends), names(starts)
    return workers.turn.call(
        worker_id=worker_id,
        queues=asked.queues,
        mosts=asked.mosts,
        max_tasks=asked.room,
        claim_lease=claim_lease,
        ended_ids=ended["ids"],
        ended_attempts=ended["attempts"],
        outcomes=[each.outcome for each in outcomes] or None,
        results=_unless_empty([each.result for each in outcomes]),
        errors=_unless_empty([each.error for each in outcomes]),
        retry_delays=_unless_empty([timedelta_of(each.retry_delay) for each in outcomes]),
        holds=_unless_empty([each.hold for each in outcomes]),
        costs=_unless_empty([None if entry.ctx is None else entry.ctx.charged for entry in ends]),
        started_ids=started["ids"],
        started_attempts=started["attempts"],
    )


def report_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    progress = [entry.ctx.last_progress for entry in entries]
    return workers.report_progress.call(
        worker_id=worker_id,
        **names(entries),
        done=[None if each is None else each.done for each in progress],
        totals=_unless_empty([None if each is None else each.total for each in progress]),
        notes=_unless_empty(
            [None if each is None or each.note is None else encode(each.note, "note") for each in progress]
        ),
        costs=_unless_empty([entry.ctx.charged for entry in entries]),
    )


def timedelta_of(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=min(max(seconds, 0.0), 1e9))


def names(entries: Sequence[Entry]) -> dict[str, list[int]]:
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
