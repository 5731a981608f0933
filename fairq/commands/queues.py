"""`fairq queues`, `fairq groups`: what there is, and its settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click
from psycopg.rows import dict_row

from fairq.cli import dsn_option, json_option
from fairq.commands.common import Connection, clean, session, show, span, table
from fairq.commands.settings import given, settings_options
from fairq.commands.stats import Snapshot, group_table, take
from fairq.queries import settings

QUEUE_HELP = {
    "ready_target": "How many tasks are kept ready. Default: four per worker slot, at least 1000.",
    "max_attempts": "Attempts of a task that names no number of its own.",
    "retry_base": "Back-off before the second attempt; doubled for every further one.",
    "retry_cap": "Longest back-off.",
    "retention": "How long ended tasks and attempts are kept.",
    "notify": "Announce new work by NOTIFY. It takes a database-wide lock at commit; polling works without.",
    "weight": "Weight of groups that have none of their own.",
    "max_running": "Most tasks in flight at once in this queue.",
    "group_max_running": "Most tasks in flight at once for each group that has no cap of its own.",
}

# --- queues ----------------------------------------------------------------------------------------


@click.group(invoke_without_command=True, short_help="List queues; create them, change their settings.")
@dsn_option
@json_option
@click.pass_context
def queues(ctx: click.Context, dsn: str | None) -> None:
    """List queues; create them, change their settings.

    \b
    fairq queues                                  all of them, with their settings
    fairq queues set docs --max-attempts 3        a new queue, or a change
    fairq queues set docs --retention 30d --no-notify

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: any role of fairq to look, fairq_admin to change
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is not None:
        return
    with session(dsn) as conn:
        rows = queue_settings(conn)
    names = list(rows[0]) if rows else ["queue"]
    columns = [name.replace("_", " ") if name == "queue" else f">{name.replace('_', ' ')}" for name in names]
    show({"queues": rows}, table(None, columns, [[_cell(row[name]) for name in names] for row in rows]))


def queue_settings(conn: Connection, queue: str | None = None) -> list[dict[str, Any]]:
    """Every setting there is, whatever this schema has."""
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select q.*
            from fairq.queues q
            where %(queue)s::text is null or q.queue = %(queue)s
            order by q.queue
            """,
            {"queue": queue},
        ).fetchall()
    return [{"queue": row.pop("queue"), **row} for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return span(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@queues.command("set", short_help="Create a queue, or change its settings.")
@click.argument("name")
@settings_options(settings.configure_queue, QUEUE_HELP)
@dsn_option
@json_option
@click.pass_context
def set_queue(ctx: click.Context, /, name: str, dsn: str | None, **options: Any) -> None:
    """Create a queue, or change its settings.

    What you do not name stays as it is. Promotion heeds changes within a second.

    \b
    fairq queues set docs --max-attempts 3 --retry-base 5s --retry-cap 1h
    fairq queues set docs --ready-target 2000

    \b
    Exit codes: 0 done · 1 refused · 2 wrong usage · 3 database
    Rights: fairq_admin
    """
    with session(dsn or ctx.obj) as conn, conn.transaction():
        is_new = not queue_settings(conn, name)
        chosen = {key: value for key, value in options.items() if value is not None}
        settings.configure_queue(conn, queue=name, **(chosen if is_new else given(options)))
        (row,) = queue_settings(conn, name)
    shown = [f"  {key.replace('_', ' ')}: {_cell(value)}" for key, value in row.items() if key != "queue"]
    verb = "created" if is_new else "changed"
    show({"created": is_new, **row}, "\n".join([f"Queue {clean(name)} {verb}.", *shown]))


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
def groups(ctx: click.Context, queue: str, limit: int, dsn: str | None) -> None:
    """List the busiest groups of a queue; change a group's settings.

    A group is a tenant. It needs no registration: it is listed while it has live tasks.

    \b
    fairq groups
    fairq groups --queue docs --limit 5

    \b
    Exit codes: 0 done · 1 no such queue · 2 wrong usage · 3 database
    Rights: fairq_observe to look, fairq_admin to change
    """
    ctx.obj = (dsn, queue)
    if ctx.invoked_subcommand is not None:
        return
    with session(dsn) as conn:
        found: Snapshot = take(conn, queue, limit)
    if found.groups:
        show({"queue": queue, "groups": found.groups}, group_table(found))
    else:
        show({"queue": queue, "groups": []}, f"No group has live tasks in queue {clean(queue)}.")
