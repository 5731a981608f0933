"""One worker in this process: what handlers do, and what is written of it."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fairq
from fairq.errors import ConfigurationError, UnknownQueue
from fairq.worker import Stuck, Worker, keeper
from fairq.worker.turns import Turns
from tests.support.database import Database
from tests.support.proxy import proxy
from tests.worker.running import Desk, drain, worker_thread

app = fairq.App()
gate = threading.Event()


@dataclass
class File:
    name: str


class Rude(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


@app.task(store_result=True)
def measure(payload: File, ctx: fairq.Context) -> dict[str, Any]:
    return {
        "name": payload.name,
        "attempt": ctx.attempt,
        "queue": ctx.queue,
        "thread": threading.current_thread().name,
    }


@app.task(store_result=True)
async def ameasure(payload: File, ctx: fairq.Context) -> dict[str, Any]:
    current = asyncio.current_task()
    await asyncio.sleep(0)
    assert asyncio.current_task() is current
    return {"name": payload.name, "headers": dict(ctx.headers)}


@app.task(max_attempts=1)
async def breaks(payload: str) -> None:
    raise {
        "value": ValueError("broken"),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "rude": Rude(),
    }[payload]


@app.task(max_attempts=1)
def breaks_in_thread(payload: str) -> None:
    if payload == "exit":
        sys.exit("bye")
    raise {"interrupt": KeyboardInterrupt(), "rude": Rude()}[payload]


def run_all(desk: Desk, **options: Any) -> None:
    drain(app, desk.dsn, **{"concurrency": 4, **options})
    assert desk.workers == 0, "it does not sign off"


def test_sync_and_async_handlers_get_their_payload_and_their_results_are_stored(desk: Desk) -> None:
    """HR3, HR13"""
    sync = desk.enqueue("measure", {"name": "a.pdf"})
    other = desk.enqueue("ameasure", {"name": "b.pdf"}, headers={"trace": "1"})
    run_all(desk)
    outcome, attempt, result, error = desk.end(sync)
    assert (outcome, attempt, error) == ("succeeded", 1, None)
    assert result["name"] == "a.pdf"
    assert result["thread"].startswith("fairq-handler")
    assert desk.end(other)[2] == {"name": "b.pdf", "headers": {"trace": "1"}}


@pytest.mark.parametrize("kind", ["breaks", "breaks_in_thread"])
@pytest.mark.parametrize("how", ["exit", "interrupt", "rude"])
def test_whatever_a_handler_raises_ends_its_attempt_and_nothing_else(desk: Desk, kind: str, how: str) -> None:
    """HR4, HR20, HR27"""
    broken = desk.enqueue(kind, how, max_attempts=1)
    fine = desk.enqueue("measure", {"name": "a.pdf"})
    run_all(desk)
    outcome, _, _, error = desk.end(broken)
    assert (outcome, error["code"]) == ("failed", "unhandled_error")
    assert desk.end(fine)[0] == "succeeded"


def test_each_way_to_fail_has_a_code_of_its_own(desk: Desk) -> None:
    """HR26 to HR29"""
    misfit = desk.enqueue("measure", {"nome": 1})
    unhandled = desk.enqueue("breaks", "value", max_attempts=1)

    @dataclass
    class Odd:
        pass

    own = fairq.App()

    @own.task(store_result=True)
    async def odd_result(payload: Any) -> Any:
        return object()

    @own.task
    def forgotten_await(payload: Any) -> Any:
        return asyncio.sleep(0)

    @own.task
    def says_why(payload: Any) -> None:
        raise fairq.TaskError("no")

    @own.task
    def gives_up(payload: Any) -> None:
        raise fairq.errors.Fail("never", code="no_such_customer")

    own.include(app)
    odd = desk.enqueue("odd_result")
    forgotten = desk.enqueue("forgotten_await", max_attempts=1)
    final = desk.enqueue("gives_up")
    drain(own, desk.dsn)
    codes = {
        id: (desk.end(id)[0], desk.end(id)[3]["code"]) for id in (misfit, unhandled, odd, forgotten, final)
    }
    assert codes == {
        misfit: ("failed", "payload_invalid"),
        unhandled: ("failed", "unhandled_error"),
        odd: ("failed", "result_invalid"),
        forgotten: ("failed", "unhandled_error"),
        final: ("failed", "no_such_customer"),
    }


def test_a_result_that_only_the_database_refuses_fails_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in one batch with others, which must not suffer for it."""
    from fairq.outcome import Outcome
    from fairq.worker import handlers

    real = handlers.conclude

    def conclude(entry: Any, exception: Any, result: Any) -> Outcome:
        if result == "bad":
            return Outcome("succeeded", result='"\\u0000"')
        return real(entry, exception, result)

    monkeypatch.setattr("fairq.worker.held.conclude", conclude)
    own = fairq.App()

    @own.task
    async def make(payload: Any) -> Any:
        return payload

    ids = desk.enqueue_many("make", 9, "good")
    bad = [desk.enqueue("make", "bad"), desk.enqueue("make", "bad")]
    ids += desk.enqueue_many("make", 9, "good")
    drain(own, desk.dsn, concurrency=40)
    assert {desk.end(id)[0] for id in ids} == {"succeeded"}
    assert [(desk.end(id)[0], desk.end(id)[3]["code"]) for id in bad] == [("failed", "result_invalid")] * 2


def test_a_retry_runs_again_when_it_is_due_and_counts_its_attempts(desk: Desk) -> None:
    own = fairq.App()

    @own.task(retry=fairq.Backoff(base=0.05, jitter=0), max_attempts=3)
    async def flaky(payload: Any, ctx: fairq.Context) -> None:
        if ctx.attempt < 3:
            raise ValueError(f"attempt {ctx.attempt}")

    id = desk.enqueue("flaky", max_attempts=3)
    with worker_thread(own, desk.dsn):
        desk.wait_until(lambda: desk.live == 0, "the third attempt succeeds")
    assert desk.end(id)[:2] == ("succeeded", 3)
    assert [(attempt, outcome) for attempt, outcome, _ in desk.attempts(id)] == [(1, "retry"), (2, "retry")]


def test_nothing_of_one_handler_reaches_the_next(desk: Desk) -> None:
    """Context variables and cancellations stay with the handler that made them. What the worker was started
    with, all of them see, on the loop and in threads.
    """
    seen: list[str] = []
    variable = contextvars.ContextVar("variable", default="nothing")
    own = fairq.App()

    @own.task
    async def on_loop(payload: Any) -> None:
        seen.append(variable.get())
        variable.set("dirty")
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    @own.task
    def in_thread(payload: Any) -> None:
        seen.append(variable.get())
        variable.set("dirty")

    desk.enqueue_many("on_loop", 20)
    desk.enqueue_many("in_thread", 20)
    token = variable.set("the program's")
    drain(own, desk.dsn, concurrency=5)
    variable.reset(token)
    assert seen == ["the program's"] * 40


def test_a_handler_whose_own_task_exits_does_not_end_the_worker(desk: Desk) -> None:
    """asyncio lets SystemExit of an inner task fall through the whole loop."""
    own = fairq.App()

    @own.task(max_attempts=1)
    async def exits_inside(payload: Any) -> None:
        async def inner() -> None:
            sys.exit(5)

        await asyncio.create_task(inner())

    bad = desk.enqueue("exits_inside", max_attempts=1)
    drain(own, desk.dsn)
    assert desk.end(bad)[0] == "failed"


def test_an_await_that_is_cancelled_by_somebody_else_is_an_error_not_a_cancellation(desk: Desk) -> None:
    own = fairq.App()

    @own.task(max_attempts=1)
    async def awaits_cancelled(payload: Any) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    id = desk.enqueue("awaits_cancelled", max_attempts=1)
    drain(own, desk.dsn)
    assert desk.end(id)[0] == "failed"
    assert desk.end(id)[3]["code"] == "unhandled_error"


# --- Slots and order -------------------------------------------------------------------------------


def test_no_more_handlers_run_than_there_are_slots(desk: Desk) -> None:
    """H8, H9, HR2"""
    running, most = 0, 0
    own = fairq.App()

    @own.task
    async def careful(payload: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1

    lock = threading.Lock()

    @own.task
    def careful_in_thread(payload: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    for kind in ("careful", "careful_in_thread"):
        running = most = 0
        desk.enqueue_many(kind, 60)
        drain(own, desk.dsn, concurrency=7)
        assert most == 7, kind


def test_queues_are_served_in_their_order_within_one_budget(desk: Desk) -> None:
    """H35: what an earlier queue took is not there for a later one. One slot, so the order is seen."""
    order: list[str] = []
    own = fairq.App()

    @own.task
    async def see(payload: Any, ctx: fairq.Context) -> None:
        order.append(ctx.queue)

    for name in ("low", "high", "middle"):
        desk.queue(name)
        desk.enqueue_many("see", 5, queue=name)
    # No maintenance beside it: who promotes for longer than 200 ms is not waited for, and the next queue is
    # asked.
    drain(own, desk.dsn, queues=["high", "middle", "low"], concurrency=1, maintain_interval_ms=0)
    assert order == ["high"] * 5 + ["middle"] * 5 + ["low"] * 5


def test_queues_with_weights_are_served_by_their_shares(desk: Desk) -> None:
    """One slot, so the order is seen. What is left when the first is empty runs as well, without a pause."""
    order: list[str] = []
    own = fairq.App()

    @own.task
    async def see(payload: Any, ctx: fairq.Context) -> None:
        order.append(ctx.queue)

    for name, count in (("mail", 6), ("reports", 4)):
        desk.queue(name)
        desk.enqueue_many("see", count, queue=name)
    drain(own, desk.dsn, queues={"mail": 3, "reports": 1}, concurrency=1, maintain_interval_ms=0)
    assert order == [*["mail"] * 3, "reports"] * 2 + ["reports"] * 2


def test_weights_divide_the_slots_and_a_batch_is_one_of_all_queues(desk: Desk) -> None:
    """H24: 8 slots, batches of 4 over all queues: still three to one, and no slot stays empty."""
    own = fairq.App()
    release = threading.Event()

    @own.task
    def hold(payload: Any) -> None:
        release.wait(30)

    for name in ("a", "b", "c"):
        desk.queue(name)
    for name in ("a", "b"):
        desk.enqueue_many("hold", 8, queue=name)
    with worker_thread(
        own,
        desk.dsn,
        queues={"a": 3, "b": 1, "c": 4},
        concurrency=8,
        max_claim_batch=4,
        maintain_interval_ms=0,
    ):
        desk.wait_until(lambda: desk.running >= 8, "every slot is taken")
        taken = desk.rows(
            "select queue, count(*) from fairq.live_tasks where state = 'running' group by 1 order by 1"
        )
        release.set()
        desk.wait_until(lambda: desk.live == 0, "everything ran")
    assert taken == [("a", 6), ("b", 2)]


def test_a_budget_is_shared_by_the_queues_and_a_batch_bounds_each(desk: Desk) -> None:
    """H24, H35: 5 slots, batches of 2: two of each of the first queues, one of the third."""
    own = fairq.App()
    release = threading.Event()

    @own.task
    def hold(payload: Any) -> None:
        release.wait(30)

    for name in ("a", "b", "c"):
        desk.queue(name)
        desk.enqueue_many("hold", 4, queue=name)
    with worker_thread(
        own,
        desk.dsn,
        queues=["a", "b", "c"],
        concurrency=5,
        max_claim_batch=2,
        mode="once",
        maintain_interval_ms=0,
    ):
        desk.wait_until(lambda: desk.running >= 5, "every slot is taken")
        taken = desk.rows(
            "select queue, count(*) from fairq.live_tasks where state = 'running' group by 1 order by 1"
        )
        release.set()
        desk.wait_until(lambda: desk.workers == 0, "the worker is through")
    assert taken == [("a", 2), ("b", 2), ("c", 1)]


def test_once_looks_once(desk: Desk) -> None:
    desk.enqueue_many("measure", 9, {"name": "a"})
    Worker(app, desk.dsn, mode="once", concurrency=4).run()
    assert (desk.outcomes(), desk.live) == ({"succeeded": 4}, 5)


def test_drain_ends_when_nothing_is_left_that_may_run(desk: Desk) -> None:
    desk.enqueue_many("measure", 50, {"name": "a"})
    later = desk.enqueue("measure", {"name": "b"}, run_at=_tomorrow())
    run_all(desk)
    assert desk.outcomes() == {"succeeded": 50}
    assert desk.rows("select id from fairq.tasks") == [(later,)]


def test_a_drain_tells_busy_from_nothing(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else has the queue for longer than a worker waits for it; a paused one is no work."""
    caplog.set_level(logging.DEBUG, "fairq.worker")
    desk.queue("paused")
    desk.enqueue("measure", {"name": "b"}, queue="paused", run_at=_tomorrow() - timedelta(days=2))
    desk.conn.execute("select fairq.pause_queue('paused')")
    desk.enqueue_many("measure", 5, {"name": "a"})
    with psycopg.connect(desk.owner_dsn) as other:
        other.execute("select * from fairq.domains for update")
        worker = Worker(app, desk.dsn, mode="drain", queues=["default", "paused"], maintain_interval_ms=0)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        desk.wait_until(lambda: "busy: " in caplog.text, "it looked three times and found nothing")
        assert thread.is_alive()
        other.rollback()
        thread.join(40)
    assert (desk.outcomes(), desk.live) == ({"succeeded": 5}, 1)


def _tomorrow() -> Any:
    return datetime.now(UTC) + timedelta(days=1)


# --- Waking up -------------------------------------------------------------------------------------


def test_what_was_there_before_the_worker_needs_no_notice(desk: Desk) -> None:
    """HR8: no queue rings here, and polling is far away."""
    desk.conn.execute("""select fairq.configure_queue('default', '{"notify": false}')""")
    id = desk.enqueue("measure", {"name": "a"})
    with worker_thread(app, desk.dsn, notify_poll_interval_ms=300_000):
        desk.wait_until(lambda: desk.live == 0, "the task ran")
    assert desk.end(id)[0] == "succeeded"


def test_a_notice_wakes_a_worker_that_sleeps(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polling is switched off for this."""
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE_LISTENING", 300.0)
    lines: list[str] = []
    with worker_thread(app, desk.dsn, notify_poll_interval_ms=300_000, announce=lines.append):
        desk.wait_until(lambda: bool(lines), "the worker started")
        assert "listening, polling every 300s" in lines[0]
        ids = [desk.enqueue("measure", {"name": "a"}) for _ in range(3)]
        desk.wait_until(lambda: desk.live == 0, "the tasks ran")
    assert {desk.end(id)[0] for id in ids} == {"succeeded"}


def test_a_burst_of_notices_is_one_look(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """HR16: thirty notices that come while the loop is busy."""
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE_LISTENING", 300.0)
    pops: list[int] = []
    real = Turns._popped

    def popped(self: Any, worker_id: Any, asked: Any, rows: Any, due_in: Any) -> None:
        pops.append(len(rows))
        real(self, worker_id, asked, rows, due_in)

    monkeypatch.setattr(Turns, "_popped", popped)
    own = fairq.App()
    own.include(app)
    began, release = threading.Event(), threading.Event()

    @own.task
    async def blocks(payload: Any) -> None:
        began.set()
        release.wait(60)

    lines: list[str] = []
    with worker_thread(own, desk.dsn, concurrency=50, notify_poll_interval_ms=300_000, announce=lines.append):
        desk.wait_until(lambda: bool(lines), "the worker listens")
        desk.enqueue("blocks")
        assert began.wait(60)
        before = len(pops)
        for _ in range(30):
            desk.enqueue("measure", {"name": "a"})
        release.set()
        desk.wait_until(lambda: desk.live == 0, "all ran")
        # One look finds all; each turn that writes ends looks as well.
        assert pops[before] == 30 or pops[before + 1] == 30


def test_without_listen_polling_finds_the_work(desk: Desk) -> None:
    """HR19"""
    lines: list[str] = []
    with worker_thread(app, desk.dsn, listen=False, announce=lines.append):
        desk.wait_until(lambda: bool(lines), "the worker started")
        assert "not listening" in lines[0]
        desk.enqueue("measure", {"name": "a"})
        desk.wait_until(lambda: desk.live == 0, "the task ran")


def test_a_scheduled_task_runs_when_it_is_due_and_no_later_poll_is_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairq.worker.plan.FIRST_PAUSE_LISTENING", 300.0)
    id = desk.enqueue("measure", {"name": "a"}, run_at=datetime.now(UTC) + timedelta(seconds=0.7))
    with worker_thread(app, desk.dsn, notify_poll_interval_ms=300_000):
        desk.wait_until(lambda: desk.live == 0, "the task ran")
    assert desk.end(id)[0] == "succeeded"


# --- Being told to stop ----------------------------------------------------------------------------


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


def test_the_sign_of_life_names_the_tasks_held(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the database looks up these, and does not read everybody's wishes to cancel."""
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
    """S25: long after the lease, which it waits for first."""
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


def test_an_async_handler_that_takes_too_long_times_out(desk: Desk) -> None:
    own = fairq.App()

    @own.task
    async def long(payload: Any) -> None:
        await asyncio.sleep(60)

    id = desk.enqueue("long", timeout=0.05, max_attempts=1)
    drain(own, desk.dsn)
    assert (desk.end(id)[0], desk.end(id)[3]["code"]) == ("failed", "timeout")


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
    """H7, D2: under one key never two at once, whatever became of the first one's time. Others are served."""
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
    """Their attempts are used up, and the threads are named."""
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
def test_of_an_own_pool_only_threads_that_are_busy_are_left_behind(
    desk: Desk, payload: str, left: int, kind: str
) -> None:
    """Python would wait for them. One that has nothing to do ends with the process."""
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


# --- Progress, finish_in ---------------------------------------------------------------------------


def test_progress_is_written_while_the_handler_runs(desk: Desk) -> None:
    own = fairq.App()
    release = threading.Event()

    @own.task
    def reports(payload: Any, ctx: fairq.Context) -> None:
        for page in range(1, 4):
            ctx.progress(page, 10, {"page": page})
        release.wait(60)

    id = desk.enqueue("reports")
    with worker_thread(own, desk.dsn, grace=30.0):
        query = (
            "select done, total, note from fairq.progress where task_id = %s"
            " order by reported_at desc limit 1"
        )
        desk.wait_until(
            lambda: desk.rows(query, id) == [(3.0, 10.0, {"page": 3})], "the newest report is there"
        )
        release.set()
        desk.wait_until(lambda: desk.live == 0, "it ends")
    assert desk.end(id)[0] == "succeeded"


def test_what_handlers_charge_is_settled_and_survives_the_worker(desk: Desk) -> None:
    """While it runs for the case that it is lost, and at its end; also of one that fails, or ends itself."""
    desk.conn.execute("""select fairq.configure_queue('default', '{"fairness": "cost"}')""")
    own = fairq.App()
    release = threading.Event()

    @own.task(max_attempts=1)
    def charges(payload: Any, ctx: fairq.Context) -> None:
        ctx.charge(300)
        ctx.charge(payload["more"])
        release.wait(60)
        ctx.charge(1)
        if payload["more"] == 20:
            raise fairq.Fail("no more")
        if payload["more"] == 3000:
            with psycopg.connect(desk.dsn) as conn:
                ctx.finish_in(conn)
            with pytest.raises(fairq.NotHeld):
                ctx.charge(5)

    ids = [desk.enqueue("charges", {"more": more}) for more in (20, 100, 3000)]
    with worker_thread(own, desk.dsn, grace=30.0, concurrency=3):
        query = "select task_id, used from fairq.progress order by task_id"
        there = list(zip(ids, (320.0, 400.0, 3300.0), strict=True))
        desk.wait_until(lambda: desk.rows(query) == there, "what was charged so far is there")
        release.set()
        desk.wait_until(lambda: desk.live == 0, "they end")
    assert [desk.end(id)[0] for id in ids] == ["failed", "succeeded", "succeeded"]
    assert desk.rows("select sum(used), count(*) from fairq.rings where used is not null")[0][0] == 4023.0


def test_finish_in_commits_the_end_with_the_effects(desk: Desk) -> None:
    own = fairq.App()

    @own.task
    def pays(payload: Any, ctx: fairq.Context) -> None:
        with psycopg.connect(desk.dsn) as conn:
            conn.execute(
                "insert into effects (what, task_id, attempt, pid, worker_id) values ('paid', %s, 1, 0, 0)",
                [ctx.id],
            )
            ctx.finish_in(conn)

    id = desk.enqueue("pays")
    drain(own, desk.dsn)
    assert desk.end(id)[0] == "succeeded"
    assert desk.effects("paid") == 1


def test_finish_in_that_rolls_back_gets_another_attempt(desk: Desk) -> None:
    own = fairq.App()

    @own.task(max_attempts=1)
    def forgets_to_commit(payload: Any, ctx: fairq.Context) -> None:
        conn = psycopg.connect(desk.dsn)
        ctx.finish_in(conn)
        conn.close()

    id = desk.enqueue("forgets_to_commit", max_attempts=1)
    drain(own, desk.dsn)
    assert (desk.end(id)[0], desk.end(id)[3]["code"]) == ("failed", "finish_lost")


# --- Prefetch --------------------------------------------------------------------------------------


def test_prefetch_claims_ahead_and_starts_only_what_has_a_slot(desk: Desk) -> None:
    """H19, H20, H25"""
    own = fairq.App()
    release = threading.Event()

    @own.task
    def hold(payload: Any) -> None:
        release.wait(60)

    desk.enqueue_many("hold", 10)
    with worker_thread(own, desk.dsn, concurrency=2, prefetch=3, claim_lease=60.0, grace=60.0):
        query = (
            "select state, count(*) from fairq.live_tasks where state in ('claimed', 'running')"
            " group by 1 order by 1"
        )
        desk.wait_until(
            lambda: desk.rows(query) == [("claimed", 3), ("running", 2)], "slots and buffer are full"
        )
        release.set()
        desk.wait_until(lambda: desk.live == 0, "all ran")
    assert desk.outcomes() == {"succeeded": 10}


def test_a_deadline_that_passes_in_the_buffer_expires_the_task_without_running_it(desk: Desk) -> None:
    """HR12"""
    own = fairq.App()
    release = threading.Event()
    ran: list[int] = []

    @own.task
    def hold(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.id)
        release.wait(60)

    first = desk.enqueue("hold")
    late = desk.enqueue("hold")
    with worker_thread(own, desk.dsn, concurrency=1, prefetch=1, claim_lease=60.0, grace=60.0):
        desk.wait_until(
            lambda: desk.rows("select state from fairq.live_tasks where id = %s", late) == [("claimed",)],
            "claimed",
        )
        desk.conn.execute("update fairq.tasks set expires_at = clock_timestamp() where id = %s", [late])
        release.set()
        desk.wait_until(lambda: desk.live == 0, "both are gone")
    assert ran == [first]
    assert desk.end(late)[0] == "expired"


def test_a_claim_that_others_took_over_is_not_run(desk: Desk) -> None:
    """H20"""
    own = fairq.App()
    release = threading.Event()
    ran: list[int] = []

    @own.task
    def hold(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.id)
        release.wait(60)

    first = desk.enqueue("hold")
    taken = desk.enqueue("hold")
    with worker_thread(
        own, desk.dsn, concurrency=1, prefetch=1, claim_lease=60.0, grace=60.0, maintain_interval_ms=0
    ):
        desk.wait_until(
            lambda: desk.rows("select state from fairq.live_tasks where id = %s", taken) == [("claimed",)],
            "claimed",
        )
        other = desk.one("select fairq.register_worker('other', '{default}', 1)")
        desk.conn.execute("update fairq.held set lease_expires_at = clock_timestamp() where id = %s", [taken])
        desk.conn.execute("select fairq.maintain()")
        popped = desk.rows("select id from fairq.pop_tasks('default', 1, %s)", other)
        assert popped == [(taken,)]
        release.set()
        desk.wait_until(lambda: desk.live == 1, "the first is through")
    assert ran == [first]


def test_prefetch_is_refused_together_with_a_cluster_cap(desk: Desk) -> None:
    """H21"""
    desk.conn.execute("""select fairq.configure_cluster('{"max_running": 5}')""")
    with pytest.raises(ConfigurationError, match="cluster cap of 5"):
        Worker(app, desk.dsn, prefetch=2, claim_lease=5.0).run()
    assert desk.workers == 0


# --- Being lost ------------------------------------------------------------------------------------


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
    assert "counts as lost" in caplog.text
    assert desk.end(id)[0] == "succeeded"
    assert len({worker for _, worker in ran}) == 2
    assert desk.outcomes() == {"succeeded": 2}


def test_a_worker_in_a_program_loses_what_its_dead_loop_holds_and_goes_on_when_it_moves(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """What had ended is written, and the program lives on."""
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
    """What proves it is a notice that arrived on the same DSN. A connection made anew prepares as well."""
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


def test_prefetch_is_given_up_when_a_cluster_cap_comes(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """H21: not only at the start."""
    with (
        caplog.at_level(logging.WARNING, "fairq.worker"),
        worker_thread(app, desk.dsn, prefetch=2, claim_lease=10.0),
    ):
        desk.enqueue("measure", {"name": "a"})
        desk.wait_until(lambda: desk.live == 0, "it ran")
        desk.conn.execute("""select fairq.configure_cluster('{"max_running": 5}')""")
        desk.enqueue("measure", {"name": "a"})
        desk.wait_until(lambda: desk.live == 0, "it ran under the cap")
    assert "without prefetch" in caplog.text


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
    """KeyboardInterrupt comes out of the loop wherever that is; the worker signs off all the same."""
    desk.enqueue("waits")
    subprocess.run([sys.executable, "-c", CTRL_C, desk.dsn], check=True, timeout=60)
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)]
    assert desk.workers == 0


def test_nonsense_from_a_handler_is_the_handlers_error(desk: Desk) -> None:
    """Progress that is no number, a delay that is none: the attempt fails, the worker goes on."""
    own = fairq.App()

    @own.task
    def odd_progress(payload: Any, ctx: fairq.Context) -> None:
        ctx.progress("half")  # type: ignore[arg-type]

    @own.task
    def odd_delay(payload: Any) -> None:
        raise fairq.Retry(delay=float("nan"))

    ids = [desk.enqueue(kind, max_attempts=1) for kind in ("odd_progress", "odd_delay")]
    drain(own, desk.dsn)
    assert [desk.end(id)[0] for id in ids] == ["failed", "failed"]


def test_a_result_that_is_too_long_fails_its_attempt(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairq.worker.handlers.LONGEST_RESULT", 10)
    id = desk.enqueue("measure", {"name": "a"})
    run_all(desk)
    assert (desk.end(id)[0], desk.end(id)[3]["code"]) == ("failed", "result_invalid")


def test_a_mistake_of_ours_gives_everything_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends with the exception; what it held is in line again, not lost until its lease is over."""
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


def test_a_report_is_what_the_handler_said_when_it_said_it(desk: Desk) -> None:
    """The note is a copy, and a refused report leaves the one before it: neither can harm the worker."""
    own = fairq.App()
    release = threading.Event()

    @own.task
    def reports(payload: Any, ctx: fairq.Context) -> None:
        note: dict[str, Any] = {"page": 1}
        ctx.progress(1, None, note)
        note["page"] = object()
        for done, total in ((float("inf"), None), ("x", None), (10**400, None), (1, "x"), (1, float("nan"))):
            with pytest.raises(fairq.ConfigurationError, match="which is not a number"):
                ctx.progress(done, total)  # type: ignore[arg-type]
        release.wait(60)

    id = desk.enqueue("reports")
    with worker_thread(own, desk.dsn, grace=30.0):
        query = "select done, total, note from fairq.progress where task_id = %s"
        desk.wait_until(lambda: desk.rows(query, id) == [(1.0, None, {"page": 1})], "the report is there")
        release.set()
        desk.wait_until(lambda: desk.live == 0, "it ends")
    assert desk.end(id)[0] == "succeeded", desk.end(id)


def test_arun_cancelled_twice_leaves_nothing_behind(desk: Desk, database: Database) -> None:
    """First in the middle of a turn, then while it signs off and the database is silent."""
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


def test_a_policy_that_fails_itself_does_not_keep_an_attempt_from_ending(desk: Desk) -> None:
    own = fairq.App()
    release = threading.Event()

    class Broken(fairq.Backoff):
        def retries(self, exception: BaseException) -> bool:
            raise RuntimeError("a mistake in the policy")

    @own.task(timeout=0.2, max_attempts=1, retry=Broken())
    def hangs(payload: Any) -> None:
        release.wait(60)

    @own.task(max_attempts=1, retry=Broken())
    def fails(payload: Any) -> None:
        raise ValueError

    ids = [desk.enqueue("hangs", max_attempts=1), desk.enqueue("fails", max_attempts=1)]
    with pytest.raises(Stuck):
        drain(own, desk.dsn, concurrency=2, hanging_after=0.2)
    release.set()
    assert [desk.end(id)[0] for id in ids] == ["failed", "failed"]
    assert ["no account of it: RuntimeError" in desk.end(id)[3]["message"] for id in ids] == [True, True]


def test_a_file_for_probes_is_fresh_while_the_loop_moves_and_gone_at_the_end(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that is away does not make it stale; a loop that stands still does."""
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
        desk.wait_until(lambda: "the loop stands still" in caplog.text, "it is found out")
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
    """The process is not the worker's to end. Nobody vouches for it meanwhile; its task runs elsewhere."""
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
        desk.wait_until(lambda: "its tasks are with others now" in caplog.text, "it gives up")
        assert (desk.end(culprit)[0], desk.workers) == ("failed", 0)
        time.sleep(1.0)  # three signs of life, if there were any
        assert caplog.text.count("its tasks are with others now") == 1
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


def test_a_handler_that_was_told_to_wait_holds_its_group(desk: Desk) -> None:
    """No attempt is burned, nobody of the group tries meanwhile, and the worker wakes by itself."""
    own = fairq.App()
    began: list[tuple[str, float]] = []

    @own.task(max_attempts=1)
    def asks(payload: Any, ctx: fairq.Context) -> None:
        began.append((ctx.group_key, time.monotonic()))
        if sum(group == "bob" for group, _ in began) == 1 and ctx.group_key == "bob":
            raise fairq.RetryAfter(timedelta(seconds=1.5), hold="group")

    ids = [desk.enqueue("asks"), desk.enqueue("asks"), desk.enqueue("asks", group_key="alice")]
    with worker_thread(own, desk.dsn, concurrency=1):
        desk.wait_until(lambda: desk.live == 0, "they end")
    assert [desk.end(id)[0] for id in ids] == ["succeeded"] * 3
    assert sorted(group for group, _ in began) == ["alice", "bob", "bob", "bob"]
    first, second, _ = [at for group, at in began if group == "bob"]
    assert second - first >= 1.4
