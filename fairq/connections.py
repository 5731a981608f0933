"""One way to run a statement on every kind of connection that an application may hand us.

| connection                                            | how                                           |
|-------------------------------------------------------|-----------------------------------------------|
| psycopg Connection, AsyncConnection                   | a cursor of its own: any row factory, cursor  |
|                                                       | factory or pipeline is left alone             |
| SQLAlchemy Connection, Session, scoped_session,       | text() on the connection, so that SQLAlchemy  |
| and their async twins; psycopg, psycopg2, asyncpg     | knows of the transaction                      |
| Django connection (also `connections["…"]`)           | its cursor                                    |

The caller owns the connection and its transaction. Nothing here commits, rolls back, or changes a setting.
A library is looked for among the modules already imported: who passes its connection has imported it.

The statements are those of `sql/queries`, by way of the generated `fairq.queries`. psycopg connections run
the generated calls as they are. The others get the same text, with parameters that every driver can send:
None, bool, int, float, str, and lists of those. `client.sql` casts each one (`$2::text::jsonb`), so no driver
has to know a type, and no codec that the application set is in the way.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, LiteralString, Protocol, TypeAlias, TypeVar, cast, overload

import psycopg
from psycopg.rows import scalar_row

from fairq import driver
from fairq.errors import UnsupportedConnection, translating

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection as AlchemyConnection
    from sqlalchemy.ext.asyncio import AsyncConnection as AlchemyAsyncConnection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

__all__ = ["AsyncConnection", "Call", "DjangoConnection", "SyncConnection", "is_async", "run"]


class DjangoConnection(Protocol):
    """What we use of `django.db.connection`."""

    @property
    def vendor(self) -> str: ...
    @property
    def alias(self) -> str: ...
    def cursor(self) -> Any: ...


SyncConnection: TypeAlias = (
    "psycopg.Connection[Any] | AlchemyConnection | Session | scoped_session[Any] | DjangoConnection"
)
AsyncConnection: TypeAlias = (
    "psycopg.AsyncConnection[Any] | AlchemyAsyncConnection | AsyncSession | async_scoped_session[Any]"
)

T = TypeVar("T")
Row = tuple[Any, ...]


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Call(Generic[S, T]):
    """A generated call, and what to make of its answer."""

    query: driver.Call[S]
    read: Callable[[S], T]


@overload
def run(conn: SyncConnection, call: Call[Any, T]) -> T: ...
@overload
def run(conn: AsyncConnection, call: Call[Any, T]) -> Coroutine[Any, Any, T]: ...
def run(conn: Any, call: Call[Any, T]) -> T | Coroutine[Any, Any, T]:
    """Run a call on a connection; on an async one, return a coroutine that does."""
    kind = _kind(conn)
    if kind in _ASYNC:
        return _run_async(_ASYNC[kind], conn, call)
    with translating():
        return call.read(_SYNC[kind](conn, call.query))


async def _run_async(
    send: Callable[[Any, driver.Call[Any]], Coroutine[Any, Any, Any]], conn: Any, call: Call[Any, T]
) -> T:
    with translating():
        return call.read(await send(conn, call.query))


def is_async(conn: object) -> bool:
    """Whether calls on this connection are awaited. Raises UnsupportedConnection for anything unknown."""
    return _kind(conn) in _ASYNC


# --- Which kind ------------------------------------------------------------------------------------

_CLASSES = (
    ("psycopg", "Connection", "psycopg"),
    ("psycopg", "AsyncConnection", "psycopg_async"),
    ("sqlalchemy.engine", "Connection", "alchemy"),
    ("sqlalchemy.orm", "Session", "alchemy_session"),
    ("sqlalchemy.orm", "scoped_session", "alchemy_session"),
    ("sqlalchemy.ext.asyncio", "AsyncConnection", "alchemy_async"),
    ("sqlalchemy.ext.asyncio", "AsyncSession", "alchemy_async_session"),
    ("sqlalchemy.ext.asyncio", "async_scoped_session", "alchemy_async_session"),
    ("django.utils.connection", "ConnectionProxy", "django"),
    ("django.db.backends.base.base", "BaseDatabaseWrapper", "django"),
)


def _kind(conn: object) -> str:
    kind = _kind_of_class(type(conn))
    if kind is None:
        raise UnsupportedConnection(
            f"{type(conn).__module__}.{type(conn).__qualname__} is not a connection that fairq knows",
            "Pass a connection of psycopg 3, a Connection or Session of SQLAlchemy (sync or async), or "
            "Django's connection. Of a pool, take a connection first.",
        )
    if kind == "django" and cast(DjangoConnection, conn).vendor != "postgresql":
        raise UnsupportedConnection(
            f"Django's connection {cast(DjangoConnection, conn).alias!r} is not one to PostgreSQL"
        )
    return kind


# A class never changes its kind, but a library may be imported later: only what was found is kept.
_kinds: dict[type, str] = {}


def _kind_of_class(cls: type) -> str | None:
    found = _kinds.get(cls)
    if found is None:
        for module, name, kind in _CLASSES:
            known = getattr(sys.modules.get(module), name, None)
            if isinstance(known, type) and issubclass(cls, known):
                found = _kinds[cls] = kind
                break
    return found


# --- psycopg ---------------------------------------------------------------------------------------


def _psycopg(conn: psycopg.Connection[Any], query: driver.Call[Any]) -> Any:
    return driver.run(conn, query)


async def _psycopg_async(conn: psycopg.AsyncConnection[Any], query: driver.Call[Any]) -> Any:
    return await driver.run(conn, query)


# --- The others ------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"\$(\d+)")
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)


def _plain(value: Any) -> Any:
    """A parameter without psycopg's remarks about its type."""
    if isinstance(value, driver.Typed):
        value = value.value
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return value


def _answer(statement: driver.Statement[Any], rows: list[Row]) -> Any:
    """What psycopg's side would have made of the rows."""
    if statement.row is scalar_row:
        made: list[Any] = [row[0] for row in rows]
    else:
        # The generated factories call the row's class, and look at no cursor.
        make = statement.row(None)
        made = [make(row) for row in rows]
    if statement.command == "many":
        return made
    return made[0] if made else None


# --- SQLAlchemy ------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _alchemy_text(sql: LiteralString) -> Any:
    """The statement for SQLAlchemy.

    Its parameters have no type: drivers then ask the server, which sees the cast.
    """
    from sqlalchemy import bindparam, text
    from sqlalchemy.types import NullType

    sql = _COMMENT.sub("", sql)
    count = max((int(number) for number in _NUMBERED.findall(sql)), default=0)
    named = _NUMBERED.sub(r"(:p\1)", sql)
    return text(named).bindparams(*(bindparam(f"p{n}", type_=NullType()) for n in range(1, count + 1)))


def _named(query: driver.Call[Any]) -> dict[str, Any]:
    return {f"p{number}": _plain(value) for number, value in enumerate(query.params, 1)}


def _alchemy_answer(query: driver.Call[Any], result: Any) -> Any:
    rows = [tuple(row) for row in result.fetchall()] if result.returns_rows else []
    return _answer(query.statement, rows)


def _check_dialect(conn: AlchemyConnection | AlchemyAsyncConnection) -> None:
    if conn.dialect.name != "postgresql":
        raise UnsupportedConnection(f"SQLAlchemy's connection is to {conn.dialect.name}, not to PostgreSQL")


def _alchemy(conn: AlchemyConnection, query: driver.Call[Any]) -> Any:
    _check_dialect(conn)
    return _alchemy_answer(query, conn.execute(_alchemy_text(query.statement.sql), _named(query)))


def _alchemy_session(session: Session, query: driver.Call[Any]) -> Any:
    return _alchemy(session.connection(), query)


async def _alchemy_async(conn: AlchemyAsyncConnection, query: driver.Call[Any]) -> Any:
    _check_dialect(conn)
    return _alchemy_answer(query, await conn.execute(_alchemy_text(query.statement.sql), _named(query)))


async def _alchemy_async_session(session: AsyncSession, query: driver.Call[Any]) -> Any:
    return await _alchemy_async(await session.connection(), query)


# --- Django ----------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _django_text(sql: LiteralString) -> tuple[str, tuple[int, ...]]:
    """The statement with %s, and which parameter stands at each: one that is named twice is passed twice."""
    sql = _COMMENT.sub("", sql)
    order = tuple(int(number) - 1 for number in _NUMBERED.findall(sql))
    return _NUMBERED.sub("%s", sql.replace("%", "%%")), order


def _django(conn: DjangoConnection, query: driver.Call[Any]) -> Any:
    sql, order = _django_text(query.statement.sql)
    with conn.cursor() as cursor:
        cursor.execute(sql, [_plain(query.params[position]) for position in order])
        rows = [] if query.statement.command == "exec" else [tuple(row) for row in cursor.fetchall()]
    return _answer(query.statement, rows)


_SYNC: dict[str, Callable[[Any, driver.Call[Any]], Any]] = {
    "psycopg": _psycopg,
    "alchemy": _alchemy,
    "alchemy_session": _alchemy_session,
    "django": _django,
}
_ASYNC: dict[str, Callable[[Any, driver.Call[Any]], Coroutine[Any, Any, Any]]] = {
    "psycopg_async": _psycopg_async,
    "alchemy_async": _alchemy_async,
    "alchemy_async_session": _alchemy_async_session,
}
