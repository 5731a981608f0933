"""`fairq top`: the snapshot of `fairq stats`, refreshed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count as counting
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from fairq.cli import amount, command, option, wants_json
from fairq.commands.common import console, emit, session
from fairq.commands.stats import Snapshot, document, live, queue_table, share_table, take, worker_table

# A look counts every live task. With millions of tasks that takes seconds, and must not become the load.
BREATHE = 4


@command(codes={0: "ended by you", 1: "no such queue"}, rights="fairq_observe")
@option("--queue NAME", "Only this queue. Default: all.")
@amount("--interval", 2.0, "Time between two looks. Grows if a look takes long.", least=0.1)
@option("--count looks N", "End after this many looks.", type=click.IntRange(min=1))
def top(queue: str | None, interval: float, looks: int | None) -> None:
    """On a terminal it refreshes in place until you press q or Ctrl-C. Elsewhere it writes one snapshot after
    the other, with --json one object per line. "in" and "done" are the tasks created and ended per second in
    all queues. "got" is the part that a tenant received, "due" the part it was entitled to, "debt" how far it
    is behind and how far it may be.

    fairq top                               show everything
    fairq top --queue docs --interval 5     show one queue, more slowly
    fairq top --count 1                     show one snapshot
    fairq top --json | jq -c '.queues[0]'   use the data elsewhere
    """
    with contextlib.suppress(KeyboardInterrupt), session() as conn, _screen() as (draw, wants_to_end):
        before: Snapshot | None = None
        for look in counting(1):
            started = time.monotonic()
            found = take(conn, queue, shares_since=60)
            took = time.monotonic() - started
            draw(found, before)
            before = found
            if look == looks or wants_to_end(max(interval, BREATHE * took)):
                break


Wait = Callable[[float], bool]


@contextlib.contextmanager
def _screen() -> Iterator[tuple[Callable[[Snapshot, Snapshot | None], None], Wait]]:
    """How to draw a snapshot, and how to wait; waiting returns true if the user wants to quit."""
    out = console()
    if wants_json():
        yield (lambda found, before: click.echo(json.dumps(document(found) | rates(found, before)))), _sleep
    elif not out.is_terminal:
        yield (lambda found, before: emit(frame(found, before, None), Text())), _sleep
    else:
        with (
            _keys() as wait,
            Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
        ):
            yield (lambda found, before: live.update(frame(found, before, out.height), refresh=True)), wait


def _sleep(seconds: float) -> bool:
    sys.stdout.flush()
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Wait]:
    """Wait for a time, or until somebody presses q."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            pressed = select.select([terminal], [], [], left)[0]
            if pressed and os.read(terminal, 1) in (b"q", b"Q", b"\x04", b""):
                return True
        return False

    try:
        tty.setcbreak(terminal)
        yield wait
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def rates(found: Snapshot, before: Snapshot | None) -> dict[str, float | None]:
    """Tasks created and ended per second since the last look."""
    seconds = (found.at - before.at).total_seconds() if before else 0
    if before is None or seconds <= 0:
        return {"created_per_second": None, "ended_per_second": None}
    return {
        # A reset of PostgreSQL's statistics sets them to 0.
        "created_per_second": round(max(0, found.created - before.created) / seconds, 1),
        "ended_per_second": round(max(0, found.ended - before.ended) / seconds, 1),
    }


def frame(found: Snapshot, before: Snapshot | None, height: int | None) -> RenderableType:
    """The snapshot, cut to the busiest rows if the screen is too small."""
    speed = rates(found, before)
    head = Text()
    head.append("fairq top", "bold")
    head.append(f"  {found.at:%H:%M:%S}")
    if speed["created_per_second"] is not None:
        head.append(f"  in {speed['created_per_second']:,.0f}/s  done {speed['ended_per_second']:,.0f}/s")
    if height is not None:
        head.append("  (q quits)", "dim")
        found = replace(found, queues=sorted(found.queues, key=lambda each: (-live(each), each.queue)))
    there: dict[str, Sequence[Any]] = {"queue": found.queues, "group": found.groups, "worker": found.workers}
    tables = {"queue": queue_table, "group": share_table, "worker": worker_table}
    # Each table also needs an empty line, a title, the column names, and a line for how many more there are.
    needs = [len(each) for each in there.values()]
    lines = needs if height is None else share(height - 1 - 4 * sum(map(bool, needs)), needs)
    parts: list[RenderableType] = [head]
    for (name, every), shown in zip(there.items(), lines, strict=True):
        if every:
            parts += [Text(), tables[name](found, shown)]
        if shown < len(every):
            parts.append(Text(f"… and {len(every) - shown:,} more", "dim"))
    if not found.workers:
        parts += [Text(), Text("No workers.")]
    return Group(*parts)


def share(room: int, needs: list[int]) -> list[int]:
    """Distribute lines one by one to the tables that need more; each that needs any gets at least one."""
    given = [min(need, 1) for need in needs]
    while sum(given) < room and given != needs:
        least = min(each for each, need in zip(given, needs, strict=True) if each < need)
        given[next(at for at, need in enumerate(needs) if given[at] == least < need)] += 1
    return given
