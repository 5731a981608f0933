"""Each library's own way to begin, nest and end a transaction, with fairq inside."""

import asyncio
import subprocess
import sys
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fairq
from fairq import errors
from tests.api.addresses import alchemy_url, django_handler
from tests.support.database import Database


def payloads(observer: psycopg.Connection[Any], group: str) -> list[Any]:
    found = observer.execute("select payload from fairq.tasks where group_key = %s order by id", [group])
    return [row[0] for row in found.fetchall()]


def test_psycopgs_nested_blocks_keep_and_drop_tasks(
    shared: Database, observer: psycopg.Connection[Any], group: str
) -> None:
    conn = shared.connect()
    with conn.transaction():
        fairq.enqueue(conn, group, "kept")
        with pytest.raises(fairq.UnknownQueue), conn.transaction():  # noqa: PT012  # it has to pass through both
            fairq.enqueue(conn, group, "dropped")
            fairq.enqueue(conn, group, queue="nowhere")
        fairq.enqueue(conn, group, "kept, too")
    assert payloads(observer, group) == ["kept", "kept, too"]


def test_psycopgs_pipeline_takes_many_calls(
    shared: Database, observer: psycopg.Connection[Any], group: str
) -> None:
    conn = shared.connect(autocommit=True)
    with conn.pipeline(), conn.transaction():
        for n in range(5):
            fairq.enqueue(conn, group, n)
    assert payloads(observer, group) == [0, 1, 2, 3, 4]


def test_a_pipeline_that_an_error_has_broken_says_so(shared: Database, group: str) -> None:
    conn = shared.connect()
    with conn.pipeline():
        with pytest.raises(errors.UnknownQueue):
            fairq.enqueue(conn, group, queue="nobody's")
        with pytest.raises(errors.TransactionAborted):
            fairq.enqueue(conn, group)
    conn.rollback()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


def test_an_order_and_its_task_commit_together_or_not_at_all(
    shared: Database, observer: psycopg.Connection[Any], group: str
) -> None:
    """S33: the ORM's rows and the task are one transaction, as is a nested one."""
    engine = sqlalchemy.create_engine(alchemy_url(shared.dsn, "psycopg"), poolclass=sqlalchemy.NullPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        order = Order(name="first")
        session.add(order)
        session.flush()
        fairq.enqueue(session, group, {"order": order.id})
        with pytest.raises(fairq.UnknownQueue), session.begin_nested():  # noqa: PT012  # it has to pass through both
            session.add(Order(name="second"))
            fairq.enqueue(session, group, queue="nowhere")
    with pytest.raises(RuntimeError), Session(engine) as session, session.begin():  # noqa: PT012  # it has to pass through both
        session.add(Order(name="third"))
        fairq.enqueue(session, group, "never")
        raise RuntimeError
    assert payloads(observer, group) == [{"order": 1}]
    assert observer.execute("select name from orders").fetchall() == [("first",)]


def test_sqlalchemy_knows_of_the_transaction_that_a_call_begins(
    shared: Database, observer: psycopg.Connection[Any], group: str
) -> None:
    """If fairq used the driver directly, commit() would do nothing and the pool would roll back."""
    engine = sqlalchemy.create_engine(alchemy_url(shared.dsn, "psycopg"))
    with engine.connect() as conn:
        assert not conn.in_transaction()
        fairq.enqueue(conn, group, "committed")
        assert conn.in_transaction()
        conn.commit()
        fairq.enqueue(conn, group, "forgotten")
    engine.dispose()
    assert payloads(observer, group) == ["committed"]


def test_a_sqlalchemy_session_that_is_broken_says_so(shared: Database) -> None:
    engine = sqlalchemy.create_engine(alchemy_url(shared.dsn, "psycopg"), poolclass=sqlalchemy.NullPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Order(id=900, name="a")])
        session.flush()
        session.execute(sqlalchemy.text("set constraints all immediate"))
        session.connection().execute(sqlalchemy.insert(Order).values(id=901, name="b"))
        session.add(Order(id=901, name="c"))
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            session.flush()
        with pytest.raises(fairq.TransactionAborted):
            fairq.enqueue(session, "bob")
        session.rollback()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_async_sqlalchemys_nested_blocks_keep_and_drop_tasks(
    shared: Database, observer: psycopg.Connection[Any], group: str, driver: str
) -> None:
    async def work() -> None:
        engine = create_async_engine(alchemy_url(shared.dsn, driver), poolclass=sqlalchemy.NullPool)
        async with engine.begin() as conn:
            await fairq.enqueue(conn, group, "kept")
            with pytest.raises(fairq.UnknownQueue) as caught:  # noqa: PT012  # it has to pass through both
                async with conn.begin_nested():
                    await fairq.enqueue(conn, group, "dropped")
                    await fairq.enqueue(conn, group, queue="nowhere")
            assert "configure_queue" in (caught.value.hint or "")
            await fairq.enqueue_many(conn, [(group, "kept"), (group, "too")])
        await engine.dispose()

    asyncio.run(work())
    assert payloads(observer, group) == ["kept", "kept", "too"]


def test_djangos_atomic_blocks_keep_and_drop_tasks(
    shared: Database, observer: psycopg.Connection[Any], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S33, S34: `on_commit` is not needed, because the task commits with the rest."""
    handler = django_handler(shared.dsn)
    from django.db import transaction

    monkeypatch.setattr(transaction, "connections", handler, raising=False)
    monkeypatch.setattr("django.db.transaction.get_connection", lambda using=None: handler["default"])
    connection = handler["default"]
    with transaction.atomic():
        fairq.enqueue(connection, group, "kept")
        with pytest.raises(fairq.UnknownQueue), transaction.atomic():  # noqa: PT012  # it has to pass through both
            fairq.enqueue(connection, group, "dropped")
            fairq.enqueue(connection, group, queue="nowhere")
        fairq.enqueue(connection, group, "kept, too")
    with pytest.raises(RuntimeError), transaction.atomic():  # noqa: PT012  # it has to pass through both
        fairq.enqueue(connection, group, "never")
        raise RuntimeError
    connection.close()
    assert payloads(observer, group) == ["kept", "kept, too"]


def test_django_refuses_statements_of_a_block_that_failed(shared: Database) -> None:
    handler = django_handler(shared.dsn)
    connection = handler["default"]
    connection.set_autocommit(False)
    connection.needs_rollback = True
    connection.in_atomic_block = True
    with pytest.raises(fairq.TransactionAborted):
        fairq.enqueue(connection, "bob")
    connection.in_atomic_block = False
    connection.close()


def test_another_database_of_django_is_refused() -> None:
    django_handler("dbname=x")
    from django.db.utils import ConnectionHandler

    handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
    with pytest.raises(fairq.UnsupportedConnection, match="default"):
        fairq.enqueue(handler["default"], "bob")


def test_another_database_of_sqlalchemy_is_refused() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as conn, pytest.raises(fairq.UnsupportedConnection, match="sqlite"):
        fairq.enqueue(conn, "bob")
    with Session(engine) as session, pytest.raises(fairq.UnsupportedConnection, match="sqlite"):
        fairq.enqueue(session, "bob")


def test_no_library_is_imported_that_the_application_did_not_import(shared: Database) -> None:
    """Enqueueing on psycopg loads neither SQLAlchemy nor Django nor asyncpg, pydantic, msgspec."""
    program = """
import sys, dataclasses, psycopg, fairq
@dataclasses.dataclass
class Parse:
    file: str
app = fairq.App()
@app.task
def parse(payload: Parse) -> None: ...
with psycopg.connect(sys.argv[1]) as conn:
    fairq.enqueue(conn, "bob", {"n": 1})
    parse.enqueue(conn, "bob", Parse("a"))
    parse.enqueue_many(conn, [("bob", Parse("a"))])
    try:
        fairq.enqueue(conn, "bob", queue="nowhere")
    except fairq.UnknownQueue:
        conn.rollback()
print(sorted({"sqlalchemy", "django", "asyncpg", "pydantic", "msgspec", "orjson"} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, shared.dsn], capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_importing_fairq_loads_no_driver() -> None:
    """`fairq --help` must not wait for one."""
    program = "import sys, fairq; print([m for m in ('psycopg', 'sqlalchemy') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
