"""docs/reference/cli*.md: every command and option has its line, and what is shown was really run."""

import re
from pathlib import Path
from typing import Any

import click
import pytest

from fairq.cli import COMMANDS, main
from tests.support.cli_pages import parts, prepare, run, same
from tests.support.database import Database
from tests.support.shards import shows_one_shard
from tests.support.sql_pages import blocks as sql_blocks
from tests.support.sql_pages import run as run_sql

DOCS = Path(__file__).resolve().parents[2] / "docs"
REFERENCE = DOCS / "reference"
ELSEWHERE = {"demo", "gen", "migrate", "sql", "work"}  # with pages and tests of their own
EVERYWHERE = {"--dsn", "--json", "--help"}
PAGES = {
    **dict.fromkeys(("enqueue", "cancel", "retry", "result", "explain"), "cli-tasks.md"),
    **dict.fromkeys(("stats", "top", "queues", "groups", "keys", "cluster"), "cli-queues.md"),
    **dict.fromkeys(("pause", "resume", "drain", "maintain"), "cli-queues.md"),
    "bench": "cli-bench.md",
    "doctor": "cli-doctor.md",
    "completion": "cli.md",
}


def commands() -> list[tuple[str, click.Command]]:
    group: Any = main
    found: list[tuple[str, click.Command]] = []
    for name in COMMANDS:
        if name not in ELSEWHERE:
            command = group.get_command(click.Context(main), name)
            found.append((name, command))
            if isinstance(command, click.Group):
                context = click.Context(command)
                subs = [
                    (f"{name} {each}", command.get_command(context, each))
                    for each in command.list_commands(context)
                ]
                found += [(full, sub) for full, sub in subs if sub is not None]
    return found


def section(name: str) -> str:
    text = (REFERENCE / PAGES[name.split()[0]]).read_text("utf-8")
    heading = re.search(rf"^(#+) fairq {re.escape(name)}$", text, re.MULTILINE)
    assert heading, f"no section for fairq {name}"
    rest = text[heading.end() :]
    return re.split(rf"^#{{1,{len(heading[1])}}} fairq ", rest, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("name", "command"), commands(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_every_option_has_a_line_that_says_what_its_help_says(name: str, command: click.Command) -> None:
    text = section(name)
    for option in command.params:
        if not isinstance(option, click.Option) or option.opts[0] in EVERYWHERE:
            continue
        lines = re.findall(rf"^\| `{option.opts[0]}`.*$", text, re.MULTILINE)
        assert any(str(option.help) in line for line in lines), (name, option.opts[0])
        for other in option.secondary_opts:
            assert f"`{other}`" in text
        if not option.is_flag and isinstance(option.default, str | float | int):
            shown = f"{option.default:g}" if isinstance(option.default, float) else f"{option.default}"
            assert any(f"| `{shown}` |" in line for line in lines), (name, option.opts[0], shown)


def test_a_page_lists_no_option_that_is_not_there() -> None:
    known = {opt for _, command in commands() for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    for page in {*PAGES.values()}:
        for option in re.findall(r"^\| `(--[\w-]+)`", (REFERENCE / page).read_text("utf-8"), re.MULTILINE):
            assert option in known | EVERYWHERE, (page, option)


def test_the_overview_has_every_command_and_the_options_of_all() -> None:
    text = (REFERENCE / "cli.md").read_text("utf-8")
    for name in COMMANDS:
        assert re.search(rf"^\|.*\b{name}\b", text, re.MULTILINE), name
    for option in EVERYWHERE:
        assert f"| `{option}` |" in text


def test_links_of_the_pages_lead_somewhere() -> None:
    pages = [*REFERENCE.glob("cli*.md"), *REFERENCE.glob("sql/*.md"), *(DOCS / "how-to").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


OPERATING = (
    "watch-a-queue",
    "find-out-why-a-task-waits",
    "enqueue-in-bulk",
    "create-queues",
    "maintain-without-workers",
)


@pytest.mark.parametrize("name", OPERATING)
def test_the_sql_of_a_how_to_page_runs(database: Database, name: str) -> None:
    conn = database.connect(autocommit=True)
    found = list(sql_blocks((DOCS / "how-to" / f"{name}.md").read_text("utf-8")))
    assert found
    for block in found:
        run_sql(conn, block)


RUN = sorted(
    path
    for folder in ("reference", "how-to")
    for path in (DOCS / folder).glob("*.md")
    if any(True for _ in parts(path.read_text("utf-8")))
)


# They pop a few tasks of several groups, and show whose.
ONE_ORDER = {"watch-a-queue", "cli-queues"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[shows_one_shard] if path.stem in ONE_ORDER else [])
        for path in RUN
    ],
)
def test_commands_print_what_the_page_shows(database: Database, path: Path, tmp_path: Path) -> None:
    """Numbers, times and widths may differ. Rewrite with python -m tests.support.cli_pages."""
    for part in parts(path.read_text("utf-8")):
        if part.sql is not None:
            prepare(database.dsn, part.sql)
        for command, expected in part.commands:
            shown = run(command, database.dsn, str(tmp_path))
            assert same(shown, expected), f"{path.name}, line {part.line}: {command}\n{shown}"
