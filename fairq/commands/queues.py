"""What there is and its settings: `fairq queues`, `groups`, `keys`, `cluster`, `pause`, `resume`, `drain`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import click
from psycopg.rows import dict_row
from rich.console import RenderableType
from rich.text import Text

from fairq import policies
from fairq.cli import Failure, dsn_option, json_option, wants_json
from fairq.commands.common import DURATION, Connection, clean, count, server_time, session, show, span, table
from fairq.commands.settings import named, settings_options
from fairq.commands.stats import Snapshot, group_table, take

# --- queues ----------------------------------------------------------------------------------------


@click.group(invoke_without_command=True, short_help="List queues; create them, change their settings.")
@dsn_option
@json_option
@click.pass_context
def queues(ctx: click.Context, /, dsn: str | None) -> None:
    """List queues; create them, change their settings.

    \b
    fairq queues                                  all of them, with their settings
    fairq queues set docs --max-attempts 3        a new queue, or a change
    fairq queues set docs --retention 30d --no-notify
    fairq queues usage mail                       how much of its rate is used

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: any role of fairq to look, fairq_admin to change
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is not None:
        return
    with session(dsn) as conn:
        rows = queue_settings(conn)
    show({"queues": rows}, *_queue_tables(rows))


def _queue_tables(rows: list[dict[str, Any]]) -> list[RenderableType]:
    names = (
        "queue",
        ">attempts",
        ">back-off",
        ">up to",
        ">kept",
        ">ready",
        "notify",
        ">weight",
        "paused",
        "draining",
    )
    cells = [
        (
            row["queue"],
            row["max_attempts"],
            span(row["retry_base"]),
            span(row["retry_cap"]),
            span(row["retention"]),
            row["ready_target"] or "auto",
            "yes" if row["notify"] else "no",
            f"{row['weight']:g}",
            _since(row["paused_at"]),
            _since(row["draining_at"]),
        )
        for row in rows
    ]
    held = [(row["queue"], limits(row, "group_") or "-", limits(row) or "-") for row in rows]
    held = [each for each in held if each[1:] != ("-", "-")]
    parts: list[RenderableType] = [table(None, names, cells)]
    if held:
        parts += [Text(), table("Limits", ("queue", "of each group", "of the whole queue"), held)]
    return parts


def _since(at: datetime | None) -> str:
    return "" if at is None else f"since {at:%Y-%m-%d %H:%M}"


def limits(row: Mapping[str, Any], prefix: str = "") -> str:
    """The limits in a row of settings, in one line."""
    cap, rate, burst = (row.get(f"{prefix}{name}") for name in ("max_running", "rate_limit", "rate_burst"))
    failures, cooldown = row.get(f"{prefix}breaker_threshold"), row.get(f"{prefix}breaker_cooldown")
    parts = []
    if cap is not None:
        parts.append(f"{cap} at once")
    if rate is not None:
        parts.append(
            f"{rate} per {span(row[f'{prefix}rate_period'])}" + (f", burst {burst}" if burst else "")
        )
    if failures is not None:
        parts.append(f"stops {span(cooldown)} after {count(failures, 'failure')}")
    return "; ".join(parts)


def queue_settings(conn: Connection, queue: str | None = None) -> list[dict[str, Any]]:
    """Every setting there is."""
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select q.*
            from fairq.queues q
            where not q.internal and (%(queue)s::text is null or q.queue = %(queue)s)
            order by q.queue
            """,
            {"queue": queue},
        ).fetchall()
    return [
        {name: value for name, value in row.items() if name not in ("internal", "metered")} for row in rows
    ]


def group_settings(conn: Connection, queue: str, group_key: str | None = None) -> list[dict[str, Any]]:
    """Groups with settings of their own; none where the role may not read them."""
    with conn.cursor(row_factory=dict_row) as cursor:
        may = cursor.execute("select has_table_privilege('fairq.groups', 'select') as may").fetchone()
        if not may or not may["may"]:
            return []
        rows = cursor.execute(
            """
            select g.*
            from fairq.groups g
            where g.queue = %(queue)s and (%(group_key)s::text is null or g.group_key = %(group_key)s)
            order by g.group_key
            """,
            {"queue": queue, "group_key": group_key},
        ).fetchall()
    return [{name: value for name, value in row.items() if name not in ("shard_no", "queue")} for row in rows]


@queues.command("set", short_help="Create a queue, or change its settings.")
@click.argument("name")
@settings_options(policies.QueueSettings)
@dsn_option
@json_option
@click.pass_context
def set_queue(ctx: click.Context, /, name: str, dsn: str | None, **options: Any) -> None:
    """Create a queue, or change its settings.

    What you do not name stays as it is. The change takes effect with the next promotion, which the next pop
    makes.

    \b
    fairq queues set docs --max-attempts 3 --retry-base 5s --retry-cap 1h
    fairq queues set docs --group-max-running 2          no tenant runs more than two at once
    fairq queues set mail --rate-limit 100 --rate-period 1m
    fairq queues set mail --reset rate_limit             no limit any more

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    with session(dsn or ctx.obj) as conn, conn.transaction():
        is_new = not queue_settings(conn, name)
        policies.configure_queue(conn, name, **named(options, may_be_none=is_new))
        (row,) = queue_settings(conn, name)
    verb = "created" if is_new else "changed"
    show({"created": is_new, **row}, f"Queue {clean(name)} {verb}.", _facts(row, "queue"))


@queues.command("usage", short_help="Show how much of a queue's rate is used.")
@click.argument("name")
@dsn_option
@json_option
@click.pass_context
def queue_usage(ctx: click.Context, /, name: str, dsn: str | None) -> None:
    """Show how much of a queue's rate is used, and when the next task may start.

    \b
    fairq queues usage mail

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_observe
    """
    _show_usage(dsn or ctx.obj, name, None)


@queues.command("reset-rate", short_help="Forget what was used of a queue's rate.")
@click.argument("name")
@dsn_option
@json_option
@click.pass_context
def reset_queue_rate(ctx: click.Context, /, name: str, dsn: str | None) -> None:
    """Forget what was used of a queue's rate. A full burst may start at once.

    \b
    fairq queues reset-rate mail

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    _reset_rate(dsn or ctx.obj, name, None)


def _show_usage(dsn: str | None, queue: str, group_key: str | None) -> None:
    with session(dsn) as conn:
        found = policies.rate_usage(conn, queue, group_key)
        now = server_time(conn)
    document: dict[str, Any] = {"queue": queue, "group_key": group_key, "rate_limit": None}
    if found is None:
        show(document, f"{_name(queue, group_key)} has no rate.")
        return
    rate = f"{found.rate_limit} per {span(found.rate_period)}, burst {found.rate_burst}"
    until = [
        f"the next task may start in {span(found.next_at - now)}" if found.next_at else "",
        f"all of it is free in {span(found.full_at - now)}" if found.full_at else "",
    ]
    state = f"Of the burst {count(found.used, 'is', 'are')} used, {count(found.available, 'is', 'are')} free"
    show(
        dataclasses.asdict(found),
        f"{_name(queue, group_key)} has a rate of {rate}.",
        "; ".join([state, *filter(None, until)]) + ".",
    )


def _reset_rate(dsn: str | None, queue: str, group_key: str | None) -> None:
    with session(dsn) as conn, conn.transaction():
        policies.reset_rate(conn, queue, group_key)
    _tell(queue, group_key, "rate reset", "may use its full burst.")


def _name(queue: str, group_key: str | None) -> str:
    if group_key is None:
        return f"Queue {clean(queue)}"
    return f"Group {clean(group_key)} of queue {clean(queue)}"


def _facts(row: Mapping[str, Any], *hidden: str) -> RenderableType:
    shown = {key: value for key, value in row.items() if key not in hidden and value is not None}
    lines = [f"  {key.replace('_', ' ')}: {_cell(value)}" for key, value in shown.items()]
    return Text("\n".join(lines) or "  It has no settings of its own any more.")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return span(value)
    return f"{value:g}" if isinstance(value, float) else clean(str(value))


# --- groups ----------------------------------------------------------------------------------------


@click.group(invoke_without_command=True, short_help="List the busiest groups; change a group's settings.")
@click.option("--queue", default="default", show_default=True, metavar="NAME", help="The queue.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=20,
    show_default=True,
    metavar="N",
    help="How many groups, busiest first.",
)
@dsn_option
@json_option
@click.pass_context
def groups(ctx: click.Context, /, queue: str, limit: int, dsn: str | None) -> None:
    """List the busiest groups of a queue; change a group's settings.

    A group is a tenant. It needs no registration: it is listed while it has live tasks, or settings of its
    own.

    \b
    fairq groups
    fairq groups --queue docs --limit 5
    fairq groups set bob --weight 3 --max-running 5
    fairq groups usage bob
    fairq groups purge bob

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_observe to look, fairq_admin to change
    """
    ctx.obj = (dsn, queue)
    if ctx.invoked_subcommand is not None:
        return
    with session(dsn) as conn:
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
                _since(row["paused_at"]),
            )
            for row in own[:limit]
        ]
        parts += [Text(), table("Settings of their own", ("group", ">weight", "limits", "paused"), cells)]
    show({"queue": queue, "groups": found.groups, "settings": own[:limit]}, *parts)


def _target(ctx: click.Context, dsn: str | None, queue: str | None) -> tuple[str | None, str]:
    """--dsn and --queue may stand before the subcommand or after it."""
    dsn_before, queue_before = ctx.obj
    return dsn or dsn_before, queue or queue_before


queue_after = click.option("--queue", metavar="NAME", help="The queue. Default: default.")


@groups.command("set", short_help="Change a group's settings.")
@click.argument("group_key", metavar="GROUP")
@queue_after
@settings_options(policies.GroupSettings)
@dsn_option
@json_option
@click.pass_context
def set_group(
    ctx: click.Context,
    /,
    group_key: str,
    queue: str | None,
    dsn: str | None,
    **options: Any,
) -> None:
    """Change a group's settings.

    What you do not name stays as it is; what a group has none of, its queue says. The change takes
    effect with the next promotion.

    \b
    fairq groups set bob --weight 3                      three tasks in every round instead of one
    fairq groups set bob --max-running 5 --queue docs
    fairq groups set bob --rate-limit 10 --rate-period 1m --rate-burst 20
    fairq groups set bob --reset weight --reset rate_limit
                                                         the queue's own again

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    where, name = _target(ctx, dsn, queue)
    chosen = named(options)
    with session(where) as conn, conn.transaction():
        policies.configure_group(conn, name, group_key, **chosen)
        row = group_settings(conn, name, group_key)[0]
    show({"queue": name, **row}, f"Group {clean(group_key)} changed.", _facts(row, "group_key"))


@groups.command("purge", short_help="Cancel everything that a group has waiting.")
@click.argument("group_key", metavar="GROUP")
@queue_after
@click.option("--yes", is_flag=True, help="Do not ask.")
@dsn_option
@json_option
@click.pass_context
def purge_group(ctx: click.Context, /, group_key: str, queue: str | None, yes: bool, dsn: str | None) -> None:
    """Cancel everything that a group has waiting.

    Running tasks go on; cancel those by their ids. The tasks end as cancelled, and can be retried one by one.

    \b
    fairq groups purge bob
    fairq groups purge bob --queue docs --yes

    \b
    Exit codes: 0 done · 1 refused, or you said no · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    where, name = _target(ctx, dsn, queue)
    if not yes:
        if wants_json():
            raise click.UsageError("With --json nobody is asked: add --yes.")
        click.confirm(
            f"Cancel all that group {clean(group_key)} has waiting in queue {clean(name)}?", abort=True
        )
    with session(where) as conn, conn.transaction():
        ended = policies.purge_group(conn, name, group_key)
    show({"queue": name, "group_key": group_key, "cancelled": ended}, f"{count(ended, 'task')} cancelled.")


@groups.command("usage", short_help="Show how much of a group's rate is used.")
@click.argument("group_key", metavar="GROUP")
@queue_after
@dsn_option
@json_option
@click.pass_context
def group_usage(ctx: click.Context, /, group_key: str, queue: str | None, dsn: str | None) -> None:
    """Show how much of a group's rate is used, and when its next task may become ready.

    \b
    fairq groups usage bob
    fairq groups usage bob --queue mail

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_observe
    """
    where, name = _target(ctx, dsn, queue)
    _show_usage(where, name, group_key)


@groups.command("reset-rate", short_help="Forget what was used of a group's rate.")
@click.argument("group_key", metavar="GROUP")
@queue_after
@dsn_option
@json_option
@click.pass_context
def reset_group_rate(ctx: click.Context, /, group_key: str, queue: str | None, dsn: str | None) -> None:
    """Forget what was used of a group's rate. A full burst may become ready at once.

    \b
    fairq groups reset-rate bob
    fairq groups reset-rate bob --queue mail

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    where, name = _target(ctx, dsn, queue)
    _reset_rate(where, name, group_key)


# --- keys, cluster ---------------------------------------------------------------------------------


@click.group(invoke_without_command=True, short_help="List concurrency keys with settings; change them.")
@dsn_option
@json_option
@click.pass_context
def keys(ctx: click.Context, /, dsn: str | None) -> None:
    """List concurrency keys with settings of their own; change them.

    A key needs no settings: of the tasks that have it, one runs at a time.

    \b
    fairq keys
    fairq keys set printer-7 --max-running 2

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: fairq_observe to look, fairq_admin to change
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is not None:
        return
    with session(dsn) as conn:
        found = {row["group_key"]: row["max_running"] for row in group_settings(conn, "#keys")}
    rows = [{"concurrency_key": key, "max_running": most} for key, most in found.items()]
    cells = [(key, "1" if most is None else most) for key, most in found.items()]
    nobody = Text("No concurrency key has settings of its own: of each, one task runs at a time.")
    show({"keys": rows}, table(None, ("concurrency key", ">at once"), cells) if cells else nobody)


@keys.command("set", short_help="Say how many tasks with a key may run at once.")
@click.argument("key")
@settings_options(policies.KeySettings)
@dsn_option
@json_option
@click.pass_context
def set_key(ctx: click.Context, /, key: str, dsn: str | None, **options: Any) -> None:
    """Say how many tasks with a key may run at once.

    \b
    fairq keys set printer-7 --max-running 2
    fairq keys set printer-7 --reset max_running         one at a time again

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    chosen = named(options)
    with session(dsn or ctx.obj) as conn, conn.transaction():
        most = policies.configure_key(conn, key, **chosen)["max_running"]
    most = 1 if most is None else most
    show(
        {"concurrency_key": key, "max_running": most},
        f"Of the tasks with key {clean(key)}, {count(most, 'runs', 'run')} at once.",
    )


@click.group(invoke_without_command=True, short_help="Show the settings of the installation; change them.")
@dsn_option
@json_option
@click.pass_context
def cluster(ctx: click.Context, /, dsn: str | None) -> None:
    """Show the settings of the installation; change them.

    \b
    fairq cluster
    fairq cluster set --max-running 200

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: any role of fairq to look, fairq_admin to change
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is not None:
        return
    with session(dsn) as conn:
        row = cluster_settings(conn)
    show(row, "Settings of the installation", _facts(row))


def cluster_settings(conn: Connection) -> dict[str, Any]:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("select s.* from fairq.settings s").fetchone()
    return {name: value for name, value in (row or {}).items() if name not in ("singleton", "test_clock")}


@cluster.command("set", short_help="Change settings of the installation.")
@settings_options(policies.ClusterSettings)
@dsn_option
@json_option
@click.pass_context
def set_cluster(ctx: click.Context, /, dsn: str | None, **options: Any) -> None:
    """Change settings of the installation.

    A cap on the whole cluster excludes workers that prefetch.

    \b
    fairq cluster set --max-running 200
    fairq cluster set --reset max_running
    fairq cluster set --payload-limit 4194304

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    chosen = named(options)
    with session(dsn or ctx.obj) as conn, conn.transaction():
        policies.configure_cluster(conn, **chosen)
        row = cluster_settings(conn)
    show(row, "Changed.", _facts(row))


# --- pause, resume, drain --------------------------------------------------------------------------


@click.command(short_help="Stop serving a queue or a group.")
@click.argument("queue", default="default")
@click.option("--group", "group_key", metavar="GROUP", help="Only this group of the queue.")
@dsn_option
@json_option
def pause(queue: str, group_key: str | None, dsn: str | None) -> None:
    """Stop serving a queue or a group.

    Running tasks go on, new ones are accepted, none is started. QUEUE is "default" when you name none.

    \b
    fairq pause docs
    fairq pause docs --group bob
    fairq resume docs --group bob

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    with session(dsn) as conn, conn.transaction():
        if group_key is None:
            policies.pause_queue(conn, queue)
        else:
            policies.pause_group(conn, queue, group_key)
    _tell(queue, group_key, "paused", "is paused. Running tasks go on.")


@click.command(short_help="Serve a paused queue or group again.")
@click.argument("queue", default="default")
@click.option("--group", "group_key", metavar="GROUP", help="Only this group of the queue.")
@dsn_option
@json_option
def resume(queue: str, group_key: str | None, dsn: str | None) -> None:
    """Serve a paused queue or group again; a queue that drains takes new tasks again.

    A queue and its groups are paused apart: to resume one leaves the other as it is.

    \b
    fairq resume docs
    fairq resume docs --group bob

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    with session(dsn) as conn, conn.transaction():
        if group_key is None:
            policies.resume_queue(conn, queue)
        else:
            policies.resume_group(conn, queue, group_key)
    _tell(queue, group_key, "resumed", "is served again.")


@click.command(short_help="Let a queue run empty.")
@click.argument("queue", default="default")
@click.option("--wait", is_flag=True, help="Wait until the queue is empty.")
@click.option("--timeout", type=DURATION, metavar="TIME", help="Wait no longer than this: 30s, 10m.")
@dsn_option
@json_option
def drain(queue: str, wait: bool, timeout: timedelta | None, dsn: str | None) -> None:
    """Let a queue run empty.

    New tasks are refused; those that are there are served to the end, retries and scheduled ones included.
    QUEUE is "default" when you name none. A transaction that began before may still bring tasks.

    \b
    fairq drain docs
    fairq drain docs --wait --timeout 1h
    fairq resume docs                    it takes new tasks again

    \b
    Exit codes: 0 done · 1 no such queue, or not empty in time · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout belongs to --wait.")
    with session(dsn) as conn:
        with conn.transaction():
            policies.drain_queue(conn, queue)
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        left = _live(conn, queue)
        while wait and left:
            pause = DRAIN_PAUSE if end is None else min(DRAIN_PAUSE, end - time.monotonic())
            if pause <= 0:
                raise Failure(
                    f"queue {clean(queue)} still has {count(left, 'task')}",
                    hint=f"It goes on draining. What is left: fairq stats --queue {clean(queue)}",
                    code="not_empty",
                )
            time.sleep(pause)
            left = _live(conn, queue)
    rest = "It is empty." if not left else f"{count(left, 'task')} left, which are still served."
    show(
        {"queue": queue, "done": "draining", "left": left},
        f"Queue {clean(queue)} takes no new tasks. {rest}",
    )


DRAIN_PAUSE = 0.5  # seconds; each look counts the live tasks


def _live(conn: Connection, queue: str) -> int:
    (each,) = take(conn, queue, 0).queues
    return each.scheduled + each.overflow + each.blocked + each.queued + each.claimed + each.running


def _tell(queue: str, group_key: str | None, what: str, text: str) -> None:
    show({"queue": queue, "group_key": group_key, "done": what}, f"{_name(queue, group_key)} {text}")
