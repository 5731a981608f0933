"""What an application puts around its handlers: middleware and lifespans."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

import fairq
import fairq.dsn
from fairq import testing
from fairq.worker import LifespanFailed, Worker
from tests.api.addresses import alchemy_url
from tests.worker.running import Desk, drain

seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def outer(ctx: fairq.Context, call_next: Callable[[], Any]) -> Any:
    seen.append(("outer", ctx.kind))
    try:
        return call_next()
    finally:
        seen.append("outer ends")


def inner(ctx: fairq.Context, call_next: Callable[[], Any]) -> Any:
    seen.append(("inner", ctx.id))
    try:
        return [call_next(), "of inner"]
    except ValueError as exc:
        raise fairq.Fail("seen by inner", code="seen") from exc


async def aouter(ctx: fairq.Context, call_next: Callable[[], Any]) -> Any:
    await asyncio.sleep(0)
    seen.append(("aouter", ctx.kind))
    return [await call_next(), "of aouter"]


app = fairq.App(middleware=[outer, inner, aouter])


@app.task(store_result=True)
def works(payload: str) -> str:
    if payload == "breaks":
        raise ValueError(payload)
    seen.append(payload)
    return payload


@app.task(store_result=True)
async def waits(payload: str) -> str:
    await asyncio.sleep(0)
    seen.append(payload)
    return payload


def test_the_first_is_outermost_and_sees_how_the_handler_ended(desk: Desk) -> None:
    ended = desk.enqueue("works", "a")
    failed = desk.enqueue("works", "breaks")
    drain(app, desk.dsn, concurrency=1)
    assert seen == [
        *[("outer", "works"), ("inner", ended), "a", "outer ends"],
        *[("outer", "works"), ("inner", failed), "outer ends"],
    ]
    assert desk.end(ended)[:3] == ("succeeded", 1, ["a", "of inner"])
    outcome, _, _, error = desk.end(failed)
    assert (outcome, error["code"]) == ("failed", "seen")


def test_async_ones_are_around_async_handlers_and_the_others_around_the_others(desk: Desk) -> None:
    id = desk.enqueue("waits", "b")
    drain(app, desk.dsn)
    assert seen == [("aouter", "waits"), "b"]
    assert desk.end(id)[2] == ["b", "of aouter"]


def test_a_payload_that_does_not_fit_is_seen_as_well(desk: Desk) -> None:
    id = desk.enqueue("works", 5)
    drain(app, desk.dsn)
    assert seen == [("outer", "works"), ("inner", id), "outer ends"]
    assert desk.end(id)[3]["code"] == "payload_invalid"


def test_middleware_that_forgets_to_await_does_not_count_as_done(desk: Desk) -> None:
    async def forgets(ctx: fairq.Context, call_next: Callable[[], Any]) -> Any:
        return call_next()

    own = fairq.App(middleware=[forgets])

    @own.task(max_attempts=1)
    async def never(payload: None) -> None:
        seen.append("ran")

    id = desk.enqueue("never")
    drain(own, desk.dsn)
    assert seen == []
    assert desk.end(id)[0] == "failed"


def test_middleware_that_fits_no_handler_is_a_problem() -> None:
    own = fairq.App(middleware=[outer, aouter])
    own.task(kind="sync")(lambda payload: None)
    (problem,) = own.problems()
    assert "aouter" in problem
    own.include(fairq.App())
    with pytest.raises(fairq.ConfigurationError, match="included"):
        fairq.App().include(own)


@contextlib.contextmanager
def pool() -> Iterator[dict[str, str]]:
    seen.append("open")
    yield {"pool": "of connections"}
    seen.append("closed")


@contextlib.asynccontextmanager
async def apool() -> AsyncIterator[dict[str, str]]:
    with pool() as opened:
        await asyncio.sleep(0)
        yield opened


def app_living(lifespan: Any) -> fairq.App:
    own = fairq.App(lifespan=lifespan)

    @own.task
    def asks(payload: Any, ctx: fairq.Context) -> None:
        seen.append(ctx.state)

    return own


@pytest.mark.parametrize("lifespan", [pool, apool])
def test_the_lifespans_state_exists_from_the_first_handler_to_the_last(desk: Desk, lifespan: Any) -> None:
    desk.enqueue_many("asks", 2)
    drain(app_living(lifespan), desk.dsn)
    assert seen == ["open", {"pool": "of connections"}, {"pool": "of connections"}, "closed"]


def test_a_retired_worker_is_not_considered_lost_while_the_lifespan_ends(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Its keeper watches the loop to the end, but sends no heartbeats for a retired worker."""

    @contextlib.asynccontextmanager
    async def ends_slowly() -> AsyncIterator[None]:
        yield
        assert desk.one("select count(*) from fairq.workers") == 0
        await asyncio.sleep(0.3)

    desk.enqueue("asks")
    drain(app_living(ends_slowly), desk.dsn, heartbeat_ms=50)
    assert "is considered lost" not in caplog.text


def test_a_worker_whose_lifespan_fails_takes_no_task(desk: Desk) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise OSError("no model here")
        yield

    id = desk.enqueue("asks")
    with pytest.raises(LifespanFailed, match=r"broken did not start: OSError: no model") as caught:
        Worker(app_living(broken), desk.dsn, mode="drain").run()
    assert isinstance(caught.value.__cause__, OSError)
    assert desk.one("select attempt from fairq.live_tasks where id = %s", id) == 0
    assert desk.workers == 0


def test_tests_run_handlers_with_all_of_it(db: psycopg.Connection[Any]) -> None:
    fairq.enqueue(db, "bob", "a", kind="works")
    (ran,) = testing.drain(db, app)
    assert ran.result == ["a", "of inner"]
    seen.clear()
    fairq.enqueue(db, "bob", kind="asks")
    testing.drain(db, app_living(pool))
    assert seen == ["open", {"pool": "of connections"}, "closed"]
    fairq.enqueue(db, "bob", kind="asks")
    with pytest.raises(fairq.ConfigurationError, match="lifespan is async"):
        testing.drain(db, app_living(apool))
    testing.drain(db, app_living(apool), state="of the test")
    assert seen[-1] == "of the test"


# --- A session that commits with the end -------------------------------------------------------------


def paying(opener: Any, is_async: bool) -> fairq.App:
    """A handler with an effect, a follow-up task, and sometimes an error after both."""
    own = fairq.App()

    def effect(ctx: fairq.Context) -> Any:
        write = "insert into effects values (default, 'paid', {}, 1, 0, 0)".format(ctx.id)  # noqa: UP032, S608
        return sqlalchemy.text(write) if hasattr(ctx.session, "get_bind") else write

    @own.task
    def receipt(payload: str) -> None: ...

    if is_async:

        @own.task(kind="pay", session=opener, store_result=True, max_attempts=1)
        async def apay(payload: str, ctx: fairq.Context) -> str:
            await ctx.session.execute(effect(ctx))
            await ctx.enqueue(receipt, payload)
            assert payload != "breaks"
            return payload

    else:

        @own.task(session=opener, store_result=True, max_attempts=1)
        def pay(payload: str, ctx: fairq.Context) -> str:
            ctx.session.execute(effect(ctx))
            ctx.enqueue(receipt, payload, group_key="alice")
            assert payload != "breaks"
            return payload

    return own


@contextlib.contextmanager
def opener_of(name: str, dsn: str) -> Iterator[tuple[Any, bool]]:
    """What an application may pass as `session=`, and whether it is for async handlers."""
    if name == "psycopg":
        yield lambda: psycopg.connect(dsn), False
    elif name == "psycopg pool":
        with psycopg_pool.ConnectionPool(dsn, min_size=1, open=True) as pool:
            yield pool.connection, False
    elif name == "sessionmaker":
        engine = sqlalchemy.create_engine(alchemy_url(dsn, "psycopg"), poolclass=sqlalchemy.NullPool)
        yield sessionmaker(engine), False
    elif name == "asyncpg":

        @contextlib.asynccontextmanager
        async def connected(ctx: fairq.Context) -> AsyncIterator[Any]:
            conn = await asyncpg.connect(fairq.dsn.to_url(dsn))
            try:
                async with conn.transaction():
                    yield conn
            finally:
                await conn.close()

        yield connected, True
    else:
        aengine = create_async_engine(alchemy_url(dsn, "asyncpg"), poolclass=sqlalchemy.NullPool)
        yield async_sessionmaker(aengine), True


@pytest.mark.parametrize("name", ["psycopg", "psycopg pool", "sessionmaker", "asyncpg", "async_sessionmaker"])
def test_effects_follow_ups_and_the_end_commit_together_or_not_at_all(desk: Desk, name: str) -> None:
    with opener_of(name, desk.dsn) as (opener, is_async):
        own = paying(opener, is_async)
        paid, broken = desk.enqueue("pay", "works"), desk.enqueue("pay", "breaks")
        drain(own, desk.dsn)
    assert desk.end(paid) == ("succeeded", 1, "works", None)
    assert desk.end(broken)[0] == "failed"
    assert desk.rows("select task_id from effects") == [(paid,)]
    followed = desk.rows("select group_key, outcome from fairq.finished_tasks where kind = 'receipt'")
    assert followed == [("bob" if is_async else "alice", "succeeded")]


def test_a_result_that_cannot_be_stored_takes_the_effects_back(desk: Desk) -> None:
    own = fairq.App(session=lambda: psycopg.connect(desk.dsn))

    @own.task(store_result=True)
    def pay(payload: None, ctx: fairq.Context) -> object:
        ctx.session.execute("insert into effects values (default, 'paid', 1, 1, 0, 0)")
        return object()

    id = desk.enqueue("pay")
    drain(own, desk.dsn)
    outcome, attempt, _, error = desk.end(id)
    assert (outcome, attempt, error["code"]) == ("failed", 1, "result_invalid")
    assert desk.effects("paid") == 0


def test_a_handler_that_was_not_run_at_all_takes_the_effects_back(desk: Desk) -> None:
    own = fairq.App(session=lambda: psycopg.connect(desk.dsn))

    @own.task(max_attempts=1)
    def pay(payload: None, ctx: fairq.Context) -> Any:
        ctx.session.execute("insert into effects values (default, 'paid', 1, 1, 0, 0)")
        return (each for each in [ctx])

    id = desk.enqueue("pay")
    drain(own, desk.dsn)
    assert desk.end(id)[0] == "failed"
    assert desk.effects("paid") == 0


def test_a_session_that_does_not_suit_its_handler_is_told_and_closed(desk: Desk) -> None:
    own, opened = fairq.App(), [psycopg.connect(desk.dsn)]

    @own.task(session=lambda: opened[0], max_attempts=1)
    async def pay(payload: None) -> None: ...

    id = desk.enqueue("pay")
    drain(own, desk.dsn)
    assert "async context manager" in desk.end(id)[3]["hint"]
    assert opened[0].closed


def test_a_handler_without_a_session_cannot_enqueue_in_it() -> None:
    with pytest.raises(fairq.ConfigurationError, match="no session"):
        testing.context().enqueue(works, "a")


def test_in_a_drain_the_session_is_the_connection_of_the_test(db: psycopg.Connection[Any]) -> None:
    own = paying_in_tests()
    fairq.enqueue(db, "bob", 1, kind="count_down")
    ran = testing.drain(db, own)
    assert [(each.payload, each.group_key, each.outcome) for each in ran] == [
        (1, "bob", "succeeded"),
        (0, "bob", "succeeded"),
    ]


def paying_in_tests() -> fairq.App:
    def never() -> Any:
        raise AssertionError

    own = fairq.App(session=never)

    @own.task
    def count_down(payload: int, ctx: fairq.Context) -> None:
        if payload:
            ctx.enqueue(count_down, payload - 1)

    return own


def yielding(ctx: Any = None, call_next: Any = None) -> Iterator[Any]:
    yield call_next


async def ayielding(ctx: Any = None, call_next: Any = None) -> AsyncIterator[Any]:
    yield call_next


@pytest.mark.parametrize(
    "options",
    [
        {"middleware": [3]},
        {"middleware": [(lambda ctx, call_next: call_next(), "x")]},
        {"middleware": lambda ctx, call_next: call_next()},
        {"middleware": [yielding]},
        {"middleware": [ayielding]},
        {"lifespan": 3},
        {"lifespan": yielding},
        {"lifespan": ayielding},
    ],
)
def test_what_cannot_go_around_a_handler_is_refused_where_it_is_declared(options: Any) -> None:
    with pytest.raises(fairq.ConfigurationError) as caught:
        fairq.App(**options)
    assert caught.value.hint
