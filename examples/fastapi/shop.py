"""Uploads of many users, cut into pages in the background. Run it: uvicorn shop:api"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import fairq

DSN = os.environ["DATABASE_URL"]  # postgresql://…
engine = create_async_engine(make_url(DSN).set(drivername="postgresql+psycopg"))
autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
Session = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase): ...


class Upload(Base):
    __tablename__ = "uploads"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str]
    text: Mapped[str]
    pages: Mapped[int | None]
    task: Mapped[int | None]


# --- Tasks -------------------------------------------------------------------------------------------


class Split(BaseModel):
    upload: int


tasks = fairq.App(session=Session)


@tasks.task(store_result=True)
async def split(payload: Split, ctx: fairq.Context) -> int:
    """The pages are stored and the task ends in one transaction."""
    upload: Upload = await ctx.session.get_one(Upload, payload.upload)
    pages = upload.pages = 1 + len(upload.text) // 10
    return pages


# --- The API -----------------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    worker = fairq.Worker(tasks, DSN)
    working = asyncio.create_task(worker.arun())
    yield
    worker.stop()
    await working
    await engine.dispose()


api = FastAPI(lifespan=lifespan)


async def transaction() -> AsyncIterator[AsyncSession]:
    async with Session.begin() as session:
        yield session


# Commits before the response is sent. The default scope would commit afterwards: a client could ask for what
# is not there yet, and would not hear of a failed commit.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]
User = Annotated[str, Header(alias="X-User")]  # in a real application: who has logged in


@api.post("/uploads", status_code=202)
async def create(text: Annotated[str, Header()], user: User, session: Transaction) -> dict[str, Any]:
    upload = Upload(owner=user, text=text)
    session.add(upload)
    await session.flush()  # now it has an id
    upload.task = await split.enqueue(session, user, Split(upload=upload.id))
    return {"upload": upload.id}


@api.get("/uploads/{id}")
async def show(id: int, user: User, wait: float = 0) -> dict[str, Any]:
    async with Session() as session:
        upload = await session.get(Upload, id)
    if upload is None or upload.owner != user or upload.task is None:
        raise HTTPException(404)
    async with autocommit.connect() as conn:  # so that the wait keeps no transaction open
        try:
            ended = await split.result(conn, upload.task, timeout=min(wait, 30))
        except fairq.ResultTimeout:
            return {"upload": id, "state": "waits"}
    return {"upload": id, "state": ended.outcome, "pages": ended.result}
