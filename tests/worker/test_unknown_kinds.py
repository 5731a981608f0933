"""I15: a task of an unknown kind is given back, because a newer worker or another app may know it."""

from __future__ import annotations

import logging
import signal
from typing import Any

import pytest

import fairq
from tests.worker.running import Desk, drain, work_process, worker_thread


def test_a_rolling_deploy_fails_nothing_and_holds_nobody_up(desk: Desk) -> None:
    """Old workers meet tasks of the new version for a while, with default settings."""
    new = [desk.enqueue("harmless", 0, group_key="bob", max_attempts=1) for _ in range(3)]
    with work_process(desk.dsn, "-c", "2") as old:
        desk.wait_until(lambda: len(desk.rows("select from fairq.attempts")) >= 6, "each is given back twice")
        id = desk.enqueue("count", group_key="alice")
        desk.wait_until(lambda: desk.outcomes() == {"succeeded": 1}, "others go on")
        assert desk.end(id)[0] == "succeeded"
        assert [line for line in old.lines if "unknown" in line or "no handler" in line] == [
            line for line in old.lines if "harmless" in line
        ], "one line for the kind, not one for each task"
        with work_process(desk.dsn, "-c", "2", app="poison") as worker:
            desk.wait_until(lambda: desk.effects("harmless") == 3, "the new version runs them")
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0, worker.output
        old.send(signal.SIGTERM)
        assert old.wait() == 0, old.output
    for task in new:
        assert desk.end(task)[0] == "succeeded"
        assert {(how, error["code"]) for _, how, error in desk.attempts(task)} == {
            ("declined", "unknown_task")
        }


def test_a_thousand_tasks_of_an_unknown_kind_are_met_once_and_then_rest(desk: Desk) -> None:
    """No busy loop: what was given back is not popped again at once."""
    app = fairq.App()

    @app.task
    async def known(payload: Any) -> None: ...

    strange = desk.enqueue_many("strange", 1000)
    desk.enqueue_many("known", 100)
    drain(app, desk.dsn, concurrency=50)
    assert desk.outcomes() == {"succeeded": 100}
    rows = desk.rows("select worker_id, max_attempts - attempt, count(*) from fairq.live_tasks group by 1, 2")
    assert rows == [(None, 5, len(strange))]
    # A second, then two, then four, with some jitter; how many of them depends on how long the others took.
    too_soon = desk.one(
        """
        select count(*) from (
          select a.ended_at - lag(a.ended_at) over task as pause, row_number() over task as meeting
          from fairq.attempts a window task as (partition by a.task_id order by a.ended_at)
        ) x where pause < 0.75 * power(2, meeting - 2) * interval '1 second'
        """
    )
    assert too_soon == 0


def test_the_log_names_an_unknown_kind_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    app = fairq.App()
    app.task(kind="known")(lambda payload: None)
    desk.enqueue_many("strange", 20)
    with caplog.at_level(logging.WARNING, "fairq.worker"), worker_thread(app, desk.dsn, concurrency=4):
        desk.wait_until(lambda: len(desk.rows("select from fairq.attempts")) >= 20, "all are given back")
    lines = [record for record in caplog.records if getattr(record, "action", "") == "unknown_kind"]
    assert len(lines) == 1
    assert "'strange'" in lines[0].getMessage()
    assert "known" in lines[0].getMessage()


def test_explain_says_that_nobody_knows_the_kind(desk: Desk) -> None:
    id = desk.enqueue("strange")
    app = fairq.App()
    app.task(kind="known")(lambda payload: None)
    with worker_thread(app, desk.dsn):
        desk.wait_until(lambda: desk.rows("select from fairq.attempts") != [], "it is given back")
        reason = desk.one("select reason from fairq.explain_task(%s)", id)
    assert reason == 'no live worker of queue "default" knows the kind "strange"'
