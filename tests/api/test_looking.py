"""Inspecting, cancelling and retrying tasks, one or many, on every kind of connection."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

import fairq
from fairq import dsn
from tests.api.kinds import Opened
from tests.support.database import Database
from tests.support.sessions import call_in_background, pid_of, result, wait_until_blocked


@pytest.fixture
def role() -> str:
    """A role that may look and retry."""
    return "fairq_admin"


def test_a_task_is_seen_while_it_lives_and_afterwards(
    opened: Opened, observer: psycopg.Connection[Any], group: str
) -> None:
    run_at = datetime(2040, 1, 1, tzinfo=UTC)
    id = fairq.enqueue(observer, group, {}, kind="parse", run_at=run_at, priority=3, user="jane")
    live = opened.finish(fairq.get(opened.conn, id))
    assert (live.id, live.queue, live.group_key, live.kind) == (id, "default", group, "parse")
    assert live.user_key == "jane"
    assert (live.state, live.priority, live.attempt, live.run_at) == ("scheduled", 3, 0, run_at)
    assert datetime.now(UTC) - live.created_at < timedelta(minutes=1)
    why = opened.finish(fairq.explain(opened.conn, id))
    assert (why.state, why.next_look_at) == ("scheduled", run_at)
    opened.commit()
    fairq.cancel(observer, id)
    observer.execute("select fairq.promote_overflow('default')")
    ended = opened.finish(fairq.get(opened.conn, id))
    assert (ended.state, ended.user_key, ended.finished_at is not None) == ("cancelled", "jane", True)
    assert opened.finish(fairq.retry(opened.conn, id)) is True
    opened.commit()
    assert fairq.get(observer, id).state == "overflow"
    assert opened.finish(fairq.retry(opened.conn, id)) is False


@pytest.mark.parametrize("function", [fairq.get, fairq.explain])
def test_an_unknown_task_is_an_error(opened: Opened, function: Any) -> None:
    with pytest.raises(fairq.NoSuchTask):
        opened.finish(function(opened.conn, 2**40))


def test_a_pool_of_asyncpg_will_do(shared: Database, observer: psycopg.Connection[Any], group: str) -> None:
    """Each call is a transaction of its own."""
    import asyncpg

    async def work() -> None:
        async with asyncpg.create_pool(dsn.to_url(shared.dsn), min_size=1, max_size=2) as pool:
            id = await fairq.enqueue(pool, group, {"n": 1})
            assert (await fairq.get(pool, id)).group_key == group
            with pytest.raises(fairq.UnknownQueue):
                await fairq.enqueue(pool, group, queue="nowhere")

    asyncio.run(work())
    rows = observer.execute("select payload from fairq.tasks where group_key = %s", [group]).fetchall()
    assert rows == [({"n": 1},)]


def test_many_are_counted_then_cancelled_and_retried(
    opened: Opened, observer: psycopg.Connection[Any], group: str
) -> None:
    queue = f"queue {group}"
    fairq.configure_queue(observer, queue)
    for key, kind in ((5, "parse"), (5, "mail"), (6, "parse"), (7, "mail")):
        fairq.enqueue_many(observer, [(key, {})] * 3, queue=queue, kind=kind)
    fairq.enqueue(observer, 5, {}, kind="parse")  # in another queue

    def many(function: Any, **only: Any) -> int:
        counted = opened.finish(function(opened.conn, queue, **only, dry_run=True))
        done = opened.finish(function(opened.conn, queue, **only))
        assert counted == done
        opened.commit()
        observer.execute("select fairq.promote_overflow(%s)", [queue])
        return int(done)

    def live() -> dict[tuple[str, str], int]:
        query: LiteralString = (
            "select group_key, kind, count(*) from fairq.tasks where queue = %s group by group_key, kind"
        )
        return {(key, kind): number for key, kind, number in observer.execute(query, [queue])}

    assert many(fairq.cancel_many, group_key=5, kind="parse") == 3
    assert many(fairq.cancel_many, kind="mail") == 6
    assert live() == {("6", "parse"): 3}
    assert many(fairq.cancel_many) == 3
    assert live() == {}
    assert many(fairq.retry_many) == 0
    assert many(fairq.retry_many, outcome="cancelled", since=datetime.now(UTC) + timedelta(hours=1)) == 0
    assert many(fairq.retry_many, outcome="cancelled", group_key=5) == 6
    assert live() == {("5", "mail"): 3, ("5", "parse"): 3}
    assert many(fairq.retry_many, outcome="cancelled", since=datetime.now(UTC) - timedelta(hours=1)) == 6
    assert sum(live().values()) == 12


def test_two_who_retry_the_same_tasks_do_not_meet_in_a_circle(shared: Database, group: str) -> None:
    """Both go by the ids; the second one finds them done."""
    first, second, observer = shared.connect(), shared.connect(), shared.connect(autocommit=True)
    queue = f"queue {group}"
    fairq.configure_queue(observer, queue)
    fairq.enqueue_many(observer, [(group, {})] * 5, queue=queue)
    fairq.cancel_many(observer, queue)
    observer.execute("select fairq.promote_overflow(%s)", [queue])
    assert fairq.retry_many(first, queue, outcome="cancelled") == 5
    waiting = call_in_background(lambda: fairq.retry_many(second, queue, outcome="cancelled"))
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.commit()
    assert result(waiting) == 0
    second.commit()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"queue": ""}, fairq.InvalidName),
        ({"kind": 5}, fairq.InvalidName),
        ({"group_key": ""}, fairq.InvalidGroupKey),
        ({"outcome": "succeeded"}, fairq.Refused),
        ({"since": datetime(2030, 1, 1)}, fairq.InvalidTime),
    ],
)
def test_filters_are_looked_at_first(db: psycopg.Connection[Any], arguments: Any, error: Any) -> None:
    with pytest.raises(error) as caught:
        fairq.retry_many(db, **{"queue": "default", **arguments})
    assert caught.value.__cause__ is None
