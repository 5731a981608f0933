"""Type checkers see the right answer for each connection, and report mistakes."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mypy import said_of

SAMPLES = Path(__file__).parent / "typing_samples"


def errors_in(sample: Path) -> list[str]:
    return [line for line in said_of(sample) if ": error:" in line]


def test_the_samples_of_right_use_are_right() -> None:
    assert errors_in(SAMPLES / "good.py") == []


def test_each_mistake_is_seen_and_nothing_else_is(tmp_path: Path) -> None:
    """A forgotten `await`, a payload of another type, a misspelled option."""
    text = (SAMPLES / "bad.py.txt").read_text()  # not .py, or `mypy` for this repository would refuse it
    (tmp_path / "bad.py").write_text(text)
    expected = {
        (number, found[1])
        for number, line in enumerate(text.splitlines(), 1)
        if (found := re.search(r"# error: (\S+)$", line)) is not None
    }
    seen = set()
    for error in errors_in(tmp_path / "bad.py"):
        found = re.search(r":(\d+): error: .*\[([\w-]+)\]$", error)
        assert found, error
        seen.add((int(found[1]), found[2]))
    assert len(expected) > 10
    assert seen == expected


@pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None, reason="basedpyright: make test-pythons has it"
)
def test_pyright_sees_the_same(tmp_path: Path) -> None:
    text = (SAMPLES / "bad.py.txt").read_text()
    (tmp_path / "bad.py").write_text(text)
    (tmp_path / "good.py").write_text((SAMPLES / "good.py").read_text())
    (tmp_path / "pyrightconfig.json").write_text(
        '{"exclude": []}'
    )  # by itself: folders that begin with a dot
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    said = subprocess.run([*command, "-p", str(tmp_path)], capture_output=True, check=False)
    seen = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(said.stdout)["generalDiagnostics"]
        if each["severity"] == "error" or each.get("rule") == "reportUnusedCoroutine"
    }
    mistakes = {n for n, line in enumerate(text.splitlines(), 1) if re.search(r"# error: \S+$", line)}
    assert seen == {("bad.py", number) for number in mistakes}
