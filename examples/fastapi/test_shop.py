"""Run with pytest. fairq's plugin provides a database, `fairq_dsn`."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, make_url

from fairq import testing


@pytest.fixture(scope="session")
def shop(fairq_dsn: str) -> Any:
    os.environ["DATABASE_URL"] = fairq_dsn
    import shop

    shop.Base.metadata.create_all(create_engine(make_url(fairq_dsn).set(drivername="postgresql+psycopg")))
    return shop


@pytest.fixture
def client(shop: Any) -> Iterator[TestClient]:
    """The whole application, with the worker of its lifespan."""
    with TestClient(shop.api) as client:
        yield client


def test_an_upload_is_split_while_the_client_waits(client: TestClient) -> None:
    bob = {"X-User": "bob"}
    answer = client.post("/uploads", headers={**bob, "text": "x" * 25})
    assert answer.status_code == 202
    upload = answer.json()["upload"]
    shown = client.get(f"/uploads/{upload}", params={"wait": 20}, headers=bob)
    assert shown.json() == {"upload": upload, "state": "succeeded", "pages": 3}
    assert client.get(f"/uploads/{upload}", headers={"X-User": "alice"}).status_code == 404


def test_in_one_transaction_that_is_rolled_back(shop: Any) -> None:
    """Without a worker: the request, then the tasks that it enqueued, on the test's session."""

    async def work() -> None:
        async with shop.Session() as session:

            async def of_the_test() -> AsyncIterator[Any]:
                yield session

            shop.api.dependency_overrides[shop.transaction] = of_the_test
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(shop.api), base_url="http://shop"
            ) as client:
                answer = await client.post("/uploads", headers={"X-User": "bob", "text": "y" * 15})
            (waiting,) = await testing.enqueued(session, task=shop.split)
            assert (waiting.group_key, waiting.payload) == ("bob", shop.Split(**answer.json()))
            (ran,) = await testing.drain(session, shop.tasks)
            assert (ran.outcome, ran.result) == ("succeeded", 2)
            await session.rollback()
        await shop.engine.dispose()

    try:
        asyncio.run(work())
    finally:
        shop.api.dependency_overrides.clear()
