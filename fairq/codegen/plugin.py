"""`sqlc-gen-fairq`: the sqlc process plugin.

sqlc starts it once per `codegen` entry, writes a request to its stdin and reads the generated files from its
stdout. Anything else on stdout would spoil the answer, so messages go to stderr; sqlc shows them when the
exit code is not 0.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fairq.codegen import checks, protocol, spelling
from fairq.codegen.model import (
    Catalog,
    Column,
    Composite,
    Enum,
    GenerationError,
    Name,
    Parameter,
    Query,
    Relation,
    Request,
    Schema,
)
from fairq.codegen.options import parse_options

_METHOD = "/plugin.CodegenService/Generate"
_NAME_LINE = re.compile(r"^\s*(?:--|#|/\*)\s*name:\s+(\S+)", re.MULTILINE)


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Answer the request on stdin; the exit code."""
    if arguments and arguments[0] != _METHOD:
        print(
            f"sqlc-gen-fairq: unknown method {arguments[0]!r}\n"
            "hint: sqlc starts this program: name it as `process: {cmd: sqlc-gen-fairq}` under `plugins`",
            file=sys.stderr,
        )
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
    # Imported here: a template's modules are of no use to who only reads requests.
    from fairq.codegen import generate

    request = to_model(protocol.read_request(data))
    return protocol.write_response(generate(request), json=protocol.is_json(data))


def to_model(message: Any) -> Request:
    """sqlc's request as the model that both front ends fill."""
    options = parse_options(_json_object(message.plugin_options or b"{}"))
    # Enums first: a column that names one without its schema needs them to be told where it is.
    enums_only = _catalog(message.catalog, None)
    request = Request(
        catalog=_catalog(message.catalog, enums_only),
        queries=_queries(message, enums_only),
        options=options,
        engine=message.settings.engine,
        version=f"sqlc {message.sqlc_version}",
    )
    if not options.strict:
        checks.refuse_records(request.queries)
    return request


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        options = json.loads(data)
    except ValueError as exc:
        raise GenerationError(f"the plugin's options are not JSON: {exc}") from exc
    if not isinstance(options, dict):
        raise GenerationError("the plugin's options must be a map")
    return options


def _catalog(message: Any, known: Catalog | None) -> Catalog:
    """The catalogue; without `known` types, its enums and composites only."""
    default = message.default_schema
    return Catalog(
        tuple(
            Schema(
                name=schema.name,
                relations=_relations(schema, known) if known else (),
                enums=tuple(
                    Enum(Name(schema.name, each.name), tuple(each.vals), each.comment)
                    for each in schema.enums
                ),
                composites=tuple(
                    Composite(Name(schema.name, each.name), comment=each.comment)
                    for each in schema.composite_types
                ),
                comment=schema.comment,
            )
            for schema in message.schemas
            # sqlc describes PostgreSQL's own 200 tables in every request; nothing is generated for them.
            if schema.name not in ("pg_catalog", "information_schema")
        ),
        default,
    )


def _relations(schema: Any, known: Catalog) -> tuple[Relation, ...]:
    return tuple(
        Relation(
            Name(schema.name, table.rel.name),
            tuple(_column(column, known) for column in table.columns),
            table.comment,
        )
        for table in schema.tables
    )


def _queries(message: Any, known: Catalog) -> tuple[Query, ...]:
    places = _places(message.settings.queries)
    return tuple(
        Query(
            name=query.name,
            cmd=query.cmd,
            text=query.text,
            source=query.filename,
            params=tuple(Parameter(each.number, _column(each.column, known)) for each in query.params),
            columns=tuple(_column(column, known) for column in query.columns),
            comments=tuple(query.comments),
            insert_into=_name(query.insert_into_table) if query.HasField("insert_into_table") else None,
            path=places.get((query.filename, query.name), ("", 0))[0],
            line=places.get((query.filename, query.name), ("", 0))[1],
        )
        for query in message.queries
    )


def _places(given: Iterable[str]) -> dict[tuple[str, str], tuple[str, int]]:
    """File and line of each query, by file name and query name; sqlc's request has no lines.

    sqlc runs a plugin where it runs itself, and names query files from there. What cannot be read is left
    out: a message without a line is better than none.
    """
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


def _column(column: Any, known: Catalog) -> Column:
    type_, dims = spelling.parse_type(column.type.schema, column.type.name, known)
    declared = max(column.array_dims, 1) if column.is_array else 0
    return Column(
        name=column.name,
        type=type_,
        not_null=column.not_null,
        dims=declared or dims,
        comment=column.comment,
        table=_name(column.table) if column.HasField("table") else None,
        original_name=column.original_name,
        embed=_name(column.embed_table) if column.HasField("embed_table") else None,
        is_named_param=column.is_named_param,
        is_func_call=column.is_func_call,
        is_slice=column.is_sqlc_slice,
    )


def _name(identifier: Any) -> Name:
    return Name(identifier.schema, identifier.name)
