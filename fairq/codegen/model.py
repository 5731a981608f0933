"""The model between front ends and templates.

Two front ends fill it: the sqlc process plugin (`fairq.codegen.plugin`) from sqlc's request, and `fairq gen`
from PostgreSQL's own catalogue. The templates (`sqlalchemy`, `psycopg`) read nothing else.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairq.codec import decoder
from fairq.errors import NotDecodable


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SYSTEM_SCHEMAS = frozenset({"pg_catalog", "information_schema"})


class Command(enum.StrEnum):
    """What a call returns: the word after the name in `-- name: GetTask :one`."""

    ONE = ":one"
    MANY = ":many"
    EXEC = ":exec"
    EXECROWS = ":execrows"
    EXECRESULT = ":execresult"
    COPYFROM = ":copyfrom"


class Template(enum.StrEnum):
    SQLALCHEMY = "sqlalchemy"
    PSYCOPG = "psycopg"


@dataclass(frozen=True, slots=True)
class Name:
    """The qualified name of a relation, function or user type. No schema: unknown, or the default one."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


@dataclass(frozen=True, slots=True)
class TypeName:
    """The element type of a column or parameter; `Column.dims` is the number of array dimensions."""

    schema: str
    name: str  # PostgreSQL's own (`int4`, never `int4[]` or `_int4`); empty: unknown
    spelling: str = ""  # sqlc's text

    def __str__(self) -> str:
        return self.name if self.schema in ("", "pg_catalog") else f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a relation or of a result, a field of a composite type, or the value of a parameter."""

    name: str  # empty: PostgreSQL or sqlc has no name for it
    type: TypeName
    not_null: bool = False
    dims: int = 0  # 0: a plain value, 1 or more: an array
    comment: str = ""
    # The relation that the value comes from, if it is an unchanged column.
    table: Name | None = None
    original_name: str = ""  # the column's name in `table`, if the query renames it
    # sqlc.embed(t): this entry stands for all columns of `t`, in order.
    embed: Name | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    number: int  # the n of $n; two parameters of one number never occur
    column: Column


@dataclass(frozen=True, slots=True)
class Query:
    """One annotated statement."""

    name: str  # as written: CreateTask
    cmd: str  # as written, with its colon; see Command
    text: str  # the statement with $n placeholders, without the name line, trailing blanks and semicolon
    source: str  # file name without folders: tasks.sql
    params: tuple[Parameter, ...] = ()
    columns: tuple[Column, ...] = ()
    comments: tuple[str, ...] = ()  # each `--` line after the name line, without its dashes
    one_row: bool = False  # always returns exactly one row, such as a SELECT without FROM
    insert_into: Name | None = None  # the target of an insert, also of :copyfrom
    path: str = ""  # the file's path, for messages
    line: int = 0  # the line of `-- name:` in it, counted from 1; 0: unknown


@dataclass(frozen=True, slots=True)
class Relation:
    name: Name
    columns: tuple[Column, ...]
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Enum:
    name: Name
    values: tuple[str, ...]
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain. Only `fairq gen` fills it: sqlc's request has none."""

    name: Name
    base: TypeName
    dims: int = 0
    not_null: bool = False
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Composite:
    """A row type made by `create type … as (…)`. Without fields if it comes from sqlc's request."""

    name: Name
    fields: tuple[Column, ...] = ()
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """A range type and its multirange (None before PostgreSQL 14). Only `fairq gen` fills it."""

    name: Name
    subtype: TypeName
    multirange: Name | None = None
    comment: str = ""


UserType = Enum | Domain | Composite | Range


@dataclass(frozen=True, slots=True)
class Catalog:
    """What users made in the database, in an order that does not depend on when."""

    relations: tuple[Relation, ...] = ()
    types: tuple[UserType, ...] = ()
    default_schema: str = "public"

    def user_type(self, type_: TypeName) -> UserType | None:
        """The type of this name; without a schema, looked up in the default one, then in the others."""
        found = [
            each
            for each in self.types
            for name in (each.name, each.multirange if isinstance(each, Range) else None)
            if name and name.name == type_.name and type_.schema in ("", name.schema)
        ]
        return min(found, key=lambda each: each.name.schema != self.default_schema, default=None)

    def relation(self, name: Name) -> Relation | None:
        """The table or view of this name, if there is one; an empty schema means the default one."""
        wanted = Name(name.schema or self.default_schema, name.name)
        return next((each for each in self.relations if each.name == wanted), None)


@dataclass(frozen=True, slots=True)
class Options:
    """The `options` of a `codegen` entry in sqlc.yaml: those of sqlc-gen-python 1.3.0, then fairq's."""

    package: str = ""
    out: str = ""
    emit_exact_table_names: bool = False
    emit_sync_querier: bool = False
    emit_async_querier: bool = False
    emit_pydantic_models: bool = False
    emit_str_enum: bool = False
    query_parameter_limit: int = 4  # more parameters become one Params object; 0: always
    inflection_exclude_table_names: tuple[str, ...] = ()
    # fairq's own
    template: Template = Template.SQLALCHEMY
    # sqlalchemy: exactly the reference's output, with its `Any` for types it does not know.
    strict: bool = False
    raw_json: bool = False  # psycopg: json and jsonb stay text
    # Patterns of `schema.function`: these never return NULL, unless the query file says so.
    not_null_functions: tuple[str, ...] = ()
    # Python types by PostgreSQL's names (qualified unless in pg_catalog or the default schema).
    types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """All that a template needs."""

    catalog: Catalog
    queries: tuple[Query, ...]
    options: Options = field(default_factory=Options)
    engine: str = "postgresql"
    version: str = ""  # printed under `# versions:`, for example "sqlc v1.31.1"


class Untypable(Exception):
    """A column has no Python type. The hint says what the author of the SQL can do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class GenerationError(Exception):
    """Nothing was generated. `str()` is the whole message, with the place and the hint."""

    def __init__(
        self, message: str, *, hint: str = "", path: str = "", line: int = 0, query: str = ""
    ) -> None:
        self.message, self.hint, self.path, self.line, self.query = message, hint, path, line, query
        place = f"{path}:{line}" if path and line else path
        parts = [part for part in (place, f"query {query}" if query else "", message) if part]
        super().__init__(": ".join(parts) + (f"\nhint: {hint}" if hint else ""))


def error_in(query: Query, message: str, hint: str = "") -> GenerationError:
    """An error at a query's name line."""
    path = query.path or query.source
    return GenerationError(message, hint=hint, path=path, line=query.line, query=query.name)


def parse_options(given: Any, path: str = "") -> Options:
    """Options from their JSON or YAML form. Unknown names and wrong types are errors."""
    if not isinstance(given, Mapping):
        raise GenerationError("the options must be a map", path=path)
    known = {field.name for field in dataclasses.fields(Options)}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known options: {', '.join(sorted(known))}"
            raise GenerationError(f"unknown option {name!r}", hint=hint, path=path)
    try:
        # A key without a value counts as absent: YAML reads `package:` as null.
        present = {name: value for name, value in given.items() if value is not None}
        options: Options = decoder(Options).plain(present, "options")
    except NotDecodable as exc:
        raise GenerationError(str(exc), path=path) from None
    if not options.package:
        hint = "name the Python package from which generated modules import `models`"
        raise GenerationError("option 'package' is missing", hint=hint, path=path)
    if options.query_parameter_limit < 0:
        hint = "query_parameter_limit must be 0 or more"
        raise GenerationError("invalid query parameter limit", hint=hint, path=path)
    return options
