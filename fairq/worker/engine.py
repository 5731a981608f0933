"""The engine of a worker: turns on one connection, and everything that happens between them.

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
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, NamedTuple

import psycopg

from fairq import driver, install
from fairq.app import App
from fairq.dsn import describe as describe_dsn
from fairq.dsn import resolve
from fairq.errors import ConfigurationError, FairqError, sqlstate_of
from fairq.queries import workers
from fairq.worker import plan
from fairq.worker import shares as sharing
from fairq.worker.config import Limits, Settings, banner, limits, poll_interval
from fairq.worker.connect import (
    FAILURES,
    conninfo,
    explain,
    is_about_data,
    is_read_only,
    is_unknown_worker,
    is_worth_a_try,
)
from fairq.worker.database import Database
from fairq.worker.handlers import Entry
from fairq.worker.held import Held, convicted, tell_to_stop
from fairq.worker.keeper import Keeper, KeeperPlan
from fairq.worker.listen import TEST_SECONDS, Listener
from fairq.worker.lookout import Lookout
from fairq.worker.turn import (
    NOBODY,
    End,
    Steps,
    Turn,
    by_worker,
    check_call,
    cut,
    one_transaction,
    report_call,
    turn_call,
)

__all__ = ["UNWIND_SECONDS", "Announce", "Engine", "Stuck"]

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
PULSE_SECONDS: Final = 0.5
# A loop that stands still past the grace time is ended by the keeper after so long.
LAST_RESORT_SECONDS: Final = 5.0


class Stuck(FairqError):
    """As many handlers hang as there are slots. A fresh process can work, this one cannot."""

    code = "stuck"
    exit_code = 1


async def _within(seconds: float, awaitable: Awaitable[object]) -> bool:
    try:
        await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        return False
    return True


def _nothing(about: Any, answer: Any) -> None:
    pass


class Asked(NamedTuple):
    """What a pop was for, to be compared with its answer."""

    room: int
    batch: int
    steps: list[tuple[int, int]]
    """Of several queues: which was asked for how many."""
    worker_id: int
    rings: int
    """Notices that had come before."""
    steps_asked: Steps


class Said(NamedTuple):
    """What a turn was about, to be compared with its answer."""

    ends: Sequence[End]
    releases: Sequence[Entry]
    starts: Sequence[Entry]
    asked: Asked | None


class Engine:
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
        self.settings = settings
        self.limits: Limits = limits(settings)
        self.queues = queues
        self.shares = sharing.shares_of(settings.queues) if isinstance(settings.queues, Mapping) else None
        self.dsn = dsn
        self.announce = announce
        self.owns_process = owns_process
        self.name = settings.name or f"{socket.gethostname()}:{os.getpid()}"[:200]
        self.claim_lease = None if settings.claim_lease is None else timedelta(seconds=settings.claim_lease)
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self.pulse = time.monotonic()

        self.database = Database(dsn, settings)
        self.worker_id: int | None = None
        self.keeper: Keeper | None = None
        self.listener: Listener | None = None
        self.lookout = Lookout()
        self.held = Held(
            app,
            self.limits.slots,
            self.loop,
            abandon_after=settings.abandon_after,
            wake=self.wake.set,
            stuck=self._stuck,
        )
        self.report_at = 0.0
        # Ends and pops apart: a turn with both failed, and not for want of a database.
        self.apart = False
        # When to look for tasks that a broken connection left behind.
        self.reconcile_at: list[float] = []

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
            ending = self.loop.create_task(self._wind_down(), name="fairq-end")
            try:
                with contextlib.suppress(Exception):
                    await asyncio.shield(ending)
            finally:  # cancelled once more: nothing of ours goes on behind the caller's back
                ending.cancel()
                await asyncio.wait([ending])
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
                conn = await self.database.connected()
                await install.acheck_version(conn)
                await self._check_caps(conn)
                await self._register(conn)
                self.database.succeeded()
                break
            except FAILURES as exc:
                if isinstance(exc, psycopg.Error) and exc.sqlstate and not is_worth_a_try(exc):
                    raise explain(exc) from exc
                self.database.failed(exc, "to start")
                await self.database.disconnect()
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
        cap = await workers.cluster_cap(conn)
        if cap is not None:
            raise ConfigurationError(
                f"prefetch cannot be used together with the cluster cap of {cap}: tasks that wait in a"
                " buffer would take up places and do nothing",
                "Leave out --prefetch and --claim-lease, or lift the cap with fairq.configure_cluster().",
            )

    async def _register(self, conn: psycopg.AsyncConnection[Any]) -> None:
        if self.worker_id is None:
            self.worker_id = await workers.register_worker(
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
                # Notices a dead peer, and is back on another connection, while the lease still holds.
                conninfo=conninfo(self.dsn, "fairq keeper", min(60.0, settings.lease / 3)),
                heartbeat=self.limits.heartbeat,
                lease=settings.lease,
                maintain_every=settings.maintain_interval_ms / 1000,
                maintain_at_once=settings.mode != "forever",
                first_pause=settings.db_retry_initial_ms / 1000,
                longest_pause=min(settings.db_retry_max_ms / 1000, settings.lease / 6),
            ),
            worker_ids=lambda: [] if self.worker_id is None else [self.worker_id],
            held=lambda: list(self.held.by_id),
            may_connect=self.database.may_connect,
            pulse=lambda: self.pulse,
            cancel=lambda ids: self._call(self.held.cancel, ids),
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
        self.lookout.ring()
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
            may_connect=self.database.may_connect,
            first_pause=settings.db_retry_initial_ms / 1000,
            longest_pause=settings.db_retry_max_ms / 1000,
        )
        listener.start()
        self.listener = listener
        if not await _within(TEST_SECONDS, listener.connected.wait()):
            return  # it goes on trying; meanwhile the worker polls
        try:
            assert self.database.conn is not None
            await self.database.conn.execute("select pg_catalog.pg_notify(%s, '')", [listener.test_channel])
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
        elif not settings.listen_dsn:
            # A notice that arrives proves that the DSN leads to sessions, not to a pooler by transaction.
            self.database.prepare_statements()

    async def _sleep(self, seconds: float) -> None:
        """Until woken, at most so long."""
        timer = self.loop.call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()
            self.wake.clear()

    async def _pause_over(self) -> bool:
        """Whether the database may be tried now; else wait, until that is over or we are told to stop."""
        now = time.monotonic()
        pause = self.database.pause(now)
        if self.stop_level:
            pause = min(self.database.pause_at_the_end(now), 1.0)
        if pause > 0:
            await self._sleep(pause)
            return False
        return self.stop_level > 0 or self.database.may_pass(now)

    # --- What may happen to it ---

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
        self.held.drop_claims()
        self._rung()

    def _stuck(self) -> None:
        if self.fatal is None:
            self.fatal = Stuck(
                f"{self.held.abandoned} handlers hang, as many as there are slots; the worker ends",
                "Handlers should look at ctx.cancelled, or wait with a timeout of their own.",
            )
            self.request_stop(1)

    # --- Working ---

    async def _work(self) -> None:
        while not self.stop_level:
            if not await self._pause_over():
                continue
            if self.worker_id is None or self._ought_to_reconcile():
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
        self.database.succeeded()
        return True

    async def _recover(self) -> None:
        conn = await self.database.connected()
        await self._register(conn)
        if self._ought_to_reconcile():
            await self._reconcile(conn)
            self.reconcile_at.pop(0)

    def _ought_to_reconcile(self) -> bool:
        return bool(self.reconcile_at) and self.reconcile_at[0] <= time.monotonic()

    async def _reconcile(self, conn: psycopg.AsyncConnection[Any]) -> None:
        """Give back what was given to us in an answer that never came."""
        assert self.worker_id is not None
        known = self.held.known()
        rows = await workers.tasks_of_worker(conn, worker_id=self.worker_id)
        strange = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) not in known]
        if strange:
            log.warning(
                "giving back %d tasks that were handed out while the connection broke",
                len(strange),
                extra={"action": "reconciled"},
            )
            ids, attempts = zip(*strange, strict=True)
            await workers.release_tasks(conn, worker_id=self.worker_id, ids=ids, attempts=attempts)
        # A start whose answer never came: it happened, or it did not.
        running = {row.id for row in rows if row.state == "running"}
        for entry in [each for each in self.held.claimed if each.row.id in running]:
            self.held.started(entry, ours=True)
        self.held.loopside.go()

    def _next_turn(self) -> Turn:
        now = time.monotonic()
        held = self.held
        held.fetch_due_checks(now)
        turn = Turn(ends=cut(held.ends), releases=held.releases, checks=held.checks)
        if self.stop_level:
            return turn
        room = 0
        if not (self.apart and turn):
            room = plan.pop_limit(self.limits, held=held.taken, waiting=held.waiting)
        lookout = self.lookout
        if self.settings.mode == "once" and lookout.looked:
            room = 0
        if room and (lookout.hungry or now >= lookout.look_at or turn.ends or turn.releases):
            turn.pop = room
        if held.claimed:
            turn.starts = self._startable(now)
        if held.reports and now >= self.report_at:
            turn.reports = list(held.reports.values())
        if not turn.starts and plan.ought_to_gather(
            self.limits, ended=len(turn.ends), ready=len(held.loopside)
        ):
            return Turn()
        return turn

    def _startable(self, now: float) -> list[Entry]:
        held = self.held
        held.drop_late_claims(now)
        count = plan.to_start(self.limits, running=held.taken - len(held.claimed), claimed=len(held.claimed))
        return [held.claimed[place] for place in range(count)]

    def _is_done(self) -> bool:
        """once, drain: whether all is said."""
        mode = self.settings.mode
        if mode == "forever" or self.held.taken or self.held.unwritten:
            return False
        return self.lookout.looked if mode == "once" else self.lookout.nothing_left

    def _until_next(self) -> float:
        now = time.monotonic()
        held = self.held
        times = [self.lookout.look_at]
        if held.reports:
            times.append(self.report_at)
        if self.reconcile_at:
            times.append(self.reconcile_at[0])
        if held.later_checks:
            times.append(held.later_checks[0][0])
        room = held.taken < self.limits.slots + self.limits.prefetch
        wait = min(times if room else times[1:] or [now + 3600.0]) - now
        return max(0.001, wait)

    # --- A turn ---

    async def _take(self, turn: Turn) -> None:
        """Send a turn. What was taken out of our lists for it comes back when it fails."""
        held = self.held
        held.ends = held.ends[len(turn.ends) :]
        held.releases, held.checks = [], []
        for entry in turn.reports:
            held.reports.pop(entry.row.id, None)
        try:
            await self._send(await self.database.connected(), turn)
        except BaseException as exc:
            held.ends = turn.ends + held.ends
            held.releases = turn.releases + held.releases
            held.checks = turn.checks + held.checks
            if isinstance(exc, (*FAILURES, UnicodeError)):
                if is_worth_a_try(exc):
                    held.report_again(turn.reports)
                await self._turn_failed(exc, turn)
                return
            # Cancelled, perhaps with half of a turn on its way: what ends the worker gets a new connection.
            await self.database.disconnect()
            raise
        self.database.succeeded()
        if self.apart and not turn.ends and turn.pop:
            self.apart = False

    async def _send(self, conn: psycopg.AsyncConnection[Any], turn: Turn) -> None:
        """One round trip, one transaction. Nothing here changes but by an answer."""
        calls: list[tuple[driver.Call[Any], Any, Callable[[Any, Any], None]]] = []
        for holder, (checks,) in by_worker(turn.checks).items():
            calls.append((check_call(holder, checks), checks, self.held.checked))
        for holder, (reports,) in by_worker(turn.reports).items():
            calls.append((report_call(holder, reports), reports, _nothing))
        groups = by_worker(turn.ends, turn.releases, turn.starts)
        asked = None
        if turn.pop and self.worker_id is not None:
            groups.setdefault(self.worker_id, [[], [], []])
            asked = self._ask(turn.pop, self.worker_id)
        # What others of our numbers held is written before we ask for more.
        ours_last = sorted(groups.items(), key=lambda each: each[0] == self.worker_id)
        for holder, (ends, releases, starts) in ours_last:
            about = Said(ends, releases, starts, asked if holder == self.worker_id else None)
            steps = about.asked.steps_asked if about.asked is not None else NOBODY
            call = turn_call(holder, ends, releases, starts, steps, self.claim_lease)
            calls.append((call, about, self._answered))

        if len(calls) == 1 and not self.database.asks_for_isolation:
            answers = [await driver.send_async(conn, calls[0][0])]  # a statement is a transaction by itself
        else:
            async with one_transaction(conn, self.database.asks_for_isolation):
                answers = [await driver.send_async(conn, call) for call, _, _ in calls]
        if turn.reports:
            self.report_at = time.monotonic() + REPORT_SECONDS
        for (_, about, read), answer in zip(calls, answers, strict=True):
            read(about, answer.result())
        self.held.loopside.go()

    def _ask(self, room: int, worker_id: int) -> Asked:
        batch = min(room, self.limits.claim_batch)
        if len(self.queues) == 1:
            return Asked(room, batch, [], worker_id, self.lookout.rings, Steps(self.queues, (batch,), batch))
        if self.shares is None:  # in order of priority, each for as many as there is room for
            steps = [(place, batch) for place in range(len(self.queues))]
        else:
            room = batch
            steps = sharing.steps(self.shares, room)
        queues = [self.queues[place] for place, _ in steps]
        whom = Steps(queues, [most for _, most in steps], room)
        return Asked(room, batch, steps, worker_id, self.lookout.rings, whom)

    def _answered(self, said: Said, rows: list[workers.TurnRow]) -> None:
        head, *tasks = rows
        if said.ends:
            self._finished(said.ends, head.ended or [])
        if said.releases:
            self._released(said.releases, head.released or [])
        if said.starts:
            self._started(said.starts, head.started or [])
        if said.asked is not None:
            self._popped(said.asked, tasks)
            if head.due_in is not None and head.due_in > 0:
                self.lookout.due_at(time.monotonic() + head.due_in + 0.001)

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

    def _started(self, entries: Sequence[Entry], ids: list[int]) -> None:
        there = set(ids)
        for entry in entries:
            self.held.started(entry, ours=entry.row.id in there)

    def _popped(self, asked: Asked, rows: list[workers.TurnRow]) -> None:
        now = time.monotonic()
        if self.shares is not None and asked.steps:
            counts = Counter(row.queue for row in rows)
            by_place = [counts[queue] for queue in self.queues]
            self.shares = sharing.served(self.shares, asked.steps, by_place, asked.room)
        # Of several queues, one that gave a whole batch may have more.
        full = len(rows) >= asked.batch
        lookout = self.lookout
        lookout.found(len(rows), full=full, rings=asked.rings, holds=self.held.taken > 0)
        listening = self._is_listening()
        lookout.look_at = now + plan.poll_delay(
            lookout.quiet,
            listening=listening,
            interval=poll_interval(self.settings, listening),
            due_in=None,
        )
        lease = self.claim_lease
        self.held.take_in(rows, asked.worker_id, None if lease is None else now + lease.total_seconds())

    # --- A turn that failed ---

    async def _turn_failed(self, exc: BaseException, turn: Turn) -> None:
        if is_unknown_worker(exc) and self.worker_id is not None:
            self.database.succeeded()  # it answers; this may have been the breaker's probe
            self._lost(self.worker_id)
            return
        broken = self.database.is_broken
        if broken and (turn.pop or turn.starts):
            # Was it done? The answer is in the database.
            now = time.monotonic()
            self.reconcile_at = sorted([*self.reconcile_at, *(now + each for each in RECONCILE_AFTER)])
        if self.claim_lease is not None and sqlstate_of(exc) == "QF015":
            log.warning(
                "a cluster cap was set: the worker goes on without prefetch",
                extra={"action": "prefetch_off"},
            )
            self.database.succeeded()
            self.claim_lease = None
            self.limits = limits(replace(self.settings, prefetch=0, claim_lease=None))
            return
        if turn.ends and is_about_data(exc):
            await self._write_with_care(turn.ends)
            return
        if not is_worth_a_try(exc):
            self.apart = True
        if broken or is_read_only(exc) or not is_worth_a_try(exc):
            await self.database.disconnect()
        self.database.failed(exc, "to take a turn")

    async def _write_with_care(self, ends: list[End]) -> None:
        """The database refuses a value among these. Find whose, let that attempt fail for it, write the
        others.
        """
        held = self.held
        held.ends = held.ends[len(ends) :]
        pending: list[Sequence[End]] = [ends]
        try:
            while pending:
                batch = pending[-1]
                try:
                    await self._send(await self.database.connected(), Turn(ends=list(batch)))
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
                        pending.append([convicted(batch[0], exc)])
                    else:
                        first, second = plan.halves(batch)
                        pending += [second, first]
        except (*FAILURES, UnicodeError) as exc:
            self.database.failed(exc, "to write how tasks ended")
            if self.database.conn is not None and self.database.is_broken:
                await self.database.disconnect()
        else:
            self.database.succeeded()
        finally:
            held.ends = [end for batch in pending for end in batch] + held.ends

    # --- The end ---

    async def _wind_down(self) -> None:
        """Let handlers end, give back the rest, write everything, sign off."""
        held = self.held
        if self.stop_level == 1 and held.taken:
            log.info(
                "ending: no new tasks, %d handlers have %g s; a second signal gives them back now",
                held.taken,
                self.settings.grace,
                extra={"action": "ending"},
            )
        held.release_waiting()
        while held.taken and self.stop_level < 2 and not self._is_past_grace():
            await self._flush_some()
        if held.taken:
            for entry in held.entries:
                tell_to_stop(entry, "shutdown")
            until = time.monotonic() + UNWIND_SECONDS
            while held.taken and time.monotonic() < until:
                await self._sleep(0.02)
        held.release_running()
        until = time.monotonic() + FLUSH_SECONDS
        while held.unwritten and time.monotonic() < until:
            await self._flush_some()
        if held.unwritten:
            log.error(
                "the database is away: %d ended tasks could not be written and will run again",
                len(held.ends) + len(held.releases),
                extra={"action": "unwritten"},
            )
        if self.keeper is not None:
            self.keeper.stop()
        if self.worker_id is not None:
            with contextlib.suppress(*FAILURES):
                conn = await self.database.connected()
                await workers.retire_worker(conn, worker_id=self.worker_id)

    def _is_past_grace(self) -> bool:
        return self.stop_at is not None and time.monotonic() >= self.stop_at

    async def _flush_some(self) -> None:
        """A turn without a pop if there is something to write, else a short sleep."""
        held = self.held
        now = time.monotonic()
        held.fetch_due_checks(now)
        turn = Turn(ends=cut(held.ends), releases=held.releases, checks=held.checks)
        if turn:
            pause = min(self.database.pause_at_the_end(now), 0.5)
            if pause > 0:
                await self._sleep(pause)
            else:
                await self._take(turn)
            return
        if held.later_checks:
            await self._sleep(0.05)
            return
        pause = 0.5 if self.stop_at is None else self.stop_at - now
        await self._sleep(min(max(pause, 0.001), 0.5))

    async def _close(self, pulse: asyncio.Task[None]) -> None:
        pulse.cancel()
        if self.listener is not None:
            await self.listener.close()
        self.held.threads.close()
        if self.keeper is not None:
            self.keeper.stop()
            await asyncio.to_thread(self.keeper.join)
        await self.database.disconnect()
