"""One worker in this process: handlers that must stop, take too long or hang, and its own end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest

import fairq
from fairq.worker import Stuck, Worker
from tests.support.database import Database
from tests.worker.handlers import app
from tests.worker.running import Desk, drain, worker_thread


@pytest.mark.parametrize("kind", ["on_loop", "in_thread"])
def test_a_cancelled_task_is_told_and_ends_as_cancelled(desk: Desk, kind: str) -> None:
    own = fairq.App()
    reasons: list[Any] = []

    @own.task
    async def on_loop(payload: Any, ctx: fairq.Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            reasons.append(ctx.cancelled.reason)

    @own.task
    def in_thread(payload: Any, ctx: fairq.Context) -> None:
        ctx.cancelled.wait(60)
        reasons.append(ctx.cancelled.reason)
        ctx.cancelled.raise_if_set()

    id = desk.enqueue(kind)
    with worker_thread(own, desk.dsn, heartbeat_ms=50):
        desk.wait_until(lambda: desk.running == 1, "it runs")
        assert fairq.cancel(desk.conn, id)
        desk.wait_until(lambda: desk.live == 0, "it ends")
    assert desk.end(id)[0] == "cancelled"
    assert reasons == ["cancelled"]


def test_an_async_handler_that_takes_too_long_times_out(desk: Desk) -> None:
    own = fairq.App()

    @own.task
    async def long(payload: Any, ctx: fairq.Context) -> None:
        deadlines.append(ctx.deadline)
        await asyncio.sleep(60)

    deadlines: list[datetime | None] = []
    id = desk.enqueue("long", timeout=0.05, max_attempts=1)
    drain(own, desk.dsn)
    assert (desk.end(id)[0], desk.end(id)[3]["code"]) == ("failed", "timeout")
    began_at = desk.one("select started_at from fairq.finished_tasks where id = %s", id)
    assert deadlines == [began_at + timedelta(milliseconds=50)]


def test_the_handlers_own_timeout_counts_where_the_task_names_none(desk: Desk) -> None:
    own = fairq.App()

    @own.task(timeout=0.05)
    async def long(payload: Any, ctx: fairq.Context) -> None:
        assert ctx.deadline is not None
        await asyncio.sleep(60)

    id = desk.enqueue("long", max_attempts=1)
    drain(own, desk.dsn)
    assert desk.end(id)[3]["code"] == "timeout"


def test_a_thread_that_heeds_the_flag_times_out_in_good_order(desk: Desk) -> None:
    own = fairq.App()

    @own.task
    def heeds(payload: Any, ctx: fairq.Context) -> None:
        ctx.cancelled.wait(60)
        ctx.cancelled.raise_if_set()

    id = desk.enqueue("heeds", timeout=0.05, max_attempts=1)
    worker = drain(own, desk.dsn)
    assert desk.end(id)[3]["code"] == "timeout"
    assert worker.left_behind == 0


def test_a_thread_that_hangs_keeps_its_places_until_it_ends(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """H7, D2: never two at once with one key, even after the first one's timeout. Others are served."""
    own = fairq.App()
    release = threading.Event()
    running: list[int] = []
    most: list[int] = []

    @own.task(timeout=0.05, retry=fairq.Backoff(base=0.0))
    def hangs(payload: Any, ctx: fairq.Context) -> None:
        running.append(ctx.id)
        most.append(len(running))
        if len(most) == 1:
            release.wait(60)
        running.remove(ctx.id)
        ctx.cancelled.raise_if_set()

    own.include(app)
    first = desk.enqueue("hangs", concurrency_key="k")
    with worker_thread(own, desk.dsn, concurrency=2, hanging_after=0.05) as worker:
        desk.wait_until(lambda: "keeps its slot, 1 of 2" in caplog.text, "it hangs")
        desk.enqueue("hangs", concurrency_key="k")
        others = desk.enqueue_many("measure", 5, {"name": "a"})
        desk.wait_until(lambda: desk.live == 2, "the others are served")
        assert desk.rows("select id, attempt from fairq.held") == [(first, 1)]
        release.set()
        desk.wait_until(lambda: desk.live == 0, "both are done")
    assert desk.outcomes() == {"succeeded": 2 + len(others)}
    assert [error["code"] for _, _, error in desk.attempts(first)] == ["timeout"]
    assert max(most) == 1
    assert worker.left_behind == 0
    assert "in hangs" in caplog.text, "it says where"


def test_a_drain_ends_when_only_threads_that_hang_are_left(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Their attempts are used, and the threads are named."""
    own = fairq.App()
    release = threading.Event()

    @own.task
    def hangs(payload: Any) -> None:
        release.wait(60)

    own.include(app)
    hanging = desk.enqueue("hangs", timeout=0.05, max_attempts=1)
    done = desk.enqueue_many("measure", 5, {"name": "a"})
    worker = Worker(own, desk.dsn, mode="drain", concurrency=2, hanging_after=0.05)
    with pytest.raises(Stuck):
        worker.run()
    release.set()
    assert desk.end(hanging)[3]["code"] == "timeout"
    assert {desk.end(id)[0] for id in done} == {"succeeded"}
    assert (desk.workers, worker.left_behind) == (0, 1)
    assert f"task {hanging} of bob" in caplog.text
    assert "is left behind; thread fairq-handler-" in caplog.text


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("payload", "left"), [("ends", 0), ("hangs", 1)])
def test_only_busy_threads_of_an_own_pool_are_left_behind(
    desk: Desk, payload: str, left: int, kind: str
) -> None:
    """Python would wait for them. An idle one ends with the process."""
    own, release = fairq.App(), threading.Event()
    with ThreadPoolExecutor(1) as pool:

        @own.task(kind="sync")
        def uses(payload: str) -> None:
            pool.submit(int).result()
            if payload == "hangs":
                pool.submit(release.wait, 60)

        @own.task(kind="async")
        async def auses(payload: str) -> None:
            uses(payload)

        desk.enqueue(kind, payload)
        worker = Worker(own, desk.dsn, mode="drain")
        worker.run(handle_signals=True)
        release.set()
    assert desk.outcomes() == {"succeeded": 1}
    assert worker.left_behind == left


def test_a_worker_whose_slots_all_hang_ends_so_that_a_fresh_process_takes_over(desk: Desk) -> None:
    own = fairq.App()
    release = threading.Event()

    @own.task
    def hangs(payload: Any) -> None:
        release.wait(60)

    ids = [desk.enqueue("hangs", timeout=0.05, max_attempts=1) for _ in range(2)]
    with pytest.raises(Stuck):
        Worker(own, desk.dsn, concurrency=2, hanging_after=0.05).run()
    release.set()
    assert {desk.end(id)[3]["code"] for id in ids} == {"timeout"}
    assert desk.workers == 0


def test_stop_gives_back_what_does_not_end_in_time_and_burns_no_attempt(desk: Desk) -> None:
    """HR17, S26: the handler on the loop is cancelled, the one in a thread told; both tasks are in line
    again.
    """
    own = fairq.App()
    release = threading.Event()

    @own.task
    async def on_loop(payload: Any) -> None:
        await asyncio.sleep(60)

    @own.task
    def in_thread(payload: Any) -> None:
        release.wait(60)

    desk.enqueue("on_loop")
    desk.enqueue("in_thread")
    with worker_thread(own, desk.dsn, concurrency=2, grace=0.1) as worker:
        desk.wait_until(lambda: desk.running == 2, "both run")
        worker.stop()
    release.set()
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)] * 2
    assert desk.rows("select attempt, outcome, error from fairq.attempts") == [(1, "released", None)] * 2
    assert desk.workers == 0


def test_calls_that_fill_the_pool_of_to_thread_do_not_hold_up_the_end(desk: Desk) -> None:
    own = fairq.App()
    release = threading.Event()
    pools: list[ThreadPoolExecutor] = []

    @own.task
    async def blocks(payload: Any) -> None:
        pools.append(ThreadPoolExecutor(1))
        asyncio.get_running_loop().set_default_executor(pools[0])
        await asyncio.to_thread(release.wait, 60)

    desk.enqueue("blocks")
    with worker_thread(own, desk.dsn):
        desk.wait_until(lambda: bool(pools), "it runs")
    release.set()
    pools[0].shutdown()
    assert desk.workers == 0


def test_stop_lets_handlers_end_within_the_grace_time(desk: Desk) -> None:
    """HR17"""
    own = fairq.App()
    release = threading.Event()

    @own.task
    def patient(payload: Any, ctx: fairq.Context) -> None:
        release.wait(60)
        assert not ctx.cancelled

    id = desk.enqueue("patient")
    with worker_thread(own, desk.dsn, concurrency=1, grace=60.0) as worker:
        desk.wait_until(lambda: desk.running == 1, "it runs")
        waiting = desk.enqueue_many("patient", 3)
        worker.stop()
        release.set()
        desk.wait_until(lambda: desk.workers == 0, "the worker ended")
    assert desk.end(id)[0] == "succeeded"
    assert desk.live == len(waiting), "no new task was popped"


def test_canceling_arun_gives_everything_back(desk: Desk) -> None:
    own = fairq.App()

    @own.task
    async def forever(payload: Any) -> None:
        await asyncio.sleep(3600)

    desk.enqueue("forever")

    async def main() -> None:
        running = asyncio.create_task(Worker(own, desk.dsn).arun())
        await asyncio.to_thread(desk.wait_until, lambda: desk.running == 1, "it runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)]
    assert desk.workers == 0


CTRL_C = """
import _thread, sys, threading
import fairq
from fairq.worker import Worker

app = fairq.App()
began = threading.Event()

@app.task
def waits(payload, ctx: fairq.Context):
    began.set()
    ctx.cancelled.wait(60)
    ctx.cancelled.raise_if_set()

def interrupt():
    began.wait(60)
    _thread.interrupt_main()

threading.Thread(target=interrupt, daemon=True).start()
try:
    Worker(app, sys.argv[1], grace=0.0, notify_poll_interval_ms=1000).run()
except KeyboardInterrupt:
    pass  # it came while the worker's own code ran
"""


def test_ctrl_c_without_signal_handlers_ends_the_worker_in_good_order(desk: Desk) -> None:
    """KeyboardInterrupt leaves the loop anywhere, but the worker still retires."""
    desk.enqueue("waits")
    subprocess.run([sys.executable, "-c", CTRL_C, desk.dsn], check=True, timeout=60)
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)]
    assert desk.workers == 0


def test_arun_cancelled_twice_leaves_nothing_behind(desk: Desk, database: Database) -> None:
    """First during a turn, then while it retires and the database is silent."""
    own = fairq.App()

    @own.task
    async def nothing(payload: Any) -> None: ...

    stuck = (
        "select count(*) from pg_stat_activity where application_name = 'fairq worker'"
        " and wait_event_type = 'Lock' and query like %s"
    )
    blocker = database.connect()

    def wait_in(query: str) -> None:
        desk.wait_until(lambda: bool(desk.one(stuck, f"%{query}%")), f"it waits in {query}")

    async def main() -> None:
        running = asyncio.create_task(Worker(own, desk.dsn, listen=False).arun())
        await asyncio.to_thread(desk.wait_until, lambda: desk.workers == 1, "it is registered")
        blocker.execute("lock table fairq.tasks, fairq.ready, fairq.held in access exclusive mode")
        for query in ("fairq.turn", "retire_worker"):
            await asyncio.to_thread(wait_in, query)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    blocker.rollback()
    gone = "select count(*) from pg_stat_activity where application_name = 'fairq worker'"
    desk.wait_until(lambda: desk.one(gone + " and datname = current_database()") == 0, "its session ends")
