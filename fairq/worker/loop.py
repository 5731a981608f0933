"""The worker: turns on one connection, and everything that happens between them.

One turn is one round trip and one transaction: what ended is written, what is to start is started, and as
many tasks are popped as there is room for. Turns follow each other; handlers run while one is on its way.
Either all of a turn happens or nothing, so a turn that fails is made again, and what ended stays here until
it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType
from typing import Any, Final

import psycopg

from fairq import install
from fairq.app import App, Context, Outcome, describe, outcome_of
from fairq.codec import encode
from fairq.dsn import describe as describe_dsn
from fairq.dsn import mask, resolve
from fairq.errors import (
    ConfigurationError,
    FairqError,
    FinishLost,
    ResultNotEncodable,
    Unavailable,
    sqlstate_of,
)
from fairq.queries import driver, workers
from fairq.worker import breaker as circuit
from fairq.worker import plan
from fairq.worker.config import Limits, Settings, banner, limits, poll_interval, problems
from fairq.worker.connect import (
    FAILURES,
    conninfo,
    explain,
    is_about_data,
    is_unknown_worker,
    is_worth_a_try,
)
from fairq.worker.handlers import RELEASE, Entry, Loopside, Threads, conclude, seconds_of, timed_out
from fairq.worker.keeper import Keeper, KeeperPlan
from fairq.worker.listen import TEST_SECONDS, Listener

__all__ = ["Stuck", "Worker"]

log = logging.getLogger("fairq.worker")

# What a worker tells about itself; the command line prints it.
Announce = Callable[[str], None]

# Handlers that were told to stop get this long to do so before their tasks are given back.
UNWIND_SECONDS: Final = 1.0
# How long a worker that ends tries to write what has ended.
FLUSH_SECONDS: Final = 10.0
# Reports of progress are written at most this often.
REPORT_SECONDS: Final = 1.0
# When to look again whether a connection that broke left tasks behind that we were given and never got.
RECONCILE_AFTER: Final = (0.0, 10.0, 60.0)
# When to look again whether a handler's own transaction ended its task.
CHECK_AGAIN_AFTER: Final = (0.2, 10.0)
PULSE_SECONDS: Final = 0.5
# A loop that stands still past the grace time is ended by the keeper after so long.
LAST_RESORT_SECONDS: Final = 5.0


class Stuck(FairqError):
    """As many handlers hang as there are slots. A fresh process can work, this one cannot."""

    code = "stuck"
    exit_code = 1


@dataclass(frozen=True, slots=True)
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


class Worker:
    """Runs the tasks of an app.

        Worker(app, "postgresql://…", queues=["mail"], concurrency=20).run()

    `options` are those of `Settings`. Everything that is wrong with them is raised at once, before anything
    is connected.
    """

    def __init__(
        self,
        app: App,
        dsn: str | None = None,
        *,
        settings: Settings | None = None,
        announce: Announce | None = None,
        also_wrong: Sequence[str] = (),
        **options: Any,
    ) -> None:
        settings = _settings(settings, options)
        self.app = app
        self.settings = settings
        self.queues: tuple[str, ...] = settings.queues or tuple(app.queues) or ("default",)
        found = [*also_wrong, *problems(settings)]
        if not tuple(app):
            found.append("the app has no tasks: import the modules that declare them")
        found += app.problems()
        self.dsn = ""
        try:
            self.dsn = resolve(dsn)
            if settings.listen_dsn:
                resolve(settings.listen_dsn)
        except FairqError as exc:
            found.append(str(exc))
        if found:
            raise ConfigurationError(
                "this worker cannot start:\n" + "\n".join(f"  - {mask(each)}" for each in found),
                "Every option is explained by: fairq work --help",
            )
        self._announce = announce or (lambda line: log.info("%s", line))
        self._engine: _Engine | None = None
        self._stop_level = 0
        self._owns_process = False
        self.left_behind = 0
        """After the end: handlers that would not stop and are still running, in threads of this process."""

    def stop(self, *, now: bool = False) -> None:
        """End: let handlers finish within the grace time, or give back everything at once. From any
        thread.
        """
        self._stop_level = max(self._stop_level, 2 if now else 1)
        engine = self._engine
        if engine is not None:
            engine.request_stop(self._stop_level)

    async def arun(self) -> None:
        """Run on the loop that is running, until `stop`, or until the mode says that it is done."""
        if self._engine is not None:
            raise ConfigurationError("this worker is running already")
        engine = self._engine = _Engine(
            self.app, self.dsn, self.settings, self.queues, self._announce, self._owns_process
        )
        if self._stop_level:
            engine.request_stop(self._stop_level)
        try:
            await engine.run()
        finally:
            self.left_behind = engine.abandoned
            self._engine = None

    def run(self, *, handle_signals: bool = False) -> None:
        """Run on a loop of its own, until it ends.

        With `handle_signals`, which works in the main thread only: TERM and INT end it gracefully, a second
        one or QUIT at once. The process then is the worker's: it is ended when a handler holds up the end
        for good.
        """
        self._owns_process = handle_signals
        with contextlib.ExitStack() as stack:
            if handle_signals:
                stack.enter_context(_signals(self._signalled))
            loop = asyncio.new_event_loop()
            try:
                asyncio.set_event_loop(loop)
                self._run_on(loop)
            finally:
                asyncio.set_event_loop(None)
                loop.close()

    def _run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        main = loop.create_task(self.arun(), name="fairq-worker")
        while True:
            try:
                loop.run_until_complete(main)
                break
            except (SystemExit, KeyboardInterrupt) as exc:
                if main.done():
                    raise
                # asyncio lets these two fall through the loop when they come out of a task that a handler
                # made.
                if isinstance(exc, KeyboardInterrupt):
                    self.stop(now=self._stop_level > 0)
                else:
                    log.error("a task of a handler called sys.exit(%s); it is ignored", exc.code)
        leftover = asyncio.all_tasks(loop)
        for each in leftover:
            each.cancel()
        if leftover:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait(leftover, timeout=UNWIND_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = number == signal.SIGQUIT or self._stop_level > 0
        self.stop(now=now)


def _settings(settings: Settings | None, options: dict[str, Any]) -> Settings:
    if settings is not None:
        if options:
            raise ConfigurationError("a worker takes settings or options, not both")
        return settings
    if isinstance(options.get("queues"), list):
        options = {**options, "queues": tuple(options["queues"])}
    try:
        return Settings(**options)
    except TypeError:
        known = set(Settings.__dataclass_fields__)
        strange = ", ".join(sorted(set(options) - known))
        raise ConfigurationError(
            f"a worker has no option {strange}", f"Options: {', '.join(sorted(known))}"
        ) from None


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Any:
    """TERM, INT and QUIT go to `handler`, which also runs while a handler blocks the loop."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("signals can be handled in the main thread only")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class _Engine:
    """The state of one run. Everything happens on the loop, but for what says otherwise."""

    def __init__(
        self,
        app: App,
        dsn: str,
        settings: Settings,
        queues: tuple[str, ...],
        announce: Announce,
        owns_process: bool,
    ) -> None:
        self.app = app
        self.kinds = dict(app.tasks)
        self.settings = settings
        self.limits: Limits = limits(settings)
        self.queues = queues
        self.dsn = dsn
        self.announce = announce
        self.owns_process = owns_process
        self.name = settings.name or f"{socket.gethostname()}:{os.getpid()}"[:200]
        self.conninfo = conninfo(dsn, "fairq worker")
        self.claim_lease = None if settings.claim_lease is None else timedelta(seconds=settings.claim_lease)
        self.loop = asyncio.get_running_loop()

        self.conn: psycopg.AsyncConnection[Any] | None = None
        self.asks_for_isolation = False
        self.worker_id: int | None = None
        self.keeper: Keeper | None = None
        self.listener: Listener | None = None

        # Popped and not ended, by id; `doubles` were popped again while an older attempt still runs here.
        self.held: dict[int, Entry] = {}
        self.doubles: set[Entry] = set()
        self.claimed: deque[Entry] = deque()
        self.abandoned = 0
        # Ended and not written.
        self.ends: list[End] = []
        self.releases: list[Entry] = []
        self.checks: list[Entry] = []
        self.later_checks: list[tuple[float, Entry]] = []
        self.reports: dict[int, Entry] = {}
        self.report_at = 0.0

        self.wake = asyncio.Event()
        self.loopside = Loopside(self._ended)
        self.threads = Threads(self.loop, self._ended)
        self.pulse = time.monotonic()

        # When to look for work.
        self.hungry = True
        self.rings = 0
        self.empties = 0
        self.look_at = 0.0
        self.was_full = False
        self.looked = False
        self.nothing_left = False
        # Ends and pops apart: a turn with both failed, and not for want of a database.
        self.apart = False
        # When to look for tasks that a broken connection left behind, and what was in that turn.
        self.reconcile_at: list[float] = []

        self.failures = 0
        self.not_before = 0.0
        self.breaker = circuit.Breaker(settings.breaker_threshold, settings.breaker_cooldown_ms / 1000)

        self.stop_level = 0
        self.stop_at: float | None = None
        self.fatal: FairqError | None = None

    # --- From other threads ---

    def request_stop(self, level: int) -> None:
        """From any thread, and from a signal handler."""
        if level <= self.stop_level:
            return
        self.stop_level = level
        if self.stop_at is None or level == 2:
            self.stop_at = time.monotonic() + (self.settings.grace if level == 1 else 0.0)
        self._call(self.wake.set)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody needs it any more
            self.loop.call_soon_threadsafe(function, *args)

    def _may_connect(self) -> bool:
        return self.breaker.state == "closed"

    def _give_up_at(self) -> float | None:
        if not self.owns_process or self.stop_at is None:
            return None
        return self.stop_at + LAST_RESORT_SECONDS

    def _give_up(self) -> None:
        log.error(
            "a handler blocks the loop, or the database hangs, past the grace time; the process ends now",
            extra={"action": "gave_up"},
        )
        logging.shutdown()
        os._exit(Stuck.exit_code)

    def _progressed(self, ctx: Context) -> None:
        """In the handler's thread, so that what cannot be written is its own error."""
        progress = ctx.last_progress
        if progress is not None:
            float(progress.done), driver.maybe(float, progress.total)
        entry = self.held.get(ctx.id)
        if entry is not None and entry.ctx is ctx:
            first = not self.reports
            self.reports[ctx.id] = entry
            if first:
                self._call(self.wake.set)

    # --- The run ---

    async def run(self) -> None:
        pulse = asyncio.create_task(self._beat_pulse(), name="fairq-pulse")
        try:
            if await self._start():
                await self._work()
                await self._wind_down()
        except BaseException:
            # Somebody ends us on his own loop, the database failed too often, or this is a mistake of ours:
            # give back what we can, quickly.
            self.stop_level = 2
            self.stop_at = time.monotonic()
            with contextlib.suppress(Exception):
                await asyncio.shield(self._wind_down())
            raise
        finally:
            await self._close(pulse)
        if self.fatal is not None:
            raise self.fatal

    async def _beat_pulse(self) -> None:
        while True:
            self.pulse = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)

    async def _start(self) -> bool:
        """Connect, look at the database, register, listen. False: told to stop before that succeeded."""
        while not self.stop_level:
            if not await self._pause_over():
                continue
            try:
                conn = await self._connected()
                await install.acheck_version(conn)
                await self._check_caps(conn)
                await self._register(conn)
                self._succeeded()
                break
            except FAILURES as exc:
                if isinstance(exc, psycopg.Error) and exc.sqlstate and not is_worth_a_try(exc):
                    raise explain(exc) from exc
                self._failed(exc, "to start")
                await self._disconnect()
        else:
            return False
        self._start_keeper()
        await self._start_listening()
        assert self.worker_id is not None
        self.announce(
            banner(self.worker_id, self.queues, self.settings, self.limits, listening=self._is_listening())
        )
        return True

    async def _check_caps(self, conn: psycopg.AsyncConnection[Any]) -> None:
        if not self.settings.prefetch:
            return
        cap = await workers.cluster_cap_async(conn)
        if cap is not None:
            raise ConfigurationError(
                f"prefetch cannot be used together with the cluster cap of {cap}: tasks that wait in a"
                " buffer would take up places and do nothing",
                "Leave out --prefetch and --claim-lease, or lift the cap with fairq.configure_cluster().",
            )

    async def _register(self, conn: psycopg.AsyncConnection[Any]) -> None:
        if self.worker_id is None:
            self.worker_id = await workers.register_worker_async(
                conn,
                name=self.name,
                queues=self.queues,
                slots=self.limits.slots,
                lease=timedelta(seconds=self.settings.lease),
            )
            log.debug("registered as worker %d", self.worker_id, extra={"action": "registered"})

    def _start_keeper(self) -> None:
        settings = self.settings
        self.keeper = Keeper(
            KeeperPlan(
                conninfo=conninfo(self.dsn, "fairq keeper"),
                heartbeat=self.limits.heartbeat,
                lease=settings.lease,
                maintain_every=settings.maintain_interval_ms / 1000,
                maintain_at_once=settings.mode != "forever",
                first_pause=settings.db_retry_initial_ms / 1000,
                longest_pause=min(settings.db_retry_max_ms / 1000, settings.lease / 6),
            ),
            worker_ids=lambda: [] if self.worker_id is None else [self.worker_id],
            may_connect=self._may_connect,
            pulse=lambda: self.pulse,
            cancel=lambda ids: self._call(self._cancel, ids),
            lost=lambda worker_id: self._call(self._lost, worker_id),
            give_up_at=self._give_up_at,
            give_up=self._give_up,
        )
        self.keeper.start()

    # --- Waking up ---

    def _is_listening(self) -> bool:
        return self.listener is not None and self.listener.is_listening

    def _rung(self) -> None:
        """There may be work. However many notices come, the next turn looks once."""
        self.rings += 1
        self.hungry = True
        self.wake.set()

    async def _start_listening(self) -> None:
        settings = self.settings
        if not settings.listen or settings.mode != "forever":
            return
        dsn = resolve(settings.listen_dsn) if settings.listen_dsn else self.dsn
        listener = Listener(
            conninfo(dsn, "fairq listen"),
            self.queues,
            self._rung,
            may_connect=self._may_connect,
            first_pause=settings.db_retry_initial_ms / 1000,
            longest_pause=settings.db_retry_max_ms / 1000,
        )
        listener.start()
        self.listener = listener
        if not await _within(TEST_SECONDS, listener.connected.wait()):
            return  # it goes on trying; meanwhile the worker polls
        try:
            assert self.conn is not None
            await self.conn.execute("select pg_catalog.pg_notify(%s, '')", [listener.test_channel])
        except FAILURES:
            return
        if not await _within(TEST_SECONDS, listener.heard.wait()):
            log.warning(
                "LISTEN on %s is accepted but hears nothing, as behind a pooler that hands out connections by"
                " transaction; the worker polls."
                " Name a way around the pooler with --listen-dsn, or say --no-listen",
                describe_dsn(dsn),
                extra={"action": "listen_silent"},
            )
            await listener.close()
            self.listener = None

    # --- The database comes and goes ---

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        conn = self.conn
        if conn is None or conn.closed:
            self.conn = None
            conn = await psycopg.AsyncConnection.connect(
                self.conninfo, autocommit=True, prepare_threshold=None
            )
            self.conn = conn
            # The engine needs READ COMMITTED. Where a role or a database says otherwise, each turn says so
            # itself.
            found = await (await conn.execute("show default_transaction_isolation")).fetchone()
            self.asks_for_isolation = found is not None and found[0] != "read committed"
        return conn

    async def _disconnect(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            with contextlib.suppress(*FAILURES):
                await conn.close()

    def _succeeded(self) -> None:
        if self.failures:
            log.info("the database is back", extra={"action": "database_back"})
        self.failures = 0
        self.not_before = 0.0
        self.breaker = circuit.succeeded(self.breaker)

    def _failed(self, exc: BaseException, what: str) -> None:
        now = time.monotonic()
        before = self.breaker.state
        self.breaker = circuit.failed(self.breaker, now)
        self.failures += 1
        settings = self.settings
        pause = plan.retry_delay(
            self.failures, settings.db_retry_initial_ms / 1000, settings.db_retry_max_ms / 1000
        )
        self.not_before = now + pause
        error = explain(exc)
        log.warning(
            "failed %s, %d times in a row: %s",
            what,
            self.failures,
            error,
            extra={"action": "database_failed"},
        )
        if self.breaker.state == "open" and before != "open":
            log.warning(
                "[circuit open] the database is left alone for %.0f s",
                self.breaker.cooldown,
                extra={"action": "circuit_open"},
            )
        if settings.db_retry_max_attempts and self.failures >= settings.db_retry_max_attempts:
            raise Unavailable(
                f"the database failed {self.failures} times in a row: {error}",
                "db_retry_max_attempts says when to give up; 0 means never.",
            ) from exc

    async def _pause_over(self) -> bool:
        """Whether the database may be tried now; else wait, until that is over or we are told to stop."""
        now = time.monotonic()
        pause = max(self.not_before - now, circuit.wait(self.breaker, now))
        if self.stop_level:
            pause = min(self.not_before - now, 1.0)
        if pause > 0:
            await self._sleep(pause)
            return False
        if self.stop_level:
            return True
        self.breaker, passes = circuit.may_pass(self.breaker, now)
        return passes

    async def _sleep(self, seconds: float) -> None:
        """Until woken, at most so long."""
        timer = self.loop.call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()
            self.wake.clear()

    def _lost(self, worker_id: int) -> None:
        """The database does not know us any more: what we held is with others. Go on under a new number."""
        if worker_id != self.worker_id:
            return
        log.warning(
            "worker %d counts as lost; registering anew. What it ran is with others now",
            worker_id,
            extra={"action": "worker_lost", "worker_id": worker_id},
        )
        self.worker_id = None
        for entry in self.claimed:
            self._let_go(entry)
        self.claimed.clear()
        self._rung()

    # --- Working ---

    async def _work(self) -> None:
        while not self.stop_level:
            if not await self._pause_over():
                continue
            if self.worker_id is None or (self.reconcile_at and self.reconcile_at[0] <= time.monotonic()):
                await self._try(self._recover)
                continue
            turn = self._next_turn()
            if turn:
                await self._take(turn)
            elif self._is_done():
                return
            else:
                await self._sleep(self._until_next())

    async def _try(self, step: Callable[[], Awaitable[None]]) -> bool:
        try:
            await step()
        except FAILURES as exc:
            await self._turn_failed(exc, Turn())
            return False
        self._succeeded()
        return True

    async def _recover(self) -> None:
        conn = await self._connected()
        await self._register(conn)
        if self.reconcile_at and self.reconcile_at[0] <= time.monotonic():
            await self._reconcile(conn)
            self.reconcile_at.pop(0)

    async def _reconcile(self, conn: psycopg.AsyncConnection[Any]) -> None:
        """Give back what was given to us in an answer that never came."""
        assert self.worker_id is not None
        known = {(entry.row.id, entry.row.attempt) for entry in (*self.held.values(), *self.doubles)}
        known |= {(end.id, end.attempt) for end in self.ends}
        known |= {(entry.row.id, entry.row.attempt) for entry in (*self.releases, *self.checks)}
        rows = await workers.tasks_of_worker_async(conn, worker_id=self.worker_id)
        strange = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) not in known]
        if strange:
            log.warning(
                "giving back %d tasks that were handed out while the connection broke",
                len(strange),
                extra={"action": "reconciled"},
            )
            ids, attempts = zip(*strange, strict=True)
            await workers.release_tasks_async(conn, worker_id=self.worker_id, ids=ids, attempts=attempts)
        # A start whose answer never came: it happened, or it did not.
        running = {row.id for row in rows if row.state == "running"}
        for entry in [each for each in self.claimed if each.row.id in running]:
            self.claimed.remove(entry)
            self._begin(entry)
        self.loopside.go()

    def _due_checks(self, now: float) -> None:
        if self.later_checks and self.later_checks[0][0] <= now:
            self.checks += [entry for at, entry in self.later_checks if at <= now]
            self.later_checks = [each for each in self.later_checks if each[0] > now]

    def _next_turn(self) -> Turn:
        now = time.monotonic()
        self._due_checks(now)
        turn = Turn(ends=self._cut_ends(), releases=self.releases, checks=self.checks)
        if self.stop_level:
            return turn
        room = 0
        if not (self.apart and turn):
            waiting = len(self.claimed) + len(self.loopside)
            room = plan.pop_limit(self.limits, held=self._slots_taken(), waiting=waiting)
        if self.settings.mode == "once" and self.looked:
            room = 0
        if room and (self.hungry or now >= self.look_at or turn.ends or turn.releases):
            turn.pop = room
            turn.ask_due = not self.was_full
        if self.claimed:
            turn.starts = self._startable(now)
        if self.reports and now >= self.report_at:
            turn.reports = list(self.reports.values())
        if not turn.starts and plan.ought_to_gather(
            self.limits, ended=len(turn.ends), ready=len(self.loopside)
        ):
            return Turn()
        return turn

    def _cut_ends(self) -> list[End]:
        if not self.ends:
            return []
        return self.ends[: plan.batch_size([end.size for end in self.ends[: plan.MOST_ENDS]])]

    def _startable(self, now: float) -> list[Entry]:
        while self.claimed and self.claimed[0].claimed_until <= now:
            self._let_go(self.claimed.popleft())  # the claim is over: others may have it
        running = self._slots_taken() - len(self.claimed)
        count = plan.to_start(self.limits, running=running, claimed=len(self.claimed))
        return [self.claimed[place] for place in range(count)]

    def _slots_taken(self) -> int:
        return len(self.held) + len(self.doubles)

    def _is_done(self) -> bool:
        """once, drain: whether all is said."""
        mode = self.settings.mode
        if mode == "forever" or self._slots_taken() or self._unwritten():
            return False
        return self.looked if mode == "once" else self.nothing_left

    def _unwritten(self) -> bool:
        return bool(self.ends or self.releases or self.checks) or any(
            entry.checked == 1 for _, entry in self.later_checks
        )

    def _until_next(self) -> float:
        now = time.monotonic()
        times = [self.look_at]
        if self.reports:
            times.append(self.report_at)
        if self.reconcile_at:
            times.append(self.reconcile_at[0])
        if self.later_checks:
            times.append(self.later_checks[0][0])
        room = self._slots_taken() < self.limits.slots + self.limits.prefetch
        wait = min(times if room else times[1:] or [now + 3600.0]) - now
        return max(0.001, wait)

    # --- A turn ---

    async def _take(self, turn: Turn) -> None:
        """Send a turn. What was taken out of our lists for it comes back when it fails."""
        self.ends = self.ends[len(turn.ends) :]
        self.releases, self.checks = [], []
        for entry in turn.reports:
            self.reports.pop(entry.row.id, None)
        try:
            await self._send(await self._connected(), turn)
        except BaseException as exc:
            self.ends = turn.ends + self.ends
            self.releases = turn.releases + self.releases
            self.checks = turn.checks + self.checks
            if isinstance(exc, (*FAILURES, UnicodeError)):
                await self._turn_failed(exc, turn)
                return
            raise
        self._succeeded()
        if self.apart and not turn.ends and turn.pop:
            self.apart = False

    async def _send(self, conn: psycopg.AsyncConnection[Any], turn: Turn) -> None:
        """One round trip, one transaction. Nothing here changes but by an answer."""
        worker_id, rings = self.worker_id, self.rings
        answers: list[tuple[Callable[[Any, Any], None], Any, driver.Sent[Any]]] = []

        async def send(call: driver.Call[Any], about: Any, read: Callable[[Any, Any], None]) -> None:
            answers.append((read, about, await driver.send_async(conn, call)))

        async with _one_transaction(conn, self.asks_for_isolation):
            for holder, ends in _by_worker(turn.ends):
                await send(_finish_call(holder, ends), ends, self._finished)
            for holder, entries in _by_worker(turn.releases):
                await send(
                    workers.release_tasks_call(worker_id=holder, **_ids(entries)), entries, self._released
                )
            for holder, entries in _by_worker(turn.checks):
                await send(workers.held_tasks_call(worker_id=holder, **_ids(entries)), entries, self._checked)
            for holder, entries in _by_worker(turn.reports):
                await send(_report_call(holder, entries), entries, _nothing)
            for holder, entries in _by_worker(turn.starts):
                await send(
                    workers.start_tasks_call(worker_id=holder, **_ids(entries)), entries, self._started
                )
            if turn.pop and worker_id is not None:
                await send(self._pop_call(turn.pop, worker_id), (turn.pop, worker_id, rings), self._popped)
                if turn.ask_due:
                    await send(workers.next_due_in_call(queues=self.queues), None, self._due)
        if turn.reports:
            self.report_at = time.monotonic() + REPORT_SECONDS
        for read, about, answer in answers:
            read(about, answer.result())
        self.loopside.go()

    def _pop_call(self, room: int, worker_id: int) -> driver.Call[Any]:
        batch = min(room, self.limits.claim_batch)
        if len(self.queues) == 1:
            return workers.pop_tasks_call(
                queue=self.queues[0], max_tasks=batch, worker_id=worker_id, claim_lease=self.claim_lease
            )
        return workers.pop_tasks_in_order_call(
            max_tasks=room,
            queues=self.queues,
            max_batch=batch,
            worker_id=worker_id,
            claim_lease=self.claim_lease,
        )

    def _finished(self, ends: Sequence[End], accepted: list[int]) -> None:
        if len(accepted) == len(ends):
            return
        there = set(accepted)
        stale = [end.id for end in ends if end.id not in there]
        log.warning(
            "%d ended attempts were not accepted: written already, or not this worker's any more: %s",
            len(stale),
            stale[:20],
            extra={"action": "stale", "task_ids": stale},
        )

    def _released(self, entries: Sequence[Entry], accepted: list[int]) -> None:
        log.debug("gave back %d of %d tasks", len(accepted), len(entries), extra={"action": "released"})

    def _checked(self, entries: Sequence[Entry], held: list[int]) -> None:
        """Attempts that their handlers ended themselves: one that is still ours was rolled back."""
        there = set(held)
        now = time.monotonic()
        for entry in entries:
            if entry.row.id in there:
                lost = FinishLost("the transaction of ctx.finish_in() rolled back")
                self._write_down(entry, outcome_of(lost, entry.task, entry.row.attempt))
            elif entry.checked < len(CHECK_AGAIN_AFTER):
                # Ended, or its transaction is still open, perhaps just being rolled back: look again.
                self.later_checks.append((now + CHECK_AGAIN_AFTER[entry.checked], entry))
                self.later_checks.sort(key=lambda each: each[0])
                entry.checked += 1

    def _started(self, entries: Sequence[Entry], ids: list[int]) -> None:
        there = set(ids)
        for entry in entries:
            self.claimed.remove(entry)
            if entry.row.id in there:
                self._begin(entry)
            else:
                log.info("%r was not started: its claim or its deadline is over", entry)
                self._let_go(entry)

    def _popped(self, about: tuple[int, int, int], rows: list[workers.PopTasksRow]) -> None:
        asked, worker_id, rings = about
        now = time.monotonic()
        most = min(asked, self.limits.claim_batch) if len(self.queues) == 1 else self.limits.claim_batch
        self.looked = True
        self.was_full = len(rows) >= min(asked, most)
        self.hungry = self.was_full or rings != self.rings
        self.empties = 0 if rows else self.empties + 1
        # Three times in a row: an empty answer may mean that somebody else is promoting right now.
        self.nothing_left = self.empties >= 3 and not self._slots_taken()
        self.look_at = now + self._pause(None)
        held, kinds = self.held, self.kinds
        for row in rows:
            entry = Entry(row, worker_id, kinds.get(row.kind))
            older = held.get(row.id)
            if older is not None:
                self.doubles.add(older)
            held[row.id] = entry
            if self.claim_lease is None:
                self._begin(entry)
            else:
                entry.claimed_until = now + self.claim_lease.total_seconds()
                self.claimed.append(entry)

    def _due(self, about: None, seconds: float | None) -> None:
        if seconds is not None and seconds > 0:
            self.look_at = min(self.look_at, time.monotonic() + seconds + 0.001)

    def _pause(self, due_in: float | None) -> float:
        listening = self._is_listening()
        interval = poll_interval(self.settings, listening)
        return plan.poll_delay(self.empties, listening=listening, interval=interval, due_in=due_in)

    async def _turn_failed(self, exc: BaseException, turn: Turn) -> None:
        if is_unknown_worker(exc) and self.worker_id is not None:
            self._lost(self.worker_id)
            return
        conn = self.conn
        broken = conn is None or conn.closed
        if broken and (turn.pop or turn.starts):
            # Was it done? The answer is in the database.
            now = time.monotonic()
            self.reconcile_at = sorted([*self.reconcile_at, *(now + each for each in RECONCILE_AFTER)])
        if self.claim_lease is not None and sqlstate_of(exc) == "QF015":
            log.warning(
                "a cluster cap was set: the worker goes on without prefetch",
                extra={"action": "prefetch_off"},
            )
            self.claim_lease = None
            self.limits = limits(replace(self.settings, prefetch=0, claim_lease=None))
            return
        if turn.ends and is_about_data(exc):
            await self._write_with_care(turn.ends)
            return
        if not is_worth_a_try(exc):
            self.apart = True
        if broken or not is_worth_a_try(exc):
            await self._disconnect()
        self._failed(exc, "to take a turn")

    async def _write_with_care(self, ends: list[End]) -> None:
        """The database refuses a value among these. Find whose, let that attempt fail for it, write the
        others.
        """
        self.ends = self.ends[len(ends) :]
        pending: list[Sequence[End]] = [ends]
        try:
            while pending:
                batch = pending[-1]
                try:
                    await self._send(await self._connected(), Turn(ends=list(batch)))
                    pending.pop()
                except (*FAILURES, UnicodeError) as exc:
                    innocent = batch[0].before
                    if innocent is not None:
                        pending[-1] = [innocent]  # not its result, then: something is wrong in general
                        raise
                    if not is_about_data(exc):
                        raise
                    pending.pop()
                    if len(batch) == 1:
                        pending.append([_convict(batch[0], exc)])
                    else:
                        first, second = plan.halves(batch)
                        pending += [second, first]
        except (*FAILURES, UnicodeError) as exc:
            self._failed(exc, "to write how tasks ended")
            if self.conn is not None and self.conn.closed:
                await self._disconnect()
        else:
            self._succeeded()
        finally:
            self.ends = [end for batch in pending for end in batch] + self.ends

    # --- Tasks ---

    def _begin(self, entry: Entry) -> None:
        """Its handler runs, or at least is in line for the processor."""
        task = entry.task
        if task is None:
            try:
                task = self.app[entry.row.kind]
            except FairqError as exc:
                self._ended(entry, exc, None)
                return
            entry.task = task  # declared after the worker started
        if task.wants_context:
            try:
                ctx = entry.ctx = Context.of(entry.row, entry.worker_id, self._progressed)
            except Exception as exc:  # headers that are no object
                self._ended(entry, exc, None)
                return
        seconds = seconds_of(entry)
        if seconds is not None:
            entry.timer = self.loop.call_later(seconds, self._time_is_up, entry)
            if entry.ctx is not None and ctx.deadline is None:
                ctx.deadline = _in_seconds(seconds)
        if task.is_async:
            self.loopside.add(entry)
        else:
            self.threads.add(entry)

    def _ended(self, entry: Entry, exception: BaseException | None, result: Any) -> None:
        """The handler is through. Called once for each entry that began, on the loop."""
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.abandoned:
            self.abandoned -= 1
            return
        if entry.ended:
            return
        self._let_go(entry)
        ctx = entry.ctx
        if ctx is not None and ctx.finished_in and exception is None:
            self.checks.append(entry)
            self.wake.set()
            return
        try:
            outcome = conclude(entry, exception, result)
            _delay(outcome.retry_delay)
        except Exception as exc:  # its own text cannot be had, its delay is no number, or something like that
            outcome = Outcome(
                "retry", error=describe(RuntimeError(f"no account of it: {type(exc).__name__}"))
            )
        if exception is not None:
            _tell(entry, exception, outcome)
        self._write_down(entry, outcome)

    def _write_down(self, entry: Entry, outcome: Outcome) -> None:
        if outcome is RELEASE:
            self.releases.append(entry)
        else:
            row = entry.row
            self.ends.append(End(entry.worker_id, row.id, row.attempt, outcome))
        self.wake.set()

    def _let_go(self, entry: Entry) -> None:
        """It takes up no slot any more."""
        entry.ended = True
        if self.held.get(entry.row.id) is entry:
            del self.held[entry.row.id]
        else:
            self.doubles.discard(entry)
        self.reports.pop(entry.row.id, None)

    def _cancel(self, ids: list[int]) -> None:
        for id in ids:
            entry = self.held.get(id)
            if entry is None or entry.stop is not None:
                continue
            if entry in self.claimed:
                self.claimed.remove(entry)
                self._let_go(entry)
                self._write_down(entry, Outcome("cancelled"))
                continue
            _stop(entry, "cancelled")

    def _time_is_up(self, entry: Entry) -> None:
        if not entry.ended:
            _stop(entry, "timeout")
            entry.timer = self.loop.call_later(self.settings.abandon_after, self._abandon, entry)

    def _abandon(self, entry: Entry) -> None:
        """It was told to stop and does not. The attempt ends without it, and its slot goes to others.

        Its thread lives on. When as many live on as there are slots, the process is no good any more.
        """
        if entry.ended:
            return
        self._let_go(entry)
        entry.abandoned = True
        self.abandoned += 1
        log.error(
            "%r ignores that its time is over; it is left behind, %d are",
            entry,
            self.abandoned,
            extra={"action": "abandoned", "task_id": entry.row.id},
        )
        self._write_down(entry, outcome_of(timed_out(entry), entry.task, entry.row.attempt))
        if self.abandoned >= self.limits.slots and self.fatal is None:
            self.fatal = Stuck(
                f"{self.abandoned} handlers hang, as many as there are slots; the worker ends",
                "Handlers should look at ctx.cancelled, or wait with a timeout of their own.",
            )
            self.request_stop(1)

    # --- The end ---

    async def _wind_down(self) -> None:
        """Let handlers end, give back the rest, write everything, sign off."""
        if self.stop_level == 1 and self._slots_taken():
            log.info(
                "ending: no new tasks, %d handlers have %g s; a second signal gives them back now",
                self._slots_taken(),
                self.settings.grace,
                extra={"action": "ending"},
            )
        for entry in (*self.claimed, *self.loopside.take_back()):
            self._let_go(entry)
            if entry.timer is not None:
                entry.timer.cancel()
            self.releases.append(entry)
        self.claimed.clear()
        while self._slots_taken() and self.stop_level < 2 and not self._is_past_grace():
            await self._flush_some()
        if self._slots_taken():
            for entry in (*self.held.values(), *self.doubles):
                _stop(entry, "shutdown")
            until = time.monotonic() + UNWIND_SECONDS
            while self._slots_taken() and time.monotonic() < until:
                await self._sleep(0.02)
        left = [*self.held.values(), *self.doubles]
        for entry in left:
            self._let_go(entry)
            entry.abandoned = True
            self.abandoned += 1
            self.releases.append(entry)
        until = time.monotonic() + FLUSH_SECONDS
        while self._unwritten() and time.monotonic() < until:
            await self._flush_some()
        if self._unwritten():
            log.error(
                "the database is away: %d ended tasks could not be written and will run again",
                len(self.ends) + len(self.releases),
                extra={"action": "unwritten"},
            )
        if self.keeper is not None:
            self.keeper.stop()
        if self.worker_id is not None:
            with contextlib.suppress(*FAILURES):
                conn = await self._connected()
                await workers.retire_worker_async(conn, worker_id=self.worker_id)

    def _is_past_grace(self) -> bool:
        return self.stop_at is not None and time.monotonic() >= self.stop_at

    async def _flush_some(self) -> None:
        """A turn without a pop if there is something to write, else a short sleep."""
        self._due_checks(time.monotonic())
        turn = Turn(ends=self._cut_ends(), releases=self.releases, checks=self.checks)
        if turn:
            if await self._pause_over_at_the_end():
                await self._take(turn)
            return
        if self.later_checks:
            await self._sleep(0.05)
            return
        pause = 0.5 if self.stop_at is None else self.stop_at - time.monotonic()
        await self._sleep(min(max(pause, 0.001), 0.5))

    async def _pause_over_at_the_end(self) -> bool:
        pause = min(self.not_before - time.monotonic(), 0.5)
        if pause > 0:
            await self._sleep(pause)
            return False
        return True

    async def _close(self, pulse: asyncio.Task[None]) -> None:
        pulse.cancel()
        if self.listener is not None:
            await self.listener.close()
        self.threads.close()
        if self.keeper is not None:
            self.keeper.stop()
            await asyncio.to_thread(self.keeper.join)
        await self._disconnect()


# --- Small parts -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _one_transaction(conn: psycopg.AsyncConnection[Any], explicit: bool) -> AsyncIterator[None]:
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


async def _within(seconds: float, awaitable: Awaitable[object]) -> bool:
    try:
        await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        return False
    return True


def _by_worker(items: Sequence[Any]) -> Iterable[tuple[int, Sequence[Any]]]:
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


def _ids(entries: Sequence[Entry]) -> dict[str, list[int]]:
    return {
        "ids": [entry.row.id for entry in entries],
        "attempts": [entry.row.attempt for entry in entries],
    }


def _finish_call(worker_id: int, ends: Sequence[End]) -> driver.Call[list[int]]:
    outcomes = [end.outcome for end in ends]
    plain = all(each.outcome == "succeeded" and each.result is None for each in outcomes)
    delays = [_delay(each.retry_delay) for each in outcomes] if not plain else []
    return workers.finish_tasks_call(
        worker_id=worker_id,
        ids=[end.id for end in ends],
        attempts=[end.attempt for end in ends],
        outcomes=None if plain else [each.outcome for each in outcomes],
        results=_unless_empty([each.result for each in outcomes]),
        errors=_unless_empty([each.error for each in outcomes]),
        retry_delays=_unless_empty(delays),
    )


def _delay(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=min(max(seconds, 0.0), 1e9))


def _unless_empty(values: list[Any]) -> list[Any] | None:
    return values if any(value is not None for value in values) else None


def _report_call(worker_id: int, entries: Sequence[Entry]) -> driver.Call[list[int]]:
    told = [
        (entry.row.id, entry.row.attempt, entry.ctx.last_progress)
        for entry in entries
        if entry.ctx is not None and entry.ctx.last_progress is not None
    ]
    return workers.report_progress_call(
        worker_id=worker_id,
        ids=[id for id, _, _ in told],
        attempts=[attempt for _, attempt, _ in told],
        done=[float(progress.done) for _, _, progress in told],
        totals=_unless_empty([driver.maybe(float, progress.total) for _, _, progress in told]),
        notes=_unless_empty([driver.maybe(_note, progress.note) for _, _, progress in told]),
    )


def _note(note: Any) -> str:
    return encode(note, "note")


def _nothing(about: Any, answer: Any) -> None:
    pass


def _convict(end: End, exc: BaseException) -> End:
    """The same attempt, failed for what the database said of its result."""
    error = ResultNotEncodable(f"the database refuses the result: {explain(exc)}"[:500])
    log.warning("task %d: %s", end.id, error, extra={"action": "result_refused", "task_id": end.id})
    return End(end.worker_id, end.id, end.attempt, Outcome("failed", error=describe(error)), before=end)


def _stop(entry: Entry, why: Any) -> None:
    """Tell a handler to stop: the flag for those who look, a cancellation for those who wait on the loop."""
    if entry.stop is None:
        entry.stop = why
    if entry.ctx is not None:
        entry.ctx.cancelled.set(why)
    if entry.runner is not None:
        entry.runner.cancel()


def _tell(entry: Entry, exception: BaseException, outcome: Outcome) -> None:
    if outcome is RELEASE:
        return
    log.warning(
        "%r ended as %s: %s",
        entry,
        outcome.outcome,
        mask(f"{type(exception).__name__}: {_text(exception)}"),
        extra={"action": f"task_{outcome.outcome}", "task_id": entry.row.id},
        exc_info=exception if log.isEnabledFor(logging.DEBUG) else None,
    )


def _text(exception: BaseException) -> str:
    try:
        return str(exception)[:500]
    except Exception:
        return "(no text)"


def _in_seconds(seconds: float) -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC) + timedelta(seconds=seconds)
