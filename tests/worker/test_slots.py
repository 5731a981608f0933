"""One worker in this process: how many tasks run at once, of which queue, and when it is done."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import fairq
from fairq.worker import Worker
from tests.worker.handlers import app, run_all
from tests.worker.running import Desk, drain, worker_thread


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
    """H35: a later queue gets only what earlier ones leave. One slot shows the order."""
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
    """One slot shows the order. When the first queue is empty, the rest runs without a pause."""
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
    """H24: with 8 slots and batches of 4 over all queues, still three to one, and no slot stays empty."""
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
    """H24, H35: with 5 slots and batches of 2, two of each of the first queues and one of the third."""
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
    """Somebody else has the queue for longer than a worker waits; a paused queue does not count."""
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
