"""Pages with commands that were really run.

The lines of a ```console block that begin with `$ ` run in a shell, in the order of the page, against a fresh
database; what follows is what they print. A comment `<!-- sql: … -->` prepares the database. Rewrite with

    python -m tests.support.cli_pages docs/reference/cli-*.md docs/how-to/*.md
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.support.processes import ROOT

_PART = re.compile(r"<!-- sql: (?P<sql>.*?) -->|^```console\n(?P<console>.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,.:%+-]*(?:(?: (?:ms|s|min|h|d)\b)(?: \d+ (?:s|min|h|d)\b)*)?")


@dataclass(frozen=True)
class Part:
    line: int
    sql: str | None
    commands: list[tuple[str, str]]  # each with what it prints
    span: tuple[int, int]  # of the inside of a console block


def parts(page: str) -> Iterator[Part]:
    for match in _PART.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        if match["sql"] is not None:
            yield Part(line, match["sql"], [], match.span("sql"))
            continue
        commands: list[tuple[str, str]] = []
        for text in match["console"].splitlines(keepends=True):
            if text.startswith("$ "):
                commands.append((text[2:].rstrip("\n"), ""))
            elif commands and commands[-1][0].endswith("\\") and not commands[-1][1]:
                commands[-1] = (commands[-1][0] + "\n" + text.rstrip("\n"), "")
            else:
                commands[-1] = (commands[-1][0], commands[-1][1] + text)
        yield Part(line, None, commands, match.span("console"))


def run(command: str, dsn: str, folder: str) -> str:
    """What a shell in a folder prints, on both streams, without spaces at the ends of lines."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "FAIRQ_DSN": dsn, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        env=env,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def prepare(dsn: str, sql: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.encode())


def same(one: str, other: str) -> bool:
    """Whether two outputs differ in numbers, times and the widths of columns only."""
    return _bare(one) == _bare(other)


def _bare(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", _NUMBER.sub("#", line)).strip() for line in text.splitlines()]


def rewritten(page: str, dsn: str) -> str:
    text: list[str] = []
    at = 0
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(page):
            if part.sql is not None:
                prepare(dsn, part.sql)
                continue
            text.append(page[at : part.span[0]])
            text += [f"$ {command}\n{run(command, dsn, folder)}" for command, _ in part.commands]
            at = part.span[1]
    return "".join([*text, page[at:]])


def _main(files: list[str]) -> None:
    from fairq import embedded
    from tests.support.schema import load_schema

    with embedded.start() as server:
        for number, file in enumerate(files):
            page = Path(file).read_text("utf-8")
            if not any(True for _ in parts(page)):
                continue
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute(f"create database page_{number}".encode())
            with psycopg.connect(server.dsn(f"page_{number}")) as loading:
                load_schema(loading)
            Path(file).write_text(rewritten(page, server.dsn(f"page_{number}")), "utf-8")


def commands_of(page: str) -> list[Any]:
    return [command for part in parts(page) for command, _ in part.commands]


if __name__ == "__main__":
    _main(sys.argv[1:])
