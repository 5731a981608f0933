"""Annotations of a query: `-- fairq: …` lines below its name line.

    -- fairq: not null id, group_key    these result columns are never NULL, though PostgreSQL cannot tell
    -- fairq: nullable created_at       this one can be NULL, whatever the front end found
    -- fairq: raw payload               JSON of these columns and parameters stays text; without names, all
    -- fairq: always                    this :one always finds a row, so it never returns None

sqlc passes them on as comments, so both front ends understand them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from fairq.codegen.model import Column, Query, error_in

_LINE = re.compile(r"\s*fairq:\s*(?P<rule>not null|nullable|raw|always)\b(?P<names>.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Annotations:
    not_null: frozenset[str]
    nullable: frozenset[str]
    raw: frozenset[str]
    all_raw: bool
    always: bool

    def keeps_raw(self, column: Column) -> bool:
        return self.all_raw or column.name in self.raw


def is_ours(comment: str) -> bool:
    return comment.strip().startswith("fairq:")


def read(query: Query) -> Annotations:
    """The annotations of a query, with all names checked."""
    columns = {column.name for column in query.columns if column.name}
    params = {parameter.column.name for parameter in query.params if parameter.column.name}
    found: dict[str, set[str]] = {"not null": set(), "nullable": set(), "raw": set(), "always": set()}
    for comment in filter(is_ours, query.comments):
        line = _LINE.fullmatch(comment)
        if line is None:
            hint = "known: `not null a, b`, `nullable a`, `raw a`, `always`"
            raise error_in(query, f"annotation not understood: --{comment}", hint)
        rule = line["rule"].lower()
        names = [name.strip() for name in line["names"].split(",") if name.strip()]
        if rule == "always" and (names or query.cmd != ":one"):
            raise error_in(query, "`-- fairq: always` takes no names, and is for :one only")
        known = columns | params if rule == "raw" else columns
        listed = f"known: {', '.join(sorted(known))}"
        if unknown := [name for name in names if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else listed
            raise error_in(query, f"`-- fairq: {rule}` names {unknown[0]}, which does not exist", hint)
        if not names and rule not in ("raw", "always"):
            raise error_in(query, f"`-- fairq: {rule}` names no column", listed)
        found[rule].update(names or [""])
    if both := found["not null"] & found["nullable"]:
        raise error_in(query, f"{', '.join(sorted(both))} cannot be both not null and nullable")
    not_null, nullable, raw = (frozenset(found[rule]) for rule in ("not null", "nullable", "raw"))
    return Annotations(not_null, nullable, raw, "" in raw, bool(found["always"]))


def apply(query: Query) -> Query:
    """The query, with its annotations applied to the nullability of its columns."""
    said = read(query)
    columns: list[Column] = []
    for column in query.columns:
        not_null = (column.not_null or column.name in said.not_null) and column.name not in said.nullable
        columns.append(dataclasses.replace(column, not_null=not_null))
    return dataclasses.replace(query, columns=tuple(columns))
