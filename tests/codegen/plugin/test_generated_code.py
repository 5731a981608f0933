"""What the sqlalchemy template generates imports, type-checks, and moves values to and from PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import importlib
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import psycopg.types.range
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
from psycopg.types.json import Json, Jsonb

from tests.codegen.plugin import sqlc
from tests.support.database import Database
from tests.support.mypy import said_of

# The two things the reference writes that mypy's strict mode does not take; its bytes are the contract.
ACCEPTED = (
    re.compile(r'Missing type arguments for generic type "Result'),
    re.compile(r"Returning Any from function declared to return"),  # return row[0]
)

Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Load]:
    """Imports the golden files of a directory as package `generated`; gives its module `query`."""

    def load(name: str) -> Any:
        shutil.copytree(sqlc.GOLDEN / name / "expected", tmp_path / "generated")
        return importlib.import_module("generated.query")

    monkeypatch.syspath_prepend(tmp_path)
    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "generated"]:
        del sys.modules[name]


def prepare(database: Database, name: str) -> None:
    with database.connect() as conn:
        conn.execute((sqlc.GOLDEN / name / "schema.sql").read_bytes())


def engine(database: Database) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(database.dsn),
        poolclass=sqlalchemy.NullPool,
    )


def async_engine(database: Database) -> sqlalchemy.ext.asyncio.AsyncEngine:
    return sqlalchemy.ext.asyncio.create_async_engine(
        "postgresql+psycopg://",
        async_creator=lambda: psycopg.AsyncConnection.connect(database.dsn),
        poolclass=sqlalchemy.NullPool,
    )


def test_golden_files_type_check_but_for_two_things_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mypy --strict; each directory becomes a package of its own, prefixed so that none hides a library."""
    for directory in sqlc.golden_directories():
        package = tmp_path / f"golden_{directory.name}"
        package.mkdir()
        for name, text in sqlc.files_in(directory / "expected").items():
            importable = package / name.replace("-", "_")
            importable.write_text(text.replace("from generated import", f"from {package.name} import"))
    monkeypatch.chdir(tmp_path)
    assert [line for line in said_of(".") if not any(each.search(line) for each in ACCEPTED)] == []


@pytest.mark.parametrize(
    "directory", [pytest.param(path, id=path.name) for path in sqlc.golden_directories()]
)
def test_golden_files_compile(directory: Path) -> None:
    for name, text in sqlc.files_in(directory / "expected").items():
        compile(text, name, "exec")


def values(models: Any) -> dict[str, Any]:
    """One value of every type; those that PostgreSQL or a driver would round or shift are in."""
    east = datetime.timezone(datetime.timedelta(hours=2))
    return {
        "small": -32768,
        "whole": 2**31 - 1,
        "big": -(2**63),
        "exact": decimal.Decimal("-12345678901.23450"),
        "rough": 0.1,
        "yes": True,
        "body": "a: 'quoted' \\ :p1 %s $1 ü",
        "short": "",
        "fixed": "abc",
        "raw": b"\x00\xff",
        "key": uuid.UUID("0189d7c4-8c5a-7c3e-9b1a-3f2d5c6b7a80"),
        "extra": {"a": [1, None, "x"]},
        "plain": [True],
        "day": datetime.date(2024, 2, 29),
        "clock": datetime.time(23, 59, 59, 999999),
        "zoned": datetime.time(1, 2, 3, tzinfo=east),
        "wall": datetime.datetime(1999, 12, 31, 23, 59, 59, 1),
        "moment": datetime.datetime(2024, 3, 31, 2, 30, tzinfo=east),
        "span": datetime.timedelta(days=40, seconds=3, microseconds=5),
        "mood": models.Mood.CROSS,
        "shift": models.ClinicShift.NIGHT_LATE,
        "counts": [1, -2],
        "words": ["a", "b c", ""],
        "moments": [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)],
        "maybe": None,
    }


def parameters(query: Any) -> tuple[Any, dict[str, Any]]:
    """The Params object, and what should come back. Documents need psycopg's wrapper on the way in."""
    expected = values(query.models)
    given = {**expected, "extra": Jsonb(expected["extra"]), "plain": Json(expected["plain"])}
    return query.AddSampleParams(**given), expected


def plain(row: Any) -> dict[str, Any]:
    return {each.name: getattr(row, each.name) for each in dataclasses.fields(row)}


def test_every_type_comes_back_as_it_went_in(load: Load, empty_database: Database) -> None:
    prepare(empty_database, "round_trip")
    query = load("round_trip")
    given, expected = parameters(query)
    with engine(empty_database).begin() as conn:
        querier = query.Querier(conn)
        added = querier.add_sample(given)
        assert isinstance(added, query.models.Sample)
        assert plain(added) == {"id": 1, **expected}
        assert list(querier.all_samples()) == [added]
        assert list(querier.bodies(query.BodiesParams(shift=query.models.ClinicShift.NIGHT_LATE))) == [
            added.body
        ]
        assert list(querier.bodies(query.BodiesParams(shift=query.models.ClinicShift.DAY))) == []
        day = query.models.SampleDay(id=1, day=added.day, shift="night/late", words=added.words)
        assert list(querier.days()) == [day]


def test_every_command_does_what_it_says(load: Load, empty_database: Database) -> None:
    prepare(empty_database, "round_trip")
    query = load("round_trip")
    given, _ = parameters(query)
    with engine(empty_database).begin() as conn:
        querier = query.Querier(conn)
        for _number in range(3):
            querier.add_sample(given)
        assert querier.reword(query.RewordParams(words=None, ids=[1, 3, 99])) == 2
        assert [row.words for row in querier.all_samples()] == [None, ["a", "b c", ""], None]
        result = querier.touch(query.TouchParams(maybe=7))
        assert isinstance(result, sqlalchemy.engine.Result)
        assert [row.maybe for row in querier.all_samples()] == [7, 7, 7]
        assert querier.forget(query.ForgetParams(id=2)) is None
        assert [row.id for row in querier.all_samples()] == [1, 3]


def test_the_asynchronous_querier_does_the_same(load: Load, empty_database: Database) -> None:
    prepare(empty_database, "round_trip")
    query = load("round_trip")
    given, expected = parameters(query)

    async def work() -> None:
        async with async_engine(empty_database).begin() as conn:
            querier = query.AsyncQuerier(conn)
            added = await querier.add_sample(given)
            assert plain(added) == {"id": 1, **expected}
            assert [row async for row in querier.all_samples()] == [added]
            assert [row.words async for row in querier.days()] == [added.words]
            assert await querier.reword(query.RewordParams(words=["x"], ids=[1])) == 1
            result = await querier.touch(query.TouchParams(maybe=7))
            assert isinstance(result, sqlalchemy.engine.Result)
            assert await querier.forget(query.ForgetParams(id=1)) is None
            assert [row async for row in querier.all_samples()] == []

    asyncio.run(work())


def test_one_gives_none_where_there_is_no_row(load: Load, empty_database: Database) -> None:
    prepare(empty_database, "embed")
    query = load("embed")
    with engine(empty_database).begin() as conn:
        assert query.Querier(conn).just_book(id=1) is None


def test_an_embedded_table_comes_back_as_its_model(load: Load, empty_database: Database) -> None:
    prepare(empty_database, "embed")
    query = load("embed")
    with engine(empty_database).begin() as conn:
        conn.exec_driver_sql("insert into authors values (7, 'Ann')")
        conn.exec_driver_sql("insert into books values (1, 7, 'Title')")
        book, author = query.models.Book(1, 7, "Title"), query.models.Author(7, "Ann")
        assert query.Querier(conn).just_book(id=1) == book
        assert list(query.Querier(conn).with_author()) == [query.WithAuthorRow(book, author, 5)]


def test_backslashes_quotes_and_dollars_in_a_statement_reach_postgresql(
    load: Load, empty_database: Database
) -> None:
    """The reference writes them as they are: its constant has a line end where the SQL has `\\n`."""
    prepare(empty_database, "escaping")
    query = load("escaping")
    with engine(empty_database).begin() as conn:
        # The pattern is ^\\d+:\\s$, so only the first one matches.
        for number, body in enumerate(["12: ", "12:", "ab: ", "\n", "$1"]):
            conn.execute(
                sqlalchemy.text("insert into notes values (:id, :body, 10)"), {"id": number, "body": body}
            )
        assert list(query.Querier(conn).digits(price=decimal.Decimal(5))) == [0]
        assert list(query.Querier(conn).digits(price=decimal.Decimal(50))) == []
        assert len(list(query.Querier(conn).quoted())) == 5


def test_pydantic_models_are_made_from_rows(load: Load, empty_database: Database) -> None:
    prepare(empty_database, "round_trip_pydantic")
    query = load("round_trip_pydantic")
    calm = query.models.Mood.CALM
    with engine(empty_database).begin() as conn:
        querier = query.Querier(conn)
        added = querier.add_sample(id=1, mood=calm, raw=b"\x00", words=["a"])
        assert added == query.models.Sample(id=1, mood=calm, raw=b"\x00", words=["a"])
        assert added.mood is calm
        assert list(querier.moods()) == [query.MoodsRow(mood=calm, found=1)]


def test_a_type_named_by_the_types_option_comes_back_as_that(load: Load, empty_database: Database) -> None:
    """A domain and a range: sqlc's request knows neither, the option says what the driver gives."""
    prepare(empty_database, "types_option")
    query = load("types_option")
    with engine(empty_database).begin() as conn:
        conn.exec_driver_sql(
            "insert into offers values (1, 9.99, '[3,5)', null, array['[1,2)', '[4,)']::int4range[]), "
            "(2, 20, null, null, '{}')"
        )
        querier = query.Querier(conn)
        assert list(querier.cheaper_than(price=decimal.Decimal(10))) == [
            query.CheaperThanRow(id=1, price=decimal.Decimal("9.99"))
        ]
        assert querier.pages_of(id=1) == psycopg.types.range.Range(3, 5)
        assert querier.pages_of(id=2) is None
