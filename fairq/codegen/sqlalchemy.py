"""The `sqlalchemy` template: generates classes, constants and methods.

The contract is the output of sqlc-gen-python 1.3.0. With the option `strict` the output is exactly the same.
Otherwise it differs only where that output is wrong: types that would be `Any`, names that Python refuses,
text that needs escaping (see docs/reference/codegen-sqlalchemy.md).
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jinja2

from fairq.codegen import names, parse
from fairq.codegen.model import (
    Column,
    Command,
    Enum,
    GenerationError,
    Name,
    Query,
    Relation,
    Request,
    Untypable,
    error_in,
)
from fairq.codegen.sqlalchemy_types import PyType, python_type

_COMMANDS = (Command.ONE, Command.MANY, Command.EXEC, Command.EXECROWS, Command.EXECRESULT)
_RETURNS_ROWS = (Command.ONE, Command.MANY)
_PLACEHOLDER = re.compile(r"\B\$([0-9]+)\b", re.ASCII)
# Names that generated methods use, so no parameter may have them.
_USED_IN_METHODS = frozenset({"self", "sqlalchemy", "models"})


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: PyType
    comment: tuple[str, ...] = ()  # lines


@dataclass(frozen=True, slots=True)
class Struct:
    name: str
    fields: tuple[Field, ...]
    docstring: str = ""
    table: Name | None = None


@dataclass(frozen=True, slots=True)
class EnumClass:
    name: str
    docstring: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One query's method in both queriers."""

    name: str
    constant: str
    cmd: str
    sql: str  # as source text of the constant
    parameters: tuple[Field, ...]
    params: Struct | None  # their class, if the method takes an object of it
    returns: str  # the annotation of one row's value; empty: the statement returns nothing
    value: str  # how that is made from `row`
    row: Struct | None
    row_types: tuple[PyType, ...]

    @property
    def structs(self) -> list[Struct]:
        return [struct for struct in (self.params, self.row) if struct]


def generate(request: Request) -> dict[str, str]:
    """File name to text: `models.py`, and one module per query file."""
    models = sorted((_model(each, request) for each in request.catalog.relations), key=lambda each: each.name)
    methods = sorted(
        ((query, _method(query, request, models)) for query in request.queries if query.name and query.cmd),
        key=lambda pair: pair[1].name,
    )
    enums = _enums(request)
    if not request.options.strict:
        _check_distinct(request, enums, models, methods)

    files = {"models.py": _module(request, enums=enums, models=models)}
    for source in sorted({query.source for query, _ in methods}):
        file = source if source.endswith(".py") else source.removesuffix(".sql") + ".py"
        names.check_free(file, files, source)
        of_file = [method for query, method in methods if query.source == source]
        files[file] = _module(request, source, methods=of_file)
    return files


# --- models ---------------------------------------------------------------------------------------


def _enums(request: Request) -> list[EnumClass]:
    strict, catalog = request.options.strict, request.catalog
    classes: list[EnumClass] = []
    for enum in catalog.types:
        if not isinstance(enum, Enum):
            continue
        member_names = [names.member_name(value) for value in enum.values]
        name = names.enum_class_name(enum.name, catalog)
        if not strict:
            name = names.identifier(name, "Enum")
            numbered = enumerate(member_names, 1)
            member_names = names.distinct(names.identifier(each, f"VALUE_{n}") for n, each in numbered)
        values = enum.values if strict else map(_escaped, enum.values)
        members = tuple(zip(member_names, values, strict=True))
        classes.append(EnumClass(name, _docstring(enum.comment, strict), members))
    return sorted(classes, key=lambda each: each.name)


def _model(relation: Relation, request: Request) -> Struct:
    strict = request.options.strict
    fields: list[Field] = []
    for column in relation.columns:
        try:
            type_ = _local(python_type(column, request.catalog, request.options))
        except Untypable:
            # No query returns it so far. One that does gets the error.
            type_ = PyType("Any")
        comment = column.comment
        lines = (comment,) if strict and comment else tuple(comment.splitlines())
        fields.append(Field(column.name, type_, lines))
    name = names.model_class_name(relation.name, request.catalog, request.options)
    if not strict:
        name = names.identifier(name, "Model")
        fields = _python_fields(fields)
    return Struct(name, tuple(fields), _docstring(relation.comment, strict), relation.name)


def _local(type_: PyType) -> PyType:
    """The type as written in models.py itself."""
    return replace(type_, inner=type_.inner.removeprefix("models."))


def _python_fields(fields: Sequence[Field]) -> list[Field]:
    """The fields under names that a Python class accepts."""
    return _distinct(fields, [names.identifier(each.name, f"column_{n}") for n, each in enumerate(fields, 1)])


def _distinct(fields: Sequence[Field], given: Sequence[str]) -> list[Field]:
    return [replace(each, name=name) for each, name in zip(fields, names.distinct(given), strict=True)]


# --- queries --------------------------------------------------------------------------------------


def _method(query: Query, request: Request, models: Sequence[Struct]) -> Method:
    strict = request.options.strict
    if query.cmd == Command.COPYFROM:
        hint = "use `template: psycopg`, which has COPY"
        raise error_in(query, ":copyfrom cannot run through SQLAlchemy", hint)
    if query.cmd not in _COMMANDS:
        raise error_in(query, f"unknown command {query.cmd}", f"use one of {', '.join(_COMMANDS)}")
    if query.cmd in _RETURNS_ROWS and not query.columns:
        hint = "use :exec, or add `returning`"
        raise error_in(query, f"{query.cmd} needs a statement that returns columns", hint)

    name = names.method_name(query.name)
    if not strict:
        name = names.identifier(name, "query")
    constant, sql = names.method_name(query.name).upper(), _sql_constant(query, strict)
    fields, params = _parameters(query, request)
    return Method(name, constant, query.cmd, sql, fields, params, *_result(query, request, models))


def _sql_constant(query: Query, strict: bool) -> str:
    """The statement as source text. Other colons get a backslash: `:name` is a parameter of SQLAlchemy."""
    if strict:
        return _PLACEHOLDER.sub(r":p\1", query.text.replace(":", r"\\:"))
    # The text goes between triple quotes, so its own backslashes and triple quotes are escaped.
    pieces = (
        ":p" + token.text.removeprefix("$")
        if token.kind == "param"
        else token.text.replace("\\", r"\\").replace(":", r"\\:")
        for token in parse.tokens(query.text)
    )
    return "".join(pieces).replace('"""', r"\"\"\"")


def _parameters(query: Query, request: Request) -> tuple[tuple[Field, ...], Struct | None]:
    """The values for `:p1` and so on, and the class whose fields they are, if there is one."""
    strict, limit = request.options.strict, request.options.query_parameter_limit
    if len(query.params) > limit or (limit == 0 and (query.params or strict)):
        numbered = [
            (parameter.number, _field(parameter.column, index, query, request))
            for index, parameter in enumerate(query.params)
        ]
        params = _struct(f"{query.name}Params", numbered, request)
        return params.fields, params
    fields: list[Field] = []
    for n, parameter in enumerate(query.params, 1):
        name = parameter.column.name or f"dollar_{parameter.number}"
        what = f"parameter {parameter.column.name or f'${parameter.number}'}"
        type_ = _type_in_query(parameter.column, what, query, request)
        name = name if strict else names.identifier(name, f"dollar_{n}")
        fields.append(Field(f"{name}_" if name in _USED_IN_METHODS and not strict else name, type_))
    return tuple(fields if strict else _distinct(fields, [each.name for each in fields])), None


def _result(
    query: Query, request: Request, models: Sequence[Struct]
) -> tuple[str, str, Struct | None, tuple[PyType, ...]]:
    """The annotation of one row, how it is made, its Row class if there is one, and the types they use."""
    if not query.columns:
        return "", "", None, ()
    fields: list[Field] = []
    values: list[str] = []
    position = 0
    for index, column in enumerate(query.columns):
        if request.options.strict or column.embed is None:
            fields.append(_field(column, index, query, request))
            values.append(f"row[{position}]")
            position += 1
            continue
        # sqlc.embed(t): its columns are listed in the text, and become one object again here.
        model = next((each for each in models if _is_table(column.embed, each.table, request)), None)
        if model is None:
            message = f"sqlc.embed({column.embed}): there is no such table"
            raise error_in(query, message, "embed a table or a view")
        fields.append(Field(column.name or column.embed.name, PyType(f"models.{model.name}")))
        values.append(_call(f"models.{model.name}", model.fields, position))
        position += len(model.fields)
    types = tuple(each.type for each in fields)
    if len(fields) == 1:
        return types[0].annotation, values[0], None, types
    model = next((each for each in models if _is_model(each, query.columns, types, request)), None)
    if model:
        return f"models.{model.name}", _call(f"models.{model.name}", model.fields), None, ()
    row = _struct(f"{query.name}Row", list(enumerate(fields)), request)
    made = ((each.name, value) for each, value in zip(row.fields, values, strict=True))
    return row.name, _made(row.name, made), row, types


def _made(name: str, parts: Iterable[tuple[str, str]]) -> str:
    """A call of the class with the parts, each on a line of its own."""
    lines = (f"    {field}={textwrap.indent(value, '    ').lstrip()},\n" for field, value in parts)
    return f"{name}(\n{''.join(lines)})"


def _call(name: str, fields: Iterable[Field], start: int = 0) -> str:
    return _made(name, ((each.name, f"row[{index}]") for index, each in enumerate(fields, start)))


def _is_model(model: Struct, columns: Sequence[Column], types: Sequence[PyType], request: Request) -> bool:
    """Whether a result is a table's row: all columns of that table, in its order, with their names."""
    if len(model.fields) != len(columns) or model.table is None:
        return False
    relation = request.catalog.relation(model.table)
    return relation is not None and all(
        own.name == (column.name or f"column_{number}")
        and each.type == _local(type_)
        and _is_table(column.table, model.table, request)
        for number, (own, each, column, type_) in enumerate(
            zip(relation.columns, model.fields, columns, types, strict=True), 1
        )
    )


def _is_table(name: Name | None, table: Name | None, request: Request) -> bool:
    if name is None or table is None or name.name != table.name:
        return False
    default = request.catalog.default_schema
    return (name.schema or default) == (table.schema or default)


def _field(column: Column, index: int, query: Query, request: Request) -> Field:
    name = column.name or f"column_{index + 1}"
    return Field(name, _type_in_query(column, f"column {column.name or index + 1}", query, request))


def _struct(name: str, numbered: Sequence[tuple[int, Field]], request: Request) -> Struct:
    """A Params or Row class. Repeated names get `_2`, `_3`; a parameter used twice keeps one name."""
    seen: Counter[str] = Counter()
    suffixes: dict[int, int] = {}
    fields: list[Field] = []
    for number, each in numbered:
        suffix = suffixes.setdefault(number, seen[each.name] + 1 if seen[each.name] else 0)
        fields.append(replace(each, name=f"{each.name}_{suffix}") if suffix else each)
        seen[each.name] += 1
    return Struct(name, tuple(fields if request.options.strict else _python_fields(fields)))


def _type_in_query(column: Column, what: str, query: Query, request: Request) -> PyType:
    try:
        found = python_type(column, request.catalog, request.options)
    except Untypable as exc:
        raise error_in(query, f"{what} {exc}", exc.hint) from None
    if found.inner == "None" and query.cmd in _RETURNS_ROWS:
        raise error_in(query, f"{what} is void: there is nothing to return", "use :exec")
    return found


# --- text -----------------------------------------------------------------------------------------


def _docstring(comment: str, strict: bool) -> str:
    if not comment:
        return ""
    if strict:
        # Copies the reference, which adds quotes to a comment of several lines.
        quotes = '"""""' if "\n" in comment else '"""'
        return f"{quotes}{comment}{quotes}"
    text = comment.replace("\\", r"\\").replace('"""', r"\"\"\"")
    return f'"""{text[:-1]}\\""""' if text.endswith('"') else f'"""{text}"""'


def _escaped(text: str) -> str:
    """Text for a literal in double quotes; ordinary text stays unchanged."""
    plain = text.replace("\\", r"\\").replace('"', r"\"")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in plain)


# --- modules --------------------------------------------------------------------------------------


_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("fairq.codegen"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def _module(
    request: Request,
    source: str = "",
    enums: Sequence[EnumClass] = (),
    models: Sequence[Struct] = (),
    methods: Sequence[Method] = (),
) -> str:
    """The text of a module: the models, or the queries of one file."""
    options, commands = request.options, {method.cmd for method in methods}
    types = [each.type for model in models for each in model.fields]
    types += [each.type for method in methods for each in method.parameters]
    types += [type_ for method in methods for type_ in method.row_types]
    standard, installed = _modules(types, standard=True), _modules(types, standard=False)
    if not source or any(method.structs for method in methods):
        standard.add("pydantic" if options.emit_pydantic_models else "dataclasses")
    standard |= {"enum"} if enums else set()
    typing = _typing(types)
    typing |= {"Optional"} if Command.ONE in commands else set()
    typing |= {"Iterator"} if Command.MANY in commands and options.emit_sync_querier else set()
    typing |= {"AsyncIterator"} if Command.MANY in commands and options.emit_async_querier else set()
    own = []
    if source:
        installed |= {"sqlalchemy", *(["sqlalchemy.ext.asyncio"] if options.emit_async_querier else [])}
        own = [f"from {options.package} import models"]
    return _templates.get_template("sqlalchemy.py.jinja").render(
        version=request.version,
        options=options,
        source=source,
        imports=[_import_lines(standard, typing), _import_lines(installed, ()), own],
        enums=enums,
        models=models,
        methods=methods,
    )


def _modules(types: Iterable[PyType], *, standard: bool) -> set[str]:
    """The modules whose names the types use: `datetime` for `datetime.date`."""
    used: set[str] = set()
    for type_ in types:
        for dotted in re.findall(r"[A-Za-z_][\w.]*\.", type_.inner):
            module = dotted.removesuffix(".")
            if module != "models" and (module.split(".")[0] in sys.stdlib_module_names) == standard:
                used.add(module)
    return used


def _typing(types: Iterable[PyType]) -> set[str]:
    used: set[str] = set()
    for type_ in types:
        used |= {"Any"} if re.search(r"(?<![\w.])Any\b", type_.inner) else set()
        used |= {"List"} if type_.is_array else set()
        used |= {"Optional"} if type_.is_null else set()
    return used


def _import_lines(modules: Iterable[str], typing: Iterable[str]) -> list[str]:
    lines = {module: f"import {module}" for module in modules}
    if from_typing := ", ".join(sorted(typing)):
        lines["typing"] = f"from typing import {from_typing}"
    return [lines[module] for module in sorted(lines)]


# --- checks ---------------------------------------------------------------------------------------


def _check_distinct(
    request: Request,
    enums: Sequence[EnumClass],
    models: Sequence[Struct],
    methods: Sequence[tuple[Query, Method]],
) -> None:
    """Refuse two things with the same name in a module, because one would replace the other."""
    taken: dict[str, str] = {}
    described = [(each.name, "an enum") for each in enums]
    described += [(each.name, f"table {each.table}") for each in models]
    for name, what in described:
        if name in taken:
            hint = "rename one, or use emit_exact_table_names or inflection_exclude_table_names"
            raise GenerationError(f"class {name} would be made for {taken[name]} and for {what}", hint=hint)
        taken[name] = what
    seen: dict[tuple[str, str], str] = {}
    for query, method in methods:
        for name in (method.name, method.constant, *(struct.name for struct in method.structs)):
            other = seen.setdefault((query.source, name), query.name)
            if other != query.name:
                raise error_in(query, f"{name} is also made for query {other}", "rename one of the two")
