"""Databases that one test leaves as it found them, and the next one takes, with the sessions open to them.

To make and drop a database, and to compile and plan the engine's functions in new sessions, takes longer than
most tests. So when a test is over its rows are deleted and the first ones put back; sequences and sessions
begin anew; so do those that a command or a worker in the process of the tests has closed. A database whose
catalogue or statistics changed, that grew, or that somebody else still has a session in, is dropped.
FAIRQ_TEST_KEPT=0 drops all of them.
"""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
import pytest
from psycopg import BaseConnection, pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.sql import Literal

from tests.support.cluster import ON_CITUS
from tests.support.database import MANAGED, Database, Preparation, prepare
from tests.support.server import TestServer, drop_soon
from tests.support.sessions import POLL_SECONDS

# Plans, statistics, migrations, faults and arbitrary statements have new databases.
FOLDERS = (
    *(f"tests/{name}/" for name in ("api", "cli", "policies", "races", "sql", "web", "worker")),
    "tests/contract/test_sql_pages.py",
)
KEEPS = os.environ.get("FAIRQ_TEST_KEPT", "1") != "0" and not MANAGED and not ON_CITUS

# What a session begins with. What psycopg prepared goes with the object that knew of it.
# Nobody counts those that wait among the sessions of a worker.
ANEW = (
    b"rollback; reset session authorization; reset all; close all; unlisten *; deallocate all;"
    b" discard temp; discard sequences; set application_name = ''; select pg_advisory_unlock_all()"
)

# Whatever is created, altered, dropped or analyzed leaves a newer row in one of these, or one row less.
CATALOGUES = """
select c.oid::regclass::text from pg_class c
where c.relnamespace = 'pg_catalog'::regnamespace and c.relkind = 'r' and not c.relisshared
"""
# A frozen row is older than any transaction. The ages of one statement are counted from one moment.
NEWEST = "(select array[count(*), greatest(age('3'::xid) - min(age(c.xmin)), 0)] from {} c)"
# Of what all databases share, what is about this one.
OTHER_STATE = """
(select array[count(*), greatest(age('3'::xid) - min(age(c.xmin)), 0)] from pg_db_role_setting c
  join pg_database d on c.setdatabase in (0, d.oid) and d.datname = current_database()),
(select array[1, c.xmin::text::bigint] from pg_database c where c.datname = current_database()),
(select array[sum(c.relpages), sum(c.reltuples)::bigint] from pg_class c where c.oid >= 16384)
"""
# Indexes grow with their tables.
SIZE = "select sum(pg_relation_size(c.oid)) from pg_class c where c.oid >= 16384 and c.relkind = 'r'"
OTHERS = """
select count(*) from pg_stat_activity a where a.datname = current_database() and a.pid <> all(%s)
"""
RELATIONS = """
select c.oid::regclass::text from pg_class c
where c.oid >= 16384 and c.relkind = any(%s) and not c.relispartition
"""

GROWN_BYTES = 2**21
# A session that its client closed takes a moment to end.
PATIENCE_SECONDS = 1.0
MOST_SESSIONS = 16

# What a closed connection has.
GONE: PGconn = pq.PGconn.connect(b"host=/nowhere")

Key = tuple[str, str]


class KeptDatabase(Database):
    """A database for one test after the other. In between, `is_as_new` restores it, or says it cannot."""

    def __init__(
        self, server: TestServer, name: str, logins: dict[str, str], preparation: Preparation | None = None
    ) -> None:
        super().__init__(name, server.dsn(name), logins)
        prepare(self, preparation)
        self.idle: dict[Key, list[PGconn]] = defaultdict(list)
        self.given: WeakKeyDictionary[BaseConnection[Any], Key] = WeakKeyDictionary()
        self.keeper = psycopg.connect(self.dsn, autocommit=True, application_name="keeper")
        self.empty, self.fill = self._restoring()
        newest = [NEWEST.format(name) for (name,) in self.keeper.execute(CATALOGUES).fetchall()]
        self.ask_state = f"select array[{', '.join(newest)}, {OTHER_STATE}]"
        self.state, self.size = self._ask(self.ask_state), self._ask(SIZE)
        self.may_reset = self._ask("select has_function_privilege('pg_stat_reset()', 'execute')")

    def open(self, dsn: str, autocommit: bool = False, **kwargs: Any) -> psycopg.Connection[Any]:
        """An idle session in a new object, or a new session."""
        if kwargs:
            return super().open(dsn, autocommit=autocommit, **kwargs)
        key = (dsn, os.environ.get("PGOPTIONS", ""))
        if session := self._take(key):
            conn: psycopg.Connection[Any] = psycopg.Connection(session)
            conn.autocommit = autocommit
        else:
            conn = psycopg.connect(dsn, autocommit=autocommit)
        self.given[conn] = key
        self.connections.append(conn)
        return conn

    def close(self) -> None:
        """Takes back what was given, the last one first: the first session of a test knows most."""
        for conn in reversed(self.connections):
            self._take_back(conn)
        super().close()
        self.connections.clear()

    @contextmanager
    def lends(self) -> Iterator[None]:
        """Inside, connecting by psycopg takes an idle session, and closing gives it back."""
        opened = vars(BaseConnection)["_connect_gen"].__func__
        close, close_async = psycopg.Connection.close, psycopg.AsyncConnection.close

        def connect(cls: Any, conninfo: str = "") -> Any:
            key = (conninfo, os.environ.get("PGOPTIONS", ""))
            if conninfo_to_dict(conninfo).get("dbname") != self.name:
                return (yield from opened(cls, conninfo))
            session = self._take(key)
            conn = cls(session) if session else (yield from opened(cls, conninfo))
            self.given[conn] = key
            return conn

        def close_sync(conn: psycopg.Connection[Any]) -> None:
            if conn.closed or not self._take_back(conn):
                close(conn)

        async def close_it(conn: psycopg.AsyncConnection[Any]) -> None:
            if conn.closed or not self._take_back(conn):
                await close_async(conn)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BaseConnection, "_connect_gen", classmethod(connect))
            patch.setattr(psycopg.Connection, "close", close_sync)
            patch.setattr(psycopg.AsyncConnection, "close", close_it)
            yield

    def _take(self, key: Key) -> PGconn | None:
        while self.idle[key]:
            session = self.idle[key].pop(0)
            if session.exec_(b"reset application_name").status == ExecStatus.COMMAND_OK:
                return session
            session.finish()
        return None

    def _take_back(self, conn: BaseConnection[Any]) -> bool:
        # A pool asks for its own back.
        if getattr(conn, "_pool", None) or (key := self.given.pop(conn, None)) is None:
            return False
        session, conn.pgconn, conn._closed = conn.pgconn, GONE, True
        if sum(map(len, self.idle.values())) < MOST_SESSIONS and begins_anew(session):
            self.idle[key].insert(0, session)
        else:
            session.finish()
        return True

    def is_as_new(self) -> bool:
        try:
            if not self._is_alone() or self._ask(self.ask_state) != self.state:
                return False
            with self.keeper.transaction():
                self.keeper.execute("set local lock_timeout = '1s'")
                self.keeper.execute(self.empty.encode(), prepare=True)
                self.keeper.execute(self.fill.encode(), prepare=True)
                # Else they would be those of a restored dump; see fairq._tick.
                self.keeper.execute("update fairq.ticks set written_by = xmin", prepare=True)
            if self.may_reset:  # else autovacuum comes for what all tests before the next one have written
                self.keeper.execute("select pg_stat_reset()", prepare=True)
            return bool(self._ask(SIZE) < self.size + GROWN_BYTES)
        except psycopg.Error:
            return False

    def drop(self, server: TestServer) -> None:
        self.keeper.close()
        for session in itertools.chain(*self.idle.values()):
            session.finish()
        drop_soon(server, self.name)

    def _is_alone(self) -> bool:
        pids = [each.backend_pid for each in itertools.chain(*self.idle.values())]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._ask(OTHERS, [*pids, self.keeper.info.backend_pid]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _restoring(self) -> tuple[str, str]:
        """The statements that empty each table, and restore first rows and sequences."""
        deletes, inserts, numbers = [], [], []
        for (table,) in self.keeper.execute(RELATIONS, [["r", "p"]]).fetchall():
            deletes.append(f"delete from {table}")  # noqa: S608
            rows = self._ask(f"select array_agg(t)::text from {table} t")  # noqa: S608
            if rows is not None:
                values = f"unnest({Literal(rows).as_string(self.keeper)}::{table}[])"
                inserts.append(f"insert into {table} select * from {values}")  # noqa: S608
        for (sequence,) in self.keeper.execute(RELATIONS, [["S"]]).fetchall():
            ((last, _, is_called),) = self.keeper.execute(f"table {sequence}".encode()).fetchall()
            numbers.append(f"setval('{sequence}', {last}, {is_called})")
        return in_one(deletes), f"{in_one(inserts)} {', '.join(numbers)}"

    def _ask(self, query: str, *params: Any) -> Any:
        row = self.keeper.execute(query.encode(), params, prepare=True).fetchone()
        assert row is not None
        return row[0]


def in_one(statements: list[str]) -> str:
    """All of them as one statement, prepared and planned once."""
    return f"with {', '.join(f's{n} as ({each})' for n, each in enumerate(statements))} select"


def begins_anew(session: PGconn) -> bool:
    over = (TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR)
    if session.transaction_status not in over or session.pipeline_status != PipelineStatus.OFF:
        return False
    said = session.exec_(ANEW).status
    while session.notifies():
        pass
    return said == ExecStatus.TUPLES_OK
