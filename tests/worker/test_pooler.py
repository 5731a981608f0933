"""Behind PgBouncer in transaction mode: LISTEN is silent there, and each transaction has another
connection.
"""

from __future__ import annotations

import signal
from typing import Any

import psycopg
import pytest

import fairq
from fairq.queries import client
from fairq.worker import listen
from tests.support.pooler import pooler
from tests.worker.running import Desk, lines_of, work_process, worker_thread


def test_a_worker_behind_a_pooler_notices_warns_once_and_polls(desk: Desk) -> None:
    with pooler(desk.dsn, connections=3) as through, work_process(through, "-c", "4") as worker:
        worker.wait_for("not listening, polling every 1s")
        assert len(lines_of(worker, "no notification arrives")) == 1
        ids = desk.enqueue_many("once", 30)
        desk.wait_until(lambda: desk.live == 0, "all ran")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert desk.outcomes() == {"succeeded": len(ids)}
    assert desk.workers == 0


def test_a_notice_for_another_worker_proves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two that start together, one may get the session of the pooler on which the other one just listened,
    and with it the other one's notice.
    """
    own = fairq.App()

    @own.task
    def nothing(payload: Any) -> None: ...

    pid = client.backend_pid

    async def pid_meanwhile(conn: listen.Conn) -> int:
        desk.conn.execute("notify fairq_test_of_another")  # it comes when this transaction ends
        return await pid(conn)

    monkeypatch.setattr(client, "backend_pid", pid_meanwhile)
    with pooler(desk.dsn, connections=1) as through, psycopg.connect(through, autocommit=True) as another:
        another.execute("listen fairq_test_of_another")
        with worker_thread(own, through):
            desk.wait_until(lambda: "no notification arrives" in caplog.text, "it is warned")


def test_a_way_around_the_pooler_is_listened_on(desk: Desk) -> None:
    with (
        pooler(desk.dsn, connections=3) as through,
        work_process(through, "--listen-dsn", desk.dsn, "-c", "4") as worker,
    ):
        worker.wait_for("listening, polling every 5s")
        desk.enqueue_many("once", 5)
        desk.wait_until(lambda: desk.live == 0, "all ran")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert not worker.says("no notification arrives")


@pytest.mark.parametrize("processes", ["1", "3"])
def test_workers_behind_a_pooler_do_every_task_exactly_once(desk: Desk, processes: str) -> None:
    desk.enqueue_many("once", 200)
    with (
        pooler(desk.dsn, connections=3) as through,
        work_process(through, "--no-listen", "--drain", "-p", processes, "-c", "4") as worker,
    ):
        assert worker.wait() == 0, worker.output
    assert desk.rows("select count(*), count(distinct task_id), max(attempt) from effects") == [(200, 200, 1)]
    assert (desk.live, desk.workers) == (0, 0)
