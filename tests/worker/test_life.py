"""One worker in this process: registering, heartbeats, getting lost, its sessions and its rights."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fairq
from fairq.errors import ConfigurationError, UnknownQueue
from fairq.worker import Worker, keeper
from fairq.worker.turns import Turns
from tests.support.proxy import proxy
from tests.worker.handlers import app, run_all
from tests.worker.running import Desk, drain, worker_thread


def test_the_sign_of_life_names_the_tasks_held(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the database looks up only these, and does not read all cancellations."""
    from fairq.queries import workers

    named: list[set[int]] = []
    real = workers.heartbeat

    def heartbeat(conn: Any, *, ids: Any = None, **options: Any) -> list[int]:
        named.append(set(ids))
        cancelled: list[int] = real(conn, ids=ids, **options)
        return cancelled

    monkeypatch.setattr(workers, "heartbeat", heartbeat)
    own = fairq.App()
    release = threading.Event()

    @own.task
    def hold(payload: Any) -> None:
        release.wait(30)

    ids = set(desk.enqueue_many("hold", 3))
    with worker_thread(own, desk.dsn, heartbeat_ms=50, concurrency=3):
        desk.wait_until(lambda: named[-1:] == [ids], "a beat names all three")
        release.set()
        desk.wait_until(lambda: named[-1] == set(), "a beat names none, but comes")


@pytest.mark.parametrize("interval", [0, 100])
def test_maintenance_runs_as_often_as_was_said_and_never_with_zero(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    """S25: after the lease, which it waits for first."""
    from fairq.queries import workers

    beats, rounds = [0], [0]
    beat, maintain = workers.heartbeat, workers.maintain

    def heartbeat(conn: Any, **options: Any) -> Any:
        beats[0] += 1
        return beat(conn, **options)

    def maintained(conn: Any, part: str) -> Any:
        rounds[0] += part == "recovery"
        return maintain(conn, part=part)

    monkeypatch.setattr(workers, "heartbeat", heartbeat)
    monkeypatch.setattr(workers, "maintain", maintained)
    own = fairq.App()
    own.task(kind="nothing")(lambda payload: None)
    with worker_thread(own, desk.dsn, heartbeat_ms=50, lease=1.0, maintain_interval_ms=interval):
        desk.wait_until(lambda: beats[0] >= 60 and (rounds[0] >= 3 or not interval), "three seconds of beats")
    assert (rounds[0] > 0) == (interval > 0)


def test_ends_are_not_kept_back_when_the_other_handlers_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I8: five ends are too few for a turn while others are in line for the processor, but these all wait.
    With pauses of minutes nothing else would make the turn due.
    """
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE", 300.0)
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE_LISTENING", 300.0)
    own = fairq.App()
    done = threading.Event()

    @own.task
    async def quick(payload: Any) -> None: ...

    @own.task
    async def waits(payload: Any) -> None:
        await asyncio.to_thread(done.wait, 60)

    with desk.conn.transaction():
        for _ in range(5):
            desk.enqueue("quick")
        for _ in range(45):
            desk.enqueue("waits")
    with worker_thread(
        own, desk.dsn, concurrency=50, notify_poll_interval_ms=300_000, maintain_interval_ms=0
    ):
        desk.wait_until(lambda: desk.outcomes() == {"succeeded": 5}, "the quick ones are written")
        done.set()
        desk.wait_until(lambda: desk.live == 0, "all ran")


def test_a_worker_that_was_struck_off_registers_again_and_its_old_end_changes_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """I10"""
    own = fairq.App()
    release = threading.Event()
    ran: list[tuple[int, int]] = []

    @own.task
    def hold(payload: Any, ctx: fairq.Context) -> None:
        ran.append((ctx.attempt, ctx.worker_id))
        if ctx.attempt == 1 and len(ran) == 1:
            release.wait(60)

    id = desk.enqueue("hold")
    with (
        caplog.at_level(logging.WARNING, "fairq.worker"),
        worker_thread(own, desk.dsn, concurrency=2, grace=60.0),
    ):
        desk.wait_until(lambda: desk.running == 1, "it runs")
        old = desk.one("select worker_id from fairq.workers")
        desk.conn.execute("select fairq.retire_worker(%s)", [old])
        desk.enqueue("hold")
        desk.wait_until(lambda: desk.live == 0, "the new number does the work of both")
        release.set()
        desk.wait_until(lambda: "not accepted" in caplog.text, "the late end is turned down")
    assert "is considered lost" in caplog.text
    assert desk.end(id)[0] == "succeeded"
    assert len({worker for _, worker in ran}) == 2
    assert desk.outcomes() == {"succeeded": 2}


def test_a_worker_in_a_program_loses_what_its_dead_loop_holds_and_goes_on_when_it_moves(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """What has ended is written, and the program goes on."""
    own = fairq.App()
    release = threading.Event()

    @own.task
    async def ends(payload: Any) -> None: ...

    @own.task(max_attempts=1)
    async def blocks(payload: Any) -> None:
        release.wait(60)

    @own.task
    async def waits(payload: Any) -> None:
        await asyncio.sleep(0.01)

    with desk.conn.transaction():
        done = desk.enqueue("ends")
        neighbor = desk.enqueue("waits")
        culprit = desk.enqueue("blocks", max_attempts=1)
    with worker_thread(own, desk.dsn, concurrency=20, lease=1.0):
        try:
            desk.wait_until(lambda: (desk.live, desk.workers) == (1, 0), "it is given up")
            assert desk.end(done)[:2] == ("succeeded", 1)
            assert desk.end(culprit)[3]["code"] == "timeout"
            assert desk.rows("select id, state from fairq.live_tasks") == [(neighbor, "overflow")]
        finally:
            release.set()
        desk.wait_until(lambda: desk.live == 0, "the neighbor runs")
    assert desk.end(neighbor)[:2] == ("succeeded", 2)
    assert "not accepted" in caplog.text, "what comes late changes nothing"


def test_tasks_of_an_answer_that_never_came_are_given_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: the pop was committed, its answer lost with the connection."""
    real = Turns._send
    broken: list[int] = []

    async def send(self: Any, conn: Any, turn: Any) -> None:
        if turn.pop and not broken:
            rows = await conn.execute(
                "select id from fairq.pop_tasks('default', 2, %s)", [self.node.worker_id]
            )
            broken.extend(id for (id,) in await rows.fetchall())
            await conn.close()
        await real(self, conn, turn)

    monkeypatch.setattr(Turns, "_send", send)
    ids = desk.enqueue_many("measure", 5, {"name": "a"})
    drain(app, desk.dsn, db_retry_initial_ms=100)
    assert len(broken) == 2
    assert {id: desk.end(id)[:2] for id in ids} == {id: ("succeeded", 1 + (id in broken)) for id in ids}


@pytest.mark.parametrize(
    ("options", "prepares"), [({}, True), ({"listen": False}, False), ({"listen_dsn": "own"}, False)]
)
def test_statements_are_prepared_where_there_is_a_session(
    desk: Desk, options: dict[str, Any], prepares: bool
) -> None:
    """A notice that arrives on the same DSN proves it. A new connection prepares, too."""
    own = fairq.App()
    own.include(app)
    seen: list[int] = []

    @own.task
    async def count_prepared(payload: Any) -> None:
        assert worker._engine is not None
        conn = worker._engine.nodes[0].database.conn
        assert conn is not None
        seen.append(len(conn._prepared._names))

    if "listen_dsn" in options:
        options = {"listen_dsn": desk.dsn}
    announced = threading.Event()
    with worker_thread(
        own, desk.dsn, concurrency=1, announce=lambda _: announced.set(), db_retry_initial_ms=100, **options
    ) as worker:
        assert announced.wait(20)
        desk.enqueue_many("count_prepared", 10)
        desk.wait_until(lambda: desk.live == 0, "all ran")
        assert (seen[-1] > 0) is prepares
        desk.rows(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'fairq worker' and datname = current_database()"
        )
        desk.enqueue_many("count_prepared", 10)
        desk.wait_until(lambda: desk.live == 0, "all ran")
        assert (seen[-1] > 0) is prepares
    assert set(desk.outcomes()) == {"succeeded"}


@pytest.mark.parametrize("options", [{}, {"listen": False}])
@pytest.mark.parametrize("slots", [1, 200])
def test_a_worker_has_three_connections_whatever_it_runs(
    desk: Desk, slots: int, options: dict[str, Any]
) -> None:
    """Two, where it does not listen."""
    own, free = fairq.App(), threading.Event()
    seen = (
        "select application_name from pg_stat_activity"
        " where datname = current_database() and application_name like 'fairq %%' order by 1"
    )

    @own.task
    def wait(payload: Any) -> None:
        free.wait(40)

    announced = threading.Event()
    with worker_thread(own, desk.dsn, concurrency=slots, announce=lambda _: announced.set(), **options):
        assert announced.wait(20)
        desk.enqueue_many("wait", slots)
        desk.wait_until(lambda: desk.running == slots, "all run")
        names = [name for (name,) in desk.rows(seen)]
        free.set()
        desk.wait_until(lambda: desk.live == 0, "all ran")
        expected = ["fairq keeper", *["fairq listen"] * ("listen" not in options), "fairq worker"]
        assert names == expected
        assert [name for (name,) in desk.rows(seen)] == expected


def test_an_unknown_queue_is_refused_at_the_start(desk: Desk) -> None:
    with pytest.raises(UnknownQueue):
        Worker(app, desk.dsn, queues=["nowhere"]).run()


def test_a_role_with_another_isolation_level_works(desk: Desk) -> None:
    name = desk.one("select quote_ident(current_database())")
    desk.conn.execute(f"alter database {name} set default_transaction_isolation = 'serializable'".encode())
    ids = desk.enqueue_many("measure", 5, {"name": "a"})
    bad = desk.enqueue("breaks", "value", max_attempts=1)
    run_all(desk)
    assert {desk.end(id)[0] for id in ids} == {"succeeded"}
    assert desk.end(bad)[0] == "failed"


def test_the_worker_runs_on_a_loop_that_is_there_already(desk: Desk) -> None:
    """HR5"""
    desk.enqueue_many("ameasure", 3, {"name": "a"})
    asyncio.run(Worker(app, desk.dsn, mode="drain").arun())
    assert desk.outcomes() == {"succeeded": 3}


def test_a_loop_of_its_own_is_refused_where_one_is_running() -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="already"):
            Worker(app, "host=nowhere").run()

    asyncio.run(main())


def test_the_role_of_workers_is_enough(desk: Desk) -> None:
    """Everything that a worker does, with no more rights than fairq_work gives."""
    own = fairq.App()

    @own.task(store_result=True)
    def reports(payload: Any, ctx: fairq.Context) -> int:
        ctx.progress(1)
        return 1

    ids = desk.enqueue_many("reports", 5)
    dsn = psycopg.conninfo.make_conninfo(desk.dsn, options="-c role=fairq_work")
    drain(own, dsn, prefetch=2, claim_lease=10.0, concurrency=1)
    assert {desk.end(id)[:3] for id in ids} == {("succeeded", 1, 1)}
    assert desk.workers == 0


def test_a_mistake_of_ours_gives_everything_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends with the exception, and its tasks are in line again at once."""
    desk.enqueue_many("measure", 3, {"name": "a"})

    take_in = Turns._popped

    def stumble(*args: Any) -> None:
        take_in(*args)
        raise ZeroDivisionError

    monkeypatch.setattr(Turns, "_popped", stumble)
    with pytest.raises(ZeroDivisionError):
        Worker(app, desk.dsn, concurrency=2).run()
    assert desk.rows("select id from fairq.held") == []
    assert desk.workers == 0


def test_a_file_for_probes_is_fresh_while_the_loop_moves_and_gone_at_the_end(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage does not make it stale, but a blocked loop does."""
    monkeypatch.setattr(keeper, "STANDSTILL_SECONDS", 0.2)
    file = tmp_path / "health"
    own = fairq.App()
    stands_still, moves_again = threading.Event(), threading.Event()

    @own.task
    async def blocks(payload: Any) -> None:
        stands_still.set()
        moves_again.wait(60)

    def state(**expected: Any) -> bool:
        return file.exists() and json.loads(file.read_text()).items() >= expected.items()

    def is_written_anew() -> None:
        old = file.stat().st_ino
        desk.wait_until(lambda: file.stat().st_ino != old, "it is fresh")

    def beats() -> None:
        """The next signs of life."""
        query = "select max(beat_at) from fairq.heartbeats"
        for _ in range(3):
            last = desk.one(query)
            desk.wait_until(lambda last=last: desk.one(query) != last, "a sign of life")  # type: ignore[misc]

    with proxy(desk.dsn) as network, worker_thread(own, network.dsn, heartbeat_ms=50, health=str(file)):
        desk.wait_until(lambda: state(tasks=0, circuit="closed", database=True), "it is well")
        network.cut()
        desk.wait_until(lambda: state(database=False), "the database is away")
        is_written_anew()
        network.mend()
        desk.wait_until(lambda: state(database=True), "the database is back")
        desk.enqueue("blocks")
        assert stands_still.wait(60)
        desk.wait_until(lambda: "the loop is blocked" in caplog.text, "it is found out")
        beats()
        old = file.stat().st_ino
        beats()
        assert file.stat().st_ino == old, "it is stale"
        moves_again.set()
        desk.wait_until(lambda: desk.live == 0, "the loop moves")
        is_written_anew()
    assert not file.exists()


def test_a_dead_loop_inside_an_application_is_given_up_once_and_goes_on_when_it_moves(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker does not own the process. It sends no heartbeats meanwhile, and its task runs elsewhere."""
    own = fairq.App()
    stands_still, moves_again = threading.Event(), threading.Event()

    @own.task(max_attempts=1)
    async def blocks(payload: Any) -> None:
        stands_still.set()
        moves_again.wait(60)

    @own.task
    def counts(payload: Any) -> None: ...

    with worker_thread(own, desk.dsn, lease=1.0):
        culprit = desk.enqueue("blocks")
        assert stands_still.wait(60)
        desk.wait_until(lambda: "so other workers get the tasks" in caplog.text, "it gives up")
        assert (desk.end(culprit)[0], desk.workers) == ("failed", 0)
        time.sleep(1.0)  # three signs of life, if there were any
        assert caplog.text.count("so other workers get the tasks") == 1
        assert desk.workers == 0
        moves_again.set()
        id = desk.enqueue("counts")
        desk.wait_until(lambda: desk.live == 0, "the loop moves")
        assert desk.end(id)[0] == "succeeded"


def test_a_file_for_probes_that_cannot_be_written_ends_nothing(
    desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk.enqueue("measure", {"name": "a.pdf"})
    run_all(desk, health=str(tmp_path / "nowhere" / "health"))
    assert desk.live == 0
    assert "nowhere/health: No such file or directory" in caplog.text
