"""The reference pages are complete."""

import inspect
import re
from pathlib import Path

import click
import pytest

from fairq import install
from fairq.cli import Exit, command
from tools import reference

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_the_pages_match_the_declarations_of_commands() -> None:
    assert [file.name for file in reference.stale()] == [], "run: python -m tools.reference"


def test_a_command_without_a_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @command(codes={4: "too far"}, rights="fairq_work")
    @click.option("--far", metavar="N", help="How far.")
    def jump() -> None:
        """Jump."""

    every = [*reference.commands(), ("fairq jump", jump)]
    monkeypatch.setattr(reference, "commands", lambda: every)
    with pytest.raises(SystemExit, match="fairq jump"):
        reference.stale()
    assert reference.about("fairq jump", jump) == (
        "`fairq jump [OPTIONS]`\n\n- `--far N`: How far.\n\nExit codes: 4 too far. Rights: fairq_work.\n"
    )


def test_the_page_of_exit_codes_lists_each() -> None:
    page = (REFERENCE / "exit-codes.md").read_text("utf-8")
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert listed == [(str(code.value), code.name) for code in Exit]


def test_the_page_of_install_has_every_public_name() -> None:
    page = (REFERENCE / "install.md").read_text("utf-8")
    for name, value in vars(install).items():
        is_ours = getattr(value, "__module__", "") == install.__name__ and hasattr(value, "__qualname__")
        if is_ours and not name.startswith("_"):
            assert re.search(rf"`{name}\b", page), name
            assert inspect.getdoc(value), name


def test_the_page_of_install_has_every_error_with_its_code() -> None:
    page = (REFERENCE / "install.md").read_text("utf-8")
    for name, value in vars(install).items():
        if (
            inspect.isclass(value)
            and issubclass(value, install.InstallError)
            and value is not install.InstallError
        ):
            assert f"| `{name}` | `{value.code}` |" in page
    assert install.WouldLoseData.sqlstate in page
