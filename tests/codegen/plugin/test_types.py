"""From sqlc's text for a type to PostgreSQL's name, and from there to Python's."""

from __future__ import annotations

import pytest

from fairq.codegen import plugin, sqlalchemy_types
from fairq.codegen.model import (
    Catalog,
    Column,
    Composite,
    Domain,
    Enum,
    Name,
    Options,
    Range,
    TypeName,
    Untypable,
)
from fairq.codegen.sqlalchemy_types import PyType, python_type

CATALOG = Catalog(
    types=(
        Enum(Name("public", "state"), ("on",)),
        Domain(Name("public", "amount"), TypeName("pg_catalog", "numeric")),
        Domain(Name("public", "amounts"), TypeName("pg_catalog", "numeric"), dims=1),
        Composite(Name("public", "pair")),
        Range(Name("public", "span"), TypeName("pg_catalog", "float8")),
        Enum(Name("app", "level"), ("low",)),
        Enum(Name("app", "state"), ("x",)),
    )
)


DEFAULT = Options()


def typed(text: str, options: Options = DEFAULT, *, not_null: bool = True) -> PyType:
    type_, dims = plugin.parse_type("", text, CATALOG)
    return python_type(Column("c", type_, not_null=not_null, dims=dims), CATALOG, options)


def annotation(text: str, *, not_null: bool = True) -> str:
    return typed(text, not_null=not_null).annotation


@pytest.mark.parametrize(
    ("schema", "name", "expected", "dims"),
    [
        ("pg_catalog", "int4", "pg_catalog.int4", 0),
        ("", "int", "pg_catalog.int4", 0),
        ("", "pg_catalog.int8", "pg_catalog.int8", 0),
        ("", "bigserial", "pg_catalog.int8", 0),
        ("", "timestamp with time zone", "pg_catalog.timestamptz", 0),
        ("pg_catalog", "varbit", "pg_catalog.varbit", 0),
        ("", "text[]", "pg_catalog.text", 1),
        ("", "text[][]", "pg_catalog.text", 2),
        ("", "_int4", "pg_catalog.int4", 1),
        ("", "_unknown", "._unknown", 0),
        ("", "char", "pg_catalog.char", 0),
        ("", "state", "public.state", 0),
        ("", "level", "app.level", 0),
        ("app", "level", "app.level", 0),
        ("", "app.level", "app.level", 0),
        ("", "citext", ".citext", 0),
        ("ext", "citext", "ext.citext", 0),
        ("", "any", ".", 0),
        ("pg_catalog", "anyelement", ".", 0),
        ("", "", ".", 0),
    ],
)
def test_sqlc_spellings_become_postgresqls_names(schema: str, name: str, expected: str, dims: int) -> None:
    type_, found_dims = plugin.parse_type(schema, name, CATALOG)
    assert (f"{type_.schema}.{type_.name}", found_dims) == (expected, dims)
    assert type_.spelling == (f"{schema}.{name}" if schema else name)


def test_the_reference_and_the_default_agree_wherever_the_reference_has_an_answer() -> None:
    for text, expected in sqlalchemy_types._REFERENCE.items():
        assert typed(text) == PyType(expected), text
        assert typed(text, Options(strict=True)) == PyType(expected), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timestamp with time zone", "datetime.datetime"),
        ("time", "datetime.time"),
        ("character varying", "str"),
        ("pg_catalog.uuid", "uuid.UUID"),
        ("pg_catalog.json", "Any"),
        ("app.level", "models.AppLevel"),
        ("state", "models.State"),
        ("app.state", "models.AppState"),
        ("amount", "decimal.Decimal"),
        ("public.citext", "str"),
        ("text[]", "List[str]"),
    ],
)
def test_the_default_has_real_types_where_the_reference_has_any(text: str, expected: str) -> None:
    assert annotation(text) == expected


def test_nullable_lists_are_optional_outside_the_list() -> None:
    assert annotation("int", not_null=False) == "Optional[int]"
    assert annotation("text[]", not_null=False) == "Optional[List[str]]"


@pytest.mark.parametrize("text", ["pair", "span", "amounts", "point", "int4range", "xid8", "ext.geo", "bit"])
def test_types_that_drivers_read_differently_are_not_guessed(text: str) -> None:
    with pytest.raises(Untypable) as caught:
        typed(text)
    assert "types: {" in caught.value.hint


def test_the_types_option_goes_first_by_either_name() -> None:
    options = Options(types={"pair": "tuple", "app.level": "str", "int4": "bool", "public.span": "object"})
    assert typed("pair", options) == PyType("tuple")
    assert typed("app.level", options) == PyType("str")
    assert typed("int", options) == PyType("bool")
    assert typed("span", options) == PyType("object")


def test_strict_finds_enums_by_their_bare_name_only() -> None:
    strict = Options(strict=True)
    assert typed("state", strict) == PyType("models.State")
    assert typed("level", strict) == PyType("models.AppLevel")
    assert typed("app.level", strict) == PyType("Any")


def test_strict_without_sqlcs_text_reads_postgresqls_name() -> None:
    """The own front end has no spelling: the reference's two ways to write a name are tried."""
    strict = Options(strict=True)
    expectations = {"varchar": "str", "int4": "int", "timetz": "datetime.time", "point": "Any"}
    for name, expected in expectations.items():
        column = Column("c", TypeName("pg_catalog", name), not_null=True)
        assert python_type(column, CATALOG, strict) == PyType(expected)
    enum = Column("c", TypeName("public", "state"), not_null=True)
    assert python_type(enum, CATALOG, strict) == PyType("models.State")
    other = Column("c", TypeName("app", "level"), not_null=True)
    assert python_type(other, CATALOG, strict) == PyType("Any")
