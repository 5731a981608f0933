"""Commands for queues, groups, keys and the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from fairq import policies
from fairq.cli import Failure, amount, command, group, option, together
from fairq.commands.common import (
    Connection,
    asks,
    clean,
    console,
    count,
    duration,
    number,
    rows,
    server_time,
    session,
    show,
    span,
    table,
    when,
)
from fairq.commands.settings import named, settings_options
from fairq.commands.stats import Snapshot, group_table, live, take
from fairq.queries import inspection
from fairq.queries import settings as queries

# --- queues ----------------------------------------------------------------------------------------


@group(codes={1: "refused"}, rights="fairq_observe to look, fairq_admin to change")
@click.pass_context
def queues(ctx: click.Context) -> None:
    """
    fairq queues                                  list queues and their settings
    fairq queues create docs --max-attempts 3     create a queue
    fairq queues set docs --retention 30d --no-notify
    fairq queues usage mail                       show its rate and what is used
    """
    if ctx.invoked_subcommand is not None:
        return
    with session() as conn:
        found = queue_settings(conn)
    cells, held = [], []
    for row in found:
        back_off = f"{span(row['retry_base'])} to {span(row['retry_cap'])}"
        besides, state = "; ".join(_besides(row)), "; ".join(_state(row))
        cells.append((row["queue"], row["max_attempts"], back_off, span(row["retention"]), besides, state))
        of_each, of_all = limits(row, "group_"), limits(row)
        if of_each or of_all:
            held.append((row["queue"], of_each or "-", of_all or "-"))
    columns = ("queue", ">attempts", "back-off", "kept", "~?besides", "~?state")
    parts: list[RenderableType] = [table(None, columns, cells)]
    if held:
        parts += [Text(), table("Limits", ("queue", "~of each group", "~of the whole queue"), held)]
    show({"queues": found}, *parts)


def _besides(row: Mapping[str, Any]) -> Iterator[str]:
    """Settings that differ from the defaults."""
    if row["ready_target"]:
        yield f"{row['ready_target']:,} ready"
    if row["weight"] != 1:
        yield f"weight {row['weight']:g}"
    if row["fairness"] != "count":
        yield f"groups share {row['fairness']}"
    if not row["notify"]:
        yield "no notify"


def _state(row: Mapping[str, Any]) -> Iterator[str]:
    for name, text in (("paused_at", "paused since"), ("draining_at", "drains since")):
        if row.get(name):
            yield f"{text} {row[name]:%Y-%m-%d %H:%M}"


def limits(row: Mapping[str, Any], prefix: str = "") -> str:
    """The limits in a row of settings, in one line."""
    own = {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
    parts = []
    if own.get("max_running") is not None:
        parts.append(f"{own['max_running']} at once")
    if own.get("rate_limit") is not None:
        burst = f", burst {own['rate_burst']}" if own["rate_burst"] else ""
        parts.append(f"{own['rate_limit']} per {span(own['rate_period'])}{burst}")
    if own.get("breaker_threshold") is not None:
        failures = count(own["breaker_threshold"], "failure")
        parts.append(f"stops {span(own['breaker_cooldown'])} after {failures}")
    return "; ".join(parts)


def _without(found: list[dict[str, Any]], *hidden: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in hidden} for row in found]


def queue_settings(conn: Connection, queue: str | None = None) -> list[dict[str, Any]]:
    query = """
        select q.* from fairq.queues q
        where not q.internal and (%(queue)s::text is null or q.queue = %(queue)s)
        order by q.queue
        """
    return _without(rows(conn, query, queue=queue), "internal", "metered", "spread")


def group_settings(
    conn: Connection, queue: str, group_key: str | None = None, user: str | None = None
) -> list[dict[str, Any]]:
    """The settings of groups that have their own, or of one user."""
    query = """
        select g.* from fairq.groups g
        where g.queue = %(queue)s and (%(group_key)s::text is null or g.group_key = %(group_key)s)
          and g.user_key = %(user)s
        order by g.group_key
        """
    found = rows(conn, query, queue=queue, group_key=group_key, user=user or "")
    return _without(found, "shard_no", "queue", "user_key", "leaving_at")


def cluster_settings(conn: Connection) -> dict[str, Any]:
    found = rows(conn, "select s.* from fairq.settings s")
    (row,) = _without(found, "singleton", "test_clock", "moving_after")
    return {name: value for name, value in row.items() if not name.startswith("moving") or value is not None}


@command("set", parent=queues, codes={1: "refused"}, rights="fairq_admin")
@click.argument("name")
@settings_options(policies.QueueSettings)
def set_queue(name: str, **options: Any) -> None:
    """Change the settings of a queue.

    Settings that you do not name stay unchanged. The change takes effect with the next pop.

    fairq queues set docs --max-attempts 3 --retry-base 5s --retry-cap 1h
    fairq queues set docs --group-max-running 2      two of each tenant at once
    fairq queues set mail --rate-limit 100 --rate-period 1m
    fairq queues set mail --reset rate-limit         remove the limit
    """
    _configure_queue(name, options, new=False)


@command("create", parent=queues, codes={1: "refused, or it exists"}, rights="fairq_admin")
@click.argument("name")
@settings_options(policies.QueueSettings, reset=False)
def create_queue(name: str, **options: Any) -> None:
    """Create a queue.

    A program declares queues with `app.queue(…)`, and `fairq migrate --app` creates them.

    fairq queues create docs --max-attempts 3 --group-max-running 2
    """
    _configure_queue(name, options, new=True)


def _configure_queue(name: str, options: dict[str, Any], *, new: bool) -> None:
    with session() as conn, conn.transaction():
        if bool(queue_settings(conn, name)) is new:
            how = "Change it: fairq queues set" if new else "Create it: fairq queues create"
            text = f"There is {'a' if new else 'no'} queue {clean(name)}."
            raise Failure(text, hint=f"{how} {clean(name)} …")
        policies.configure_queue(conn, name, **named(options, may_be_none=new))
        (row,) = queue_settings(conn, name)
    show(row, f"Queue {clean(name)} {'created' if new else 'changed'}.", _facts(row, "queue"))


def _name(queue: str, group_key: str | None, user: str | None = None) -> str:
    of = f"queue {clean(queue)}"
    if group_key is not None:
        of = f"group {clean(group_key)} of {of}"
    if user is not None:
        of = f"user {clean(user)} of {of}"
    return of[0].upper() + of[1:]


def _facts(row: Mapping[str, Any], *hidden: str, whole: bool = False) -> RenderableType:
    shown = {key: value for key, value in row.items() if key not in hidden and (whole or value is not None)}
    lines = [f"  {key.replace('_', ' ')}: {_cell(value)}" for key, value in shown.items()]
    return Text("\n".join(lines) or "  It has no settings of its own.")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return span(value)
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "not set" if value is None else clean(str(value))


@contextlib.contextmanager
def _naming(
    queue: str, group_key: str | None = None, user: str | None = None
) -> Iterator[tuple[Connection, str]]:
    """A transaction, and a note if the group is unknown, which is no error but may be a misspelling."""
    if user is not None and group_key is None:
        raise click.UsageError("--user needs --group.")
    with session() as conn, conn.transaction():
        is_known = inspection.group_is_known(conn, queue=queue, group_key=group_key or "")
        is_known = is_known or group_key is None
        yield conn, "" if is_known else " It has neither tasks nor settings: is the name right?"


only_user = option("--user USER", "Only this user of the group.")


# --- groups ----------------------------------------------------------------------------------------


@group(codes={1: "no such queue"}, rights="fairq_observe to look, fairq_admin to change")
@option("--queue NAME", "The queue.", default="default")
@amount("--limit", 20, "How many groups, busiest first.")
@click.pass_context
def groups(ctx: click.Context, queue: str, limit: int) -> None:
    """A group is a tenant. It needs no registration, and is listed while it has live tasks or its own
    settings.

    fairq groups
    fairq groups --queue docs --limit 5
    fairq groups set bob --weight 3 --max-running 5
    fairq groups usage bob
    fairq groups hold bob --until +10m
    fairq groups purge bob
    """
    ctx.obj = queue
    if ctx.invoked_subcommand is not None:
        return
    with session() as conn:
        found: Snapshot = take(conn, queue, limit)
        every = group_settings(conn, queue)
    own = [row for row in every if any(value is not None for key, value in row.items() if key != "group_key")]
    nobody = Text(f"No group has live tasks in queue {clean(queue)}.")
    parts: list[RenderableType] = [group_table(found) if found.groups else nobody]
    if own:
        cells = [
            (
                row["group_key"],
                "" if row["weight"] is None else f"{row['weight']:g}",
                limits(row),
                "; ".join(_state(row)),
            )
            for row in own[:limit]
        ]
        parts += [Text(), table("Groups' own settings", ("group", ">?weight", "~?limits", "~?state"), cells)]
    show({"queue": queue, "groups": found.groups, "settings": own[:limit]}, *parts)


# --queue may stand before the subcommand or after it.
of_a_group = together(
    click.argument("group_key", metavar="GROUP"),
    option("--queue NAME", "The queue. Default: default.", callback=lambda ctx, _, value: value or ctx.obj),
)


@command("set", parent=groups, codes={1: "refused"}, rights="fairq_admin")
@of_a_group
@only_user
@settings_options(policies.GroupSettings)
def set_group(group_key: str, queue: str, user: str | None, **options: Any) -> None:
    """Change the settings of a group, or of one of its users.

    Settings that you do not name stay unchanged. For those that a group lacks, its queue's hold. The change
    takes effect with the next promotion.

    fairq groups set bob --weight 3                  three tasks in every round
    fairq groups set bob --max-running 5 --queue docs
    fairq groups set bob --rate-limit 10 --rate-period 1m --rate-burst 20
    fairq groups set bob --reset weight              use the queue's weight again
    fairq groups set bob --user jane --weight 2      twice what other users get
    """
    chosen = named(options)
    with _naming(queue, group_key, user) as (conn, note):
        note = note and " It has no tasks yet: is the name right?"
        if user is None:
            policies.configure_group(conn, queue, group_key, **chosen)
        else:
            policies.configure_user(conn, queue, group_key, user, **chosen)
        row = group_settings(conn, queue, group_key, user)[0]
    whose = {"queue": queue} if user is None else {"queue": queue, "user_key": user}
    show({**whose, **row}, f"{_name(queue, group_key, user)} changed.{note}", _facts(row, "group_key"))


@command("purge", parent=groups, codes={1: "refused, or you said no"}, rights="fairq_admin")
@of_a_group
@option("--yes", "Do not ask.")
def purge_group(group_key: str, queue: str, yes: bool) -> None:
    """Cancel all waiting tasks of a group.

    Running tasks go on; cancel those by their ids. Cancelled tasks can be retried one by one.

    fairq groups purge bob
    fairq groups purge bob --queue docs --yes
    """
    if asks(yes):
        question = f"Cancel all waiting tasks of group {clean(group_key)} in queue {clean(queue)}?"
        click.confirm(question, abort=True)
    with _naming(queue, group_key) as (conn, note):
        ended = policies.purge_group(conn, queue, group_key)
    answer = {"queue": queue, "group_key": group_key, "cancelled": ended}
    show(answer, f"{_name(queue, group_key)}: {count(ended, 'task')} cancelled.{note}")


# --- Rates, of queues and of groups -----------------------------------------------------------------


def _show_usage(queue: str, group_key: str | None = None) -> None:
    with _naming(queue, group_key) as (conn, note):
        found = policies.rate_usage(conn, queue, group_key)
        budget = None if group_key is None else policies.budget_usage(conn, queue, group_key)
        now = server_time(conn)
    of, lines = _name(queue, group_key), []
    document: dict[str, Any] = {"queue": queue, "group_key": group_key, "rate_limit": None}
    if found is not None:
        document = dataclasses.asdict(found)
        used, free = count(found.used, "is", "are"), count(found.available, "is", "are")
        burst = f"Of the burst, {used} used and {free} free"
        if found.next_at:
            burst += f"; the next task may start in {span(found.next_at - now)}"
        if found.full_at:
            burst += f"; the whole burst is free in {span(found.full_at - now)}"
        rate = f"{found.rate_limit} per {span(found.rate_period)}, burst {found.rate_burst}"
        lines += [f"{of} has a rate of {rate}.", f"{burst}."]
    if group_key is not None:
        document["budget"] = budget
    if budget is not None:
        lines += [
            f"{of} has a budget of {budget.budget:g} per {span(budget.budget_period)}.",
            f"{budget.spent:g} are spent, {budget.reserved:g} reserved for running tasks, "
            f"{budget.available:g} left; it renews in {span(budget.renews_at - now)}.",
        ]
    lines = lines or [f"{of} has no rate{'' if group_key is None else ' and no budget'}."]
    show(document, "\n".join(lines) + note)


def _reset_rate(queue: str, group_key: str | None = None) -> None:
    with _naming(queue, group_key) as (conn, note):
        policies.reset_rate(conn, queue, group_key)
    _tell(queue, group_key, "rate reset", f"may use its full burst.{note}")


@command("usage", parent=queues, codes={1: "no such queue"}, rights="fairq_observe")
@click.argument("name")
def queue_usage(name: str) -> None:
    """Show how much of a queue's rate is used.

    Also shows when the next task may start.

    fairq queues usage mail
    """
    _show_usage(name)


@command("reset-rate", parent=queues, codes={1: "no such queue"}, rights="fairq_admin")
@click.argument("name")
def reset_queue_rate(name: str) -> None:
    """Reset a queue's rate. A full burst may then start at once.

    fairq queues reset-rate mail
    """
    _reset_rate(name)


@command("usage", parent=groups, codes={1: "no such queue"}, rights="fairq_observe")
@of_a_group
def group_usage(group_key: str, queue: str) -> None:
    """Show how much of a group's rate and budget is used.

    Also shows when its next task may become ready.

    fairq groups usage bob
    fairq groups usage bob --queue mail
    """
    _show_usage(queue, group_key)


# --- Holds -----------------------------------------------------------------------------------------

hold_until = together(
    option("--until TIME", "Hold until +10m, or a time with its zone.", type=when),
    option("--end", "End the hold now."),
)


def _until(until: datetime | None, end: bool) -> datetime | None:
    if end == (until is not None):
        raise click.UsageError("Pass --until or --end.")
    return until


def _held(of: str, until: datetime | None) -> str:
    return (
        f"{of} is no longer held." if until is None else f"{of} is held until {until:%Y-%m-%d %H:%M:%S %Z}."
    )


@command("hold", parent=groups, codes={1: "refused"}, rights="fairq_admin")
@of_a_group
@hold_until
def hold_group(group_key: str, queue: str, until: datetime | None, end: bool) -> None:
    """Start no task of a group before a time.

    Running tasks go on. If there are several holds, the one that ends last counts.

    fairq groups hold bob --until +10m
    fairq groups hold bob --end
    """
    until = _until(until, end)
    with _naming(queue, group_key) as (conn, note):
        policies.hold_group(conn, queue, group_key, until)
    answer = {"queue": queue, "group_key": group_key, "held_until": until}
    show(answer, f"{_held(_name(queue, group_key), until)}{note}")


@command("reset-rate", parent=groups, codes={1: "no such queue"}, rights="fairq_admin")
@of_a_group
def reset_group_rate(group_key: str, queue: str) -> None:
    """Reset a group's rate. A full burst may then become ready at once.

    fairq groups reset-rate bob
    fairq groups reset-rate bob --queue mail
    """
    _reset_rate(queue, group_key)


# --- keys, cluster ---------------------------------------------------------------------------------


@group(codes={1: "refused"}, rights="fairq_observe to look, fairq_admin to change")
@click.pass_context
def keys(ctx: click.Context) -> None:
    """A key needs no settings: by default, one task with it runs at a time.

    fairq keys
    fairq keys set printer-7 --max-running 2
    fairq keys hold printer-7 --until +10m
    """
    if ctx.invoked_subcommand is not None:
        return
    with session() as conn:
        found = [(row["group_key"], row["max_running"]) for row in group_settings(conn, "#keys")]
    nobody = Text("No concurrency key has its own settings: one task per key runs at a time.")
    cells = [(key, "1" if most is None else most) for key, most in found]
    show(
        {"keys": [{"concurrency_key": key, "max_running": most} for key, most in found]},
        table(None, ("concurrency key", ">at once"), cells) if cells else nobody,
    )


@command("set", parent=keys, codes={1: "refused"}, rights="fairq_admin")
@click.argument("key")
@settings_options(policies.KeySettings)
def set_key(key: str, **options: Any) -> None:
    """Set how many tasks with a key may run at once.

    fairq keys set printer-7 --max-running 2
    fairq keys set printer-7 --reset max-running         one at a time again
    """
    chosen = named(options)
    with session() as conn, conn.transaction():
        most = policies.configure_key(conn, key, **chosen)["max_running"]
    most = 1 if most is None else most
    text = f"{count(most, 'task')} with key {clean(key)} may run at once."
    show({"concurrency_key": key, "max_running": most}, text)


@command("hold", parent=keys, codes={1: "refused"}, rights="fairq_admin")
@click.argument("key")
@hold_until
def hold_key(key: str, until: datetime | None, end: bool) -> None:
    """Start no task with a key before a time.

    fairq keys hold printer-7 --until +10m
    fairq keys hold printer-7 --end
    """
    until = _until(until, end)
    with session() as conn, conn.transaction():
        policies.hold_key(conn, key, until)
    show({"concurrency_key": key, "held_until": until}, _held(f"Concurrency key {clean(key)}", until))


@group(codes={1: "refused"}, rights="fairq_observe to look, fairq_admin to change")
@click.pass_context
def cluster(ctx: click.Context) -> None:
    """
    fairq cluster
    fairq cluster set --max-running 200
    """
    if ctx.invoked_subcommand is None:
        with session() as conn:
            row = cluster_settings(conn)
        show(row, Text("Settings of the cluster", "bold"), _facts(row, whole=True))


@command("set", parent=cluster, codes={1: "refused"}, rights="fairq_admin")
@settings_options(policies.ClusterSettings)
def set_cluster(**options: Any) -> None:
    """Change the settings of the cluster.

    A cap on the whole cluster excludes workers that prefetch.

    With another number of shards, groups have to move: one after the other, while everything runs. If that is
    interrupted, run the same command again to go on.

    fairq cluster set --max-running 200
    fairq cluster set --reset max-running
    fairq cluster set --payload-limit 4194304
    fairq cluster set --shard-count 16
    """
    chosen = named(options)
    with session() as conn:
        with conn.transaction():
            policies.configure_cluster(conn, **chosen)
        if "shard_count" in chosen:
            _move_groups(conn)
        row = cluster_settings(conn)
    show(row, "Changed.", _facts(row, whole=True))


def _move_groups(conn: Connection) -> None:
    """Move all groups to their homes, and print the progress on stderr every second."""
    told = 0.0
    try:
        while (said := json.loads(queries.move_groups(conn)))["state"] != "done":
            if time.monotonic() >= told + 1:
                told = time.monotonic()
                console(stderr=True).print(_how_far(said))
            if said["state"] == "waiting":
                time.sleep(0.02)
    except KeyboardInterrupt:
        console(stderr=True).print(
            "Interrupted. Groups that have moved stay moved. Run the same command again for the rest."
        )
        raise


def _how_far(said: dict[str, Any]) -> str:
    moved = f"{number(said['groups'] - said['left'])} of {count(said['groups'], 'group')} moved"
    if said["leaving"]:
        return f"{moved}, {count(said['leaving'], 'waits', 'wait')} for tasks in flight to end."
    if said["state"] == "waiting" and said["transactions"]:
        return f"{moved}. Waiting for {count(said['transactions'], 'earlier transaction')} to end."
    return f"{moved}."


# --- pause, resume, drain, rebuild -----------------------------------------------------------------


whole_or_group = together(
    click.argument("queue", default="default"),
    option("--group group_key GROUP", "Only this group of the queue."),
    only_user,
)


@command(codes={1: "no such queue"}, rights="fairq_admin")
@whole_or_group
def pause(queue: str, group_key: str | None, user: str | None) -> None:
    """Running tasks go on and new ones are accepted, but none start. QUEUE defaults to "default".

    fairq pause docs
    fairq pause docs --group bob
    fairq pause docs --group bob --user jane
    fairq resume docs --group bob
    """
    with _naming(queue, group_key, user) as (conn, note):
        if group_key is None:
            policies.pause_queue(conn, queue)
        else:
            policies.pause_group(conn, queue, group_key, user)
    _tell(queue, group_key, "paused", f"is paused. Running tasks go on.{note}", user)


@command(codes={1: "no such queue"}, rights="fairq_admin")
@whole_or_group
def resume(queue: str, group_key: str | None, user: str | None) -> None:
    """A draining queue accepts new tasks again. Pauses of a queue and of its groups are independent: resuming
    one leaves the other paused.

    fairq resume docs
    fairq resume docs --group bob
    """
    with _naming(queue, group_key, user) as (conn, note):
        if group_key is None:
            found = queue_settings(conn, queue)
            policies.resume_queue(conn, queue)
        else:
            found = group_settings(conn, queue, group_key, user)
            policies.resume_group(conn, queue, group_key, user)
    stood = any([*_state(row)] for row in found)
    _tell(queue, group_key, "resumed", f"{'is served again' if stood else 'was not paused'}.{note}", user)


@command(codes={1: "no such queue, or not empty in time"}, rights="fairq_admin")
@click.argument("queue", default="default")
@option("--wait", "Wait until the queue is empty.")
@option("--timeout TIME", "Wait no longer than this: 30s, 10m.", type=duration)
def drain(queue: str, wait: bool, timeout: timedelta | None) -> None:
    """The queue refuses new tasks and serves those it has to the end, including retries and scheduled ones.
    QUEUE defaults to "default". Transactions that began before may still add tasks.

    fairq drain docs
    fairq drain docs --wait --timeout 1h
    fairq resume docs                    accept new tasks again
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait.")
    with session() as conn:
        with conn.transaction():
            policies.drain_queue(conn, queue)
        end = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while (left := live(*take(conn, queue, 0).queues)) and wait:
            pause = min(DRAIN_PAUSE, end - time.monotonic())
            if pause <= 0:
                raise Failure(
                    f"queue {clean(queue)} still has {count(left, 'task')}",
                    hint=f"It is still draining. To see what is left: fairq stats --queue {clean(queue)}",
                    code="not_empty",
                )
            time.sleep(pause)
    text = f"{count(left, 'task')} left to serve." if left else "It is empty."
    answer = {"queue": queue, "done": "draining", "left": left}
    show(answer, f"Queue {clean(queue)} accepts no new tasks. {text}")


@command(codes={1: "no such queue"}, rights="fairq_admin")
@click.argument("queue")
def rebuild(queue: str) -> None:
    """For a queue that seems wrong: this makes the order anew from the waiting tasks. No task is lost or runs
    twice, and running tasks go on. Groups take their turns from the beginning.

    fairq rebuild docs
    """
    with session() as conn, conn.transaction():
        queries.rebuild(conn, queue=queue)
    _tell(queue, None, "rebuilt", "is rebuilt. Promotion makes the new order.")


DRAIN_PAUSE = 0.5  # seconds; each look counts the live tasks


def _tell(queue: str, group_key: str | None, what: str, text: str, user: str | None = None) -> None:
    whose = {"queue": queue, "group_key": group_key, **({} if user is None else {"user_key": user})}
    show({**whose, "done": what}, f"{_name(queue, group_key, user)} {text}")
