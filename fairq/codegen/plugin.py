"""`sqlc-gen-fairq`: the sqlc process plugin.

sqlc starts it once per `codegen` entry, writes a request to its stdin and reads the generated files from its
stdout. Messages go to stderr; sqlc shows them when the exit code is not 0.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psycopg import adapters

from fairq.codegen import parse, remarks
from fairq.codegen.model import (
    SYSTEM_SCHEMAS,
    Catalog,
    Column,
    Command,
    Composite,
    Enum,
    GenerationError,
    Name,
    Parameter,
    Query,
    Relation,
    Request,
    TypeName,
    UserType,
    parse_options,
    words,
)

_METHOD = "/plugin.CodegenService/Generate"
_NAME_LINE = re.compile(r"^\s*(?:--|#|/\*)\s*name:\s+(\S+)", re.MULTILINE)


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Answer the request on stdin, and return the exit code."""
    if arguments and arguments[0] != _METHOD:
        hint = "sqlc starts this program: name it as `process: {cmd: sqlc-gen-fairq}` under `plugins`"
        print(f"sqlc-gen-fairq: unknown method {arguments[0]!r}\nhint: {hint}", file=sys.stderr)
        return 2
    try:
        answer = respond(sys.stdin.buffer.read())
    except GenerationError as exc:
        print(exc, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return 0


def respond(data: bytes) -> bytes:
    """The response to one request, in the request's own form."""
    try:
        # Imported here so that a missing extra `codegen` gives a message, not a traceback.
        from fairq.codegen import generate, protocol

        request = to_model(protocol.read_request(data))
        return protocol.write_response(generate(request), json=protocol.is_json(data))
    except ModuleNotFoundError as exc:
        hint = 'install the generator: pip install "fairq[codegen]"'
        raise GenerationError(f"{exc.name} is not installed", hint=hint) from exc


def to_model(message: Any) -> Request:
    """sqlc's request as the model that both front ends fill."""
    try:
        options = parse_options(json.loads(message.plugin_options or b"{}"))
    except ValueError as exc:
        raise GenerationError(f"the plugin's options are not JSON: {exc}") from exc
    # Every request of sqlc also describes PostgreSQL's own 200 tables.
    schemas = [schema for schema in message.catalog.schemas if schema.name not in SYSTEM_SCHEMAS]
    # User types first, because columns may name them without their schema.
    types = Catalog((), tuple(_user_types(schemas)), message.catalog.default_schema)

    def column(described: Any) -> Column:
        # The reference does not recognise an array in a type's text, such as `text[]`.
        return _column(described, types, text_says_array=not options.strict)

    relations = tuple(
        Relation(Name(schema.name, table.rel.name), tuple(map(column, table.columns)), table.comment)
        for schema in schemas
        for table in schema.tables
    )
    request = Request(
        catalog=replace(types, relations=relations),
        queries=_queries(message, column),
        options=options,
        engine=message.settings.engine,
        version=f"sqlc {message.sqlc_version}",
    )
    return request if options.strict else replace(request, queries=tuple(map(remarks.apply, request.queries)))


def _user_types(schemas: Iterable[Any]) -> Iterator[UserType]:
    for schema in schemas:
        for enum in schema.enums:
            yield Enum(Name(schema.name, enum.name), tuple(enum.vals), enum.comment)
        for composite in schema.composite_types:
            yield Composite(Name(schema.name, composite.name), comment=composite.comment)


def _queries(message: Any, column: Callable[[Any], Column]) -> tuple[Query, ...]:
    places = _places(message.settings.queries)
    queries: list[Query] = []
    for query in message.queries:
        path, line = places.get((query.filename, query.name), ("", 0))
        queries.append(
            Query(
                name=query.name,
                cmd=query.cmd,
                text=query.text,
                source=query.filename,
                params=tuple(Parameter(each.number, column(each.column)) for each in query.params),
                columns=tuple(map(column, query.columns)),
                comments=tuple(query.comments),
                one_row=query.cmd == Command.ONE and _gives_one_row(query.text),
                insert_into=_name(query.insert_into_table) if query.HasField("insert_into_table") else None,
                path=path,
                line=line,
            )
        )
    return tuple(queries)


_NOT_ONE_ROW = words("group having limit offset fetch union intersect except over window")
_AGGREGATES = words("count sum min max avg bool_and bool_or every string_agg array_agg json_agg jsonb_agg")


def _gives_one_row(sql: str) -> bool:
    """Whether it is a SELECT of only values and calls (not of sets), or of aggregates over all rows."""
    depth = 0
    outside: list[str] = []
    listed: set[str] = set()
    for token in parse.tokens(sql):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if token.kind == "word":
            word = token.text.lower()
            if not {"from", "where"} & set(outside):
                listed.add(word if depth == 0 or word != "select" else "")
            if depth == 0:
                outside.append(word)
    if outside[:1] != ["select"] or _NOT_ONE_ROW & {*outside, *listed}:
        return False
    return not {"from", "where"} & set(outside) or ("" not in listed and bool(_AGGREGATES & listed))


def _places(given: Iterable[str]) -> dict[tuple[str, str], tuple[str, int]]:
    """File and line of each query, by file name and query name; sqlc's request has no lines."""
    places: dict[tuple[str, str], tuple[str, int]] = {}
    for path in map(Path, given):
        for file in sorted(path.glob("*.sql")) if path.is_dir() else [path]:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            for found in _NAME_LINE.finditer(text):
                line = text.count("\n", 0, found.start(1)) + 1
                places.setdefault((file.name, found[1]), (str(file), line))
    return places


def _column(column: Any, types: Catalog, *, text_says_array: bool) -> Column:
    type_, dims_in_text = parse_type(column.type.schema, column.type.name, types)
    dims = max(column.array_dims, 1) if column.is_array else 0
    return Column(
        name=column.name,
        type=type_,
        not_null=column.not_null,
        dims=dims or (dims_in_text if text_says_array else 0),
        comment=column.comment,
        table=_name(column.table) if column.HasField("table") else None,
        original_name=column.original_name,
        embed=_name(column.embed_table) if column.HasField("embed_table") else None,
    )


def _name(identifier: Any) -> Name:
    return Name(identifier.schema, identifier.name)


# --- Types ------------------------------------------------------------------------------------------
# sqlc sends what it read: the parser's name (`pg_catalog.int4`), the user's (`timestamptz`, `status`), or
# that of its table of functions (`timestamp with time zone`, `text[]`). For a view's column it joins schema
# and name with a dot. psycopg knows most names, and all spellings that PostgreSQL itself writes.

_SPELLED = dict(
    pair.split("=")
    for pair in words(
        """smallserial=int2 serial2=int2 int=int4 serial=int4 serial4=int4 bigserial=int8 serial8=int8
        float=float8 double=float8 decimal=numeric string=text blob=bytea char=char
        pg_snapshot=pg_snapshot void=void"""
    )
)
# What sqlc sends if it does not know a type: for polymorphic functions, and for expressions.
_UNKNOWN = words(
    """any unknown anyelement anyarray anynonarray anyenum anyrange anymultirange anycompatible
    anycompatiblearray anycompatiblenonarray anycompatiblerange anycompatiblemultirange"""
)


def parse_type(schema: str, name: str, catalog: Catalog | None = None) -> tuple[TypeName, int]:
    """The type, and the array dimensions in its text. `catalog` has the schemas of user types."""
    spelling = f"{schema}.{name}" if schema else name
    text, dims = spelling, 0
    while text.endswith("[]"):
        text, dims = text.removesuffix("[]"), dims + 1
    in_schema, _, bare = text.rpartition(".")
    if in_schema in ("", "pg_catalog"):
        if not dims and bare.startswith("_") and _built_in(bare[1:]):
            bare, dims = bare[1:], 1
        if bare in _UNKNOWN or not bare:
            return TypeName("", "", spelling), dims
        if built_in := _built_in(bare):
            return TypeName("pg_catalog", built_in, spelling), dims
    type_ = TypeName(in_schema, bare, spelling)
    if not in_schema and catalog and (user_type := catalog.user_type(type_)):
        type_ = TypeName(user_type.name.schema, bare, spelling)
    return type_, dims


def _built_in(bare: str) -> str:
    known = adapters.types.get(bare)
    return _SPELLED.get(bare) or (known.name if known else "")
