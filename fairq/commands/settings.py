"""Options of a command made from the settings that a function of `fairq.policies` takes: none is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import click

from fairq.commands.common import DURATION
from fairq.policies import kinds

__all__ = ["named", "settings_options"]

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(settings: Any) -> Callable[[F], F]:
    """One option per setting, --max-running N, --retention TIME, --notify / --no-notify; and --reset NAME."""
    known = kinds(settings)

    def decorate(command: F) -> F:
        command = click.option(
            "--reset",
            type=click.Choice(list(known)),
            multiple=True,
            metavar="NAME",
            help="Take a setting away, so that the default holds; --reset max_running. May be repeated.",
        )(command)
        for name, (kind, text) in reversed(known.items()):
            flag = name.replace("_", "-")
            if kind is bool:
                option = click.option(f"--{flag}/--no-{flag}", name, default=None, help=text)
            else:
                shown, converter = _TYPES[kind]
                option = click.option(f"--{flag}", name, type=converter, metavar=shown, help=text)
            command = option(command)
        return command

    return decorate


_TYPES: dict[type, tuple[str, Any]] = {
    int: ("N", int),
    float: ("X", float),
    timedelta: ("TIME", DURATION),
    str: ("TEXT", str),
}


def named(options: Mapping[str, Any], *, may_be_none: bool = False) -> dict[str, Any]:
    """The settings that were named, None for those to take away. None at all is a question, not a change."""
    found = dict.fromkeys(options["reset"])
    found |= {name: value for name, value in options.items() if name != "reset" and value is not None}
    if not found and not may_be_none:
        raise click.UsageError("Name at least one setting to change; --help lists them.")
    return found
