"""`fairq maintain`: the upkeep, which workers also run."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import click

from fairq.cli import Exit, command, option, wants_json
from fairq.commands.common import Connection, count, duration, session, show
from fairq.queries import workers
from fairq.schedules import plan_due

DONE = {
    "recovered": ("task taken from lost workers", "tasks taken from lost workers"),
    "unclaimed": ("claim given up", "claims given up"),
    "expired": ("task expired", "tasks expired"),
    "fired": ("schedule fired", "schedules fired"),
    "promoted": ("task promoted", "tasks promoted"),
    "swept": ("old row deleted", "old rows deleted"),
    "partitions": ("partition made or dropped", "partitions made or dropped"),
    "parts": ("part of the ledger written", "parts of the ledger written"),
    "failed": ("part failed, see fairq doctor", "parts failed, see fairq doctor"),
}


@command(codes={1: "a part failed"}, rights="fairq_work or fairq_admin")
@option("--every TIME", "Repeat with this pause until Ctrl-C or TERM.", type=duration)
def maintain(every: timedelta | None) -> None:
    """It takes tasks from lost workers, ends expired tasks, fires schedules, promotes what is due, deletes
    old rows, and makes and drops the history's partitions. Workers do the same, so you need this only where
    none run. If several run at once, one works and the others return immediately. A part that fails does not
    stop the others; fairq doctor says why it failed.

    fairq maintain
    fairq maintain --every 5s
    """
    if every is not None and not 0.1 <= every.total_seconds() <= 86400:
        raise click.UsageError("--every takes 100ms to 1d.")
    if every is not None:
        # Ends like Ctrl-C. A container's first process ignores a TERM that it does not handle.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with session() as conn, contextlib.suppress(KeyboardInterrupt):
        while True:
            done = _round(conn)
            if every is None or done or wants_json():
                show({"done": done}, _text(done))
            if every is None:
                if done.get("failed"):
                    raise click.exceptions.Exit(Exit.NO)
                break
            time.sleep(every.total_seconds())


def _round(conn: Connection) -> dict[str, Any]:
    """Run all parts, each in a transaction of its own."""
    done: Counter[str] = Counter()
    plan_due(conn, 1000)
    for part in workers.upkeep_parts(conn):
        with conn.transaction():
            did = workers.maintain(conn, part=part)
        done.update(json.loads(did))
    return dict(done)


def _text(done: dict[str, Any]) -> str:
    parts = [count(amount, *DONE.get(name, (name, name))) for name, amount in done.items() if amount]
    return f"{', '.join(parts)}." if parts else "Nothing to do, or somebody else is doing it."
