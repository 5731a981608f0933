"""The runtime of generated calls: sends them over psycopg connections and reads the answers.

    orders.add_order(conn, customer="bob")                  # on a psycopg connection
    await orders.add_order(aconn, customer="bob")           # on an async one
    run_pipeline(conn, orders.add_order.call(customer="bob"), …)

Each call has its own cursor with its own adapters, so the connection's row factory, cursor factory and type
adapters (set by Django, SQLAlchemy or an application) change neither what is sent nor what comes back.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import itertools
import operator
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, Generic, Literal, LiteralString, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap, PyFormat, RecursiveDumper, Transformer
from psycopg.rows import RowMaker, tuple_row
from psycopg.types.composite import CompositeInfo, register_composite
from psycopg.types.enum import EnumInfo, register_enum
from psycopg.types.json import Json as Json
from psycopg.types.json import Jsonb as Jsonb
from psycopg.types.multirange import Multirange as Multirange
from psycopg.types.multirange import MultirangeDumper, MultirangeInfo, register_multirange
from psycopg.types.numeric import Float4 as Float4
from psycopg.types.numeric import Float8 as Float8
from psycopg.types.numeric import Int2 as Int2
from psycopg.types.numeric import Int4 as Int4
from psycopg.types.numeric import Int8 as Int8
from psycopg.types.numeric import Oid as Oid
from psycopg.types.range import Range as Range
from psycopg.types.range import RangeDumper, RangeInfo, register_range
from psycopg.types.string import TextBinaryLoader, TextLoader

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]
JsonValue: TypeAlias = Any
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Interface: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface
InetValue: TypeAlias = _Address | _Interface
CidrValue: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
P = ParamSpec("P")
_Item = TypeVar("_Item")
_AnyCursor: TypeAlias = "psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]"

# ---------------------------------------------------------------------- types

# For statements: psycopg's own adapters. Types that only this database has arrive as text.
_adapters = AdaptersMap(psycopg.adapters)
_adapters.register_loader(0, TextBinaryLoader)
# The same, but JSON stays text.
_raw_adapters = AdaptersMap(_adapters)
_raw_adapters.register_loader("json", TextLoader)
_raw_adapters.register_loader("jsonb", TextLoader)
# For the types of this database. Their numbers are our own and never sent, because the real ones differ from
# one database to the next.
_types = AdaptersMap(_adapters)
_numbers = itertools.count(4_200_000_000, 4)


_Cursor = TypeVar("_Cursor", bound="psycopg.RawCursor[Any] | psycopg.AsyncRawCursor[Any]")


def _cursor(base: type[_Cursor], adapters: AdaptersMap) -> type[_Cursor]:
    """A cursor class with these adapters, whatever its connection has."""
    return type(base.__name__, (base,), {"adapters": property(lambda self: adapters)})


# By whether JSON stays text: the cursors of statements, sync and async.
_cursors = {
    raw: (_cursor(psycopg.RawCursor, adapters), _cursor(psycopg.AsyncRawCursor, adapters))
    for raw, adapters in ((False, _adapters), (True, _raw_adapters))
}
_CopyCursor = _cursor(psycopg.RawCursor, _types)
_AsyncCopyCursor = _cursor(psycopg.AsyncRawCursor, _types)


class _Context:
    """psycopg's adapters for the types of this database, on one connection."""

    def __init__(self, connection: psycopg.BaseConnection[Any] | None) -> None:
        self.adapters = _types
        self.connection = connection


_NOT_ARRAYS = (list, str, bytes, Multirange)


class Typed:
    """A parameter of a built-in type, sent in binary form."""

    __slots__ = ("type", "value")

    def __init__(self, value: Any, type: int) -> None:
        self.value = value
        self.type = type


class Text(Typed):
    """A parameter sent as text; the server takes its type from the statement."""

    __slots__ = ()


class _Dumper(RecursiveDumper):
    """Chooses psycopg's dumper by the parameter's type, not by its value's class."""

    format = pq.Format.BINARY

    def __init__(self, cls: type, context: Any, type: int = 0) -> None:
        super().__init__(cls, context)
        if type:
            self.oid, adapters, tx = self._around(type)
            self._dumper = adapters.get_dumper_by_oid(type, self.format)(NoneType, tx)

    def _around(self, type: int) -> tuple[int, AdaptersMap, Any]:
        return type, self._tx.adapters, self._tx

    def get_key(self, obj: Typed, format: PyFormat) -> Any:
        return (self.cls, obj.type)

    def upgrade(self, obj: Typed, format: PyFormat) -> _Dumper:
        return type(self)(self.cls, self._tx, obj.type)

    def dump(self, obj: Typed) -> Any:
        value = obj.value
        return None if value is None else self._dumper.dump(_as_list(value))


class _TextDumper(_Dumper):
    format = pq.Format.TEXT

    def _around(self, type: int) -> tuple[int, AdaptersMap, Any]:
        return 0, _types, Transformer(_Context(self.connection))


def _as_list(value: Any) -> Any:
    # psycopg takes only lists as arrays. Text and multiranges are sequences too.
    if isinstance(value, _NOT_ARRAYS) or not isinstance(value, Sequence):
        return value
    return list(value)


for _map in (_adapters, _raw_adapters):
    _map.register_dumper(Typed, _Dumper)
    _map.register_dumper(Text, _TextDumper)


def maybe(wrapper: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else wrapper(value)


def each(wrapper: Callable[[Any], Any], values: Iterable[Any] | None) -> Any:
    """The wrapped values; None stays None."""
    if values is None:
        return None
    return [None if value is None else wrapper(value) for value in values]


def json_text(value: str) -> Json:
    """JSON that is text already."""
    return Json(value, str)


def jsonb_text(value: str) -> Jsonb:
    """JSON that is text already."""
    return Jsonb(value, str)


def enum_type(cls: type[enum.Enum]) -> int:
    """Register an enum and return its number; that of its arrays is the next one."""
    number = next(_numbers)
    info = EnumInfo(cls.__name__, number, number + 1, [each.value for each in cls])
    register_enum(info, _types, cls, mapping={each: each.value for each in cls})
    return number


def composite_type(cls: type, fields: tuple[str, ...], types: tuple[int, ...]) -> int:
    """Register a composite type and return its number; that of its arrays is the next one."""
    number = next(_numbers)
    info = CompositeInfo(cls.__name__, number, number + 1, field_names=fields, field_types=types)

    def values(whole: Any) -> list[Any]:
        named = zip(fields, types, strict=True)
        return [_field(getattr(whole, name), type) for name, type in named]

    register_composite(
        info,
        _types,
        cls,
        # `()` is a value without fields, or with one that is NULL.
        make_object=lambda values, _: cls(*(values or [None] * len(fields))),
        make_sequence=lambda whole, _: values(whole),
    )
    return number


def _field(value: Any, type: int) -> Any:
    # Inside a composite psycopg goes by the value's class, which does not tell JSON.
    if type in _JSON_TYPES:
        return maybe(Json, value)
    if type in _JSON_ARRAYS:
        return each(Json, value)
    return _as_list(value)


_JSON_TYPES = (114, 3802)
_JSON_ARRAYS = (199, 3807)


def range_type(name: str, subtype: int) -> int:
    """Register a range and return its number; the next are its arrays, its multirange, and arrays of that."""
    number = next(_numbers)
    register_range(RangeInfo(name, number, number + 1, subtype_oid=subtype), _types)
    info = MultirangeInfo(f"{name}s", number + 2, number + 3, range_oid=number, subtype_oid=subtype)
    register_multirange(info, _types)

    class Dumper(RangeDumper):
        oid = number
        subtype_oid = subtype

    class ManyDumper(MultirangeDumper):
        oid = number + 2
        range_oid = number
        subtype_oid = subtype

    _types.register_dumper(None, Dumper)
    _types.register_dumper(None, ManyDumper)
    return number


# ---------------------------------------------------------------------- statements

Command: TypeAlias = Literal["one", "the", "many", "exec", "execrows", "execresult"]
Params: TypeAlias = tuple[Any, ...]


class Statement(Generic[T]):
    """SQL, and how its result is read. `T` is the type of the answer.

    It decorates the function that makes its parameters:

        @driver.Statement[list[int]]("many", "select id from jobs where name = $1", driver.scalar())
        def job_ids(*, name: str) -> driver.Params:
            return (name,)
    """

    __slots__ = ("async_cursor", "binary", "command", "cursor", "row", "sql")

    def __init__(
        self,
        command: Command,
        sql: LiteralString,
        row: Callable[[Any], RowMaker[Any]] = tuple_row,
        *,
        binary: bool = True,
        raw_json: bool = False,
    ) -> None:
        self.command = command
        self.sql = sql
        self.row = row
        self.binary = binary
        self.cursor, self.async_cursor = _cursors[raw_json]

    def __call__(self, params: Callable[P, Params]) -> Query[P, T]:
        return Query(self, params)


class Call(NamedTuple, Generic[T_co]):
    """A statement with its parameters, not sent yet."""

    statement: Statement[Any]
    params: Params = ()
    read: Callable[[Any], T_co] | None = None
    """Converts the answer; None: unchanged."""

    def then(self, read: Callable[[T_co], U]) -> Call[U]:
        """The same call, with its answer converted by `read`."""
        before = self.read
        made = read if before is None else lambda answer: read(before(answer))
        return Call(self.statement, self.params, made)


class Query(Generic[P, T]):
    """A statement and the function that makes its parameters."""

    def __init__(self, statement: Statement[T], params: Callable[P, Params]) -> None:
        functools.update_wrapper(self, params)
        self.statement = statement
        self.params = params

    @overload
    def __call__(self, conn: Connection, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(
        self, conn: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    def __call__(self, conn: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Send the call and return its answer; on an async connection, a coroutine."""
        return run(conn, Call(self.statement, self.params(*args, **kwargs)))

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Build the call without sending it, for a pipeline."""
        return Call(self.statement, self.params(*args, **kwargs))


class Result(NamedTuple):
    """The server's command tag, such as `INSERT 0 3`, and the number of rows."""

    status: str
    rows: int


@overload
def run(conn: Connection, call: Call[T], prepare: bool | None = ...) -> T: ...
@overload
def run(conn: AsyncConnection, call: Call[T], prepare: bool | None = ...) -> Coroutine[Any, Any, T]: ...
def run(
    conn: Connection | AsyncConnection, call: Call[T], prepare: bool | None = None
) -> T | Coroutine[Any, Any, T]:
    """Send one call and wait for its result. `prepare` is that of psycopg's `execute`."""
    if isinstance(conn, psycopg.AsyncConnection):
        return _run_async(conn, call, prepare)
    statement, params, _ = call
    cursor = statement.cursor(conn, row_factory=statement.row)
    cursor.execute(statement.sql, params, prepare=prepare, binary=statement.binary)
    command = statement.command
    rows: Any = None
    if command == "many":
        rows = cursor.fetchall()
    elif command == "one" or command == "the":
        rows = cursor.fetchone()
    elif command != "exec" and cursor.pgresult is None:
        # Leaving it synchronises the surrounding pipeline, which then has answered.
        with conn.pipeline():
            pass
    return _answer(cursor, call, rows)


async def _run_async(conn: AsyncConnection, call: Call[T], prepare: bool | None) -> T:
    statement, params, _ = call
    cursor = statement.async_cursor(conn, row_factory=statement.row)
    await cursor.execute(statement.sql, params, prepare=prepare, binary=statement.binary)
    command = statement.command
    rows: Any = None
    if command == "many":
        rows = await cursor.fetchall()
    elif command == "one" or command == "the":
        rows = await cursor.fetchone()
    elif command != "exec" and cursor.pgresult is None:
        async with conn.pipeline():
            pass
    return _answer(cursor, call, rows)


def _answer(cursor: _AnyCursor, call: Call[T], rows: Any) -> T:
    """What a call returns, from the fetched rows and the server's command tag."""
    command = call.statement.command
    if command == "the":
        if rows is None and not cursor.rowcount:
            raise psycopg.DataError("the statement returned no row, but is declared to always return one")
    elif command == "execrows":
        rows = cursor.rowcount
    elif command == "execresult":
        rows = Result(cursor.statusmessage or "", cursor.rowcount)
    return rows if call.read is None else call.read(rows)


# ---------------------------------------------------------------------- pipelines


class Sent(Generic[T]):
    """A call sent in a pipeline. `result()` reads its answer once the pipeline was synchronised or left."""

    __slots__ = ("_call", "_cursor")

    def __init__(self, cursor: _AnyCursor, call: Call[T]) -> None:
        self._cursor = cursor
        self._call = call

    def result(self) -> T:
        cursor, statement = self._cursor, self._call.statement
        rows: Any = None
        if cursor.pgresult is None:
            raise psycopg.InterfaceError(
                "there is no result yet: leave the pipeline first, or call its sync()"
            )
        if statement.command in ("many", "one", "the"):
            # What fetchall() does, but without waiting, on sync and async cursors alike.
            reader = Transformer(cursor)
            reader.set_pgresult(cursor.pgresult)
            count, many = cursor.pgresult.ntuples, statement.command == "many"
            rows = reader.load_rows(0, count if many else min(count, 1), statement.row(cursor))
            if not many:
                rows = rows[0] if rows else None
        return _answer(cursor, self._call, rows)


def send(conn: Connection, call: Call[T]) -> Sent[T]:
    """Send a call inside `with conn.pipeline():` and go on without its result."""
    statement = call.statement
    cursor = statement.cursor(conn, row_factory=statement.row)
    cursor.execute(statement.sql, call.params, binary=statement.binary)
    return Sent(cursor, call)


async def send_async(conn: AsyncConnection, call: Call[T]) -> Sent[T]:
    """Send a call inside `async with conn.pipeline():` and go on without its result."""
    statement = call.statement
    cursor = statement.async_cursor(conn, row_factory=statement.row)
    await cursor.execute(statement.sql, call.params, binary=statement.binary)
    return Sent(cursor, call)


# The results of two or three calls keep their own types. More calls have one common type, or `object`, never
# Any. `send` keeps the type of each, however many there are.
@overload
def run_pipeline(conn: Connection, a: Call[T1], b: Call[T2], /) -> tuple[T1, T2]: ...
@overload
def run_pipeline(conn: Connection, a: Call[T1], b: Call[T2], c: Call[T3], /) -> tuple[T1, T2, T3]: ...
@overload
def run_pipeline(
    conn: Connection, a: Call[T], b: Call[T], c: Call[T], d: Call[T], /, *more: Call[T]
) -> tuple[T, ...]: ...
def run_pipeline(conn: Connection, /, *calls: Call[Any]) -> tuple[Any, ...]:
    """Send several calls and read their results in one round trip.

    On a connection in autocommit mode they are one transaction: all of them happen, or none.
    """
    with conn.pipeline():
        sent = [send(conn, call) for call in calls]
    return tuple(each.result() for each in sent)


@overload
async def run_pipeline_async(conn: AsyncConnection, a: Call[T1], b: Call[T2], /) -> tuple[T1, T2]: ...
@overload
async def run_pipeline_async(
    conn: AsyncConnection, a: Call[T1], b: Call[T2], c: Call[T3], /
) -> tuple[T1, T2, T3]: ...
@overload
async def run_pipeline_async(
    conn: AsyncConnection, a: Call[T], b: Call[T], c: Call[T], d: Call[T], /, *more: Call[T]
) -> tuple[T, ...]: ...
async def run_pipeline_async(conn: AsyncConnection, /, *calls: Call[Any]) -> tuple[Any, ...]:
    """`run_pipeline` for an async connection."""
    async with conn.pipeline():
        sent = [await send_async(conn, call) for call in calls]
    return tuple(each.result() for each in sent)


# ---------------------------------------------------------------------- COPY


class CopyStatement:
    """A `copy … from stdin` and the types of its columns. It decorates the function that makes a row."""

    def __init__(self, sql: LiteralString, types: tuple[int, ...]) -> None:
        self.sql = sql
        self.types = types

    def __call__(self, values: Callable[[_Item], Params]) -> Copy[_Item]:
        return Copy(self, values)


class Copy(Generic[_Item]):
    """A COPY, and the function that makes a row from an item."""

    def __init__(self, statement: CopyStatement, values: Callable[[_Item], Params]) -> None:
        functools.update_wrapper(self, values)
        self.statement = statement
        self.values = values

    @overload
    def __call__(self, conn: Connection, rows: Iterable[_Item]) -> int: ...
    @overload
    def __call__(self, conn: AsyncConnection, rows: Iterable[_Item]) -> Coroutine[Any, Any, int]: ...
    def __call__(
        self, conn: Connection | AsyncConnection, rows: Iterable[_Item]
    ) -> int | Coroutine[Any, Any, int]:
        """Send the rows and return how many there were."""
        if isinstance(conn, psycopg.AsyncConnection):
            return self._send(conn, rows)
        cursor = _CopyCursor(conn)
        with cursor.copy(self.statement.sql) as target:
            target.set_types(self.statement.types)
            for row in rows:
                target.write_row(self.values(row))
        return cursor.rowcount

    async def _send(self, conn: AsyncConnection, rows: Iterable[_Item]) -> int:
        cursor = _AsyncCopyCursor(conn)
        async with cursor.copy(self.statement.sql) as target:
            target.set_types(self.statement.types)
            for row in rows:
                await target.write_row(self.values(row))
        return cursor.rowcount


# ---------------------------------------------------------------------- rows


def row(make: Callable[..., Any], *types: int) -> Callable[[Any], RowMaker[Any]]:
    """A row factory that calls `make` with a row's values, after reading those with a type from text."""
    if not any(types):

        def plain(row: Sequence[Any]) -> Any:
            return make(*row)

        return lambda cursor: plain

    def factory(cursor: _AnyCursor) -> RowMaker[Any]:
        encoding = cursor.connection.info.encoding
        reader = Transformer(_Context(cursor.connection))
        text = pq.Format.TEXT
        loads = [type and reader.get_loader(type, text).load for type in types]

        def values(row: Sequence[Any]) -> Iterator[Any]:
            for value, load in zip(row, loads, strict=True):
                if not load or value is None:
                    yield value
                else:
                    yield load(value.encode(encoding))

        return lambda row: make(*values(row))

    return factory


def scalar(type: int = 0) -> Callable[[Any], RowMaker[Any]]:
    """A row factory for rows of one column: its value."""
    return row(lambda value: value, type) if type else lambda cursor: _first


_first = operator.itemgetter(0)
