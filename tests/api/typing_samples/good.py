"""Uses of fairq that a type checker must accept, with the right types of answers."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import uuid4

import psycopg
import psycopg_pool
import pydantic
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fairq
from fairq import driver, testing
from fairq.queries import client


@dataclasses.dataclass
class Parse:
    file: str


class Mail(pydantic.BaseModel):
    to: str


app = fairq.App(queue="docs", retry=fairq.Backoff(on=(OSError,)))


@app.task
def parse(payload: Parse) -> int:
    return len(payload.file)


@app.task(kind="mail", timeout=timedelta(seconds=5), store_result=True)
async def mail(payload: Mail, ctx: fairq.Context) -> dict[str, str]:
    if ctx.cancelled:
        raise fairq.Cancelled("stop")
    await ctx.cancelled
    return {"to": payload.to}


@app.task(store_result=True)
def split(*, file: str, pages: int = 1) -> list[str]:
    return [file] * pages


@app.task
def tick() -> None: ...


@app.task(batch=50)
def index(pages: list[Parse], ctx: fairq.Batch) -> list[Exception | None]:
    return [
        ValueError(page.file) if each.cancelled else None for page, each in zip(pages, ctx.tasks, strict=True)
    ]


class Asyncpg:
    """asyncpg has no types; its stubs declare this."""

    async def fetch(self, query: str, *args: Any, record_class: type | None = None) -> list[Any]:
        return []


def timed(ctx: fairq.Context, call_next: Callable[[], Any]) -> Any:
    return call_next()


async def atimed(ctx: fairq.Context, call_next: Callable[[], Any]) -> Any:
    return await call_next()


@contextlib.asynccontextmanager
async def pool() -> AsyncIterator[int]:
    yield 1


around = fairq.App(
    middleware=[timed, (timed, atimed)], lifespan=pool, session=sessionmaker(create_engine("x"))
)


def calling(ctx: fairq.Context) -> None:
    assert_type(parse(Parse("a")), int)
    waiting: Coroutine[Any, Any, dict[str, str]] = mail(Mail(to="bob"), ctx)
    waiting.close()
    assert_type(split(file="a", pages=2), list[str])
    tick()


def sync(
    plain: psycopg.Connection[Any],
    tuples: psycopg.Connection[tuple[Any, ...]],
    alchemy: Connection,
    session: Session,
    scoped: scoped_session[Session],
    ctx: fairq.Context,
) -> None:
    for conn in (plain, tuples):
        assert_type(fairq.enqueue(conn, "bob", {"n": 1}), int)
    assert_type(fairq.enqueue(alchemy, "bob"), int)
    assert_type(fairq.enqueue(session, "bob"), int)
    assert_type(fairq.enqueue(scoped, "bob"), int)
    assert_type(fairq.enqueue_many(plain, [("bob", 1), ("alice", "x")]), list[int])
    assert_type(fairq.enqueue_many(session, [fairq.Item("bob", 1, cost=2)]), list[int])
    assert_type(parse.enqueue(session, "bob", Parse("a"), run_at=datetime.now(UTC)), int)
    assert_type(mail.enqueue_many(plain, [("bob", Mail(to="x"))], priority=3), list[int])
    assert_type(fairq.cancel(session, 1), bool)
    assert_type(fairq.configure_queue(plain, "docs", max_running=3, rate_period=60), fairq.QueueState)
    assert_type(fairq.configure_group(session, "docs", "bob", weight=2, rate_limit=None), fairq.GroupState)
    assert_type(fairq.configure_key(alchemy, "printer", max_running=2), fairq.KeySettings)
    assert_type(fairq.configure_cluster(scoped, max_running=None), fairq.ClusterSettings)
    fairq.pause_queue(plain, "docs")
    fairq.drain_queue(session, "docs")
    assert_type(fairq.purge_group(plain, "docs", "bob"), int)
    assert_type(fairq.rate_usage(plain, "docs"), fairq.RateUsage | None)
    assert_type(fairq.budget_usage(session, "docs", "bob"), fairq.BudgetUsage | None)
    fairq.hold_group(plain, "docs", "bob", timedelta(minutes=10))
    fairq.hold_key(scoped, "printer", None)
    assert_type(fairq.result(plain, 1, timeout=1.5), fairq.TaskResult[Any])
    assert_type(split.result(plain, 1), fairq.TaskResult[list[str]])
    assert_type(mail.result(session, 1).value(), dict[str, str])
    assert_type(split.enqueue(plain, 5, split.arguments(file="a"), delay=timedelta(hours=1)), int)
    assert_type(split.enqueue(plain, uuid4(), {"file": "a"}), int)
    assert_type(tick.enqueue(session, "bob", priority=2), int)
    assert_type(fairq.get(plain, 1), fairq.TaskInfo)
    assert_type(fairq.explain(plain, 1), fairq.Explanation)
    assert_type(fairq.retry(session, 1), bool)
    ctx.enqueue(parse, Parse("a"), group_key=5)
    assert_type(index.enqueue(plain, "bob", Parse("a")), int)
    assert_type(fairq.progress(plain, 1), fairq.Progress | None)
    assert_type(testing.drain(plain, app), list[testing.Ran])
    assert_type(testing.enqueued(session), list[testing.Enqueued])
    ctx.finish_in(plain, {"done": True})
    cancel, live = client.cancel.call(id=1), client.live_tasks.call()
    assert_type(driver.run_pipeline(plain, cancel, live), tuple[bool, list[client.LiveTasksRow]])
    assert_type(driver.run_pipeline(plain, cancel, cancel, cancel, cancel), tuple[bool, ...])


def many(conn: psycopg.Connection[Any]) -> None:
    def pairs() -> Iterator[tuple[str, Parse]]:
        yield "bob", Parse("a")

    parse.enqueue_many(conn, pairs())


async def asynchronous(
    plain: psycopg.AsyncConnection[Any],
    alchemy: AsyncConnection,
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    raw: Asyncpg,
    ctx: fairq.Context,
) -> None:
    assert_type(await fairq.enqueue(plain, "bob", {"n": 1}), int)
    assert_type(await fairq.enqueue(alchemy, "bob"), int)
    assert_type(await fairq.configure_queue(alchemy, "docs", retention=timedelta(days=1)), fairq.QueueState)
    await fairq.resume_group(session, "docs", "bob")
    assert_type(await fairq.rate_usage(scoped, "docs", "bob"), fairq.RateUsage | None)
    assert_type(await fairq.enqueue(session, "bob"), int)
    assert_type(await fairq.enqueue(scoped, "bob"), int)
    assert_type(await parse.enqueue(session, "bob", Parse("a")), int)
    assert_type(await fairq.enqueue_many(plain, []), list[int])
    assert_type(await fairq.cancel(plain, 1), bool)
    assert_type(await fairq.result(plain, 1), fairq.TaskResult[Any])
    assert_type(await mail.result(plain, 1), fairq.TaskResult[dict[str, str]])
    assert_type((await split.result(session, 1)).value(), list[str])
    assert_type(await tick.enqueue(plain, "bob"), int)
    assert_type(await fairq.enqueue(raw, "bob"), int)
    assert_type(await parse.enqueue(raw, "bob", Parse("a")), int)
    assert_type(await testing.drain(plain, app), list[testing.Ran])
    await ctx.finish_in(plain)
    first, second = await asyncio.gather(fairq.enqueue(plain, "a"), fairq.enqueue(plain, "b"))
    assert_type(first + second, int)


def pooled(pool: psycopg_pool.ConnectionPool) -> None:
    with pool.connection() as conn:
        assert_type(fairq.enqueue(conn, "bob"), int)
