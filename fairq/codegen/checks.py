"""What a query must not do, whatever front end reads it.

`select * from f()`: sqlc 1.31 rewrites the star to one column of type `record` when `f` is declared `returns
table`, with and without a database. And where the star is read right, a prepared statement that used it
breaks in every open connection once the function gains a column (`0A000`). So queries name the columns they
want.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fairq.codegen.model import Query, error_in
from fairq.codegen.parse import tokens

_HINT = "name the columns: `select t.id, t.state from f($1) as t`"
_NAME = re.compile(r'"(?:[^"]|"")*"|[^\W\d][\w$]*')

# Words that end a list of FROM items at its own depth, and those that stand between two items.
_END_OF_FROM = frozenset(
    {"where", "group", "having", "window", "order", "limit", "offset", "fetch", "for", "union", "intersect"}
    | {"except", "returning", "select"}
)
_BETWEEN_ITEMS = frozenset({",", "join"})
_NOT_AN_ALIAS = (
    _END_OF_FROM | _BETWEEN_ITEMS | {"on", "using", "cross", "inner", "left", "right", "full", "natural"}
)
_BEFORE_ITEM = frozenset({"lateral", "only"})


@dataclass(frozen=True, slots=True)
class _Source:
    name: str  # the alias, or the last part of the name
    function: str  # the function's name as written; empty: a table or a subquery


def star_from_function(sql: str) -> str | None:
    """The function that a statement selects `*` or `alias.*` from, as written there; None: there is none."""
    words = _words(sql)
    for start, word in enumerate(words):
        if word == "select":
            stars, sources = _stars_and_sources(words, start + 1)
            for source in sources:
                if source.function and ("" in stars or source.name in stars):
                    return source.function
    return None


def refuse_records(queries: Iterable[Query]) -> None:
    """Raise for the first query with a `record` column: all that is left of the star in sqlc's request."""
    for query in queries:
        for column in query.columns:
            if column.type.name == "record" and column.type.schema in ("", "pg_catalog"):
                raise error_in(
                    query, f"column {column.name} is a record: it selects * from a function", _HINT
                )


def _words(sql: str) -> list[str]:
    """Words in lower case, quoted names as they are, signs; a literal is `''`, comments are left out."""
    found: list[str] = []
    for token in tokens(sql):
        if token.kind == "string":
            found.append("''")
        elif not token.is_blank:
            found.append(token.text if token.kind == "quoted" else token.text.lower())
    return found


def _stars_and_sources(words: list[str], position: int) -> tuple[set[str], list[_Source]]:
    """Of one SELECT: the stars of its list ("" for a bare one, else the name before it), its FROM items."""
    stars: set[str] = set()
    while position < len(words) and words[position] not in ("from", ")", ";"):
        word = words[position]
        if word == "(":
            position = _after_parenthesis(words, position)
            continue
        if word in _END_OF_FROM:
            return stars, []
        if word == "*" and words[position - 1] == ".":
            stars.add(_plain(words[position - 2]))
        elif word == "*" and words[position - 1] in ("select", "all", "distinct", ",", ")"):
            stars.add("")
        position += 1
    if position >= len(words) or words[position] != "from":
        return stars, []
    return stars, list(_sources(words, position + 1))


def _sources(words: list[str], position: int) -> Iterator[_Source]:
    expects_item = True
    while position < len(words) and words[position] not in (")", ";"):
        word = words[position]
        if expects_item and word not in _BEFORE_ITEM:
            source, position = _source(words, position)
            yield source
            expects_item = False
        elif word == "(":
            position = _after_parenthesis(words, position)
        elif word in _END_OF_FROM:
            return
        else:
            expects_item = expects_item or word in _BETWEEN_ITEMS
            position += 1


def _source(words: list[str], position: int) -> tuple[_Source, int]:
    """One FROM item and where it ends: `s.f(…) with ordinality as t`, `rows from (f(…))`, `t`, `(…) t`."""
    function = ""
    name = ""
    if words[position : position + 3] == ["rows", "from", "("]:
        function, name = "rows from", ""
        position = _after_parenthesis(words, position + 2)
    elif words[position] == "(":
        position = _after_parenthesis(words, position)
    else:
        parts: list[str] = []
        while position < len(words) and (_NAME.fullmatch(words[position]) or words[position] == "."):
            parts.append(words[position])
            position += 1
            if position < len(words) and parts[-1] != "." and words[position] != ".":
                break
        name = _plain(parts[-1]) if parts else ""
        if position < len(words) and words[position] == "(":
            function = "".join(parts)
            position = _after_parenthesis(words, position)
        elif not parts:
            position += 1
    if words[position : position + 2] == ["with", "ordinality"]:
        position += 2
    if position < len(words) and words[position] == "as":
        position += 1
    if position < len(words) and _NAME.fullmatch(words[position]) and words[position] not in _NOT_AN_ALIAS:
        name = _plain(words[position])
        position += 1
    return _Source(name, function), position


def _after_parenthesis(words: list[str], position: int) -> int:
    depth = 0
    while position < len(words):
        depth += {"(": 1, ")": -1}.get(words[position], 0)
        position += 1
        if depth == 0:
            break
    return position


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name
