"""`fairq schedules`: tasks that recur."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import click
from rich.text import Text

from fairq import schedules as api
from fairq.cli import Failure, amount, command, group, option, together
from fairq.commands.common import Connection, clean, count, plain, server_time, session, show, span, table
from fairq.commands.settings import named, settings_options
from fairq.commands.tasks import json_object, json_value
from fairq.errors import UnknownSchedule
from fairq.queries import inspection
from fairq.queries.models import FairqScheduleStat


def stored_one(conn: Connection, name: str, group_key: str | None) -> FairqScheduleStat:
    """The schedule of that name and group; without a group, the one that fires next."""
    for found in inspection.schedule_stats(conn, name=name, group_key=group_key, most=1):
        return found
    of = f' of group "{group_key}"' if group_key is not None else ""
    raise UnknownSchedule(f'there is no schedule "{name}"{of}')


of_group = option("--group group_key GROUP", "Only the schedule of this group.")
named_of_group = together(click.argument("name"), of_group)


@group(codes={1: "refused, or there is none"}, rights="fairq_observe to look, fairq_admin to change")
@of_group
@amount("--limit", 20, "How many schedules, next to fire first.")
@click.pass_context
def schedules(ctx: click.Context, group_key: str | None, limit: int) -> None:
    """A schedule belongs to a group, and its tasks take that group's turns. Schedules of many groups may
    share a name.

    fairq schedules
    fairq schedules preview --cron '30 2 * * *' --time-zone Europe/Berlin
    fairq schedules create report --group bob --cron '0 3 * * *' --kind report
    fairq schedules set report --group bob --spread 1h
    fairq schedules pause report                  pause it for all groups
    fairq schedules run report --group bob        also run it now
    """
    if ctx.invoked_subcommand is not None:
        return
    with session() as conn:
        found, now = inspection.schedule_stats(conn, group_key=group_key, most=limit), server_time(conn)
    cells = [
        (
            row.name,
            row.group_key,
            rule(row.cron, row.time_zone, row.every),
            _when(row, now),
            row.last_tick.isoformat() if row.last_tick else "",
            row.last_state or "",
            row.problem or "",
        )
        for row in found
    ]
    columns = ("name", "group", "rule", "next", "?last tick", "?its task", "~?problem")
    nothing = Text("No schedules. Create one: fairq schedules create NAME --group GROUP --every 1h")
    show({"schedules": found}, table(None, columns, cells) if cells else nothing)


def rule(cron: str | None, time_zone: str, every: timedelta | None) -> str:
    if cron is None:
        return f"every {span(every)}"
    return cron if time_zone == "UTC" else f"{cron} {time_zone}"


def _when(row: FairqScheduleStat, now: datetime) -> str:
    if row.paused_at:
        return "paused"
    if row.fire_at is None:
        return "not planned"
    left = row.fire_at - now
    return f"in {span(left)}" if left > timedelta(0) else f"{span(-left)} late"


@command("preview", parent=schedules, codes={1: "there is none"}, rights="fairq_observe, with NAME")
@click.argument("name", required=False)
@of_group
@option("--cron TEXT", "Show the ticks of this expression instead of a schedule's.")
@option("--time-zone TEXT", "The time zone of --cron.", default="UTC")
@amount("--count", 5, "How many ticks.", most=1000)
def preview_schedule(
    name: str | None, group_key: str | None, cron: str | None, time_zone: str, count: int
) -> None:
    """Show the next ticks of a schedule, or of a cron expression.

    fairq schedules preview report --group bob
    fairq schedules preview --cron '30 2 * * *' --time-zone Europe/Berlin
    """
    if name is not None and cron is None:
        with session() as conn:
            times = upcoming(stored_one(conn, name, group_key), server_time(conn), count)
    elif cron is not None and name is None:
        times = api.preview_schedule(cron, time_zone=time_zone, count=count)
    else:
        raise click.UsageError("Name a schedule, or pass --cron.")
    show({"times": times}, Text("\n".join(f"{at:%a} {at.isoformat(' ')}" for at in times)))


def upcoming(row: FairqScheduleStat, now: datetime, count: int) -> list[datetime]:
    """The next times of a stored schedule, in its time zone."""
    delay = row.fire_at - row.next_tick if row.fire_at and row.next_tick else timedelta(0)
    ticks = api.ticks_of(row.cron, row.time_zone, row.every, now - delay)
    return [(tick + delay).astimezone(ZoneInfo(row.time_zone)) for tick in islice(ticks, count)]


names_and_payload = together(
    click.argument("name"),
    option("--group group_key GROUP", "The group of its tasks.", required=True),
    option("--payload JSON", "The payload of its tasks. Default: null."),
)


def _change(name: str, group_key: str, payload: str | None, options: dict[str, Any], *, new: bool) -> None:
    chosen = named(options, may_be_none=new or payload is not None)
    if chosen.get("headers") is not None:
        chosen["headers"] = json_object(chosen["headers"])
    if payload is not None:
        chosen["payload"] = json_value(payload, "The payload")
    with session() as conn, conn.transaction():
        if not new:
            stored_one(conn, name, group_key)
        elif inspection.schedule_stats(conn, name=name, group_key=group_key, most=1):
            hint = f"Change it: fairq schedules set {clean(name)} --group {clean(group_key)} …"
            raise Failure(f"There is a schedule {clean(name)} of group {clean(group_key)}.", hint=hint)
        api.configure_schedule(conn, name, group_key, **chosen)
        row, now = stored_one(conn, name, group_key), server_time(conn)
    done = "created" if new else "changed"
    show(plain(row), f"Schedule {clean(name)} of group {clean(group_key)} {done}; next {_when(row, now)}.")


@command("create", parent=schedules, codes={1: "refused, or it exists"}, rights="fairq_admin")
@names_and_payload
@settings_options(api.ScheduleSettings, reset=False)
def create_schedule(name: str, group_key: str, payload: str | None, **options: Any) -> None:
    """Create a schedule.

    Pass --cron with a time zone, or --every. A program declares schedules with `@app.task(schedule=…)`, and
    `fairq migrate --app` creates them.

    fairq schedules create report --group bob --kind report --cron '0 3 * * *'
    fairq schedules create ping --group system --every 10s --missed skip
    """
    _change(name, group_key, payload, options, new=True)


@command("set", parent=schedules, codes={1: "refused, or there is none"}, rights="fairq_admin")
@names_and_payload
@settings_options(api.ScheduleSettings)
def set_schedule(name: str, group_key: str, payload: str | None, **options: Any) -> None:
    """Change a schedule.

    Settings that you do not name stay unchanged. A new rule counts from now on. The next `fairq migrate
    --app` of an app that declares the schedule overwrites your changes.

    fairq schedules set report --group bob --spread 1h
    fairq schedules set report --group bob --every 1d --reset cron
    """
    _change(name, group_key, payload, options, new=False)


def _do(function: Callable[..., int], done: str, name: str, group_key: str | None) -> None:
    with session() as conn, conn.transaction():
        schedules = function(conn, name, group_key)
    answer = {"name": name, "group_key": group_key, "schedules": schedules}
    show(answer, f"{count(schedules, 'schedule')} {done}.")


@command("pause", parent=schedules, codes={1: "there is none"}, rights="fairq_admin")
@named_of_group
def pause_schedule(name: str, group_key: str | None) -> None:
    """Stop a schedule until it is resumed. Without --group, it stops for all groups.

    fairq schedules pause report
    """
    _do(api.pause_schedule, "paused", name, group_key)


@command("resume", parent=schedules, codes={1: "there is none"}, rights="fairq_admin")
@named_of_group
def resume_schedule(name: str, group_key: str | None) -> None:
    """Resume a paused schedule. Missed ticks are not made up for.

    fairq schedules resume report
    """
    _do(api.resume_schedule, "resumed", name, group_key)


@command("remove", parent=schedules, codes={1: "there is none"}, rights="fairq_admin")
@named_of_group
def remove_schedule(name: str, group_key: str | None) -> None:
    """Remove a schedule. Without --group, it is removed for all groups. Tasks that it created stay.

    fairq schedules remove report --group bob
    """
    _do(api.remove_schedule, "removed", name, group_key)


@command("run", parent=schedules, codes={1: "there is none, or refused"}, rights="fairq_admin")
@named_of_group
def run_schedule(name: str, group_key: str | None) -> None:
    """Create a task of a schedule now. Without --group, one for each group. Prints the ids.

    fairq schedules run report --group bob
    """
    with session() as conn, conn.transaction():
        ids = api.run_schedule(conn, name, group_key)
    show({"ids": ids}, "\n".join(map(str, ids)))
