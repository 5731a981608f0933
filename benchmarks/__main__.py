"""The command `fairq bench`: measure, write JSON lines, show medians and ratios; report; compare."""

import contextlib
import importlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import harness
from benchmarks.results import Results, gather, load, median, pairs, reference, shown

NAMES = {path.stem.removeprefix("bench_"): path.stem for path in sorted(harness.ROOT.glob("bench_*.py"))}
WIDTH = 160  # of a table that goes into a file


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure fairq on this machine, and show it.

    Compare ratios within one run, not absolute numbers of two: `report` and `compare` do.

    \b
    Examples:
      fairq bench run --scale quick
      fairq bench explain --scale report
      fairq bench report benchmarks/results/local/20300131-080000.jsonl

    \b
    Exit codes:
      0  measured, written, nothing slower
      1  `compare` found something slower
      2  wrong usage
    """


@main.command("list")
def list_benchmarks() -> None:
    """Say which benchmarks there are, and how long they take.

    \b
    Examples:
      fairq bench list

    \b
    Exit codes:
      0  always
    """
    table = _table("", "benchmark", "question", *(f">{name}" for name in harness.SCALES if name != "tiny"))
    for name in NAMES:
        module = _module(name)
        times = [_span(module.estimate(scale)) for each, scale in harness.SCALES.items() if each != "tiny"]
        table.add_row(name, _title(module), *times)
    _console().print(table)


scale_option = click.option(
    "--scale",
    type=click.Choice(list(harness.SCALES)),
    default="quick",
    show_default=True,
    help="The size: tiny only proves that all works, quick takes minutes, report half an hour, full a night.",
)
dsn_option = click.option(
    "--dsn",
    help="Measure in a temporary database on this server, instead of starting one.",
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file for JSON lines. Plans go into the folder plans beside it.",
)

draft_option = click.option(
    "--draft",
    is_flag=True,
    help="Measure with uncommitted changes. The results are marked as a draft.",
)


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(list(NAMES)))
@scale_option
@dsn_option
@out_option
@click.option(
    "--without", "without", multiple=True, type=click.Choice(list(NAMES)), help="Leave out this one."
)
@click.option("--repetitions", type=click.IntRange(1), help="How often to repeat. Default: by the scale.")
@draft_option
def run(
    names: tuple[str, ...],
    scale: str,
    dsn: str | None,
    out: Path | None,
    without: tuple[str, ...],
    repetitions: int | None,
    draft: bool,
) -> None:
    """Run all benchmarks, or those named, and show the results.

    \b
    Examples:
      fairq bench run
      fairq bench run fairness held --scale report

    \b
    Exit codes:
      0  all ran
      1  one of them failed
      2  wrong usage
    """
    chosen = [name for name in names or NAMES if name not in without]
    out = out or harness.ROOT / "results" / "local" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    size = harness.SCALES[scale]
    measure(chosen, replace(size, repetitions=repetitions or size.repetitions), dsn, out, draft=draft)


@main.command()
@scale_option
@dsn_option
@out_option
@draft_option
def explain(scale: str, dsn: str | None, out: Path | None, draft: bool) -> None:
    """Show what a pop visits in five designs.

    The designs are plain FIFO, a window function, a lateral join per group, block ids assigned at creation,
    and fairq, with growing backlogs and groups. Each runs under EXPLAIN (ANALYZE, BUFFERS, WAL) on the same
    tasks, half of them of one group. The plans are kept as text.

    \b
    Examples:
      fairq bench explain
      fairq bench explain --scale report

    \b
    Exit codes:
      0  done
      1  it failed
      2  wrong usage
    """
    out = out or harness.ROOT / "results" / "local" / f"{time.strftime('%Y%m%d-%H%M%S')}-explain.jsonl"
    measure(["explain"], harness.SCALES[scale], dsn, out, draft=draft)
    click.echo(f"Plans are in {out.parent / 'plans' / out.stem}")


@main.command()
@click.argument(
    "results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page, with its plots beside it. Default: beside the first file of results.",
)
@click.option(
    "--images", type=click.Path(path_type=Path, file_okay=False), help="Another folder for the plots."
)
@click.option(
    "--tables",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page with all values. Default: beside the page, with -tables after its name.",
)
def report(results: tuple[Path, ...], out: Path | None, images: Path | None, tables: Path | None) -> None:
    """Make a Markdown page with plots from results.

    A second page has all values.

    \b
    Examples:
      fairq bench report benchmarks/results/2026-11-18-report.jsonl --out page.md

    \b
    Exit codes:
      0  written
      2  wrong usage
    """
    try:
        from benchmarks.page import write
    except ModuleNotFoundError as exc:
        raise click.ClickException(f"{exc.name} is missing: pip install 'fairq[demo]'") from exc
    out = out or results[0].with_suffix(".md")
    tables = tables or out.with_name(f"{out.stem}-tables.md")
    click.echo(f"Written: {', '.join(map(str, write(results, out, images or out.parent, tables)))}")


@main.command("compare")
@click.argument("old", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("new", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=10,
    show_default=True,
    help="By how many percent a value may be worse, or by twice the spread of both runs if that is more.",
)
@click.option("--all", "everything", is_flag=True, help="Also show what did not change.")
def compare_runs(old: Path, new: Path, tolerance: float, everything: bool) -> None:
    """Say what is slower in a second run.

    Only by more than the measurements vary.

    \b
    Examples:
      fairq bench compare before.jsonl after.jsonl

    \b
    Exit codes:
      0  nothing is slower
      1  something is slower
      2  wrong usage, or the runs have nothing in common
    """
    from benchmarks.compare import compare

    changes = compare(load([old]), load([new]), tolerance / 100)
    if not changes:
        raise click.UsageError("the two runs have nothing in common")
    slower = [change for change in changes if change.regressed]
    table = _table(
        "", "benchmark", "what", "scenario", "subject", ">old", ">new", ">worse by", ">tolerated", "against"
    )
    for change in changes if everything else slower:
        table.add_row(
            change.key.benchmark,
            change.key.what,
            change.key.text(),
            change.subject,
            shown(change.old),
            shown(change.new),
            f"{change.worse:.0%}",
            f"{change.tolerance:.0%}",
            change.against,
        )
    if table.row_count:
        _console().print(table)
    click.echo(f"{len(slower)} of {len(changes)} values are worse by more than the measurements vary.")
    raise SystemExit(1 if slower else 0)


# --- Running ---------------------------------------------------------------------------------------


def measure(names: list[str], scale: harness.Scale, dsn: str | None, out: Path, *, draft: bool) -> None:
    """Run the benchmarks one after the other, each in a database of its own. Results belong to a commit."""
    if (changed := harness.uncommitted()) and not draft:
        files = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise click.UsageError(f"Not committed: {files}. Commit first, or measure with --draft.")
    console = _console()
    out.parent.mkdir(parents=True, exist_ok=True)
    modules = {name: _module(name) for name in names}
    failed: list[str] = []
    with (
        harness.server(dsn, to_explain=names == ["explain"]) as admin_dsn,
        out.open("w", encoding="utf-8") as lines,
    ):
        lines.write(json.dumps({"facts": harness.facts(admin_dsn)}) + "\n")
        with bar({name: module.estimate(scale) for name, module in modules.items()}) as progress:
            for name, module in modules.items():
                try:
                    with harness.database(admin_dsn, *module.BASELINES) as database_dsn:
                        plans = out.parent / "plans" / out.stem
                        session = harness.Session(
                            name, database_dsn, scale, lines, plans, progress.begin(name)
                        )
                        module.run(session)
                    progress.print(summary(name, gather(session.records)))
                except Exception:
                    # One failure must not waste hours of the others.
                    failed.append(name)
                    progress.progress.console.print_exception()
                progress.end(name)
    console.print(f"Written to {out}", soft_wrap=True)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


class Bar:
    """The progress of the run, by the benchmarks' estimates."""

    def __init__(self, progress: Progress, estimates: dict[str, float]) -> None:
        self.progress = progress
        self.estimates = estimates
        self.done = 0.0
        self.current: tuple[str, float] | None = None
        self.text = ""
        self.total = max(sum(estimates.values()), 0.001)
        self.task = progress.add_task("", total=self.total, text="", left="")

    def begin(self, name: str) -> harness.Stopwatch:
        self.current, self.text = (name, time.monotonic()), name
        self.progress.console.print(f"{name}: about {_span(self.estimates[name])}", style="dim")

        def say(text: str) -> None:
            self.text = f"{name}: {text}"

        return say

    def end(self, name: str) -> None:
        self.current = None
        self.done += self.estimates[name]
        self.show()

    def show(self) -> None:
        running = 0.0
        if current := self.current:
            running = min(time.monotonic() - current[1], 0.98 * self.estimates[current[0]])
        left = max(self.total - self.done - running, 0)
        self.progress.update(
            self.task, completed=self.done + running, text=self.text, left=f"{_span(left)} left"
        )

    def print(self, what: Table) -> None:
        self.progress.console.print(what)


@contextlib.contextmanager
def bar(estimates: dict[str, float]) -> Iterator[Bar]:
    columns = (
        BarColumn(),
        TextColumn("{task.fields[left]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=_console()) as progress:
        shown_bar = Bar(progress, estimates)
        ended = threading.Event()

        def move() -> None:
            while not ended.wait(0.5):
                shown_bar.show()

        mover = threading.Thread(target=move, daemon=True)
        mover.start()
        try:
            yield shown_bar
        finally:
            ended.set()
            mover.join()


# --- Showing ---------------------------------------------------------------------------------------


def summary(name: str, results: Results) -> Table:
    """Medians over the repetitions, their spread, and ratios to the reference of the same scenario."""
    table = _table(name, "what", "scenario", "subject", ">median", ">spread", ">ratio")
    for key, subjects in results.values.items():
        for subject, values in subjects.items():
            base = reference(results, key, subject)
            ratio = pairs(values, base[1]) if base else {}
            table.add_row(
                key.what,
                key.text(),
                subject,
                shown(median(values), key.unit),
                f"{shown(min(values.values()))} – {shown(max(values.values()))}",
                f"{median(ratio):.2f}" if ratio else "",
            )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for heading in headings:
        table.add_column(heading.lstrip(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{NAMES[name]}")


def _title(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
