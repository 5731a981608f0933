"""Make and guard the frozen SQL of migrations. For maintainers of fairq; not part of the package.

    python -m tools.freeze initial            write 0001_initial from sql/, until it is released (make freeze)
    python -m tools.freeze initial --check    exit 1 when it is stale
    python -m tools.freeze new NAME [FILE…]   the next revision, with these files of sql/ in its .up.sql
    python -m tools.freeze release            from now on, the revisions that exist never change

Why: docs/decisions/0010-frozen-migrations.md.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import click

from fairq import install

ROOT = Path(__file__).resolve().parent.parent
MIGRATIONS = ROOT / "migrations"
VERSIONS = MIGRATIONS / "versions"
RELEASED = MIGRATIONS / "released.sha256"
INITIAL = "0001_initial"

# Rows that are the user's, not the engine's own bookkeeping: a downgrade must not throw them away.
USER_DATA = {
    "fairq.tasks": "",
    "fairq.finished_tasks": "",
    "fairq.groups": "",
    "fairq.queues": " where queue <> 'default' and not internal",
}

UP_HEAD = """\
-- {stem}: the whole engine, as it was when fairq was first released.
--
-- Why:       the first revision; there is nothing before it.
-- Locks:     none that anybody could wait for; every object is new.
-- Rewrites:  nothing.
-- Beforehand: schema fairq may be created by an administrator; the role that migrates must be its owner.
--
-- Frozen from sql/ by tools/freeze.py. DO NOT EDIT: change sql/, then freeze.

-- Function bodies refer to functions that come later in this file.
set local check_function_bodies = off;
"""

DOWN_HEAD = """\
-- {stem}, the way back: nothing of fairq stays but the roles, which belong to the whole server.
--
-- Why:       to take fairq out of a database again.
-- Locks:     access exclusive on every table of fairq. Stop the workers first.
-- Loses:     nothing that you gave it: refused while there are tasks, history, groups or
--            queues with settings of their own.
--
-- Frozen from sql/ by tools/freeze.py. DO NOT EDIT: change sql/, then freeze.

"""

GUARD = """\
-- What is being enqueued at this moment counts as well: wait for it, then look.
lock table {tables} in access exclusive mode;
do $$
begin
  if {any_row} then
    raise exception 'fairq still holds tasks, history or settings of yours, and this step would lose them'
      using errcode = '{code}',
            hint = 'Let them end and save the history, or throw all away: drop schema fairq cascade.';
  end if;
end
$$;

"""

_CREATE = re.compile(
    r"^create\s+(?:or\s+replace\s+)?(?:unlogged\s+)?"
    r"(materialized view|unique index|\w+)"
    r"(?:\s+if\s+not\s+exists)?\s+([\w.]+)",
    re.MULTILINE | re.IGNORECASE,
)
_GOES_ALONG = {"index", "unique index", "statistics", "trigger", "schema", "role"}
_DROPPED = {"materialized view", "table", "view", "function", "procedure", "sequence", "type", "domain"}
_BODY = re.compile(r"(\$\w*\$).*?\1", re.DOTALL)
_CREATE_SCHEMA = re.compile(r"^create schema (?:if not exists )?fairq\s*;\n", re.MULTILINE | re.IGNORECASE)


def created(text: str) -> list[tuple[str, str]]:
    """Kind and name of every object that the SQL creates and that a downgrade must drop, in order."""
    found = []
    for kind, name in _CREATE.findall(_BODY.sub("", text)):
        kind = kind.lower()
        if kind in _DROPPED and (kind, name) not in found:
            found.append((kind, name))
        elif kind not in _DROPPED | _GOES_ALONG:
            raise click.ClickException(f"freeze does not know how to take 'create {kind} {name}' back")
    return found


def up_text(root: Path = ROOT / "sql") -> str:
    parts = [UP_HEAD.format(stem=INITIAL)]
    for file in install.sql_files(root):
        # The runner has made the schema: 'create schema if not exists' would ask for a right that it may
        # not have.
        text = _CREATE_SCHEMA.sub("", file.read_text("utf-8"))
        parts.append(f"\n-- sql/{file.relative_to(root)}\n\n{text.rstrip()}\n")
    return "".join(parts) + "\nset local check_function_bodies = on;\n"


def down_text(up: str) -> str:
    objects = created(up)
    names = {name for _, name in objects}
    tables = [table for table in USER_DATA if table in names]
    any_row = "\n    or ".join(f"exists (select from {table}{USER_DATA[table]})" for table in tables)
    parts = {"tables": ", ".join(tables), "any_row": any_row, "code": install.WouldLoseData.sqlstate}
    guard = GUARD.format(**parts) if tables else ""
    # Latest first, so that nothing has to cascade: what other people have built on fairq makes this fail,
    # not vanish.
    drops = [f"drop {kind} {name};\n" for kind, name in reversed(objects)]
    return DOWN_HEAD.format(stem=INITIAL) + guard + "".join(drops)


def py_text(stem: str, before: str | None) -> str:
    number, name = stem.split("_", 1)
    labels = '("fairq",)' if before is None else "None"
    template = (MIGRATIONS / "script.py.mako").read_text("utf-8")
    values = {
        "${message}": name.replace("_", " "),
        "${repr(up_revision)}": f'"fairq_{number}"',
        "${repr(down_revision)}": "None" if before is None else f'"{before}"',
        "${repr(branch_labels)}": labels,
        "${repr(depends_on)}": "None",
    }
    for key, value in values.items():
        template = template.replace(key, value)
    return template


def initial_files() -> dict[Path, str]:
    up = up_text()
    return {
        VERSIONS / f"{INITIAL}.py": py_text(INITIAL, None),
        VERSIONS / f"{INITIAL}.up.sql": up,
        VERSIONS / f"{INITIAL}.down.sql": down_text(up),
    }


def released() -> dict[str, str]:
    """File name -> SHA-256 of everything that has been released (the format of sha256sum)."""
    if not RELEASED.exists():
        return {}
    pairs = (line.split("  ", 1) for line in RELEASED.read_text("utf-8").splitlines() if line)
    return {name: digest for digest, name in pairs}


def digests() -> dict[str, str]:
    files = sorted(file for file in VERSIONS.iterdir() if file.suffix in {".py", ".sql"})
    return {f"versions/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@click.group(help=__doc__)
def main() -> None: ...


@main.command(help="Write 0001_initial from sql/, until it is released.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the files are stale.")
def initial(check: bool) -> None:
    if f"versions/{INITIAL}.up.sql" in released():
        raise click.ClickException(
            f"{INITIAL} is released and never changes; use: python -m tools.freeze new NAME"
        )
    VERSIONS.mkdir(exist_ok=True)
    stale = [
        file for file, text in initial_files().items() if not file.exists() or file.read_text("utf-8") != text
    ]
    for file in stale:
        click.echo(f"{'stale' if check else 'written'}: {file.relative_to(ROOT)}")
        if not check:
            file.write_text(initial_files()[file], "utf-8")
    if check and stale:
        click.echo("run: make freeze", err=True)
        sys.exit(1)


@main.command(help="Start the next revision. FILES of sql/ are copied into its .up.sql.")
@click.argument("name")
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def new(name: str, files: tuple[Path, ...]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise click.ClickException("a name is made of small letters, digits and _")
    before = install.head()
    stem = f"{int(before.removeprefix('fairq_')) + 1 if before else 1:04d}_{name}"
    copies = "".join(f"\n-- {file}\n\n{file.read_text('utf-8').rstrip()}\n" for file in files)
    head = "-- {}: …\n--\n-- Why:       …\n-- Locks:     …\n-- Rewrites:  …\n-- Beforehand: …\n"
    for suffix, text in (
        ("py", py_text(stem, before)),
        ("up.sql", head.format(stem) + copies),
        ("down.sql", head.format(stem)),
    ):
        (VERSIONS / f"{stem}.{suffix}").write_text(text, "utf-8")
        click.echo(f"written: migrations/versions/{stem}.{suffix}")


@main.command(help="Seal every revision that exists; part of making a release.")
def release() -> None:
    now = digests()
    for name, digest in released().items():
        if now.get(name) != digest:
            raise click.ClickException(f"{name} is released, and was changed or removed")
    RELEASED.write_text("".join(f"{digest}  {name}\n" for name, digest in now.items()), "utf-8")
    click.echo(f"sealed: {len(now)} files")


if __name__ == "__main__":
    main()
