"""Fixtures for migrations: a history longer than the one that fairq has today, and processes that migrate."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairq import install

REVISION = """
from fairq import install

revision = "{id}"
down_revision = "{before}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    install.run_revision(__file__, "up")


def downgrade() -> None:
    install.run_revision(__file__, "down")
"""

# What drivers and libraries like to read in a text, and must not: binds, placeholders, formats, backslashes.
TRICKY = r"""a :bind, a %s, a %(name)s, 100 %, a {brace}, a \backslash, $1, a 'quote', a ; and ümläut"""

# stem -> up, down
EXTRA = {
    "added_notes": (
        "alter table fairq.groups add column notes text;\n"
        f"comment on column fairq.groups.notes is $${TRICKY}$$;\n",
        "alter table fairq.groups drop column notes;\n",
    ),
    "added_probe": (
        "--! breaking-change: workers must know the probe\n"
        f"create function fairq.probe() returns text language sql as $body$ select $${TRICKY}$$ $body$;\n",
        "drop function fairq.probe;\n",
    ),
}

# The command line over another folder of migrations. A real process, as in a deployment.
COMMAND = """
import sys
from pathlib import Path
from fairq import install
folder = Path(sys.argv.pop(1))
install.migrations_dir = lambda: folder
from fairq.cli import main
main(prog_name="fairq")
"""

# Many of them at once: the libraries are loaded once, then it forks.
CROWD = """
import os
import sys
from pathlib import Path
from fairq import _migration, install
from fairq.cli import main
install.migrations_dir = lambda: Path(sys.argv[1])
children = []
for _ in range(int(sys.argv[2])):
    if child := os.fork():
        children.append(child)
    else:
        main(["migrate", "--json", "--lock-timeout", "120", "--dsn", sys.argv[3]], prog_name="fairq")
for child in children:
    os.waitpid(child, 0)
"""


@dataclass(frozen=True)
class History:
    """A copy of the migrations with two more revisions."""

    folder: Path
    ids: tuple[str, ...]

    @property
    def initial(self) -> str:
        return self.ids[0]

    @property
    def head(self) -> str:
        return self.ids[-1]

    def command(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """Start `fairq …` with this history."""
        return _start("-c", COMMAND, str(self.folder), *arguments, **environment)

    def crowd(self, number: int, dsn: str) -> "subprocess.Popen[str]":
        """Start many processes of `fairq migrate --json` at once."""
        return _start("-c", CROWD, str(self.folder), str(number), dsn)


def _start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def lengthen(folder: Path) -> tuple[str, ...]:
    """Append the extra revisions to a copy of the migrations; returns the ids of all."""
    before = install.revisions(folder / "versions")[-1].id
    install.revisions.cache_clear()
    for name, (up, down) in EXTRA.items():
        number = int(before.removeprefix("fairq_")) + 1
        stem, new = f"{number:04d}_{name}", f"fairq_{number:04d}"
        versions = folder / "versions"
        (versions / f"{stem}.py").write_text(REVISION.format(id=new, before=before))
        (versions / f"{stem}.up.sql").write_text(up, "utf-8")
        (versions / f"{stem}.down.sql").write_text(down, "utf-8")
        before = new
    ids = tuple(revision.id for revision in install.revisions(folder / "versions"))
    install.revisions.cache_clear()
    return ids


@pytest.fixture
def history(tmp_path: Path, use_migrations: Callable[[Path], None]) -> History:
    """The longer history, in force in this process."""
    folder = tmp_path / "migrations"
    shutil.copytree(install.migrations_dir(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    ids = lengthen(folder)
    use_migrations(folder)
    return History(folder, ids)


@pytest.fixture
def use_migrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Let fairq.install take its migrations from another folder, until the end of the test."""

    def use(folder: Path) -> None:
        monkeypatch.setattr(install, "migrations_dir", lambda: folder)
        install.revisions.cache_clear()

    yield use
    install.revisions.cache_clear()


# Only what happens in this database: other tests run on the same server.
WAITERS = """
select l.pid from pg_locks as l
 where not l.granted and l.database = (select oid from pg_database where datname = current_database())
   and case when %(relation)s::text is null then l.locktype = 'advisory'
            else l.relation = to_regclass(%(relation)s::text) end
"""


def waiters(observer: psycopg.Connection[Any], relation: str | None = None) -> set[int]:
    """The sessions that wait for a table, or for the lock that migrations take."""
    return {pid for (pid,) in observer.execute(WAITERS, {"relation": relation})}
