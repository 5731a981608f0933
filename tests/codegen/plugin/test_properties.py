"""What holds for any request: the default writes Python, and differs from strict only where it says so."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from fairq.codegen import sqlalchemy_types
from fairq.codegen.model import GenerationError
from tests.codegen.plugin import sqlc

COMMANDS = st.sampled_from([":one", ":many", ":exec", ":execrows", ":execresult"])
PLAIN_NAMES = st.sampled_from(
    [
        "id",
        "name",
        "a",
        "b",
        "run_at",
        "userID",
        "HTTPCode",
        "group_key",
        "x1",
        "arg",
        "created_at",
        "data",
        "status",
    ]
)
FLAGS = (
    "emit_sync_querier",
    "emit_async_querier",
    "emit_pydantic_models",
    "emit_str_enum",
    "emit_exact_table_names",
)
ODD_NAMES = (
    PLAIN_NAMES | st.sampled_from(["class", "self", "models", "", "?", "1st", "a b", '"', "None"]) | st.text()
)
# The reference has an answer for these, and it is not Any.
PLAIN_TYPES = st.sampled_from(
    [text for text, python in sqlalchemy_types._REFERENCE.items() if python != "memoryview"]
)
ODD_TYPES = PLAIN_TYPES | st.sampled_from(
    ["bytea", "state", "app.level", "time", "text[]", "timestamp with time zone"]
)
PLAIN_TEXT = st.sampled_from(
    ["select 1", "select a::text, ':x' from t where a = $1", "update t set a=$1\nwhere b=$2"]
)
ODD_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))


@st.composite
def requests(draw: st.DrawFn, names: Any, types: Any, texts: Any, comments: Any) -> dict[str, Any]:
    """A request with tables, enums and queries, in sqlc's JSON; class and method names are distinct."""

    def column(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "type": {"name": draw(types)},
            "not_null": draw(st.booleans()),
            "is_array": draw(st.booleans()),
            "comment": draw(comments),
        }

    tables = []
    for number in range(draw(st.integers(0, 3))):
        table = {"name": f"{draw(st.sampled_from(['tasks', 'People', 'news', 'boxes', 'data']))}_{number}s"}
        columns = [column(name) for name in draw(st.lists(names, min_size=1, max_size=4, unique=True))]
        for each in columns:
            each["table"] = table
        tables.append({"rel": table, "columns": columns, "comment": draw(comments)})
    queries = []
    for number in range(draw(st.integers(0, 4))):
        given_names = draw(st.lists(names, max_size=6, unique=True))
        own = [column(name) for name in draw(st.lists(names, min_size=1, max_size=3))]
        queries.append(
            {
                "name": f"{draw(st.sampled_from(['GetUser', 'list_all', 'DoHTTP']))}Q{number}",
                "cmd": draw(COMMANDS),
                "text": draw(texts),
                "filename": draw(st.sampled_from(["query.sql", "other.sql"])),
                "columns": draw(st.sampled_from([own, *(table["columns"] for table in tables)])),
                "params": [{"number": n, "column": column(name)} for n, name in enumerate(given_names, 1)],
            }
        )
    odd = texts is ODD_TEXT
    values = draw(st.lists(texts if odd else names, min_size=0 if odd else 1, max_size=4, unique=True))
    return {
        "settings": {"engine": "postgresql"},
        "catalog": {
            "default_schema": "public",
            "schemas": [
                {"name": "public", "tables": tables, "enums": [{"name": "state", "vals": values}]},
                {
                    "name": "app",
                    "enums": [{"name": "level", "vals": ["on", "in-progress"], "comment": draw(comments)}],
                },
            ],
        },
        "queries": queries,
        "sqlc_version": "v1.31.1",
    }


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    chosen: dict[str, Any] = {flag: draw(st.booleans()) for flag in FLAGS}
    chosen["query_parameter_limit"] = draw(st.sampled_from([None, 1, 2, 10]))
    return {"package": "db", **chosen}


def files(request: dict[str, Any], given_options: dict[str, Any]) -> dict[str, str]:
    encoded = base64.b64encode(json.dumps(given_options).encode()).decode()
    return sqlc.respond(json.dumps({**request, "plugin_options": encoded}).encode())


@given(requests(PLAIN_NAMES, PLAIN_TYPES, PLAIN_TEXT, st.sampled_from(["", "a comment", "it's"])), options())
def test_the_default_is_strict_wherever_the_reference_is_right(
    request: dict[str, Any], options: dict[str, Any]
) -> None:
    assert files(request, options) == files(request, {**options, "strict": True})


@given(requests(ODD_NAMES, ODD_TYPES, ODD_TEXT, ODD_TEXT), options())
def test_the_default_writes_python_whatever_the_names_and_texts(
    request: dict[str, Any], options: dict[str, Any]
) -> None:
    try:
        generated = files(request, options)
    except GenerationError:
        assume(False)
    for name, text in generated.items():
        compile(text, name, "exec")


@given(ODD_TEXT)
def test_a_statement_reaches_sqlalchemy_as_it_was_written(text: str) -> None:
    """The constant holds the text, but for SQLAlchemy's own backslash before a colon and its `:p1`."""
    from fairq.codegen.model import Query
    from fairq.codegen.sqlalchemy import _sql_constant

    assume("$" not in text)
    constant = eval(f'"""{_sql_constant(Query("Q", ":exec", text, "q.sql"), strict=False)}\n"""')
    assert constant.replace("\\:", ":") == text.replace("\\:", ":") + "\n"
