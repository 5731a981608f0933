"""`fairq demo`, from the server's start to its end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click
import psycopg
from rich.console import Console
from rich.live import Live
from starlette.requests import Request

from fairq import dsn as dsns
from fairq import embedded, install
from fairq.cli import Exit, Failure, amount, command, not_installed, option
from fairq.demo import engines, view
from fairq.demo.run import Show, Standings, run
from fairq.demo.scenario import Scenario, plan
from fairq.web import asgi
from fairq.web.guard import from_here
from fairq.web.serve import in_background

DATA = Path(".cache") / "demo"
PICTURE = Path("demo-output") / "fairness.png"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@command(
    codes={
        0: "it ran",
        1: "it could not start",
        2: "wrong usage, or matplotlib is missing",
        3: "database",
        128: "and more: ended by a signal",
    },
    dsn=False,
    json=False,
)
@amount("--tasks", 10_000, "How many tasks Bob enqueues.", least=10, most=1_000_000)
@amount("--tenants", 10, "How many tenants, with Bob.", least=2, most=1000)
@amount("--slots", 32, "Worker slots of each queue.", most=1000)
@option("--out FILE", "The picture.", type=click.Path(dir_okay=False, path_type=Path), default=PICTURE)
@option("--dsn DSN", "Create a temporary database on this server, instead of starting one.")
def demo(tasks: int, tenants: int, slots: int, out: Path, dsn: str | None) -> None:
    """Bob enqueues 10,000 tasks at once; the other tenants enqueue a few each, now and then. A FIFO queue
    ("for update skip locked") and fairq serve the same arrivals with the same number of worker slots, in one
    PostgreSQL, with tasks that sleep 20 to 60 ms. At the end there are a table and a picture.

    It needs no database: it starts a PostgreSQL with its data in .cache/demo of the current folder, which
    listens only on a socket, and stops it at the end. It ignores FAIRQ_DSN and DATABASE_URL. It uses your
    server only if --dsn names it, and then makes a database of its own there.

    fairq demo                                      about 20 seconds
    fairq demo --tasks 3000 --tenants 4 --slots 8   smaller
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise not_installed("matplotlib", "'fairq demo'", "demo")
    console = Console(highlight=False)
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        _demo(plan(tasks, tenants, slots), out, dsn, console)
    except SystemExit:
        view.say(console, "Stopped. Nothing is left running.")
        raise
    except embedded.EmbeddedError as exc:
        raise Failure(
            str(exc),
            hint=f"Is another demo running here? If not, remove the folder {DATA} and start again.",
            code="embedded",
            exit_code=Exit.NO,
        ) from exc


def _stop(number: int, _: FrameType | None) -> None:
    """End the demo cleanly, and ignore further signals meanwhile."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _demo(scenario: Scenario, out: Path, dsn: str | None, console: Console) -> None:
    started = time.monotonic()
    with (
        _database(dsn, console) as where,
        _page(where, console) as stays,
        psycopg.connect(where, autocommit=True) as conn,
    ):
        both = engines.set_up(conn, scenario.slots)
        with _display(scenario, console) as show:
            run(where, both, scenario, show)
        fifo, fair = (engine.history(conn) for engine in both)

        # Keeps matplotlib's list of fonts out of the home folder. Imported here because it is slow.
        os.environ.setdefault("MPLCONFIGDIR", str(Path(".cache", "matplotlib").absolute()))
        from fairq.demo import plot

        plot.draw(out, fifo, fair, scenario)
        results = view.outcomes(fifo, fair, scenario)
        makespans = [max(record.started for record in records) for records in (fifo, fair)]
        console.print(view.result_table(results, console.width))
        view.say(console, view.moral(results, makespans), "bold")
        view.say(console, f"Picture: {out}  ({time.monotonic() - started:.0f} s in all)")
        stays()


# --- The database ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _database(dsn: str | None, console: Console) -> Iterator[str]:
    """The connection string of a new database with fairq, which is dropped at the end."""
    with contextlib.ExitStack() as ending:
        if dsn is None:
            admin, name = ending.enter_context(_own_server(console)), "demo"
        else:
            admin, name = dsns.to_libpq(dsn), f"fairq_demo_{secrets.token_hex(4)}"
            view.say(console, f"The demo makes its own database {name} beside {dsns.describe(admin)}.", "dim")
        where = ending.enter_context(embedded.database(admin, name))
        install.migrate(where)
        yield where


@contextlib.contextmanager
def _own_server(console: Console) -> Iterator[str]:
    if ignored := [name for name in dsns.VARIABLES if os.environ.get(name)]:
        note = f"The demo ignores {' and '.join(ignored)}. It uses a server of yours only with --dsn."
        view.say(console, note, "dim")
    note = "Starting the PostgreSQL in" if DATA.exists() else "Making a PostgreSQL in"
    with console.status(f"{note} {DATA} …") if console.is_terminal else contextlib.nullcontext():
        DATA.parent.mkdir(parents=True, exist_ok=True)
        server = embedded.start(DATA)
    with server:
        ready = f"The demo's own PostgreSQL {server.binaries.version}, data in {DATA}, fsync on."
        view.say(console, ready, "dim")
        yield server.dsn()


# --- The page --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _page(dsn: str, console: Console) -> Iterator[Callable[[], None]]:
    """Serve the page of `fairq web`. Yields a function that keeps it up if somebody is looking at it."""
    watched = False

    def allow(request: Request) -> bool:
        nonlocal watched
        watched = watched or from_here(request)
        return from_here(request)

    def stay() -> None:
        if watched and console.is_terminal and sys.stdin.isatty():
            console.input("The page stays up until you press Enter. ")

    with in_background(asgi(dsn, allow=allow)) as address:
        view.say(console, f"Who gets what, in a browser: {address}", "bold")
        yield stay


# --- The view -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _display(scenario: Scenario, console: Console) -> Iterator[Show]:
    """A function that shows the current state: a live view on a terminal, else a line per second."""
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def refresh(elapsed: float, sides: list[Standings]) -> None:
                live.update(view.frame(elapsed, sides, scenario, console.width, console.height), refresh=True)

            yield refresh
        return
    view.say(console, view.headline(scenario))
    printed = -1.0

    def print_line(elapsed: float, sides: list[Standings]) -> None:
        nonlocal printed
        if elapsed >= printed + 1 or all(side.started == side.total for side in sides):
            printed = elapsed
            view.say(console, view.line(elapsed, sides))

    yield print_line
