"""The thread that sends the worker's heartbeats, whatever its handlers do to the loop.

It also learns which tasks to cancel, fires schedules, runs the upkeep, and notices where the loop is blocked.
It has its own connection and never waits for the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg

from fairq import driver, schedules
from fairq.queries import workers
from fairq.worker import log, plan
from fairq.worker.connect import FAILURES, answering, conninfo, explain, is_unknown_worker

if TYPE_CHECKING:
    from fairq.worker.node import Node

# The loop counts as blocked after this long without a pulse.
STANDSTILL_SECONDS: Final = 5.0
# Pause between two looks at due schedules, at random, so that several workers take turns.
FIRE_PAUSE: Final = (0.005, 0.015)
# How long ticks wait for earlier ones to begin, whose queue may not be served.
FIRE_PATIENCE: Final = 1.0


class Keeper(threading.Thread):
    """It reads its node's state, and changes it only through calls on the loop."""

    def __init__(self, node: Node) -> None:
        super().__init__(name="fairq-keeper", daemon=True)
        self.ended = asyncio.Event()
        self.failures = 0
        self._node = node
        self._settings = node.settings
        self._limits = node.limits
        self._loop = node.engine.loop
        self._over = threading.Event()
        self._conn: psycopg.Connection[Any] | None = None
        self._beat_at = time.monotonic()
        self._maintain_every = self._settings.maintain_interval_ms / 1000
        # Modes once and drain begin with the upkeep.
        self._maintain_at = self._beat_at + self._maintain_every * (self._settings.mode == "forever")
        self._last_pulse = 0.0
        self._fired: tuple[int | None, float] = (None, 0.0)
        self._late = 0.0
        self._stalls = 0
        self._looked_at = 0.0
        self._still = 0.0
        self._warned = False
        self._disowned = False
        self._loop_thread = threading.get_ident()

    def stop(self) -> None:
        self._over.set()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            pause = self._limits.heartbeat
            try:
                self._watch_the_loop()
                if not self._disowned:
                    self._beat()
                if self.failures or self._node.database.state != "closed":
                    self._call(self._node.answered)
                self.failures = 0
                if self._maintain_every and not self._disowned:
                    pause = self._tend_schedules(pause)
            except FAILURES as exc:
                self._drop()
                self.failures += 1
                pause = plan.retry_delay(
                    self.failures, self._settings.db_retry_initial_ms / 1000, self._limits.heartbeat
                )
                log.warning(
                    "heartbeat_failed",
                    "the heartbeat failed%s: %s",
                    f" {self.failures} times in a row" if self.failures > 1 else "",
                    explain(exc),
                )
            except Exception:
                # Go on whatever it is: without a keeper the worker would be considered lost.
                log.error("keeper_error", "the keeper failed", exc_info=True)
                self._drop()
            if self._settings.health and not self._warned:
                self._tell_probes(Path(self._settings.health))
        if self._settings.health:
            with contextlib.suppress(OSError):
                Path(self._settings.health).unlink()
        self._drop()
        self._call(self.ended.set)

    def _tell_probes(self, file: Path) -> None:
        """Replace the health file atomically. Only called while the loop runs."""
        try:
            new = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
            new.write_text(json.dumps(self._node.engine.health()) + "\n")
            new.replace(file)
        except OSError as exc:
            log.warning("health_failed", "cannot write %s: %s", file, exc.strerror)

    def _connected(self) -> psycopg.Connection[Any]:
        if self._conn is None:
            # Must notice a dead peer, and reconnect, within the lease.
            to = conninfo(self._node.dsn, "fairq keeper", min(60.0, self._settings.lease / 3))
            self._conn = psycopg.connect(to, autocommit=True, prepare_threshold=None)
            self._conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # of its transactions
        return self._conn

    def _beat(self) -> None:
        node, worker_id = self._node, self._node.worker_id
        if worker_id is not None:
            try:
                # With ids each is looked up. Without, all cancellations would be read, 100,000 in 130 ms.
                with answering(self._connected(), self._limits.patience) as conn:
                    cancelled = workers.heartbeat(
                        conn,
                        worker_id=worker_id,
                        ids=list(node.held.by_id),
                        circuit_open=node.database.state != "closed",
                        circuit_trips=node.database.trips,
                    )
                if cancelled:
                    self._call(node.held.cancel, cancelled)
            except psycopg.Error as exc:
                if not is_unknown_worker(exc):
                    raise
                self._call(node.lost, worker_id)
        now = time.monotonic()
        if now - self._beat_at > self._settings.lease / 2:
            # After a long outage, give other workers time for a heartbeat before the upkeep looks for lost
            # ones. Not after a short one: if connections kept breaking, nobody would ever look.
            self._maintain_at = now + self._settings.lease
        self._beat_at = now
        if self._maintain_every and now >= self._maintain_at:
            self._maintain_at = now + self._maintain_every * random.uniform(0.75, 1.25)
            self._maintain()

    def _maintain(self) -> None:
        """Run the upkeep's parts, each in its own transaction; stop early so that no heartbeat is late."""
        longest = self._limits.patience
        until = time.monotonic() + longest
        with answering(self._connected(), longest) as conn:
            parts = workers.upkeep_parts(conn)
        for part in parts:
            if part == "schedules":  # fired when they are due, see _tend_schedules
                continue
            if time.monotonic() > until:
                return
            try:
                # A server that answers ends the part by itself.
                with answering(self._connected(), longest + 2.0) as conn, conn.transaction():
                    # Local to the transaction, so it also works behind a pooler.
                    timeout = f"{longest * 1000:.0f}ms"
                    conn.execute("select set_config('statement_timeout', %s, true)", [timeout])
                    done = json.loads(workers.maintain(conn, part=part))
            except psycopg.errors.QueryCanceled:
                log.warning("maintain_slow", "upkeep: %s was stopped after %g s", part, longest, part=part)
                continue
            if done:
                log.debug("maintained", "upkeep: %s: %s", part, done, part=part)
            if done.get("failed"):
                log.warning(
                    "maintain_failed",
                    "upkeep: %s failed, see fairq.upkeep_failures or: fairq doctor",
                    part,
                    part=part,
                )
            if done.get("recovered"):
                log.warning("recovered", "took %d tasks from lost workers", done["recovered"])

    # --- Schedules ---

    def _tend_schedules(self, seconds: float) -> float:
        """Fire schedules until the next heartbeat in so many seconds. Return the seconds left until then."""
        until = time.monotonic() + seconds
        while True:
            pause, left = self._fire(), until - time.monotonic()
            if pause >= left or self._over.wait(pause):
                return max(left, 0.0)

    def _fire(self) -> float:
        """Fire due schedules and return the seconds until the next look. If none is due, it costs two index
        steps.
        """
        last, at = self._fired
        if last is not None and time.monotonic() - at > FIRE_PATIENCE:
            last = None
            self._stalls += 1
        most = plan.ticks_at_a_time(self._limits.slots, self._late, self._stalls)
        try:
            with answering(self._connected(), self._limits.patience) as conn:
                said = json.loads(workers.fire_schedules(conn, most=most, after_id=last))
                if said["unplanned"]:
                    schedules.plan_due(conn)
        except psycopg.Error as exc:
            if self._conn is None or self._conn.closed:
                raise
            # The heartbeats go on.
            log.warning("fire_failed", "schedules were not fired: %s", explain(exc))
            return math.inf
        self._late = max(0.0, -(said["due_in"] or 0.0))
        if self._late == 0 or (last is not None and said["fired"]):
            self._stalls = 0
        if said["fired"]:
            self._fired = said["last"], time.monotonic()
            log.debug("fired", "schedules: %d tasks", said["fired"])
        due_in = 0.0 if said["unplanned"] else said["due_in"]
        return math.inf if due_in is None else max(due_in + 0.001, random.uniform(*FIRE_PAUSE))

    # --- The loop ---

    def _watch_the_loop(self) -> None:
        now, pulse, lease = time.monotonic(), self._node.engine.pulse, self._settings.lease
        if pulse != self._last_pulse:
            self._still, self._warned, self._disowned = 0.0, False, False
        else:
            self._still = plan.standstill(self._still, now - self._looked_at, lease)
        self._last_pulse, self._looked_at = pulse, now
        if self._still >= min(STANDSTILL_SECONDS, lease) and not self._warned:
            self._warned = True
            frame = sys._current_frames().get(self._loop_thread)
            where = "".join(traceback.format_stack(frame, 12)) if frame else ""
            log.warning(
                "loop_blocked",
                "the loop is blocked for %.0f s; a handler should await, or be a plain def:\n%s",
                self._still,
                where,
            )
        deadline = self._node.ending.give_up_at()
        if self._still >= lease and not self._disowned:
            self._disown(dead=True)
        elif self._warned and deadline is not None and now > deadline:
            self._disown(dead=False)

    def _disown(self, *, dead: bool) -> None:
        """Retire, because the tasks cannot run. The task that blocks the loop has used its attempt, the
        others go back without. The loop learns of it when it runs again.
        """
        node, worker_id = self._node, self._node.worker_id
        try:
            with answering(self._connected(), self._limits.patience) as conn:
                for call in node.turns.last_words(dead):
                    with contextlib.suppress(psycopg.DataError):  # a result that the database refuses
                        driver.run(conn, call)
                if worker_id is not None:
                    with conn.transaction():
                        workers.retire_worker(conn, worker_id=worker_id)
                    self._call(node.lost, worker_id)
            self._disowned = True
        except FAILURES:
            if dead:  # retried instead of a heartbeat
                raise
        node.engine.give_up(node, dead)

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
