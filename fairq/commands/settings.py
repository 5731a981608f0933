"""The options of a command, made from the settings or options that a typed dict declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import click

from fairq.cli import option, together
from fairq.commands.common import duration, when
from fairq.options import DEFAULTS, EnqueueOptions, Option, options_of

Decorator = Callable[[Callable[..., Any]], Any]


def settings_options(settings: Any, *, reset: bool = True) -> Decorator:
    """One option per setting, --max-running N, --retention TIME, --notify / --no-notify; and --reset NAME."""
    known = options_of(settings)
    declared = together(*(declared_option(name, known[name]) for name in known))
    if not reset:
        return declared
    takes_away = option(
        "--reset NAME",
        "Take a setting away, so that its default holds: --reset max-running. May be repeated.",
        type=click.Choice([name.replace("_", "-") for name in known]),
        multiple=True,
    )
    return together(declared, takes_away)


def task_options() -> Decorator:
    """One option per task option: --run-at TIME, --headers JSON."""
    known = options_of(EnqueueOptions)
    first = (declared_option(name, known[name], default=DEFAULTS[name]) for name in DEFAULTS)
    others = (declared_option(name, known[name]) for name in known if name not in DEFAULTS)
    return together(*first, *others)


def declared_option(name: str, declared: Option, **given: Any) -> Decorator:
    """The command's option for a field of a typed dict."""
    flag = name.replace("_", "-")
    if declared.type is bool:
        return click.option(f"--{flag}/--no-{flag}", name, default=None, help=declared.help)
    shown, converter = _TYPES[declared.type]
    if shown == "TEXT":
        shown = _NAMED.get(name, "KEY" if name.endswith("_key") else shown)
    return option(f"--{flag} {name} {shown}", declared.help, type=converter, **given)


_NAMED = {"queue": "NAME", "kind": "NAME"}
_TYPES: dict[Any, tuple[str, Any]] = {
    int: ("N", int),
    float: ("X", float),
    timedelta: ("TIME", duration),
    datetime: ("TIME", when),
    str: ("TEXT", str),
    Mapping: ("JSON", str),
}


def named(options: Mapping[str, Any], *, may_be_none: bool = False) -> dict[str, Any]:
    """The named settings; None for those to take away."""
    found: dict[str, Any] = dict.fromkeys(name.replace("-", "_") for name in options.get("reset", ()))
    found |= {name: value for name, value in options.items() if name != "reset" and value is not None}
    if not found and not may_be_none:
        raise click.UsageError("Name at least one setting to change; --help lists them.")
    return found
