"""Pages with SQL that was really run.

Each ```sql block of a page runs against a fresh database, statement by statement, in the order of the page. A
```text block right after it is what its last statement answers, as psql shows it. Rewrite those blocks with

    python -m tests.support.sql_pages docs/reference/sql/*.md
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

_NUMBERS = {20, 21, 23, 26, 700, 701, 1700}  # types that psql sets flush right
_BLOCK = re.compile(r"^```sql\n(.*?)^```\n(?:\n?^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    statements: list[str]
    expected: str | None
    span: tuple[int, int] | None  # of the expected output in the page


def blocks(page: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(page):
        statements = [each.strip() for each in re.split(r";[ \t]*(?:\n|\Z)", match[1]) if each.strip()]
        span = match.span(2) if match[2] is not None else None
        yield Block(page.count("\n", 0, match.start()) + 1, statements, match[2], span)


def run(conn: psycopg.Connection[Any], block: Block) -> str:
    """Run the statements of a block, and return the last one's answer."""
    shown = ""
    for position, statement in enumerate(block.statements, 1):
        try:
            shown = aligned(conn.execute(statement.encode()))
        except psycopg.Error as exc:
            if position < len(block.statements) or block.expected is None:
                raise
            shown = f"ERROR:  {exc.sqlstate}: {exc.diag.message_primary}\n"
            shown += f"HINT:  {exc.diag.message_hint}\n" if exc.diag.message_hint else ""
    return shown


def aligned(cursor: psycopg.Cursor[Any]) -> str:
    """A result as psql prints it, without trailing spaces."""
    result = cursor.pgresult
    if result is None or cursor.description is None:
        return f"{cursor.statusmessage}\n"
    names = [column.name for column in cursor.description]
    right = [column.type_code in _NUMBERS for column in cursor.description]
    rows = [
        [(result.get_value(row, column) or b"").decode() for column in range(result.nfields)]
        for row in range(result.ntuples)
    ]
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    lines = ["|".join(f" {name:^{width}} " for name, width in zip(names, widths, strict=True))]
    lines.append("+".join("-" * (width + 2) for width in widths))
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("|".join(f" {cell:>{w}} " if r else f" {cell:<{w}} " for cell, w, r in cells))
    lines.append("(1 row)" if len(rows) == 1 else f"({len(rows)} rows)")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def rewritten(conn: psycopg.Connection[Any], page: str) -> str:
    """The page with the current answers of its statements."""
    parts: list[str] = []
    at = 0
    for block in blocks(page):
        shown = run(conn, block)
        if block.span is not None:
            parts += [page[at : block.span[0]], shown]
            at = block.span[1]
    return "".join([*parts, page[at:]])


def _main(files: list[str]) -> None:
    from fairq import embedded
    from tests.support.schema import load_schema

    with embedded.start() as server:
        for number, file in enumerate(files):
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute(f"create database page_{number}".encode())
            with psycopg.connect(server.dsn(f"page_{number}")) as conn:
                load_schema(conn)
            with psycopg.connect(server.dsn(f"page_{number}"), autocommit=True) as conn:
                page = Path(file).read_text("utf-8")
                try:
                    Path(file).write_text(rewritten(conn, page), "utf-8")
                except psycopg.Error as exc:
                    print(f"{file}: {exc}", file=sys.stderr)


if __name__ == "__main__":
    _main(sys.argv[1:])
