"""Every command with odd arguments: an exit code that its help lists, a word about it, and no traceback."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner

import fairq
from fairq.cli import Exit, main
from tests.fuzz.values import DOCUMENTS, TEXTS
from tests.support.calls import create_each, finish, pop, register
from tests.support.database import Database

CALLS = max(40, int(os.environ.get("FAIRQ_TEST_FUZZ", "0")) // 50)

# What would run on and on: these end at once.
ENDS = {
    "work": ["no.such.module"],
    "top": ["--count", "1"],
    "result": ["--timeout", "1ms"],
    "drain": ["--timeout", "1ms"],
    "web": ["--host", "192.0.2.1"],  # an address that nobody has
}
# For developers of fairq; they start servers of their own, or write files.
LEFT_OUT = ("demo", "bench", "gen")
NUMBERS = [
    *["0", "-1", "1", "3", "99999999999999999999"],
    *["-9223372036854775808", "1e400", "NaN", "inf", "0x10", "\u0663", "1_000", " 5", "1.5"],
]
LENGTHS = [
    *["0", "5m", "1ms", "-5m", "99999999999999d", "1e9s", "nan", "+10m"],
    *["2030-01-31T08:00:00+00:00", "0001-01-01", "9999-12-31T23:59:59-12:00", "+9999999d"],
]
NAMES = [
    *["default", "other", "bob", "ada", "mail=5", "=", "a=b=c", "weight=nan"],
    *["max_running=1", "max-running=x", "rate=1/0s", "rate=5/m", "--", "-", "-x", "\udcff"],
]


Words = tuple[str, ...]


def commands(group: click.Group = main, path: Words = ()) -> Iterator[tuple[Words, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    contents = {
        "empty": b"",
        "lines": b'{"group": "bob", "payload": {}}\n{"group": null}\n',
        "broken": b'{"group": "bob"\n\xff\xfe\x00',
        "deep": b"[" * 100_000,
        "fine": b'{"group": "bob", "payload": {"n": 1}}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return [str(tmp_path), "/dev/null", *(str(tmp_path / name) for name in ("missing", *contents))]


def words(random: Random, files: list[str], ids: list[int]) -> str:
    """Something for an argument or an option."""
    texts = [text for text in (*TEXTS, *DOCUMENTS) if text is not None and len(text) < 20_000]
    kind = random.random()
    if kind < 0.25:
        return str(random.choice([*ids, ids[-1] + 1000]))
    return random.choice(random.choice([texts, NUMBERS, LENGTHS, NAMES, NAMES, files]))


def arguments_of(command: click.Command, random: Random, files: list[str], ids: list[int]) -> list[str]:
    said: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            count = random.choice([0, 1, 1, 1, 2]) if parameter.nargs == -1 or not parameter.required else 1
            said += [words(random, files, ids) for _ in range(count)]
        elif random.random() < 0.3 and parameter.name not in ("dsn", "every"):
            assert isinstance(parameter, click.Option)
            said.append(random.choice([*parameter.opts, *parameter.secondary_opts]))
            if not parameter.is_flag and not parameter.count:
                choices = list(getattr(parameter.type, "choices", [])) if random.random() < 0.7 else []
                said.append(random.choice(choices) if choices else words(random, files, ids))
    return said


def listed(command: click.Command) -> set[int]:
    """The exit codes that the command's help has."""
    line = " ".join(re.findall(r"Exit codes: (.*)", (command.epilog or "") + (command.help or "")))
    return {int(code) for code in re.findall(r"(?:^|· )(\d+) ", line)}


def complaint(command: click.Command, said: list[str], given: Any, dsn: str) -> str | None:
    """What is wrong with how this call ended."""
    called = [*said, "--dsn", dsn] if said[0] != "sql" else said
    done = CliRunner().invoke(main, called, input=given, prog_name="fairq")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"
    if "what is in flight to end" in done.output:
        # More shards: it waits for tasks that nobody here ends, as it should.
        return None
    if done.exit_code not in listed(command):
        return f"exit code {done.exit_code}: {done.output[-500:]}"
    if "Traceback" in done.output or "\x1b" in done.output:
        return f"its output: {done.output[-500:]}"
    if done.exit_code and not done.output.strip():
        return f"exit code {done.exit_code}, and no word about it"
    if done.exit_code and "--json" in said and "--" not in said:
        try:
            json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return f"no JSON: {done.output[-500:]}"
    return None


def test_every_command_refuses_odd_arguments_by_a_code_that_its_help_lists(
    database: Database, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAIRQ_TRACEBACK", raising=False)
    conn = database.connect(autocommit=True)
    conn.execute("select fairq.configure_queue('other')")
    ids = create_each(conn, "bob", "ada", "bob", "ada", "bob")
    pop(conn, register(conn), 2)
    random, found = Random(CALLS), dict[str, str]()
    known = [(path, command) for path, command in commands() if path[0] not in LEFT_OUT]

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    signal.signal(signal.SIGALRM, hangs)
    for _ in range(CALLS):
        path, command = random.choice(known)
        said = [*path, *arguments_of(command, random, files, ids)]
        said += ENDS.get(path[0], [])
        given = random.choice(["", "y\n", "1 2\n", b"\xff\xfe\n", '{"group": "bob", "payload": {}}\n'])
        signal.alarm(30)
        try:
            wrong = complaint(command, said, given, database.dsn)
        finally:
            signal.alarm(0)
        if wrong:
            found.setdefault(f"{' '.join(path)}: {wrong[:60]}", f"{[word[:80] for word in said]}: {wrong}")
    assert not found, "\n\n".join(found.values())
    with psycopg.connect(database.dsn) as after:
        assert after.execute("select count(*) > 0 from fairq.tasks").fetchone() == (True,)


@pytest.mark.parametrize("result", ["1e131000", "[" * 3000 + "]" * 3000])
def test_a_result_that_is_too_much_for_python_is_no_bug_of_ours(database: Database, result: str) -> None:
    """Consumers in other languages write what PostgreSQL takes."""
    # Hypothesis raises the limit for its examples, and in this process it stays raised.
    sys.setrecursionlimit(2000)
    conn = database.connect(autocommit=True)
    create_each(conn, "bob")
    worker = register(conn)
    (task,) = pop(conn, worker)
    finish(conn, worker, [task], "failed", results=[result], errors=[result])
    with pytest.raises(fairq.errors.NotDecodable):
        fairq.result(conn, task, timeout=0)
    known = {path: command for path, command in commands() if path[0] in ("result", "explain")}
    for (name,), command in known.items():
        for options in ([], ["--json"]):
            assert not complaint(command, [name, str(int(task)), *options], "", database.dsn)


@pytest.mark.parametrize(
    "said", [["queues", "reset-rate", "\udcff"], ["resume", "default", "--group", "\udcff"]]
)
def test_a_word_that_is_not_utf8_is_wrong_usage(database: Database, said: list[str]) -> None:
    done = CliRunner().invoke(main, [*said, "--dsn", database.dsn], prog_name="fairq")
    assert done.exit_code == Exit.USAGE, done.output
