"""The front end of `fairq gen`: reads the schema and the queries from PostgreSQL itself.

`load` runs the schema files in an empty database, `catalog` reads what they made, `describe` prepares each
query and reads types, names and nullability from the server. Only `*` in a select list is handled here: it is
replaced by its columns, so that a column added later cannot break a prepared statement.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg import pq, sql

from fairq.codegen import nulls
from fairq.codegen.config import text_of
from fairq.codegen.model import (
    Catalog,
    Column,
    Command,
    Composite,
    Domain,
    Enum,
    GenerationError,
    Name,
    Parameter,
    Query,
    Range,
    Relation,
    TypeName,
    UserType,
    words,
)
from fairq.codegen.parse import Placeholder, Statement, Token, tokens
from fairq.queries import codegen as queries

_MAY_NOT_CREATE = ("42501", "25006")  # insufficient privilege, read-only transaction

# ----------------------------------------------------------------------------------------- loading a schema


def load(conn: psycopg.Connection[Any], files: Iterable[Path]) -> None:
    """Run schema files in their order. The connection must be in autocommit mode."""
    for path in files:
        text = without_rollback(text_of(path))
        try:
            # Without parameters the text goes out as one simple query: several statements, `%` untouched.
            psycopg.RawCursor(conn).execute(text)
        except psycopg.Error as exc:
            if exc.sqlstate is None:
                raise
            message, position = f"PostgreSQL refuses the schema: {exc.diag.message_primary}", 0
            if exc.diag.statement_position:
                position = text.count("\n", 0, int(exc.diag.statement_position) - 1) + 1
            hint = exc.diag.message_hint or ""
            raise GenerationError(message, hint=hint, path=str(path), line=position) from exc


def without_rollback(text: str) -> str:
    """The upgrade part of a migration, without pg_dump's psql commands. Line numbers stay the same."""
    kept: list[str] = []
    for line in text.split("\n"):
        mark = line.strip().lower()
        if mark.startswith(_WAYS_DOWN):
            break
        kept.append("" if mark.startswith(("\\restrict", "\\unrestrict", "\\connect")) else line)
    return "\n".join(kept)


# Of goose, sql-migrate, dbmate and tern.
_WAYS_DOWN = ("-- +goose down", "-- +migrate down", "-- migrate:down", "---- create above / drop below")


# ------------------------------------------------------------------------------------ reading the catalogue


class Reader:
    """Reads one database and caches the answers, so the database must not change meanwhile.

    `promised` are patterns of functions that return no NULL.
    """

    def __init__(self, conn: psycopg.Connection[Any], promised: Sequence[str] = ()) -> None:
        self.conn = conn
        self._promised = promised
        self._types: dict[int, queries.TypesRow] = {}
        self.relation = functools.cache(self._relation)
        self.function = functools.cache(lambda oid: queries.function(conn, oid=oid))
        self.operator = functools.cache(lambda oid: queries.operator(conn, oid=oid))

    def type(self, oid: int) -> queries.TypesRow:
        if oid not in self._types:
            self._types = {row.oid: row for row in queries.types(self.conn)}
        return self._types[oid]

    def type_name(self, oid: int, dims: int = 0) -> tuple[TypeName, int]:
        """The model's name of a type, and the number of array dimensions around it."""
        found = self.type(oid)
        if found.element:
            element = self.type(found.element)
            return TypeName(element.schema, element.name), max(dims, 1)
        return TypeName(found.schema, found.name), 0

    def dims(self, relation: int, attribute: int) -> int:
        """The declared array dimensions of a column, which its type does not tell; 0: it is no column."""
        return self.relation(relation).dims.get(attribute, 0) if relation else 0

    def _relation(self, oid: int) -> nulls.RelationFacts:
        relation = queries.relation(self.conn, oid=oid)
        columns = queries.relation_columns(self.conn, oid=oid)
        return nulls.RelationFacts(
            Name(relation.schema, relation.name),
            frozenset(each.number for each in columns if each.not_null),
            {each.number: each.name for each in columns},
            {each.number: each.dims for each in columns},
            nulls.read_tree(relation.view)[0] if relation.view else None,
        )

    def promises(self, function: queries.FunctionRow) -> bool:
        """Whether it is declared to return no NULL in any column."""
        name = f"{function.schema}.{function.name}"
        return any(fnmatch.fnmatchcase(name, each) for each in self._promised)

    def catalog(self) -> Catalog:
        """Everything that users made in the database, in an order that does not depend on when."""
        inference = nulls.Inference(self)
        own: dict[int, list[queries.AttributesRow]] = defaultdict(list)
        for each in queries.attributes(self.conn):
            own[each.relation].append(each)

        def columns(of: queries.RelationsRow) -> Iterator[Column]:
            for each in own[of.oid]:
                type_, dims = self.type_name(each.type, each.dims)
                not_null = of.kind != "c" and inference.relation_column(of.oid, each.number)
                yield Column(each.name, type_, not_null, dims, each.comment)

        relations: list[Relation] = []
        types: list[UserType] = []
        for relation in queries.relations(self.conn):
            name = Name(relation.schema, relation.name)
            if relation.kind == "c":
                types.append(Composite(name, tuple(columns(relation)), relation.comment))
            else:
                relations.append(Relation(name, tuple(columns(relation)), relation.comment))
        for row in queries.user_types(self.conn):
            name, found = Name(row.schema, row.name), self.type(row.oid)
            if row.kind == "e":
                types.append(Enum(name, tuple(row.labels), row.comment))
            elif row.kind == "d":
                base, dims = self.type_name(found.base, found.base_dims)
                types.append(Domain(name, base, dims, found.not_null, row.comment))
            else:
                multirange = self.type(row.multirange)
                of_many = Name(multirange.schema, multirange.name)
                types.append(Range(name, self.type_name(row.subtype)[0], of_many, row.comment))
        return Catalog(tuple(relations), tuple(types))


# --------------------------------------------------------------------------------------- describing a query


class _Field(NamedTuple):
    """A result column as the server describes it."""

    name: str
    type: int
    relation: int
    attribute: int


class _Description(NamedTuple):
    params: tuple[int, ...]
    fields: tuple[_Field, ...]
    tree: nulls.Node | None  # None for a utility statement, which has no parameters and hardly any columns


def describe(reader: Reader, statement: Statement) -> Query:
    """The model of one statement: its text with `*` expanded, and the types of its parameters and columns."""
    described = _describe(reader, statement, statement.text)
    stars = list(_stars(statement, described.tree))
    if stars:
        text = _expanded(reader, statement, stars)
        # Line numbers stay the same, because a star expands within its line.
        statement = dataclasses.replace(statement, text=text)
        described = _describe(reader, statement, text)
    params = _parameters(reader, statement, described)
    columns = _columns(reader, statement, described, stars)
    tree, insert_into = described.tree, None
    if tree is not None and tree.number("commandType") == nulls.INSERT:
        target = nulls.scope_of(tree).entry(tree.number("resultRelation"))
        insert_into = reader.relation(target.number("relid")).name
    if statement.cmd is Command.COPYFROM:
        _check_copy(reader, statement, tree)
    return Query(
        name=statement.name,
        cmd=str(statement.cmd),
        text=statement.text,
        source=Path(statement.path).name,
        params=params,
        columns=columns,
        comments=statement.comments,
        one_row=statement.cmd is Command.ONE and tree is not None and nulls.one_row(tree),
        insert_into=insert_into,
        path=statement.path,
        line=statement.line,
    )


def _describe(reader: Reader, statement: Statement, text: str) -> _Description:
    pgconn = reader.conn.pgconn
    prepared = pgconn.prepare(b"", text.encode())
    if prepared.status != pq.ExecStatus.COMMAND_OK:
        raise _refused(statement, prepared)
    result = pgconn.describe_prepared(b"")
    params = tuple(result.param_type(number) for number in range(result.nparams))
    fields = tuple(
        _Field((result.fname(i) or b"").decode(), result.ftype(i), result.ftable(i), result.ftablecol(i))
        for i in range(result.nfields)
    )
    return _Description(params, fields, _tree(reader, statement, text, params))


def _refused(statement: Statement, result: pq.abc.PGresult) -> GenerationError:
    def said(code: pq.DiagnosticField) -> str:
        return (result.error_field(code) or b"").decode()

    message, hint = said(pq.DiagnosticField.MESSAGE_PRIMARY), said(pq.DiagnosticField.MESSAGE_HINT)
    if said(pq.DiagnosticField.SQLSTATE) in ("42P18", "42725"):
        hint = hint or "write the type after the placeholder: $1::text, @name::bigint"
    position = said(pq.DiagnosticField.STATEMENT_POSITION)
    place = int(position) - 1 if position else None
    return statement.error(f"PostgreSQL refuses the statement: {message}", hint, place)


def _tree(reader: Reader, statement: Statement, text: str, params: Sequence[int]) -> nulls.Node | None:
    """The analysed tree of a statement, read from a function that exists only during this call.

    None if no such function is possible (a utility statement, too many parameters): its columns are nullable.
    """
    types = ", ".join(
        f"pg_catalog.{type_.name}"  # not quoted, because "char" has its quotes already
        if type_.schema == "pg_catalog"
        else sql.Identifier(type_.schema, type_.name).as_string()
        for type_ in map(reader.type, params)
    )
    try:
        with reader.conn.transaction(force_rollback=True):
            psycopg.RawCursor(reader.conn).execute(
                "set local check_function_bodies = off; "
                f"create function pg_temp.fairq_gen({types}) returns record language sql "
                f"begin atomic {text}\n; end".encode()
            )
            text = queries.tree(reader.conn)
    except psycopg.DatabaseError as exc:
        if exc.sqlstate is None:
            raise
        if exc.sqlstate in _MAY_NOT_CREATE:
            message = f"reading the statement needs a temporary function: {exc.diag.message_primary}"
            hint = "use a role that may create temporary objects, on a server that is not a standby"
            raise statement.error(message, hint) from exc
        return None
    tree: nulls.Node = nulls.read_tree(text)[0][0]
    return tree if tree["utilityStmt"] is None else None


def _parameters(reader: Reader, statement: Statement, described: _Description) -> tuple[Parameter, ...]:
    found = [] if described.tree is None else nulls.uses(described.tree, reader)
    placeholders = {placeholder.number: placeholder for placeholder in statement.placeholders}
    params: list[Parameter] = []
    for number, type_oid in enumerate(described.params, start=1):
        placeholder = placeholders.get(number, Placeholder(number))
        uses = [use for use in found if use.number == number]
        params.append(Parameter(number, _parameter(reader, placeholder, type_oid, uses)))
    return tuple(params)


def _parameter(reader: Reader, placeholder: Placeholder, type_oid: int, uses: list[nulls.Use]) -> Column:
    inference = nulls.Inference(reader)
    # A value may be NULL when it is stored in a nullable column and in no other.
    stored = [inference.relation_column(use.relation, use.attribute) for use in uses if use.stored]
    not_null = not placeholder.nullable and (not stored or any(stored))
    # The column it is stored in names it best, then the one it is compared with.
    best = min(uses, key=lambda use: (not use.stored, not use.relation, not use.name), default=None)
    type_, dims = reader.type_name(type_oid, reader.dims(best.relation, best.attribute) if best else 0)
    return Column(
        name=placeholder.name or (best.name if best else ""),
        type=type_,
        not_null=not_null,
        dims=dims,
        table=reader.relation(best.relation).name if best and best.relation else None,
        original_name=best.name if best and best.relation else "",
    )


def _check_copy(reader: Reader, statement: Statement, tree: nulls.Node | None) -> None:
    """`:copyfrom` uses COPY, so the statement must be a plain insert of its parameters."""
    hint = "write `insert into t (a, b) values ($1, $2)`, with a placeholder for each value"
    if tree is None or tree.number("commandType") != nulls.INSERT:
        raise statement.error(":copyfrom needs an insert", hint)
    if isinstance(tree["onConflict"], nulls.Node) or tree.items("returningList"):
        raise statement.error(":copyfrom can neither handle conflicts nor return rows", hint)
    # COPY also casts to the column's length, as for varchar(80).
    numbers = [nulls.parameter(entry["expr"], reader) for entry in tree.items("targetList")]
    if sorted(number or 0 for number in numbers) != list(range(1, len(statement.placeholders) + 1)):
        raise statement.error(":copyfrom can only insert its parameters as they are", hint)


def _columns(
    reader: Reader, statement: Statement, described: _Description, stars: Sequence[_Star]
) -> tuple[Column, ...]:
    tree, fields = described.tree, described.fields
    if tree is None:
        return tuple(_result_column(reader, field, None, None, not_null=False) for field in fields)
    nullable = frozenset(placeholder.number for placeholder in statement.placeholders if placeholder.nullable)
    expressions = [target["expr"] for target in nulls.output(tree)]
    never_null = nulls.Inference(reader, nullable).columns(tree)
    columns: list[Column] = []
    embeds = {star.first: star for star in stars if star.embed}
    index = 0
    while index < len(fields):
        if star := embeds.get(index):
            columns.append(_embedded(reader, statement, star, tree))
            index += len(star.columns)
            continue
        expression, not_null = expressions[index], never_null[index]
        columns.append(_result_column(reader, fields[index], expression, tree, not_null=not_null))
        index += 1
    return tuple(columns)


def _result_column(
    reader: Reader,
    described: _Field,
    expression: nulls.Node | None,
    tree: nulls.Node | None,
    *,
    not_null: bool,
) -> Column:
    type_oid, relation, attribute = described.type, described.relation, described.attribute
    if expression is not None:
        # The server describes a domain by its base type; the tree still has the domain.
        declared = int(nulls.type_of(expression) or 0)
        if declared and reader.type(declared).kind == "d":
            type_oid = declared
        if not relation and expression.tag == "VAR" and tree is not None:
            relation, attribute = _function_source(reader, expression, tree)
    type_, dims = reader.type_name(type_oid, reader.dims(relation, attribute))
    original = reader.relation(relation).names.get(attribute, "") if relation and attribute > 0 else ""
    return Column(
        name="" if described.name == "?column?" else described.name,
        type=type_,
        not_null=not_null,
        dims=dims,
        table=reader.relation(relation).name if relation else None,
        original_name=original,
    )


def _function_source(reader: Reader, variable: nulls.Node, tree: nulls.Node) -> tuple[int, int]:
    """The table and column of a variable that comes from `returns setof <table>`, else zeros."""
    entry = nulls.entry_of(variable, nulls.scope_of(tree))
    parts = entry.items("functions") if entry is not None else []
    call = parts[0]["funcexpr"] if len(parts) == 1 else None
    if isinstance(call, nulls.Node) and call.tag == "FUNCEXPR":
        rows_of = reader.function(call.number("funcid")).rows_of
        if rows_of is not None and variable.number("varattno") in reader.relation(rows_of).names:
            return rows_of, variable.number("varattno")
    return 0, 0


def _embedded(reader: Reader, statement: Statement, star: _Star, tree: nulls.Node) -> Column:
    scope = nulls.scope_of(tree)
    number = next(_entries_named(tree, star.qualifier), 0)
    relation = scope.entry(number).number("relid") if number else 0
    if not relation:
        message = f"sqlc.embed({star.qualifier}) is not a table or view of the statement"
        raise statement.error(message, position=star.start)
    never_null = number not in scope.nulled
    if not never_null and not nulls.Inference(reader).relation_column(relation, 1):
        message = f"an outer join may leave {star.qualifier} out, and no column would show that"
        hint = "put a NOT NULL column first in the table, or list the columns"
        raise statement.error(message, hint, star.start)
    name = reader.relation(relation).name
    return Column(star.qualifier.strip('"'), TypeName("", ""), never_null, embed=name, table=name)


class _Star(NamedTuple):
    """A `*` or `t.*` in the statement's own select list."""

    start: int
    end: int
    qualifier: str  # as written, empty for a bare star
    first: int  # its first result column
    columns: tuple[tuple[str, str], ...]  # qualifier (empty if not needed) and name of each
    embed: bool


_LIST_ENDS = words(
    "from into where group having window union intersect except order limit offset fetch for on returning"
)


def _stars(statement: Statement, tree: nulls.Node | None) -> Iterator[_Star]:
    """The stars of the outermost select or returning list, with the columns of each.

    Stars of inner queries stay, because the outer query picks their columns by name. So do those in the
    branches of a UNION, whose shape the first branch decides.
    """
    if tree is None or isinstance(tree["setOperations"], nulls.Node):
        return
    listed = "select" if tree.number("commandType") == nulls.SELECT else "returning"
    items = _list_items(statement.text, listed)
    targets = nulls.output(tree)
    counts = [_width(item, tree) for item in items]
    bare = [_is_star(item) and len(item) == 1 for item in items]
    rest = len(targets) - sum(counts)
    first = 0
    for item, is_bare, width in zip(items, bare, counts, strict=True):
        count = rest // sum(bare) if is_bare else width
        if _is_star(item):
            start = item[0].start
            meant = targets[first : first + count]
            found = [(str(each["resname"]), _table_behind(each["expr"], tree)) for each in meant]
            # If the function gains columns, prepared statements that select all of them break (`0A000`).
            if function := next((alias for _, (alias, kind) in found if kind == nulls.FUNCTION), ""):
                hint = "name the columns: `select t.a, t.b from f() as t`"
                raise statement.error(f"selects * from function {function}", hint, start)
            qualifier = "".join(token.text for token in item[:-2])
            names = [name for name, _ in found]
            columns = tuple(
                (qualifier or (alias if names.count(name) > 1 else ""), name) for name, (alias, _) in found
            )
            yield _Star(start, item[-1].end, qualifier, first, columns, start in statement.embeds)
        first += count


def _list_items(sql: str, keyword: str) -> list[list[Token]]:
    """The tokens of each item of the outermost list that follows `keyword`."""
    depth = 0
    items: list[list[Token]] = []
    inside = distinct_on = False
    for token in tokens(sql):
        word = token.text.lower() if token.kind == "word" else token.text
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(word, 0)
        if token.is_blank:
            continue
        if depth == 0 and word == keyword and not inside:
            inside, items = True, [[]]
        elif inside and depth == 0 and word == "on" and not items[-1]:
            distinct_on = True
        elif distinct_on:
            distinct_on = not (depth == 0 and word == ")")
        elif inside and depth == 0 and (word in _LIST_ENDS or word == ";"):
            break
        elif inside and depth == 0 and word == ",":
            items.append([])
        elif inside and not (not items[-1] and word in ("all", "distinct")):
            items[-1].append(token)
    return items


def _is_star(item: list[Token]) -> bool:
    if not item or item[-1].text != "*":
        return False
    return len(item) == 1 or (len(item) in (3, 5) and item[-2].text == ".")


def _width(item: list[Token], tree: nulls.Node) -> int:
    """How many columns an item of a list brings; for a bare star, the caller computes it from the others."""
    if not _is_star(item):
        return 1
    number = next(_entries_named(tree, item[-3].text), 0) if len(item) > 1 else 0
    names = tree.items("rtable")[number - 1]["eref"].items("colnames") if number else ()
    return sum(bool(name) for name in names)


def _entries_named(tree: nulls.Node, qualifier: str) -> Iterator[int]:
    written = qualifier.rsplit(".", 1)[-1]
    name = written[1:-1].replace('""', '"') if written.startswith('"') else written.lower()
    for number, entry in enumerate(tree.items("rtable"), start=1):
        if isinstance(entry["eref"], nulls.Node) and entry["eref"]["aliasname"] == name:
            yield number


def _table_behind(expression: nulls.Node, tree: nulls.Node) -> tuple[str, int]:
    """The alias and the kind of the source of a star's column."""
    if expression.tag != "VAR" or not expression.number("varno"):
        return "", -1
    entry = tree.items("rtable")[expression.number("varno") - 1]
    return str(entry["eref"]["aliasname"]), entry.number("rtekind")


def _expanded(reader: Reader, statement: Statement, stars: Sequence[_Star]) -> str:
    names = sorted({name for star in stars for pair in star.columns for name in pair if name})
    quoted = {row.plain: row.quoted for row in queries.quoted_names(reader.conn, names=names)}
    text, done = "", 0
    for star in stars:
        columns = (
            (f"{star.qualifier or quoted[table]}." if star.qualifier or table else "") + quoted[name]
            for table, name in star.columns
        )
        text += statement.text[done : star.start] + ", ".join(columns)
        done = star.end
    return text + statement.text[done:]
