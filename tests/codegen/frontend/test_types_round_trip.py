"""Every type that users of queues meet, sent by generated code and compared with the answer."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import ipaddress
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from tests.codegen.frontend.build import Package, build, connect, forget
from tests.support.database import Database
from tests.support.server import TestServer, create_database, drop_database

UTC = dt.UTC
WHEN = dt.datetime(2026, 2, 28, 12, 30, 59, 123456, tzinfo=UTC)
NAIVE = dt.datetime(2026, 2, 28, 12, 30, 59, 123456)
AWKWARD = 'a,b {c} "d" \\e\' NULL \n\t ü 漢'

# SQL type: values of it in Python.
PLAIN: dict[str, list[Any]] = {
    "boolean": [True, False],
    "smallint": [-32768, 0, 32767],
    "integer": [-(2**31), 0, 2**31 - 1],
    "bigint": [-(2**63), 5, 2**63 - 1],
    "real": [1.5, float("inf")],
    "double precision": [1.1, -1e300, 3.0, float("-inf")],
    "numeric": [decimal.Decimal("0.10"), decimal.Decimal("123456789012345678901234567890.12345")],
    "numeric(10,2)": [decimal.Decimal("1.25")],
    "text": ["", AWKWARD],
    "varchar(40)": [AWKWARD],
    "character(3)": ["abc"],
    "name": ["tasks"],
    "bytea": [b"", b"\x00\xff'\\"],
    "uuid": [uuid.UUID(int=5)],
    "jsonb": [{"a": [1, None, "ü"]}, [], "text", 5, True],
    "json": [{"a": [1, None, {"b": AWKWARD}]}],
    "date": [dt.date(2026, 2, 28), dt.date(1, 1, 1)],
    "time": [dt.time(23, 59, 59, 999999)],
    "timetz": [dt.time(1, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=-5)))],
    "timestamp": [NAIVE],
    "timestamptz": [WHEN],
    "interval": [dt.timedelta(days=3, seconds=4, microseconds=5), dt.timedelta(seconds=-1)],
    "inet": [
        ipaddress.ip_address("10.0.0.1"),
        ipaddress.ip_interface("10.0.0.1/24"),
        ipaddress.ip_address("::1"),
    ],
    "cidr": [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("2001:db8::/32")],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(4)": ["1010"],
    "bit varying": ["10101"],
    "money": ["$12.50"],
    "oid": [16384],
    "pg_lsn": ["16/B374D848"],
    "point": ["(1,2)"],
    "tsvector": ["'a' 'b'"],
    "int4range": [Range(1, 5), Range(empty=True), Range(None, 7)],
    "int8range": [Range(1, 2**40)],
    "numrange": [Range(decimal.Decimal("1.5"), None)],
    "daterange": [Range(dt.date(2026, 1, 1), dt.date(2026, 2, 1))],
    "tsrange": [Range(NAIVE, None, "(]".replace("]", ")"))],
    "tstzrange": [Range(WHEN, None)],
    "int4multirange": [Multirange([Range(1, 3), Range(7, 9)]), Multirange()],
    "tstzmultirange": [Multirange([Range(WHEN, None)])],
    # of this database
    "mood": ["sad", 'o\'k, "fine"'],
    "app.mood": ["sad"],
    "positive": [7],
    "email": ["a@b"],
    "tag_list": [["a", AWKWARD]],
    "feeling": ["sad"],
    "floatrange": [Range(1.5, 2.5)],
    "floatmultirange": [Multirange([Range(1.5, 2.5)])],
}
SCHEMA = """
create schema app;
create type mood as enum ('sad', 'o''k, "fine"', '');
create type app.mood as enum ('sad', 'glad');
create domain positive as integer check (value > 0);
create domain email as text check (value like '%@%');
create domain tag_list as text[];
create domain feeling as mood;
create type floatrange as range (subtype = float8);
create type point3 as (x double precision, label text, at timestamptz, mood mood, tags text[], n positive);
create type box3 as (low point3, high point3, ranges floatrange[], document jsonb);
"""


def label(sql_type: str) -> str:
    return "".join(part.capitalize() for part in "".join(c if c.isalnum() else " " for c in sql_type).split())


NAMES = {sql_type: label(sql_type) for sql_type in [*PLAIN, "point3", "box3"]}
QUERIES = "\n".join(
    f"-- name: Echo{name}{suffix} :one\nselect sqlc.narg(value)::{sql_type}{dims} as value;\n"
    for sql_type, name in NAMES.items()
    for suffix, dims in (("", ""), ("Array", "[]"))
    if not (dims and sql_type == "tag_list")
)


@pytest.fixture(scope="module")
def types_database(server: TestServer, worker: str) -> Iterator[Database]:
    name = f"fairq_types_{server.run_id}_{worker}"
    create_database(server, name, "template0")
    yield Database(name, server.dsn(name))
    drop_database(server, name)


@pytest.fixture(scope="module")
def package(types_database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    built = build(types_database.dsn, tmp_path_factory.mktemp("types"), SCHEMA, QUERIES)
    yield built
    forget(built)


@pytest.fixture(scope="module")
def conn(types_database: Database) -> Iterator[psycopg.Connection[Any]]:
    with connect(types_database.dsn) as connection:
        yield connection


def python(package: Package, sql_type: str, value: Any) -> Any:
    """The value for generated code: enum members for labels."""
    models = package.module("models")
    classes = {"mood": models.Mood, "feeling": models.Mood, "app.mood": models.AppMood}
    return classes[sql_type](value) if sql_type in classes else value


CASES = [(sql_type, value) for sql_type, values in PLAIN.items() for value in values]


@pytest.mark.parametrize(("sql_type", "value"), CASES, ids=lambda value: str(value)[:30])
def test_a_value_comes_back_as_it_was_sent(
    package: Package, conn: psycopg.Connection[Any], sql_type: str, value: Any
) -> None:
    sent = python(package, sql_type, value)
    echo = getattr(package.module("queries"), f"echo_{_method(sql_type)}")
    got = echo(conn, value=sent)
    assert got == sent
    assert type(got) is type(sent)
    assert echo(conn, value=None) is None


@pytest.mark.parametrize("sql_type", [name for name in PLAIN if name != "tag_list"])
def test_an_array_comes_back_as_it_was_sent(
    package: Package, conn: psycopg.Connection[Any], sql_type: str
) -> None:
    values = [python(package, sql_type, value) for value in PLAIN[sql_type]]
    echo = getattr(package.module("queries"), f"echo_{_method(sql_type)}_array")
    for sent in (values, [*values, None, *values], [], [None]):
        assert echo(conn, value=sent) == sent
    assert echo(conn, value=tuple(values)) == values
    assert echo(conn, value=None) is None


def _method(sql_type: str) -> str:
    from fairq.codegen.names import method_name

    return method_name(label(sql_type))


def test_composites_come_back_as_dataclasses_with_composites_in_them(
    package: Package, conn: psycopg.Connection[Any]
) -> None:
    models, queries = package.module("models"), package.module("queries")
    low = models.Point3(x=1.5, label=AWKWARD, at=WHEN, mood=models.Mood.SAD, tags=["a", AWKWARD, None], n=3)
    high = models.Point3(x=None, label="", at=None, mood=None, tags=[], n=None)
    whole = models.Box3(low=low, high=high, ranges=[Range(1.5, 2.5)], document={"a": [AWKWARD]})
    assert queries.echo_point3(conn, value=low) == low
    assert queries.echo_box3(conn, value=whole) == whole
    assert queries.echo_box3_array(conn, value=[whole, None]) == [whole, None]
    assert queries.echo_point3_array(conn, value=[low, high]) == [low, high]


def test_numbers_of_any_size_share_one_prepared_statement(package: Package, types_database: Database) -> None:
    """For psycopg, 5 and 70000 have two types, which would make two statements in every connection."""
    queries = package.module("queries")
    with connect(types_database.dsn, prepare_threshold=0) as conn:
        for value in (1, 70_000, 2**40, None):
            assert queries.echo_bigint(conn, value=value) == value
        for values in ([1], [70_000], [2**40], []):
            assert queries.echo_bigint_array(conn, value=values) == values
        prepared = conn.execute(
            "select statement, count(*), min(parameter_types::text) from pg_prepared_statements group by 1"
        ).fetchall()
    mine = {
        text.splitlines()[0]: (count, types) for text, count, types in prepared if "-- name: Echo" in text
    }
    assert mine["-- name: EchoBigintArray :one"] == (1, "{bigint[]}")
    # NULL has no type of its own; the numbers share the other one.
    assert mine["-- name: EchoBigint :one"][0] <= 2


def test_values_are_the_same_on_an_async_connection(package: Package, types_database: Database) -> None:
    queries = package.module("queries")

    async def run() -> list[tuple[Any, Any]]:
        async with await psycopg.AsyncConnection.connect(types_database.dsn, autocommit=True) as conn:
            return [
                (await getattr(queries, f"echo_{_method(sql_type)}")(conn, value=sent), sent)
                for sql_type, value in CASES
                for sent in [python(package, sql_type, value)]
            ]

    for got, sent in asyncio.run(run()):
        assert got == sent
        assert type(got) is type(sent)
