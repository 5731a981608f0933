"""Options of a command made from the parameters of a generated call, so that none is missing.

`configure_queue` and its like take null for "leave it as it is". The generated wrapper has each of their
parameters with its type; here it becomes an option of that type.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import NoneType
from typing import Any, TypeVar

import click

from fairq.commands.common import DURATION

__all__ = ["given", "parameters", "reset_option", "settings_options"]

F = TypeVar("F", bound=Callable[..., Any])


def parameters(call: Callable[..., Any]) -> dict[str, type]:
    """The optional parameters of a generated call, with their types, in the order of the function."""
    hints = typing.get_type_hints(call)
    found: dict[str, type] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is None:
            (found[name],) = (each for each in typing.get_args(hints[name]) if each is not NoneType)
    return found


def settings_options(call: Callable[..., Any], helps: Mapping[str, str]) -> Callable[[F], F]:
    """One option per setting: --max-running N, --retention TIME, --notify / --no-notify."""

    def decorate(command: F) -> F:
        for name, kind in reversed(parameters(call).items()):
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


def reset_option(*names: str) -> Callable[[F], F]:
    """--reset NAME, as often as one likes: a setting of one's own is taken away."""
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
