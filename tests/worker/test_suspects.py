"""I15: a task that was lost with its worker runs alone until it has proved harmless."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import fairq
from fairq.worker import Worker, solo
from fairq.worker.solo import Solo
from tests.worker.running import Desk, work_process, worker_thread


def test_a_handler_that_kills_its_process_fails_alone(desk: Desk) -> None:
    poison = desk.enqueue("kills", group_key="bob", max_attempts=3)
    innocents = [desk.enqueue("harmless", 1.0, group_key=f"tenant {n}", max_attempts=2) for n in range(3)]
    with work_process(
        desk.dsn, "-p", "2", "-c", "4", "--lease", "1", "--maintain-interval", "0.2", app="poison"
    ) as supervisor:
        desk.wait_until(lambda: desk.outcomes().get("succeeded", 0) == 3, "the innocents end well")
        later = [desk.enqueue("harmless", 0, group_key="later") for _ in range(5)]
        desk.wait_until(lambda: desk.live == 0, "all end")
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait() == 0, supervisor.output
    outcome, _, _, error = desk.end(poison)
    assert (outcome, error["code"]) == ("failed", "worker_lost")
    assert desk.effects("kills") == 3
    for id in innocents:
        assert desk.end(id)[0] == "succeeded"
        assert [how for _, how, _ in desk.attempts(id) if how == "worker_lost"] == ["worker_lost"]
    assert not desk.rows("select from fairq.attempts where task_id = any(%s)", later)


def lose(desk: Desk, count: int = 1) -> None:
    """The first task in line was lost with its worker."""
    gone = desk.one("select fairq.register_worker('gone', array['default'], 9, '1 millisecond')")
    desk.rows("select id from fairq.pop_tasks('default', %s, %s)", count, gone)

    def is_lost() -> bool:
        desk.rows("select fairq.maintain(p_part => 'recovery')")
        return not desk.rows("select from fairq.held where worker_id = %s", gone)

    desk.wait_until(is_lost, "it counts as lost")


class Company:
    """An app whose handlers know what runs beside them."""

    def __init__(self) -> None:
        self.app = fairq.App()
        self.now: set[int] = set()
        self.beside: dict[int, set[int]] = {}
        self.order: list[int] = []
        self.hold = threading.Event()

        @self.app.task
        async def quick(payload: float, ctx: fairq.Context) -> None:
            self.now.add(ctx.id)
            self.order.append(ctx.id)
            for each in self.now:
                self.beside.setdefault(each, set()).update(self.now - {each})
            await asyncio.sleep(payload)
            self.now.remove(ctx.id)

        @self.app.task
        async def held(payload: Any, ctx: fairq.Context) -> None:
            self.now.add(ctx.id)
            await asyncio.to_thread(self.hold.wait)
            self.now.remove(ctx.id)


def test_a_suspect_runs_alone_and_soon_though_others_never_stop_coming(desk: Desk) -> None:
    company = Company()
    suspects = [desk.enqueue("quick", 0.02, group_key="bob") for _ in range(2)]
    lose(desk, 2)
    others = desk.enqueue_many("quick", 500, 0.02)
    with worker_thread(company.app, desk.dsn, concurrency=4):
        desk.wait_until(lambda: desk.live == 0, "all ended")
    assert [company.beside.get(id) for id in suspects] == [set(), set()]
    assert max(len(company.beside.get(id, ())) for id in others) >= 3, "the others run side by side"
    assert max(company.order.index(id) for id in suspects) < 450
    assert all(desk.end(id)[:1] == ("succeeded",) for id in suspects)


def test_a_task_that_ended_an_attempt_by_itself_is_no_longer_suspected(desk: Desk) -> None:
    own, beside = fairq.App(), []

    @own.task(retry=fairq.Backoff(base=0.01, jitter=0))
    async def flaky(payload: Any, ctx: fairq.Context) -> None:
        beside.append(len(running) + 1)
        running.add(ctx.id)
        try:
            if len(beside) == 1:
                raise RuntimeError("by itself")
            await asyncio.sleep(0.3)
        finally:
            running.discard(ctx.id)

    running: set[int] = set()
    id = desk.enqueue("flaky")
    lose(desk)
    assert desk.rows("select losses, max_attempts - attempt from fairq.live_tasks") == [(1, 5)]
    with worker_thread(own, desk.dsn, concurrency=2):
        desk.wait_until(lambda: len(beside) == 2, "the second attempt runs")
        assert desk.rows("select losses, attempt from fairq.live_tasks where id = %s", id) == [(0, 3)]
        desk.enqueue("flaky")
        desk.wait_until(lambda: len(beside) == 3, "and another beside it")
        desk.wait_until(lambda: desk.live == 0, "all ended")
    assert beside == [1, 1, 2]


@contextlib.contextmanager
def beside_one_that_runs_for_long(desk: Desk, company: Company) -> Iterator[tuple[Worker, int]]:
    """A worker with two slots, and a suspect that comes while a handler is held up."""
    suspect = desk.enqueue("quick", 0)
    lose(desk)
    desk.conn.execute("select fairq.pause_group('default', 'bob')")
    with worker_thread(company.app, desk.dsn, concurrency=2, heartbeat_ms=50) as worker:
        desk.enqueue("held", group_key="alice")
        desk.wait_until(lambda: desk.running == 1, "one runs for long")
        desk.conn.execute("select fairq.resume_group('default', 'bob')")
        yield worker, suspect
        company.hold.set()


def test_a_suspect_goes_back_when_the_others_take_too_long_and_burns_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solo, "FIRST_PATIENCE", 0.1)
    company = Company()
    with beside_one_that_runs_for_long(desk, company) as (_, suspect):
        desk.wait_until(lambda: desk.attempts(suspect)[-1][1] == "declined", "it is given back")
        desk.enqueue_many("quick", 20, 0)
        desk.wait_until(lambda: desk.outcomes() == {"succeeded": 20}, "others go on meanwhile")
        company.hold.set()
        desk.wait_until(lambda: desk.live == 0, "all end")
    assert company.beside[suspect] == set()
    assert desk.rows("select max_attempts - attempt from fairq.finished_tasks where id = %s", suspect) == [
        (4,)
    ]


def test_a_suspect_that_waits_can_be_canceled(desk: Desk) -> None:
    company = Company()
    with beside_one_that_runs_for_long(desk, company) as (_, suspect):
        desk.wait_until(
            lambda: desk.rows("select from fairq.live_tasks where state = 'claimed'") != [], "it waits"
        )
        fairq.cancel(desk.conn, suspect)
        desk.wait_until(lambda: desk.outcomes() == {"cancelled": 1}, "it is canceled")
    assert suspect not in company.order


def test_a_suspect_that_waits_goes_back_when_the_worker_ends(desk: Desk) -> None:
    company = Company()
    with beside_one_that_runs_for_long(desk, company) as (worker, suspect):
        desk.wait_until(
            lambda: desk.rows("select from fairq.live_tasks where state = 'claimed'") != [], "it waits"
        )
        worker.stop(now=True)
        desk.wait_until(lambda: desk.workers == 0, "it ended")
    rows = desk.rows(
        "select state, losses, max_attempts - attempt from fairq.live_tasks where id = %s", suspect
    )
    assert rows == [("overflow", 1, 5)]


def test_a_task_with_one_attempt_never_runs_twice(desk: Desk) -> None:
    """Neither after its worker was killed, nor after it was told to end while the task ran."""
    lost = desk.enqueue("only_once", 60)
    with work_process(
        desk.dsn, "-c", "1", "--lease", "1", "--maintain-interval", "0.2", app="poison"
    ) as worker:
        desk.wait_until(lambda: desk.effects("only_once") == 1, "it runs")
        worker.send(signal.SIGKILL)
        worker.wait()
    stopped = desk.enqueue("only_once", 60)
    with work_process(
        desk.dsn, "-c", "1", "--grace", "0", "--maintain-interval", "0.2", app="poison"
    ) as worker:
        desk.wait_until(lambda: desk.outcomes() == {"failed": 1}, "the first is given up")
        desk.wait_until(lambda: desk.effects("only_once") == 2, "the second runs")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
    assert [desk.end(id)[3]["code"] for id in (lost, stopped)] == ["worker_lost", "interrupted"]
    assert desk.effects("only_once") == 2


def test_a_declared_limit_holds_however_a_task_was_enqueued_and_also_for_older_ones(desk: Desk) -> None:
    """Nobody told the database what is declared; one has had its attempt before that."""
    fairq.configure_queue(desk.conn, "default", retry_base=0)
    by_sql = desk.one("select fairq.create_task('bob', '1', p_kind => 'fails_once')")
    by_name = desk.enqueue("fails_once", max_attempts=9)
    older = desk.enqueue("fails_once", priority=9)
    before = desk.one("select fairq.register_worker('older version', '{default}', 1)")
    desk.rows("select id from fairq.pop_tasks('default', 1, %s)", before)
    desk.rows("select fairq.finish_tasks(%s, %s, '{1}', '{retry}')", before, [older])
    with work_process(desk.dsn, "-c", "1", "--drain", app="poison") as worker:
        assert worker.wait() == 0, worker.output
    assert desk.rows("select task_id from effects order by 1") == [(by_sql,), (by_name,)]
    assert [desk.end(id)[:2] for id in (by_sql, by_name, older)] == [
        ("failed", 1),
        ("failed", 1),
        ("failed", 2),
    ]


# --- The decisions, by the clock ---------------------------------------------------------------------


def entry() -> Any:
    return object()


def next_of(decide: Solo, now: float, others: int = 0) -> Any:
    return decide.next(now, others)


def test_suspects_get_half_of_the_time_at_most_while_there_are_others() -> None:
    decide, began, alone = Solo(), 1000.0, 0.0
    now, ran = began, 0
    while now < began + 1000:
        back = decide.admit([entry() for _ in range(4)], now, others=3)
        if not decide.keeps_others_out(now):
            assert len(back) >= 4 or len(decide.waiting) >= 4, "none runs beside others"
            now += 0.5
            continue
        phase = now
        now += 2.0  # the others end
        while decide.keeps_others_out(now):
            suspect = decide.next(now, others=0)
            assert suspect is not None
            decide.begin(suspect)
            now += 7.0
            decide.drop(suspect, now)
            ran += 1
        alone += now - phase
    assert 0.4 * (now - began) < alone < 0.6 * (now - began)
    assert ran > 40


def test_suspects_run_one_after_the_other_if_nothing_else_comes() -> None:
    decide, now = Solo(), 0.0
    suspects = [entry() for _ in range(5)]
    assert decide.admit(suspects, now, others=0) == []
    for suspect in suspects:
        assert next_of(decide, now) is suspect
        decide.begin(suspect)
        assert next_of(decide, now) is None
        now += 60.0
        decide.drop(suspect, now)
        assert next_of(decide, now) is None, "first a look whether there are others"
        assert decide.admit([], now, others=0) == []


def test_patience_doubles_until_the_others_are_through() -> None:
    decide, now = Solo(), 1000.0
    waited = []
    for _ in range(4):
        suspect = entry()
        assert decide.admit([suspect], now, others=1) == []
        assert next_of(decide, now, 1) is None
        assert decide.gives_up_at == now + decide.patience
        waited.append(decide.patience)
        assert decide.give_up(now + decide.patience - 0.01) == []
        now += decide.patience
        assert decide.give_up(now) == [suspect]
        assert decide.admit([suspect], now, others=1) == [suspect], "others have their time first"
        now += waited[-1]
    assert waited == [5, 10, 20, 40]
    assert decide.admit([suspect], now, others=1) == []
    decide.begin(suspect)
    decide.drop(suspect, now + 1)
    assert decide.patience == 5


def test_waiting_suspects_stay_if_the_others_time_is_short() -> None:
    """--drain would end before one that was given back is due again."""
    decide = Solo()
    first, second = entry(), entry()
    assert decide.admit([first], 1000.0, others=0) == []
    decide.begin(first)
    decide.drop(first, 1000.4)
    assert not decide.keeps_others_out(1000.5)
    assert decide.admit([second], 1000.5, others=2) == []
    assert next_of(decide, 1000.6) is None
    assert decide.keeps_others_out(1000.9)
    assert next_of(decide, 1000.9) is second


def test_waiting_suspects_go_back_when_others_come_after_a_phase() -> None:
    decide = Solo()
    first, second = entry(), entry()
    assert decide.admit([first, second], 1000.0, others=1) == []
    assert next_of(decide, 1004.0) is first
    decide.begin(first)
    assert decide.keeps_others_out(4000.0)
    decide.drop(first, 4000.0)
    assert not decide.keeps_others_out(4000.0)
    assert decide.admit([], 4000.0, others=2) == [second]
    assert decide.admit([second], 6999.0, others=2) == [second]
    assert decide.admit([second], 7001.0, others=2) == []
    assert decide.keeps_others_out(7001.0)
