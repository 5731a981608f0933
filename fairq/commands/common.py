"""What the commands share: the connection, types of options, and the output.

Group keys and names of workers come from applications, and so from anybody. Whatever is shown of them goes
through `clean`, so that no tenant can send escape sequences to an operator's terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairq import install
from fairq.cli import named_dsn, wants_json
from fairq.commands.words import refusal
from fairq.dsn import clean as clean
from fairq.dsn import patient, resolve
from fairq.errors import NotAllowed, Refused, translating

Connection = psycopg.Connection[Any]

PLAIN_WIDTH = 100_000  # in a file or a pipe nothing is cut off

# --- The database ----------------------------------------------------------------------------------


def connect(dsn: str) -> Connection:
    """A connection in autocommit that works behind a transaction pooler.

    Its transactions are READ COMMITTED, whatever the role's default is, because promotion needs that.
    """
    conn = psycopg.connect(
        patient(dsn),
        autocommit=True,
        prepare_threshold=None,
        client_encoding="utf8",  # whatever PGCLIENTENCODING and the database's own are
        fallback_application_name="fairq",
    )
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    set_json_loads(_loads, conn)
    return conn


def _loads(text: str | bytes) -> Any:
    """JSON that Python cannot read is shown as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode() if isinstance(text, bytes) else text


@contextlib.contextmanager
def session() -> Iterator[Connection]:
    """A connection to the named database, whose fairq fits this code."""
    with contextlib.closing(connect(resolve(named_dsn()))) as conn:
        try:
            with translating():
                install.check_version(conn)
                yield conn
        except (Refused, NotAllowed) as exc:
            raise refusal(exc, click.get_current_context(), conn.info.user) from exc


@contextlib.contextmanager
def limited(conn: Connection, seconds: float) -> Iterator[None]:
    """A transaction whose statements may take so long, whatever the role's statement_timeout is."""
    with conn.transaction():
        # Local to the transaction, so it also works behind a pooler.
        conn.execute("select set_config('statement_timeout', %s, true)", [f"{seconds * 1000:.0f}ms"])
        yield


def rows(conn: Connection, query: str, **parameters: Any) -> list[dict[str, Any]]:
    """The rows, in binary form: psycopg reads times as text only in the usual DateStyle and IntervalStyle."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query.encode(), parameters or None, binary=True).fetchall()


def server_time(conn: Connection) -> datetime:
    """The time of the database's clock, so that no age is computed from two clocks."""
    at: datetime = rows(conn, "select clock_timestamp() as at")[0]["at"]
    return at


# --- Options ---------------------------------------------------------------------------------------

_UNITS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|sec|s|min|m|h|d|w)", re.IGNORECASE)


def parse_duration(text: str) -> timedelta | None:
    """The length of `90`, `90s`, `1h30m` or `7d`; None for anything else."""
    text = text.strip()
    try:
        if re.fullmatch(r"\d+(?:\.\d+)?", text):
            return timedelta(seconds=float(text))
        if not re.fullmatch(rf"(?:{_PART.pattern}\s*)+", text, re.IGNORECASE):
            return None
        return timedelta(seconds=sum(float(n) * _UNITS[unit.lower()] for n, unit in _PART.findall(text)))
    except OverflowError:
        return None


def parse_when(text: str, now: datetime) -> datetime | None:
    """The time of `+10m`, or of ISO 8601 with a time zone; None for anything else."""
    if text.strip().startswith("+"):
        ahead = parse_duration(text.strip()[1:])
        try:
            return None if ahead is None else now + ahead
        except OverflowError:
            return None
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return at if at.utcoffset() is not None else None


def duration(text: str) -> timedelta:
    if (found := parse_duration(text)) is None:
        raise click.BadParameter(f"{text!r} is not a length of time, such as 500ms, 90s, 10m, 1h30m or 7d.")
    return found


def when(text: str) -> datetime:
    if (found := parse_when(text, datetime.now(UTC))) is None:
        raise click.BadParameter(
            f"{text!r} is not a time. Write +10m for ten minutes from now, or a time with its zone: "
            "2030-01-31T08:00:00+00:00."
        )
    return found


def ident(text: str) -> int:
    """The type of a task's id."""
    if not re.fullmatch(r"\d{1,19}", text) or int(text) >= 2**63:
        raise click.UsageError(f"{clean(text)!r} is not a task id. An id is a number, as enqueue prints it.")
    return int(text)


def task_ids(values: Sequence[str]) -> list[int]:
    """Ids from the command line, where `-` stands for those on stdin."""
    words: list[str] = []
    for value in values:
        words += sys.stdin.read().split() if value == "-" else [value]
    return list(dict.fromkeys(map(ident, words)))


def asks(yes: bool) -> bool:
    """Whether to ask for confirmation: not with --yes. With --json nobody could answer."""
    if not yes and wants_json():
        raise click.UsageError("--json cannot ask for confirmation: add --yes.")
    return not yes


# --- Answers ---------------------------------------------------------------------------------------


def console(stderr: bool = False) -> Console:
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def plain(value: Any) -> Any:
    """A value for JSON: times in ISO 8601, lengths of time in seconds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value


def show(document: dict[str, Any], *parts: RenderableType) -> None:
    """Print the answer of a command: JSON with --json, else text."""
    if wants_json():
        click.echo(json.dumps(plain(document), default=str))
        return
    emit(*parts)


def emit(*parts: RenderableType) -> None:
    """Print; in a file or a pipe without trailing spaces."""
    out = console()
    with contextlib.nullcontext() if out.is_terminal else out.capture() as captured:
        for part in parts:
            out.print(part)
    if captured is not None:
        click.echo("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), nl=False)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> RenderableType:
    """A table that fits the terminal: names are cut in the middle, prose is wrapped.

    `>name` is a column of numbers, which are never cut, `~name` a column of prose. A column with `?` next is
    left out if it is empty or all zeros.
    """
    cells = [[c if isinstance(c, Text) else Text(clean(str(c))) for c in row] for row in rows]
    heads = [name.lstrip(">~?") for name in columns]
    shown = [
        at
        for at, name in enumerate(columns)
        if "?" not in name[:2] or any(row[at].plain.strip("0") for row in cells)
    ]
    widths = {at: max([cell_len(heads[at]), *(row[at].cell_len for row in cells)]) for at in shown}
    least = {
        at: max(cell_len(heads[at]), 16 if columns[at][0] == "~" else 8)
        for at in shown
        if columns[at][0] != ">"
    }
    for _ in range(max(sum(widths.values()) + 2 * (len(shown) - 1) - console().width, 0)):
        if candidates := [at for at in least if widths[at] > least[at]]:
            widths[max(candidates, key=lambda at: widths[at])] -= 1
    made = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for at in shown:
        right, prose = columns[at][0] == ">", columns[at][0] == "~"
        made.add_column(heads[at], justify="right" if right else "left", width=widths[at], no_wrap=not prose)
        if not right and not prose:
            for row in cells:
                row[at] = _cut(row[at], widths[at])
    for row in cells:
        made.add_row(*(row[at] for at in shown))
    return made if title is None else Group(Text(title, "bold"), made)


def _cut(cell: Text, width: int) -> Text:
    """Both ends of a name that is too long: they tell names apart."""
    if cell.cell_len <= width:
        return cell
    head = set_cell_size(cell.plain, (width - 1) // 2)
    tail = cell.plain
    while cell_len(tail) > width - 1 - cell_len(head):
        tail = tail[1:]
    return Text(f"{head}…{tail}", cell.style)


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def count(amount: int, one: str, many: str | None = None) -> str:
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def span(seconds: float | timedelta | None) -> str:
    """A length of time for people: 4 s, 12 min, 3 h 20 min, 5 d 2 h."""
    if seconds is None:
        return ""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f} ms" if seconds else "0 s"
    whole = round(seconds)
    for size, name, size_below, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // size_below
            return f"{sign}{whole // size} {name}" + (f" {rest} {below}" if rest else "")
    if whole >= 60:
        rest = whole % 60
        return f"{sign}{whole // 60} min" + (f" {rest} s" if rest and whole < 600 else "")
    return f"{sign}{seconds:.1f} s" if seconds < 10 and seconds != whole else f"{sign}{whole} s"
