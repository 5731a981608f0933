"""The demo as a picture: a line per task, from enqueue to start, side by side."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairq.demo.engines import Record
from fairq.demo.scenario import FLOOD, Scenario
from fairq.demo.view import p50_p99, seconds_text

MOST_ROWS = 12
ROW_HEIGHT = 0.78

# Opaque, so that it looks the same on light and dark pages.
PAPER = "#fbfaf7"
INK = "#22262b"
MUTED = "#6b7280"
GRID = "#e3e1da"
FLOOD_COLOUR = "#b9b4a6"
COLOURS = {"FIFO": "#d1495b", "fairq": "#00798c"}
TITLES = {"FIFO": "FIFO: everybody waits behind Bob", "fairq": "fairq: everybody in turn"}
FONT: Any = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 11}


def draw(path: Path, fifo: list[Record], fair: list[Record], scenario: Scenario) -> None:
    with matplotlib.rc_context(FONT):
        tenants = scenario.tenants[:MOST_ROWS]
        height = 2.6 + 0.42 * max(len(tenants), 4)  # inches, as the margins below
        figure = Figure(figsize=(13, height), dpi=140, facecolor=PAPER)
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(
            left=0.075, right=0.985, top=1 - 1.5 / height, bottom=0.8 / height, wspace=0.05
        )
        end = max(record.started for record in (*fifo, *fair)) * 1.02
        for axis, engine, records in zip(axes, COLOURS, (fifo, fair), strict=True):
            _panel(axis, engine, records, tenants, end)
        axes[0].set_yticks(range(len(tenants)), tenants)
        for label in axes[0].get_yticklabels():
            label.set_color(INK)
            label.set_fontweight("bold" if label.get_text() == FLOOD else "normal")
        others = len(scenario.tenants) - 1
        title = (
            f"Bob enqueues {scenario.flood:,} tasks at once. "
            f"How long {'do' if others > 1 else 'does'} {others} other tenant{'s' * (others > 1)} wait?"
        )
        figure.text(0.075, 1 - 0.42 / height, title, fontsize=18, fontweight="bold", color=INK)
        about = (
            "One line per task, from its enqueue to its start (dot). Both queues ran at the same time in one "
            f"PostgreSQL, {scenario.slots} worker slots each."
        )
        if others >= MOST_ROWS:
            about += f" First {len(tenants)} of {len(scenario.tenants)} tenants."
        figure.text(0.075, 1 - 0.76 / height, about, color=MUTED)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor=PAPER)


def _panel(
    axis: matplotlib.axes.Axes, engine: str, records: list[Record], tenants: tuple[str, ...], end: float
) -> None:
    colour = COLOURS[engine]
    for row, tenant in enumerate(tenants):
        mine = [record for record in records if record.tenant == tenant]
        pitch = ROW_HEIGHT / max(len(mine), 1)
        heights = [row - ROW_HEIGHT / 2 + pitch * (number + 0.5) for number in range(len(mine))]
        flood = tenant == FLOOD
        lines = [[(record.created, y), (record.started, y)] for record, y in zip(mine, heights, strict=True)]
        ink = FLOOD_COLOUR if flood else colour
        axis.add_collection(
            LineCollection(lines, colors=ink, linewidths=0.7 if flood else 1.1, alpha=1 if flood else 0.75)
        )
        if not flood:
            axis.scatter([record.started for record in mine], heights, s=9, color=ink, linewidths=0, zorder=3)
        if flood:
            about = f"{len(mine):,} tasks"
            axis.text(mine[0].created + end * 0.012, row + 0.06, about, va="center", color=INK, fontsize=10.5)
        middle = seconds_text(p50_p99([record.waited for record in mine])[0])
        shade = INK if flood else colour
        axis.text(end * 1.13, row, middle, ha="right", va="center", color=shade, fontweight="bold")
    axis.text(end * 1.13, -0.82, "median wait", ha="right", va="center", color=MUTED, fontsize=9.5)
    axis.set_title(TITLES[engine], loc="left", color=colour, fontsize=14, fontweight="bold", pad=16)
    axis.set_xlim(0, end * 1.14)
    ticks = MaxNLocator(7, integer=end > 4).tick_values(0, end)
    axis.set_xticks([tick for tick in ticks if 0 <= tick <= end])
    axis.set_ylim(len(tenants) - 0.4, -0.6)
    axis.set_xlabel("seconds since the first task", color=MUTED, loc="left")
    axis.set_facecolor(PAPER)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, colors=MUTED)
    for side in axis.spines.values():
        side.set_visible(False)
