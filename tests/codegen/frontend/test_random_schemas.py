"""Random schemas: what is generated from them compiles, keeps its layout, and moves random values both
ways.
"""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from psycopg.types.range import Range

from tests.codegen.frontend.build import build, connect, forget
from tests.support.database import Database
from tests.support.server import TestServer, create_database, drop_database

# PostgreSQL stores no NUL, and UTF-8 has no surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORD = st.text(
    st.characters(min_codepoint=33, max_codepoint=300, exclude_characters="\0"), min_size=1, max_size=12
)
TAKEN = ["id", "class", "from", "int", "str", "uuid", "datetime", "decimal", "list", "driver", "models"]
TAKEN += ["conn", "rows", "row", "value", "Any", "self", "type"]
NAME = st.one_of(
    WORD,
    st.sampled_from(TAKEN),
)
WHEN = st.datetimes(dt.datetime(1, 1, 3), dt.datetime(9999, 12, 29), timezones=st.just(dt.UTC))
DECIMAL = st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True)
class Type:
    """A SQL type and its values."""

    sql: str
    values: st.SearchStrategy[Any]
    label_of: str = ""  # for an enum: its SQL name
    composite: tuple[Type, ...] = ()
    array: bool = False


PLAIN = [
    Type("boolean", st.booleans()),
    Type("smallint", st.integers(-(2**15), 2**15 - 1)),
    Type("integer", st.integers(-(2**31), 2**31 - 1)),
    Type("bigint", st.integers(-(2**63), 2**63 - 1)),
    Type("double precision", st.floats(allow_nan=False)),
    # Where a result comes as text, a real is the shortest decimal that stands for it, not its exact value.
    Type("real", st.integers(-(2**10), 2**10).map(lambda eighths: eighths / 8)),
    Type("numeric", DECIMAL),
    Type("text", TEXT),
    Type("varchar", TEXT),
    Type("bytea", st.binary(max_size=8)),
    Type("uuid", st.uuids()),
    Type("date", st.dates()),
    Type("timestamptz", WHEN),
    Type("timestamp", WHEN.map(lambda when: when.replace(tzinfo=None))),
    Type("time", st.times()),
    Type("interval", st.timedeltas(dt.timedelta(days=-10_000), dt.timedelta(days=10_000))),
    Type("jsonb", JSON.filter(lambda value: value is not None)),
    Type("int8range", st.integers(-(2**40), 2**40).map(lambda low: Range(low, low + 5))),
    Type("bit varying", st.text("01", max_size=9)),
]


@dataclass(frozen=True)
class Schema:
    sql: str
    columns: tuple[tuple[str, Type, bool], ...]  # name, type, not null


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    statements: list[str] = []
    types = list(PLAIN)
    for number in range(draw(st.integers(0, 2))):
        labels = draw(st.lists(WORD, min_size=1, max_size=4, unique=True))
        statements.append(f"create type mood{number} as enum ({', '.join(map(literal, labels))})")
        types.append(Type(f"mood{number}", st.sampled_from(labels), label_of=f"mood{number}"))
    for number in range(draw(st.integers(0, 2))):
        base = draw(st.sampled_from(types))
        statements.append(f"create domain kind{number} as {base.sql}")
        types.append(replace(base, sql=f"kind{number}"))
    for number in range(draw(st.integers(0, 2))):
        fields = draw(st.lists(st.sampled_from(types), min_size=1, max_size=4))
        fields = [array(field) if draw(st.booleans()) and not field.array else field for field in fields]
        listed = ", ".join(f"f{index} {field.sql}" for index, field in enumerate(fields))
        statements.append(f"create type pair{number} as ({listed})")
        values = st.tuples(*(st.none() | field.values for field in fields))
        types.append(Type(f"pair{number}", values, composite=tuple(fields)))
    names = draw(st.lists(NAME, min_size=1, max_size=8, unique=True))
    columns = []
    for name in names:
        type_ = draw(st.sampled_from(types))
        if draw(st.integers(0, 3)) == 0:
            type_ = array(type_)
        columns.append((name, type_, draw(st.booleans())))
    definition = ", ".join(
        f"{quoted(name)} {type_.sql}{' not null' if never else ''}" for name, type_, never in columns
    )
    statements.append(f"create table things ({definition})")
    return Schema(";\n".join(statements), tuple(columns))


def array(type_: Type) -> Type:
    # In the text of an array an unquoted NULL is SQL's; ours is quoted when it is a word.
    return Type(
        f"{type_.sql}[]",
        st.lists(st.none() | type_.values, max_size=3),
        type_.label_of,
        type_.composite,
        True,
    )


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def generated_form(type_: Type, value: Any, models: Any) -> Any:
    """The value in generated code: enum members and dataclasses for composites."""
    if value is None:
        return None
    if type_.array:
        element = replace(type_, array=False)
        return [generated_form(element, item, models) for item in value]
    if type_.label_of:
        return getattr(models, type_.label_of.capitalize())(value)
    if type_.composite:
        class_ = getattr(
            models, next(name for name in dir(models) if name.lower() == type_.sql.removesuffix("[]"))
        )
        parts = zip(type_.composite, value, strict=True)
        return class_(*(generated_form(part, item, models) for part, item in parts))
    return value


@pytest.fixture(scope="module")
def random_database(server: TestServer, worker: str) -> Iterator[Database]:
    name = f"fairq_random_{server.run_id}_{worker}"
    create_database(server, name, "template0")
    yield Database(name, server.dsn(name))
    drop_database(server, name)


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(schema=schemas(), data=st.data())
def test_a_random_table_moves_random_values_both_ways(
    random_database: Database, schema: Schema, data: st.DataObject
) -> None:
    note(schema.sql)
    names = ", ".join(quoted(name) for name, _, _ in schema.columns)
    numbers = ", ".join(f"${number}" for number in range(1, len(schema.columns) + 1))
    queries = (
        f"-- name: AddThing :one\ninsert into things ({names}) values ({numbers}) returning *;\n"
        f"-- name: ListThings :many\nselect * from things;\n"
        f"-- name: CopyThings :copyfrom\ninsert into things ({names}) values ({numbers});\n"
        f"-- name: OneColumn :many\nselect {quoted(schema.columns[0][0])} as x from things;\n"
    )
    with connect(random_database.dsn) as conn:
        conn.execute("drop schema public cascade; create schema public")
    with tempfile.TemporaryDirectory() as folder:
        package = build(random_database.dsn, Path(folder), schema.sql, queries)
        try:
            keeps_its_layout(package.folder)
            models, module = package.module("models"), package.module("queries")
            rows = [
                [
                    generated_form(
                        type_, data.draw(type_.values if never else st.none() | type_.values), models
                    )
                    for _, type_, never in schema.columns
                ]
                for _ in range(2)
            ]
            with connect(random_database.dsn) as conn:
                row_class = module.CopyThingsRow if len(schema.columns) > 1 else lambda value: value
                assert module.copy_things(conn, [row_class(*row) for row in rows[1:]]) == 1
                names_of = [
                    name for name in module.add_thing.__annotations__ if name not in ("conn", "return")
                ]
                given_row = module.add_thing(conn, **dict(zip(names_of, rows[0], strict=True)))
                stored = module.list_things(conn)
                first = module.one_column(conn)
            assert [plain(given_row), *map(plain, stored)] == [rows[0], rows[1], rows[0]]
            assert first == [rows[1][0], rows[0][0]]
        finally:
            forget(package)


def plain(row: Any) -> list[Any]:
    """A row as a list; with one column, its value."""
    slots = getattr(type(row), "__slots__", None)
    if (
        slots is None
        or type(row).__module__.split(".")[0][:9] != "generated"
        or not type(row).__name__.startswith("Thing")
    ):
        return [row]
    return [getattr(row, slot) for slot in slots]


def keeps_its_layout(folder: Path) -> None:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
