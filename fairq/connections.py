"""One way to run a statement on every kind of connection that an application may hand us.

| connection                                            | how                                           |
|-------------------------------------------------------|-----------------------------------------------|
| psycopg Connection, AsyncConnection                   | a raw cursor of our own: any row factory,     |
|                                                       | cursor factory or pipeline is left alone      |
| SQLAlchemy Connection, Session, scoped_session,       | text() on the connection, so that SQLAlchemy  |
| and their async twins, any PostgreSQL driver          | knows of the transaction                      |
| Django connection (also `connections["…"]`)           | its cursor                                    |

The caller owns the connection and its transaction. Nothing here commits, rolls back, or changes a setting.
A library is looked for among the modules already imported: whoever passes one of its connections has imported
it.

Parameters are None, bool, int, float, str, and lists of those; statements cast each one (`$2::text::jsonb`),
so no driver has to know a type, and no codec that the application set is in the way.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, LiteralString, Protocol, TypeAlias, TypeVar, cast, overload

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row
from psycopg.types.array import ListBinaryDumper
from psycopg.types.string import StrBinaryDumper

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


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A statement with `$n` parameters, and what to make of its rows."""

    sql: LiteralString
    params: tuple[Any, ...]
    read: Callable[[list[Row]], T]
    has_rows: bool = True


@overload
def run(conn: SyncConnection, call: Call[T]) -> T: ...
@overload
def run(conn: AsyncConnection, call: Call[T]) -> Coroutine[Any, Any, T]: ...
def run(conn: Any, call: Call[T]) -> T | Coroutine[Any, Any, T]:
    """Run a call on a connection; on an async one, return a coroutine that does."""
    kind = _kind(conn)
    if kind in _ASYNC:
        return _run_async(_ASYNC[kind], conn, call)
    with translating():
        return call.read(_SYNC[kind](conn, call))


async def _run_async(
    fetch: Callable[[Any, Call[T]], Coroutine[Any, Any, list[Row]]], conn: Any, call: Call[T]
) -> T:
    with translating():
        return call.read(await fetch(conn, call))


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

# Arrays and text go in binary form: ten thousand payloads take 4 ms instead of 70.
_adapters = AdaptersMap(psycopg.adapters)
_adapters.register_dumper(list, ListBinaryDumper)
_adapters.register_dumper(str, StrBinaryDumper)


class _Cursor(psycopg.RawCursor[Row]):
    @property
    def adapters(self) -> AdaptersMap:
        return _adapters


class _AsyncCursor(psycopg.AsyncRawCursor[Row]):
    @property
    def adapters(self) -> AdaptersMap:
        return _adapters


def _psycopg(conn: psycopg.Connection[Any], call: Call[Any]) -> list[Row]:
    cursor = _Cursor(conn, row_factory=tuple_row).execute(call.sql, call.params)
    return cursor.fetchall() if call.has_rows else []


async def _psycopg_async(conn: psycopg.AsyncConnection[Any], call: Call[Any]) -> list[Row]:
    cursor = await _AsyncCursor(conn, row_factory=tuple_row).execute(call.sql, call.params)
    return await cursor.fetchall() if call.has_rows else []


# --- SQLAlchemy ------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"\$(\d+)")


@lru_cache(maxsize=64)
def _alchemy_text(sql: LiteralString) -> Any:
    """The statement for SQLAlchemy. Parameters without a type: drivers then ask the server, which sees the
    cast.
    """
    from sqlalchemy import bindparam, text
    from sqlalchemy.types import NullType

    count = max((int(number) for number in _NUMBERED.findall(sql)), default=0)
    named = _NUMBERED.sub(r"(:p\1)", sql)
    return text(named).bindparams(*(bindparam(f"p{n}", type_=NullType()) for n in range(1, count + 1)))


def _named(call: Call[Any]) -> dict[str, Any]:
    return {f"p{number}": value for number, value in enumerate(call.params, 1)}


def _rows(result: Any) -> list[Row]:
    return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


def _check_dialect(conn: AlchemyConnection | AlchemyAsyncConnection) -> None:
    if conn.dialect.name != "postgresql":
        raise UnsupportedConnection(f"SQLAlchemy's connection is to {conn.dialect.name}, not to PostgreSQL")


def _alchemy(conn: AlchemyConnection, call: Call[Any]) -> list[Row]:
    _check_dialect(conn)
    return _rows(conn.execute(_alchemy_text(call.sql), _named(call)))


def _alchemy_session(session: Session, call: Call[Any]) -> list[Row]:
    return _alchemy(session.connection(), call)


async def _alchemy_async(conn: AlchemyAsyncConnection, call: Call[Any]) -> list[Row]:
    _check_dialect(conn)
    return _rows(await conn.execute(_alchemy_text(call.sql), _named(call)))


async def _alchemy_async_session(session: AsyncSession, call: Call[Any]) -> list[Row]:
    return await _alchemy_async(await session.connection(), call)


# --- Django ----------------------------------------------------------------------------------------


def _django(conn: DjangoConnection, call: Call[Any]) -> list[Row]:
    # %s by position: a parameter that a statement names twice is passed twice.
    order = [int(number) - 1 for number in _NUMBERED.findall(call.sql)]
    with conn.cursor() as cursor:
        cursor.execute(
            _NUMBERED.sub("%s", call.sql.replace("%", "%%")), [call.params[position] for position in order]
        )
        return [tuple(row) for row in cursor.fetchall()] if call.has_rows else []


_SYNC: dict[str, Callable[[Any, Call[Any]], list[Row]]] = {
    "psycopg": _psycopg,
    "alchemy": _alchemy,
    "alchemy_session": _alchemy_session,
    "django": _django,
}
_ASYNC: dict[str, Callable[[Any, Call[Any]], Coroutine[Any, Any, list[Row]]]] = {
    "psycopg_async": _psycopg_async,
    "alchemy_async": _alchemy_async,
    "alchemy_async_session": _alchemy_async_session,
}
