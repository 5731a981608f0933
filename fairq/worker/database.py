"""The connection for the turns and, when it fails, growing pauses and the circuit breaker.

Both are for the turns only. The heartbeat and the listener retry at their own pace; the first of them that
gets through ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import psycopg

from fairq.errors import Unavailable
from fairq.queries import workers
from fairq.worker import breaker as circuit
from fairq.worker import log, plan
from fairq.worker.config import Settings, limits
from fairq.worker.connect import FAILURES, HUNG_UP, conninfo, explain, hang_up, is_down

# A statement is prepared after it was sent this often.
PREPARE_AFTER = 3
# A worker that is ending waits for an answer for a third of its remaining time, within these bounds.
LAST_PATIENCE: Final = (1.0, 5.0)
ONE_TRY: Final = 2 * LAST_PATIENCE[0]
# How long a server may take to stop our statement.
CANCEL_SECONDS: Final = 1.0


class Database:
    """Call `succeeded` or `failed` after each try; `pause` then says when to make the next one.

    `name` is for the log, if there are several. `is_last` says whether to give up after too many failures.
    """

    def __init__(
        self,
        dsn: str,
        settings: Settings,
        name: str = "",
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        self.conn: psycopg.AsyncConnection[Any] | None = None
        self.sets_terms = False
        """Each turn has to set READ COMMITTED and no timeout, because the role or the database has others."""
        self._prepares = False
        self._settings = settings
        self._is_last = is_last
        self.lead_to(dsn, name)
        self.failures = 0
        self.not_before = 0.0
        own = limits(settings)
        self._breaker = circuit.Breaker(settings.breaker_threshold, own.cooldown)
        self.trips = 0
        """How often the breaker opened."""
        self._usual_patience = own.patience
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._breaking: asyncio.Task[None] | None = None
        self._connecting: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """The connection, for a call that must be answered while our patience lasts."""
        conn = self.conn
        is_new = conn is None or conn.closed
        if conn is None or is_new:
            self.conn = None
            conn = self.conn = await self._connect()
        self._arm(conn)
        try:
            if is_new:
                if self._prepares:
                    conn.prepare_threshold = PREPARE_AFTER
                self.sets_terms = await workers.terms_differ(conn)
            yield conn
        except psycopg.OperationalError as exc:
            if self._breaking is not None and self._breaking.done():
                raise TimeoutError(HUNG_UP) from exc
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._breaking is not None:
                self._breaking.cancel()
                self._breaking = None

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        try:
            async with asyncio.timeout(None) as self._connecting:
                self._hurry_connecting()
                return await psycopg.AsyncConnection.connect(
                    self._conninfo, autocommit=True, prepare_threshold=None
                )
        except TimeoutError as exc:
            raise TimeoutError(HUNG_UP) from exc
        finally:
            self._connecting = None

    def _hurry_connecting(self) -> None:
        if self._connecting is not None and self._deadline is not None and not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time() + self._patience())

    def hurry(self, deadline: float) -> None:
        """The worker has to end by then, and so has the current wait."""
        self._deadline = deadline
        self._hurry_connecting()
        if self._timer is not None and self.conn is not None:
            self._timer.cancel()
            self._arm(self.conn)

    def _patience(self) -> float:
        if self._deadline is None:
            return self._usual_patience
        least, most = LAST_PATIENCE
        return min(max((self._deadline - time.monotonic()) / 3, least), most)

    def has_time(self, seconds: float = ONE_TRY) -> bool:
        """Whether a try that begins now (to connect, and be answered) ends before the deadline."""
        return self._deadline is None or self._deadline - time.monotonic() >= seconds

    def _arm(self, conn: psycopg.AsyncConnection[Any]) -> None:
        loop, seconds = asyncio.get_running_loop(), self._patience()

        def impatient() -> None:
            self._breaking = loop.create_task(self._break_off(conn, seconds))

        self._timer = loop.call_later(seconds, impatient)

    async def _break_off(self, conn: psycopg.AsyncConnection[Any], seconds: float) -> None:
        """Ask the server to stop, in case it waits for a lock: no turn may happen behind our back. If it does
        not answer that either, or if there would be no time left for another try, close the connection.
        """
        log.warning("no_answer", "no answer from %s for %.0f s", self._called, seconds)
        if self.has_time(2 * CANCEL_SECONDS + ONE_TRY) and psycopg.capabilities.has_cancel_safe():
            with contextlib.suppress(*FAILURES):
                await conn.cancel_safe(timeout=CANCEL_SECONDS)
                await asyncio.sleep(CANCEL_SECONDS)
        hang_up(conn)

    def lead_to(self, dsn: str, name: str) -> None:
        """Set where the next connection goes."""
        self._conninfo = conninfo(dsn, "fairq worker")
        self._called = f"the database at {name}" if name else "the database"

    def prepare_statements(self) -> None:
        """Prepare statements from now on. Only for connections that are sessions: behind a pooler in
        transaction mode, a prepared statement may be elsewhere.
        """
        self._prepares = True
        if self.conn is not None:
            self.conn.prepare_threshold = PREPARE_AFTER

    async def disconnect(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            with contextlib.suppress(*FAILURES):
                await conn.close()

    @property
    def is_broken(self) -> bool:
        return self.conn is None or self.conn.closed

    # --- Whether to try ---

    @property
    def state(self) -> circuit.State:
        return self._breaker.state

    def pause(self, now: float) -> float:
        """Seconds until the next try; 0 or less: now."""
        if self._breaker.state == "open":
            return circuit.wait(self._breaker, now)
        # Also when half open: turns are sequential, so no probe is on its way; the last one had nothing to
        # send.
        return self.not_before - now

    def probe(self, now: float) -> None:
        """Call right before a try, which may be the breaker's one probe."""
        self._breaker, _ = circuit.may_pass(self._breaker, now)

    def succeeded(self) -> None:
        if self.failures:
            log.info("database_back", "%s is back", self._called)
        self.failures = 0
        self.answered()

    def answered(self) -> None:
        """The database answered the keeper or the listener, so there is no reason to wait."""
        self.not_before = 0.0
        if self._breaker.state != "closed":
            log.info("circuit_closed", "[circuit closed] %s answers", self._called)
        self._breaker = circuit.succeeded(self._breaker)

    def failed(self, exc: BaseException, what: str, most: int = 0) -> None:
        """Record a failure. Raises Unavailable if it was the last of `db_retry_max_attempts`, or of `most`
        tries; 0: no limit.
        """
        now = time.monotonic()
        before = self._breaker.state
        if is_down(exc):
            self._breaker = circuit.failed(self._breaker, now)
        else:  # it does answer
            self._breaker = circuit.succeeded(self._breaker)
        self.failures += 1
        settings = self._settings
        most = settings.db_retry_max_attempts or most
        pause = plan.retry_delay(
            self.failures, settings.db_retry_initial_ms / 1000, settings.db_retry_max_ms / 1000
        )
        if self._deadline is not None:  # rather try again than pause until the end
            pause = min(pause, max(self._deadline - now - ONE_TRY, 0) / 2)
        self.not_before = now + pause
        error = explain(exc)
        log.warning(
            "database_failed",
            "failed %s%s: %s",
            what,
            f", {self.failures} times in a row" if self.failures > 1 else "",
            error,
        )
        if self._breaker.state == "open" and before != "open":
            self.trips += 1
            log.warning(
                "circuit_open",
                "[circuit open] leaving %s alone for %.1f s",
                self._called,
                circuit.wait(self._breaker, now),
            )
        if most and self.failures >= most and self._is_last():
            raise Unavailable(
                f"{self._called} failed {self.failures} times in a row: {error}",
                "db_retry_max_attempts says when to give up.",
            ) from exc
