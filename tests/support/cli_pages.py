"""Pages with commands that were really run.

The lines of a ```console block that begin with `$ ` run in a shell, in the order of the page, against a fresh
database; what follows is what they print. A comment `<!-- sql: … -->` prepares the database. Rewrite with

    python -m tests.support.cli_pages docs/reference/cli-*.md docs/how-to/*.md
"""

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

import fairq.cli
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
    """What a shell in a folder prints on both streams, without trailing spaces."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "FAIRQ_DSN": dsn, "PATH": path, "PYTHONPATH": str(ROOT)}
    with tempfile.NamedTemporaryFile("w+") as out:
        if command.startswith("fairq ") and not re.search(r"[|<>;&$`#*]", command):
            words = shlex.split(command.replace("\\\n", " "))[1:]
            process = _FORKS.Process(target=_fairq, args=(words, env, folder, out.name))
            process.start()
            process.join()
        else:
            command_line = ["bash", "-c", command]
            subprocess.run(command_line, env=env, cwd=folder, stdout=out, stderr=out, check=False)
        out.seek(0)
        return "".join(f"{line.rstrip()}\n" for line in out.read().splitlines())


# To import a program and all of its libraries takes most of its time: one process does so, and is forked.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["fairq.cli", "fairq.commands.common", "psycopg", "rich.console", "rich.table"])


def _fairq(words: list[str], env: dict[str, str], folder: str, out: str) -> None:
    """The command, in a process of its own."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    number = os.open(out, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(number, stream)
    fairq.cli.main(words, prog_name="fairq")


def prepare(dsn: str, sql: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.encode())


def same(one: str, other: str) -> bool:
    """Whether two outputs differ only in numbers, times and the widths of columns."""
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
