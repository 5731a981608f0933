"""`python -m benchmarks run`: measure, write JSON lines, show medians and ratios."""

import importlib
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import harness

NAMES = {path.stem.removeprefix("bench_"): path.stem for path in sorted(harness.ROOT.glob("bench_*.py"))}
# What the other subjects of a benchmark are compared with, first one that is there.
REFERENCES = ("fifo", "plain insert", "by hand", "article: fifo")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Benchmarks of fairq. Compare ratios within one run, not absolute numbers of two."""


@main.command("list")
def list_benchmarks() -> None:
    """Say which benchmarks there are."""
    for name, module in NAMES.items():
        doc = importlib.import_module(f"benchmarks.{module}").__doc__ or ""
        click.echo(f"{name:20} {doc.strip().splitlines()[0]}")


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(list(NAMES)))
@click.option("--scale", type=click.Choice(list(harness.SCALES)), default="quick", show_default=True)
@click.option("--dsn", help="An existing server to measure on (a database is made and dropped there).")
@click.option("--out", type=click.Path(path_type=Path), help="Where the JSON lines go.")
def run(names: tuple[str, ...], scale: str, dsn: str | None, out: Path | None) -> None:
    """Run benchmarks (all, or those named) and show what they measured."""
    console = Console()
    out = out or harness.ROOT / "results" / "local" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with harness.server(dsn) as admin_dsn, out.open("w") as lines:
        lines.write(json.dumps({"facts": harness.facts(admin_dsn)}) + "\n")
        for name in names or NAMES:
            module = importlib.import_module(f"benchmarks.{NAMES[name]}")
            if not hasattr(module, "run"):
                continue
            with (
                harness.database(admin_dsn, *module.BASELINES) as database_dsn,
                console.status(f"{name}: {(module.__doc__ or '').strip().splitlines()[0]}"),
            ):
                session = harness.Session(name, database_dsn, harness.SCALES[scale], lines)
                module.run(session)
            console.print(summary(name, session.records))
    console.print(f"Written to {out}")


def summary(name: str, records: list[dict[str, Any]]) -> Table:
    """Medians over the repetitions, their spread, and the ratio to the reference of the same scenario."""
    table = Table(title=name, title_justify="left")
    for heading in ("what", "scenario", "subject", "median", "spread", "ratio"):
        table.add_column(heading, justify="right" if heading in ("median", "spread", "ratio") else "left")
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    units: dict[str, str] = {}
    for record in records:
        scenario = " ".join(f"{key}={value}" for key, value in record["scenario"].items())
        values[record["what"], scenario][record["subject"]].append(record["value"])
        units[record["what"]] = record["unit"]
    medians = {key: {s: harness.median(v) for s, v in by.items()} for key, by in values.items()}
    for (what, scenario), by_subject in medians.items():
        base = _base(medians, what, scenario)
        for subject, value in by_subject.items():
            spread = values[what, scenario][subject]
            table.add_row(
                what,
                scenario,
                subject,
                f"{value:,.4g} {units[what]}" if value < 1000 else f"{value:,.0f} {units[what]}",
                f"{min(spread):,.4g} – {max(spread):,.4g}",
                f"{value / base:.2f}" if base else "",
            )
    return table


def _base(medians: dict[tuple[str, str], dict[str, float]], what: str, scenario: str) -> float | None:
    """What a value is compared with: the reference of its own scenario, or else of the one most like it."""
    alike = [
        (len(set(scenario.split()) & set(other.split())), by_subject[reference])
        for (other_what, other), by_subject in medians.items()
        for reference in REFERENCES
        if other_what == what and reference in by_subject
    ]
    return max(alike, default=(0, None), key=lambda each: each[0])[1]


if __name__ == "__main__":
    main()
