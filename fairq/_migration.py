"""Running revisions with Alembic. Only :mod:`fairq.install` imports this, when somebody really migrates.

Each step is a transaction of its own that takes the lock, reads the version, and runs one revision. So the
version is never read before the lock is held, twenty migrators take turns without knowing each other, and
nothing is kept in the session: it works behind a pooler in transaction mode.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import alembic.context
import alembic.op
import psycopg
from alembic import command
from alembic.config import Config
from psycopg.rows import tuple_row
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.mock import MockConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from fairq import install
from fairq.install import Applied, Blocker, Direction, Migration, Report, Revision, Step, Waiting

# Errors after which the same step may well succeed.
_BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


def _connect(dsn: str) -> psycopg.Connection[Any]:
    conn = psycopg.connect(
        dsn, prepare_threshold=None, client_encoding="utf8", fallback_application_name="fairq migrate"
    )
    # What a step reads after it got the lock must be newer than the lock, whatever the role's default is.
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    conn.read_only = False
    return conn


def _engine(dsn: str) -> Engine:
    return create_engine("postgresql+psycopg://", creator=lambda: _connect(dsn), poolclass=NullPool)


def migrate(dsn: str, target: str | None, lock_timeout: float, patience: float, report: Report) -> Migration:
    with _connect(dsn) as conn:
        before = install.schema_version(conn)
    install.plan(before, target)  # refuses what we do not know, before anything is locked
    watch = _Watch(dsn, report, patience)
    applied: list[Applied] = []
    version = before
    engine = _engine(dsn)
    while version != target:
        started = time.monotonic()
        step, version = _retrying(engine, target, lock_timeout, watch)
        if step:
            remaining = len(install.plan(version, target))
            applied.append(Applied(step, time.monotonic() - started, remaining))
            watch.reset()
            report(applied[-1])
    return Migration(before, version, tuple(applied))


def _retrying(
    engine: Engine, target: str | None, lock_timeout: float, watch: _Watch
) -> tuple[Step | None, str | None]:
    for attempt in itertools.count():
        try:
            return _one_step(engine, target, lock_timeout, watch)
        except (DBAPIError, psycopg.Error) as exc:
            error = exc.orig if isinstance(exc, DBAPIError) else exc
            if not isinstance(error, _BUSY):
                raise _translated(error) from exc
            if watch.impatient():
                raise watch.busy() from error
        # Full jitter: twenty that were refused together do not come back together.
        time.sleep(random.uniform(0.05, min(5.0, 0.1 * 2 ** min(attempt, 10))))
    raise AssertionError("unreachable")


def _translated(error: BaseException | None) -> BaseException:
    """Ours where the error is ours, else the driver's own without SQLAlchemy's wrapping."""
    assert error
    if isinstance(error, psycopg.Error) and error.sqlstate == install.WouldLoseData.sqlstate:
        return install.WouldLoseData(error.diag.message_primary or str(error), error.diag.message_hint)
    return error


_SETTINGS = """
select set_config('lock_timeout', %s, true), set_config('statement_timeout', '0', true), pg_backend_pid()
"""


def _one_step(
    engine: Engine, target: str | None, lock_timeout: float, watch: _Watch
) -> tuple[Step | None, str | None]:
    """Run the next step towards the target, if there is one left. Returns it and the version afterwards."""
    try:
        with engine.begin() as conn:
            raw: psycopg.Connection[Any] = conn.connection.dbapi_connection  # type: ignore[assignment]
            row = raw.execute(_SETTINGS, (f"{round(lock_timeout * 1000)}ms",)).fetchone()
            assert row
            watch.start(row[2])
            raw.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
            version = install.schema_version(raw)
            steps = install.plan(version, target)
            if not steps:
                return None, version
            _run(conn, steps[0])
            return steps[0], steps[0].result
    finally:
        # Not before the transaction has ended: behind a pooler with one connection, the watch waits for ours.
        watch.stop()


def run_inside(bind: Connection, target: str | None, start: str | None, direction: Direction) -> None:
    """All steps in the caller's transaction, under the same lock. The caller's settings stay as they are."""
    if isinstance(bind, MockConnection):  # alembic --sql
        context = alembic.op.get_context()
        for step in install.plan(start, target):
            if step.direction == direction:
                _emit(context.impl.static_output, step)
        return
    _execute(bind, _LOCK)
    while True:
        steps = install.plan(_version(bind), target)
        if not steps or steps[0].direction != direction:
            return
        with _callers_proxies():
            _run(bind, steps[0])


_LOCK = f"select pg_advisory_xact_lock({install.LOCK_KEY})"


@contextmanager
def _callers_proxies() -> Iterator[None]:
    """Alembic's ``op`` and ``context`` belong to one run at a time; hand them back to the caller's run."""
    outer = [proxy for module in (alembic.op, alembic.context) if (proxy := getattr(module, "_proxy", None))]
    try:
        yield
    finally:
        for proxy in outer:
            proxy._install_proxy()


def _run(conn: Connection, step: Step) -> None:
    """One step in the transaction of this connection, with the lock held."""
    with _alembic:
        _run_alone(conn, step)


# What revisions reach as `op` is one per process.
_alembic = threading.RLock()


def _run_alone(conn: Connection, step: Step) -> None:
    if _before(step) is None:
        _refuse_strangers(conn)
        _execute(conn, install._BOOTSTRAP)
    config = Config()
    config.set_main_option("script_location", str(install.migrations_dir()).replace("%", "%%"))
    config.attributes["connection"] = conn
    if step.direction == "up":
        command.upgrade(config, step.revision.id)
    else:
        command.downgrade(config, step.result or install.BASE)
    # Alembic has written the version; this adds the oldest code that fits, or takes the last of fairq away.
    _execute(conn, install._record(step.result))


_STRANGERS = """
select c.relname
  from pg_catalog.pg_class as c
 where c.relnamespace = pg_catalog.to_regnamespace('fairq')
   and pg_catalog.to_regclass('fairq.schema_version') is null
 order by c.relname
 limit 1
"""


def _refuse_strangers(conn: Connection) -> None:
    """A schema named fairq without a version is not ours to build in."""
    found = conn.exec_driver_sql(_STRANGERS).scalar()
    if found:
        raise install.SchemaForeign(
            f"schema fairq has a table or view named {found}, but no version",
            "It was not made by migrations. Move it away (alter schema fairq rename to …) or drop it.",
        )


def _version(bind: Connection) -> str | None:
    if not bind.exec_driver_sql(install._VERSION_EXISTS).scalar():
        return None
    version: str | None = bind.exec_driver_sql(install._VERSION).scalar()
    return version


def _execute(bind: Connection, text: str) -> None:
    """Send a whole file as it is: SQLAlchemy would read ``:name`` in it, and drivers ``%``."""
    bind.exec_driver_sql("select 1")  # drivers that open their transaction late have opened it now
    driver: Any = bind.connection.dbapi_connection
    if hasattr(driver, "run_async") and bind.dialect.driver == "asyncpg":
        # Its cursor prepares, and only one statement can be prepared; its own execute() takes a script.
        driver.run_async(lambda conn: conn.execute(text))
        return
    cursor = driver.cursor()
    try:
        cursor.execute(text)
    finally:
        cursor.close()


# --- What the revisions call ----------------------------------------------------------------------


def run_revision(revision: Revision, direction: Direction) -> None:
    context = alembic.op.get_context()
    step = Step(revision, direction, revision.id if direction == "up" else _below(revision))
    ours = (context.version_table_schema, context.version_table) == (install.SCHEMA, install.VERSION_TABLE)
    if context.as_sql:
        _emit(context.impl.static_output, step)
        return
    bind = alembic.op.get_bind()
    if ours:
        _execute(bind, revision.text(direction))
        return
    # Somebody else's tree, with a version table of its own. fairq.schema_version stays the truth about the
    # schema: a step that `fairq migrate` or another revision has taken already is not taken again.
    _execute(bind, _LOCK)
    if install.plan(_version(bind), step.result)[:1] == [step]:
        if _before(step) is None:
            _refuse_strangers(bind)
            _execute(bind, install._BOOTSTRAP)
        _execute(bind, revision.text(direction))
        _execute(bind, install._record(step.result))


def _before(step: Step) -> str | None:
    """The version on which a step builds."""
    return _below(step.revision) if step.direction == "up" else step.revision.id


def _below(revision: Revision) -> str | None:
    known = install.revisions()
    index = known.index(revision)
    return known[index - 1].id if index else None


def _emit(output: Any, step: Step) -> None:
    """Alembic's offline output: the step with its guard, in whatever transaction the user's env.py opens."""
    output(install._guard(_before(step)))
    if _before(step) is None:
        output(install._BOOTSTRAP)
    output(step.revision.text(step.direction))
    output(install._record(step.result))


# --- Who is in the way ----------------------------------------------------------------------------

_BLOCKERS = """
select b.pid, a.usename, a.application_name, a.state, a.query,
       extract(epoch from clock_timestamp() - a.xact_start)::float8
  from unnest(pg_blocking_pids(%s)) as b(pid)
  left join pg_stat_activity as a on a.pid = b.pid
 order by a.xact_start nulls last
"""


class _Watch:
    """Looks, from a connection of its own, at what a step waits for. Patience counts from the first wait."""

    first_look = 0.3
    every = 1.0
    farewell = 5.0  # its connection may hang; that must not hold up the migration for good

    def __init__(self, dsn: str, report: Report, patience: float) -> None:
        self._dsn = dsn
        self._report = report
        self._patience = patience
        self._waiting_since: float | None = None
        self._blockers: tuple[Blocker, ...] = ()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, pid: int) -> None:
        """Watch one try of a step, in the session with this process id."""
        self._step_started = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(pid, self._done), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread:
            self._thread.join(self.farewell)

    def reset(self) -> None:
        self._waiting_since, self._blockers = None, ()

    def impatient(self) -> bool:
        """Called when a lock was refused: has this gone on for too long?"""
        if self._waiting_since is None:
            self._waiting_since = self._step_started
        return time.monotonic() - self._waiting_since >= self._patience

    def busy(self) -> install.SchemaBusy:
        who = "; ".join(str(blocker) for blocker in self._blockers) or "unknown (gone before we could look)"
        return install.SchemaBusy(
            f"gave up after {self._patience:.0f} s of waiting for a lock held by {who}",
            "End that transaction (select pg_terminate_backend(pid)), or wait longer with --patience.",
        )

    def _look(self, pid: int, done: threading.Event) -> None:
        if done.wait(self.first_look):
            return
        # Without a second connection (limits, a pooler) the migration goes on all the same, only silently.
        with (
            suppress(psycopg.Error, UnicodeError),
            psycopg.connect(
                self._dsn,
                autocommit=True,
                prepare_threshold=None,
                client_encoding="utf8",
                fallback_application_name="fairq migrate (watch)",
            ) as conn,
        ):
            while not done.is_set():
                cursor = conn.cursor(row_factory=tuple_row)
                found = tuple(Blocker(*row) for row in cursor.execute(_BLOCKERS, (pid,)))
                if found:
                    self._see(found)
                if done.wait(self.every):
                    return

    def _see(self, found: tuple[Blocker, ...]) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        news = [blocker.pid for blocker in found] != [blocker.pid for blocker in self._blockers]
        self._blockers = found
        if news:
            self._report(Waiting(found, now - self._waiting_since))
