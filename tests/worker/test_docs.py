"""The pages about workers are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from fairq.worker import Settings
from fairq.worker.config import BOUNDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCES = [
    *(Path(__file__).resolve().parents[2] / "fairq" / "worker").glob("*.py"),
]


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def test_every_setting_has_a_line_with_its_bounds() -> None:
    text = page("reference/worker.md")
    for each in fields(Settings):
        (line,) = re.findall(rf"^- `{each.name}`(?:.|\n(?=  ))*", text, re.MULTILINE)
        bounds = BOUNDS.get(each.name)
        if bounds is not None:
            assert f"{bounds[0]} to {bounds[1]}" in line, line


def test_every_action_of_the_log_is_explained() -> None:
    text = page("reference/cli-work.md")
    quiet = {"registered", "not_started", "ended_late", "maintained", "maintain_slow", "keeper_error"}
    actions = {
        name
        for source in SOURCES
        for name in re.findall(r'\blog\.\w+\(\s*"(\w+)",', source.read_text("utf-8"))
    }
    assert len(actions) > 25
    missing = {name for name in actions - quiet if f"`{name}`" not in text}
    assert not missing


@pytest.mark.parametrize("name", ["how-to/run-workers.md", "reference/worker.md"])
def test_examples_are_python(name: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", page(name), re.DOTALL):
        compile(block, name, "exec")


def test_the_first_example_of_the_how_to_runs_as_shown(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """From the page itself: the module, then `fairq work myapp.tasks`, with --drain so that it ends."""
    import os

    import fairq

    desk = request.getfixturevalue("desk")
    block = re.findall(r"```python\n(# myapp/tasks.py.*?)```", page("how-to/run-workers.md"), re.DOTALL)[0]
    (tmp_path / "myapp").mkdir()
    (tmp_path / "myapp" / "tasks.py").write_text(block)
    fairq.enqueue(desk.conn, "bob", {"file": "a.pdf"}, kind="parse")
    done = subprocess.run(
        [sys.executable, "-m", "fairq", "work", "myapp.tasks", "--drain"],
        cwd=tmp_path,
        env={**os.environ, "FAIRQ_DSN": desk.dsn, "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.match(r"worker \d+ on default: \d+ slots?, no prefetch,", done.stdout)
    assert "bob a.pdf" in done.stdout
    assert desk.outcomes() == {"succeeded": 1}
