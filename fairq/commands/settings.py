"""Options of a command made from the settings that a function of `fairq.policies` takes: none is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, get_args

import click

from fairq.commands.common import DURATION
from fairq.policies import kinds

__all__ = ["given", "reset_option", "settings_options"]

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(changes: type, helps: Mapping[str, str]) -> Callable[[F], F]:
    """One option per setting: --max-running N, --retention TIME, --notify / --no-notify."""

    def decorate(command: F) -> F:
        for name, kind in reversed(kinds(changes).items()):
            flag = name.replace("_", "-")
            text = helps.get(name, name.replace("_", " ").capitalize() + ".")
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


def reset_option(known: Any) -> Callable[[F], F]:
    """--reset NAME, as often as one likes: a setting of one's own is taken away. `known` is a Literal."""
    names = get_args(known)
    return click.option(
        "--reset",
        type=click.Choice(names),
        multiple=True,
        metavar="NAME",
        help=f"Take a setting away, so that the default holds: {', '.join(names)}. May be repeated.",
    )


def given(options: Mapping[str, Any], reset: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that were named. None at all is a question, not a change."""
    found = {name: value for name, value in options.items() if value is not None}
    if not found and not reset:
        raise click.UsageError("Name at least one setting to change; --help lists them.")
    return found
