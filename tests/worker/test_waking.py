"""One worker in this process: when it looks for tasks."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import fairq
from fairq.worker.turns import Turns
from tests.worker.handlers import app
from tests.worker.running import Desk, worker_thread


def test_tasks_older_than_the_worker_need_no_notice(desk: Desk) -> None:
    """HR8: no queue notifies here, and polling would take long."""
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
    """HR16: thirty notices come while the loop is busy."""
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
