"""The reference pages name everything there is."""

import inspect
import re
from pathlib import Path

import click
import pytest

from fairq import install
from fairq.cli import Exit
from fairq.commands.migrate import migrate, sql

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.mark.parametrize("command", [migrate, sql], ids=lambda command: command.name)
def test_the_page_has_a_line_for_every_option_with_its_default(command: click.Command) -> None:
    page = (REFERENCE / "cli-migrate.md").read_text("utf-8")
    section = page.split(f"\n## fairq {command.name}\n")[1].split("\n## ")[0]
    for option in command.params:
        assert isinstance(option, click.Option)
        (line,) = re.findall(rf"^\| `{option.opts[0]}`.*$", section, re.MULTILINE)
        default = option.default
        if not option.is_flag and isinstance(default, str | float):
            shown = f"{default:g}" if isinstance(default, float) else f"`{default}`"
            assert line.split("|")[2].strip() == shown


def test_the_page_of_exit_codes_lists_each() -> None:
    page = (REFERENCE / "exit-codes.md").read_text("utf-8")
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert listed == [(str(code.value), code.name) for code in Exit]


def test_the_page_of_install_has_every_public_name() -> None:
    page = (REFERENCE / "install.md").read_text("utf-8")
    for name in install.__all__:
        assert re.search(rf"`{name}\b", page), name
        assert inspect.getdoc(getattr(install, name)), name


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
