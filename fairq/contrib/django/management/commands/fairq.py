"""`manage.py fairq …`: fairq's command line on the database of the settings."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from fairq.contrib.django import database
from fairq.dsn import VARIABLES
from fairq.worker.supervisor import LIFELINE

APP = "fairq.contrib.django.worker:app"


class Command(BaseCommand):
    help = "fairq's command line on the database of the settings. `manage.py fairq work` runs tasks."
    requires_system_checks: list[str] = []  # as Django declares it

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        return super().create_parser(prog_name, subcommand, add_help=False, **options)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", help="The alias in DATABASES. Default: FAIRQ_DATABASE.")
        parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def print_help(self, prog_name: str, subcommand: str) -> None:
        _main()(["--help"], prog_name=f"{os.path.basename(prog_name)} {subcommand}")

    def handle(self, *_: Any, words: list[str], database: str | None, help: bool, **options: Any) -> None:
        words = ["--help"] if help else list(_without_django(words))
        from_shell: bool = self._called_from_command_line
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment(database))
            if not from_shell:
                stack.enter_context(contextlib.redirect_stdout(self.stdout._out))
                stack.enter_context(contextlib.redirect_stderr(self.stderr._out))
            try:
                _main()(words, prog_name="manage.py fairq")
            except SystemExit as exc:
                if exc.code and not from_shell:
                    text = f"fairq {' '.join(words)} ended with {exc.code}"
                    raise CommandError(text, returncode=exc.code) from exc
                if from_shell:
                    raise


def _main() -> Any:
    try:
        from fairq.cli import main
    except ModuleNotFoundError as exc:
        if exc.name != "click":
            raise
        raise CommandError("fairq's command line is an extra: pip install 'fairq[cli]'") from exc
    return main


def _without_django(words: list[str]) -> Iterator[str]:
    """Remove Django's own options, which it has already read."""
    rest = iter(words)
    for word in rest:
        name, sign, _ = word.partition("=")
        if name not in ("--settings", "--pythonpath"):
            yield word
        elif not sign:
            next(rest, None)


@contextlib.contextmanager
def _environment(using: str | None) -> Iterator[None]:
    """Set the default database and app."""
    # Under a supervisor they are set already.
    chosen = {} if LIFELINE in os.environ else {VARIABLES[0]: database.dsn(using), "FAIRQ_APP": APP}
    before = dict(os.environ)
    os.environ.update(chosen)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
