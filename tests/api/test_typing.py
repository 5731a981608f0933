"""What a type checker sees: the right answer for each connection, and mistakes before they run."""

import re
from pathlib import Path

from mypy import api

from tests.support.processes import ROOT

SAMPLES = Path(__file__).parent / "typing_samples"


def errors_in(sample: Path) -> list[str]:
    """mypy's errors for a sample, without the settings of this repository."""
    out, err, _ = api.run(
        [
            "--strict",
            "--config-file=",
            "--explicit-package-bases",
            "--no-error-summary",
            "--no-pretty",
            f"--cache-dir={ROOT / '.mypy_cache' / 'samples'}",
            str(sample),
        ]
    )
    assert not err
    return [line for line in out.splitlines() if ": error:" in line]


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
