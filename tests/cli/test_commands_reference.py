"""docs/reference/cli*.md: the examples were really run."""

import re
from pathlib import Path

import pytest

from tests.support.cli_pages import parts, prepare, run, same
from tests.support.database import Database
from tests.support.shards import shows_one_shard
from tests.support.sql_pages import blocks as sql_blocks
from tests.support.sql_pages import run as run_sql

DOCS = Path(__file__).resolve().parents[2] / "docs"
REFERENCE = DOCS / "reference"


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
ONE_ORDER = {"cli-queues"}


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
