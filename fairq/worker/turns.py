"""A worker's turns: what to send in the next one, how to send it, and what its answer or failure means.

A turn is one round trip and one transaction. All of it happens or nothing, so a failed turn is repeated, and
what ended stays in the `Outbox` until it is written.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

from fairq import driver
from fairq.codec import encode
from fairq.errors import sqlstate_of
from fairq.queries import workers
from fairq.worker import log, plan
from fairq.worker import shares as sharing
from fairq.worker.config import limits
from fairq.worker.connect import FAILURES, is_about_data, is_read_only, is_unknown_worker, is_worth_a_try
from fairq.worker.handlers import RELEASE, SUCCEEDED, Entry
from fairq.worker.held import convict
from fairq.worker.rota import LATE, Place

if TYPE_CHECKING:
    from fairq.worker.node import Node

# Progress is written at most this often.
REPORT_SECONDS: Final = 1.0
# What a database can raise, and what cannot be sent to it.
REFUSALS: Final = (*FAILURES, UnicodeError)


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


class Asked(NamedTuple):
    """What a pop asks for, and what it takes to read its answer."""

    queues: Sequence[str] = ()
    """Which queues to ask, in order."""
    mosts: Sequence[int] = ()
    """How many tasks to ask of each, at most."""
    room: int = 0
    """How many tasks to ask for in all."""
    batch: int = 0
    places: Sequence[tuple[int, int]] = ()
    """The steps, by the queues' indexes."""
    rings: int = 0
    """How many notices had come before."""
    holds: bool = False
    """Whether handlers ran, which may enqueue more."""


NOTHING = Asked()


class Turns:
    def __init__(self, node: Node, is_near: bool) -> None:
        settings = self.settings = node.settings
        self.limits = node.limits
        self.queues = node.engine.queues
        self.database = node.database
        self.held = node.held
        self.outbox = node.outbox
        self.node = node
        self.waking = node.waking
        self.rota = node.rota
        self._shares = sharing.shares_of(settings.queues) if isinstance(settings.queues, Mapping) else None
        self._claim_lease = None if settings.claim_lease is None else timedelta(seconds=settings.claim_lease)
        self._report_at = 0.0
        # Send ends and pops in separate turns, because one with both failed though the database answers.
        self._apart = False
        self.place = Place(self._wants, self.waking.wake.set, self.waking.stirred, is_near)
        self.rota.places.append(self.place)

    # --- The next one ---

    def _wants(self, now: float) -> bool:
        """Whether a look is due and possible."""
        may_look = self.waking.is_due(now) and not (self.settings.mode == "once" and self.waking.looked)
        return may_look and self.node.is_in_order and self.database.pause(now) <= 0

    def to_write(self) -> Turn:
        """A turn with what has ended and is not written."""
        outbox = self.outbox
        return Turn(ends=_cut(outbox.ends), checks=outbox.due_checks(time.monotonic()))

    def next(self) -> Turn:
        now = time.monotonic()
        held, waking, rota = self.held, self.waking, self.rota
        held.give_suspects_back()
        turn = self.to_write()
        room = 0
        if not (self._apart and turn):
            room = plan.pop_limit(self.limits, held=held.taken + rota.asked_for(now), waiting=held.waiting)
        if self.settings.mode == "once" and waking.looked:
            room = 0
            held.solo.nobody_else_comes(now)
        alone = held.solo.keeps_others_out(now)
        if alone:
            room = 0
        if room and rota.is_turn_of(self.place, waking.is_due(now) or bool(turn.ends), now):
            turn.pop = rota.room_for(self.place, room)
        if alone:
            turn.starts = held.to_start_alone(self.outbox)
        elif held.claimed:
            turn.starts = self._startable(now)
        if self.outbox.reports and now >= self._report_at:
            turn.reports = list(self.outbox.reports.values())
        if not turn.starts and plan.ought_to_gather(
            self.limits, ended=len(turn.ends), ready=len(held.loopside)
        ):
            return Turn()
        return turn

    def _startable(self, now: float) -> list[Entry]:
        held = self.held
        held.drop_late_claims(now)
        count = plan.to_start(self.limits, running=held.taken - len(held.claimed), claimed=len(held.claimed))
        return held.to_start(count, self.outbox)

    def until_next(self) -> float:
        """Seconds until the next turn is due, if nothing happens before."""
        now = time.monotonic()
        held, outbox = self.held, self.outbox
        look_at = self.waking.look_at
        if self.rota.first(now) not in (self.place, None):
            look_at = max(look_at, now + LATE)  # the rota wakes us earlier if it is our turn
        times = [look_at]
        if outbox.reports:
            times.append(self._report_at)
        times += self.node.reconcile_at[:1]
        times += [at for at, _ in outbox.checks[:1]]
        gives_up_at = held.solo.gives_up_at
        if gives_up_at is not None:
            times.append(gives_up_at)
        room = held.taken < self.limits.slots + self.limits.prefetch and not held.solo.keeps_others_out(now)
        return max(0.001, min(times if room else times[1:] or [now + 3600.0]) - now)

    def last_words(self, dead: bool) -> list[driver.Call[Any]]:
        """The calls that write what has ended while the loop is blocked. From the keeper's thread."""
        blamed = self.held.blamed(self.outbox) if dead else []
        return [
            _turn_call(holder, ends)
            for some in (blamed, self.outbox.ends)
            for holder, (ends,) in _by_worker(some).items()
        ]

    # --- On its way ---

    async def take(self, turn: Turn) -> None:
        """Send a turn. If it fails, its content goes back into the lists."""
        outbox = self.outbox
        outbox.ends = outbox.ends[len(turn.ends) :]
        del outbox.checks[: len(turn.checks)]
        for entry in turn.reports:
            outbox.reports.pop(entry.row.id, None)
        with self.rota.busy(self.place, turn.pop):
            try:
                async with self.database.answering() as conn:
                    await self._send(conn, turn)
            except BaseException as exc:
                outbox.ends = turn.ends + outbox.ends
                outbox.checks = [(0.0, entry) for entry in turn.checks] + outbox.checks
                if isinstance(exc, REFUSALS):
                    if is_worth_a_try(exc):
                        outbox.report_again(turn.reports)
                    await self.failed(exc, turn)
                    return
                # Cancelled, perhaps with half of a turn sent: the end of the worker needs a new connection.
                await self.database.disconnect()
                raise
        self.database.succeeded()
        if self._apart and not turn.ends and turn.pop:
            self._apart = False

    async def _send(self, conn: psycopg.AsyncConnection[Any], turn: Turn) -> None:
        """Send a turn in one round trip and one transaction. Only the answers change our state."""
        calls: list[tuple[driver.Call[Any], Callable[[Any], None]]] = []
        call: driver.Call[Any]
        for holder, (checks,) in _by_worker(turn.checks).items():
            call = workers.held_tasks.call(worker_id=holder, **_names(checks))
            calls.append((call, partial(self.held.checked, checks)))
        for holder, (reports,) in _by_worker(turn.reports).items():
            calls.append((_report_call(holder, reports), lambda answer: None))
        groups = _by_worker(turn.ends, turn.starts)
        asked, ours = NOTHING, self.node.worker_id
        if turn.pop and ours is not None:
            groups.setdefault(ours, [[], []])
            asked = self._ask(turn.pop)
        # Ends under our former ids are written before we ask for more.
        for holder, (ends, starts) in sorted(groups.items(), key=lambda each: each[0] == ours):
            about = asked if holder == ours else NOTHING
            call = _turn_call(holder, ends, starts, about, self._claim_lease)
            calls.append((call, partial(self._answered, holder, ends, starts, about)))
        if asked.room and len(self.rota.places) > 1:
            call = workers.standings.call(queues=self.queues)
            calls.append((call, partial(self.rota.stands, self.place)))

        if len(calls) == 1 and not self.database.sets_terms:
            answers = [await driver.send_async(conn, calls[0][0])]  # a statement is a transaction by itself
        else:
            async with one_transaction(conn, self.database.sets_terms):
                answers = [await driver.send_async(conn, call) for call, _ in calls]
        if turn.reports:
            self._report_at = time.monotonic() + REPORT_SECONDS
        for (_, read), answer in zip(calls, answers, strict=True):
            read(answer.result())
        self.held.go()

    def _ask(self, room: int) -> Asked:
        batch = min(room, self.limits.claim_batch)
        if self._shares is not None:
            room, places = batch, sharing.steps(self._shares, batch)
        else:  # in order of priority, each for as many as there are slots
            places = [(place, batch) for place in range(len(self.queues))]
            room = batch if len(places) == 1 else room
        queues, mosts = [self.queues[place] for place, _ in places], [most for _, most in places]
        return Asked(queues, mosts, room, batch, places, self.waking.rings, self.held.may_end)

    def _answered(
        self,
        worker_id: int,
        ends: Sequence[Entry],
        starts: Sequence[Entry],
        asked: Asked,
        rows: list[workers.TurnRow],
    ) -> None:
        *tasks, head = rows
        if ends:
            self._finished(ends, head.ended or [])
        if starts:
            there = set(head.started or [])
            for entry in starts:
                self.held.started(entry, ours=entry.row.id in there)
        if asked.room:
            self._popped(worker_id, asked, tasks, head.due_in)

    def _finished(self, ends: Sequence[Entry], accepted: list[int]) -> None:
        if len(accepted) == len(ends):
            return
        there = set(accepted)
        # Releases that others have by now need no warning.
        lost = [entry for entry in ends if entry.row.id not in there]
        if stale := [entry.row.id for entry in lost if entry.outcome is not RELEASE]:
            log.warning(
                "stale",
                "%d ended attempts were not accepted: already written, or no longer this worker's: %s",
                len(stale),
                stale[:20],
                task_ids=stale,
                worker=ends[0].worker_id,
            )

    def _popped(
        self, worker_id: int, asked: Asked, rows: list[workers.TurnRow], due_in: float | None
    ) -> None:
        if self._shares is not None:
            counts = Counter(row.queue for row in rows)
            by_place = [counts[queue] for queue in self.queues]
            self._shares = sharing.served(self._shares, asked.places, by_place, asked.room)
        held, lease = self.held, self._claim_lease
        # A queue that gave a whole batch may have more.
        full = len(rows) >= asked.batch
        self.rota.answered(self.place, len(rows), full)
        if rows and self.settings.mode == "drain":
            for place in self.rota.places:
                place.stirred()
        holds = asked.holds or held.may_end
        self.waking.found(len(rows), full=full, rings=asked.rings, holds=holds, due_in=due_in)
        claimed_until = None if lease is None else time.monotonic() + lease.total_seconds()
        # If the answer is late, other nodes may have filled the slots.
        room = max(0, self.limits.slots + self.limits.prefetch - held.taken)
        held.take_in(rows[:room], worker_id, self.outbox, claimed_until)
        held.give_back(rows[room:], worker_id, self.outbox)

    # --- A turn that failed ---

    async def failed(self, exc: BaseException, turn: Turn) -> None:
        if is_unknown_worker(exc) and self.node.worker_id is not None:
            self.database.succeeded()  # it does answer, and this may have been the breaker's probe
            self.node.lost(self.node.worker_id)
            return
        broken = self.database.is_broken
        if broken and (turn.pop or turn.starts):
            self.node.broke_off()
        if self._claim_lease is not None and sqlstate_of(exc) == "QF015":
            log.warning("prefetch_off", "the cluster got a cap; the worker goes on without prefetch")
            self.database.succeeded()
            self._claim_lease = None
            self.limits = limits(replace(self.settings, prefetch=0, claim_lease=None))
            return
        if turn.ends and is_about_data(exc):
            await self._write_with_care(turn.ends)
            return
        if not is_worth_a_try(exc):
            self._apart = True
        if broken or is_read_only(exc) or not is_worth_a_try(exc):
            await self.database.disconnect()
        if len(self.rota.places) > 1:
            self.held.give_claims_back(self.outbox)
            self.place.took = 0.0
        self.database.failed(exc, "to take a turn")

    async def _write_with_care(self, ends: list[Entry]) -> None:
        """The database refuses a value of these. Find whose, fail that attempt, and write the others."""
        outbox = self.outbox
        outbox.ends = outbox.ends[len(ends) :]
        pending: list[Sequence[Entry]] = [ends]
        try:
            while pending:
                batch = pending[-1]
                try:
                    async with self.database.answering() as conn:
                        await self._send(conn, Turn(ends=list(batch)))
                    pending.pop()
                except REFUSALS as exc:
                    entry = batch[0]
                    if entry.refused is not None:
                        # So it was not its result: something else is wrong.
                        entry.outcome, entry.refused = entry.refused, None
                        raise
                    if not is_about_data(exc):
                        raise
                    if len(batch) == 1:
                        convict(entry, exc)
                    else:
                        pending[-1:] = reversed(plan.halves(batch))
        except REFUSALS as exc:
            self.database.failed(exc, "to write how tasks ended")
            if self.database.conn is not None and self.database.is_broken:
                await self.database.disconnect()
        else:
            self.database.succeeded()
        finally:
            outbox.ends = [entry for batch in pending for entry in batch] + outbox.ends


# --- The calls -------------------------------------------------------------------------------------


def _turn_call(
    worker_id: int,
    ends: Sequence[Entry],
    starts: Sequence[Entry] = (),
    asked: Asked = NOTHING,
    claim_lease: timedelta | None = None,
) -> driver.Call[list[workers.TurnRow]]:
    outcomes = [entry.outcome for entry in ends]
    if all(outcome is SUCCEEDED for outcome in outcomes):
        outcomes = []
    ended, started = _names(ends), _names(starts)
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
        retry_delays=_unless_empty([each.delay for each in outcomes]),
        holds=_unless_empty([each.hold for each in outcomes]),
        costs=_unless_empty([None if entry.ctx is None else entry.ctx.charged for entry in ends]),
        started_ids=started["ids"],
        started_attempts=started["attempts"],
    )


def _report_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    progress = [entry.ctx.last_progress for entry in entries]
    return workers.report_progress.call(
        worker_id=worker_id,
        **_names(entries),
        done=[None if each is None else each.done for each in progress],
        totals=_unless_empty([None if each is None else each.total for each in progress]),
        notes=_unless_empty(
            [None if each is None or each.note is None else encode(each.note, "note") for each in progress]
        ),
        costs=_unless_empty([entry.ctx.charged for entry in entries]),
    )


def _names(entries: Sequence[Entry]) -> dict[str, list[int]]:
    return {"ids": [entry.row.id for entry in entries], "attempts": [entry.row.attempt for entry in entries]}


def _unless_empty(values: list[Any]) -> list[Any] | None:
    return values if any(value is not None for value in values) else None


def _cut(ends: list[Entry]) -> list[Entry]:
    """The first of these, as many as fit into one statement."""
    if not ends:
        return []
    outcomes = [entry.outcome for entry in ends[: plan.MOST_ENDS]]
    sizes = [0 if each is SUCCEEDED else len(each.result or "") + len(each.error or "") for each in outcomes]
    return ends[: plan.batch_size(sizes)]


def _by_worker(*lists: Sequence[Entry]) -> dict[int, list[list[Entry]]]:
    """These lists by the worker id that popped each entry. There is nearly always only one."""
    groups: dict[int, list[list[Entry]]] = {}
    for place, items in enumerate(lists):
        for item in items:
            group = groups.get(item.worker_id)
            if group is None:  # setdefault would make new lists for each task
                group = groups[item.worker_id] = [[] for _ in lists]
            group[place].append(item)
    return groups


# --- The transaction -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def one_transaction(conn: psycopg.AsyncConnection[Any], on_terms: bool) -> AsyncIterator[None]:
    """A pipeline, which is one transaction. `on_terms` sets its isolation level and timeout explicitly."""
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
