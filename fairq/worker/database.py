"""The connection for the turns, and how it is gone without: pauses that grow, and the circuit breaker."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import psycopg

from fairq.errors import Unavailable
from fairq.worker import breaker as circuit
from fairq.worker import plan
from fairq.worker.config import Settings
from fairq.worker.connect import FAILURES, conninfo, explain

__all__ = ["Database"]

log = logging.getLogger("fairq.worker")

# A statement is prepared when it was sent so often.
PREPARE_AFTER = 3


class Database:
    """Tell it of each try: `succeeded`, or `failed`. It says when the next one may be made."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self.conn: psycopg.AsyncConnection[Any] | None = None
        self.asks_for_isolation = False
        """The engine needs READ COMMITTED. Where a role or a database says otherwise, each turn says so."""
        self._prepares = False
        self._settings = settings
        self._conninfo = conninfo(dsn, "fairq worker")
        self._failures = 0
        self._not_before = 0.0
        self._breaker = circuit.Breaker(settings.breaker_threshold, settings.breaker_cooldown_ms / 1000)

    async def connected(self) -> psycopg.AsyncConnection[Any]:
        conn = self.conn
        if conn is None or conn.closed:
            self.conn = None
            conn = await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, prepare_threshold=None
            )
            self.conn = conn
            if self._prepares:
                conn.prepare_threshold = PREPARE_AFTER
            found = await (await conn.execute("show default_transaction_isolation")).fetchone()
            self.asks_for_isolation = found is not None and found[0] != "read committed"
        return conn

    def prepare_statements(self) -> None:
        """From now on. Only where a connection is a session: behind a pooler that hands out connections by
        transaction, a prepared statement may be somewhere else.
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

    def may_connect(self) -> bool:
        """For others than the turns: not while the database is left alone."""
        return self._breaker.state == "closed"

    def pause(self, now: float) -> float:
        """Seconds until the next try; not positive: now."""
        if self._breaker.state == "half_open":
            # Turns follow each other, so no probe is out: who was let through had nothing to send after all.
            return self._not_before - now
        return max(self._not_before - now, circuit.wait(self._breaker, now))

    def pause_at_the_end(self, now: float) -> float:
        """The same without the breaker: who is to end has no time to leave anybody alone."""
        return self._not_before - now

    def may_pass(self, now: float) -> bool:
        """Ask right before a try: it may be the breaker's one probe."""
        self._breaker, passes = circuit.may_pass(self._breaker, now)
        return passes or self._breaker.state == "half_open"

    def succeeded(self) -> None:
        if self._failures:
            log.info("the database is back", extra={"action": "database_back"})
        self._failures = 0
        self._not_before = 0.0
        self._breaker = circuit.succeeded(self._breaker)

    def failed(self, exc: BaseException, what: str) -> None:
        """Raises Unavailable when it was the last try."""
        now = time.monotonic()
        before = self._breaker.state
        self._breaker = circuit.failed(self._breaker, now)
        self._failures += 1
        settings = self._settings
        pause = plan.retry_delay(
            self._failures, settings.db_retry_initial_ms / 1000, settings.db_retry_max_ms / 1000
        )
        self._not_before = now + pause
        error = explain(exc)
        log.warning(
            "failed %s, %d times in a row: %s",
            what,
            self._failures,
            error,
            extra={"action": "database_failed"},
        )
        if self._breaker.state == "open" and before != "open":
            log.warning(
                "[circuit open] the database is left alone for %.0f s",
                self._breaker.cooldown,
                extra={"action": "circuit_open"},
            )
        if settings.db_retry_max_attempts and self._failures >= settings.db_retry_max_attempts:
            raise Unavailable(
                f"the database failed {self._failures} times in a row: {error}",
                "db_retry_max_attempts says when to give up; 0 means never.",
            ) from exc
