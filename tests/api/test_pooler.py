"""Behind PgBouncer in transaction mode, as Debian has it: older than 1.21, it knows nothing of prepared
statements. Connections have psycopg's defaults.
"""

import asyncio
import contextlib

import psycopg
import pytest

import fairq
from fairq import results
from tests.support.calls import Conn
from tests.support.database import Database
from tests.support.pooler import pooler


def test_enqueueing_needs_no_session(shared: Database, observer: Conn, group: str) -> None:
    """After each commit the pooler may use another session."""
    with pooler(shared.dsn, connections=3) as dsn, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(psycopg.connect(dsn)) for _ in range(6)]
        for number in range(20):
            # Three at once, so that all of the pooler's sessions take part, in turns.
            for at_once in (clients[number % 3 :: 3], clients[(number + 1) % 3 :: 3]):
                for client in at_once:
                    fairq.enqueue(client, group, number)
                for client in at_once:
                    client.commit()

        async def many() -> None:
            async with await psycopg.AsyncConnection.connect(dsn) as client:
                for number in range(20):
                    await fairq.enqueue_many(client, [(group, number)])
                    await client.commit()

        asyncio.run(many())
    count = observer.execute("select count(*) from fairq.tasks where group_key = %s", [group]).fetchone()
    assert count == (100,)


def test_a_connection_of_ones_own_prepares(shared: Database, group: str) -> None:
    conn = shared.connect()
    for _ in range(12):
        fairq.enqueue(conn, group)
    names = "select count(*) from pg_prepared_statements where statement like '%%create_task%%'"
    assert conn.execute(names).fetchone() == (1,)
    conn.rollback()


def test_a_wait_leaves_no_listen_behind(
    shared: Database, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After LISTEN in one session of the pooler and UNLISTEN in another, the first would listen for ever."""
    listens = "select count(*) from pg_listening_channels()"
    with pooler(shared.dsn, connections=2) as dsn, contextlib.ExitStack() as stack:
        waiter, other, third = (stack.enter_context(psycopg.connect(dsn)) for _ in range(3))
        waiter.autocommit = True
        heard = []

        async def wait(conn: object, wait: object) -> None:
            # It has the session that the pooler handed out last, so the end of the wait gets the other one.
            heard.append(other.execute(listens).fetchone())

        monkeypatch.setattr(results, "_pause", lambda *args: wait)
        monkeypatch.setattr(results, "_notice", lambda *args: wait)
        with pytest.raises(fairq.ResultTimeout):
            fairq.result(waiter, fairq.enqueue(waiter, group), timeout=0.1)
        assert set(heard) == {(0,)}
        assert third.execute(listens).fetchone() == (0,)
