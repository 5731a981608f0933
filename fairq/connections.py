"""One way to run a statement on every kind of connection that an application may hand us.

| connection                                            | how                                           |
|-------------------------------------------------------|-----------------------------------------------|
| psycopg Connection, AsyncConnection                   | a cursor of its own: any row factory, cursor  |
|                                                       | factory or pipeline is left alone             |
| SQLAlchemy Connection, Session, scoped_session,       | text() on the connection, so that SQLAlchemy  |
| and their async twins; psycopg, psycopg2, asyncpg     | knows of the transaction                      |
| Django connection (also `connections["…"]`),          | its cursor                                    |
| psycopg2 connection                                   |                                               |
| asyncpg Connection, Pool                              | fetch()                                       |

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
from collections.abc import Callable, Coroutine, Generator
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
Row = tuple[Any, ...]
Send: TypeAlias = Callable[[Any, Call[Any]], Any]


# --- From a call to a connection -------------------------------------------------------------------


class Step(Protocol):
    """Something that is done on a connection and is no call: a wait, a look at the connection itself."""

    def do(self, conn: Any) -> Any: ...
    async def do_async(self, conn: Any) -> Any: ...


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
    send = _sender(conn)
    if send in _ASYNC:
        coroutine: Any = (
            _send_async(send, conn, work) if isinstance(work, Call) else _drive_async(send, conn, work)
        )
        coroutine.__qualname__ = name
        return coroutine  # type: ignore[no-any-return]
    return _send(send, conn, work) if isinstance(work, Call) else _drive(send, conn, work)


def _send(send: Send, conn: Any, call: Call[T]) -> T:
    with translating():
        return send(conn, call)  # type: ignore[no-any-return]


async def _send_async(send: Send, conn: Any, call: Call[T]) -> T:
    with translating():
        return await send(conn, call)  # type: ignore[no-any-return]


def _drive(send: Send, conn: Any, steps: Steps[T]) -> T:
    answer, error = None, None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        answer, error = None, None
        try:
            answer = _send(send, conn, step) if isinstance(step, Call) else step.do(conn)
        except BaseException as exc:  # the steps know what to do about it
            error = exc


async def _drive_async(send: Send, conn: Any, steps: Steps[T]) -> T:
    answer, error = None, None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        answer, error = None, None
        try:
            if isinstance(step, Call):
                answer = await _send_async(send, conn, step)
            else:
                answer = await step.do_async(conn)
        except BaseException as exc:
            error = exc


def is_async(conn: object) -> bool:
    """Whether calls on this connection are awaited. Raises UnsupportedConnection for anything unknown."""
    return _sender(conn) in _ASYNC


# --- psycopg ---------------------------------------------------------------------------------------

# psycopg prepares what is sent five times. Behind a pooler that hands out connections by transaction the next
# call meets a session that does not know the statement, or knows another one by its name. So only what proves
# to be a session prepares (90 µs a call instead of 150), and it is asked when that begins to matter.
_ASK_AT = 5
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_sessions: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_session(conn: psycopg.Connection[Any]) -> bool:
    """Whether a connection leads to one session of the server, and not to a pooler's."""
    if conn not in _sessions:
        _sessions[conn] = driver.run(conn, queries.backend_pid.call(), False) == conn.info.backend_pid
    return _sessions[conn]


async def is_session_async(conn: psycopg.AsyncConnection[Any]) -> bool:
    if conn not in _sessions:
        pid = await driver.run(conn, queries.backend_pid.call(), False)
        _sessions[conn] = pid == conn.info.backend_pid
    return _sessions[conn]


def _is_to_be_asked(conn: Any) -> bool:
    if conn in _sessions:
        return False
    calls = _calls[conn] = _calls.get(conn, 0) + 1
    return calls >= _ASK_AT and conn.info.pipeline_status == PipelineStatus.OFF


def _prepare(conn: Any) -> bool | None:
    return None if _sessions.get(conn) else False


def _psycopg(conn: psycopg.Connection[Any], query: Call[Any]) -> Any:
    if _is_to_be_asked(conn):
        is_session(conn)
    return driver.run(conn, query, _prepare(conn))


async def _psycopg_async(conn: psycopg.AsyncConnection[Any], query: Call[Any]) -> Any:
    if _is_to_be_asked(conn):
        await is_session_async(conn)
    return await driver.run(conn, query, _prepare(conn))


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


def _answer(call: Call[T], rows: list[Row]) -> T:
    """What psycopg's side would have made of the rows."""
    # The generated factories call the row's class, and look at no cursor.
    make = call.statement.row(None)
    answer: Any = [make(row) for row in rows]
    if call.statement.command != "many":
        answer = answer[0] if answer else None
    return answer if call.read is None else call.read(answer)


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


def _named(query: Call[Any]) -> dict[str, Any]:
    return {f"p{number}": _plain(value) for number, value in enumerate(query.params, 1)}


def _alchemy_answer(query: Call[Any], result: Any) -> Any:
    rows = [tuple(row) for row in result.fetchall()] if result.returns_rows else []
    return _answer(query, rows)


def _check_dialect(conn: AlchemyConnection | AlchemyAsyncConnection) -> None:
    if conn.dialect.name != "postgresql":
        raise UnsupportedConnection(f"SQLAlchemy's connection is to {conn.dialect.name}, not to PostgreSQL")


def _alchemy(conn: AlchemyConnection, query: Call[Any]) -> Any:
    _check_dialect(conn)
    return _alchemy_answer(query, conn.execute(_alchemy_text(query.statement.sql), _named(query)))


def _alchemy_session(session: Session, query: Call[Any]) -> Any:
    return _alchemy(session.connection(), query)


async def _alchemy_async(conn: AlchemyAsyncConnection, query: Call[Any]) -> Any:
    _check_dialect(conn)
    return _alchemy_answer(query, await conn.execute(_alchemy_text(query.statement.sql), _named(query)))


async def _alchemy_async_session(session: AsyncSession, query: Call[Any]) -> Any:
    return await _alchemy_async(await session.connection(), query)


# --- Django and psycopg2 ---------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _formatted_text(sql: LiteralString) -> tuple[str, tuple[int, ...]]:
    """The statement with %s, and which parameter stands at each: one that is named twice is passed twice."""
    sql = _COMMENT.sub("", sql)
    order = tuple(int(number) - 1 for number in _NUMBERED.findall(sql))
    return _NUMBERED.sub("%s", sql.replace("%", "%%")), order


def _psycopg2(conn: DjangoConnection | Psycopg2Connection, query: Call[Any]) -> Any:
    sql, order = _formatted_text(query.statement.sql)
    with conn.cursor() as cursor:
        cursor.execute(sql, [_plain(query.params[position]) for position in order])
        rows = [] if query.statement.command == "exec" else [tuple(row) for row in cursor.fetchall()]
    return _answer(query, rows)


def _django(conn: DjangoConnection, query: Call[Any]) -> Any:
    if conn.vendor != "postgresql":
        raise UnsupportedConnection(f"Django's connection {conn.alias!r} is not one to PostgreSQL")
    return _psycopg2(conn, query)


# --- asyncpg ---------------------------------------------------------------------------------------


async def _asyncpg(conn: AsyncpgConnection, query: Call[Any]) -> Any:
    rows = await conn.fetch(query.statement.sql, *map(_plain, query.params))
    return _answer(query, [tuple(row) for row in rows])


# --- Which way ------------------------------------------------------------------------------------

_WAYS: tuple[tuple[str, str, Send], ...] = (
    ("psycopg", "Connection", _psycopg),
    ("psycopg", "AsyncConnection", _psycopg_async),
    ("sqlalchemy.engine", "Connection", _alchemy),
    ("sqlalchemy.orm", "Session", _alchemy_session),
    ("sqlalchemy.orm", "scoped_session", _alchemy_session),
    ("sqlalchemy.ext.asyncio", "AsyncConnection", _alchemy_async),
    ("sqlalchemy.ext.asyncio", "AsyncSession", _alchemy_async_session),
    ("sqlalchemy.ext.asyncio", "async_scoped_session", _alchemy_async_session),
    ("django.utils.connection", "ConnectionProxy", _django),
    ("django.db.backends.base.base", "BaseDatabaseWrapper", _django),
    ("psycopg2.extensions", "connection", _psycopg2),
    ("asyncpg.connection", "Connection", _asyncpg),
    ("asyncpg.pool", "PoolConnectionProxy", _asyncpg),
    ("asyncpg.pool", "Pool", _asyncpg),
)
_ASYNC = frozenset(send for *_, send in _WAYS if inspect.iscoroutinefunction(send))


def _sender(conn: object) -> Send:
    send = _sender_of_class(type(conn))
    if send is None:
        raise UnsupportedConnection(
            f"{type(conn).__module__}.{type(conn).__qualname__} is not a connection that fairq knows",
            "Pass a connection of psycopg, asyncpg or Django, or a Connection or Session of SQLAlchemy, "
            "sync or async. Of a pool of psycopg, take a connection first.",
        )
    return send


# A class never changes its kind, but a library may be imported later: only what was found is kept.
_senders: dict[type, Send] = {}


def _sender_of_class(cls: type) -> Send | None:
    found = _senders.get(cls)
    if found is None:
        for module, name, send in _WAYS:
            known = getattr(sys.modules.get(module), name, None)
            if isinstance(known, type) and issubclass(cls, known):
                found = _senders[cls] = send
                break
    return found
