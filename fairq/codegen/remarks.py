"""What a query file says about a query beside its SQL: `-- fairq: …` lines between the name line and the
end.

    -- fairq: not null id, group_key    these result columns are never NULL, though PostgreSQL cannot tell
    -- fairq: nullable created_at       this one can be NULL, whatever the front end found
    -- fairq: raw payload               JSON of these columns and parameters stays text; no names: all of it
    -- fairq: always                    this :one always finds a row, so what is returned is never None

They come through sqlc as comments, so both front ends understand them, and they make up for what only one
knows.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from fairq.codegen.model import Query, error_in

_LINE = re.compile(r"\s*fairq:\s*(?P<rule>not null|nullable|raw|always)\b(?P<names>.*)", re.IGNORECASE)
_ANY_LINE = re.compile(r"\s*fairq:")


@dataclass(frozen=True, slots=True)
class Annotations:
    not_null: frozenset[str] = frozenset()
    nullable: frozenset[str] = frozenset()
    raw: frozenset[str] = frozenset()
    all_raw: bool = False
    always: bool = False


def read(query: Query) -> Annotations:
    """The annotations of a query, every name in them checked."""
    columns = {column.name for column in query.columns if column.name}
    params = {parameter.column.name for parameter in query.params if parameter.column.name}
    found: dict[str, set[str]] = {"not null": set(), "nullable": set(), "raw": set()}
    all_raw = always = False
    for comment in query.comments:
        if not _ANY_LINE.match(comment):
            continue
        line = _LINE.fullmatch(comment)
        if line is None:
            raise error_in(
                query,
                f"annotation not understood: --{comment}",
                "known: `not null a, b`, `nullable a`, `raw a`, `always`",
            )
        rule = line["rule"].lower()
        if rule == "always":
            if query.cmd != ":one" or line["names"].strip():
                raise error_in(query, "`-- fairq: always` stands alone, and for :one only")
            always = True
            continue
        names = [name.strip() for name in line["names"].split(",") if name.strip()]
        known = columns | params if rule == "raw" else columns
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
                raise error_in(query, f"`-- fairq: {rule}` names {name}, which is not there", hint)
        if not names and rule != "raw":
            raise error_in(query, f"`-- fairq: {rule}` names no column", f"known: {', '.join(sorted(known))}")
        all_raw = all_raw or not names
        found[rule].update(names)
    if both := found["not null"] & found["nullable"]:
        raise error_in(query, f"{', '.join(sorted(both))} cannot be both not null and nullable")
    return Annotations(
        frozenset(found["not null"]), frozenset(found["nullable"]), frozenset(found["raw"]), all_raw, always
    )


def apply(query: Query) -> Query:
    """The query with the nullability of its columns as its annotations say."""
    said = read(query)
    columns = tuple(
        dataclasses.replace(
            column,
            not_null=(column.not_null or column.name in said.not_null) and column.name not in said.nullable,
        )
        for column in query.columns
    )
    return dataclasses.replace(query, columns=columns)
