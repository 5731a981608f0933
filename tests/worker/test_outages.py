"""The database comes and goes while tasks run: D16 to D26, HR18, HR19, I1, I10."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fairq
from fairq import embedded
from fairq.errors import Unavailable
from fairq.worker import Worker
from fairq.worker.config import Settings
from fairq.worker.database import Database
from fairq.worker.engine import Engine
from tests.support.calls import pop, register
from tests.support.proxy import proxy
from tests.support.server import private_server
from tests.worker.running import EFFECTS, Desk, lines_of, work_process, worker_thread

pytestmark = pytest.mark.new_database

app = fairq.App()


@app.task
async def nothing(payload: Any) -> None: ...


@contextlib.contextmanager
def own_desk(server: embedded.Server) -> Iterator[Desk]:
    with psycopg.connect(server.dsn("fairq"), autocommit=True) as conn:
        yield Desk(server.dsn("fairq"), conn)


@pytest.fixture
def own_server() -> Iterator[embedded.Server]:
    """A server that a test may stop."""
    with private_server() as server:
        with own_desk(server) as desk:
            desk.conn.execute(EFFECTS)
        yield server


def kill_sessions(desk: Desk, name: str) -> int:
    """End the backends of the sessions with this name, and return how many."""
    return int(
        desk.one(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where application_name = %s and datname = current_database()",
            name,
        )
    )


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_stops_and_starts_under_load_loses_nothing_and_doubles_nothing(
    own_server: embedded.Server, mode: embedded.StopMode
) -> None:
    """HR18, I1: effects and ends commit together, so each effect is there exactly once."""
    with own_desk(own_server) as desk:
        ids = desk.enqueue_many("once", 400)
    with work_process(own_server.dsn("fairq"), "-p", "2", "-c", "4", "--lease", "3") as worker:
        for rest in (300, 150):
            with own_desk(own_server) as desk:
                desk.wait_until(lambda rest=rest, desk=desk: desk.live < rest, f"fewer than {rest} are left")  # type: ignore[misc]
            own_server.stop(mode)
            worker.wait_for("times in a row")
            own_server.start()
        with own_desk(own_server) as desk:
            desk.wait_until(lambda: desk.live == 0, "all are done")
            assert desk.outcomes() == {"succeeded": len(ids)}
            assert desk.rows("select count(*), count(distinct task_id) from effects") == [(400, 400)]
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_work_that_ended_while_the_database_was_away_is_written_when_it_is_back(
    own_server: embedded.Server,
) -> None:
    """HR18: a failed write of a result is repeated without running the handler again."""
    own = fairq.App()
    began, release = threading.Event(), threading.Event()
    ran: list[int] = []

    @own.task(store_result=True)
    def works(payload: Any, ctx: fairq.Context) -> str:
        ran.append(ctx.attempt)
        began.set()
        release.wait(60)
        return "done"

    with own_desk(own_server) as desk:
        id = desk.enqueue("works")
    with worker_thread(own, own_server.dsn("fairq"), grace=60.0):
        assert began.wait(60)
        own_server.stop()
        release.set()
        own_server.start()
        with own_desk(own_server) as desk:
            desk.wait_until(lambda: desk.live == 0, "the end is written")
            assert desk.end(id)[:3] == ("succeeded", 1, "done")
    assert ran == [1]


def test_a_worker_that_starts_before_its_database_waits_for_it(own_server: embedded.Server) -> None:
    """HR18: at start-up."""
    with own_desk(own_server) as desk:
        desk.enqueue_many("nothing", 3)
    own_server.stop()
    with work_process(own_server.dsn("fairq")) as worker:
        worker.wait_for("failed to start")
        own_server.start()
        worker.wait_for("slot")
        with own_desk(own_server) as desk:
            desk.wait_until(lambda: desk.live == 0, "the backlog is done")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_worker_gives_up_after_as_many_failures_as_it_was_told() -> None:
    """HR23"""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        dsn = f"postgresql://nobody:secret@127.0.0.1:{listener.getsockname()[1]}/nowhere"
    with pytest.raises(Unavailable, match="3 times in a row") as caught:
        Worker(
            app,
            dsn,
            db_retry_initial_ms=100,
            db_retry_max_ms=500,
            db_retry_max_attempts=3,
        ).run()
    assert "secret" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_of_several_nodes_the_last_one_that_fails_so_often_ends_the_worker() -> None:
    error = psycopg.OperationalError("away")

    async def main() -> None:
        settings = Settings(db_retry_max_attempts=2)
        engine = Engine(app, "", settings, ("default",), print, False)
        gone, other = (engine.node("", name).database for name in ("gone", "other"))
        for _ in range(3):
            gone.failed(error, "to take a turn")
        other.failed(error, "to take a turn")
        gone.failed(error, "to take a turn")
        with pytest.raises(Unavailable, match="other failed 2 times in a row"):
            other.failed(error, "to take a turn")

    asyncio.run(main())


def test_an_open_breaker_leaves_the_database_alone_and_lets_one_probe_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D17, D20, D21, D22, D23: counts connections to a port where nobody answers."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(50)
        knocks: list[int] = []

        def porter() -> None:
            with contextlib.suppress(OSError):
                while True:
                    visitor, _ = door.accept()
                    knocks.append(1)
                    visitor.close()

        threading.Thread(target=porter, daemon=True).start()
        dsn = f"postgresql://nobody@127.0.0.1:{door.getsockname()[1]}/nowhere?sslmode=disable&gssencmode=disable"
        with caplog.at_level(logging.WARNING, "fairq.worker"), pytest.raises(Unavailable):
            Worker(
                app,
                dsn,
                db_retry_initial_ms=100,
                db_retry_max_ms=500,
                breaker_threshold=2,
                breaker_cooldown_ms=300,
                db_retry_max_attempts=5,
            ).run()
        door.shutdown(socket.SHUT_RDWR)
    # Two failures open it; each later one is the single probe of a half-open breaker, and opens it again.
    assert len(knocks) == 5
    assert caplog.text.count("[circuit open]") == 4


def test_handlers_that_fail_never_open_the_breaker(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """D16, D24"""
    own = fairq.App()

    @own.task(max_attempts=1)
    async def fails(payload: Any) -> None:
        raise OSError("a handler's own trouble")

    @own.task(max_attempts=1)
    def fails_with_psycopg(payload: Any) -> None:
        raise psycopg.OperationalError("another database's trouble")

    desk.enqueue_many("fails", 20, max_attempts=1)
    desk.enqueue_many("fails_with_psycopg", 20, max_attempts=1)
    with caplog.at_level(logging.WARNING, "fairq.worker"):
        Worker(own, desk.dsn, mode="drain", breaker_threshold=1).run()
    assert desk.outcomes() == {"failed": 40}
    assert "circuit open" not in caplog.text


def test_killed_backends_are_replaced_and_nothing_is_lost(desk: Desk) -> None:
    """Breaks the connections of turns, keeper and listener again and again, under load."""
    ids = desk.enqueue_many("once", 400)
    with work_process(desk.dsn, "-c", "4") as worker:
        killed = 0
        for rest in (350, 250, 150, 50):
            desk.wait_until(lambda rest=rest: desk.live < rest, f"fewer than {rest} are left")  # type: ignore[misc]
            killed += sum(kill_sessions(desk, f"fairq {each}") for each in ("worker", "keeper", "listen"))
        desk.wait_until(lambda: desk.live == 0, "all are done")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert killed >= 4
    assert desk.outcomes() == {"succeeded": len(ids)}
    assert desk.rows("select count(*), count(distinct task_id), max(attempt) from effects") == [(400, 400, 1)]
    assert desk.workers == 0


def test_connections_that_keep_breaking_do_not_put_off_what_lost_workers_held(desk: Desk) -> None:
    """I1: the keeper waited for its own lease after each of them."""
    id = desk.enqueue("nothing")
    lost = register(desk.conn, lease="1 second")
    assert pop(desk.conn, lost, 1) == [id]
    next_kill = 0.0

    def recovered() -> bool:
        nonlocal next_kill
        if time.monotonic() > next_kill:
            next_kill = time.monotonic() + 0.7
            kill_sessions(desk, "fairq keeper")
        return desk.live == 0

    options = {"heartbeat_ms": 100, "maintain_interval_ms": 300, "db_retry_initial_ms": 100}
    with worker_thread(app, desk.dsn, **options):
        desk.wait_until(recovered, "the other one runs it")
    assert desk.end(id)[:2] == ("succeeded", 2)


def test_a_dead_listener_is_replaced_and_what_came_meanwhile_is_found(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HR19: polling is switched off here, so that only LISTEN can wake the worker."""
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE_LISTENING", 300.0)
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE", 300.0)
    lines: list[str] = []
    with (
        caplog.at_level(logging.WARNING, "fairq.worker"),
        worker_thread(app, desk.dsn, notify_poll_interval_ms=300_000, announce=lines.append),
    ):
        desk.wait_until(lambda: bool(lines), "the worker started")
        for _ in range(2):
            assert kill_sessions(desk, "fairq listen") == 1
            desk.enqueue("nothing")
            desk.wait_until(lambda: desk.live == 0, "the task ran")
            desk.wait_until(
                lambda: (
                    desk.one(
                        "select count(*) from pg_stat_activity where application_name = 'fairq listen'"
                        " and datname = current_database()"
                    )
                    == 1
                ),
                "it listens again",
            )
    assert "LISTEN failed" in caplog.text


def test_a_failing_write_of_ends_is_made_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """HR18: the right to write is revoked for a while, but no handler runs again."""
    ran: list[int] = []
    own = fairq.App()

    @own.task
    async def works(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.id)

    ids = desk.enqueue_many("works", 20)
    desk.conn.execute("alter table fairq.finished_tasks add constraint closed check (false) not valid")
    with caplog.at_level(logging.WARNING, "fairq.worker"), worker_thread(own, desk.dsn):
        desk.wait_until(lambda: "failed to" in caplog.text, "a write failed")
        desk.conn.execute("alter table fairq.finished_tasks drop constraint closed")
        desk.wait_until(lambda: desk.live == 0, "all are written")
    assert sorted(ran) == ids
    assert desk.outcomes() == {"succeeded": 20}


def test_a_report_whose_turn_failed_is_sent_again(desk: Desk) -> None:
    own = fairq.App()
    release = threading.Event()

    @own.task
    def works(payload: Any, ctx: fairq.Context) -> None:
        ctx.progress(3, 10)
        release.wait(60)

    blocked = (
        "select count(*) from pg_locks l join pg_stat_activity a using (pid)"
        " where l.relation = %s::regclass and not l.granted and a.datname = current_database()"
    )
    with psycopg.connect(desk.owner_dsn) as other, worker_thread(own, desk.dsn):
        other.execute("lock table fairq.progress in access exclusive mode")
        id = desk.enqueue("works")
        desk.wait_until(lambda: desk.one(blocked, "fairq.progress") == 1, "the report waits")
        assert kill_sessions(desk, "fairq worker") == 1
        desk.wait_until(lambda: desk.one(blocked, "fairq.progress") == 1, "it was sent again")
        other.rollback()
        desk.wait_until(
            lambda: desk.rows("select done from fairq.progress where task_id = %s", id) == [(3.0,)],
            "it is there",
        )
        release.set()
        desk.wait_until(lambda: desk.live == 0, "the task ended")


def test_a_standby_is_not_taken_for_a_primary(own_server: embedded.Server) -> None:
    """target_session_attrs: a server that accepts no writes is as good as none."""
    with own_desk(own_server) as desk:
        desk.enqueue("nothing")
        desk.conn.execute("alter system set default_transaction_read_only = on")
        desk.conn.execute("select pg_reload_conf()")
    with work_process(own_server.dsn("fairq")) as worker:
        worker.wait_for("failed to start")
        with psycopg.connect(own_server.dsn("fairq"), autocommit=True) as conn:
            conn.execute("alter system reset default_transaction_read_only")
            conn.execute("select pg_reload_conf()")
        worker.wait_for("slot")
        with own_desk(own_server) as desk:
            desk.wait_until(lambda: desk.live == 0, "the task ran")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert len(lines_of(worker, "slot")) == 1


def test_a_worker_whose_database_hangs_can_be_ended(own_server: embedded.Server) -> None:
    """S26: the backend of the turns freezes during one; the tasks go back on another connection."""
    dsn = own_server.dsn("fairq")
    with own_desk(own_server) as desk, work_process(dsn, "--grace", "0", "--no-listen", "-c", "1") as worker:
        worker.wait_for("slot")
        (backend,) = desk.rows("select pid from pg_stat_activity where application_name = 'fairq worker'")
        desk.enqueue("sleeps", 60)
        desk.wait_until(lambda: desk.effects("began") == 1, "the handler began")
        os.kill(backend[0], signal.SIGSTOP)
        try:
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0, worker.output
            left = desk.rows("select state, max_attempts - attempt from fairq.live_tasks")
            assert left == [("overflow", 5)], worker.output
        finally:
            os.kill(backend[0], signal.SIGCONT)


def test_a_worker_struck_off_while_its_breaker_was_open_goes_on_under_a_new_number(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """D20, D21: the probe's answer is that this worker is unknown, so the database is back."""
    own = fairq.App()
    report, end = threading.Event(), threading.Event()

    @own.task
    def hold(payload: Any, ctx: fairq.Context) -> None:
        report.wait(60)
        ctx.progress(1)
        end.wait(60)

    @own.task
    async def nothing(payload: Any) -> None: ...

    desk.enqueue("hold")
    with (
        caplog.at_level(logging.WARNING, "fairq.worker"),
        worker_thread(
            own,
            desk.dsn,
            concurrency=1,
            listen=False,
            heartbeat_ms=20_000,
            breaker_threshold=1,
            breaker_cooldown_ms=1_000,
            db_retry_initial_ms=100,
        ),
    ):
        # The only slot is taken: the turn that fails holds nothing but a report.
        desk.wait_until(lambda: desk.running == 1, "it runs")
        worker_id = desk.one("select worker_id from fairq.workers")
        kill_sessions(desk, "fairq worker")
        desk.conn.execute("select fairq.retire_worker(%s)", [worker_id])
        report.set()
        desk.wait_until(lambda: "[circuit open]" in caplog.text, "the breaker opens")
        end.set()
        desk.enqueue("nothing")
        desk.wait_until(lambda: desk.live == 0, "both are done")
    assert desk.outcomes() == {"succeeded": 2}


def test_a_primary_that_may_not_be_written_any_more_is_left_for_one_that_may(
    own_server: embedded.Server,
) -> None:
    """HR19: the connection still works and would be used for ever, so a new one is tried."""
    with own_desk(own_server) as desk:
        with worker_thread(app, desk.dsn, listen=False):
            sessions = "select count(*) from pg_stat_activity where application_name = 'fairq worker'"
            desk.wait_until(lambda: bool(desk.one(sessions)), "the worker is there")
            desk.conn.execute("alter system set default_transaction_read_only = on")
            desk.conn.execute("select pg_reload_conf()")
            desk.wait_until(lambda: not desk.one(sessions), "it has let go of the connection")
            desk.conn.execute("set default_transaction_read_only = off")
            desk.conn.execute("alter system reset default_transaction_read_only")
            desk.conn.execute("select pg_reload_conf()")
            desk.enqueue("nothing")
            desk.wait_until(lambda: desk.live == 0, "it works again")
        assert desk.outcomes() == {"succeeded": 1}


# --- The breaker costs no more than it saves -------------------------------------------------------

# Rests of hours, after the first failure: who works again soon did not wait for their end.
HOURS: dict[str, Any] = {"breaker_threshold": 1, "breaker_cooldown_ms": 3_600_000, "lease": 86_400.0}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"listen": False}, id="the sign of life"),
        pytest.param({"heartbeat_ms": 600_000}, id="the listener"),
    ],
)
def test_the_first_that_gets_through_closes_the_breaker(
    desk: Desk, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """D16, D20: the breaker never concerns the heartbeat or the listener."""
    caplog.set_level(logging.INFO, "fairq.worker")
    with proxy(desk.dsn) as network, worker_thread(app, network.dsn, **HOURS, **options) as worker:
        desk.enqueue("nothing")
        desk.wait_until(lambda: desk.live == 0, "the worker works")
        network.cut()
        desk.enqueue("nothing")
        desk.wait_until(lambda: worker.circuit == "open", "the breaker opens")
        network.mend()
        desk.wait_until(lambda: desk.live == 0, "it works again")
        assert worker.circuit == "closed"
        if "listen" in options:
            assert desk.one("select circuit_trips from fairq.worker_stats") >= 1
    assert "circuit closed" in caplog.text


def test_a_database_that_answers_no_is_there(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """D24: a turn that waits for a migration's lock until its role's timeout does not open the breaker."""
    dsn = psycopg.conninfo.make_conninfo(desk.dsn, options="-c lock_timeout=50ms")
    options = {"db_retry_initial_ms": 100, "listen": False, "concurrency": 1}
    with (
        caplog.at_level(logging.INFO, "fairq.worker"),
        psycopg.connect(desk.owner_dsn) as migration,
        worker_thread(app, dsn, **HOURS, **options),
    ):
        desk.wait_until(lambda: desk.workers == 1, "the worker is there")
        migration.execute("lock table fairq.tasks, fairq.ticks in access exclusive mode")
        desk.wait_until(lambda: "2 times in a row: canceling" in caplog.text, "turns fail")
        migration.rollback()
        desk.enqueue("nothing")
        desk.wait_until(lambda: desk.live == 0, "it works again")
    assert "circuit" not in caplog.text


def test_a_wrong_password_stays_wrong(own_server: embedded.Server) -> None:
    with own_desk(own_server) as desk:
        desk.conn.execute("create role careful login password 'right' in role fairq_work")
        rules = Path(desk.one("show hba_file"))
        rules.write_text(f"local all careful scram-sha-256\n{rules.read_text()}")
        desk.conn.execute("select pg_reload_conf()")
    dsn = psycopg.conninfo.make_conninfo(own_server.dsn("fairq"), user="careful", password="mistaken")
    with work_process(dsn, "--once", "--db-retry-initial-ms", "100") as worker:
        assert worker.wait() == 3, worker.output
    assert "password authentication failed" in worker.output
    assert "mistaken" not in worker.output


@pytest.mark.parametrize(
    ("mode", "processes", "wrong"),
    [("--once", 1, {"user": "stranger"}), ("--drain", 2, {"dbname": "nowhere"})],
)
def test_a_draining_worker_gives_up_a_start_that_cannot_succeed(
    desk: Desk, mode: str, processes: int, wrong: dict[str, str]
) -> None:
    """HR18: libpq does not tell a refusal from an outage, so a few tries are made."""
    dsn = psycopg.conninfo.make_conninfo(desk.dsn, **wrong)
    with work_process(dsn, mode, "-p", str(processes), "--db-retry-initial-ms", "100") as worker:
        assert worker.wait() == 3, worker.output
    assert f'"{next(iter(wrong.values()))}" does not exist' in worker.output
    assert len(lines_of(worker, "failed to start")) == 5 * processes


# --- A server that accepts and never answers -------------------------------------------------------


def test_a_wait_in_vain_closes_the_connection_and_retries(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HR18: neither bytes nor errors come through. With a lease of 3 s, patience lasts for two."""
    monkeypatch.setattr("fairq.worker.listen.ASK_SECONDS", 0.2)
    with proxy(desk.dsn) as network, worker_thread(app, network.dsn, lease=3.0):
        desk.enqueue("nothing")
        desk.wait_until(lambda: desk.live == 0, "it works")
        network.freeze()
        ids = desk.enqueue_many("nothing", 5)
        broken_off = "the database did not answer, so the connection was closed"
        for says in (f"a turn: {broken_off}", f"heartbeat failed: {broken_off}", "LISTEN failed"):
            desk.wait_until(lambda says=says: says in caplog.text, says)  # type: ignore[misc]
        network.mend()
        desk.wait_until(lambda: desk.live == 0, "it works again")
        assert {desk.end(id)[0] for id in ids} == {"succeeded"}


def test_a_worker_in_a_black_hole_ends_within_its_grace(desk: Desk) -> None:
    """S26: by itself. What it could not give back is lost with its lease."""
    with proxy(desk.dsn) as network, work_process(network.dsn, "--grace", "3") as worker:
        worker.wait_for("slot")
        network.freeze()
        desk.enqueue("nothing")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
        assert worker.says("no answer from the database for"), worker.output


def test_handlers_that_use_all_of_the_grace_leave_time_for_the_end_in_a_black_hole(desk: Desk) -> None:
    """S26: it ends by itself, with 0, before the last resort would end it."""
    with proxy(desk.dsn) as network, work_process(network.dsn, "--grace", "2") as worker:
        ids = [desk.enqueue("waits", 600) for _ in range(2)]
        desk.wait_until(lambda: desk.running == len(ids), "they run")
        network.freeze()
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
        assert worker.says("2 ended tasks could not be written"), worker.output


def test_no_try_begins_that_would_last_longer_than_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("fairq.worker.database.time.monotonic", lambda: now)
    database = Database("", Settings())
    assert database.has_time()
    database.hurry(30.0)
    begins = [tenth / 10 for tenth in range(301)]
    tries = 0
    for begin in begins:
        now = begin
        if database.has_time():
            tries += 1
            now += database._patience()  # to connect
            now += database._patience()  # to be answered
            assert now <= 30.0
    assert tries > 280


def test_no_turn_is_left_to_a_server_that_waits_for_a_lock(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """D24: once it got the lock it would pop for nobody. The server stops it, which is an answer."""
    caplog.set_level(logging.INFO, "fairq.worker")
    with (
        psycopg.connect(desk.owner_dsn) as migration,
        worker_thread(app, desk.dsn, **HOURS | {"lease": 3.0, "breaker_cooldown_ms": 1_000}),
    ):
        desk.wait_until(lambda: desk.workers == 1, "the worker is there")
        migration.execute("lock table fairq.tasks, fairq.ticks in access exclusive mode")
        desk.wait_until(lambda: "turn: canceling" in caplog.text, "a turn is stopped")
        waiting = (
            "select count(*) from pg_stat_activity where application_name = 'fairq worker'"
            " and datname = current_database()"
        )
        assert desk.one(waiting) == 1
        migration.rollback()
        desk.enqueue("nothing")
        desk.wait_until(lambda: desk.live == 0, "it works again")
    assert "circuit" not in caplog.text
