"""What operators do with servers: a failover without waiting for the standby, the way back, a new version.

Each takes some seconds, so `make test` leaves them out: `make test-standby` runs them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import fairq
from fairq import embedded
from tests.chaos.test_failover import Producer, desk_of, kill, missing, pair
from tests.support.calls import maintain, one
from tests.support.invariants import assert_sound
from tests.support.programs import data_of, own, places, program, run_as_server, versions
from tests.support.schema import load_schema
from tests.support.server import SETTINGS
from tests.support.sessions import wait_until
from tests.support.standby import (
    NAME,
    dsn_of_both,
    follows,
    promote,
    stop_following,
    wait_for_standby,
)
from tests.worker.running import EFFECTS, Desk, work_process

pytestmark = pytest.mark.skipif("FAIRQ_TEST_SERVERS" not in os.environ, reason="make test-standby runs it")

# Every task that ended has its effect, once: they committed together.
TWICE = """
select f.id from fairq.finished_tasks f left join effects e on e.task_id = f.id
where f.kind = 'once' group by 1 having count(*) <> 1 or count(e) <> 1"""


def arrived(server: embedded.Server) -> None:
    with psycopg.connect(server.dsn()) as conn:
        query = "select bool_and(replay_lsn = pg_current_wal_lsn()) from pg_stat_replication"
        wait_until(lambda: conn.execute(query).fetchone() == (True,), "the standby has all of it")


def test_what_an_asynchronous_standby_lost_is_found_by_its_idempotency_key() -> None:
    """The worker goes on, too: what it had ended with the primary waits again, and is run again."""
    with pair() as (primary, second), work_process(dsn_of_both(primary, second), "-c", "4") as worker:
        worker.wait_for("slot")
        with desk_of(primary) as desk:
            desk.conn.execute("select fairq.pause_group('default', 'later')")
            again = desk.enqueue("count", group_key="later")
            desk.enqueue("once", idempotency_key="arrived")
            desk.wait_until(lambda: desk.effects("once") == 1, "it ran")
            arrived(primary)
            stop_following(second)
            lost = desk.enqueue("once", idempotency_key="lost")
            desk.conn.execute("select fairq.resume_group('default', 'later')")
            desk.wait_until(lambda: desk.live == 0, "both ran")
        kill(primary)
        promote(second)
        with desk_of(second) as desk:
            assert missing(desk, {again, lost}) == {lost}
            desk.conn.execute("select fairq.resume_group('default', 'later')")
            # The application does not know which of its last calls arrived, so it repeats them all.
            before = desk.one("select max(id) from fairq.finished_tasks")
            assert desk.enqueue("once", idempotency_key="arrived") == before
            assert desk.enqueue("once", idempotency_key="lost") not in (before, again)
            desk.wait_until(lambda: desk.live == 0, "all ran")
            assert desk.effects("once") == 2
            assert desk.effects("ran") == 1
            assert desk.rows(TWICE) == []
            assert_sound(desk.conn)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_pg_rewind_makes_the_old_primary_a_standby_of_the_new_one_and_back() -> None:
    with pair(wal_log_hints=True, full_page_writes=True) as (primary, second):
        rewind = program(primary.binaries, "pg_rewind")
        with desk_of(primary) as desk:
            # Or the recovery that pg_rewind begins with removes the log that it needs.
            desk.conn.execute("alter system set wal_keep_size = '64MB'")
            desk.conn.execute("select pg_reload_conf()")
            both = {desk.enqueue("once")}
            arrived(primary)
            stop_following(second)
            only_here = {desk.enqueue("once")}
        kill(primary)
        promote(second)
        with desk_of(second) as desk:
            both |= {desk.enqueue("once") for _ in range(3)}
            # Or the source still says that it is on the timeline of before.
            desk.conn.execute("checkpoint")
        source = make_conninfo(second.dsn("postgres"), application_name=NAME)
        data = primary.data_dir / "pgdata"
        run_as_server(rewind, "-D", data, f"--source-server={source}", "--write-recovery-conf", "--no-sync")
        primary.start()
        wait_until(lambda: follows(second), "the old primary follows the new one")
        wait_for_standby(second)
        with desk_of(second) as desk:
            both |= {desk.enqueue("once")}
        kill(second)
        promote(primary)
        with work_process(dsn_of_both(primary, second), "-c", "4", "--drain") as worker:
            assert worker.wait() == 0, worker.output
        with desk_of(primary) as desk:
            # What had not arrived is overwritten: that is what rewinding means.
            assert missing(desk, both | only_here) == only_here
            assert {row[0] for row in desk.rows("select task_id from effects")} == both
            assert_sound(desk.conn)


# --- A new major version ----------------------------------------------------------------------------


@pytest.fixture
def old_and_new(monkeypatch: pytest.MonkeyPatch) -> list[embedded.Binaries]:
    monkeypatch.delenv("FAIRQ_PG_BIN", raising=False)
    return versions(16, 18)


@contextmanager
def shop(home: Path, **settings: embedded.Setting) -> Iterator[embedded.Server]:
    """A server with an application's database, in a folder that has data already."""
    with embedded.start(home, settings={**SETTINGS, "fsync": False, **settings}) as server:
        yield server


def begin(conn: psycopg.Connection[Any]) -> dict[str, set[int]]:
    """Tasks in every state, some of them under a cap, one with a worker that will not come back."""
    load_schema(conn)
    conn.execute(EFFECTS.encode())
    conn.commit()
    conn.autocommit = True
    conn.execute("select fairq.configure_group('default', 'capped', '{\"max_running\": 1}')")
    tasks = {
        "waiting": set(fairq.enqueue_many(conn, [("bob", n) for n in range(30)], kind="once")),
        "capped": set(fairq.enqueue_many(conn, [("capped", n) for n in range(5)], kind="once")),
        "keyed": {fairq.enqueue(conn, "alice", n, kind="once", concurrency_key="key") for n in range(5)},
        "once": {fairq.enqueue(conn, "alice", 1, kind="once", idempotency_key="once")},
    }
    gone = one(conn, "select fairq.register_worker('gone', array['default'], 3, '2 seconds')")
    held = conn.execute("select id from fairq.pop_tasks('default', 6, %s)", [gone]).fetchall()
    return tasks | {"held": {row[0] for row in held}}


def goes_on(desk: Desk, tasks: dict[str, set[int]], acknowledged: set[int]) -> None:
    """Nothing is missing, and everything ends, once."""
    everything = set().union(*tasks.values()) | acknowledged
    assert missing(desk, everything) == set()
    assert fairq.enqueue(desk.conn, "alice", 1, kind="once", idempotency_key="once") in tasks["once"]
    new = fairq.enqueue(desk.conn, "carol", 1, kind="once")
    assert new > max(everything)
    with work_process(desk.dsn, "-c", "4") as worker:
        desk.wait_until(lambda: maintain(desk.conn) is not None and desk.live == 0, "all ran")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert {row[0] for row in desk.rows("select id from fairq.finished_tasks")} == everything | {new}
    assert desk.rows(TWICE) == []
    assert set(desk.outcomes()) == {"succeeded"}
    lost = "select task_id from fairq.attempts where outcome = 'worker_lost'"
    assert {row[0] for row in desk.rows(lost)} == tasks["held"]
    assert_sound(desk.conn)


def test_the_queue_goes_on_after_pg_upgrade(old_and_new: list[embedded.Binaries]) -> None:
    old, new = old_and_new
    upgrade = program(new, "pg_upgrade")
    with places() as folder:
        for binaries, name in ((old, "old"), (new, "new")):
            data_of(binaries, folder / name)
        with shop(folder / "old") as server:
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute("create database fairq")
            with psycopg.connect(server.dsn("fairq")) as conn:
                tasks = begin(conn)
        work = own(folder / "work")
        run_as_server(
            upgrade, "-b", old.bin_dir, "-B", new.bin_dir, "-d", folder / "old" / "pgdata",
            "-D", folder / "new" / "pgdata", "-U", "postgres", "--socketdir", work, "--no-sync", cwd=work,
        )  # fmt: skip
        with shop(folder / "new") as server, desk_of(server) as desk:
            assert desk.one("show server_version_num") >= "180000"
            goes_on(desk, tasks, set())


def test_blue_green_by_a_publication_for_all_tables(old_and_new: list[embedded.Binaries]) -> None:
    """A worker and a producer are at it all the time but for the switch itself."""
    old, new = old_and_new
    dump, restore = program(new, "pg_dump"), program(new, "pg_restore")
    with places() as folder:
        for binaries, name in ((old, "blue"), (new, "green")):
            data_of(binaries, folder / name)
        with shop(folder / "blue", wal_level="logical") as blue, shop(folder / "green") as green:
            for server in (blue, green):
                with psycopg.connect(server.dsn(), autocommit=True) as conn:
                    conn.execute("create database fairq")
            with psycopg.connect(blue.dsn("fairq")) as conn:
                tasks = begin(conn)
                conn.execute(
                    "create publication everything for all tables with (publish_via_partition_root = true)"
                )
            with psycopg.connect(green.dsn("fairq"), autocommit=True) as conn:
                for role in ("enqueue", "work", "observe", "admin"):
                    conn.execute(sql.SQL("create role {}").format(sql.Identifier(f"fairq_{role}")))
            file = folder / "schema"
            subprocess.run([dump, "--schema-only", "-Fc", "-f", file, blue.dsn("fairq")], check=True)
            subprocess.run([restore, "--no-publications", "-d", green.dsn("fairq"), file], check=True)
            with work_process(blue.dsn("fairq"), "-c", "4") as worker, desk_of(green) as desk:
                worker.wait_for("slot")
                producer = Producer(blue.dsn("fairq"))
                producer.wait_for(20)
                desk.conn.execute(
                    sql.SQL("create subscription from_blue connection {} publication everything").format(
                        blue.dsn("fairq")
                    )
                )
                copied = "select bool_and(srsubstate = 'r') from pg_subscription_rel"
                desk.wait_until(lambda: desk.one(copied), "all tables are copied")
                producer.wait_for(50)
                # The switch: no more writes, wait for the last of them, sequences, and go.
                acknowledged = producer.end()
                worker.send(signal.SIGTERM)
                assert worker.wait() == 0
                with desk_of(blue) as source:
                    source.conn.execute("alter database fairq set default_transaction_read_only = on")
                    last = source.one("select pg_current_wal_lsn()")
                    reached = "select bool_and(replay_lsn >= %s) from pg_stat_replication"
                    source.wait_until(lambda: source.one(reached, last), "all of it is there")
                    sequences = source.rows(
                        "select format('%%I.%%I', schemaname, sequencename), last_value from pg_sequences"
                        " where last_value is not null"
                    )
                for name, value in sequences:
                    desk.conn.execute("select setval(%s, %s)", [name, value])
                desk.conn.execute("drop subscription from_blue")
                desk.conn.execute("select fairq.rebuild(q.queue) from fairq.queues q where not q.internal")
                assert len(acknowledged) > 70
                goes_on(desk, tasks, acknowledged)
