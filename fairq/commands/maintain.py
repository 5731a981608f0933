"""`fairq maintain`: the upkeep, which workers also run."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, NoReturn

import click
import psycopg

from fairq.cli import Exit, command, flush_output, option, wants_json
from fairq.commands.common import Connection, count, duration, limited, session, show
from fairq.dsn import clean, mask
from fairq.errors import DatabaseError, is_retryable, sqlstate_of, translate
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
    "stopped": ("part was stopped", "parts were stopped"),
}
# How long a part may take.
PART_SECONDS: Final = 60.0
# A timeout or an administrator ended the statement, or its wait for a lock.
STOPPED: Final = ("57014", "55P03")
# The server became a standby; a new connection may find the primary.
READ_ONLY: Final = "25006"


@command(codes={1: "a part failed"}, rights="fairq_work or fairq_admin")
@option("--every TIME", "Repeat with this pause until Ctrl-C or TERM.", type=duration)
def maintain(every: timedelta | None) -> None:
    """It takes tasks from lost workers, ends expired tasks, fires schedules, promotes what is due, deletes
    old rows, and makes and drops the history's partitions. Workers do the same, so you need this only where
    none run. If several run at once, one works and the others return immediately. A part that fails does not
    stop the others; fairq doctor says why it failed. Each part may take a minute, whatever the role's
    statement_timeout is. With --every, a database that goes away is waited for.

    fairq maintain
    fairq maintain --every 5s
    """
    if every is None:
        with session() as conn:
            done = _round(conn)
        show({"done": done}, _text(done))
        if done.get("failed") or done.get("stopped"):
            raise click.exceptions.Exit(Exit.NO)
        return
    if not 0.1 <= every.total_seconds() <= 86400:
        raise click.UsageError("--every takes 100ms to 1d.")
    # Ends like Ctrl-C. A container's first process ignores a TERM that it does not handle.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        _rounds(every.total_seconds())
    flush_output()


def _rounds(pause: float) -> NoReturn:
    """One round after the other. What never worked ends the command; what stops working is tried again."""
    worked = False
    while True:
        try:
            with session() as conn:
                while True:
                    done = _round(conn)
                    worked = True
                    if done or wants_json():
                        with _where_there_is_room():
                            show({"done": done}, _text(done))
                    time.sleep(pause)
        except (DatabaseError, psycopg.Error) as exc:
            if not worked or not (is_retryable(exc) or sqlstate_of(exc) in STOPPED):
                raise
            with _where_there_is_room():
                click.echo(f"fairq: {clean(mask(str(translate(exc))))}; trying again", err=True)
        time.sleep(max(pause, 1.0))


@contextlib.contextmanager
def _where_there_is_room() -> Iterator[None]:
    """A full disk under the log ends no upkeep; a reader that leaves does."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def _round(conn: Connection) -> dict[str, Any]:
    """Run all parts, each in a transaction of its own."""
    done: Counter[str] = Counter()
    plan_due(conn, 1000)
    for part in workers.upkeep_parts(conn):
        try:
            with limited(conn, PART_SECONDS):
                did = workers.maintain(conn, part=part)
        except psycopg.Error as exc:
            if conn.closed or exc.sqlstate == READ_ONLY or not (is_retryable(exc) or exc.sqlstate in STOPPED):
                raise
            with _where_there_is_room():
                click.echo(f"fairq: {clean(part)}: {clean(mask(str(translate(exc))))}", err=True)
            done["stopped"] += 1
        else:
            done.update(json.loads(did))
    return dict(done)


def _text(done: dict[str, Any]) -> str:
    parts = [count(amount, *DONE.get(name, (name, name))) for name, amount in done.items() if amount]
    return f"{', '.join(parts)}." if parts else "Nothing to do, or somebody else is doing it."
