"""`fairq.testing`: a real worker in the test's own transaction."""

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import fairq
from fairq import testing
from tests.api.kinds import KINDS, Opened
from tests.support.database import Database


@dataclasses.dataclass
class Upload:
    file: str
    parts: int = 0


app = fairq.App()
current: list[Any] = []


@app.task(store_result=True, max_attempts=3)
def split(payload: Upload, ctx: fairq.Context) -> list[str]:
    ctx.progress(payload.parts, payload.parts, "split")
    return [f"{payload.file}.{n}" for n in range(payload.parts)]


@app.task(max_attempts=2, retry=fairq.Backoff(base=60, jitter=0))
def flaky(payload: int, ctx: fairq.Context) -> None:
    if ctx.attempt == 1:
        raise OSError("not yet")


@app.task
def boom(payload: None) -> None:
    raise ValueError("boom")


@app.task
async def asynchronous(payload: int) -> None:
    await asyncio.sleep(0)


@app.task(timeout=0.01)
async def slow(payload: None) -> None:
    await asyncio.Event().wait()


@app.task
def ends_itself(payload: str, ctx: fairq.Context) -> None:
    ctx.finish_in(current[-1], {"by": "itself"})
    if payload == "raises":
        raise ValueError("after all")
    if payload == "rolls back":
        current[-1].execute("rollback to savepoint fairq_testing")


@app.task
def fans_out(payload: int) -> None:
    if payload:
        fans_out.enqueue(current[-1], "bob", payload - 1)


@pytest.fixture(
    params=["psycopg", "sqlalchemy-session", "sqlalchemy-async-session-asyncpg", "psycopg-async", "django"]
)
def opened(request: pytest.FixtureRequest, database: Database) -> Any:
    with KINDS[request.param](database.dsn) as connection:
        yield connection


def test_a_queue_is_drained_in_the_tests_own_transaction(opened: Opened, database: Database) -> None:
    """The task is created, popped, run and finished, and gone after the rollback."""
    if fairq.connections.is_async(opened.conn):
        ids = opened.finish(asynchronous.enqueue_many(opened.conn, [("bob", 1), ("alice", 2)]))
    else:
        ids = [
            split.enqueue(opened.conn, "bob", Upload("a", 2)),
            split.enqueue(opened.conn, "alice", Upload("b")),
        ]
    waiting = opened.finish(testing.enqueued(opened.conn))
    assert [task.id for task in waiting] == ids
    assert [task.group_key for task in waiting] == ["bob", "alice"]
    ran = opened.finish(testing.drain(opened.conn, app))
    assert sorted((each.id, each.outcome, each.attempt) for each in ran) == [
        (id, "succeeded", 1) for id in ids
    ]
    assert opened.finish(testing.enqueued(opened.conn)) == []
    assert opened.finish(fairq.result(opened.conn, ids[0], timeout=0)).outcome == "succeeded"
    assert opened.value("select count(*) from fairq.workers") == 0
    opened.rollback()
    observer = database.connect(autocommit=True)
    assert observer.execute("select count(*) from fairq.tasks").fetchone() == (0,)
    assert observer.execute("select count(*) from fairq.finished_tasks").fetchone() == (0,)


def test_ran_has_everything(db: psycopg.Connection[Any]) -> None:
    id = split.enqueue(db, "bob", Upload("a", 2))
    (ran,) = testing.drain(db, app)
    assert (ran.id, ran.kind, ran.queue, ran.group_key) == (id, "split", "default", "bob")
    assert ran.payload == Upload("a", 2)
    assert ran.result == ["a.0", "a.1"]
    assert (ran.error, ran.exception) == (None, None)
    assert ran.progress is not None
    assert ran.progress.note == "split"
    assert fairq.result(db, id, timeout=0).value() == ["a.0", "a.1"]


def test_groups_take_turns_as_with_a_real_worker(db: psycopg.Connection[Any]) -> None:
    """I3, among groups of one shard."""
    row = db.execute(
        "select min('alice ' || n) from fairq.settings s cross join generate_series(1, 1000) n"
        " where fairq._shard_of('alice ' || n, s.shard_count) = fairq._shard_of('bob', s.shard_count)"
    ).fetchone()
    assert row is not None
    split.enqueue_many(db, [("bob", Upload("x")) for _ in range(4)])
    split.enqueue(db, row[0], Upload("y"))
    order = [each.group_key for each in testing.drain(db, app)]
    assert order.index(row[0]) <= 1


def test_an_error_of_a_handler_is_raised_once_its_task_has_been_finished(db: psycopg.Connection[Any]) -> None:
    boom.enqueue(db, "bob", None, max_attempts=1)
    with pytest.raises(ValueError, match="boom"):
        testing.drain(db, app)
    assert testing.enqueued(db) == []
    assert testing.drain(db, app) == []


def test_a_failed_statement_of_a_handler_does_not_break_the_test(db: psycopg.Connection[Any]) -> None:
    own = fairq.App()

    @own.task(max_attempts=1)
    def breaks(payload: None) -> None:
        db.execute("create table half_done ()")
        db.execute("select 1 / 0")

    breaks.enqueue(db, "bob", None)
    (ran,) = testing.drain(db, own, raise_errors=False)
    assert ran.outcome == "failed"
    assert isinstance(ran.exception, psycopg.errors.DivisionByZero)
    assert db.execute("select to_regclass('half_done')").fetchone() == (None,)


def test_a_retry_runs_when_the_clock_is_moved(db: psycopg.Connection[Any]) -> None:
    flaky.enqueue(db, "bob", 1)
    (first,) = testing.drain(db, app, raise_errors=False)
    assert (first.outcome, first.error["code"]) == ("retry", "unhandled_error")
    (waiting,) = testing.enqueued(db, kind="flaky")
    assert waiting.state == "scheduled"
    assert testing.drain(db, app) == []
    (second,) = testing.drain(db, app, at=datetime.now(UTC) + timedelta(seconds=90))
    assert (second.attempt, second.outcome) == (2, "succeeded")
    row = db.execute("select abs(extract(epoch from fairq._now() - clock_timestamp())) < 10").fetchone()
    assert row == (True,)


def test_a_scheduled_task_waits_for_its_time(db: psycopg.Connection[Any]) -> None:
    at = datetime.now(UTC) + timedelta(days=1)
    split.enqueue(db, "bob", Upload("x"), run_at=at)
    assert testing.drain(db, app) == []
    assert len(testing.drain(db, app, at=at)) == 1
    with pytest.raises(fairq.ConfigurationError, match="time zone"):
        testing.drain(db, app, at=datetime(2030, 1, 1))


def test_tasks_of_no_handler_and_of_a_wrong_payload_have_their_codes(db: psycopg.Connection[Any]) -> None:
    """H4, HR28, HR29."""
    fairq.enqueue(db, "bob", {}, kind="nobody", max_attempts=1)
    fairq.enqueue(db, "bob", {"file": 5}, kind="split")
    ran = {each.kind: each for each in testing.drain(db, app, raise_errors=False)}
    assert (ran["nobody"].outcome, ran["nobody"].error["code"]) == ("declined", "unknown_task")
    assert (ran["split"].outcome, ran["split"].error["code"]) == ("failed", "payload_invalid")
    assert ran["split"].error["message"].startswith("payload.file ")
    stored = db.execute("select f.error ->> 'code' from fairq.finished_tasks f order by f.id").fetchall()
    assert stored == [("payload_invalid",)]


def test_a_slow_coroutine_times_out(db: psycopg.Connection[Any]) -> None:
    slow.enqueue(db, "bob", None, max_attempts=1)
    (ran,) = testing.drain(db, app, raise_errors=False)
    assert (ran.outcome, ran.error["code"]) == ("failed", "timeout")


@pytest.mark.parametrize(
    ("how", "outcome", "left"),
    [("returns", "succeeded", 0), ("raises", "retry", 1), ("rolls back", "retry", 1)],
)
def test_a_handler_ends_its_task_in_its_own_transaction(
    db: psycopg.Connection[Any], how: str, outcome: str, left: int
) -> None:
    """Its effects and its end commit together; after a rollback of both there is another attempt."""
    current.append(db)
    id = ends_itself.enqueue(db, "bob", how)
    (ran,) = testing.drain(db, app, raise_errors=False)
    assert ran.outcome == outcome
    assert len(testing.enqueued(db)) == left
    if how == "returns":
        assert fairq.result(db, id, timeout=0).result == {"by": "itself"}
    if how == "rolls back":
        assert ran.error["code"] == "finish_lost"


def test_a_stale_attempt_cannot_end_its_task(db: psycopg.Connection[Any]) -> None:
    """I10: and the exception rolls back what the handler did."""
    ctx = testing.context(id=12345)
    with pytest.raises(fairq.NotHeld):
        ctx.finish_in(db)
    assert not ctx.finished_in


def test_tasks_that_tasks_enqueue_run_as_well_up_to_a_limit(db: psycopg.Connection[Any]) -> None:
    current.append(db)
    fans_out.enqueue(db, "bob", 5)
    assert len(testing.drain(db, app)) == 6
    fans_out.enqueue(db, "bob", 1000)
    with pytest.raises(fairq.FairqError, match="made 3 attempts"):
        testing.drain(db, app, limit=3)
    assert all(task.state != "running" for task in testing.enqueued(db))


def test_in_autocommit_there_are_no_savepoints_and_none_are_needed(database: Database) -> None:
    conn = database.connect(autocommit=True)
    boom.enqueue(conn, "bob", None, max_attempts=1)
    split.enqueue(conn, "bob", Upload("x", 1))
    assert {each.outcome for each in testing.drain(conn, app, raise_errors=False)} == {"failed", "succeeded"}


def test_only_the_queues_named_are_drained(db: psycopg.Connection[Any]) -> None:
    db.execute("select fairq.configure_queue('other')")
    split.enqueue(db, "bob", Upload("x"), queue="other")
    assert testing.drain(db, app) == []
    assert len(testing.drain(db, app, queues=["default", "other"])) == 1


def test_tasks_are_found_by_their_declaration(opened: Opened) -> None:
    opened.finish(split.enqueue(opened.conn, "bob", Upload("a", 2)))
    opened.finish(split.enqueue(opened.conn, 5, Upload("b")))
    opened.finish(fairq.enqueue(opened.conn, "bob", {}))
    found = opened.finish(testing.enqueued(opened.conn, task=split))
    assert [each.payload for each in found] == [Upload("a", 2), Upload("b")]
    (five,) = opened.finish(testing.enqueued(opened.conn, task=split, group_key=5))
    assert (five.group_key, five.payload) == ("5", Upload("b"))


def test_the_clock_stands_where_a_test_wants_it(opened: Opened) -> None:
    at = datetime(2040, 1, 1, tzinfo=UTC)
    opened.finish(testing.freeze(opened.conn, at))
    opened.finish(asynchronous.enqueue(opened.conn, "bob", 1, delay=60))
    (task,) = opened.finish(testing.enqueued(opened.conn))
    assert (task.run_at, task.state) == (at + timedelta(seconds=60), "scheduled")
    assert opened.finish(testing.drain(opened.conn, app)) == []
    opened.finish(testing.freeze(opened.conn, at + timedelta(seconds=60)))
    assert opened.value("select fairq._now() = '2040-01-01T00:01:00Z'")
    opened.finish(testing.freeze(opened.conn, None))
    assert opened.value("select fairq._now() - clock_timestamp() < interval '1 minute'")


def test_a_handler_alone_gets_its_payload_through_json() -> None:
    assert testing.call(split, Upload("a", 1)) == ["a.0"]
    testing.call(asynchronous, 1)
    with pytest.raises(OSError, match="not yet"):
        testing.call(flaky, 1)
    testing.call(flaky, 1, testing.context(attempt=2))
    with pytest.raises(fairq.NotEncodable):
        testing.call(split, Upload(b"a"))  # type: ignore[arg-type]


def test_a_handler_alone_must_return_what_can_be_stored() -> None:
    own = fairq.App()
    task = own.task(kind="k", store_result=True)(lambda payload: object())
    with pytest.raises(fairq.ConfigurationError, match="result is of type object"):
        testing.call(task, None)


def test_a_handler_that_returns_what_nobody_runs_fails_as_in_a_worker(db: psycopg.Connection[Any]) -> None:
    own = fairq.App()
    task = own.task(kind="k", max_attempts=1)(lambda payload: (each for each in [payload]))
    with pytest.raises(TypeError, match="returned a generator"):
        testing.call(task, 1)
    task.enqueue(db, "bob", 1)
    (ran,) = testing.drain(db, own, raise_errors=False)
    assert (ran.outcome, type(ran.exception)) == ("failed", TypeError)


def test_an_async_handler_runs_in_a_loop_that_runs_already() -> None:
    async def work() -> None:
        await testing.call_async(asynchronous, 1)
        assert await testing.call_async(split, Upload("a", 1)) == ["a.0"]
        with pytest.raises(fairq.ConfigurationError, match="event loop"):
            testing.call(asynchronous, 1)

    asyncio.run(work())
