"""Looking at a task, and running it again, on every kind of connection."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import fairq
from fairq import dsn
from tests.api.kinds import Opened
from tests.support.database import Database


@pytest.fixture
def role() -> str:
    """Who may look and retry."""
    return "fairq_admin"


def test_a_task_is_seen_while_it_lives_and_afterwards(
    opened: Opened, observer: psycopg.Connection[Any], group: str
) -> None:
    run_at = datetime(2040, 1, 1, tzinfo=UTC)
    id = fairq.enqueue(observer, group, {}, kind="parse", run_at=run_at, priority=3)
    live = opened.finish(fairq.get(opened.conn, id))
    assert (live.id, live.queue, live.group_key, live.kind) == (id, "default", group, "parse")
    assert (live.state, live.priority, live.attempt, live.run_at) == ("scheduled", 3, 0, run_at)
    assert datetime.now(UTC) - live.created_at < timedelta(minutes=1)
    why = opened.finish(fairq.explain(opened.conn, id))
    assert (why.state, why.next_look_at) == ("scheduled", run_at)
    opened.commit()
    fairq.cancel(observer, id)
    observer.execute("select fairq.promote_overflow('default')")
    ended = opened.finish(fairq.get(opened.conn, id))
    assert (ended.state, ended.finished_at is not None) == ("cancelled", True)
    assert opened.finish(fairq.retry(opened.conn, id)) is True
    opened.commit()
    assert fairq.get(observer, id).state == "overflow"
    assert opened.finish(fairq.retry(opened.conn, id)) is False


@pytest.mark.parametrize("function", [fairq.get, fairq.explain])
def test_what_nobody_knows_is_an_error(opened: Opened, function: Any) -> None:
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
