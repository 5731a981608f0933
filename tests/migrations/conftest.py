"""Fixtures for migrations: a longer history than fairq has today, and processes that migrate."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from fairq import install
from tools import freeze

# What drivers and libraries like to read in a text, and must not: binds, placeholders, formats, backslashes.
TRICKY = r"""a :bind, a %s, a %(name)s, 100 %, a {brace}, a \backslash, $1, a 'quote', a ; and ümläut"""

# stem -> what is in `sql/` after the change, what the delta must do beside that, and the way back.
EXTRA = {
    "0002_added_notes": (
        "alter table fairq.groups add column notes text;\n"
        f"comment on column fairq.groups.notes is $${TRICKY}$$;\n",
        "",
        "alter table fairq.groups drop column notes;\n",
    ),
    "0003_added_probe": (
        f"create function fairq.probe() returns text language sql as $body$ select $${TRICKY}$$ $body$;\n",
        "--! breaking-change: workers must know the probe\n"
        "revoke all on function fairq.probe from public;\n"
        "grant execute on function fairq.probe to fairq_admin;\n",
        "drop function fairq.probe;\n",
    ),
}

# The command line over another folder of migrations. A real process, as in a deployment.
COMMAND = """
import sys
from pathlib import Path
from fairq import install
folder = Path(sys.argv.pop(1))
install.migrations_dir = lambda: folder / "migrations"
install.sql_dir = lambda: folder / "sql"
from fairq.cli import main
main(prog_name="fairq")
"""

# Many of them at once: the libraries are loaded once, then it forks.
CROWD = """
import os
import sys
from pathlib import Path
import fairq.commands.migrate
from fairq import install
from fairq.cli import main
folder = Path(sys.argv[1])
install.migrations_dir = lambda: folder / "migrations"
install.sql_dir = lambda: folder / "sql"
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
    """fairq some releases later: a frozen initial revision, two deltas, and the `sql/` after them."""

    folder: Path
    ids: tuple[str, ...] = ("fairq_0001", "fairq_0002", "fairq_0003")

    @property
    def initial(self) -> str:
        return self.ids[0]

    @property
    def head(self) -> str:
        return self.ids[-1]

    def file(self, pattern: str) -> Path:
        (found,) = (self.folder / "migrations").glob(pattern)
        return found

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


@pytest.fixture
def unreleased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `sql/` without migrations, as before the first release, used by this process."""
    shutil.copytree(install.sql_dir(), tmp_path / "sql")
    (tmp_path / "migrations").mkdir()
    monkeypatch.setattr(install, "sql_dir", lambda: tmp_path / "sql")
    monkeypatch.setattr(install, "migrations_dir", lambda: tmp_path / "migrations")
    return tmp_path


@pytest.fixture
def released(unreleased: Path) -> Path:
    """The same after a release."""
    done = CliRunner().invoke(freeze.main, ["release"])
    assert done.exit_code == 0, done.output
    return unreleased


@pytest.fixture
def history(released: Path) -> History:
    """The longer history, used by this process."""
    for stem, (change, rest, down) in EXTRA.items():
        (released / "migrations" / f"{stem}.up.sql").write_text(change + rest, "utf-8")
        (released / "migrations" / f"{stem}.down.sql").write_text(down, "utf-8")
        (released / "sql" / "schema" / f"9{stem}.sql").write_text(change, "utf-8")
    return History(released)


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
