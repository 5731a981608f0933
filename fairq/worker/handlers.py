"""Runs handlers: async ones on the loop, sync ones in daemon threads.

A handler may raise anything, hang, call sys.exit, cancel itself or block its thread. In any case `ended` is
called once for each `Entry`, on the loop.

To save objects, one coroutine runs one async handler after the other as long as they do not wait. A handler
that waits keeps that coroutine's asyncio task for itself, as `asyncio.current_task()` requires.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from fairq.around import Runner
from fairq.batch import Batch
from fairq.dsn import clean
from fairq.errors import Cancelled, ResultNotEncodable, TaskTimeout
from fairq.outcome import Outcome, outcome_of
from fairq.queries.workers import TurnRow
from fairq.task import Task, checked
from fairq.worker import log

if TYPE_CHECKING:
    from fairq.worker.outbox import Outbox

Stop = Literal["cancelled", "timeout", "shutdown"]
Kind = Task[Any, ..., Any]

SUCCEEDED: Final = Outcome("succeeded")
# Compared by identity. The attempt never began, so it is given back, not ended.
RELEASE: Final = Outcome("released")
INTERRUPTED: Final = Outcome("interrupted")
# In characters. PostgreSQL's messages are limited.
LONGEST_RESULT: Final = 64 * 1024 * 1024
# How long handlers may run one after the other before other asyncio tasks get a turn.
SLICE_SECONDS: Final = 0.001


class Entry:
    """One popped task until its end is written."""

    # Defaults on the class, because most entries change few of these.
    batch: Together | None = None
    run: Runner | None = None
    ctx: Any = None
    runner: asyncio.Task[Any] | None = None
    thread: threading.Thread | None = None
    timer: asyncio.TimerHandle | None = None
    claimed_until = 0.0
    checked = 0
    stop: Stop | None = None
    begun_at: float | None = None
    ended = False
    overdue = False
    abandoned = False
    outcome: Any = None
    """How the attempt ended, while not written yet."""
    refused: Outcome | None = None
    """The outcome that the database refused."""

    def __init__(self, row: TurnRow, worker_id: int, outbox: Outbox, task: Kind | None) -> None:
        self.row: Any = row
        self.worker_id = worker_id
        self.outbox = outbox
        self.task = task

    def __repr__(self) -> str:
        row = self.row
        names = clean(f"{row.group_key}, queue {row.queue}, kind {row.kind}")
        return f"task {row.id} of {names} (attempt {row.attempt} of {row.max_attempts})"

    def facts(self) -> dict[str, Any]:
        """The facts in a log line about it."""
        row = self.row
        ran = None if self.begun_at is None else round(time.perf_counter() - self.begun_at, 3)
        return {
            "queue": row.queue,
            "group": row.group_key,
            "user": row.user_key,
            "kind": row.kind,
            "task_id": row.id,
            "attempt": row.attempt,
            "worker": self.worker_id,
            "duration": ran,
        }


class Together(Entry):
    """Tasks that share one call of their handler. What happens to the call is recorded for each."""

    def __init__(self, entries: list[Entry]) -> None:
        first = entries[0]
        self.entries = entries
        super().__init__(first.row, first.worker_id, first.outbox, first.task)
        self.row = replace(first.row, payload=[each.row.payload for each in entries])
        self.run, self.ctx = first.run, Batch([each.ctx for each in entries])
        for each in entries:
            each.batch = self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("begun_at", "runner", "thread"):
            for each in self.entries:
                setattr(each, name, value)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "group": None, "user": None, "task_id": None, "attempt": None}


def whereabouts(thread: threading.Thread | None) -> str:
    """What a thread is doing, innermost call first."""
    if thread is None:
        return "the event loop"
    frame = sys._current_frames().get(thread.ident or 0)
    calls = traceback.extract_stack(frame, 3)[::-1] if frame is not None else []
    return f"thread {thread.name}: " + ", called from ".join(
        f"{each.filename}:{each.lineno} in {each.name}" for each in calls
    )


# The entry whose handler is running, for the handler's own log lines.
RUNNING: contextvars.ContextVar[Entry] = contextvars.ContextVar("fairq_running")


Ended = Callable[[Entry, BaseException | None, Any], None]


def _end_child(pid: int, error: BaseException | None) -> None:
    """A handler forked, and its child returned or exits. It is no worker, though it has our sockets."""
    if os.getpid() == pid:
        return
    code = error.code if isinstance(error, SystemExit) else error is not None
    os._exit(code if isinstance(code, int) else code is not None)


def conclude(entry: Entry, exception: BaseException | None, result: Any) -> Outcome:
    """How the attempt ends, from what the handler raised or returned, and whether it was told to stop."""
    task = entry.task
    if exception is None:
        if task is not None and not task.store_result:
            return SUCCEEDED
        outcome = outcome_of(None, task, entry.row.attempt, result=result)
        if len(outcome.result or "") <= LONGEST_RESULT:
            return outcome
        exception = ResultNotEncodable(
            f"the result is longer than {LONGEST_RESULT} characters",
            "Store it elsewhere, and return its place.",
        )
    heeded = isinstance(exception, asyncio.CancelledError | Cancelled)
    if entry.stop == "shutdown" and heeded:
        return RELEASE if entry.begun_at is None else INTERRUPTED
    if entry.stop == "timeout" and (heeded or isinstance(exception, TimeoutError)):
        exception = timed_out(entry)
    elif entry.stop == "cancelled":
        exception = Cancelled("somebody cancelled the task while it ran")
    elif isinstance(exception, asyncio.CancelledError):
        # Nobody told it to stop. Something that it awaited was cancelled, which is an ordinary failure.
        own = RuntimeError("something that the handler awaited was cancelled")
        own.__cause__ = exception
        exception = own
    return outcome_of(exception, task, entry.row.attempt)


def timed_out(entry: Entry) -> TaskTimeout:
    return TaskTimeout(f"the handler of {entry.row.kind!r} took longer than {seconds_of(entry):g} s")


def seconds_of(entry: Entry) -> float | None:
    """How long the attempt may take: the task's own timeout, else the handler's."""
    own = entry.row.timeout
    if own is not None:
        return float(own.total_seconds())
    return None if entry.task is None else entry.task.timeout


# --- On the loop -----------------------------------------------------------------------------------


class Loopside:
    """Runs async handlers. `add` entries, then `go`. Calls `drained` when the last one in line begins."""

    def __init__(self, ended: Ended, drained: Callable[[], None]) -> None:
        self._ended = ended
        self._drained = drained
        self._ready: deque[Entry] = deque()
        self._coming = False
        self._alive: set[asyncio.Task[None]] = set()
        self._pid = os.getpid()
        # Each handler starts with the context variables of the worker's start, not with another handler's.
        self._base = contextvars.copy_context()

    def __len__(self) -> int:
        """How many are in line."""
        return len(self._ready)

    def add(self, entry: Entry) -> None:
        self._ready.append(entry)

    def go(self) -> None:
        if self._ready and not self._coming:
            self._coming = True
            runner = asyncio.get_running_loop().create_task(self._run(), context=self._base.copy())
            self._alive.add(runner)
            runner.add_done_callback(self._alive.discard)

    def take_back(self) -> list[Entry]:
        """Remove and return those that have not begun."""
        waiting = list(self._ready)
        self._ready.clear()
        return [each for one in waiting for each in (one.entries if isinstance(one, Together) else (one,))]

    async def _run(self) -> None:
        """Run handlers one after the other. When one waits, a new asyncio task takes over the rest."""
        self._coming = False
        me = asyncio.current_task()
        assert me is not None
        ready, ended, clock = self._ready, self._ended, time.perf_counter
        clean = contextvars.copy_context()
        until = clock() + SLICE_SECONDS
        while ready:
            entry = ready.popleft()
            if not ready:
                self._drained()
            elif not self._coming:
                self.go()
            result: Any = None
            error: BaseException | None = None
            token = RUNNING.set(entry)
            try:
                if entry.stop is not None:
                    raise Cancelled("told to stop before it began")
                entry.begun_at = clock()
                entry.runner = me
                run = entry.run
                assert run is not None
                result = await run(entry.row.payload, entry.ctx)
                if result is not None:
                    checked(result)
            except BaseException as exc:  # also SystemExit and KeyboardInterrupt, which the handler raised
                error = exc
            _end_child(self._pid, error)
            entry.runner = None
            RUNNING.reset(token)
            ended(entry, error, result)
            # Neither a cancellation nor a context variable of one handler may reach the next.
            if me.cancelling() or clock() > until or contextvars.copy_context() != clean:
                break
        self.go()


# --- In threads ------------------------------------------------------------------------------------


class Threads:
    """Runs sync handlers, in threads that are made as needed. A hanging handler holds up no other.

    Threads are daemons, so that the process can end although a handler does not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
        self._loop = loop
        self._ended = ended
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._done: deque[tuple[Entry, BaseException | None, Any]] = deque()
        self._signalled = False
        self._made = 0
        self._pid = os.getpid()
        self._base = contextvars.copy_context()

    def add(self, entry: Entry) -> None:
        self._queue.put(entry)
        if not self._idle.acquire(blocking=False):
            name = f"fairq-handler-{self._made + 1}"
            try:
                threading.Thread(target=self._run, name=name, daemon=True).start()
            except RuntimeError:  # the system has no more threads: the existing ones run it later
                if not self._made:
                    raise
                log.warning("no_threads", "no more threads than %d", self._made)
            else:
                self._made += 1

    def close(self) -> None:
        """End all threads, busy ones after their handler."""
        for _ in range(self._made):
            self._queue.put(None)

    def _run(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            result: Any = None
            error: BaseException | None = None
            try:
                result = self._base.copy().run(self._call, entry)
            except BaseException as exc:  # sys.exit() in a handler ends the attempt, not the thread
                error = exc
            _end_child(self._pid, error)
            self._idle.release()
            self._tell(entry, error, result)
            del entry, result, error  # so that an idle thread keeps nothing alive

    @staticmethod
    def _call(entry: Entry) -> Any:
        run = entry.run
        assert run is not None
        if entry.stop is not None:
            raise Cancelled("told to stop before it began")
        entry.begun_at = time.perf_counter()
        entry.thread = threading.current_thread()
        RUNNING.set(entry)
        return checked(run(entry.row.payload, entry.ctx))

    def _tell(self, entry: Entry, error: BaseException | None, result: Any) -> None:
        self._done.append((entry, error, result))
        if not self._signalled:
            self._signalled = True
            try:
                self._loop.call_soon_threadsafe(self._collect)
            except RuntimeError:  # the loop is closed; the worker has ended
                log.debug("ended_late", "%r ended after its worker", entry, **entry.facts())

    def _collect(self) -> None:
        self._signalled = False
        done = self._done
        while done:
            self._ended(*done.popleft())
