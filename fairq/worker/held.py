"""The tasks that a worker holds, from the pop until their end is written. No I/O."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from fairq.around import Runner, around, runner
from fairq.context import Context
from fairq.errors import Fail, FairqError, FinishLost, NotDecodable, ResultNotEncodable, TaskTimeout
from fairq.outcome import Outcome, describe, outcome_of, told
from fairq.queries.workers import TurnRow
from fairq.worker import log
from fairq.worker.connect import explain
from fairq.worker.handlers import (
    INTERRUPTED,
    RELEASE,
    RUNNING,
    Entry,
    Kind,
    Loopside,
    Threads,
    Together,
    conclude,
    seconds_of,
    timed_out,
    whereabouts,
)
from fairq.worker.outbox import Outbox
from fairq.worker.solo import Solo

if TYPE_CHECKING:
    from fairq.worker.engine import Engine

SUSPECTED: Final = Outcome(
    "declined",
    error='{"code": "suspected", "message": "lost with a worker before; here it could not run alone"}',
)


def tell_to_stop(entry: Entry, why: Any) -> None:
    """Set the handler's flag and, on the loop, cancel it."""
    if entry.stop is None:
        entry.stop = why
    if entry.ctx is not None:
        entry.ctx.cancelled.set(why)
    if entry.batch is not None:
        # The call is told only when all of its tasks are to stop.
        if entry.batch.stop is None and all(each.stop for each in entry.batch.entries):
            tell_to_stop(entry.batch, why)
    elif entry.runner is not None:
        entry.runner.cancel()


def convict(entry: Entry, exc: BaseException) -> None:
    """Fail the attempt, because the database refuses its result."""
    error = ResultNotEncodable(f"the database refuses the result: {explain(exc)}"[:500])
    entry.refused, entry.outcome = entry.outcome, Outcome("failed", error=describe(error))
    _log_end(entry, error, entry.outcome)


class Held:
    """Everything happens on the loop, except `progressed`. Ends go to the `Outbox` of the node that the task
    came from.
    """

    def __init__(self, engine: Engine) -> None:
        # Ends may be kept back while handlers are in line; once none is, they are due.
        self.loopside = Loopside(self._ended, engine.wake)
        self.threads = Threads(engine.loop, self._ended)
        # Popped and not ended, by id. `doubles` are older attempts that still run here after a new pop.
        self.by_id: dict[int, Entry] = {}
        self.doubles: set[Entry] = set()
        self.claimed: deque[Entry] = deque()
        self.solo = Solo()
        self.overdue = 0
        self.abandoned = 0
        self._engine = engine
        self._app = engine.app
        self._kinds = dict(engine.app.tasks)
        # By kind: how to run its handler, and whether that needs a context.
        self._runners: dict[str, tuple[Runner, bool]] = {}
        self.state: Any = None
        # This turn's tasks of kinds with batches.
        self._gathered: dict[tuple[Any, ...], list[Entry]] = {}
        self._strangers: set[str] = set()
        self._loop = engine.loop

    @property
    def taken(self) -> int:
        """How many tasks are held, in slots or in the buffer."""
        return len(self.by_id) + len(self.doubles)

    @property
    def may_end(self) -> bool:
        """Whether any held task may still end: not all of them hang."""
        return self.taken > self.overdue

    @property
    def entries(self) -> list[Entry]:
        return [*self.by_id.values(), *self.doubles]

    @property
    def waiting(self) -> int:
        """How many have not begun."""
        return len(self.claimed) + len(self.loopside) + len(self.solo.waiting)

    @property
    def in_flight(self) -> int:
        """How many would be lost with this process, without those that hang."""
        return self.taken - self.overdue - len(self.claimed) - len(self.solo.waiting)

    def known(self, outbox: Outbox) -> set[tuple[int, int]]:
        """Every attempt that this worker knows to hold, as id and number."""
        checks = (entry for _, entry in outbox.checks)
        entries = (*self.by_id.values(), *self.doubles, *checks, *outbox.ends)
        return {(entry.row.id, entry.row.attempt) for entry in entries}

    # --- From the pop to the handler ---

    def take_in(
        self, rows: Iterable[TurnRow], worker_id: int, outbox: Outbox, claimed_until: float | None
    ) -> None:
        """Take popped tasks. With `claimed_until` they wait to be started, else they begin."""
        by_id, kinds = self.by_id, self._kinds
        suspects: list[Entry] = []
        for row in rows:
            entry = Entry(row, worker_id, outbox, kinds.get(row.kind))
            older = by_id.get(row.id)
            if older is not None:
                self.doubles.add(older)
            by_id[row.id] = entry
            if row.losses is not None:
                suspects.append(entry)
            elif claimed_until is None:
                self.begin(entry)
            else:
                entry.claimed_until = claimed_until
                self.claimed.append(entry)
        if suspects or self.solo.waiting:
            for entry in self.solo.admit(suspects, time.monotonic(), self.in_flight - len(suspects)):
                self._close(entry, SUSPECTED)

    def give_back(self, rows: Iterable[TurnRow], worker_id: int, outbox: Outbox) -> None:
        """Give back popped tasks for which there is no slot."""
        for row in rows:
            outbox.write_down(Entry(row, worker_id, outbox, None), RELEASE)

    def to_start_alone(self, outbox: Outbox) -> list[Entry]:
        """The suspect whose turn it is, if it came from this outbox's node."""
        suspect = self.solo.next(time.monotonic(), self.in_flight)
        return [] if suspect is None else self._of(outbox, [suspect])

    def to_start(self, count: int, outbox: Outbox) -> list[Entry]:
        """Of the next `count` claimed tasks, those that came from this outbox's node."""
        return self._of(outbox, [self.claimed[place] for place in range(count)])

    @staticmethod
    def _of(outbox: Outbox, entries: list[Entry]) -> list[Entry]:
        """Those of this outbox. Wake the nodes of the others, so that they start theirs."""
        for other in {entry.outbox for entry in entries} - {outbox}:
            other.wake()
        return [entry for entry in entries if entry.outbox is outbox]

    def give_suspects_back(self) -> None:
        """Give back suspects that waited too long for the other tasks to end."""
        for entry in self.solo.give_up(time.monotonic()):
            self._close(entry, SUSPECTED)

    def drop_late_claims(self, now: float) -> None:
        """Drop tasks whose claim has expired."""
        while self.claimed and self.claimed[0].claimed_until <= now:
            self._let_go(self.claimed.popleft())

    def drop_claims(self, outbox: Outbox) -> None:
        for entry in [*self.claimed, *self.solo.waiting]:
            if entry.outbox is outbox:
                self._let_go(entry)
        self.claimed = deque(entry for entry in self.claimed if not entry.ended)

    def give_claims_back(self, outbox: Outbox) -> None:
        """Give back claimed tasks, because their database does not answer whether they may start."""
        for entry in [*self.claimed, *self.solo.waiting]:
            if entry.outbox is outbox:
                outbox.write_down(entry, RELEASE)
        self.drop_claims(outbox)

    def started(self, entry: Entry, *, ours: bool) -> None:
        """The answer to the start of a claimed task: whether it is still ours."""
        if entry in self.claimed:
            self.claimed.remove(entry)
        elif ours:
            log.info("alone", "%r was lost with its worker before: it runs alone", entry, **entry.facts())
            self.solo.begin(entry)
        if ours:
            self.begin(entry)
        else:
            log.info(
                "not_started", "%r was not started: its claim or its deadline is over", entry, **entry.facts()
            )
            self._let_go(entry)

    def begin(self, entry: Entry) -> None:
        """Run its handler, or put it in line."""
        if log.logger.isEnabledFor(logging.DEBUG):
            log.debug("task_started", "%r starts", entry, **entry.facts())
        task = entry.task
        if task is None:
            try:
                task = self._app[entry.row.kind]
            except FairqError as exc:
                if entry.row.kind not in self._strangers:
                    self._strangers.add(entry.row.kind)
                    text = "%s; its tasks are given back, after growing pauses (logged once)"
                    log.warning("unknown_kind", text, exc, **entry.facts())
                self._ended(entry, exc, None)
                return
            entry.task = task  # declared after the worker started
        row, most = entry.row, task.options.get("max_attempts")
        if most is not None and row.max_attempts - (row.spared or 0) > most:
            row = entry.row = replace(row, max_attempts=most + (row.spared or 0))
            if row.attempt > row.max_attempts:
                used_up = Fail(f"it has used the {most} attempts that its handler now declares")
                self._ended(entry, used_up, None)
                return
        known = self._runners.get(row.kind)
        if known is None:
            known = self._runners[row.kind] = self._runner(task)
        entry.run, needs_context = known
        if needs_context:
            try:
                ctx = entry.ctx = Context.of(entry.row, entry.worker_id, self.progressed, self.state)
            except Exception as exc:  # headers that are not an object
                self._ended(entry, exc, None)
                return
        seconds = seconds_of(entry)
        if seconds is not None:
            entry.timer = self._loop.call_later(seconds, self._time_is_up, entry)
            if entry.ctx is not None:
                begun_at = row.started_at or datetime.now(UTC)
                ctx.deadline = begun_at + (row.timeout or timedelta(seconds=seconds))
        if task.batch is not None:
            self._gathered.setdefault((row.queue, row.kind, row.timeout, entry.worker_id), []).append(entry)
        elif task.is_async:
            self.loopside.add(entry)
        else:
            self.threads.add(entry)

    def go(self) -> None:
        """Start what the turn brought, batches included."""
        for entries in self._gathered.values():
            task = entries[0].task
            assert task is not None
            add, most = (self.loopside if task.is_async else self.threads).add, task.batch or 1
            fresh = []
            for each in entries:
                if each.row.attempt - (each.row.spared or 0) > 1:
                    add(Together([each]))  # alone, because another task of its batch may have failed it
                else:
                    fresh.append(each)
            for at in range(0, len(fresh), most):
                add(Together(fresh[at : at + most]))
        self._gathered.clear()
        self.loopside.go()

    def _runner(self, task: Kind) -> tuple[Runner, bool]:
        middleware = self._app.middleware
        needs_context = (
            task.wants_context
            or task.session is not None
            or task.batch is not None
            or bool(around(task, middleware))
        )
        return runner(task, middleware), needs_context

    def progressed(self, ctx: Context) -> None:
        """From the handler's thread."""
        entry = self.by_id.get(ctx.id)
        if entry is not None and entry.ctx is ctx and entry.outbox.report(entry):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(entry.outbox.wake)

    # --- How it ends ---

    def _ended(self, entry: Entry, exception: BaseException | None, result: Any) -> None:
        """The handler has ended. Called once for each entry that began, on the loop."""
        if isinstance(entry, Together):
            ends = {ctx.id: end for ctx, *end in entry.ctx.all_ended(exception, result)}
            for each in entry.entries:
                self._ended(each, *ends[each.row.id])
            return
        if entry.timer is not None:
            entry.timer.cancel()
        self.overdue -= entry.overdue
        if entry.abandoned:
            self.abandoned -= 1
            return
        if entry.ended:
            return
        self._let_go(entry)
        ctx = entry.ctx
        if ctx is not None and ctx.finished_in and exception is None:
            entry.outbox.check(entry)
            return
        outcome = _account(entry, exception, lambda: conclude(entry, exception, result))
        entry.outbox.write_down(entry, outcome)

    def _let_go(self, entry: Entry) -> None:
        """Free its slot."""
        entry.ended = True
        if entry.ctx is not None:
            entry.ctx.over = True
        if self.by_id.get(entry.row.id) is entry:
            del self.by_id[entry.row.id]
        else:
            self.doubles.discard(entry)
        entry.outbox.reports.pop(entry.row.id, None)
        self.solo.drop(entry, time.monotonic())

    def _close(self, entry: Entry, outcome: Outcome) -> None:
        self._let_go(entry)
        entry.outbox.write_down(entry, outcome)

    def checked(self, entries: Sequence[Entry], ids: list[int]) -> None:
        """The answer for attempts that handlers ended themselves: those still held were rolled back."""
        there = set(ids)
        now = time.monotonic()
        for entry in entries:
            if entry.row.id in there:
                lost = FinishLost("the transaction of ctx.finish_in() rolled back")
                entry.outbox.write_down(entry, _failed(entry, lost))
            else:
                entry.outbox.check_again(entry, now)

    # --- Before its time ---

    def cancel(self, ids: list[int]) -> None:
        """Cancel these, as somebody asked."""
        for id in ids:
            entry = self.by_id.get(id)
            if entry is None or entry.stop is not None:
                continue
            if entry in self.claimed:
                self.claimed.remove(entry)
            elif entry not in self.solo.waiting:
                tell_to_stop(entry, "cancelled")
                continue
            self._close(entry, Outcome("cancelled"))

    def _time_is_up(self, entry: Entry) -> None:
        if not entry.ended:
            tell_to_stop(entry, "timeout")
            entry.timer = self._loop.call_later(self._engine.settings.hanging_after, self._hangs, entry)

    def _hangs(self, entry: Entry) -> None:
        """It was told to stop and did not. It keeps its slot, its key and its task, which must not run twice
        at once. When as many hang as there are slots, the worker ends.
        """
        if entry.ended:
            return
        entry.overdue = True
        self.overdue += 1
        log.error(
            "hanging",
            "%r ignores its timeout and keeps its slot, %d of %d; %s",
            entry,
            self.overdue,
            self._engine.slots,
            whereabouts(entry.thread),
            **entry.facts(),
        )
        if self.overdue >= self._engine.slots:
            self._engine.stuck()
        self._engine.wake()

    def blamed(self, outbox: Outbox) -> list[Entry]:
        """The entries that block the loop, to be ended; if that cannot be told, all on the loop. From a
        keeper's thread.
        """
        current = asyncio.current_task(self._loop)
        context = getattr(current, "get_context", None)  # Python 3.12: also of a task that a handler made
        running = context().get(RUNNING) if context is not None else None
        on_loop = [entry for entry in self.entries if entry.runner is not None]
        found = [
            each
            for each in on_loop
            if each.runner is current or (running is not None and running in (each, each.batch))
        ]
        late = TaskTimeout("the handler blocked the event loop for longer than the worker's lease")
        # Copies, because the loop may run again and end the originals itself.
        ours = [copy(entry) for entry in found or on_loop if entry.outbox is outbox]
        for entry in ours:
            entry.outcome = _failed(entry, late)
        return ours

    # --- The end ---

    def release_waiting(self) -> None:
        """Give back what has not begun."""
        for entry in (*self.claimed, *self.solo.waiting, *self.loopside.take_back()):
            if entry.timer is not None:
                entry.timer.cancel()
            self._close(entry, RELEASE)
        self.claimed.clear()

    def release_running(self) -> None:
        """Give back what still runs, whatever its handler does. What hangs has used its attempt."""
        for entry in self.entries:
            entry.abandoned = True
            self.abandoned += 1
            log.warning(
                "left_behind", "%r is left behind; %s", entry, whereabouts(entry.thread), **entry.facts()
            )
            outcome = RELEASE if entry.begun_at is None else INTERRUPTED
            if entry.overdue:
                outcome = _failed(entry, timed_out(entry))
            self._close(entry, outcome)


def _failed(entry: Entry, exception: Exception) -> Outcome:
    return _account(entry, exception, lambda: outcome_of(exception, entry.task, entry.row.attempt))


def _account(entry: Entry, exception: BaseException | None, judge: Callable[[], Outcome]) -> Outcome:
    """The outcome from `judge`, logged; a retry if that fails, so that an end is always written."""
    try:
        outcome = judge()
        if outcome.retry_delay is not None:
            _ = outcome.delay
    except Exception as exc:  # for example, the delay is no number
        outcome = Outcome("retry", error=describe(RuntimeError(f"no outcome: {type(exc).__name__}")))
    _log_end(entry, exception, outcome)
    return outcome


def _log_end(entry: Entry, exception: BaseException | None, outcome: Outcome) -> None:
    """Log the end: a final failure as an error with its traceback, a retry as a warning that says when."""
    name, what_next = outcome.outcome, ""
    if name == "succeeded" and not log.logger.isEnabledFor(logging.DEBUG):
        return
    row = entry.row
    tried_only_once = row.max_attempts - (row.spared or 0) == 1
    if outcome is RELEASE:
        level, action, text = logging.DEBUG, "task_released", "was given back"
    elif (
        name == "failed"
        or (name == "retry" and row.attempt >= row.max_attempts)
        or (name == "interrupted" and tried_only_once)
    ):
        level, action, text = logging.ERROR, "task_failed", "failed for good"
    elif name == "retry":
        delay = outcome.retry_delay
        pause = "after the queue's back-off" if delay is None else f"in {delay:.1f} s"
        level, action, text, what_next = logging.WARNING, "task_retry", "failed", f"; next attempt {pause}"
    else:
        level = logging.INFO if name == "cancelled" else logging.DEBUG
        action, text = f"task_{name}", name
    facts = entry.facts()
    if facts["duration"] is not None:
        text = f"{text} after {facts['duration']:.3f} s"
    text += what_next
    shows_why = level == logging.ERROR or (
        level == logging.WARNING and log.logger.isEnabledFor(logging.DEBUG)
    )
    if level >= logging.WARNING and outcome.error:
        why = told(json.loads(outcome.error))[:500]
        if isinstance(exception, NotDecodable):
            # Its message quotes the payload, which must not go into a log.
            why, shows_why = f"{exception.code}: {exception.path} does not fit; fairq explain {row.id}", False
        text = f"{text}: {why}"
    log.at(level, action, "%r %s", entry, text, exc_info=exception if shows_why else None, **facts)
