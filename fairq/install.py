"""Installs the engine's SQL: finds the files, reads a database's version, and migrates to another one.

A *revision* is one step of the schema, named like ``fairq_0001``. *base* is a database without fairq, *head*
the newest revision that this code knows. A new database loads ``sql/``, the engine at head; an older one runs
the deltas in ``migrations/``. Why: docs/decisions/0010 and 0011.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psycopg

from fairq import citus
from fairq.connections import run
from fairq.driver import Query
from fairq.errors import FairqError, TasksWouldBeLost, sqlstate_of, translate
from fairq.queries import install as queries
from fairq.queries.models import FairqSchemaVersion

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection
    from sqlalchemy.engine import Connection as AlchemyConnection

# The folders of the engine's files, in loading order. See sql/README.md.
ROOMS = ("schema", "create", "promote", "pop", "leave", "policies", "control", "schedules", "upkeep", "views")
LAST = ("first_rows.sql", "grants.sql")
BASE = "base"
HEAD = "head"

# Whatever changes the schema takes this lock first. It is scoped to the transaction, so it also works behind
# a pooler. The number is 'fairq' in ASCII.
LOCK_KEY = 0x6661697271

Direction = Literal["up", "down"]
T = TypeVar("T")


class InstallError(FairqError, code="install"):
    """The installed schema does not fit, or cannot be changed."""


class PackageBroken(InstallError, exit_code=70): ...  # the SQL files are missing


class UnknownRevision(InstallError, exit_code=2): ...  # no revision has that name


class SchemaMissing(InstallError): ...  # fairq is not installed in this database


class SchemaTooOld(InstallError): ...  # the database is behind the code


class SchemaTooNew(InstallError, exit_code=4): ...  # the database is ahead of the code


class SchemaForeign(InstallError, exit_code=4): ...  # schema fairq has objects, but no version that we know


class SchemaBusy(InstallError, exit_code=5): ...  # somebody held a lock for too long


class WrongEncoding(InstallError, exit_code=4): ...  # the database does not know what its texts mean


class WouldLoseData(InstallError, TasksWouldBeLost, code="would_lose_data", exit_code=6): ...


@dataclass(frozen=True)
class Revision:
    """``id`` is its name in the database, ``stem`` the name of its files.

    Until the first release the initial revision has no files: it is ``sql/``.
    """

    id: str
    stem: str
    folder: Path
    breaking: bool

    def parts(self, direction: Direction) -> list[tuple[str, str]]:
        """Its SQL, as pairs of file name and text."""
        file = self.folder / f"{self.stem}.{direction}.sql"
        if direction == "up" and not file.exists():
            return _engine()
        if direction == "down" and self.id == FIRST:
            return [("the way back to base", _way_back("".join(text for _, text in self.parts("up"))))]
        return [(file.name, file.read_text("utf-8"))]


@dataclass(frozen=True)
class Step:
    """One revision, up or down. ``result`` is the version afterwards, None for base.

    A ``fresh`` step goes from base to head at once.
    """

    revision: Revision
    direction: Direction
    result: str | None
    fresh: bool = False

    @property
    def name(self) -> str:
        return f"{self.result}, the whole engine" if self.fresh else self.revision.stem

    def parts(self) -> list[tuple[str, str]]:
        return _engine() if self.fresh else self.revision.parts(self.direction)


@dataclass(frozen=True)
class Applied:
    """Event: one step is committed. ``remaining`` steps follow."""

    step: Step
    seconds: float
    remaining: int


@dataclass(frozen=True)
class Waiting:
    """Event: somebody holds a lock. Who does, by process id (0: prepared transaction) and in words."""

    pids: tuple[int, ...]
    held_by: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Migration:
    """What a call did: the version before and after, and the steps that this very call ran."""

    before: str | None
    after: str | None
    steps: tuple[Applied, ...]


# --- The files ------------------------------------------------------------------------------------

FIRST = "fairq_0001"
_BREAKING = re.compile(r"^--! breaking-change\b", re.MULTILINE)
# The bootstrap has made the schema. 'if not exists' would need the right to create it even if it exists.
_CREATE_SCHEMA = re.compile(r"^create schema (?:if not exists )?fairq\s*;\n", re.MULTILINE)


def _shipped(name: str) -> Path:
    """A folder of SQL in the installed package, or in the clone of an editable install."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_packaged" / name, here.parent / name):
        if folder.is_dir():
            return folder
    raise PackageBroken(
        f"fairq's folder '{name}' is missing beside {here}",
        "Install fairq again from a wheel, or keep the clone of an editable install in place.",
    )


def sql_dir() -> Path:
    """The engine as it is at head."""
    return _shipped("sql")


def migrations_dir() -> Path:
    """The initial revision as first released, and the deltas since. Nothing before the first release."""
    return _shipped("migrations")


def sql_files() -> list[Path]:
    """The engine's files in loading order."""
    root = sql_dir()
    found = [file for room in ROOMS for file in sorted((root / room).glob("*.sql"))]
    return [*found, *(root / name for name in LAST if (root / name).exists())]


def _text(name: str) -> str:
    return (sql_dir() / name).read_text("utf-8")


def _engine() -> list[tuple[str, str]]:
    """``sql/``, file by file. Function bodies are not checked: they refer to functions of later files."""
    files = [(file.name, _CREATE_SCHEMA.sub("", file.read_text("utf-8"))) for file in sql_files()]
    bodies = "set local check_function_bodies = {};\n"
    return [("first of all", bodies.format("off")), *files, ("last of all", bodies.format("on"))]


def revisions() -> tuple[Revision, ...]:
    """Every revision this code knows, oldest first."""
    folder = migrations_dir()
    texts = {file.name.split(".")[0]: file.read_text("utf-8") for file in folder.glob("[0-9]*.up.sql")}
    if not any(stem.startswith("0001") for stem in texts):
        texts["0001_initial"] = ""
    return tuple(
        Revision(f"fairq_{stem[:4]}", stem, folder, bool(_BREAKING.search(text)))
        for stem, text in sorted(texts.items())
    )


def head() -> str:
    """The newest revision this code knows."""
    return revisions()[-1].id


def resolve(name: str) -> str | None:
    """The revision for a name: head, base, 3, 0003, fairq_0003 or 0003_name. None is base."""
    known = revisions()
    if name in (BASE, HEAD):
        return known[-1].id if name == HEAD else None
    number = re.fullmatch(r"(?:fairq_)?(\d{1,4})", name)
    for revision in known:
        if revision.stem == name or (number and revision.id == f"fairq_{int(number[1]):04d}"):
            return revision.id
    raise UnknownRevision(
        f"there is no revision '{name}'", f"Known: base, {', '.join(r.id for r in known)} (head)."
    )


def plan(version: str | None, target: str | None, known: Sequence[Revision] | None = None) -> list[Step]:
    """The steps from one version to another, in order. From base to head is one step, ``sql/``."""
    known = revisions() if known is None else known
    start, end = _index(version, known), _index(target, known)
    if start == 0 and end == len(known):
        return [Step(known[-1], "up", target, fresh=True)]
    if start <= end:
        return [Step(revision, "up", revision.id) for revision in known[start:end]]
    return [Step(known[i], "down", known[i - 1].id if i else None) for i in range(start - 1, end - 1, -1)]


def _index(version: str | None, known: Sequence[Revision]) -> int:
    """The number of revisions a database at this version has had."""
    ids = [None, *(revision.id for revision in known)]
    if version not in ids:
        raise _stranger(version, known)
    return ids.index(version)


def _stranger(version: str | None, known: Sequence[Revision]) -> InstallError:
    if re.fullmatch(r"fairq_\d{4}", str(version)):
        return SchemaTooNew(
            f"the database is at {version}, but this fairq knows only up to {known[-1].id}",
            "Upgrade fairq here to the release that migrated the database.",
        )
    return SchemaForeign(
        f"the database is at '{version}', which is not a revision of fairq",
        "Look at the table fairq.schema_version: another tool may have written to it.",
    )


def _oldest_code(version: str, known: Sequence[Revision]) -> str:
    """The oldest code that may use a database at this version: that of the last breaking change up to it."""
    past = known[: _index(version, known)]
    return next((revision.id for revision in reversed(past) if revision.breaking), past[0].id)


# --- SQL around the files -------------------------------------------------------------------------

_RECORD = """\
delete from fairq.schema_version;
insert into fairq.schema_version (version_num, oldest_code) values ('{}', '{}');
"""

_TEARDOWN = "drop table fairq.schema_version;\ndrop schema fairq;\n"

_BODY = re.compile(r"(\$\w*\$).*?\1", re.DOTALL)
_CREATE = re.compile(
    r"^create (?:or replace )?(?:unlogged )?(materialized view|\w+) (?:if not exists )?([\w.]+)", re.MULTILINE
)
_DROPPED = {"materialized view", "table", "view", "function", "procedure", "sequence", "type", "domain"}
_GOES_ALONG = {"index", "unique", "statistics", "trigger", "schema", "role"}


def _created(text: str) -> list[tuple[str, str]]:
    """Kind and name of every object that the SQL creates and a downgrade must drop, in order."""
    found = dict.fromkeys(_CREATE.findall(_BODY.sub("", text)))
    if unknown := {kind for kind, _ in found} - _DROPPED - _GOES_ALONG:
        raise PackageBroken(f"fairq does not know how to undo 'create {', '.join(unknown)}'")
    return [(kind, name) for kind, name in found if kind in _DROPPED]


def _way_back(up: str) -> str:
    """SQL that drops everything that the initial revision made; it refuses while there are tasks.

    It drops the latest first, without cascade: objects that others built on fairq make it fail, and survive.
    """
    drops = (f"drop {kind} {name};\n" for kind, name in reversed(_created(up)))
    return "".join([_text("way_back.sql"), *drops])


def _record(version: str | None) -> str:
    """SQL that records the version, or removes the last of fairq at base."""
    return _RECORD.format(version, _oldest_code(version, revisions())) if version else _TEARDOWN


def _scripts(version: str | None, target: str | None, direction: Direction | None = None) -> list[str]:
    """A text for each step: it checks the version, runs the step and records the new version."""
    texts = []
    for step in plan(version, target):
        if direction in (None, step.direction):
            parts = (f"\n-- {name}\n\n{text.rstrip()}\n" for name, text in step.parts())
            guard = _text("guard.sql").format(key=LOCK_KEY, version=version or BASE)
            before = guard if version else guard + _text("bootstrap.sql")
            title = f"-- {step.name}, {step.direction}\n"
            texts.append("".join((title, before, *parts, _record(step.result))))
        version = step.result
    return texts


def statements(start: str, to: str) -> list[str]:
    """The SQL of each step, for tools that begin and commit themselves. Run each text as one."""
    return _scripts(resolve(start), resolve(to))


def script(start: str = BASE, to: str = HEAD) -> str:
    """Plain SQL from one version to another, for psql or another tool. Each step is one transaction."""
    version, target = resolve(start), resolve(to)
    steps = (f"\nbegin;\n{text}commit;\n" for text in _scripts(version, target))
    return "".join((f"-- fairq: {version or BASE} -> {target or BASE}\n", *steps))


# --- A database's version -------------------------------------------------------------------------


def schema_version(conn: Connection[Any]) -> str | None:
    """The revision of the database; None if fairq is not installed. Commits nothing."""
    row = _Session(conn).version()
    return row.version_num if row else None


def check_version(conn: Connection[Any]) -> str:
    """The revision of the database. Raises if this code must not use it."""
    return judge(_Session(conn).version(), revisions())


async def acheck_version(conn: AsyncConnection[Any]) -> str:
    """:func:`check_version` for an async connection."""
    row = await queries.schema_version(conn) if await queries.has_schema_version(conn) else None
    return judge(row, revisions())


def judge(row: FairqSchemaVersion | None, known: Sequence[Revision]) -> str:
    """Decide from the row of ``fairq.schema_version`` whether code with these revisions may use it."""
    if row is None:
        raise SchemaMissing("fairq is not installed in this database", "Run: fairq migrate")
    version, oldest_code = row.version_num, row.oldest_code
    ids = [revision.id for revision in known]
    if version in ids[:-1]:
        raise SchemaTooOld(
            f"the database is at {version}, but this fairq needs {ids[-1]}", "Run: fairq migrate"
        )
    # A newer database records the oldest code that still fits.
    if version == ids[-1] or (re.fullmatch(r"fairq_\d{4}", version) and oldest_code in ids):
        return version
    raise _stranger(version, known)


# --- Changing it ----------------------------------------------------------------------------------

_LOCK = f"select pg_advisory_xact_lock({LOCK_KEY})"


class _Session:
    """The caller's transaction on a psycopg connection."""

    def __init__(self, conn: Any) -> None:
        self.conn = conn

    def run(self, text: str) -> None:
        """Send a whole file."""
        self.conn.execute(text.encode())

    def ask(self, query: Query[[], T]) -> T:
        answer: T = query(self.conn)
        return answer

    def version(self) -> FairqSchemaVersion | None:
        return self.ask(queries.schema_version) if self.ask(queries.has_schema_version) else None

    def advance(self, target: str | None, only: Direction | None = None) -> tuple[Step | None, str | None]:
        """Run the next step towards the target, under the lock. Return the step and the new version."""
        row = self.version()
        version = row.version_num if row else None
        steps = plan(version, target)
        if not steps or only not in (None, steps[0].direction):
            return None, version
        if version is None:
            if not self.ask(queries.has_encoding):
                raise WrongEncoding(
                    "the encoding of this database is SQL_ASCII, in which JSON can have only English letters",
                    "Install fairq in one with: create database … encoding 'UTF8' template template0",
                )
            if found := self.ask(queries.some_relation):
                raise SchemaForeign(
                    f"schema fairq has a table or view named {found}, but no version",
                    "fairq did not make it. Rename it (alter schema fairq rename to …) or drop it.",
                )
            self.run(_text("bootstrap.sql"))
        for name, text in steps[0].parts():
            try:
                self.run(text)
            except Exception as exc:
                if sqlstate_of(exc) == WouldLoseData.sqlstate:
                    refused = translate(exc)
                    raise WouldLoseData(str(refused), refused.hint) from exc
                exc.add_note(f"while running {name}")
                raise
        self.run(_record(steps[0].result))
        return steps[0], steps[0].result


class _AlchemySession(_Session):
    """The same through SQLAlchemy, bypassing its ``:name`` parameters and the driver's ``%``."""

    def run(self, text: str) -> None:
        driver = self.conn.connection.dbapi_connection
        if self.conn.dialect.driver == "asyncpg":
            # Its cursor prepares, which works for one statement only; its execute() takes a script.
            driver.run_async(lambda conn: conn.execute(text))
            return
        cursor = driver.cursor()
        cursor.execute(text)
        cursor.close()

    def ask(self, query: Query[[], T]) -> T:
        answer: T = run(self.conn, query.call())
        return answer


def load_sql(conn: Connection[Any]) -> None:
    """Install the engine in an empty database, as :func:`migrate` does, but in your transaction."""
    with conn.transaction():
        # With an empty path, every unqualified name fails.
        conn.execute("set local client_encoding = 'UTF8'; set local search_path = ''")
        _Session(conn).advance(head())


def upgrade(bind: AlchemyConnection | Connection[Any], to: str = HEAD, *, start: str = BASE) -> None:
    """Upgrade the schema to a revision in the caller's transaction, for Alembic's and Django's migrations.

    Give ``to`` a fixed revision, so that your own history stays reproducible. Does nothing if the schema is
    there already. ``start`` matters only offline (``alembic --sql``), where there is no database to ask.
    """
    _inside(bind, resolve(to), resolve(start), "up")


def downgrade(bind: AlchemyConnection | Connection[Any], to: str = BASE, *, start: str = HEAD) -> None:
    """Undo :func:`upgrade`. Refuses, like every downgrade, if tasks would be lost."""
    _inside(bind, resolve(to), resolve(start), "down")


def _inside(
    bind: AlchemyConnection | Connection[Any], target: str | None, start: str | None, direction: Direction
) -> None:
    """Run all steps in the caller's transaction, under the same lock, without changing any setting."""
    if isinstance(bind, psycopg.Connection):
        session = _Session(bind)
    else:
        from sqlalchemy.engine.mock import MockConnection

        if isinstance(bind, MockConnection):  # alembic --sql
            import alembic.op

            for text in _scripts(start, target, direction):
                alembic.op.get_context().impl.static_output(text)
            return
        session = _AlchemySession(bind)
    if session.ask(queries.has_citus):
        raise citus.ClusterNotReady(
            "on Citus fairq is installed on all nodes, which takes more than one transaction",
            "Leave fairq out of your own migrations, and run: fairq migrate",
        )
    session.run(_LOCK)
    while session.advance(target, direction)[0]:
        pass


def migrate(
    dsn: str,
    *,
    to: str = HEAD,
    lock_timeout: float = 3.0,
    patience: float = 300.0,
    report: Callable[[Applied | Waiting], None] = lambda event: None,
) -> Migration:
    """Migrate the database to a revision, each step in its own transaction. Many processes may call it at
    once.

    A step that waits for a lock gives up after ``lock_timeout`` seconds, so that it does not hold up the
    application's statements behind it, and tries again, for ``patience`` seconds in all. Then it raises
    :class:`SchemaBusy`. Also raises :class:`SchemaTooNew`, :class:`WouldLoseData` and the database's errors.
    """
    target, how = resolve(to), _Patience(lock_timeout, patience, report)
    with contextlib.ExitStack() as stack:
        conn = stack.enter_context(_connect(dsn))
        nodes = citus.nodes(conn, sql_dir())
        if not nodes:
            return _bring(conn, target, how)
        if target != head():
            raise UnknownRevision(
                f"on Citus only the newest revision can be installed, not '{to}'",
                "To remove fairq: drop schema fairq_citus cascade; on the coordinator, then drop schema fairq"
                " cascade; on each node.",
            )
        conns = [conn, *(stack.enter_context(_connect(node.dsn(dsn))) for node in nodes[1:])]
        done = []
        for each in conns:
            citus.stay_local(each)
            done.append(_bring(each, target, how))
        citus.join(conn, dict(zip(nodes[1:], conns[1:], strict=True)), sql_dir())
        return Migration(done[0].before, target, tuple(step for one in done for step in one.steps))


def _connect(dsn: str) -> psycopg.Connection[Any]:
    conn = psycopg.connect(
        dsn,
        autocommit=True,
        prepare_threshold=None,
        client_encoding="utf8",
        fallback_application_name="fairq migrate",
    )
    # What a step reads must be newer than its lock, whatever the role's default is.
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    conn.read_only = False
    return conn


@dataclass(frozen=True)
class _Patience:
    """How long a step waits for a lock, how long it is retried, and whom to tell."""

    lock_timeout: float
    seconds: float
    report: Callable[[Applied | Waiting], None]


def _bring(conn: psycopg.Connection[Any], target: str | None, how: _Patience) -> Migration:
    """Migrate one database."""
    before = version = schema_version(conn)
    plan(before, target)  # refuses an unknown version before anything is locked
    applied: list[Applied] = []
    while version != target:
        started = time.monotonic()
        step, version = _retrying(conn, target, how)
        if step:
            applied.append(Applied(step, time.monotonic() - started, len(plan(version, target))))
            how.report(applied[-1])
    return Migration(before, version, tuple(applied))


# A role may have other defaults. With an empty path, every unqualified name fails.
_SETTINGS = """
select set_config('lock_timeout', %s, true), set_config('statement_timeout', '0', true),
       set_config('search_path', '', true), set_config('standard_conforming_strings', 'on', true)
"""


def _retrying(conn: Connection[Any], target: str | None, how: _Patience) -> tuple[Step | None, str | None]:
    """One step, retried until it gets its locks or patience ends."""
    since = time.monotonic()
    seen = Waiting((), ("somebody who has released it meanwhile",), 0)
    for attempt in itertools.count():
        try:
            with conn.transaction():
                conn.execute(_SETTINGS, (f"{round(how.lock_timeout * 1000)}ms",))
                conn.execute(_LOCK)
                return _Session(conn).advance(target)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as exc:
            waited = time.monotonic() - since
            rows = queries.blockers(conn, lock_key=LOCK_KEY, waited_seconds=how.lock_timeout)
            found = Waiting(tuple(row.pid for row in rows), tuple(row.held_by for row in rows), waited)
            if found.pids and found.pids != seen.pids:
                seen = found
                how.report(seen)
            if waited >= how.seconds:
                raise SchemaBusy(
                    f"gave up after waiting {waited:.0f} s for a lock held by {'; '.join(seen.held_by)}",
                    "End that transaction (select pg_terminate_backend(pid)), or wait longer: --patience.",
                ) from exc
        # Full jitter: twenty processes that were refused together do not retry together.
        time.sleep(random.uniform(0.05, min(5.0, 0.1 * 2 ** min(attempt, 10))))
    raise AssertionError("unreachable")
