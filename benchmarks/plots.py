"""Plots of the report. They are opaque, so that they look the same on light and dark pages."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from benchmarks.results import Key, Results, Values, better, median, pairs, reference, shown

__all__ = ["Picture", "draw_all"]

PAPER = "#fbfaf7"
INK = "#22262b"
MUTED = "#6b7280"
GRID = "#e3e1da"
FONT: Any = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 11}
COLOURS = {
    "fifo": "#d1495b",
    "plain insert": "#8d99ae",
    "window": "#edae49",
    "lateral": "#9a6324",
    "block id": "#7b5ea7",
    "article": "#7b5ea7",
    "fairq": "#00798c",
    "fairq pop": "#00798c",
    "fairq promote": "#5fb3bf",
    "fairq work": "#30638e",
    "fairq by time": "#5fb3bf",
    "fairq free": "#5fb3bf",
    "fairq held": "#00798c",
    "by count": "#d1495b",
    "by estimate": "#edae49",
    "fifo free": "#e8a0a8",
    "fifo held": "#d1495b",
}
OTHERS = "#8d99ae"  # queues of others: they have their names beside the bars


@dataclass(frozen=True)
class Picture:
    path: Path
    alt: str


def draw_all(results: Results, folder: Path) -> dict[str, list[Picture]]:
    """Draw the results, and return the pictures of each benchmark."""
    drawn: dict[str, list[Picture]] = {}
    with matplotlib.rc_context(FONT):
        for benchmark, name, draw, alt in PLOTS:
            figure = draw(results)
            if figure is not None:
                path = folder / f"bench-{name}.png"
                FigureCanvasAgg(figure)
                figure.savefig(path, facecolor=PAPER)
                drawn.setdefault(benchmark, []).append(Picture(path, alt))
    return drawn


# --- What a pop visits -----------------------------------------------------------------------------


def visited(results: Results) -> Figure | None:
    """Rows visited over the number of tasks, and over the number of groups; both axes logarithmic."""
    keys = results.of("explain", "rows visited")
    if not keys:
        return None
    sizes = {
        (dict(key.scenario)["tasks"], dict(key.scenario)["groups"]): values for key, values in keys.items()
    }
    most_tasks = max(tasks for tasks, _ in sizes)
    groups_of = {groups: sum(1 for _, g in sizes if g == groups) for _, groups in sizes}
    usual_groups = max(groups_of, key=lambda groups: (groups_of[groups], groups))
    figure, axes = _card(
        "Rows visited by one pop of 100 tasks",
        "Index entries and rows, as PostgreSQL's statistics count them; both axes logarithmic."
        " One group holds half of what waits.",
        panels=2,
        height=5.2,
    )
    along_tasks = {tasks: values for (tasks, groups), values in sizes.items() if groups == usual_groups}
    along_groups = {groups: values for (tasks, groups), values in sizes.items() if tasks == most_tasks}
    for axis, lines, label in (
        (axes[0], along_tasks, f"tasks waiting, in {usual_groups:,} groups"),
        (axes[1], along_groups, f"groups, {most_tasks:,} tasks waiting"),
    ):
        _lines(axis, lines)
        axis.set_xlabel(label, color=MUTED, loc="left")
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(max(low, 1), high)
    _legend(figure, axes[0])
    return figure


def _lines(axis: Axes, lines: dict[int, Values]) -> None:
    ats = sorted(lines)
    for subject in dict.fromkeys(subject for values in lines.values() for subject in values):
        values = [max(median(lines[at][subject]), 1) for at in ats]
        axis.plot(
            ats,
            values,
            marker="o",
            color=_colour(subject),
            label=subject,
            linewidth=2.4 if "fairq" in subject else 1.8,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(ats)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}"))


# --- Bars ------------------------------------------------------------------------------------------


def creating(results: Results) -> Figure | None:
    """Ratios to a plain insert, because the rates differ by a factor of a hundred."""
    keys = {key: values for key, values in results.of("create_task").items() if key.unit == "tasks/s"}
    return _ratio_card(
        results,
        keys,
        "Creating tasks",
        "Rate beside a plain insert of the same payload (the line); more is better.",
    )


def cycling(results: Results) -> Figure | None:
    return _bars(
        results, "cycle", "cycle", "Promote, pop, finish on one connection", "Tasks a second; more is better."
    )


def waits(results: Results) -> Figure | None:
    names = ("newcomers' wait, p50", "newcomers' wait, p99")
    keys = {key: values for key, values in results.of("fairness").items() if key.what in names}
    return _dot_cards(
        results,
        keys,
        "Bob floods the queue, nine newcomers arrive",
        "How long the newcomers' tasks wait; less is better. Dots are medians, lines the least and the most.",
        unit="ms",
    )


def turnover(results: Results) -> Figure | None:
    what = "wait when tenants come and go, "
    keys = {key: values for key, values in results.of("fairness").items() if key.what.startswith(what)}
    return _dot_cards(
        results,
        keys,
        "Tenants come and go",
        "How long tasks wait; less is better. Two heavy tenants, bursts of fifty tasks, single small tasks.",
        unit="ms",
        label=lambda key: f"{dict(key.scenario)['tenant']}, {key.what.removeprefix(what)}",
    )


def peers(results: Results) -> Figure | None:
    keys = {key: values for key, values in results.of("peers").items() if key.unit == "tasks/s"}
    return _bar_cards(_best_first(keys), "Beside other queues", "Tasks a second; more is better.")


def two_levels(results: Results) -> Figure | None:
    return _bar_cards(
        results.of("two_levels"),
        "Users inside groups",
        "As many users, each a group (flat) or in groups. Less of promotion is better, more of the rest.",
    )


def mixed_lengths(results: Results) -> Figure | None:
    keys = {key: values for key, values in results.of("mixed_lengths").items() if key.unit == "ms"}
    return _dot_cards(
        results,
        keys,
        "Ten milliseconds beside long tasks",
        "Ten tenants, eight slots, long tasks of a second. How long the short ones wait; less is better.",
        unit="ms",
        label=lambda key: key.what,
    )


def peers_waits(results: Results) -> Figure | None:
    keys = {key: values for key, values in results.of("peers").items() if key.unit == "ms"}
    return _dot_cards(
        results,
        _best_first(keys),
        "Beside other queues: waits",
        "Less is better. After a comma: the queue's own fairness option."
        " Triangles: the time was up before the task was served.",
        unit="ms",
    )


def _best_first(keys: dict[Key, Values]) -> dict[Key, Values]:
    def rank(key: Key, values: Values) -> list[str]:
        return sorted(values, key=lambda subject: -better(key.unit) * median(values[subject]))

    return {key: {subject: values[subject] for subject in rank(key, values)} for key, values in keys.items()}


def _bars(results: Results, benchmark: str, what: str | None, title: str, subtitle: str) -> Figure | None:
    keys = {key: values for key, values in results.of(benchmark, what).items() if key.unit == "tasks/s"}
    return _bar_card(keys, title, subtitle, unit="tasks/s")


def _bar_card(
    keys: dict[Key, Values],
    title: str,
    subtitle: str,
    *,
    unit: str,
    beside: Callable[[Key, str, float], str] | None = None,
) -> Figure | None:
    """A group of bars per scenario on one axis, to compare scenarios."""
    if not keys:
        return None
    rows = sum(len(values) for values in keys.values())
    labels = [_two_lines(key) for key in keys]
    left = 0.04 + 0.0072 * max(len(line) for text in labels for line in text.splitlines())
    figure, axes = _card(title, subtitle, height=1.7 + 0.30 * rows + 0.34 * len(keys), left=left)
    axis = axes[0]
    at = 0.0
    ticks = []
    for key, subjects in keys.items():
        first = at
        for subject, values in subjects.items():
            text = beside(key, subject, median(values)) if beside else None
            _bar(axis, at, subject, values, text)
            at += 1
        ticks.append((first + at - 1) / 2)
        at += 0.9
    axis.set_yticks(ticks, labels)
    axis.set_ylim(at - 0.9, -0.9)
    most = max(max(values.values()) for subjects in keys.values() for values in subjects.values())
    _from_left(axis, max(most * 1.32, 1.1 if beside else 0), unit)
    return figure


def _bar_cards(keys: dict[Key, Values], title: str, subtitle: str) -> Figure | None:
    """A panel per thing measured, each with its own axis, and bars from zero."""

    def draw(axis: Axes, key: Key, subjects: Values) -> None:
        for at, (subject, values) in enumerate(subjects.items()):
            _bar(axis, at, subject, values)
        _from_left(axis, max(max(values.values()) for values in subjects.values()) * 1.75, key.unit)

    return _panels(keys, title, subtitle, draw)


def _dot_cards(
    results: Results,
    keys: dict[Key, Values],
    title: str,
    subtitle: str,
    *,
    unit: str,
    label: Callable[[Key], str] | None = None,
) -> Figure | None:
    """A panel per thing measured, on one logarithmic axis. Dots, for a logarithmic axis has no zero for bars
    to stand on. What was cut off is a hollow triangle at the cut, and says so.
    """
    every = [value for subjects in keys.values() for values in subjects.values() for value in values.values()]
    if not every:
        return None
    least, most = max(min(every), 1e-3) / 2, max(*every, 1e-3) * 5

    def draw(axis: Axes, key: Key, subjects: Values) -> None:
        for at, (subject, values) in enumerate(subjects.items()):
            middle, colour = median(values), _colour(subject)
            cut = results.cut_off(key, middle)
            axis.plot([min(values.values()), max(values.values())], [at, at], color=colour, linewidth=2)
            marker = ">" if cut else "o"
            axis.plot(middle, at, marker, color=colour, markersize=8, fillstyle="none" if cut else "full")
            text = f"{subject}: {cut}" if cut else f"{shown(middle)}  {subject}"
            place = math.log(max(values.values()) / least) / math.log(most / least)
            right = place < 0.55 or place + 0.0135 * (len(text) + 1) < 1.03
            _beside(
                axis, subject, text, max(values.values()) if right else min(values.values()), at, right=right
            )
        axis.set_xscale("log")
        axis.set_xlim(least, most)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
        axis.set_xlabel(f"{unit}, logarithmic", color=MUTED, loc="left")
        axis.grid(axis="y", visible=False)

    return _panels(keys, title, subtitle, draw, label)


def _panels(
    keys: dict[Key, Values],
    title: str,
    subtitle: str,
    draw: Callable[[Axes, Key, Values], None],
    label: Callable[[Key], str] | None = None,
) -> Figure | None:
    """Rows of two panels; the height of a row follows its longest panel."""
    if not keys:
        return None
    items = list(keys.items())
    rows = [items[at : at + 2] for at in range(0, len(items), 2)]
    sizes = [max(len(subjects) for _, subjects in row) for row in rows]
    heights = [0.27 * size + 1.1 for size in sizes]
    height = 1.0 + sum(heights)
    figure = Figure(figsize=(12, height), dpi=120, facecolor=PAPER)
    _title(figure, title, subtitle)
    top = height - 1.0
    for row, size, tall in zip(rows, sizes, heights, strict=True):
        for column, (key, subjects) in enumerate(row):
            bottom = (top - tall + 0.75) / height
            axis = figure.add_axes((0.025 + 0.495 * column, bottom, 0.455, 0.27 * size / height))
            _plain(axis)
            draw(axis, key, subjects)
            axis.set_title(label(key) if label else _title_of(key), loc="left", color=INK, fontsize=12)
            axis.set_yticks([])
            axis.set_ylim(size - 0.4, -0.6)
        top -= tall
    return figure


def _title_of(key: Key) -> str:
    text = key.text()
    return f"{key.what} ({text})" if text else key.what


def _bar(axis: Axes, at: float, subject: str, values: dict[int, float], text: str | None = None) -> None:
    middle = median(values)
    axis.barh(at, middle, height=0.82, color=_colour(subject))
    if len(values) > 1:
        ends = [min(values.values()), max(values.values())]
        axis.plot(ends, [at, at], color=INK, linewidth=1.2, alpha=0.6)
    _beside(axis, subject, text or f"{shown(middle)}  {subject}", max(values.values()), at)


def _beside(axis: Axes, subject: str, text: str, x: float, y: float, *, right: bool = True) -> None:
    axis.annotate(
        text,
        (x, y),
        xytext=(8 if right else -8, 0),
        textcoords="offset points",
        va="center",
        ha="left" if right else "right",
        color=INK,
        fontsize=9.5,
        fontweight="bold" if subject.startswith("fairq") else "normal",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
    )


def _from_left(axis: Axes, most: float, unit: str) -> None:
    axis.set_xlim(0, max(most, 1e-3))
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axis.set_xlabel(unit, color=MUTED, loc="left")
    axis.tick_params(axis="y", labelcolor=INK)
    axis.grid(axis="y", visible=False)


def _ratio_card(results: Results, keys: dict[Key, Values], title: str, subtitle: str) -> Figure | None:
    """Bars of the ratios to the reference, a line at 1, with the values beside them."""
    ratios: dict[Key, Values] = {}
    rates: dict[tuple[Key, str], float] = {}
    for key, subjects in keys.items():
        for subject, values in subjects.items():
            base = reference(results, key, subject)
            found = pairs(values, base[1]) if base else {}
            if found:
                ratios.setdefault(key, {})[subject] = found
                rates[key, subject] = median(values)

    def beside(key: Key, subject: str, ratio: float) -> str:
        return f"{ratio:.2f}  {subject}, {shown(rates[key, subject], key.unit)}"

    figure = _bar_card(ratios, title, subtitle, unit="times a plain insert", beside=beside)
    if figure is not None:
        figure.axes[0].axvline(1, color=INK, linewidth=1.2, zorder=0.5)
    return figure


def _two_lines(key: Key) -> str:
    text = key.text()
    return f"{key.what}\n{text}" if text else key.what


# --- Over time -------------------------------------------------------------------------------------


def shares(results: Results) -> Figure | None:
    """Jain's index per window: 1 is perfectly even, 1/n is one tenant having it all."""
    by_count = results.series_of("fairness", "Jain index by tasks")
    by_seconds = results.series_of("fairness", "Jain index by worker seconds")
    if not by_count:
        return None
    figure, axes = _card(
        "How evenly ten busy tenants are served",
        "Jain's index over time: 1 when all get the same, 0.1 when one of ten gets everything."
        " One tenant's tasks take ten times as long.",
        panels=2,
        height=4.6,
    )
    for axis, series, label in ((axes[0], by_count, "by tasks"), (axes[1], by_seconds, "by worker seconds")):
        _over_time(axis, series)
        axis.set_ylim(0, 1.06)
        axis.set_title(label, loc="left", color=INK, fontsize=12)
    _legend(figure, axes[0])
    return figure


def settled(results: Results) -> Figure | None:
    """The share of the one of two tenants: a half is fair."""
    by_tokens = results.series_of("settled_cost", "share of the tokens")
    by_seconds = results.series_of("settled_cost", "share of the seconds")
    if not by_tokens or not by_seconds:
        return None
    figure, axes = _card(
        "Two equal tenants, and what is known at the end",
        "The share of the tenant with the longer tasks, of all there was so far. A half is fair.",
        panels=2,
        height=4.6,
    )
    for axis, series, title, label in (
        (axes[0], by_tokens, "of tokens", "tasks served"),
        (axes[1], by_seconds, "of seconds", "seconds of a simulated clock"),
    ):
        axis.axhline(0.5, color=INK, linewidth=1.2)
        _over_time(axis, series)
        axis.set_ylim(0, 1.04)
        axis.set_title(title, loc="left", color=INK, fontsize=12)
        axis.set_xlabel(label, color=MUTED, loc="left")
    _legend(figure, axes[0])
    return figure


def held(results: Results) -> Figure | None:
    pops = results.series_of("held", "pop")
    if not pops:
        return None
    figure, axes = _card(
        "A snapshot is held open, then let go",
        "A steady rate through one connection. Dotted: the snapshot ends, and vacuum may remove what is dead."
        " Faint: single runs.",
        panels=3,
        height=4.6,
        share=False,
    )
    buffers = results.series_of("held", "buffers of a pop")
    dead = results.series_of("held", "dead rows")
    titles = ("one pop, p50, ms", "buffers of one pop", "dead rows")
    for axis, series, title in zip(axes, (pops, buffers, dead), titles, strict=True):
        _over_time(axis, series)
        _from_zero(axis, title)
        for end in {each["scenario"]["seconds"] for each in series}:
            axis.axvline(end, color=MUTED, linestyle=":", linewidth=1)
    _legend(figure, axes[0])
    return figure


def churned(results: Results) -> Figure | None:
    memory = results.series_of("churn", "memory of the worker")
    sizes = results.series_of("churn", "live tables and indexes")
    if not memory or not sizes:
        return None
    figure, axes = _card(
        "Churn: a worker and its tables over time",
        "Tasks come and go as fast as the worker can. The history of ended tasks, which grows by design,"
        " is not counted.",
        panels=2,
        height=4.4,
        share=False,
    )
    for axis, series, label in (
        (axes[0], memory, "memory of the worker"),
        (axes[1], sizes, "live tables and indexes"),
    ):
        _over_time(axis, series)
        _from_zero(axis, f"{label}, MB")
    return figure


def _over_time(axis: Axes, series: Sequence[dict[str, Any]]) -> None:
    """A line per subject: the median while all repetitions go on, with each repetition faint behind it."""
    of_subject: dict[str, list[list[list[float]]]] = {}
    for each in series:
        of_subject.setdefault(each["subject"], []).append(each["points"])
    for subject, runs in of_subject.items():
        colour = _colour(subject)
        for points in runs:
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.9, alpha=0.35)
        middle = [
            (statistics.median(at for at, _ in together), statistics.median(value for _, value in together))
            for together in zip(*runs, strict=False)
        ]
        axis.plot(*zip(*middle, strict=True), color=colour, linewidth=2.2, label=subject)
    axis.set_xlim(0, max(_all_end(series), 1e-3) * 1.02)
    axis.set_xlabel("seconds", color=MUTED, loc="left")


def _all_end(series: Sequence[dict[str, Any]]) -> float:
    """Where the shortest of the repetitions of the longest-lived subject ends."""
    ends: dict[str, list[float]] = {}
    for each in series:
        ends.setdefault(each["subject"], []).append(each["points"][-1][0])
    return max(min(times) for times in ends.values())


def _from_zero(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", color=INK, fontsize=12)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))


# --- A card ----------------------------------------------------------------------------------------


def _card(
    title: str,
    subtitle: str,
    *,
    panels: int = 1,
    height: float = 4.5,
    left: float = 0.075,
    share: bool = True,
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(12, height), dpi=120, facecolor=PAPER)
    made = figure.subplots(1, panels, squeeze=False, sharey=share and panels > 1)
    axes = list(made[0])
    figure.subplots_adjust(
        left=left,
        right=0.975,
        top=1 - (1.45 if panels > 1 else 1.0) / height,
        bottom=0.65 / height,
        wspace=0.10 if share else 0.22,
    )
    _title(figure, title, subtitle)
    for axis in axes:
        _plain(axis)
    return figure, axes


def _title(figure: Figure, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.025, 1 - 0.42 / height, title, fontsize=17, fontweight="bold", color=INK)
    figure.text(0.025, 1 - 0.72 / height, subtitle, fontsize=10.5, color=MUTED)


def _plain(axis: Axes) -> None:
    axis.set_facecolor(PAPER)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, colors=MUTED, which="both")
    for side in axis.spines.values():
        side.set_visible(False)


def _legend(figure: Figure, axis: Axes) -> None:
    """The legend below the subtitle, where no line of a plot crosses it."""
    handles, names = axis.get_legend_handles_labels()
    height = figure.get_figheight()
    figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0.018, 1 - 0.80 / height),
        ncols=len(names),
        frameon=False,
        labelcolor=INK,
        fontsize=10,
    )


def _colour(subject: str) -> str:
    subject = subject.split(", ")[0]
    if subject in COLOURS:
        return COLOURS[subject]
    if subject.startswith("fairq"):
        return COLOURS["fairq"]
    return OTHERS


PLOTS: Sequence[tuple[str, str, Callable[[Results], Figure | None], str]] = (
    ("explain", "visited", visited, "Rows visited by one pop, over tasks and over groups"),
    ("create_task", "creating", creating, "Tasks created a second"),
    ("cycle", "cycle", cycling, "Promote, pop and finish, tasks a second"),
    ("fairness", "waits", waits, "How long newcomers wait in a flood"),
    ("fairness", "shares", shares, "Jain's index over time"),
    ("fairness", "turnover", turnover, "How long tasks wait when tenants come and go"),
    ("two_levels", "two-levels", two_levels, "Promotion, cycle and shares with users inside groups"),
    (
        "settled_cost",
        "settled-cost",
        settled,
        "The share of one of two equal tenants, of tokens and of seconds",
    ),
    ("mixed_lengths", "mixed-lengths", mixed_lengths, "How long short tasks wait beside long ones"),
    ("held", "held", held, "Pops and dead rows while a snapshot is held"),
    ("churn", "churn", churned, "Memory and table sizes over time"),
    ("peers", "peers", peers, "Tasks a second beside other queues"),
    ("peers", "peers-waits", peers_waits, "Waits beside other queues"),
)
