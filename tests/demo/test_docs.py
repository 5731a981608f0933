"""The README and the pages about SQL and the demo: their examples run, and their links work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairq import embedded
from fairq.demo.command import demo
from tests.support.database import Database
from tests.support.processes import ROOT
from tests.support.shards import shows_one_shard

TUTORIAL = ROOT / "docs" / "tutorials" / "first-steps-sql.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "sql" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The targets of links within a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    bare = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in bare}


@pytest.fixture(scope="module")
def psql() -> str:
    """The psql beside the server's programs, or the system's."""
    beside = embedded.find_binaries().bin_dir / "psql"
    found = str(beside) if beside.exists() else shutil.which("psql")
    if found is None:
        pytest.skip("there is no psql here")
    return found


def run_psql(psql: str, dsn: str, text: str) -> str:
    done = subprocess.run(
        [psql, "-X", "-v", "ON_ERROR_STOP=1", dsn], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@shows_one_shard
def test_the_sql_tutorial_runs_in_psql_and_answers_what_it_says(psql: str, database: Database) -> None:
    """A consumer needs only psql."""
    answers = run_psql(psql, database.dsn, "\n".join(blocks(TUTORIAL, "sql")))
    position = 0
    for expected in blocks(TUTORIAL, "text"):
        position = answers.find(expected, position)
        assert position >= 0, f"not answered, or not in this order:\n{expected}\n\nanswers:\n{answers}"
    outcomes = database.connect().execute(
        "select (select count(*) from fairq.finished_tasks), (select count(*) from fairq.workers)"
    )
    assert outcomes.fetchone() == (2, 0)


@shows_one_shard
def test_the_shell_consumer_of_the_tutorial_serves_everybody_in_turn(
    psql: str, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "psql").symlink_to(psql)
    with database.connect(autocommit=True) as conn:
        for group, file in [("bob", "1.pdf"), ("bob", "2.pdf"), ("bob", "3.pdf"), ("alice", "my letter.pdf")]:
            conn.execute("select fairq.create_task(%s, jsonb_build_object('file', %s::text))", (group, file))
    (script,) = blocks(TUTORIAL, "sh")
    done = subprocess.run(
        ["sh", "-euc", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "DB": database.dsn},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = ["1.pdf", "my letter.pdf", "2.pdf", "3.pdf"]
    assert done.stdout.splitlines() == [f"working on {file}" for file in files]
    row = database.connect().execute("select count(*) from fairq.finished_tasks where outcome = 'succeeded'")
    assert row.fetchone() == (4,)


@shows_one_shard
def test_the_sql_of_the_readme_runs(psql: str, database: Database) -> None:
    answers = run_psql(psql, database.dsn, "\n".join(blocks(ROOT / "README.md", "sql")))
    assert "letter.pdf" in answers


def test_the_reference_of_the_demo_names_every_option() -> None:
    page = (ROOT / "docs" / "reference" / "cli-demo.md").read_text("utf-8")
    for parameter in demo.params:
        assert f"`{parameter.opts[0]} " in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        leads_to = page.parent / target if target else page
        assert leads_to.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(leads_to), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_at_most_120_wide(page: Path) -> None:
    """But for tables, headings, comments and usages, and the notes of changes, which are a line each."""
    if page.parent.name != "unreleased":
        lines = without_code(page).splitlines()
        assert [
            each for each in lines if len(each) > 120 and not re.match(r" *[|#]|<!--|`fairq ", each)
        ] == []


def test_the_index_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"\]\(([^).#][^)#]*\.md)\)", (docs / "README.md").read_text("utf-8"))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    # These have lists of their own: the changelog, and the overview of the functions.
    elsewhere = {
        each for each in pages if re.match(r"unreleased/|reference/sql/(?!README|roles|tables)", each)
    }
    assert sorted(listed) == sorted(pages - elsewhere - {"README.md"})


@shows_one_shard
def test_the_python_of_the_readme_runs(database: Database, tmp_path: Path) -> None:
    """Three programs enqueue, declare, and enqueue declared tasks. Then the worker runs all of them."""
    env = {**os.environ, "FAIRQ_DSN": database.dsn, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    plain, declared, typed = blocks(ROOT / "README.md", "python")
    run("-c", plain)
    rows = database.connect().execute("select group_key, kind, payload from fairq.tasks order by id")
    assert rows.fetchall() == [
        ("bob", "parse", {"file": "a.pdf"}),
        ("bob", "parse", {"file": "b.pdf"}),
        ("alice", "parse", {"file": "letter.pdf"}),
    ]

    (tmp_path / "tasks.py").write_text(declared, "utf-8")
    run("-c", typed)
    assert "fairq work tasks:app --concurrency 4\n" in (ROOT / "README.md").read_text("utf-8")
    said = run("-m", "fairq", "work", "tasks:app", "--concurrency", "1", "--drain").splitlines()
    parsed = [line for line in said if line.startswith("parsing")]
    assert sorted(parsed[:2]) == ["parsing a.pdf for bob", "parsing letter.pdf for alice"]
    assert sorted(parsed[2:4]) == ["parsing b.pdf for bob", "parsing letter.pdf for alice"]
    assert parsed[4:] == [f"parsing {n}.pdf for bob" for n in range(10)]


def test_decisions_are_numbered_without_gaps_and_listed_by_their_titles() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    index = re.sub(r"\s+", " ", (ROOT / "docs" / "README.md").read_text("utf-8"))
    for number, page in enumerate(pages, 1):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
        assert page.name.startswith(f"{number:04}-")
        assert title.startswith(f"{number}. ")
        assert f"- [{title}](decisions/{page.name})" in index
