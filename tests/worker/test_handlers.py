"""One worker in this process: what handlers do, and what is written."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import fairq
from fairq.worker import Stuck
from tests.worker.handlers import app, run_all
from tests.worker.running import Desk, drain, worker_thread


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
    """It is written in one batch with others, which must not suffer."""
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
    """asyncio lets SystemExit of an inner task leave the whole loop."""
    own = fairq.App()

    @own.task(max_attempts=1)
    async def exits_inside(payload: Any) -> None:
        async def inner() -> None:
            sys.exit(5)

        await asyncio.create_task(inner())

    bad = desk.enqueue("exits_inside", max_attempts=1)
    drain(own, desk.dsn)
    assert desk.end(bad)[0] == "failed"


def test_a_handler_that_stops_the_loop_does_not_end_the_worker(desk: Desk) -> None:
    own = fairq.App()

    @own.task
    async def stops(payload: Any) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)

    ids = [desk.enqueue("stops") for _ in range(2)]
    drain(own, desk.dsn)
    assert [desk.end(id)[0] for id in ids] == ["succeeded"] * 2


def test_a_handler_that_cancels_whatever_is_on_the_loop_is_named(desk: Desk) -> None:
    """The worker cannot go on, but it ends in good order."""
    own = fairq.App()

    @own.task
    async def cancels(payload: Any) -> None:
        for each in asyncio.all_tasks():
            each.cancel()
        await asyncio.sleep(60)

    id = desk.enqueue("cancels", max_attempts=1)
    with pytest.raises(Stuck, match="cancelled every task"):
        drain(own, desk.dsn)
    assert (desk.end(id)[0], desk.workers) == ("failed", 0)


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
    """While it runs, in case it is lost, and at its end; also if it fails, or ends itself."""
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


def test_nonsense_from_a_handler_is_the_handlers_error(desk: Desk) -> None:
    """If progress or a delay is no number, the attempt fails and the worker goes on."""
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
    assert ["no outcome: RuntimeError" in desk.end(id)[3]["message"] for id in ids] == [True, True]


def test_a_handler_that_was_told_to_wait_holds_its_group(desk: Desk) -> None:
    """It uses no attempt, no task of the group runs meanwhile, and the worker wakes by itself."""
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
