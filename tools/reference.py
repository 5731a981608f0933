"""Generates the parts of the pages that are declared elsewhere. For maintainers.

    python -m tools.reference            write them into the pages
    python -m tools.reference --check    exit 1 if a page is stale

Each part is in one page, between a comment with its name and `<!-- end -->`:

    <!-- fairq NAME -->       a command's usage, options, exit codes and role
    <!-- commands -->         all commands
    <!-- settings NAME -->    the settings of a configure_… function: types and defaults of the columns, help
    <!-- table NAME -->       its columns but settings, with the schema's comments
    <!-- tables -->           the tables that have no section of their own
    <!-- metrics SCOPE -->    the metrics of queues, of groups, or of the installation
    <!-- worker -->           the settings of a worker: default, bounds, help
    <!-- decisions -->        all decisions by their titles

Everything else is written by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click

from fairq.cli import COMMANDS, DSN, JSON, main
from fairq.metrics import METRICS
from fairq.options import options_of
from fairq.policies import ClusterSettings, GroupSettings, KeySettings, KindSettings, QueueSettings
from fairq.schedules import ScheduleSettings
from fairq.worker.config import BOUNDS, TOLD, Settings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
_SCHEMA = "".join(
    (ROOT / "sql" / name).read_text("utf-8") for name in ("bootstrap.sql", "schema/030_tables.sql")
)
_NAMES = r"commands|decisions|tables|worker|(?:settings|metrics|table) \w+|fairq [\w -]+"
_BLOCK = re.compile(rf"<!-- ({_NAMES}) -->\n.*?<!-- end -->", re.DOTALL)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand, by its full name."""
    assert isinstance(main, click.Group)
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command
        yield f"fairq {name}", command
        if isinstance(command, click.Group):
            inner = click.Context(command)
            for each in command.list_commands(inner):
                found = command.get_command(inner, each)
                assert found
                yield f"fairq {name} {each}", found


def about(name: str, command: click.Command) -> str:
    """A command's usage, options and exit codes."""
    usage = [name, *command.collect_usage_pieces(click.Context(command, info_name=name))]
    parts = [f"`{' '.join(usage)}`"]
    options = [each for each in command.params if isinstance(each, click.Option) and each not in (DSN, JSON)]
    if options:
        page, settings = _SETTINGS.get(name, ("", ()))
        named = [each for each in options if each.name in settings]
        if named:
            listed = ", ".join(
                f"`{option}`" for each in named for option in (*each.opts, *each.secondary_opts)
            )
            if len(named) > FEW and len(named) == len(settings):
                shown = next(each for each in named if "_" in str(each.name))
                listed = f"`{shown.opts[0]}` for `{shown.name}`, and so on"
                listed += "".join(f"; `{each}`, too" for option in named for each in option.secondary_opts)
            parts.append(_filled(f"An option for each setting of [{page}](sql/{page}.md): {listed}."))
        lines = (
            f"- {_names(each)}{_default(each)}: {_cell(each.help)}" for each in options if each not in named
        )
        parts.append("\n".join(_filled(each, "  ") for each in lines))
    if command.epilog:
        parts.append(_filled(_cell(_ends(command.epilog))))
    return "\n\n".join(parts) + "\n"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _ends(epilog: str) -> str:
    """The exit codes that differ from other commands', and the role."""
    codes, _, rights = epilog.removeprefix("Exit codes: ").partition("\n\n")
    own = [each for each in codes.split(" · ") if each not in ("0 done", "2 wrong usage", "3 database")]
    return " ".join(f"{each}." for each in (own and f"Exit codes: {' · '.join(own)}", rights) if each)


# More options are not listed by name: they are those of the settings.
FEW = 12
# Commands whose options are the settings of a function, whose page explains them.
_SETTINGS = {
    f"fairq {command}": (f"configure_{name}", frozenset(options_of(settings)))
    for command, name, settings in (
        ("queues create", "queue", QueueSettings),
        ("queues set", "queue", QueueSettings),
        ("groups set", "group", GroupSettings),
        ("keys set", "key", KeySettings),
        ("cluster set", "cluster", ClusterSettings),
        ("schedules create", "schedule", ScheduleSettings),
        ("schedules set", "schedule", ScheduleSettings),
    )
}
_VALUES: dict[type, str] = {click.IntRange: "N", click.FloatRange: "X", click.Path: "FILE"}


def _names(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar or _VALUES.get(type(option.type), 'TEXT')}"
    if isinstance(option.type, click.Choice) and not option.metavar:
        choices = "|".join(map(str, option.type.choices))
        value = f" {choices if len(choices) < 40 else 'NAME'}"
    return ", ".join(f"`{each}{value}`" for each in (*option.opts, *option.secondary_opts))


def _default(option: click.Option) -> str:
    if not option.show_default or option.is_flag:
        return ""
    return f" (`{option.default:g}`)" if isinstance(option.default, float) else f" (`{option.default}`)"


def _cell(text: str | None) -> str:
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", lambda found: f"`{found[0]}`", text or "")


def listing(pages: dict[Path, str]) -> str:
    """All commands, with links to their pages."""
    text = ""
    for name, command in COMMANDS.items():
        page = next(file for file, page in pages.items() if f"<!-- fairq {name} -->" in page)
        heading = re.findall(r"^(#+) (.*)$", pages[page].split(f"<!-- fairq {name} -->")[0], re.MULTILINE)[-1]
        anchor = (
            "" if heading[0] == "#" else "#" + re.sub(r"[^\w -]", "", heading[1].lower()).replace(" ", "-")
        )
        text += f"- [{name}]({page.name}{anchor}): {command.help}\n"
    return text


# What a configure_… function sets, and the table that has it as columns.
_TABLES = {
    "queue": (QueueSettings, "queues"),
    "group": (GroupSettings, "groups"),
    "key": (KeySettings, "groups"),
    "kind": (KindSettings, "kinds"),
    "cluster": (ClusterSettings, "settings"),
    "schedule": (ScheduleSettings, "schedules"),
}


def settings(name: str) -> str:
    """Each with its type, its default, and the help that the command line has."""
    declared, table = _TABLES[name]
    columns = _SCHEMA.split(f"create table fairq.{table} (")[1].split("\n);")[0]
    lines = []
    for setting, option in options_of(declared).items():
        found = re.search(rf"\b{setting} (double precision|\w+)([^,\n]*)", columns)
        assert found, setting
        preset = re.search(r"default '?([^',\n]+)", found[2])
        default = f" = `{preset[1]}`" if preset else ""
        told = re.sub(r" Default: [^.]*\.$", "", option.help) if preset else option.help
        text = re.sub(r"--([a-z][a-z-]*[a-z])", lambda flag: f"`{flag[1].replace('-', '_')}`", told)
        lines.append(_filled(f"- `{setting}` {found[1]}{default}: {text}", "  "))
    return "\n".join(lines) + "\n"


def _columns(table: str) -> dict[str, str]:
    """Of a table as the schema makes it: names and types."""
    made = _SCHEMA.split(f"create table fairq.{table} (")[1].split("\n)")[0]
    parts = re.split(r",\s+(?![^(]*\))", re.sub(r"\s*--.*", "", made).strip())
    found = (
        re.match(r"(?!constraint|primary key)(\w+) (double precision|\w+(?:\[\])?)", part) for part in parts
    )
    return {each[1]: each[2] for each in found if each}


def _comments(kind: str) -> dict[str, str]:
    """What the schema says of tables or columns, by their names. A comment may be several literals."""
    said = re.findall(
        rf"^comment on {kind} fairq\.([\w.]+) is\s+((?:'(?:[^']|'')*'\s*)+);", _SCHEMA, re.MULTILINE
    )
    return {name: re.sub(r"'\s+'", "", text.strip())[1:-1].replace("''", "'") for name, text in said}


def table(name: str) -> str:
    """Its columns, first those of which nothing needs to be said. Settings have pages of their own."""
    of_settings = {
        setting for declared, its in _TABLES.values() if its == name for setting in options_of(declared)
    }
    comments = _comments("column")
    told, untold = [], []
    for column, its_type in _columns(name).items():
        if name != "schedules" and column in of_settings:
            continue
        about = comments.get(f"{name}.{column}")
        if about:
            told.append(_filled(f"- `{column}` {its_type}: {about}", "  "))
        else:
            untold.append(f"`{column}` {its_type}")
    return "\n".join([*([_filled(f"- {', '.join(untold)}", "  ")] if untold else []), *told]) + "\n"


def engine(page: str) -> str:
    """Tables that have no section of their own."""
    return "".join(
        _filled(f"- `fairq.{name}`: {about}", "  ") + "\n"
        for name, about in sorted(_comments("table").items())
        if f"\n## fairq.{name}\n" not in page and not name.endswith("_default")
    )


def metrics(scope: str) -> str:
    """Those with a label of that name; of the installation, those with none."""
    lines = []
    for name, (_, labels, about) in METRICS.items():
        its = "group" if "group" in labels else "queue" if labels else "installation"
        if its == scope:
            lines.append(_filled(f"- `{name}{{{labels}}}`: {about}".replace("{}", ""), "  "))
    return "\n".join(lines) + "\n"


def worker() -> str:
    """The settings of a worker: default, bounds, and the help of the command line, or what is below it."""
    tree = ast.parse(Path(inspect.getfile(Settings)).read_text("utf-8"))
    (made,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Settings")
    below = {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(made.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
    lines = []
    for field in dataclasses.fields(Settings):
        preset = field.default
        shown = (
            []
            if preset in (None, "", ())
            else [f"`{preset:g}`" if isinstance(preset, float) else f"`{preset}`"]
        )
        text = " ".join((TOLD[field.name][1] if field.name in TOLD else below[field.name]).split())
        text = re.sub(r"--([a-z][a-z-]*[a-z])", lambda flag: f"`{flag[1].replace('-', '_')}`", text)
        if field.name in BOUNDS:
            bounds = "{} to {}".format(*BOUNDS[field.name])
            text = text.replace(f", {bounds}", "")
            shown.append(bounds)
        about = f" ({'; '.join(shown)})" if shown else ""
        lines.append(_filled(f"- `{field.name}`{about}: {text}", "  "))
    return "\n".join(lines) + "\n"


def decisions() -> str:
    """Each by its title, with a link."""
    pages = sorted((DOCS / "decisions").glob("*.md"))
    titles = {page: page.read_text("utf-8").splitlines()[0].removeprefix("# ") for page in pages}
    return "".join(
        _filled(f"- [{title}](decisions/{page.name})", "  ") + "\n" for page, title in titles.items()
    )


def written() -> dict[Path, str]:
    """Every page as it should be."""
    pages = {file: file.read_text("utf-8") for file in (*sorted(REFERENCE.rglob("*.md")), DOCS / "README.md")}
    texts = {name: about(name, command) for name, command in commands()}
    texts |= {f"settings {name}": settings(name) for name in _TABLES}
    texts |= {f"metrics {scope}": metrics(scope) for scope in ("queue", "group", "installation")}
    texts |= {"decisions": decisions(), "worker": worker()}
    tables = pages[REFERENCE / "sql" / "tables-and-views.md"]
    texts |= {f"table {name}": table(name) for name in re.findall(r"<!-- table (\w+) -->", tables)}
    texts["tables"] = engine(tables)
    places = [found[1] for page in pages.values() for found in _BLOCK.finditer(page)]
    if missing := sorted({*texts, "commands"} - {*places}):
        sys.exit(f"no page has a place for: {', '.join(missing)}")
    if wrong := sorted(
        {name for name in places if name not in (*texts, "commands") or places.count(name) > 1}
    ):
        sys.exit(f"pages have two places, or nothing to say, for: {', '.join(wrong)}")
    texts["commands"] = listing(pages)
    return {
        file: _BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{texts[found[1]]}<!-- end -->", page)
        for file, page in pages.items()
    }


def stale() -> dict[Path, str]:
    return {file: text for file, text in written().items() if file.read_text("utf-8") != text}


if __name__ == "__main__":
    found = stale()
    for file, text in found.items():
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {file.name}")
        if "--check" not in sys.argv:
            file.write_text(text, "utf-8")
    if found and "--check" in sys.argv:
        sys.exit("run: python -m tools.reference")
