"""Every kind of connection that fairq takes, behind one face: open, commit, roll back, close.

Statements of the tests go through `fairq.connections.run`, so what they prove about a transaction, they prove
about the very connection that fairq used.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, LiteralString, TypeVar

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import psycopg_pool
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row, namedtuple_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fairq import driver
from fairq.connections import run
from tests.api.addresses import alchemy_url, django_handler
from tests.support.database import MANAGED

T = TypeVar("T")


@dataclass
class Opened:
    """An open connection. Methods of async ones run to their end."""

    conn: Any
    finish: Callable[[Any], Any]
    pipeline: Any = None

    def after_error(self) -> None:
        """A pipeline accepts nothing after an error until it is synchronised."""
        if self.pipeline is not None:
            self.finish(self.pipeline.sync())

    def commit(self) -> None:
        self.finish(self.conn.commit())

    def rollback(self) -> None:
        self.finish(self.conn.rollback())

    def rows(self, sql: LiteralString, *params: Any) -> list[tuple[Any, ...]]:
        query: driver.Call[Any] = driver.Call(driver.Statement[Any]("many", sql), params)
        found: Any = self.finish(run(self.conn, query))
        return list(found)

    def do(self, sql: LiteralString) -> None:
        query: driver.Call[None] = driver.Call(driver.Statement[None]("exec", sql), ())
        self.finish(run(self.conn, query))

    def value(self, sql: LiteralString, *params: Any) -> Any:
        return self.rows(sql, *params)[0][0]


Opener = Callable[[str], "contextlib.AbstractContextManager[Opened]"]


def _as_is(value: Any) -> Any:
    return value


# --- psycopg ---------------------------------------------------------------------------------------


def _psycopg(**options: Any) -> Opener:
    @contextlib.contextmanager
    def opened(dsn: str) -> Iterator[Opened]:
        with contextlib.closing(psycopg.connect(dsn, **options)) as conn:
            yield Opened(conn, _as_is)

    return opened


def _psycopg2(**options: Any) -> Opener:
    @contextlib.contextmanager
    def opened(dsn: str) -> Iterator[Opened]:
        with contextlib.closing(psycopg2.connect(dsn, **options)) as conn:
            yield Opened(conn, _as_is)

    return opened


@contextlib.contextmanager
def _psycopg_pool(dsn: str) -> Iterator[Opened]:
    with (
        psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=1, open=True) as pool,
        pool.connection() as conn,
    ):
        yield Opened(conn, _as_is)


@contextlib.contextmanager
def _psycopg_pipeline(dsn: str) -> Iterator[Opened]:
    with (
        contextlib.closing(psycopg.connect(dsn)) as conn,
        contextlib.suppress(psycopg.errors.PipelineAborted),
        conn.pipeline() as pipeline,
    ):
        yield Opened(conn, _as_is, pipeline)


def _async(open_: Callable[[str], "contextlib.AbstractAsyncContextManager[tuple[Any, Any]]"]) -> Opener:
    @contextlib.contextmanager
    def opened(dsn: str) -> Iterator[Opened]:
        with asyncio.Runner() as runner:

            def finish(value: Any) -> Any:
                return runner.run(value) if isinstance(value, Coroutine) else value

            manager = open_(dsn)
            conn, pipeline = runner.run(_enter(manager))
            try:
                yield Opened(conn, finish, pipeline)
            finally:
                runner.run(_leave(manager))

    return opened


async def _enter(manager: "contextlib.AbstractAsyncContextManager[T]") -> T:
    return await manager.__aenter__()


async def _leave(manager: "contextlib.AbstractAsyncContextManager[Any]") -> None:
    await manager.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def _psycopg_async(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
    conn = await psycopg.AsyncConnection.connect(dsn)
    try:
        yield conn, None
    finally:
        await conn.close()


@contextlib.asynccontextmanager
async def _psycopg_async_pool(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
    pool = psycopg_pool.AsyncConnectionPool(dsn, min_size=1, max_size=1, open=False)
    async with pool, pool.connection() as conn:
        yield conn, None


@contextlib.asynccontextmanager
async def _psycopg_async_pipeline(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
    conn = await psycopg.AsyncConnection.connect(dsn)
    try:
        with contextlib.suppress(psycopg.errors.PipelineAborted):
            async with conn.pipeline() as pipeline:
                yield conn, pipeline
    finally:
        await conn.close()


# --- SQLAlchemy ------------------------------------------------------------------------------------


# Behind PgBouncer before 1.21 an application tells its engine to prepare nothing.
_OPTIONS: dict[str, Any] = {"poolclass": sqlalchemy.NullPool}
_PSYCOPG = {**_OPTIONS, "connect_args": {"prepare_threshold": None}} if MANAGED else _OPTIONS


def _alchemy_connection(driver: str, options: dict[str, Any]) -> Opener:
    @contextlib.contextmanager
    def opened(dsn: str) -> Iterator[Opened]:
        engine = sqlalchemy.create_engine(alchemy_url(dsn, driver), **options)
        with engine.connect() as conn:
            yield Opened(conn, _as_is)

    return opened


@contextlib.contextmanager
def _alchemy_session(dsn: str) -> Iterator[Opened]:
    engine = sqlalchemy.create_engine(alchemy_url(dsn, "psycopg"), **_PSYCOPG)
    with Session(engine) as session:
        yield Opened(session, _as_is)


@contextlib.contextmanager
def _alchemy_scoped_session(dsn: str) -> Iterator[Opened]:
    engine = sqlalchemy.create_engine(alchemy_url(dsn, "psycopg"), **_PSYCOPG)
    session = scoped_session(sessionmaker(engine))
    yield Opened(session, _as_is)
    session.remove()


def _alchemy_async(driver: str, make: str) -> Opener:
    @contextlib.asynccontextmanager
    async def open_(dsn: str) -> AsyncIterator[tuple[Any, Any]]:
        engine = create_async_engine(
            alchemy_url(dsn, driver), **_PSYCOPG if driver == "psycopg" else _OPTIONS
        )
        try:
            if make == "connection":
                async with engine.connect() as conn:
                    yield conn, None
            elif make == "session":
                async with AsyncSession(engine) as session:
                    yield session, None
            else:
                scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
                yield scoped, None
                await scoped.remove()
        finally:
            await engine.dispose()

    return _async(open_)


# --- Django ----------------------------------------------------------------------------------------


def _django(proxy: bool, **options: Any) -> Opener:
    @contextlib.contextmanager
    def opened(dsn: str) -> Iterator[Opened]:
        from django.utils.connection import ConnectionProxy

        handler = django_handler(dsn, **options)
        wrapper = handler["default"]
        wrapper.set_autocommit(False)
        yield Opened(ConnectionProxy(handler, "default") if proxy else wrapper, _as_is)
        wrapper.rollback()
        wrapper.close()

    return opened


# --- asyncpg ---------------------------------------------------------------------------------------


class OpenedAsyncpg(Opened):
    """A connection that has to begin transactions explicitly."""

    def begin(self) -> None:
        self.transaction = self.conn.transaction()
        self.finish(self.transaction.start())

    def commit(self) -> None:
        self.finish(self.transaction.commit())
        self.begin()

    def rollback(self) -> None:
        self.finish(self.transaction.rollback())
        self.begin()


def _asyncpg(pooled: bool) -> Opener:
    @contextlib.contextmanager
    def opened(dsn: str) -> Iterator[Opened]:
        parts = conninfo_to_dict(dsn)
        names = {"dbname": "database"}
        given: Any = {names.get(name, name): value for name, value in parts.items()}
        with asyncio.Runner() as runner:
            pool = (
                runner.run(asyncpg.create_pool(**given, min_size=1, max_size=1).__aenter__())
                if pooled
                else None
            )
            conn = runner.run(pool.acquire().__aenter__() if pool is not None else asyncpg.connect(**given))
            opened = OpenedAsyncpg(conn, runner.run)
            opened.begin()
            try:
                yield opened
            finally:
                runner.run(opened.transaction.rollback())
                runner.run(conn.close())
                if pool is not None:
                    pool.terminate()

    return opened


KINDS: dict[str, Opener] = {
    "psycopg": _psycopg(),
    "psycopg-dict-rows": _psycopg(row_factory=dict_row),
    "psycopg-namedtuple-rows-client-cursor": _psycopg(
        row_factory=namedtuple_row, cursor_factory=psycopg.ClientCursor
    ),
    "psycopg-raw-cursor-never-prepares": _psycopg(cursor_factory=psycopg.RawCursor, prepare_threshold=None),
    "psycopg-prepares-at-once": _psycopg(prepare_threshold=0),
    "psycopg-pool": _psycopg_pool,
    "psycopg-pipeline": _psycopg_pipeline,
    "psycopg-async": _async(_psycopg_async),
    "psycopg-async-pool": _async(_psycopg_async_pool),
    "psycopg-async-pipeline": _async(_psycopg_async_pipeline),
    "psycopg2": _psycopg2(),
    "psycopg2-dict-rows": _psycopg2(cursor_factory=psycopg2.extras.RealDictCursor),
    "sqlalchemy-connection": _alchemy_connection("psycopg", _PSYCOPG),
    "sqlalchemy-connection-psycopg2": _alchemy_connection("psycopg2", _OPTIONS),
    "sqlalchemy-session": _alchemy_session,
    "sqlalchemy-scoped-session": _alchemy_scoped_session,
    "sqlalchemy-async-connection-psycopg": _alchemy_async("psycopg", "connection"),
    "sqlalchemy-async-connection-asyncpg": _alchemy_async("asyncpg", "connection"),
    "sqlalchemy-async-session-psycopg": _alchemy_async("psycopg", "session"),
    "sqlalchemy-async-session-asyncpg": _alchemy_async("asyncpg", "session"),
    "sqlalchemy-async-scoped-session": _alchemy_async("asyncpg", "scoped"),
    "asyncpg": _asyncpg(pooled=False),
    "asyncpg-pool": _asyncpg(pooled=True),
    "django": _django(proxy=False),
    "django-proxy-server-side-binding": _django(proxy=True, server_side_binding=True),
}
