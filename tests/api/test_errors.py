"""The tree of exceptions, and how drivers' errors become fairq's."""

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
from psycopg.conninfo import conninfo_to_dict

import fairq
from fairq import errors
from fairq.errors import BY_SQLSTATE, is_retryable, sqlstate_of, translate, translating
from tests.api.addresses import alchemy_url, django_handler
from tests.support.database import Database

ROOT = Path(errors.__file__).parents[1]
CODE = re.compile(r"\bQF\d{3}\b")


def classes() -> list[type[Exception]]:
    found = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    return [
        each for each in found if issubclass(each, errors.FairqError) and each.__module__ == errors.__name__
    ]


def raised_by_sql() -> set[str]:
    """The codes of class QF in the SQL, without comments."""
    found: set[str] = set()
    for file in [*(ROOT / "sql").rglob("*.sql"), *(ROOT / "migrations").rglob("*.sql")]:
        lines = [line.split("--", 1)[0] for line in file.read_text().splitlines()]
        found |= set(re.findall(r"'(QF\d{3})'", "\n".join(lines)))
    return found


def test_every_code_that_the_engine_raises_has_its_exception_and_no_exception_is_idle() -> None:
    of_the_way_down = {errors.TasksWouldBeLost.sqlstate}  # whose SQL is put together when it is asked for
    known = {code for code in BY_SQLSTATE if code.startswith("QF")}
    assert raised_by_sql() | of_the_way_down == known


def test_every_code_is_documented_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    documented = re.findall(r"^### (QF\d{3}) ", page, re.MULTILINE)
    assert documented == sorted(code for code in BY_SQLSTATE if code.startswith("QF"))
    for code in documented:
        section = page.split(f"### {code} ", 1)[1].split("\n### ", 1)[0]
        assert f"`{BY_SQLSTATE[code].__name__}`" in section, code
        assert "**Cause.**" in section, code
        assert "**Remedy.**" in section, code


def test_every_exception_is_named_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for each in classes():
        assert f"`{each.__name__}`" in page, each


def test_public_names_are_there_and_listed() -> None:
    assert sorted(set(fairq.__all__)) == sorted(fairq.__all__)
    for name in fairq.__all__:
        assert getattr(fairq, name) is not None
    assert set(fairq.__all__) <= set(dir(fairq))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fairq.nothing  # type: ignore[attr-defined]


def raised(conn: psycopg.Connection[Any], statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        conn.execute(statement.encode())
    return caught.value


@pytest.mark.parametrize(
    ("statement", "expected", "retryable"),
    [
        ("select fairq.create_task('')", fairq.DatabaseError, False),
        ("select fairq.create_task('', '{}')", fairq.InvalidGroupKey, False),
        ("select fairq.pop_tasks('default', 1, 99)", errors.UnknownWorker, False),
        ("select fairq.finish_tasks(1, array[1], array[1], array['x'])", errors.UnknownOutcome, False),
        ("select fairq.finish_tasks(1, array[1], array[1, 2])", errors.LengthMismatch, False),
        ("select fairq.no_such_function()", fairq.NotInstalled, False),
        ("select 1 from fairq.no_such_table", fairq.NotInstalled, False),
        ("set local role pg_monitor; select fairq.create_task('a', '{}')", fairq.NotAllowed, False),
        ("do $$ begin raise sqlstate 'QF999' using message = 'of the future'; end $$", fairq.Refused, False),
        ("do $$ begin raise sqlstate '40001'; end $$", fairq.Conflict, True),
        ("do $$ begin raise sqlstate '40P01'; end $$", fairq.Conflict, True),
        ("do $$ begin raise sqlstate '53200'; end $$", fairq.Unavailable, True),
        ("do $$ begin raise sqlstate '57P01'; end $$", fairq.Unavailable, True),
        ("do $$ begin raise sqlstate '08006'; end $$", fairq.Unavailable, True),
        ("do $$ begin raise sqlstate '57014'; end $$", fairq.DatabaseError, False),
        ("do $$ begin raise sqlstate '22P05'; end $$", fairq.DatabaseError, False),
        ("select 1 / 0", fairq.DatabaseError, False),
    ],
)
def test_an_error_of_the_database_becomes_ours_by_its_code(
    db: psycopg.Connection[Any], statement: str, expected: type[errors.FairqError], retryable: bool
) -> None:
    theirs = raised(db, statement)
    ours = translate(theirs)
    assert isinstance(ours, expected)
    assert is_retryable(theirs) is is_retryable(ours) is is_retryable(theirs.sqlstate) is retryable
    if expected is fairq.Refused:
        return  # a code of a newer engine: ours to refuse, whatever it is
    assert sqlstate_of(ours) == theirs.sqlstate == sqlstate_of(theirs)


def test_a_lost_connection_is_unavailable_on_every_driver(database: Database) -> None:
    """It is worth a retry: the transaction was rolled back."""
    killer = database.connect(autocommit=True)
    engine = sqlalchemy.create_engine(alchemy_url(database.dsn, "psycopg"), poolclass=sqlalchemy.NullPool)
    plain = database.connect()
    with engine.connect() as alchemy:
        for conn in (plain, alchemy):
            fairq.enqueue(conn, "bob")
        killer.execute(
            "select pg_terminate_backend(a.pid, 20000) from pg_stat_activity a "
            "where a.pid <> pg_backend_pid() and a.datname = current_database()"
        )
        for conn in (plain, alchemy):
            with pytest.raises(fairq.Unavailable) as caught:
                fairq.enqueue(conn, "bob")
            assert is_retryable(caught.value)
            assert caught.value.__cause__ is not None
        with pytest.raises(fairq.Unavailable):  # now that it is known to be closed
            fairq.enqueue(plain, "bob")
        alchemy.invalidate()


def test_a_lost_connection_is_unavailable_on_asyncpg(database: Database) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    killer = database.connect(autocommit=True)

    async def work() -> None:
        engine = create_async_engine(alchemy_url(database.dsn, "asyncpg"), poolclass=sqlalchemy.NullPool)
        async with engine.connect() as conn:
            await fairq.enqueue(conn, "bob")
            killer.execute(
                "select pg_terminate_backend(a.pid, 20000) from pg_stat_activity a "
                "where a.pid <> pg_backend_pid() and a.datname = current_database()"
            )
            with pytest.raises(fairq.Unavailable):
                await fairq.enqueue(conn, "bob")
            await conn.invalidate()
        await engine.dispose()

    asyncio.run(work())


def test_two_calls_at_once_on_a_connection_of_asyncpg_are_no_reason_to_retry(database: Database) -> None:
    async def work() -> None:
        parts = conninfo_to_dict(database.dsn)
        given: Any = {{"dbname": "database"}.get(name, name): value for name, value in parts.items()}
        conn = await asyncpg.connect(**given)
        both = (fairq.enqueue(conn, "bob"), fairq.enqueue(conn, "bob"))
        found: Any = (await asyncio.gather(*both, return_exceptions=True))[1]
        await conn.close()
        assert isinstance(found, fairq.DatabaseError)
        assert (is_retryable(found), "its own connection" in str(found.hint)) == (False, True)

    asyncio.run(work())


def test_a_session_without_a_bind_says_what_to_pass() -> None:
    with pytest.raises(fairq.DatabaseError) as caught:
        fairq.enqueue(sqlalchemy.orm.Session(), "bob")
    assert "session.connection(bind_arguments=" in str(caught.value.hint)


def test_in_a_coroutine_djangos_connection_says_what_to_do(database: Database) -> None:
    conn = django_handler(database.dsn)["default"]

    async def view() -> None:
        fairq.enqueue(conn, "bob")

    with pytest.raises(fairq.DatabaseError) as caught:
        asyncio.run(view())
    assert "sync_to_async" in str(caught.value.hint)


def test_passwords_do_not_get_into_messages() -> None:
    theirs = psycopg.OperationalError("connection to postgresql://bob:secret@db/shop failed")
    assert "secret" not in str(translate(theirs))


def test_errors_that_are_not_a_drivers_pass_through_untouched() -> None:
    for each in (ValueError("x"), KeyError("y"), fairq.UnknownQueue("z")):
        with pytest.raises(type(each)) as caught, translating():
            raise each
        assert caught.value is each


def test_nothing_is_no_reason_to_retry() -> None:
    assert not is_retryable(None)
    assert not is_retryable(ValueError("x"))
    assert is_retryable(ConnectionRefusedError())
    assert is_retryable("40001")
    assert not is_retryable("23505")
