"""Splits query files into annotated statements, with placeholders written as PostgreSQL's `$n`.

A statement starts at its name line, `-- name: PopTasks :many`, and ends at the next one. As in sqlc, comment
lines become annotations and are removed from the text. `sqlc.arg(x)`, `sqlc.narg(x)` and `@x` become `$1`,
`$2`, … in order of appearance; `sqlc.embed(t)` becomes `t.*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fairq.codegen.model import Command, GenerationError

_OPERATOR = r"(?:(?!--|/\*)[-+*/<>=~!@#%^&|`?])+"
_TOKEN = re.compile(
    rf"""
    (?P<space>[ \t\n\r\f\v]+)
  | (?P<comment>--[^\n]*)
  | (?P<block>/\*)
  | (?P<string>[eE]'(?:[^'\\]|\\.|'')*' | (?:[bBnNxX]|[uU]&)?'(?:[^']|'')*')
  | (?P<quoted>(?:[uU]&)?"(?:[^"]|"")*")
  | (?P<dollar>\$(?:[^\W\d]\w*)?\$)
  | (?P<param>\$\d+)
  | (?P<named>@[^\W\d]\w*)
  | (?P<macro>(?i:sqlc)\s*\.\s*\w+(?:\s*\([^()]*\))?)
  | (?P<word>[^\W\d][\w$]*)
  | (?P<number>\d[\w.]*)
  | (?P<operator>{_OPERATOR})
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_NAME_LINE = re.compile(r"--\s*name:")
_MACRO = re.compile(
    r"""sqlc \s* \. \s* (?P<function>\w+) (?:\s* \( \s*
        (?: '(?P<string>[^']+)' | (?P<quoted>"(?:[^"]|"")+") | (?P<word>[^\W\d][\w$]*) ) \s* \))?""",
    re.VERBOSE | re.IGNORECASE,
)
_NAME_AND_COMMAND = re.compile(r"--\s*name:\s*(?P<name>[A-Za-z_]\w*)\s+(?P<cmd>:\w+)\s*")


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def is_blank(self) -> bool:
        return self.kind in ("space", "comment", "block")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What the query file says about `$number`: its name, if any, and whether it may be NULL (`narg`)."""

    number: int
    name: str = ""
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    name: str
    cmd: Command
    text: str
    path: str
    line: int  # of the name line, from 1
    lines: tuple[int, ...]  # the line in the file of each line of `text`
    comments: tuple[str, ...] = ()
    placeholders: tuple[Placeholder, ...] = ()
    embeds: tuple[int, ...] = ()  # where in the text a `relation.*` was `sqlc.embed(relation)`

    def error(self, message: str, hint: str = "", position: int | None = None) -> GenerationError:
        """An error at `position`, a character offset in `text`; by default at the name line."""
        line = self.line
        if position is not None and self.lines:
            line = self.lines[min(self.text.count("\n", 0, position), len(self.lines) - 1)]
        return GenerationError(message, hint=hint, path=self.path, line=line, query=self.name)


def tokens(sql: str) -> Iterator[Token]:
    """The tokens of SQL, comments and white space included; joined, they are the text again."""
    position = 0
    while position < len(sql):
        match = _TOKEN.match(sql, position)
        # The last alternative takes any character.
        assert match is not None
        assert match.lastgroup is not None
        kind, end = match.lastgroup, match.end()
        if kind == "block":
            end = _end_of_block_comment(sql, position)
        elif kind == "dollar":
            closing = sql.find(match.group(), end)
            kind, end = "string", len(sql) if closing < 0 else closing + len(match.group())
        yield Token(kind, sql[position:end], position)
        position = end


def _end_of_block_comment(sql: str, start: int) -> int:
    depth, position = 0, start  # block comments nest
    for mark in re.finditer(r"/\*|\*/", sql[start:]):
        depth += 1 if mark.group() == "/*" else -1
        position = start + mark.end()
        if depth == 0:
            return position
    return len(sql)


def parse_file(text: str, path: str) -> list[Statement]:
    """The statements of a query file, in order."""
    starts = [
        token
        for token in tokens(text)
        if token.kind == "comment" and _NAME_LINE.match(token.text) and text[: token.start][-1:] in ("", "\n")
    ]
    before = text[: starts[0].start] if starts else text
    stray = next((token for token in tokens(before) if not token.is_blank), None)
    if stray is not None:
        hint = "put a line like `-- name: PopTasks :many` above it"
        line = before.count("\n", 0, stray.start) + 1
        raise GenerationError("a statement has no name", hint=hint, path=path, line=line)
    ends = [*(token.start for token in starts), len(text)][1:]
    return [
        _statement(text[start.end : end], start.text, path, text.count("\n", 0, start.start) + 1)
        for start, end in zip(starts, ends, strict=True)
    ]


def _statement(body: str, name_line: str, path: str, line: int) -> Statement:
    named = _NAME_AND_COMMAND.fullmatch(name_line)
    commands = " ".join(Command)
    if named is None:
        message, hint = (
            f"the name line is not understood: {name_line.strip()}",
            "write `-- name: <Name> <command>`",
        )
        raise GenerationError(message, hint=f"{hint}, with one of {commands}", path=path, line=line)
    name = named["name"]
    if named["cmd"] not in list(Command):
        message, hint = f"there is no command {named['cmd']}", f"use one of {commands}"
        raise GenerationError(message, hint=hint, path=path, line=line, query=name)
    text, lines, comments = _without_comment_lines(body, line)
    plain = Statement(name, Command(named["cmd"]), text, path, line, lines, comments)
    # A block has one statement, with an optional semicolon.
    words = [token for token in tokens(text) if not token.is_blank]
    if end := next((token for token in words if token.text == ";"), None):
        if rest := words[words.index(end) + 1 :]:
            hint = "give each statement its own `-- name:` line"
            raise plain.error("a second statement follows the first", hint, rest[0].start)
        plain, words = replace(plain, text=text[: end.start].rstrip()), words[:-1]
    if not words:
        raise plain.error("no statement follows the name line")
    return _with_numbers(plain)


def _without_comment_lines(body: str, name_line: int) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """The text without comment lines, the line in the file of each remaining line, and the comments.

    An indented comment belongs to the statement, as in sqlc.
    """
    inside_string: set[int] = set()
    for token in tokens(body):
        if token.kind in ("string", "quoted", "block"):
            first = body.count("\n", 0, token.start)
            inside_string.update(range(first + 1, first + 1 + token.text.count("\n")))
    kept: list[tuple[int, str]] = []
    comments: list[str] = []
    for number, written in enumerate(body.split("\n")):
        if number in inside_string or not written.startswith("--"):
            kept.append((name_line + number, written.rstrip() if number not in inside_string else written))
        else:
            comments.append(written.rstrip().removeprefix("--"))
    while kept and not kept[0][1].strip():
        kept.pop(0)
    while kept and not kept[-1][1].strip():
        kept.pop()
    return "\n".join(text for _, text in kept), tuple(line for line, _ in kept), tuple(comments)


def _with_numbers(statement: Statement) -> Statement:
    """The statement with all placeholders written as `$n`, and what was said about each."""
    numbers: dict[str, int] = {}
    nullable: set[int] = set()
    positional: set[int] = set()
    embeds: list[int] = []
    text = ""
    for token in tokens(statement.text):
        written = token.text
        if token.kind == "param":
            positional.add(int(written[1:]))
        elif token.kind == "named":
            written = f"${numbers.setdefault(written[1:].lower(), len(numbers) + 1)}"
        elif token.kind == "macro":
            function, argument = _macro(statement, token)
            if function == "embed":
                embeds.append(len(text))
                written = f"{argument}.*"
            else:
                number = numbers.setdefault(argument, len(numbers) + 1)
                nullable |= {number} if function == "narg" else set()
                written = f"${number}"
        text += written
    if positional and numbers:
        message = "numbered ($1) and named (@name, sqlc.arg) placeholders are mixed"
        raise statement.error(message, "name all of them")
    if missing := [n for n in range(1, max(positional, default=0)) if n not in positional]:
        message = f"placeholder ${missing[0]} is missing"
        raise statement.error(message, "number them $1, $2, … without a gap")
    placeholders = [Placeholder(number) for number in sorted(positional)]
    placeholders += [Placeholder(number, name, number in nullable) for name, number in numbers.items()]
    return replace(statement, text=text, placeholders=tuple(placeholders), embeds=tuple(embeds))


def _macro(statement: Statement, token: Token) -> tuple[str, str]:
    """The function and the argument of `sqlc.<function>(<argument>)`."""
    found = _MACRO.fullmatch(token.text) or _MACRO.match(token.text)
    assert found is not None
    function = found["function"].lower()
    if function == "slice":
        hint = "write `= any(@ids::bigint[])`"
        raise statement.error("sqlc.slice is for databases without arrays", hint, token.start)
    if function not in ("arg", "narg", "embed"):
        raise statement.error(f"there is no sqlc.{function}", "known: arg, narg, embed", token.start)
    quoted = found["quoted"] or ""
    if function != "embed":
        quoted = quoted[1:-1].replace('""', '"')
    name = found["string"] or quoted or (found["word"] or "").lower()
    if not name or found.end() != len(token.text):
        raise statement.error(f"sqlc.{function} takes one name", position=token.start)
    return function, name
