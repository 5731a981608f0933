"""`fairq bench`: finds and runs the benchmarks of a clone, which are not part of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from fairq.cli import Exit, Failure, command


class Benchmarks(click.Group):
    """The commands of `benchmarks/__main__.py` in the clone, if there is one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        found = _commands()
        return found.list_commands(ctx) if found else []

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = _commands()
        if found is None:
            raise Failure(
                "the benchmarks are in fairq's repository, not in the package",
                hint="Run this in a clone, in the folder that contains benchmarks/.",
                code="no_benchmarks",
                exit_code=Exit.USAGE,
            )
        return found.get_command(ctx, cmd_name)


def _commands() -> click.Group | None:
    folder = find_benchmarks(Path.cwd())
    if folder is None:
        return None
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    found: click.Group = importlib.import_module("benchmarks.__main__").main
    return found


def find_benchmarks(here: Path) -> Path | None:
    """The clone that this code runs from, or that is the current folder."""
    for folder in (Path(__file__).resolve().parents[2], here):
        if (folder / "benchmarks" / "harness.py").is_file() and (folder / "sql" / "schema").is_dir():
            return folder
    return None


@command(
    cls=Benchmarks,
    codes={
        1: "something is slower, or a benchmark failed",
        2: "wrong usage, something not committed, or no clone here",
    },
    dsn=False,
    json=False,
)
def bench() -> None:
    """Options and results: docs/reference/cli-bench.md.

    fairq bench run --scale quick              run all of them, small
    fairq bench explain                        show what a pop visits in five designs
    fairq bench report RESULTS --out page.md   make a page with plots
    """
