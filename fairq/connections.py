"""One way to run a statement on every kind of connection that an application may hand us.

`on_connection` is the way of every public function from its arguments to a connection.

The caller owns the connection and its transaction. Nothing here commits, rolls back, or changes a setting.
A library is looked for among the modules already imported: who passes its connection has imported it.

The statements are those of `sql/queries`, by way of the generated `fairq.queries`. psycopg connections run
the generated calls as they are. The others get the same text, with parameters that every driver can send:
None, bool, int, float, str, and lists of those. `client.sql` casts each one (`$2::text::jsonb`), so no driver
has to know a type, and no codec that the application set is in the way.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, LiteralString, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import psycopg
from psycopg.pq import PipelineStatus

from fairq import driver
from fairq.driver import Call
from fairq.errors import UnsupportedConnection, translating
from fairq.queries import client as queries

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection as AlchemyConnection
    from sqlalchemy.ext.asyncio import AsyncConnection as AlchemyAsyncConnection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session


class DjangoConnection(Protocol):
    """What we use of `django.db.connection`."""

    @property
    def vendor(self) -> str: ...
    @property
    def alias(self) -> str: ...
    def cursor(self) -> Any: ...


class Psycopg2Connection(Protocol):
    """What we use of a connection of psycopg2."""

    def get_dsn_parameters(self) -> Any: ...
    def cursor(self) -> Any: ...


class AsyncpgConnection(Protocol):
    """What we use of a connection of asyncpg, or of a pool: there, each call is a transaction of its own."""

    def fetch(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...


SyncConnection: TypeAlias = (
    "psycopg.Connection[Any] | AlchemyConnection | Session | scoped_session[Any] | DjangoConnection"
    " | Psycopg2Connection"
)
AsyncConnection: TypeAlias = (
    "psycopg.AsyncConnection[Any] | AlchemyAsyncConnection | AsyncSession | async_scoped_session[Any]"
    " | AsyncpgConnection"
)

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# --- From a call to a connection -------------------------------------------------------------------
# Written once, as coroutines: those of a sync connection wait for nothing, and are run on the spot. `wait` is
# what makes an answer of what a library returns.


async def at_once(answer: Any) -> Any:
    """For a sync connection."""
    return answer


async def awaited(answer: Any) -> Any:
    """For an async one."""
    return await answer


Wait: TypeAlias = Callable[[Any], Awaitable[Any]]
# What sends a call; and a step, which does something else on the connection: a wait, a look at it.
Send: TypeAlias = Callable[[Any, Call[Any], Wait], Awaitable[Any]]
Step: TypeAlias = Callable[[Any, Wait], Awaitable[Any]]
# Several calls and steps that need each other's answers, apart from how they are sent.
Steps: TypeAlias = Generator[Call[Any] | Step, Any, T]


class OnConnection(Protocol[P, T_co]):
    """A public function: on a sync connection it returns the answer, on an async one a coroutine."""

    @overload
    def __call__(self, conn: SyncConnection, /, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(
        self, conn: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T_co]: ...


def on_connection(make: Callable[P, Call[T] | Steps[T]]) -> OnConnection[P, T]:
    """The function that makes a call and runs it on the connection that it gets as its first argument."""
    # As it is called: `fairq.enqueue`, `testing.drain`.
    home = make.__module__ if make.__module__ == "fairq.testing" else "fairq"
    name = f"{home}.{make.__name__}"

    @functools.wraps(make)
    def function(conn: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return run(conn, make(*args, **kwargs), name)

    own = inspect.signature(make)
    first = inspect.Parameter("conn", inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    return function


@overload
def run(conn: SyncConnection, work: Call[T] | Steps[T], name: str = ...) -> T: ...
@overload
def run(conn: AsyncConnection, work: Call[T] | Steps[T], name: str = ...) -> Coroutine[Any, Any, T]: ...
def run(
    conn: Any, work: Call[T] | Steps[T], name: str = "fairq.connections.run"
) -> T | Coroutine[Any, Any, T]:
    """Run a call, or steps, on a connection; on an async one, return a coroutine that does.

    `name` is what Python calls the coroutine when nobody awaits it.
    """
    send, wait = _way(conn)
    running: Any = _run(send, conn, work, wait)
    if wait is awaited:
        running.__qualname__ = name
        return running  # type: ignore[no-any-return]
    try:
        running.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a sync connection waits for nothing")


async def _run(send: Send, conn: Any, work: Call[T] | Steps[T], wait: Wait) -> Any:
    if isinstance(work, Call):
        return await _do(send, conn, work, wait)
    answer, error = None, None
    while True:
        try:
            step = work.send(answer) if error is None else work.throw(error)
        except StopIteration as stop:
            return stop.value
        answer, error = None, None
        try:
            answer = await _do(send, conn, step, wait)
        except BaseException as exc:  # the steps know what to do about it
            error = exc


async def _do(send: Send, conn: Any, step: Call[Any] | Step, wait: Wait) -> Any:
    if not isinstance(step, Call):
        return await step(conn, wait)
    with translating():
        return await send(conn, step, wait)


def is_async(conn: object) -> bool:
    """Whether calls on this connection are awaited. Raises UnsupportedConnection for anything unknown."""
    return _way(conn)[1] is awaited


# --- psycopg ---------------------------------------------------------------------------------------
# On a cursor of its own: any row factory, cursor factory or pipeline is left alone.

# psycopg prepares what is sent five times. Behind a pooler that hands out connections by transaction the next
# call meets a session that does not know the statement, or knows another one by its name. So only what proves
# to be a session prepares (90 µs a call instead of 150), and it is asked when that begins to matter.
_ASK_AT = 5
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_sessions: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_PID = queries.backend_pid.call()


async def is_session(conn: Any, wait: Wait) -> bool:
    """Whether a connection of psycopg leads to one session of the server, and not to a pooler's."""
    if conn not in _sessions:
        _sessions[conn] = await wait(driver.run(conn, _PID, False)) == conn.info.backend_pid
    return _sessions[conn]


async def _psycopg(conn: Any, call: Call[Any], wait: Wait) -> Any:
    if conn not in _sessions:
        calls = _calls[conn] = _calls.get(conn, 0) + 1
        if calls >= _ASK_AT and conn.info.pipeline_status == PipelineStatus.OFF:
            await is_session(conn, wait)
    return await wait(driver.run(conn, call, None if _sessions.get(conn) else False))


# --- The others ------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"\$(\d+)")
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)


def _plain(value: Any) -> Any:
    """A parameter without psycopg's remarks about its type."""
    if isinstance(value, driver.Typed):
        value = value.value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _answer(call: Call[T], rows: Iterable[Any]) -> T:
    """What psycopg's side would have made of the rows."""
    # The generated factories call the row's class, and look at no cursor.
    make = call.statement.row(None)
    answer: Any = [make(tuple(row)) for row in rows]
    if call.statement.command != "many":
        answer = answer[0] if answer else None
    return answer if call.read is None else call.read(answer)


# --- SQLAlchemy ------------------------------------------------------------------------------------
# text() on the connection, so that SQLAlchemy knows of the transaction.


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


async def _alchemy(conn: Any, call: Call[Any], wait: Wait) -> Any:
    if conn.dialect.name != "postgresql":
        raise UnsupportedConnection(f"SQLAlchemy's connection is to {conn.dialect.name}, not to PostgreSQL")
    named = {f"p{number}": _plain(value) for number, value in enumerate(call.params, 1)}
    result = await wait(conn.execute(_alchemy_text(call.statement.sql), named))
    return _answer(call, result.fetchall() if result.returns_rows else [])


async def _alchemy_session(session: Any, call: Call[Any], wait: Wait) -> Any:
    return await _alchemy(await wait(session.connection()), call, wait)


# --- Django and psycopg2 ---------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _formatted_text(sql: LiteralString) -> tuple[str, tuple[int, ...]]:
    """The statement with %s, and which parameter stands at each: one that is named twice is passed twice."""
    sql = _COMMENT.sub("", sql)
    order = tuple(int(number) - 1 for number in _NUMBERED.findall(sql))
    return _NUMBERED.sub("%s", sql.replace("%", "%%")), order


async def _psycopg2(conn: Any, call: Call[Any], wait: Wait) -> Any:
    sql, order = _formatted_text(call.statement.sql)
    with conn.cursor() as cursor:
        cursor.execute(sql, [_plain(call.params[position]) for position in order])
        return _answer(call, [] if call.statement.command == "exec" else cursor.fetchall())


async def _django(conn: Any, call: Call[Any], wait: Wait) -> Any:
    if conn.vendor != "postgresql":
        raise UnsupportedConnection(f"Django's connection {conn.alias!r} is not one to PostgreSQL")
    return await _psycopg2(conn, call, wait)


# --- asyncpg ---------------------------------------------------------------------------------------


async def _asyncpg(conn: Any, call: Call[Any], wait: Wait) -> Any:
    return _answer(call, await conn.fetch(call.statement.sql, *map(_plain, call.params)))


# --- Which way ------------------------------------------------------------------------------------

_WAYS: tuple[tuple[str, str, Send, Wait], ...] = (
    ("psycopg", "Connection", _psycopg, at_once),
    ("psycopg", "AsyncConnection", _psycopg, awaited),
    ("sqlalchemy.engine", "Connection", _alchemy, at_once),
    ("sqlalchemy.orm", "Session", _alchemy_session, at_once),
    ("sqlalchemy.orm", "scoped_session", _alchemy_session, at_once),
    ("sqlalchemy.ext.asyncio", "AsyncConnection", _alchemy, awaited),
    ("sqlalchemy.ext.asyncio", "AsyncSession", _alchemy_session, awaited),
    ("sqlalchemy.ext.asyncio", "async_scoped_session", _alchemy_session, awaited),
    ("django.utils.connection", "ConnectionProxy", _django, at_once),
    ("django.db.backends.base.base", "BaseDatabaseWrapper", _django, at_once),
    ("psycopg2.extensions", "connection", _psycopg2, at_once),
    ("asyncpg.connection", "Connection", _asyncpg, awaited),
    ("asyncpg.pool", "PoolConnectionProxy", _asyncpg, awaited),
    ("asyncpg.pool", "Pool", _asyncpg, awaited),
)
# A class never changes its kind, but a library may be imported later: only what was found is kept.
_ways: dict[type, tuple[Send, Wait]] = {}


def _way(conn: object) -> tuple[Send, Wait]:
    cls = type(conn)
    if cls in _ways:
        return _ways[cls]
    for module, name, send, wait in _WAYS:
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type) and issubclass(cls, known):
            _ways[cls] = send, wait
            return send, wait
    raise UnsupportedConnection(
        f"{cls.__module__}.{cls.__qualname__} is not a connection that fairq knows",
        "Pass a connection of psycopg, asyncpg or Django, or a Connection or Session of SQLAlchemy, "
        "sync or async. Of a pool of psycopg, take a connection first.",
    )
