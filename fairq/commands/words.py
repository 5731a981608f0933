"""Rewords the engine's refusals for the command line: options instead of settings."""

from __future__ import annotations

import re
from datetime import timedelta

import click

from fairq.cli import Failure
from fairq.dsn import mask
from fairq.errors import FairqError, NotAllowed, QueueDraining, Refused, UnknownQueue, UnknownSchedule

_HINTS: dict[type[FairqError], str] = {
    UnknownQueue: "fairq queues lists them; fairq queues create NAME creates one.",
    UnknownSchedule: "fairq schedules lists them; fairq schedules create NAME creates one.",
    QueueDraining: "To let it take new tasks again: fairq resume QUEUE",
}
# From hints for SQL and Python.
_PHRASES = (
    (r'A text such as "5 minutes", or a number of seconds: ', "A length of time such as 90s or 1h30m: "),
    (r"Seconds or a timedelta", "A length of time such as 90s or 1h30m"),
    (r"select fairq\.configure_cluster\(.*?\);", "fairq cluster set --payload-limit BYTES"),
    (r"; (?:null|None)\b[^.]*\.", "."),
)


def refusal(exc: Refused | NotAllowed, ctx: click.Context, user: str = "") -> Failure:
    message, hint = str(exc), _HINTS.get(type(exc), exc.hint or "")
    rights = getattr(ctx.command, "rights", "")
    if isinstance(exc, NotAllowed):
        if role := re.search(r"fairq_\w+", rights):
            hint = f"{ctx.command_path} needs {rights}: grant {role[0]} to {user};"
        return Failure(mask(message), hint=hint, code=exc.code, exit_code=exc.exit_code)
    flags = {each.name or "": each.opts[0] for each in ctx.command.params if isinstance(each, click.Option)}
    for pattern, phrase in _PHRASES:
        hint = re.sub(pattern, phrase, hint)
    if exc.about is not None and exc.about in flags:
        said = exc.about.replace("_", "[ _]")
        message = re.sub(rf"^(?:the |setting )?{said}\b", flags[exc.about], message)
        if isinstance(value := ctx.params.get(exc.about), timedelta):
            message = re.sub(r"cannot be .*", f"cannot be {value.total_seconds():g} s", message)
        if "reset" in flags and "Set " not in hint:
            hint += f" --reset {flags[exc.about][2:]} takes it away."
    message, hint = (in_options(text, ctx) for text in (message, hint))
    return Failure(mask(message), hint=hint or None, code=exc.code, exit_code=exc.exit_code)


def in_options(text: str, ctx: click.Context) -> str:
    """The text with settings spelled as the command's options, and lengths of time in their unit."""
    in_ms = r"\b(?:notify_)?(poll|maintain)_interval_ms is (\S+); it must be (\S+) to (\S+)"
    while found := re.search(in_ms, text):
        value, least, most = (f"{float(number) / 1000:g}" for number in found.group(2, 3, 4))
        text = text.replace(found[0], f"{found[1]}_interval is {value}; it must be {least} to {most}")
    for each in ctx.command.params:
        if isinstance(each, click.Option) and each.name:
            # A single word may be prose, and counts only at the beginning of a list item.
            before = r"(?<![\w-])" if "_" in each.name else r"(?<=^  - )"
            flag = max(each.opts, key=len)
            text = re.sub(rf"{before}{each.name}\b", flag, text, flags=re.MULTILINE)
    return text
