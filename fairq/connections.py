"""Run a statement on any kind of connection that an application may pass.

Every public function reaches its connection through `on_connection`. The caller owns the connection and its
transaction: nothing here commits, rolls back, or changes a setting. Libraries are looked up among the modules
already imported, because whoever passes a library's connection has imported it.

The statements come from `sql/queries`, through the generated `fairq.queries`. psycopg connections run the
generated calls as they are. The others run the same text, with parameters that every driver can send: None,
bool, int, float, str, and lists of those. `client.sql` casts each parameter (`$2::text::jsonb`), so drivers
need not know any type, and the application's own codecs do not interfere.
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
    def cursor(self, *, cursor_factory: Any = ...) -> Any: ...


class AsyncpgConnection(Protocol):
    """What we use of a connection or pool of asyncpg. On a pool each call is a transaction of its own."""

    def fetch(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...


if TYPE_CHECKING:
    # Not as text: pyright reads none that is put together from two.
    SyncConnection: TypeAlias = (
        psycopg.Connection[Any]
        | AlchemyConnection
        | Session
        | scoped_session[Any]
        | DjangoConnection
        | Psycopg2Connection
    )
    AsyncConnection: TypeAlias = (
        psycopg.AsyncConnection[Any]
        | AlchemyAsyncConnection
        | AsyncSession
        | async_scoped_session[Any]
        | AsyncpgConnection
    )
else:
    SyncConnection = AsyncConnection = Any

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# --- From a call to a connection -------------------------------------------------------------------
# Written once, as coroutines. On a sync connection a coroutine never waits, and runs on the spot. `wait`
# turns what a library returns into the answer.


async def at_once(answer: Any) -> Any:
    """The `wait` of sync connections."""
    return answer


async def awaited(answer: Any) -> Any:
    """The `wait` of async connections."""
    return await answer


Wait: TypeAlias = Callable[[Any], Awaitable[Any]]
# Sends a call.
Send: TypeAlias = Callable[[Any, Call[Any], Wait], Awaitable[Any]]
# Does something else on the connection, such as waiting.
Step: TypeAlias = Callable[[Any, Wait], Awaitable[Any]]
# Several calls and steps that need each other's answers. It yields them; the caller sends them.
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
    """Turn a function that makes a call into one that takes a connection first, and runs the call on it."""
    # The public name: `fairq.enqueue`, `fairq.testing.drain`.
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

    `name` is the coroutine's name in the warning about a forgotten `await`.
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
        except BaseException as exc:  # raised inside the steps
            error = exc


async def _do(send: Send, conn: Any, step: Call[Any] | Step, wait: Wait) -> Any:
    if not isinstance(step, Call):
        return await step(conn, wait)
    with translating():
        return await send(conn, step, wait)


def is_async(conn: object) -> bool:
    """Whether calls on this connection are awaited. Raises UnsupportedConnection for unknown kinds."""
    return _way(conn)[1] is awaited


# --- psycopg ---------------------------------------------------------------------------------------
# On a cursor of its own, so the connection's row factory, cursor factory and pipeline do not matter.

# psycopg prepares a statement that was sent five times. Behind a pooler in transaction mode the next call may
# run in a session that does not have the statement, or has another one under its name. So only a connection
# that proves to be one session prepares (90 µs a call instead of 150). It is checked at the fifth call.
_ASK_AT = 5
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_sessions: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_PID = queries.backend_pid.call()


async def is_session(conn: Any, wait: Wait) -> bool:
    """Whether a connection of psycopg is one session of the server, not a pooler's."""
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
    """A parameter without psycopg's type wrappers."""
    if isinstance(value, driver.Typed):
        value = value.value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _answer(call: Call[T], rows: Iterable[Any]) -> T:
    """The answer of a call, as `driver.run` would make it from these rows."""
    # The generated factories call the row's class, and look at no cursor.
    make = call.statement.row(None)
    answer: Any = [make(tuple(row)) for row in rows]
    if call.statement.command != "many":
        answer = answer[0] if answer else None
    return answer if call.read is None else call.read(answer)


# --- Django, psycopg2 and SQLAlchemy ----------------------------------------------------------------


@lru_cache(maxsize=64)
def _formatted_text(sql: LiteralString) -> tuple[str, tuple[int, ...]]:
    """The statement with %s, and the index of the parameter for each: one used twice is passed twice."""
    sql = _COMMENT.sub("", sql)
    order = tuple(int(number) - 1 for number in _NUMBERED.findall(sql))
    return _NUMBERED.sub("%s", sql.replace("%", "%%")), order


def _formatted(call: Call[Any]) -> tuple[str, tuple[Any, ...]]:
    sql, order = _formatted_text(call.statement.sql)
    return sql, tuple(_plain(call.params[position]) for position in order)


async def _psycopg2(conn: Any, call: Call[Any], wait: Wait) -> Any:
    # The connection's own cursors may return dicts.
    plain = sys.modules["psycopg2.extensions"].cursor
    return _on_cursor(conn.cursor(cursor_factory=plain), call)


def _on_cursor(cursor: Any, call: Call[Any]) -> Any:
    with cursor:
        cursor.execute(*_formatted(call))
        return _answer(call, [] if call.statement.command == "exec" else cursor.fetchall())


async def _django(conn: Any, call: Call[Any], wait: Wait) -> Any:
    if conn.vendor != "postgresql":
        raise UnsupportedConnection(f"Django's connection {conn.alias!r} is not one to PostgreSQL")
    return _on_cursor(conn.cursor(), call)


async def _alchemy(conn: Any, call: Call[Any], wait: Wait) -> Any:
    """On SQLAlchemy's connection, not its driver's, so that it knows of the transaction."""
    if conn.dialect.name != "postgresql":
        raise UnsupportedConnection(f"SQLAlchemy's connection is to {conn.dialect.name}, not to PostgreSQL")
    is_asyncpg = conn.dialect.paramstyle == "numeric_dollar"
    sql, params = (call.statement.sql, tuple(map(_plain, call.params))) if is_asyncpg else _formatted(call)
    result = await wait(conn.exec_driver_sql(sql, params))
    return _answer(call, result.fetchall() if result.returns_rows else [])


async def _alchemy_session(session: Any, call: Call[Any], wait: Wait) -> Any:
    return await _alchemy(await wait(session.connection()), call, wait)


# --- asyncpg ---------------------------------------------------------------------------------------


async def _asyncpg(conn: Any, call: Call[Any], wait: Wait) -> Any:
    return _answer(call, await conn.fetch(call.statement.sql, *map(_plain, call.params)))


# --- Kinds of connections -------------------------------------------------------------------------

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
# Caches only what was found, because a library may be imported later.
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
        "sync or async. From a pool of psycopg, take a connection first.",
    )
