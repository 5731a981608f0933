"""A queue in places that were not made for it: a role with strange settings, a pooler whose server restarts,
a database that was restored from a dump.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import fairq
from fairq import embedded
from tests.support.database import Database
from tests.support.invariants import assert_sound
from tests.support.pooler import pooler
from tests.support.server import private_server
from tests.support.sessions import wait_until_blocked
from tests.worker.running import EFFECTS, Desk, work_process

EACH_ONCE = "select count(*), count(distinct task_id) from effects"


@contextmanager
def served() -> Iterator[tuple[embedded.Server, Desk]]:
    with private_server() as server, psycopg.connect(server.dsn("fairq"), autocommit=True) as conn:
        conn.execute(EFFECTS.encode())
        yield server, Desk(server.dsn("fairq"), conn)


@pytest.fixture
def desk(database: Database) -> Desk:
    conn = database.connect(autocommit=True)
    conn.execute(EFFECTS)
    return Desk(database.dsn, conn)


def test_a_role_whose_statements_may_take_50_ms_works(desk: Desk) -> None:
    """What a turn has to wait for, and a cold cache, take longer than that."""
    dsn = make_conninfo(desk.dsn, options="-c statement_timeout=50ms")
    # Handlers have connections of their own, and no such patience is asked of them.
    with (
        work_process(desk.dsn, "--dsn", dsn, "-c", "4", "--no-listen") as worker,
        psycopg.connect(desk.dsn) as other,
    ):
        worker.wait_for("slot")
        # Nobody looks for work without reading the settings.
        other.execute("lock table fairq.settings in access exclusive mode")
        query = """
            select pid from pg_stat_activity
            where application_name = 'fairq worker' and datname = current_database()"""
        wait_until_blocked(desk.conn, desk.one(query))
        desk.conn.execute("select pg_sleep(0.2)")
        other.rollback()
        desk.enqueue_many("once", 50)
        desk.wait_until(lambda: desk.live == 0, "all is done")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert desk.outcomes() == {"succeeded": 50}
    assert not worker.says("failed to take a turn"), worker.output


def test_where_transactions_are_serializable_by_default_nothing_runs_twice(desk: Desk) -> None:
    """Two workers and a producer at once, so that there is something to be in each other's way."""
    dsn = make_conninfo(desk.dsn, options="-c default_transaction_isolation=serializable")
    with (
        work_process(dsn, "-c", "4") as first,
        work_process(dsn, "-c", "4") as second,
        psycopg.connect(dsn, autocommit=True) as app,
    ):
        for worker in (first, second):
            worker.wait_for("slot")
        ids = []
        for _ in range(30):
            ids += fairq.enqueue_many(app, [(f"group {n}", None) for n in range(5)], kind="once")
        desk.wait_until(lambda: desk.live == 0, "all is done")
        for worker in (first, second):
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
    assert desk.outcomes() == {"succeeded": len(ids)}
    assert desk.rows(EACH_ONCE) == [(len(ids), len(ids))]
    for worker in (first, second):
        assert not worker.says("failed to take a turn"), worker.output


def test_behind_a_pooler_a_restarted_server_costs_nothing_but_time() -> None:
    with served() as (server, desk):
        ids = desk.enqueue_many("once", 200)
        with pooler(desk.dsn) as dsn, work_process(dsn, "-c", "4", "--no-listen") as worker:
            desk.wait_until(lambda: desk.live < 150, "some are done")
            desk.conn.close()
            server.restart("immediate")
            with psycopg.connect(desk.dsn, autocommit=True) as conn:
                after = Desk(desk.dsn, conn)
                after.wait_until(lambda: after.live == 0, "all are done")
                assert after.outcomes() == {"succeeded": len(ids)}
                assert after.rows(EACH_ONCE) == [(len(ids), len(ids))]
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0


def test_a_worker_leaves_no_listen_on_the_connections_of_a_pooler(desk: Desk) -> None:
    """Whoever has that connection next would be sent every notice of the database."""
    with pooler(desk.dsn, connections=1) as dsn, work_process(dsn, "-c", "1") as worker:
        worker.wait_for("not listening")
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as client:
            assert client.execute("select pg_listening_channels()").fetchall() == []
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_database_restored_in_the_middle_of_work_goes_on() -> None:
    """I11: what ran when the dump was made runs again when its lease is over, and the rest at once."""
    programs = embedded.find_binaries().bin_dir
    if not (programs / "pg_dump").exists():
        pytest.skip(f"there is no pg_dump beside the server's programs in {programs}")
    with served() as (_, desk), served() as (_, other):
        # The new cluster is younger: every transaction id in the dump lies in its future.
        for _ in range(20):
            desk.conn.execute(
                "do $$ begin for i in 1 .. 100 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
        long = [desk.enqueue("sleeps", 60) for _ in range(2)]
        with work_process(desk.dsn, "-c", "4", "--lease", "1") as worker:
            desk.wait_until(lambda: desk.effects("began") == 2, "two run")
            short = desk.enqueue_many("once", 20)
            desk.wait_until(lambda: desk.effects("once") == 20, "some have ended")
            worker.send(signal.SIGSTOP)
            waiting = desk.enqueue_many("once", 20)
            dump = subprocess.run(
                [programs / "pg_dump", "--no-owner", desk.dsn], check=True, capture_output=True
            ).stdout
        other.conn.execute("create database restored template template0")
        dsn = make_conninfo(other.dsn, dbname="restored")
        psql = [str(programs / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn]
        subprocess.run(psql, input=dump, check=True, capture_output=True)
        with psycopg.connect(dsn, autocommit=True) as conn:
            new = Desk(dsn, conn)
            conn.execute("update fairq.tasks set payload = '0' where id = any(%s)", [long])
            new_ids = new.enqueue_many("once", 5)
            new.wait_until(
                lambda: (
                    bool(conn.execute("select fairq.maintain()")) and not new.rows("select from fairq.held")
                ),
                "the lease is over",
            )
            with work_process(dsn, "--drain", "-c", "4") as worker:
                assert worker.wait() == 0, worker.output
            assert new.rows("select * from fairq.live_tasks") == [], worker.output
            assert new.outcomes() == {"succeeded": len(long + short + waiting + new_ids)}
            assert {row[0] for row in new.rows("select task_id from effects where what = 'ended'")} == set(
                long
            )
            assert_sound(conn)
