"""Start deltas, and freeze a release. For maintainers, not part of the package; see migrations/README.md.

python -m tools.freeze new NAME [FILE…]   start the next delta, with copies of these files of sql/
python -m tools.freeze release            freeze all existing revisions
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import click

from fairq import install

HEAD = """\
-- {stem}: {what}
--
-- Why:        …
-- Locks:      …
-- Rewrites:   …
-- Beforehand: …
"""


def seal() -> Path:
    return install.migrations_dir() / "released.sha256"


def released() -> dict[str, str]:
    """File names and SHA-256 of everything that was released, in the format of sha256sum."""
    lines = seal().read_text("utf-8").splitlines() if seal().exists() else []
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def digests() -> dict[str, str]:
    files = sorted(install.migrations_dir().glob("*.sql"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@click.group(help=__doc__)
def main() -> None: ...


@main.command(help="Start the next delta, with copies of these FILES of sql/ in its .up.sql.")
@click.argument("name")
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def new(name: str, files: tuple[Path, ...]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise click.ClickException("a name consists of lower-case letters, digits and _")
    if not released():
        raise click.ClickException("nothing is released yet: only change sql/")
    stem = f"{int(install.head().removeprefix('fairq_')) + 1:04d}_{name}"
    copies = "".join(f"\n-- {file.name}\n\n{file.read_text('utf-8').rstrip()}\n" for file in files)
    head = HEAD.format(stem=stem, what="…")
    for suffix, text in (("up.sql", head + copies), ("down.sql", head)):
        file = install.migrations_dir() / f"{stem}.{suffix}"
        file.write_text(text, "utf-8")
        click.echo(f"written: {file.name}")


@main.command(help="Freeze the initial revision if necessary, and seal all; part of making a release.")
def release() -> None:
    now = digests()
    for name, digest in released().items():
        if now.get(name) != digest:
            raise click.ClickException(f"{name} is released, but was changed or removed")
    initial = install.revisions()[0]
    file = initial.folder / f"{initial.stem}.up.sql"
    if not file.exists():
        head = HEAD.format(
            stem=initial.stem, what="the whole engine, as it was when fairq was first released."
        )
        parts = (f"\n-- {name}\n\n{text.rstrip()}\n" for name, text in initial.parts("up"))
        file.write_text("".join((head, *parts)), "utf-8")
        click.echo(f"written: {file.name}")
    seal().write_text("".join(f"{digest}  {name}\n" for name, digest in digests().items()), "utf-8")
    click.echo(f"sealed: {len(digests())} files")


if __name__ == "__main__":
    main()
