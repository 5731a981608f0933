"""Handlers that take many tasks of one kind in one call, each of which stays a task."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import psycopg
import pytest

import fairq
from fairq import testing
from tests.worker.running import Desk, drain, work_process, worker_thread

Said: TypeAlias = list[list[int]]


def an_app(
    is_async: bool, behaves: Callable[[list[int], fairq.Batch], Any], **options: Any
) -> tuple[fairq.App, Said]:
    """One kind, `add`, and what each call of its handler got."""
    app, said = fairq.App(), list[list[int]]()

    def add(numbers: list[int], ctx: fairq.Batch) -> Any:
        said.append(numbers)
        assert len(ctx) == len(numbers)
        return behaves(numbers, ctx)

    async def aadd(numbers: list[int], ctx: fairq.Batch) -> Any:
        await asyncio.sleep(0)
        return add(numbers, ctx)

    declared: Any = {"kind": "add", "batch": 4, "store_result": True, **options}
    app.task(**declared)(aadd if is_async else add)
    return app, said


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@both
def test_a_call_gets_what_a_turn_brought_and_each_task_ends_with_its_own_result(
    desk: Desk, is_async: bool
) -> None:
    app, said = an_app(is_async, lambda numbers, _: [n + 1 for n in numbers])
    ids = [desk.enqueue("add", n, group_key=f"tenant {n}") for n in range(10)]
    drain(app, desk.dsn, concurrency=10)
    assert [len(each) for each in said] == [4, 4, 2]
    assert sorted(n for numbers in said for n in numbers) == [*range(10)]
    assert [desk.end(id)[:3] for id in ids] == [("succeeded", 1, n + 1) for n in range(10)]


@both
def test_a_failing_task_fails_alone(desk: Desk, is_async: bool) -> None:
    """An exception in its place, or a payload that does not fit."""

    def behaves(numbers: list[int], _: fairq.Batch) -> list[Any]:
        return [fairq.Fail("odd") if n % 2 else n for n in numbers]

    app, said = an_app(is_async, behaves)
    ids = [desk.enqueue("add", n) for n in (0, "nothing", 1, 2)]
    drain(app, desk.dsn, concurrency=4)
    assert said == [[0, 1, 2]]
    assert [desk.end(id)[0] for id in ids] == ["succeeded", "failed", "failed", "succeeded"]
    assert [(desk.end(id)[3] or {}).get("code") for id in ids] == [None, "payload_invalid", "failed", None]


@both
def test_an_exception_fails_all_of_them_and_then_each_runs_alone(desk: Desk, is_async: bool) -> None:
    """I15."""

    def behaves(numbers: list[int], _: fairq.Batch) -> None:
        if 2 in numbers:
            raise ValueError("poison")

    app, said = an_app(is_async, behaves, max_attempts=2, retry=fairq.Backoff(base=0.01, jitter=0))
    ids = [desk.enqueue("add", n) for n in range(4)]
    with worker_thread(app, desk.dsn, concurrency=4):
        desk.wait_until(lambda: desk.live == 0, "all ended")
    assert said[0] == [0, 1, 2, 3]
    assert sorted(said[1:]) == [[0], [1], [2], [3]]
    assert [desk.end(id)[:2] for id in ids] == [
        ("succeeded", 2), ("succeeded", 2), ("failed", 2), ("succeeded", 2)
    ]  # fmt: skip


def test_an_answer_that_does_not_say_whose_is_whose_is_a_failure(desk: Desk) -> None:
    app, _ = an_app(False, lambda numbers, _: numbers[1:], max_attempts=1)
    ids = [desk.enqueue("add", n) for n in range(2)]
    drain(app, desk.dsn, concurrency=2)
    assert {desk.end(id)[3]["type"] for id in ids} == {"TypeError"}


def test_tasks_lost_with_their_worker_run_alone(desk: Desk) -> None:
    """I15."""
    ids = [desk.enqueue("together", n == 1, group_key=f"tenant {n}", max_attempts=3) for n in range(3)]
    with work_process(
        desk.dsn, "-p", "2", "-c", "4", "--lease", "1", "--maintain-interval", "0.2", app="poison"
    ) as worker:
        desk.wait_until(lambda: desk.live == 0, "all ended")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
    assert [desk.end(id)[0] for id in ids] == ["succeeded", "failed", "succeeded"]
    assert desk.end(ids[1])[3]["code"] == "worker_lost"


@both
def test_it_is_interrupted_when_nobody_wants_it_any_more(desk: Desk, is_async: bool) -> None:
    began, app, reasons = threading.Event(), fairq.App(), []

    if is_async:

        @app.task(kind="add", batch=3)
        async def aadd(numbers: list[int], ctx: fairq.Batch) -> None:
            began.set()
            await ctx.tasks[0].cancelled
            reasons.extend([(bool(each.cancelled), bool(ctx.cancelled)) for each in ctx])
            await asyncio.sleep(60)

    else:

        @app.task(kind="add", batch=3)
        def add(numbers: list[int], ctx: fairq.Batch) -> None:
            began.set()
            assert ctx.tasks[0].cancelled.wait(30)
            reasons.extend([(bool(each.cancelled), bool(ctx.cancelled)) for each in ctx])
            assert ctx.cancelled.wait(30)
            ctx.cancelled.raise_if_set()

    ids = [desk.enqueue("add", n) for n in range(2)]
    with worker_thread(app, desk.dsn, concurrency=2, heartbeat_ms=50):
        assert began.wait(30)
        fairq.cancel(desk.app, ids[0])
        desk.wait_until(lambda: len(reasons) == 2, "the first is cancelled")
        fairq.cancel(desk.app, ids[1])
        desk.wait_until(lambda: desk.live == 0, "all ended")
    assert reasons == [(True, False), (False, False)]
    assert [desk.end(id)[0] for id in ids] == ["cancelled", "cancelled"]


@both
def test_all_of_them_time_out_at_once(desk: Desk, is_async: bool) -> None:
    app = fairq.App(timeout=0.2, max_attempts=1)

    async def awaits(numbers: list[int]) -> None:
        await asyncio.sleep(60)

    def waits(numbers: list[int], ctx: fairq.Batch) -> None:
        assert ctx.cancelled.wait(30)
        ctx.cancelled.raise_if_set()

    app.task(kind="add", batch=3)(awaits if is_async else waits)
    ids = [desk.enqueue("add", n) for n in range(3)]
    drain(app, desk.dsn, concurrency=3)
    assert [desk.end(id)[3]["code"] for id in ids] == ["timeout"] * 3


def test_tasks_interrupted_by_a_shutdown_come_back(desk: Desk) -> None:
    began = threading.Event()

    def behaves(numbers: list[int], ctx: fairq.Batch) -> None:
        began.set()
        ctx.cancelled.wait(30)
        ctx.cancelled.raise_if_set()

    app, _ = an_app(False, behaves)
    ids = [desk.enqueue("add", n) for n in range(3)]
    with worker_thread(app, desk.dsn, concurrency=3):
        assert began.wait(30)
    assert desk.rows("select id, state from fairq.live_tasks order by id") == [(id, "overflow") for id in ids]


@both
def test_middleware_and_session_go_around_the_call_and_ends_commit_with_it(
    desk: Desk, is_async: bool
) -> None:
    around: list[Any] = []

    def told(ctx: Any, call_next: Callable[[], Any]) -> Any:
        around.append((ctx.kind, len(ctx)))
        return call_next()

    async def atold(ctx: Any, call_next: Callable[[], Any]) -> Any:
        around.append((ctx.kind, len(ctx)))
        return await call_next()

    own = fairq.App(middleware=[(told, atold)], max_attempts=1, store_result=True)
    write = "insert into effects values (default, 'paid', %s, 1, 0, 0)"

    def answer(numbers: list[int]) -> list[Any]:
        return [fairq.Fail("no") if n == 1 else n for n in numbers]

    if is_async:

        @asynccontextmanager
        async def session() -> AsyncIterator[Any]:
            async with await psycopg.AsyncConnection.connect(desk.dsn) as conn:
                yield conn

        @own.task(kind="add", batch=4, session=session)
        async def aadd(numbers: list[int], ctx: fairq.Batch) -> list[Any]:
            for each in ctx:
                await ctx.session.execute(write, [each.id])
            return answer(numbers)

    else:

        @own.task(kind="add", batch=4, session=lambda: psycopg.connect(desk.dsn))
        def add(numbers: list[int], ctx: fairq.Batch) -> list[Any]:
            for each in ctx:
                each.session.execute(write, [each.id])
            if 7 in numbers:
                raise ValueError("nothing of this")
            return answer(numbers)

    ids = [desk.enqueue("add", n) for n in range(4)]
    drain(own, desk.dsn, concurrency=4)
    assert around == [("add", 4)]
    assert [desk.end(id)[0] for id in ids] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert [desk.end(id)[2] for id in ids] == [0, None, 2, 3]
    assert desk.effects("paid") == 4
    if not is_async:
        more = [desk.enqueue("add", n) for n in (7, 8)]
        drain(own, desk.dsn, concurrency=4)
        assert [desk.end(id)[0] for id in more] == ["failed", "failed"]
        assert desk.effects("paid") == 4


def test_limits_count_each_of_them(desk: Desk) -> None:
    """I7."""
    app, said = an_app(False, lambda numbers, _: None)
    desk.rows("""select fairq.configure_group('default', 'bob', '{"max_running": 2}')""")
    for n in range(6):
        desk.enqueue("add", n)
    drain(app, desk.dsn, concurrency=4)
    assert [len(each) for each in said] == [2, 2, 2]


def test_in_tests_it_is_a_batch_of_one(db: psycopg.Connection[Any]) -> None:
    own = fairq.App()

    @own.task(batch=10, store_result=True)
    def double(numbers: list[int]) -> list[int | Exception]:
        return [fairq.Fail("no") if n < 0 else 2 * n for n in numbers]

    assert testing.call(double, 4) == 8
    with pytest.raises(fairq.Fail):
        testing.call(double, -1)
    double.enqueue_many(db, [("bob", 1), ("alice", -1)])
    assert [(each.outcome, each.result) for each in testing.drain(db, own)] == [
        ("succeeded", 2),
        ("failed", None),
    ]


def test_an_invalid_batch_is_refused_where_it_is_declared() -> None:
    own = fairq.App()

    def nothing() -> None: ...

    with pytest.raises(fairq.ConfigurationError, match="takes no list"):
        own.task(batch=2)(nothing)  # type: ignore[arg-type]
    with pytest.raises(fairq.ConfigurationError, match="batch=0"):
        own.task(batch=0)(lambda numbers: None)

    @own.task(batch=2)  # type: ignore[arg-type]
    def add(numbers: int) -> None: ...

    (problem,) = own.problems()
    assert "takes batches" in problem
