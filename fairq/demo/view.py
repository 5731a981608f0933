"""What the demo shows on a terminal: two panels while it runs, a table at the end."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fairq.demo.engines import Record
from fairq.demo.run import Standing, Standings
from fairq.demo.scenario import FLOOD, Scenario

WIDE = 106  # room for two panels with bars
RESULT = 76  # room for the table at the end
MIDDLE = 64  # room for one table with both queues

_TITLES = {"FIFO": "FIFO · first come, first served", "fairq": "fairq · everyone in turn"}
_STYLES = {"FIFO": "dark_orange3", "fairq": "cyan"}


def seconds_text(seconds: float | None) -> str:
    """A wait as text: 3.1 ms, 840 ms, 12.4 s."""
    if seconds is None:
        return "–"
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s"


def mood(seconds: float | None) -> str:
    """The colour of a wait, as a person in front of a screen would judge it."""
    if seconds is None:
        return "dim"
    return "green" if seconds < 0.25 else "yellow" if seconds < 1 else "bold red"


def _wait(seconds: float | None) -> Text:
    return Text(seconds_text(seconds), mood(seconds))


def headline(scenario: Scenario) -> str:
    others = len(scenario.tenants) - 1
    few = scenario.tasks - scenario.flood
    return (
        f"Bob enqueues {scenario.flood:,} tasks at once. {others} other tenant{'s' * (others > 1)} enqueue"
        f"{'s' * (others == 1)} {few:,} in all, now and then. Each queue has {scenario.slots} worker slots."
    )


# --- While it runs --------------------------------------------------------------------------------


def frame(
    elapsed: float, sides: list[Standings], scenario: Scenario, width: int, height: int
) -> RenderableType:
    """The live view, fitted to the terminal."""
    rows = max(2, height - (9 if width >= WIDE else 8))
    clock = Text(f"{elapsed:5.1f} s", "bold")
    if width >= WIDE:
        panels = Columns([_panel(side, rows, width // 2 - 1) for side in sides], padding=(0, 1), expand=False)
        return Group(Text(headline(scenario), "dim"), panels, clock)
    if width >= MIDDLE:
        return Group(Text(headline(scenario), "dim"), _both(sides, rows, ("p50", "max")), clock)
    return Group(_both(sides, rows, ("p50",)), clock)


def _shown(side: Standings, rows: int) -> list[Standing]:
    """All tenants or, if there are too many, the first ones and one line for the rest."""
    if len(side.tenants) <= rows:
        return list(side.tenants)
    return [*side.tenants[: rows - 1], side.others]


def _panel(side: Standings, rows: int, width: int) -> Panel:
    style = _STYLES[side.engine]
    table = Table(box=None, padding=(0, 1), expand=True, header_style="dim")
    table.add_column("tenant", no_wrap=True)
    table.add_column("served", ratio=1)
    for name, least in (("waiting", 7), ("wait p50", 8), ("max", 7)):
        table.add_column(name, justify="right", no_wrap=True, min_width=least)
    for each in _shown(side, rows):
        bar = Bar(max(each.arrived, 1), 0, each.started, color=style, bgcolor="grey19")
        waiting = Text(f"{each.waiting:,}", "" if each.waiting else "dim")
        table.add_row(_name(each.tenant), bar, waiting, _wait(each.p50), _wait(each.longest))
    done = f"[dim]{side.started:,} of {side.total:,} started[/]"
    title = f"[bold {style}]{_TITLES[side.engine]}[/]"
    return Panel(table, title=title, subtitle=done, border_style=style, width=width, box=box.ROUNDED)


def _both(sides: list[Standings], rows: int, columns: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim")
    table.add_column("wait so far", no_wrap=True)
    _add_columns(table, columns)
    for standings in zip(*(_shown(side, rows) for side in sides), strict=True):
        waits = [wait for each in standings for wait in (each.p50, each.longest)[: len(columns)]]
        table.add_row(_name(standings[0].tenant), *map(_wait, waits))
    return table


def _add_columns(table: Table, columns: tuple[str, ...]) -> None:
    """The same columns for each queue."""
    for engine, style in _STYLES.items():
        for column in columns:
            table.add_column(f"[{style}]{engine}[/] {column}", justify="right", no_wrap=True)


def _name(tenant: str) -> Text:
    return Text(tenant, "bold" if tenant == FLOOD else "dim" if tenant == "others" else "")


def line(elapsed: float, sides: list[Standings]) -> str:
    """The same in one line, for files and pipes."""
    parts = [
        f"{side.engine}: {side.started:,} of {side.total:,} started, others' wait p50 "
        f"{seconds_text(side.others.p50)}, max {seconds_text(side.others.longest)}"
        for side in sides
    ]
    return f"{elapsed:5.1f} s  " + "  |  ".join(parts)


# --- At the end -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A tenant's number of tasks, and its waits in both queues."""

    tenant: str
    tasks: int
    fifo: tuple[float, float]  # p50, p99
    fair: tuple[float, float]

    @property
    def ratio(self) -> float:
        """How many times longer the median wait is under FIFO."""
        return self.fifo[0] / max(self.fair[0], 1e-6)


def p50_p99(waits: list[float]) -> tuple[float, float]:
    if len(waits) == 1:
        return waits[0], waits[0]
    cuts = quantiles(waits, n=100, method="inclusive")
    return cuts[49], cuts[98]


def outcomes(fifo: list[Record], fair: list[Record], scenario: Scenario) -> list[Outcome]:
    """A line per tenant, and a last one for all but Bob together."""
    of_fifo, of_fair = (_waits(records) for records in (fifo, fair))
    return [
        Outcome(tenant, len(of_fifo[tenant]), p50_p99(of_fifo[tenant]), p50_p99(of_fair[tenant]))
        for tenant in (*scenario.tenants, "others")
    ]


def _waits(records: list[Record]) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = defaultdict(list)
    for record in records:
        waits[record.tenant].append(record.waited)
        if record.tenant != FLOOD:
            waits["others"].append(record.waited)
    return waits


def result_table(results: list[Outcome], width: int = WIDE) -> Table:
    """The table at the end; only medians on a narrow terminal."""
    shown = ("p50", "p99") if width >= RESULT else ("p50",)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        title="Wait from enqueue to start",
        title_style="bold",
        caption="ratio: median wait under FIFO divided by that under fairq",
        caption_style="dim",
    )
    table.add_column("tenant", no_wrap=True)
    table.add_column("tasks", justify="right")
    _add_columns(table, shown)
    table.add_column("ratio", justify="right", no_wrap=True)
    for each in results:
        if each.tenant == "others":
            table.add_section()
        table.add_row(
            _name(each.tenant),
            f"{each.tasks:,}",
            *(_wait(seconds) for waits in (each.fifo, each.fair) for seconds in waits[: len(shown)]),
            f"{each.ratio:,.0f}x" if each.ratio >= 9.95 else f"{each.ratio:.1f}x",
        )
    return table


def moral(results: list[Outcome], makespans: Sequence[float]) -> str:
    """The result in one sentence, whatever it is."""
    others = results[-1]
    bob = results[0]
    fifo, fair = (seconds_text(seconds) for seconds in (others.fifo[0], others.fair[0]))
    return (
        f"With fairq instead of FIFO the others' median wait is {fair} instead of {fifo}; Bob's is "
        f"{seconds_text(bob.fair[0])} instead of {seconds_text(bob.fifo[0])}, and the last task starts after "
        f"{makespans[1]:.1f} s instead of {makespans[0]:.1f} s."
    )


def say(console: Console, text: str, style: str = "") -> None:
    """Print prose, wrapped only on a terminal."""
    console.print(Text(text, style), soft_wrap=not console.is_terminal)
