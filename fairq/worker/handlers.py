"""Running handlers: async ones on the loop, sync ones in daemon threads, whatever they do.

A handler may raise anything, hang, call sys.exit, cancel itself or block its thread. What comes out is
always one call of `ended` for each `Entry`, on the loop.

Few objects per task: an async handler that never waits is run by a coroutine that has run others before it.
One that does wait keeps that coroutine's asyncio task for itself, as everybody expects of
`asyncio.current_task()`.
"""

from __future__ import annotations

import asyncio
import contextvars
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
# Told apart by identity: the attempt is given back, not ended, for it never began.
RELEASE: Final = Outcome("released")
INTERRUPTED: Final = Outcome("interrupted")
# A message to PostgreSQL has its limits; a result is no place for files.
LONGEST_RESULT: Final = 64 * 1024 * 1024
# How long the coroutine that runs ready handlers keeps the loop before others get their turn.
SLICE_SECONDS: Final = 0.001


class Entry:
    """One popped task until its end is written."""

    # On the class, and not set for each task: of most entries few of these ever change.
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
    """How the attempt ended, not written yet; and before the database refused that."""
    refused: Outcome | None = None

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
        """What a line of the log about it has beside its text."""
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
    """Tasks that one call of their handler runs. What is learned of that call is known of each."""

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
    """What a thread is doing, innermost first."""
    if thread is None:
        return "the event loop"
    frame = sys._current_frames().get(thread.ident or 0)
    calls = traceback.extract_stack(frame, 3)[::-1] if frame is not None else []
    return f"thread {thread.name}: " + ", called from ".join(
        f"{each.filename}:{each.lineno} in {each.name}" for each in calls
    )


# Whose handler is running: for the lines that the handler itself writes to the log.
RUNNING: contextvars.ContextVar[Entry] = contextvars.ContextVar("fairq_running")


Ended = Callable[[Entry, BaseException | None, Any], None]


def conclude(entry: Entry, exception: BaseException | None, result: Any) -> Outcome:
    """How the attempt ends, from what the handler raised or returned, and from what it was told to do."""
    task = entry.task
    if exception is None:
        if task is not None and not task.store_result:
            return SUCCEEDED
        outcome = outcome_of(None, task, entry.row.attempt, result=result)
        if len(outcome.result or "") <= LONGEST_RESULT:
            return outcome
        exception = ResultNotEncodable(
            f"the result is longer than {LONGEST_RESULT} characters", "Store it elsewhere, and return where."
        )
    heeded = isinstance(exception, asyncio.CancelledError | Cancelled)
    if entry.stop == "shutdown" and heeded:
        return RELEASE if entry.begun_at is None else INTERRUPTED
    if entry.stop == "timeout" and (heeded or isinstance(exception, TimeoutError)):
        exception = timed_out(entry)
    elif entry.stop == "cancelled":
        exception = Cancelled("somebody cancelled the task while it ran")
    elif isinstance(exception, asyncio.CancelledError):
        # Nobody told it to stop: something that it awaited was cancelled, and that is a failure like any
        # other.
        own = RuntimeError("something that the handler awaited was cancelled")
        own.__cause__ = exception
        exception = own
    return outcome_of(exception, task, entry.row.attempt)


def timed_out(entry: Entry) -> TaskTimeout:
    return TaskTimeout(f"the handler of {entry.row.kind!r} took longer than {seconds_of(entry):g} s")


def seconds_of(entry: Entry) -> float | None:
    """How long the attempt may take: what the task says, else what the handler declares."""
    own = entry.row.timeout
    if own is not None:
        return float(own.total_seconds())
    return None if entry.task is None else entry.task.timeout


# --- On the loop -----------------------------------------------------------------------------------


class Loopside:
    """Async handlers. `add` entries, then `go`. `drained` is called when the last one in line begins."""

    def __init__(self, ended: Ended, drained: Callable[[], None]) -> None:
        self._ended = ended
        self._drained = drained
        self._ready: deque[Entry] = deque()
        self._coming = False
        self._alive: set[asyncio.Task[None]] = set()
        # Handlers start from the surroundings that the worker was started in, not from those of other
        # handlers.
        self._base = contextvars.copy_context()

    def __len__(self) -> int:
        """How many wait for the processor."""
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
        """Those that have not begun."""
        waiting = list(self._ready)
        self._ready.clear()
        return [each for one in waiting for each in (one.entries if isinstance(one, Together) else (one,))]

    async def _run(self) -> None:
        """Run what is ready, one after the other; when a handler waits, a successor takes over the rest."""
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
            except BaseException as exc:  # SystemExit and KeyboardInterrupt too: of a handler, not of ours
                error = exc
            entry.runner = None
            RUNNING.reset(token)
            ended(entry, error, result)
            # Nothing of one handler may reach the next: neither a cancellation nor a context variable.
            if me.cancelling() or clock() > until or contextvars.copy_context() != clean:
                break
        self.go()


# --- In threads ------------------------------------------------------------------------------------


class Threads:
    """Sync handlers. Threads are made when they are needed; one that hangs holds up nobody but itself.

    They are daemons: a process must be able to end although a handler never does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
        self._loop = loop
        self._ended = ended
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._done: deque[tuple[Entry, BaseException | None, Any]] = deque()
        self._signalled = False
        self._made = 0
        self._base = contextvars.copy_context()

    def add(self, entry: Entry) -> None:
        self._queue.put(entry)
        if not self._idle.acquire(blocking=False):
            name = f"fairq-handler-{self._made + 1}"
            try:
                threading.Thread(target=self._run, name=name, daemon=True).start()
            except RuntimeError:  # the system gives no more threads: those that are there do it, one by one
                if not self._made:
                    raise
                log.warning("no_threads", "no more threads than %d", self._made)
            else:
                self._made += 1

    def close(self) -> None:
        """Idle threads end; busy ones after their handler."""
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
            self._idle.release()
            self._tell(entry, error, result)
            del entry, result, error  # an idle thread keeps nothing alive

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
            except RuntimeError:  # the loop is closed; the worker ended without us
                log.debug("ended_late", "%r ended after its worker", entry, **entry.facts())

    def _collect(self) -> None:
        self._signalled = False
        done = self._done
        while done:
            self._ended(*done.popleft())
