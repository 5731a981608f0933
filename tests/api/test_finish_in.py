"""A handler ends its task in its own transaction, on every kind of connection."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import fairq
from tests.api.kinds import Opened
from tests.support.calls import release
from tests.support.database import Database
from tests.support.sessions import in_background, pid_of, wait_until_blocked
from tests.support.sessions import result as finished


class Taker:
    """A worker's connection: it pops, and checks what is still held."""

    def __init__(self, conn: psycopg.Connection[Any], observer: psycopg.Connection[Any]) -> None:
        self.conn = conn
        self.observer = observer
        row = conn.execute("select fairq.register_worker('w', array['default'], 1)").fetchone()
        assert row is not None
        self.id: int = row[0]

    def pop(self, group: str) -> fairq.Context:
        """Pop until a task of this group comes, and give back the others."""
        while True:
            row = self.conn.execute(
                "select t.id, t.attempt, t.max_attempts, t.group_key, t.queue, t.kind"
                " from fairq.pop_tasks('default', 1, %s) t",
                [self.id],
            ).fetchone()
            assert row is not None
            id, attempt, max_attempts, group_key, queue, kind = row
            if group_key == group:
                return fairq.Context(id, attempt, max_attempts, group_key, queue, kind, self.id)
            self.finish(id, attempt)

    def finish(self, id: int, attempt: int) -> list[Any]:
        return self.conn.execute(
            "select fairq.finish_tasks(%s, array[%s::bigint], array[%s::integer])", [self.id, id, attempt]
        ).fetchall()

    def holds(self, ctx: fairq.Context) -> bool:
        found = self.conn.execute(
            "select fairq.held_tasks(%s, array[%s::bigint], array[%s::integer])",
            [self.id, ctx.id, ctx.attempt],
        )
        return found.fetchone() is not None

    def outcome(self, id: int) -> Any:
        row = self.observer.execute(
            "select f.outcome, f.result from fairq.finished_tasks f where f.id = %s", [id]
        ).fetchone()
        return row


@pytest.fixture
def role() -> str:
    """A handler's connection has the worker's user."""
    return "fairq_work"


@pytest.fixture
def taker(shared: Database, observer: psycopg.Connection[Any], role: str) -> Iterator[Taker]:
    conn = shared.connect_as(role, autocommit=True)
    yield Taker(conn, observer)
    conn.close()


def test_effects_and_end_commit_together(opened: Opened, taker: Taker, group: str) -> None:
    fairq.enqueue(taker.conn, group)
    ctx = taker.pop(group)
    opened.finish(fairq.enqueue(opened.conn, f"{group} effect"))
    opened.finish(ctx.finish_in(opened.conn, {"n": 1}))
    assert ctx.finished_in
    assert taker.outcome(ctx.id) is None
    assert not taker.holds(ctx)  # locked by the open transaction, and so not in doubt
    opened.commit()
    assert taker.outcome(ctx.id) == ("succeeded", {"n": 1})
    assert not taker.holds(ctx)
    assert taker.finish(ctx.id, ctx.attempt) == []  # what the worker says afterwards changes nothing
    effects = taker.conn.execute("select count(*) from fairq.tasks where group_key = %s", [f"{group} effect"])
    assert effects.fetchone() == (1,)


def test_a_rollback_takes_back_effects_and_end(opened: Opened, taker: Taker, group: str) -> None:
    fairq.enqueue(taker.conn, group)
    ctx = taker.pop(group)
    opened.finish(fairq.enqueue(opened.conn, f"{group} effect"))
    opened.finish(ctx.finish_in(opened.conn))
    opened.rollback()
    assert taker.holds(ctx)
    assert taker.finish(ctx.id, ctx.attempt) != []
    effects = taker.conn.execute("select count(*) from fairq.tasks where group_key = %s", [f"{group} effect"])
    assert effects.fetchone() == (0,)


def test_ending_a_task_twice_is_an_error(opened: Opened, taker: Taker, group: str) -> None:
    fairq.enqueue(taker.conn, group)
    ctx = taker.pop(group)
    opened.finish(ctx.finish_in(opened.conn))
    with pytest.raises(fairq.NotHeld) as caught:
        opened.finish(ctx.finish_in(opened.conn))
    assert "Call it once" in str(caught.value.hint)
    opened.rollback()


def test_a_former_holder_cannot_end_the_task_and_rolls_back(opened: Opened, taker: Taker, group: str) -> None:
    """I10: another worker has the task by now."""
    fairq.enqueue(taker.conn, group)
    ctx = taker.pop(group)
    release(taker.conn, taker.id, [ctx.id], 1)
    with pytest.raises(fairq.NotHeld, match=f"task {ctx.id}"):
        opened.finish(ctx.finish_in(opened.conn))
    assert not ctx.finished_in
    opened.rollback()
    again = taker.pop(group)
    assert again.id == ctx.id


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_two_who_end_the_same_attempt_wait_for_each_other_and_one_wins(
    shared: Database, taker: Taker, group: str, ending: str
) -> None:
    """A worker that considers a slow handler lost does not end the task twice."""
    fairq.enqueue(taker.conn, group)
    ctx = taker.pop(group)
    handler, observer = shared.connect(), shared.connect(autocommit=True)
    ctx.finish_in(handler)
    late = in_background(
        taker.conn,
        "select fairq.finish_tasks(%s, array[%s::bigint], array[%s::integer])",
        [taker.id, ctx.id, ctx.attempt],
    )
    assert wait_until_blocked(observer, pid_of(taker.conn)) == [pid_of(handler)]
    getattr(handler, ending)()
    assert finished(late) == ([] if ending == "commit" else [(ctx.id,)])


def test_under_a_snapshot_from_before_the_loss_it_is_a_conflict(
    shared: Database, taker: Taker, group: str
) -> None:
    """REPEATABLE READ cannot see that another worker has the task. It fails, and nothing is done twice."""
    fairq.enqueue(taker.conn, group)
    ctx = taker.pop(group)
    handler = shared.connect()
    handler.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    handler.execute("select 1 from fairq.tasks limit 1")
    release(taker.conn, taker.id, [ctx.id], 1)
    with pytest.raises((fairq.Conflict, fairq.NotHeld)):
        ctx.finish_in(handler)
    handler.rollback()
