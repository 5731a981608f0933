"""Waiting for the end of a task."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

import fairq
from fairq import driver, results
from fairq.queries import client
from fairq.results import TaskResult
from tests.api.kinds import Opened
from tests.support import plans
from tests.support.database import Database
from tests.support.sessions import call_in_background, wait_until
from tests.support.sessions import result as finished


class Worker:
    """A worker in SQL, on a connection of its own."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn
        self.id = self._value("select fairq.register_worker('w', array['default'], 1)")

    def _value(self, sql: LiteralString, *params: Any) -> Any:
        row = self.conn.execute(sql, params).fetchone()
        return None if row is None else row[0]

    def finish(
        self, id: int, outcome: str = "succeeded", result: str | None = None, error: str | None = None
    ) -> None:
        attempt = self.pop(id)
        self._finish(id, attempt, outcome, result, error)

    def pop(self, id: int) -> int:
        """Pop until this task comes, and let those before it succeed. Return its attempt."""
        pop: LiteralString = "select t.id, t.attempt from fairq.pop_tasks('default', 1, %s) t"
        while True:
            found = self.conn.execute(pop, [self.id]).fetchone()
            assert found is not None, "the task is not there to be popped"
            popped, attempt = found
            if popped == id:
                return int(attempt)
            self._finish(popped, attempt, "succeeded", None, None)

    def _finish(self, id: int, attempt: int, outcome: str, result: str | None, error: str | None) -> None:
        finish: LiteralString = (
            "select fairq.finish_tasks(%s, array[%s::bigint], array[%s::int], array[%s],"
            " array[%s::jsonb], array[%s::jsonb])"
        )
        self._value(finish, self.id, id, attempt, outcome, result, error)


@pytest.fixture
def taker(shared: Database) -> Iterator[Worker]:
    conn = shared.connect(autocommit=True)
    yield Worker(conn)
    conn.close()


def test_the_end_of_a_task_is_told_on_every_kind_of_connection(
    opened: Opened, taker: Worker, group: str
) -> None:
    id = opened.finish(fairq.enqueue(opened.conn, group))
    opened.commit()
    taker.finish(id, result='{"pages": [1, 2]}')
    found: TaskResult[Any] = opened.finish(fairq.result(opened.conn, id, timeout=60))
    assert (found.id, found.outcome, found.result, found.error) == (id, "succeeded", {"pages": [1, 2]}, None)
    assert found.value() == {"pages": [1, 2]}
    assert abs(found.finished_at - datetime.now(UTC)) < timedelta(hours=1)
    opened.rollback()


def test_a_wait_that_is_too_long_ends_on_every_kind_of_connection(opened: Opened, group: str) -> None:
    id = opened.finish(fairq.enqueue(opened.conn, group))
    opened.commit()
    with pytest.raises(fairq.ResultTimeout) as caught:
        opened.finish(fairq.result(opened.conn, id, timeout=0.05))
    assert isinstance(caught.value, TimeoutError)
    opened.rollback()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", timedelta(seconds=5)])
def test_a_timeout_that_is_none_is_refused(db: psycopg.Connection[Any], timeout: Any) -> None:
    """A wait for NaN seconds would never end."""
    with pytest.raises(fairq.InvalidTime, match="the timeout is"):
        fairq.result(db, 1, timeout=timeout)


@dataclasses.dataclass
class Summary:
    pages: int
    at: datetime


app = fairq.App(store_result=True)


@app.task
def summarize(payload: None) -> Summary:
    return Summary(1, datetime.now(UTC))


@app.task(kind="asummarize")
async def asummarize() -> Summary:
    return Summary(1, datetime.now(UTC))


def test_a_declared_task_knows_the_type_of_its_result(opened: Opened, taker: Worker, group: str) -> None:
    written = '{"pages": 3, "at": "2030-01-01T00:00:00Z"}'
    for task in (summarize, asummarize):
        id = task.enqueue(taker.conn, group, None)
        taker.finish(id, result=written)
        ended = opened.finish(task.result(opened.conn, id, timeout=10))
        assert ended.value() == Summary(3, datetime(2030, 1, 1, tzinfo=UTC))
    id = summarize.enqueue(taker.conn, group, None)
    taker.finish(id, "failed")
    assert opened.finish(summarize.result(opened.conn, id)).outcome == "failed"
    id = summarize.enqueue(taker.conn, group, None)
    taker.finish(id, result='{"pages": "three"}')
    with pytest.raises(fairq.TaskError, match=r"result\.pages"):
        opened.finish(summarize.result(opened.conn, id))
    opened.rollback()


def test_a_task_that_keeps_no_results_has_none_to_wait_for(db: psycopg.Connection[Any]) -> None:
    task = fairq.App().task(kind="k")(lambda payload: 1)
    with pytest.raises(fairq.ConfigurationError, match="stores no results"):
        task.result(db, 1)


def test_a_wait_in_a_pipeline_in_autocommit_ends_too(shared: Database, taker: Worker, group: str) -> None:
    with psycopg.connect(shared.dsn, autocommit=True) as conn, conn.pipeline() as pipeline:
        id = fairq.enqueue(conn, group)
        with pytest.raises(fairq.InTransaction):
            fairq.result(conn, id, timeout=5)
        pipeline.sync()
        with pytest.raises(fairq.ResultTimeout):
            fairq.result(conn, id, timeout=0.05)
        waiting = call_in_background(lambda: fairq.result(conn, id, timeout=60))
        taker.finish(id)
        assert finished(waiting).outcome == "succeeded"


def test_a_wait_that_cannot_watch_leaves_nothing_listened_to(
    shared: Database, taker: Worker, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(shared.dsn, autocommit=True) as conn:
        id = fairq.enqueue(conn, group)
        broken: driver.Call[Any] = driver.Call(driver.Statement[Any]("one", "select 1 / 0"), ())
        monkeypatch.setattr(client.watch_task, "call", lambda id: broken)
        with pytest.raises(fairq.DatabaseError):
            fairq.result(conn, id, timeout=5)
        assert conn.execute("select * from pg_listening_channels()").fetchall() == []
        assert fairq.cancel(conn, id)


@pytest.mark.parametrize("autocommit", [True, False], ids=["listening", "polling"])
def test_a_waiting_thread_gets_a_result_that_comes_later(
    shared: Database, taker: Worker, group: str, autocommit: bool
) -> None:
    conn = shared.connect(autocommit=autocommit)
    id = fairq.enqueue(conn, group)
    conn.commit()
    waiting = call_in_background(lambda: fairq.result(conn, id))
    taker.finish(id, result="7")
    assert finished(waiting).result == 7
    conn.rollback()
    assert conn.execute("select count(*) from pg_listening_channels()").fetchone() == (0,)


def test_a_notification_ends_the_wait(
    shared: Database, taker: Worker, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HR14: with pauses of an hour only a notification can."""
    monkeypatch.setattr(results, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(results, "LONGEST_PAUSE", 3600.0)
    listening = threading.Event()
    hear = results._notice

    def spy(*args: Any) -> Any:
        listening.set()
        return hear(*args)

    monkeypatch.setattr(results, "_notice", spy)
    conn = shared.connect(autocommit=True)
    other, id = fairq.enqueue(conn, group), fairq.enqueue(conn, group)
    waiting = call_in_background(lambda: fairq.result(conn, id))
    assert listening.wait(20)
    taker.finish(other, result="1")
    taker.finish(id, result="2")
    assert finished(waiting).result == 2


def test_a_notification_ends_the_wait_of_a_coroutine(
    shared: Database, taker: Worker, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FIRST_PAUSE", 3600.0)
    listening = asyncio.Event()
    hear = results._notice

    def spy(*args: Any) -> Any:
        listening.set()
        return hear(*args)

    monkeypatch.setattr(results, "_notice", spy)

    async def work() -> TaskResult[Any]:
        conn = await psycopg.AsyncConnection.connect(shared.dsn, autocommit=True)
        async with conn:
            id = await fairq.enqueue(conn, group)
            waiting = asyncio.create_task(fairq.result(conn, id))
            await asyncio.wait_for(listening.wait(), 20)
            await asyncio.to_thread(taker.finish, id, "succeeded", "3")
            return await asyncio.wait_for(waiting, 20)

    assert asyncio.run(work()).result == 3


def end_by_worker(taker: Worker, id: int) -> None:
    taker.finish(id)


def end_by_failing(taker: Worker, id: int) -> None:
    taker.finish(id, "failed", error='{"message": "no"}')


def end_by_canceling(taker: Worker, id: int) -> None:
    taker._value("select fairq.cancel_task(%s)", id)
    taker._value("select fairq.maintain()")


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (end_by_worker, "succeeded"),
        (end_by_failing, "failed"),
        (end_by_canceling, "cancelled"),
    ],
)
def test_any_end_is_announced_with_or_without_a_result(
    shared: Database,
    taker: Worker,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Worker, int], None],
    outcome: str,
) -> None:
    """With pauses of an hour only a notification can end the wait."""
    monkeypatch.setattr(results, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(results, "LONGEST_PAUSE", 3600.0)
    listening = threading.Event()
    hear = results._notice

    def spy(*args: Any) -> Any:
        listening.set()
        return hear(*args)

    monkeypatch.setattr(results, "_notice", spy)
    conn = shared.connect(autocommit=True)
    id = fairq.enqueue(conn, group)
    waiting = call_in_background(lambda: fairq.result(conn, id))
    assert listening.wait(20)
    end(taker, id)
    found = finished(waiting)
    assert (found.outcome, found.result) == (outcome, None)


def test_a_long_wait_renews_its_watch(
    shared: Database, taker: Worker, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RENEW_SECONDS", 0.0)
    conn = shared.connect(autocommit=True)
    id = fairq.enqueue(conn, group)
    waiting = call_in_background(lambda: fairq.result(conn, id))
    watches: LiteralString = "select count(*) from fairq.watches where task_id = %s"
    wait_until(lambda: taker._value(watches, id) >= 3, "the watch is renewed")
    taker.finish(id)
    assert finished(waiting).outcome == "succeeded"


def test_ends_that_nobody_watches_are_not_announced(shared: Database, taker: Worker, group: str) -> None:
    """NOTIFY takes a lock for which all commits with a NOTIFY in the database wait."""
    conn = shared.connect(autocommit=True)
    conn.execute("listen fairq_done")
    quiet, late, watched = (fairq.enqueue(conn, group) for _ in range(3))
    assert conn.execute("select fairq.watch_task(%s)", [watched]).fetchone() == (True,)
    conn.execute("insert into fairq.watches values (0, %s, fairq._now() - interval '1 second')", [late])
    for id in (quiet, late, watched):
        taker.finish(id, result="1")
    heard = list(conn.notifies(timeout=20, stop_after=1))
    assert [notice.payload for notice in heard] == [str(watched)]
    assert conn.execute("select fairq.watch_task(%s)", [watched]).fetchone() == (False,)


def test_a_role_that_may_not_watch_polls(shared: Database, taker: Worker, group: str) -> None:
    admin = shared.connect(autocommit=True)
    id = fairq.enqueue(admin, group)
    conn = shared.connect(autocommit=True)
    conn.execute("create role no_watcher nologin")
    try:
        conn.execute("grant fairq_enqueue to no_watcher")
        conn.execute("set role no_watcher")
        admin.execute("revoke execute on function fairq.watch_task from fairq_enqueue")
        waiting = call_in_background(lambda: fairq.result(conn, id))
        taker.finish(id, result="5")
        assert finished(waiting).result == 5
        assert conn.execute("select count(*) from pg_listening_channels()").fetchone() == (0,)
    finally:
        admin.execute("grant execute on function fairq.watch_task to fairq_enqueue")
        conn.execute("reset role")
        conn.execute("drop role no_watcher")


def test_an_application_that_listens_keeps_its_notifications(
    shared: Database, taker: Worker, group: str
) -> None:
    """Then the wait polls, because the notifications belong to the application."""
    conn = shared.connect(autocommit=True)
    conn.execute("listen mine")
    id = fairq.enqueue(conn, group)
    taker.conn.execute("notify mine, 'for you'")
    waiting = call_in_background(lambda: fairq.result(conn, id))
    taker.finish(id, result="1")
    finished(waiting)
    assert [each.payload for each in conn.notifies(timeout=20, stop_after=1)] == ["for you"]


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "expired"])
def test_a_task_that_did_not_succeed_has_no_value(
    shared: Database, taker: Worker, group: str, outcome: str
) -> None:
    conn = shared.connect(autocommit=True)
    id = fairq.enqueue(conn, group)
    taker.finish(id, outcome, error='{"code": "unhandled_error", "message": "no such file"}')
    found = fairq.result(conn, id)
    assert found.outcome == outcome
    with pytest.raises(fairq.TaskFailed, match=f"{outcome}: no such file") as caught:
        found.value()
    assert caught.value.outcome == outcome
    assert caught.value.error["code"] == "unhandled_error"


def test_an_id_that_nobody_has_is_an_error_and_no_wait(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(fairq.NoSuchTask):
        fairq.result(db, 2**62)


def test_a_wait_within_the_transaction_that_enqueued_is_refused(opened: Opened, group: str) -> None:
    """It could never end, because nobody else can see the task."""
    id = opened.finish(fairq.enqueue(opened.conn, group))
    with pytest.raises(fairq.InTransaction):
        opened.finish(fairq.result(opened.conn, id))
    opened.rollback()


def test_a_wait_under_a_snapshot_that_stands_still_is_refused(opened: Opened, group: str) -> None:
    id = opened.finish(fairq.enqueue(opened.conn, group))
    opened.commit()
    opened.do("set transaction isolation level repeatable read")
    with pytest.raises(fairq.InTransaction):
        opened.finish(fairq.result(opened.conn, id))
    opened.rollback()


def test_repeatable_read_as_default_of_the_session_is_no_hindrance_in_autocommit(
    shared: Database, taker: Worker, group: str
) -> None:
    """There each look has its own snapshot."""
    conn = shared.connect(autocommit=True)
    conn.execute("set default_transaction_isolation = 'repeatable read'")
    id = fairq.enqueue(conn, group)
    waiting = call_in_background(lambda: fairq.result(conn, id))
    taker.finish(id, result="1")
    assert finished(waiting).result == 1


def test_a_look_costs_no_scan_of_the_history(database: Database) -> None:
    """By the index on ids, also in a prepared statement's plan, in every day's partition with rows."""
    conn = database.connect()
    conn.execute(
        """
        insert into fairq.finished_tasks (shard_no, priority, id, created_at, run_at, finished_at, cost,
          attempt, max_attempts, queue, outcome, group_key, kind, payload)
        select 0, 0, n, now(), now(),
          now() + case n % 9 when 8 then interval '-400 days' else n % 9 * interval '1 day' end, 1, 1, 1,
          'default', 'succeeded', 'bob', 'k', '{}'
        from generate_series(1, 9000) n"""
    )
    conn.execute("analyze fairq.finished_tasks")
    fairq.enqueue_many(conn, [("bob", 1)] * 3000)
    conn.execute("analyze fairq.tasks")
    body = conn.execute("select prosrc from pg_proc where proname = 'task_result'").fetchone()
    assert body is not None
    plan = plans.explain_generic(conn, body[0].replace("p_id", "$1"), [4000], types=["bigint"])
    scans = [
        node for node in plans.nodes(plan) if node.get("Relation Name", "").startswith(("tasks", "finished"))
    ]
    assert scans
    assert all("Index" in node["Node Type"] for node in scans)


def test_progress_is_read_on_every_kind_of_connection(opened: Opened, taker: Worker, group: str) -> None:
    id = opened.finish(fairq.enqueue(opened.conn, group))
    opened.commit()
    assert opened.finish(fairq.progress(opened.conn, id)) is None
    opened.rollback()
    attempt = taker.pop(id)
    report: LiteralString = (
        "select fairq.report_progress(%s, array[%s::bigint], array[%s::int], array[%s::float8],"
        " array[%s::float8], array[%s::jsonb])"
    )
    for done in (1, 2):
        taker.conn.execute(report, [taker.id, id, attempt, done, 10, '{"page": 3}'])
    found = opened.finish(fairq.progress(opened.conn, id))
    assert found == fairq.Progress(2, 10, {"page": 3})
    opened.rollback()
