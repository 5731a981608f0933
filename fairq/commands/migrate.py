"""`fairq migrate` and `fairq sql`."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import click

from fairq import install
from fairq.cli import Exit, amount, command, named_dsn, option, wants_json
from fairq.commands.common import connect, console, count, show
from fairq.dsn import describe, resolve
from fairq.worker.loading import load_app


@command(
    codes={
        1: "behind (--check)",
        3: "database cannot be reached, or refused",
        4: "database is newer than this fairq",
        5: "got no lock",
        6: "would lose data",
    }
)
@option(
    "--to REVISION",
    "The target: head (default), base, or a revision such as 0003; also a lower one.",
    default=install.HEAD,
    show_default=False,
)
@option(
    "--app MODULE[:APP]",
    "Then create this app's queues and schedules, and store what its tasks declare.",
)
@option("--check", "Change nothing; exit 1 if the database is not at the revision.")
@amount(
    "--lock-timeout",
    3.0,
    "How long to wait for a lock each time; your application's statements queue behind it.",
    least=0.01,
)
@amount("--patience", 300.0, "How long to keep trying to get a lock.", least=0)
def migrate(to: str, app: str | None, check: bool, lock_timeout: float, patience: float) -> None:
    """Each step is one transaction. Any number may run at once, for example one in each new container: the
    others wait and find the work done. A database that is newer than this fairq is refused.

    fairq migrate                    migrate to the newest revision
    fairq migrate --app myapp.tasks  also create the app's queues
    fairq migrate --check            check whether there is something to do
    fairq migrate --to base          remove fairq; refused while there are tasks
    """
    if app and (check or to != install.HEAD):
        raise click.UsageError("--app excludes --check and --to: it needs the newest revision.")
    where = resolve(named_dsn())
    if check:
        _check(where, to)
        return
    declared = load_app(app) if app else None
    started = time.monotonic()
    done = install.migrate(where, to=to, lock_timeout=lock_timeout, patience=patience, report=_report)
    version = done.after or install.BASE
    document: dict[str, Any] = {
        "database": describe(where),
        "before": done.before,
        "after": done.after,
        "steps": [
            {"revision": a.step.revision.id, "direction": a.step.direction, "seconds": round(a.seconds, 3)}
            for a in done.steps
        ],
    }
    if done.steps:
        how = f"now at {version} ({time.monotonic() - started:.1f} s)"
    elif done.before != done.after:
        how = f"now at {version}; another fairq migrate did it"
    else:
        how = f"already at {version}"
    text = f"{describe(where)} is {how}."
    if declared is not None:
        with contextlib.closing(connect(where)) as conn, conn.transaction():
            declared.install(conn)
        document["queues"] = declared.queues
        text += f"\nThe app's queues exist: {', '.join(declared.queues)}."
    show(document, text)


def _check(dsn: str, to: str) -> None:
    target = install.resolve(to)
    with contextlib.closing(connect(dsn)) as conn:
        version = install.schema_version(conn)
    steps = install.plan(version, target)
    document = {
        "database": describe(dsn),
        "version": version,
        "target": target,
        "pending": [step.revision.id for step in steps],
        "ok": not steps,
    }
    here, there = version or install.BASE, target or install.BASE
    if not steps:
        show(document, f"{describe(dsn)} is at {here}.")
        return
    command = "fairq migrate" if to == install.HEAD else f"fairq migrate --to {to}"
    side = "behind" if steps[0].direction == "up" else "ahead of"
    far = count(len(steps), "step")
    show(document, f"{describe(dsn)} is at {here}, {far} {side} {there}. Run: {command}")
    raise click.exceptions.Exit(Exit.NO)


def _report(event: install.Applied | install.Waiting) -> None:
    if wants_json():
        return
    if isinstance(event, install.Applied):
        arrow = "↑" if event.step.direction == "up" else "↓"
        left = f", {event.remaining} left" if event.remaining else ""
        lines, style = [f"{arrow} {event.step.name} ({event.seconds:.2f} s{left})"], "green"
    else:
        lines, style = [f"waiting for a lock held by {holder}" for holder in event.held_by], "yellow"
    for line in lines:
        console(stderr=True).print(line, style=style, soft_wrap=True)


@command(codes={2: "wrong usage, or no such revision"}, dsn=False, json=False)
@option("--from start REVISION", "The database's revision.", default=install.BASE)
@option("--to REVISION", "The target.", default=install.HEAD)
def sql(start: str, to: str) -> None:
    """For psql, or your own migration tool. Each step is one transaction, takes the same lock as `fairq
    migrate`, refuses a database at another revision, and records the new one, so you can mix both ways.

    fairq sql | psql -v ON_ERROR_STOP=1 "$FAIRQ_DSN"
    fairq sql --from 0001 --to 0003 > V42__fairq.sql
    fairq sql --from 0003 --to 0002            downgrade
    """
    click.echo(install.script(start, to), nl=False)
