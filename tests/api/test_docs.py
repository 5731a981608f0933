"""The pages about Python: every example runs and prints what it shows, and everything public is there."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fairq
from fairq import cli, testing
from fairq.options import EnqueueOptions
from fairq.task import Declaration
from fairq.testing import __all__ as testing_names
from tests.support.database import Database
from tests.support.processes import ROOT

DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorials" / "first-steps-python.md"
HOW_TO = [
    *sorted((DOCS / "how-to").glob("enqueue-*.md")),
    *(
        DOCS / "how-to" / f"{name}.md"
        for name in (
            "change-policies-from-python",
            "end-a-task-with-its-effects",
            "put-code-around-handlers",
            "retry-failed-tasks",
            "run-tasks-on-a-schedule",
            "share-tokens",
            "take-many-tasks-at-once",
            "when-an-api-says-wait",
            "test-your-tasks",
            "trace-tasks",
            "use-with-django",
            "wait-for-a-result",
            "write-heavy-loads",
        )
    ),
]
PAGES = [*HOW_TO, DOCS / "reference" / "errors.md", DOCS / "reference" / "python.md"]


def environment(dsn: str) -> dict[str, str]:
    here = Path(sys.executable).parent
    return {
        **os.environ,
        "FAIRQ_DSN": dsn,
        "PYTHONPATH": os.fspath(ROOT),
        "PATH": f"{here}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "error",
    }


def expected_of(page: Path) -> list[str]:
    return re.findall(r"^```text\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_and_print_what_it_says(page: Path, database: Database) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.api.run_page", page, database.dsn],
        cwd=ROOT,
        env=environment(database.dsn),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "".join(expected_of(page))


@pytest.mark.skipif("work" not in cli.COMMANDS, reason="the command that the tutorial runs is not there")
def test_the_tutorial_leads_from_an_empty_folder_to_a_running_worker(
    empty_database: Database, tmp_path: Path
) -> None:
    text = TUTORIAL.read_text("utf-8")
    for name, content in re.findall(r"^```python title=(\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content)
    printed = ""
    for commands in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for command in commands.splitlines():
            ran = subprocess.run(
                shlex.split(command),
                cwd=tmp_path,
                env=environment(empty_database.dsn) | {"PYTHONWARNINGS": ""},
                capture_output=True,
                text=True,
                check=False,
            )
            assert ran.returncode == 0, (command, ran.stdout, ran.stderr)
            printed += ran.stdout
    for expected in expected_of(TUTORIAL):
        assert expected in printed
    assert "1 passed" in printed


def test_every_public_name_has_its_place_in_the_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    errors = (DOCS / "reference" / "errors.md").read_text("utf-8")
    for name in fairq.__all__:
        assert re.search(rf"`(fairq\.)?{name}\b", page + errors), name
    for name in testing_names:
        assert re.search(rf"`(testing\.)?{name}\b", page), name
    assert testing.__doc__


def test_every_name_of_the_reference_is_there() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    app = fairq.App()
    things = {
        "app": app,
        "task": app.task(kind="k")(lambda payload: None),
        "testing": testing,
        "fairq": fairq,
        "ctx": testing.context(),
    }
    named = set(re.findall(rf"`({'|'.join(things)})\.(\w+)", page))
    assert len(named) > 60
    for thing, name in sorted(named):
        assert hasattr(things[thing], name) or (thing == "fairq" and find_spec(f"fairq.{name}")), (
            thing,
            name,
        )


def test_every_option_of_the_public_functions_has_its_place_in_the_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    functions: list[Any] = [
        fairq.enqueue,
        fairq.enqueue_many,
        fairq.App.__init__,
        fairq.App.task,
        testing.drain,
    ]
    names = {*EnqueueOptions.__optional_keys__, *Declaration.__optional_keys__}
    for function in [*functions, testing.enqueued, fairq.Backoff.__init__, fairq.Item.__init__]:
        names |= inspect.signature(function).parameters.keys()
    for name in names - {"self", "handler", "options", "declared", "defaults"}:
        assert re.search(rf"\b{name}\b", page), name
