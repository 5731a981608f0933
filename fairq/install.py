"""The engine's SQL: where it is, which version a database has, and how it gets another one.

Importing this module loads neither Alembic nor SQLAlchemy; only :func:`migrate`, :func:`upgrade` and
:func:`downgrade` do.

Words: a *revision* is one step of the schema, called ``fairq_0001``; its files in ``migrations/versions`` are
``0001_name.py``, ``.up.sql``, ``.down.sql``. *base* is a database without fairq, *head* the newest revision
this code knows.

Errors::

    InstallError
    ├── PackageBroken       the SQL files are not where they should be
    ├── UnknownRevision     no revision has that name
    ├── SchemaMissing       fairq is not installed in this database
    ├── SchemaTooOld        the database is behind the code
    ├── SchemaTooNew        the database is ahead of the code
    ├── SchemaForeign       schema fairq holds objects, but no version that we know
    ├── SchemaBusy          somebody held a lock for too long
    └── WouldLoseData       a downgrade would throw tasks away
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from psycopg import sql
from psycopg.rows import tuple_row

from fairq.errors import FairqError, TasksWouldBeLost

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection
    from sqlalchemy.engine import Connection as AlchemyConnection

__all__ = [
    "Applied",
    "Blocker",
    "InstallError",
    "Migration",
    "PackageBroken",
    "Revision",
    "SchemaBusy",
    "SchemaForeign",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "Step",
    "UnknownRevision",
    "Waiting",
    "WouldLoseData",
    "acheck_version",
    "check_version",
    "downgrade",
    "head",
    "load_sql",
    "migrate",
    "migrations_dir",
    "plan",
    "resolve",
    "revisions",
    "run_revision",
    "schema_version",
    "script",
    "sql_dir",
    "sql_files",
    "upgrade",
    "version_location",
]

SCHEMA = "fairq"
VERSION_TABLE = "schema_version"

# Where the engine's files are, in the order in which they are loaded; sql/README.md says what is where.
ROOMS = ("schema", "create", "promote", "pop", "leave", "policies", "control", "upkeep", "views")
LAST = ("first_rows.sql", "grants.sql")
BASE = "base"
HEAD = "head"

# Every way of changing the schema takes this lock first, to the end of its transaction: a
# transaction-scoped lock also holds behind a pooler that gives each transaction another connection. The
# number is 'fairq' in ASCII.
LOCK_KEY = 0x6661697271

Direction = Literal["up", "down"]


class InstallError(FairqError):
    """Something about the installed schema, with a hint at what to do."""

    code = "install"


class PackageBroken(InstallError):
    code = "package_broken"
    exit_code = 70


class UnknownRevision(InstallError):
    code = "unknown_revision"
    exit_code = 2


class SchemaMissing(InstallError):
    code = "schema_missing"
    exit_code = 1


class SchemaTooOld(InstallError):
    code = "schema_too_old"
    exit_code = 1


class SchemaTooNew(InstallError):
    code = "schema_too_new"
    exit_code = 4


class SchemaForeign(InstallError):
    code = "schema_foreign"
    exit_code = 4


class SchemaBusy(InstallError):
    code = "schema_busy"
    exit_code = 5


class WouldLoseData(InstallError, TasksWouldBeLost):
    code = "would_lose_data"
    exit_code = 6


@dataclass(frozen=True)
class Revision:
    """One step of the schema: ``id`` is its name in the database, ``stem`` that of its files."""

    id: str
    stem: str
    folder: Path
    breaking: bool

    def file(self, direction: Direction) -> Path:
        return self.folder / f"{self.stem}.{direction}.sql"

    def text(self, direction: Direction) -> str:
        return self.file(direction).read_text("utf-8")


@dataclass(frozen=True)
class Step:
    """Running one revision's file; ``result`` is the version afterwards, None for base."""

    revision: Revision
    direction: Direction
    result: str | None


@dataclass(frozen=True)
class Applied:
    """Event: one step is committed. ``remaining`` steps follow."""

    step: Step
    seconds: float
    remaining: int


@dataclass(frozen=True)
class Blocker:
    """A session that holds what we wait for; ``pid`` 0 is a prepared transaction."""

    pid: int
    user: str | None
    application: str | None
    state: str | None
    query: str | None
    seconds: float | None

    def __str__(self) -> str:
        if self.pid == 0:
            return "a prepared transaction (see pg_prepared_xacts)"
        about = [
            text
            for text in (
                self.application,
                self.user and f"user {self.user}",
                self.state,
                self.seconds is not None and f"transaction open for {self.seconds:.0f} s",
            )
            if text
        ]
        facts = f" ({', '.join(about)})" if about else ""
        query = f": {' '.join(self.query.split())[:120]}" if self.query else ""
        return f"pid {self.pid}{facts}{query}"


@dataclass(frozen=True)
class Waiting:
    """Event: a lock is not to be had yet."""

    blockers: tuple[Blocker, ...]
    seconds: float


@dataclass(frozen=True)
class Migration:
    """What a call did: the version before and after, and the steps that this call itself ran."""

    before: str | None
    after: str | None
    steps: tuple[Applied, ...]


Report = Callable[[Applied | Waiting], None]

# --- The files ------------------------------------------------------------------------------------


def _shipped(name: str) -> Path:
    """A folder of SQL: inside the installed package, or in the checkout of an editable install."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_packaged" / name, here.parent / name):
        if folder.is_dir():
            return folder
    raise PackageBroken(
        f"fairq's folder '{name}' is missing beside {here}",
        "Install fairq again from a wheel, or keep the checkout of an editable install in place.",
    )


def sql_dir() -> Path:
    """The engine as it is today: schema/, functions/, grants.sql, queries/."""
    return _shipped("sql")


def migrations_dir() -> Path:
    """The folder that Alembic calls a script location: env.py, script.py.mako, versions/."""
    return _shipped("migrations")


def version_location() -> str:
    """The path to put into ``version_locations`` of your own Alembic tree."""
    return str(migrations_dir() / "versions")


def sql_files(root: Path | None = None) -> list[Path]:
    """The engine's files in loading order: tables, then the rooms in the order of a task's life."""
    root = root or sql_dir()
    found = [file for room in ROOMS for file in sorted((root / room).glob("*.sql"))]
    return [*found, *(root / name for name in LAST if (root / name).exists())]


@cache
def revisions(folder: Path | None = None) -> tuple[Revision, ...]:
    """Every revision this code knows, oldest first."""
    folder = folder or migrations_dir() / "versions"
    found = []
    for file in sorted(folder.glob("[0-9]*.py")):
        stem = file.stem
        first = (folder / f"{stem}.up.sql").read_text("utf-8")
        breaking = re.search(r"^--! breaking-change\b", first, re.MULTILINE) is not None
        found.append(Revision(f"fairq_{stem.split('_', 1)[0]}", stem, folder, breaking))
    return tuple(found)


def head() -> str | None:
    """The newest revision this code knows."""
    known = revisions()
    return known[-1].id if known else None


def resolve(name: str) -> str | None:
    """The revision that a person means: head, base, 3, 0003, fairq_0003 or 0003_name. None is base."""
    if name == BASE:
        return None
    if name == HEAD:
        return head()
    number = re.fullmatch(r"(?:fairq_)?(\d{1,4})", name)
    for revision in revisions():
        if revision.stem == name or (number and revision.id == f"fairq_{int(number[1]):04d}"):
            return revision.id
    raise UnknownRevision(
        f"there is no revision '{name}'", f"Known: base, {', '.join(r.id for r in revisions())} (head)."
    )


def _index(version: str | None, known: Sequence[Revision]) -> int:
    """The number of revisions a database at this version has had."""
    if version is None:
        return 0
    for index, revision in enumerate(known, 1):
        if revision.id == version:
            return index
    raise _stranger(version, known)


def _stranger(version: str, known: Sequence[Revision]) -> InstallError:
    newest = known[-1].id if known else "nothing"
    if re.fullmatch(r"fairq_\d{4}", version):
        return SchemaTooNew(
            f"the database is at {version}, this fairq knows only up to {newest}",
            "Use the newer release of fairq that migrated the database, here as well.",
        )
    return SchemaForeign(
        f"the database says that it is at '{version}', which is no revision of fairq",
        "Look at the table fairq.schema_version: some other tool may have written to it.",
    )


def plan(version: str | None, target: str | None, known: Sequence[Revision] | None = None) -> list[Step]:
    """The steps from one version to another, in order."""
    known = revisions() if known is None else known
    start, end = _index(version, known), _index(target, known)
    if start <= end:
        return [Step(revision, "up", revision.id) for revision in known[start:end]]
    return [Step(known[i], "down", known[i - 1].id if i else None) for i in range(start - 1, end - 1, -1)]


def _oldest_code(version: str, known: Sequence[Revision]) -> str:
    """The oldest code that may work with a database at this version: the last breaking change up to it."""
    past = known[: _index(version, known)]
    return next((revision.id for revision in reversed(past) if revision.breaking), past[0].id)


# --- SQL around the files -------------------------------------------------------------------------

# 'create schema if not exists' asks for the right to create schemas even when it exists; an administrator
# may have made it for us. The column oldest_code lets code that is behind the database know whether it may
# still work.
_BOOTSTRAP = """\
do $$
begin
  if to_regnamespace('fairq') is null then
    create schema fairq;
  end if;
end
$$;
create table if not exists fairq.schema_version (
  version_num varchar(32) not null constraint schema_version_pkc primary key,
  oldest_code varchar(32) not null default 'fairq_0001'
);
comment on table fairq.schema_version is
  'The revision of this schema. Written by migrations only.';
comment on column fairq.schema_version.version_num is
  'The newest revision that was applied.';
comment on column fairq.schema_version.oldest_code is
  'Code that knows at least this revision may work with this database.';
"""

_TEARDOWN = """\
drop table fairq.schema_version;
drop schema fairq;
"""

_VERSION_EXISTS = "select pg_catalog.to_regclass('fairq.schema_version') is not null"
_VERSION = "select version_num, oldest_code from fairq.schema_version"


def _record(version: str | None) -> str:
    """Statements that write down the version; at base nothing of fairq is left."""
    if version is None:
        return _TEARDOWN
    statement = sql.SQL(
        "delete from fairq.schema_version;\n"
        "insert into fairq.schema_version (version_num, oldest_code) values ({}, {});\n"
    )
    return statement.format(version, _oldest_code(version, revisions())).as_string(None)


# A script may meet a database at another version than it was made for. Dynamic SQL, because the table may
# be missing.
_GUARD = """\
do $guard$
declare
  v_version text;
begin
  perform pg_advisory_xact_lock({key});
  if to_regclass('fairq.schema_version') is not null then
    execute 'select version_num from fairq.schema_version' into v_version;
  end if;
  if v_version is distinct from {version} then
    raise exception 'this script expects fairq at {shown}, the database is at %', coalesce(v_version, 'base')
      using errcode = '55000',
            hint = 'Make the script that fits: fairq sql --from <version of the database>.';
  end if;
end
$guard$;
"""


def _guard(version: str | None) -> str:
    parts = {"key": sql.Literal(LOCK_KEY), "version": sql.Literal(version), "shown": sql.SQL(version or BASE)}
    return sql.SQL(_GUARD).format(**parts).as_string(None)


def script(start: str = BASE, to: str = HEAD) -> str:
    """Plain SQL from one version to another, for psql or any other tool; each step is one transaction."""
    version, target = resolve(start), resolve(to)
    parts = [f"-- fairq: {version or BASE} -> {target or BASE}\n"]
    for step in plan(version, target):
        parts += [
            f"\n-- {step.revision.stem}, {step.direction}\nbegin;\n",
            _guard(version),
            _BOOTSTRAP if version is None else "",
            step.revision.text(step.direction),
            _record(step.result),
            "commit;\n",
        ]
        version = step.result
    return "".join(parts)


def load_sql(conn: Connection[Any], root: Path | None = None) -> None:
    """Build the engine from ``sql/`` in an empty database, without migrations: for tests and code generation.

    The database says afterwards that it is at head; the drift test proves that this is true.
    """
    with conn.transaction():
        # Function bodies refer to each other, whatever their order; an empty path shows every name that is
        # not qualified.
        conn.execute("set local client_encoding = 'UTF8'")
        conn.execute("set local check_function_bodies = off")
        conn.execute("set local search_path = ''")
        conn.execute(_BOOTSTRAP.encode())
        for file in sql_files(root):
            try:
                conn.execute(file.read_bytes())
            except Exception as exc:
                exc.add_note(f"while loading {file}")
                raise
        newest = head()
        if newest:
            conn.execute(_record(newest).encode())


# --- Which version has it -------------------------------------------------------------------------


def schema_version(conn: Connection[Any]) -> str | None:
    """The revision of the database, None when fairq is not installed. Commits nothing."""
    row = _read(conn)
    return None if row is None else row[0]


def check_version(conn: Connection[Any]) -> str:
    """The revision of the database; raises when this code must not work with it. For workers."""
    return judge(_read(conn), revisions())


async def acheck_version(conn: AsyncConnection[Any]) -> str:
    """:func:`check_version` for an asynchronous connection."""
    async with conn.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(_VERSION_EXISTS)
        exists = await cursor.fetchone()
        row = None
        if exists and exists[0]:
            await cursor.execute(_VERSION)
            row = await cursor.fetchone()
    return judge(row, revisions())


def _read(conn: Connection[Any]) -> tuple[str, str] | None:
    with conn.cursor(row_factory=tuple_row) as cursor:
        exists = cursor.execute(_VERSION_EXISTS).fetchone()
        if not exists or not exists[0]:
            return None
        return cursor.execute(_VERSION).fetchone()


def judge(row: tuple[str, str] | None, known: Sequence[Revision]) -> str:
    """Decide from the row of ``fairq.schema_version`` whether code with these revisions may work with it."""
    if row is None:
        raise SchemaMissing("fairq is not installed in this database", "Run: fairq migrate")
    version, oldest_code = row
    ids = [revision.id for revision in known]
    if version in ids:
        if version != ids[-1]:
            raise SchemaTooOld(
                f"the database is at {version}, this fairq needs {ids[-1]}", "Run: fairq migrate"
            )
        return version
    # The database is ahead. It says itself whether code as old as this one still fits.
    if re.fullmatch(r"fairq_\d{4}", version) and oldest_code in ids:
        return version
    raise _stranger(version, known)


# --- Changing it ----------------------------------------------------------------------------------


def migrate(
    dsn: str,
    *,
    to: str = HEAD,
    lock_timeout: float = 3.0,
    patience: float = 300.0,
    report: Report = lambda event: None,
) -> Migration:
    """Bring the database to a revision, each step in its own transaction. Many may call it at once.

    A step gives up its place in the lock queue after ``lock_timeout`` seconds, so that it does not hold up
    the application's own statements behind it, and tries again, for ``patience`` seconds in all. Raises
    :class:`SchemaBusy` then, :class:`SchemaTooNew`, :class:`WouldLoseData`, or what the database says.
    """
    from fairq import _migration

    return _migration.migrate(dsn, resolve(to), lock_timeout, patience, report)


def upgrade(bind: AlchemyConnection, to: str = HEAD, *, start: str = BASE) -> None:
    """Bring the schema up to a revision in the caller's transaction: for a revision of your own Alembic tree.

    Give ``to`` a fixed revision, so that your own history stays reproducible. Does nothing when the schema
    is there already. ``start`` counts only offline (``alembic --sql``), where no database can be asked.
    """
    from fairq import _migration

    _migration.run_inside(bind, resolve(to), resolve(start), "up")


def downgrade(bind: AlchemyConnection, to: str = BASE, *, start: str = HEAD) -> None:
    """The way back from :func:`upgrade`; refuses, like every downgrade, when tasks would be lost."""
    from fairq import _migration

    _migration.run_inside(bind, resolve(to), resolve(start), "down")


def run_revision(file: str, direction: Direction) -> None:
    """Run the SQL that lies beside a revision's Python file; our revisions consist of this call."""
    from fairq import _migration

    stem = Path(file).stem
    _migration.run_revision(next(r for r in revisions() if r.stem == stem), direction)
