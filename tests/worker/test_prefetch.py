"""One worker in this process: prefetch."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

import fairq
from fairq.errors import ConfigurationError
from fairq.worker import Worker
from tests.worker.handlers import app
from tests.worker.running import Desk, worker_thread


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
