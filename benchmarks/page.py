"""The report from the results of a run: a page with plots and conclusions, and one with all values."""

import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, plots
from benchmarks.results import Key, Results, Values, better, median, newest, pairs, reference, shown

__all__ = ["write"]

MOST_COLUMNS = 6
WIDTH = 120

TITLES = {
    "explain": "What a pop visits",
    "create_task": "Creating tasks",
    "cycle": "Promote, pop, finish",
    "policies": "What policies cost those who use none",
    "worker": "The worker",
    "schedules": "Ten thousand schedules",
    "fairness": "Fairness",
    "two_levels": "Users inside groups",
    "settled_cost": "What is known at the end",
    "mixed_lengths": "Short tasks beside long ones",
    "held": "While a snapshot is held",
    "churn": "Churn",
    "backlog": "A large backlog",
    "peers": "Beside other queues",
    "generated_call": "Generated calls",
}

LEADS = {
    "explain": (
        "Tasks wait in groups, one of which holds half of them. Each way pops 100 of them, under `explain"
        " (analyze, buffers, wal)`. FIFO is the reference: it visits what it takes, and serves one group. The"
        " window function numbers everything that waits, and the lateral join looks at every group; block ids"
        " and fairq visit what they take. fairq's pop and promotion are shown apart, because not every pop"
        " promotes."
    ),
    "create_task": (
        "One task per call with autocommit, one within an application's transaction of 20 ms, and many in"
        " one call, beside an insert of the same payload into a plain table with one index. Block ids that an"
        " insert assigns lock the group's row until the application commits."
    ),
    "cycle": (
        "One connection promotes, pops and finishes a whole backlog, beside a FIFO queue with the same"
        " durability and the same history. This is what fairness costs the database."
    ),
    "policies": (
        "The same cycle of a queue without limits: in a database where nobody has any, beside ten thousand"
        " groups of another queue with caps, rates, breakers and keys, and tasks that wait, and beside as"
        " many such groups of the same queue."
    ),
    "schedules": (
        "Tenants enqueue a task every 5 ms, and a worker of 8 slots runs them, while others' schedules fire."
    ),
    "worker": "`fairq work` with handlers that do nothing: what remains is the way there and back.",
    "fairness": (
        "Tasks are sleeps, eight slots serve them, and a FIFO queue, a queue with block ids and fairq get"
        " the same arrivals. One small loop works all three; *fairq work* is fairq with its own worker. A"
        " task that still waits at the end counts with its age, so the waits of a FIFO queue grow with the"
        " length of the run."
    ),
    "two_levels": (
        "A thousand tenants have the same tasks. Each is a group (*flat*), or a user in a group of one, two,"
        " ten or a hundred. *Promotion* is a pass that gives each of them four more addresses, once all tasks"
        " have been heard of, as pops have it do. *Of one task each* is a pass with so many waiting that each"
        " gets one. *Cycle* is promote, pop and finish, with the hearing. The last plot shows what users are"
        " for: a tenant with many of them beside a tenant with one."
    ),
    "settled_cost": (
        "Two tenants have equal weight. *Tokens*: answers of 10 to 10,000 tokens, log-normal. One tenant has"
        " short answers and announces up to ten times too much, the other has long ones and announces up to"
        " ten times too little. *By estimate* counts what was announced, *settled* what was used, once that"
        " is known. *Seconds*: tasks of 34 seconds beside tasks of one, by a simulated clock."
    ),
    "mixed_lengths": (
        "Ten tenants always have tasks of a second waiting, and 40 tasks of 10 ms arrive a second, spread"
        " over all of them, on eight slots. With tasks of a minute the plots would be the same, and a minute"
        " wide. *fairq work* shares time; then it has a cap of one task for each tenant, then two slots kept"
        " for short tasks."
    ),
    "held": (
        "A thousand tasks a second arrive and are served. In *held* one transaction holds an old snapshot,"
        " so vacuum removes nothing and dead rows pile up; in *free* none does. All four run at the same"
        " time, in databases of one server. Values are those of the last quarter of that time."
    ),
    "churn": (
        "A worker runs as many tasks that do nothing as it can. Its memory, and the tables of what is alive,"
        " should not grow. The history of ended tasks, which grows by design, is not counted."
    ),
    "backlog": ("One connection pops a hundred tasks and finishes them, with much waiting and with little."),
    "peers": (
        "Each queue is a process with its own worker, in a configuration that its documentation recommends"
        " for throughput. In the flood, Bob's 20,000 tasks of 1 ms keep eight slots busy, and nine newcomers"
        " come with ten tasks each. A queue that has an option for keeping tenants apart appears twice, with"
        " the option behind its name. Notes below the tables say what a queue lacks."
    ),
    "generated_call": ("The typed wrapper that `fairq gen` writes, beside the same call written by hand."),
}

# Why a value of fairq may be worse than its reference, by benchmark and the beginning of `what`.
WHY = {
    ("create_task", "single"): (
        "a function call for each task: it looks up the queue, checks its arguments, asks whether workers"
        " have been told, and rings the group's bell, a second insert; the plain insert is one prepared"
        " statement"
    ),
    ("create_task", "in 20 ms"): "two inserts instead of one, and indexes on what is inserted",
    ("create_task", "bulk"): "a wider row, and its entries in two indexes",
    ("create_task", "for two"): "as with one tenant",
    ("cycle", "cycle"): (
        "a holder and a row of the history are written for each task, an address for those that were not"
        " handed over, and a lane for each group of a pass"
    ),
    ("peers", "drain"): "see promote, pop, finish",
    ("peers", "enqueue to start"): "a worker promotes before it pops; FIFO polls every 2 ms",
    (
        "peers",
        "held snapshot: dead rows",
    ): "addresses and holders are rows of their own, and die with the task",
    ("peers", "held snapshot"): "see promote, pop, finish",
    ("explain", "time"): "a function call that looks up its queue, its worker and its clock before it pops",
    ("explain", "buffers"): "settings, worker and clock are looked up, and each task in two tables",
    (
        "explain",
        "rows",
    ): "each task is two rows, an address and a body; settings, worker and clock are looked up",
    ("explain", "WAL"): "an address is removed, and a holder written",
    ("explain", "slowest"): "one of the ten promotes for all; the others wait for it, a few milliseconds",
    ("held", "dead rows"): "while the snapshot is held nothing may be removed, in any queue",
    ("held", "buffers"): "what is dead but not removed has to be passed over once",
    ("held", ""): (
        "more pages to pass over while nothing is removed; the ratio is to fairq without the snapshot"
    ),
    ("backlog", ""): "see promote, pop, finish; some pops promote for many",
    ("two_levels", "promotion"): (
        "a group with several users has lanes for them beside its own: each pass draws and writes both"
    ),
    ("two_levels", "cycle"): "as promotion; and every user is a newcomer once, heard of one by one",
    ("mixed_lengths", "slots"): "kept slots are free for the next short task, and idle until it comes",
    ("mixed_lengths", "least"): "by time, over a run of a few long tasks for each tenant",
    ("fairness", "newcomers"): "one connection, and a worker of a second process, on two cores",
    ("fairness", "throughput"): "see promote, pop, finish: fairness is paid for in the database",
    ("fairness", "wait"): "tasks that came first wait longer when others get their turn: that is the point",
}


def write(paths: Sequence[Path], out: Path, images: Path, tables: Path) -> list[Path]:
    """Writes the page, the plots it shows and the tables; returns what was written."""
    results = newest(paths)
    for folder in (out.parent, images, tables.parent):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw_all(results, images)
    names = sorted(results.benchmarks(), key=_place)
    page = [
        "# What fairness costs, and what it buys",
        "Values are medians; a ratio is the median of the ratios within each repetition. Every value, its"
        f" spread, and the machine: [all tables]({_relative(tables, out.parent)}).",
        _measured(results, out.parent),
        _targets(results),
        _slower(results),
        *(_section(results, name, drawn.get(name, []), out.parent) for name in names),
    ]
    every = ["# All values", _written_by(results), _conditions(results)]
    every += [_tables(results, name) for name in names]
    for path, parts in ((out, page), (tables, every)):
        text = "\n\n".join(wrapped for part in parts if (wrapped := _wrapped(part)))
        path.write_text(text + "\n", encoding="utf-8")
    return [out, tables, *(picture.path for pictures in drawn.values() for picture in pictures)]


def _wrapped(text: str) -> str:
    """The text with paragraphs and items wrapped to the documentation's width."""
    lines = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        keep = line.startswith(("|", "#", "!")) or not line
        lines.append(
            line
            if keep
            else textwrap.fill(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        )
    return "\n".join(lines)


def _measured(results: Results, folder: Path) -> str:
    """Of what, on what, and how quiet it was; in a page of the clone with the way to measure anew."""
    of = dict.fromkeys(f"`{facts['commit']}`" for facts in results.facts)
    on = dict.fromkeys(
        f"{facts['machine']['cores']} cores ({facts['machine']['system']} {facts['machine']['arch']},"
        f" PostgreSQL {facts['postgresql']}, Python {facts['python']}, psycopg {facts['psycopg']},"
        f" fsync {facts['settings'].get('fsync', 'unknown')})"
        for facts in results.facts
    )
    if not of:
        return ""
    text = f"fairq at {_listed(of)}, on {_listed(on)}. {_noise(results)}".strip()
    if folder.resolve().is_relative_to(harness.ROOT.parent):
        guide = _relative(harness.ROOT / "README.md", folder)
        text += f" [How to measure on your own machine, and how to read it]({guide})"
    return text


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _noise(results: Results) -> str:
    spins = sorted(1000 * each for many in results.spins.values() for each in many)
    if not spins:
        return ""
    middle, least, most = shown(spins[len(spins) // 2], "ms"), shown(spins[0]), shown(spins[-1])
    span = f"took {middle} ({least} to {most}): the closer, the quieter."
    return f"A fixed piece of work beside each repetition {span}"


def _written_by(results: Results) -> str:
    return f"Written by `fairq bench report` from {_listed(f'`{name}`' for name in results.files)}."


def _conditions(results: Results) -> str:
    """Machine, versions, settings, noise: what readers need to judge the rest."""
    lines = ["## The machine, and how quiet it was", ""]
    seen = []
    for facts in results.facts:
        if facts in seen:
            continue
        seen.append(facts)
        machine, commit = facts["machine"], facts["commit"]
        versions = f"PostgreSQL {facts['postgresql']}, Python {facts['python']}, psycopg {facts['psycopg']}"
        system = f"{machine['cores']} cores, {machine['system']} {machine['arch']}"
        lines.append(f"- {system}; {versions}; fairq at `{commit}`")
        settings = ", ".join(f"{name} {value}" for name, value in sorted(facts["settings"].items()))
        lines.append(f"- {settings}")
    if noise := _noise(results):
        lines.append(f"- {noise}")
    lines += [
        "",
        "Values are medians over the repetitions, with the least and the most. A ratio is the median of"
        " the ratios within each repetition, so a busy moment counts on both sides.",
    ]
    return "\n".join(lines)


# --- Targets ---------------------------------------------------------------------------------------


def _targets(results: Results) -> str:
    rows = []
    for target in TARGETS:
        found = target.measure(results)
        if found is not None:
            met = found <= target.bound if target.most else found >= target.bound
            sign = "≤" if target.most else "≥"
            rows.append(
                (
                    target.text,
                    f"{sign} {shown(target.bound, target.unit)}",
                    shown(found, target.unit),
                    "yes" if met else "no",
                )
            )
    if not rows:
        return ""
    lead = (
        "The targets are for a machine of two cores with nothing else to do. Two commits are flushed between"
        " enqueue and start: where the disk takes half a millisecond for each, that is most of the target."
        " Newcomers bring ninety tasks at once: half of them wait at least as long as forty-five take."
    )
    return f"## What it should reach\n\n{lead}\n\n" + _table(("", "target", "measured", "reached"), rows)


class Target:
    """A number that the design asks for: at most (`most`) or at least this."""

    def __init__(
        self,
        text: str,
        bound: float,
        unit: str,
        where: tuple[str, str, str],
        *,
        most: bool = False,
        ratio: bool = False,
        growth: str | None = None,
        scenario: dict[str, Any] | None = None,
    ) -> None:
        self.text, self.bound, self.unit, self.where = text, bound, unit, where
        self.most, self.ratio, self.growth = most, ratio, growth
        self.scenario = scenario or {}

    def measure(self, results: Results) -> float | None:
        """The worst of the scenarios that match; as a ratio to the reference, or as growth along one axis."""
        benchmark, what, subject = self.where
        keys = {
            key: values[subject]
            for key, values in results.of(benchmark, what).items()
            if subject in values and self.scenario.items() <= dict(key.scenario).items()
        }
        if not keys:
            return None
        if self.growth:
            ordered = sorted(keys, key=lambda key: dict(key.scenario)[self.growth or ""])
            least = median(keys[ordered[0]])
            return (
                max(median(values) for values in keys.values()) / least if least and len(keys) > 1 else None
            )
        found = []
        for key, values in keys.items():
            if self.ratio:
                base = reference(results, key, subject)
                both = pairs(values, base[1]) if base else {}
                if both:
                    found.append(median(both))
            else:
                found.append(median(values))
        if not found:
            return None
        return max(found) if self.most else min(found)


TARGETS = (
    *(
        Target(
            f"{what}, groups with {users} each, beside as many groups without",
            1.3,
            "times",
            ("two_levels", what, f"fairq, {users} a group"),
            most=True,
            ratio=True,
        )
        for what in ("promotion", "promotion of one task each")
        for users in ("1 user", "2 users", "10 users", "100 users")
    ),
    Target(
        "tokens: how far from its share a tenant is, of what it should have",
        0.02,
        "",
        ("settled_cost", "tokens, worst share", "fairq, settled"),
        most=True,
    ),
    Target(
        "seconds: the same",
        0.02,
        "",
        ("settled_cost", "seconds, worst share", "fairq, settled"),
        most=True,
    ),
    Target(
        "short tasks' wait beside long ones, p99, with slots kept for them",
        250,
        "ms",
        ("mixed_lengths", "short tasks' wait, p99", "fairq work, slots for short ones"),
        most=True,
    ),
    Target(
        "one pop of 100: rows visited (an address and a body each), at the most groups and tasks",
        210,
        "rows",
        ("explain", "rows visited", "fairq pop"),
        most=True,
    ),
    Target(
        "one pop of 100: buffers at the most groups beside the fewest",
        2,
        "times",
        ("explain", "buffers", "fairq pop"),
        most=True,
        growth="groups",
        scenario={"tasks": 1_000_000},
    ),
    Target(
        "enqueue inside transactions of 20 ms, one tenant, beside a plain insert",
        0.97,
        "",
        ("create_task", "in 20 ms transactions", "fairq"),
        ratio=True,
        scenario={"tenants": 1},
    ),
    Target(
        "one task a call, autocommit, beside a plain insert",
        0.75,
        "",
        ("create_task", "single", "fairq"),
        ratio=True,
        scenario={"payload": "100 B"},
    ),
    Target(
        "bulk, beside a plain bulk insert",
        0.75,
        "",
        ("create_task", "bulk", "fairq"),
        ratio=True,
        scenario={"payload": "100 B"},
    ),
    Target("bulk", 80_000, "tasks/s", ("create_task", "bulk", "fairq"), scenario={"payload": "100 B"}),
    Target(
        "promote, pop, finish, batches of 500, beside FIFO",
        0.5,
        "",
        ("cycle", "cycle", "fairq"),
        ratio=True,
        scenario={"batch": 500, "groups": 100},
    ),
    Target(
        "the same with payloads of 2 KB",
        0.85,
        "",
        ("cycle", "cycle of larger payloads", "fairq"),
        ratio=True,
        scenario={"payload": "2 KB"},
    ),
    *(
        Target(
            f"WAL of a task, batches of {batch}, beside FIFO",
            bound,
            "times",
            ("cycle", "WAL, cycle", "fairq"),
            most=True,
            ratio=True,
            scenario={"batch": batch, "groups": 100},
        )
        for batch, bound in ((1, 1.7), (100, 1.3))
    ),
    Target(
        "worker, no-op handlers, one process of 500 slots",
        20_000,
        "tasks/s",
        ("worker", "drain", "fairq"),
        scenario={"handler": "nothing", "processes": 1, "slots": 500},
    ),
    Target(
        "worker, no-op handlers, two processes of 500 slots",
        30_000,
        "tasks/s",
        ("worker", "drain", "fairq"),
        scenario={"handler": "nothing", "processes": 2, "slots": 500},
    ),
    Target(
        "worker, no-op handlers, one process, 1,000,000 tasks waiting",
        30_000,
        "tasks/s",
        ("worker", "drain of a large backlog", "fairq"),
        scenario={"waiting": 1_000_000},
    ),
    Target(
        "enqueue to start on an idle worker, p50",
        1.2,
        "ms",
        ("worker", "enqueue to start, p50", "fairq"),
        most=True,
    ),
    Target(
        "enqueue to start on an idle worker, p99",
        3,
        "ms",
        ("worker", "enqueue to start, p99", "fairq"),
        most=True,
    ),
    Target(
        "newcomers' wait in a flood, p50",
        8,
        "ms",
        ("fairness", "newcomers' wait, p50", "fairq work"),
        most=True,
    ),
    Target(
        "newcomers' wait in a flood, p99",
        25,
        "ms",
        ("fairness", "newcomers' wait, p99", "fairq work"),
        most=True,
    ),
    Target("throughput meanwhile", 1_500, "tasks/s", ("fairness", "throughput in a flood", "fairq work")),
    Target(
        "pop while a snapshot is held, beside without",
        1.2,
        "times",
        ("held", "pop p50", "fairq held"),
        most=True,
        ratio=True,
    ),
    Target(
        "wait (creation to pop) while a snapshot is held, beside without",
        1.2,
        "times",
        ("held", "wait p50", "fairq held"),
        most=True,
        ratio=True,
    ),
    Target(
        "promotion while a snapshot is held, beside without",
        1.2,
        "times",
        ("held", "promote p50", "fairq held"),
        most=True,
        ratio=True,
    ),
)


# --- Where fairq is slower -------------------------------------------------------------------------


def _slower(results: Results) -> str:
    """Every value of fairq that is 10 % worse than its reference in every repetition, and why."""
    rows: dict[tuple[str, str], list[float]] = {}
    for key, subjects in results.values.items():
        direction = better(key.unit)
        for subject, values in subjects.items():
            base = reference(results, key, subject)
            if not base or not direction or not subject.startswith("fairq") or subject == "fairq promote":
                continue
            ratios = pairs(values, base[1])
            if not ratios:
                continue
            ratio = median(ratios)
            always = all((each < 1) if direction > 0 else (each > 1) for each in ratios.values())
            if always and ((ratio < 0.9) if direction > 0 else (ratio > 1.1)):
                rows.setdefault((key.benchmark, key.what), []).append(ratio)
    if not rows:
        return ""
    shown_rows: list[tuple[str, str, str, str]] = []
    before = ""
    for (benchmark, what), found in sorted(rows.items(), key=lambda row: _place(row[0][0])):
        span = " to ".join(dict.fromkeys((shown(min(found)), shown(max(found)))))
        why = _why(benchmark, what)
        title = TITLES.get(benchmark, benchmark)
        shown_rows.append((title, what, span, "as above" if why and why == before else why))
        before = why
    return "## Where fairq is slower, and why\n\n" + _table(
        ("", "what", "ratio to the reference", "why"), shown_rows
    )


def _place(benchmark: str) -> int:
    """Its place on the page."""
    return [*TITLES, benchmark].index(benchmark)


def _why(benchmark: str, what: str) -> str:
    for (name, beginning), text in WHY.items():
        if name == benchmark and what.startswith(beginning):
            return text
    return ""


# --- A benchmark -----------------------------------------------------------------------------------


def _section(results: Results, name: str, pictures: Sequence[plots.Picture], folder: Path) -> str:
    """The question, the plots, and what they do not show."""
    parts = [f"## {TITLES.get(name, name)}", LEADS.get(name, "")]
    parts += [f"![{picture.alt}]({_relative(picture.path, folder)})" for picture in pictures]
    if name == "explain":
        parts.append(_growth(results))
    elif name == "churn":
        parts.append(_over_time(results))
    elif not pictures or name in ("settled_cost", "mixed_lengths"):
        parts.append(_medians(results, name))
    return "\n\n".join(part for part in parts if part)


def _medians(results: Results, name: str) -> str:
    """A table without spreads: a column per subject or, with one subject only, per thing measured."""
    keys = results.of(name)
    first = next(iter(keys))
    common = {*first.scenario}.intersection(*(key.scenario for key in keys))
    subjects = _subjects(keys.items())
    rows: dict[tuple[str, ...], list[tuple[str, ...]]] = {}  # by headings
    if len(subjects) > 1:
        for key, values in keys.items():
            about = f" ({key.text(common)})" if key.text(common) else ""
            cells = (_middle(results, key, subject, values.get(subject)) for subject in subjects)
            unit = _unit(key.what, {key: values})
            rows.setdefault(tuple(subjects), []).append((key.what + about + unit, *cells))
    else:
        of_scenario: dict[str, dict[str, str]] = {}
        for key, values in keys.items():
            found = of_scenario.setdefault(key.text(common), {})
            found[key.what] = shown(median(values[subjects[0]]), key.unit)
        for about, found in of_scenario.items():
            rows.setdefault(tuple(found), []).append((about, *found.values()))
    about = first.text({*first.scenario} - common)
    bases = _bases(results, keys)
    about = "; ".join(part for part in (about, f"× is to {bases}" if bases else "") if part)
    tables = (_table(("", *headings), lines) for headings, lines in rows.items())
    return "\n\n".join(part for part in (f"{about[:1].upper()}{about[1:]}", *tables) if part)


def _middle(results: Results, key: Key, subject: str, values: dict[int, float] | None) -> str:
    """A median, and the ratio to the reference."""
    if values is None:
        return ""
    if cut := results.cut_off(key, median(values)):
        return cut
    ratio = _ratio(results, key, subject, values)
    return shown(median(values)) + (f" **×{ratio}**" if ratio else "")


def _over_time(results: Results) -> str:
    """The minimum and maximum of each half of a series, which show whether it grows."""
    lines = []
    for each in (each for each in results.series if each["benchmark"] == "churn"):
        values = [value for _, value in each["points"][1:]]
        halves = values[: len(values) // 2], values[len(values) // 2 :]
        first, second = (f"{shown(min(half))} to {shown(max(half), each['unit'])}" for half in halves if half)
        lines.append(f"- {each['what']}: {first} in the first half of the run, {second} in the second")
    return "\n".join(lines)


def _tables(results: Results, name: str) -> str:
    """All that was measured."""
    parts = [f"## {TITLES.get(name, name)}"]
    by_what: dict[str, dict[Key, Values]] = {}
    for key, values in results.of(name).items():
        by_what.setdefault(key.what, {})[key] = values
    together = _together(by_what)
    for scenario, whats in together.items():
        parts.append(_one_table(results, scenario, {what: by_what[what] for what in whats}))
    apart = [what for what in by_what if not any(what in whats for whats in together.values())]
    for what in apart:
        keys = by_what[what]
        heading = f"**{what}**" + _unit(what, keys)
        if bases := _bases(results, keys):
            heading += f"; × is to {bases}"
        parts.append(f"{heading}\n\n{_values(results, keys)}")
    if notes := results.notes.get(name):
        parts.append("\n".join(f"- **{subject}**: {text}" for subject, text in notes.items()))
    return "\n\n".join(part for part in parts if part)


def _together(by_what: dict[str, dict[Key, Values]]) -> dict[tuple[tuple[str, Any], ...], list[str]]:
    """Things measured in a single scenario, which go into one table if there are several."""
    found: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for what, keys in by_what.items():
        if len(keys) == 1:
            found.setdefault(next(iter(keys)).scenario, []).append(what)
    return {
        scenario: whats
        for scenario, whats in found.items()
        if len(whats) > 1
        and len(_subjects(key for what in whats for key in by_what[what].items())) <= MOST_COLUMNS
    }


def _one_table(
    results: Results, scenario: tuple[tuple[str, Any], ...], by_what: dict[str, dict[Key, Values]]
) -> str:
    """A row per thing measured, a column per subject; above it the scenario."""
    every = {key: values for keys in by_what.values() for key, values in keys.items()}
    subjects = _subjects(every.items())
    rows = [
        (
            f"**{key.what}**{_unit(key.what, {key: values})}",
            *(
                _cell(results, key, subject, values[subject]) if subject in values else ""
                for subject in subjects
            ),
        )
        for key, values in every.items()
    ]
    about = [next(iter(every)).text()] if scenario else []
    if bases := _bases(results, every):
        about.append(f"× is to {bases}")
    heading = "; ".join(about)
    return f"{heading[:1].upper()}{heading[1:]}\n\n{_table(('', *subjects), rows)}".strip()


def _subjects(items: Iterable[tuple[Key, Values]]) -> list[str]:
    return [*dict.fromkeys(subject for _, values in items for subject in values)]


def _unit(what: str, keys: dict[Key, Values]) -> str:
    unit = next(iter(keys)).unit
    return f", {unit}" if unit and unit not in what else ""


def _bases(results: Results, keys: dict[Key, Values]) -> str:
    found = (reference(results, key, subject) for key in keys for subject in keys[key])
    return ", ".join(dict.fromkeys(base[0] for base in found if base))


def _values(results: Results, keys: dict[Key, Values]) -> str:
    """A row per scenario and a column per subject; the other way round when there are many subjects."""
    subjects = _subjects(keys.items())
    if len(subjects) > MOST_COLUMNS or len(keys) == 1:
        headings = [key.text() or "median (least – most)" for key in keys]
        rows = [
            (
                subject,
                *(
                    _cell(results, key, subject, values[subject]) if subject in values else ""
                    for key, values in keys.items()
                ),
            )
            for subject in subjects
        ]
        return _table(("", *headings), rows)
    wide = [
        (
            key.text() or "–",
            *(
                _cell(results, key, subject, values[subject]) if subject in values else ""
                for subject in subjects
            ),
        )
        for key, values in keys.items()
    ]
    return _table(("scenario", *subjects), wide)


def _cell(results: Results, key: Key, subject: str, values: dict[int, float]) -> str:
    """A median, least and most, and the ratio to the reference, if it is not the reference itself."""
    if cut := results.cut_off(key, median(values)):
        return cut
    if min(values.values()) == max(values.values()):
        return _middle(results, key, subject, values)
    ratio = _ratio(results, key, subject, values)
    ratio = f" **×{ratio}**" if ratio else ""
    return f"{shown(median(values))} ({shown(min(values.values()))} – {shown(max(values.values()))}){ratio}"


def _ratio(results: Results, key: Key, subject: str, values: dict[int, float]) -> str:
    """The ratio to the reference; empty if either was cut off."""
    against = reference(results, key, subject)
    if not against or any(results.cut_off(key, median(each)) for each in (values, against[1])):
        return ""
    ratios = pairs(values, against[1])
    return shown(median(ratios)) if ratios else ""


def _growth(results: Results) -> str:
    """How many times more is visited at the largest than at the smallest size."""
    rows = []
    for what in ("rows visited", "time"):
        keys = results.of("explain", what)
        subjects = dict.fromkeys(subject for values in keys.values() for subject in values)
        for subject in subjects:
            found = {
                (dict(key.scenario)["tasks"], dict(key.scenario)["groups"]): median(values[subject])
                for key, values in keys.items()
                if subject in values
            }
            rows.append((what, subject, _along(found, 0), _along(found, 1)))
    if not any(row[2] or row[3] for row in rows):
        return ""
    sizes = [dict(key.scenario) for key in results.of("explain", "rows visited")]
    headings = (f"more {name}, {_span([size[name] for size in sizes])}" for name in ("tasks", "groups"))
    title = "**Growth**: the largest beside the smallest, the other number being the same"
    return f"{title}\n\n{_table(('', 'way', *headings), rows)}"


def _span(sizes: Sequence[int]) -> str:
    return f"{min(sizes):,} to {max(sizes):,}"


def _along(found: dict[tuple[int, int], float], axis: int) -> str:
    """The growth from the smallest to the largest along one axis, over as many steps as possible."""
    lines: dict[int, dict[int, float]] = {}
    for at, value in found.items():
        lines.setdefault(at[1 - axis], {})[at[axis]] = value
    longest = max(lines.items(), key=lambda each: (len(each[1]), each[0]))[1]
    first, last = min(longest), max(longest)
    if first == last or not longest[first]:
        return ""
    return f"× {shown(longest[last] / longest[first])}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
