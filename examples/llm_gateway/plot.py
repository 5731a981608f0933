"""Received against entitled share, as a picture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

PAPER, INK, MUTED, GRID = "#fbfaf7", "#22262b", "#6b7280", "#e3e1da"
COLOURS = ("#00798c", "#d1495b", "#b8860b")


def draw(
    path: Path,
    began: float,
    answered: Sequence[tuple[float, str, str | None, int]],
    weights: Mapping[str, float],
) -> None:
    """Plot each tenant's part of all tokens so far; dashed lines show what it is entitled to."""
    figure = Figure(figsize=(9, 4.6), dpi=140, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    figure.subplots_adjust(left=0.08, right=0.76, top=0.83, bottom=0.12)
    tokens = Counter[str]()
    times: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in weights}
    for at, name, _, used in sorted(answered, key=lambda each: each[0]):
        tokens[name] += used
        times.append(at - began)
        for each, line in shares.items():
            line.append(tokens[each] / tokens.total())
    for line, colour in zip(shares.values(), COLOURS, strict=True):
        axis.plot(times, line, color=colour, linewidth=2)
    ends: dict[float, list[str]] = {}
    for name, weight in weights.items():
        entitled = weight / sum(weights.values())
        axis.axhline(entitled, color=INK, linewidth=1, linestyle=(0, (4, 4)))
        ends.setdefault(entitled, []).append(name)
    for entitled, names in ends.items():
        for number, name in enumerate(names):
            colour = COLOURS[list(weights).index(name)]
            middle = (len(names) - 1) / 2 - number
            axis.annotate(
                f"{name}: {shares[name][-1]:.1%} of {entitled:.0%}",
                (1, entitled),
                (8, 16 * middle),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                color=colour,
                fontweight="bold",
            )
    axis.set_xlim(0, times[-1])
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.set_xlabel("seconds", color=MUTED, loc="left")
    axis.set_facecolor(PAPER)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.tick_params(length=0, colors=MUTED)
    for side in axis.spines.values():
        side.set_visible(False)
    figure.text(0.08, 0.93, "Whose tokens?", fontsize=17, fontweight="bold", color=INK)
    figure.text(0.08, 0.87, "Part of all tokens so far; dashed: the share by weight.", color=MUTED)
    figure.savefig(path, facecolor=PAPER)
