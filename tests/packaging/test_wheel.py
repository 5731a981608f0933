"""The sdist, and the wheel that is built of it: made offline, installed into empty environments, and able to
migrate from there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fairq import install
from tests.support.catalog import catalog, differences
from tests.support.database import Database

ROOT = Path(__file__).resolve().parents[2]

# Left out when the sources are copied to the build: caches, and what the sdist has no place for.
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "node_modules", "*.egg-info")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel that, through a .pth file, sees the libraries it depends on."""

    python: Path
    folder: Path

    def run(
        self, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FAIRQ", "DATABASE_URL"))}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd or self.folder,
            env={**clean, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def fairq(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run(str(self.python.parent / "fairq"), *arguments)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From a copy, which leaves the checkout alone; without isolation, which would download. The wheel is
    built of the sdist.
    """
    source = tmp_path_factory.mktemp("source") / "fairq"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)],
        check=True,
        capture_output=True,
    )
    return target


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_into(tmp_path_factory.mktemp("environment"), wheel)


def install_into(folder: Path, package: Path) -> Installed:
    """An empty virtual environment with the wheel or the sdist in it. The checkout is not on its path."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # A plain line of a .pth file puts a folder on the path without running the .pth files in it: those of
    # editable installs would lead to the checkout.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *offline, str(package)],
        check=True,
        capture_output=True,
    )
    return Installed(python, folder)


def test_the_wheel_holds_every_sql_file_byte_by_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in ("sql", "migrations"):
            for file in (ROOT / name).rglob("*"):
                if file.is_file():
                    inside = f"fairq/_packaged/{name}/{file.relative_to(ROOT / name)}"
                    assert inside in names
                    assert archive.read(inside) == file.read_bytes()


def test_the_wheel_holds_nothing_of_the_workshop(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fairq"}
    assert not [name for name in names if name.endswith((".pyc", ".orig", "~")) or "__pycache__" in name]
    assert {"fairq/py.typed", "fairq/web/templates/shares.html", "fairq/web/static/app.css"} <= set(names)


def test_the_wheel_needs_psycopg_and_cronsim_and_nothing_else(installed: Installed) -> None:
    code = "from importlib.metadata import requires; print('\\n'.join(requires('fairq')))"
    required = installed.run("-c", code).stdout.splitlines()
    assert [line.split(">")[0] for line in required if "extra" not in line] == ["cronsim", "psycopg"]


@pytest.fixture
def lean(wheel: Path, tmp_path: Path) -> Callable[..., Installed]:
    """An environment with the wheel and only the libraries that a test names."""

    def make(*libraries: str) -> Installed:
        venv.create(tmp_path, with_pip=False, symlinks=True)
        (site,) = tmp_path.glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        for name in libraries:
            for found in Path(sysconfig.get_path("purelib")).glob(f"{name}*"):
                if re.fullmatch(rf"{name}(\.py|\.libs|-[\d.]+\.dist-info)?", found.name):
                    (site / found.name).symlink_to(found)
        return Installed(tmp_path / "bin" / "python", tmp_path)

    return make


PSYCOPG = ("psycopg", "typing_extensions")
BINARY = (*PSYCOPG, "psycopg_binary")


def test_enqueueing_needs_only_psycopg(lean: Callable[..., Installed], database: Database) -> None:
    code = """
import sys, fairq, psycopg
with psycopg.connect(sys.argv[1]) as conn:
    print(fairq.enqueue(conn, "bob", {"n": 1}))
print({"click", "rich", "sqlalchemy", "alembic"} & set(sys.modules))
"""
    done = lean(*BINARY).run("-c", code, database.dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["1", "set()"]


def test_migrating_by_a_call_needs_nothing_but_psycopg(
    lean: Callable[..., Installed], empty_database: Database
) -> None:
    code = "import sys\nfrom fairq import install\nprint(install.migrate(sys.argv[1]).after)"
    done = lean(*BINARY).run("-c", code, empty_database.dsn)
    assert (done.stdout.strip(), done.stderr) == (install.head(), "")


def test_without_the_extra_the_command_line_says_what_to_install(lean: Callable[..., Installed]) -> None:
    done = lean(*BINARY).run("-m", "fairq", "stats")
    assert done.returncode == 1
    assert done.stderr == ("fairq: the command line is not installed\n  pip install 'fairq[cli]'\n")


@pytest.mark.parametrize(
    ("libraries", "command", "said"),
    [
        ((*BINARY, "click"), "stats", "'fairq stats' needs rich, which is not installed\n  {cli}"),
        ((*BINARY, "click"), "gen", "'fairq gen' needs yaml, which is not installed\n  {codegen}"),
    ],
)
def test_a_command_says_which_extra_brings_what_it_lacks(
    lean: Callable[..., Installed], libraries: tuple[str, ...], command: str, said: str
) -> None:
    done = lean(*libraries).run("-m", "fairq", command)
    assert done.returncode == 2
    extras = {name: f"pip install 'fairq[{name}]'" for name in ("cli", "codegen")}
    assert done.stderr == f"fairq: {said.format(**extras)}\n"


def test_without_any_libpq_the_extra_is_named(lean: Callable[..., Installed]) -> None:
    installed = lean(*PSYCOPG, "click", "rich", "pygments", "markdown_it", "mdurl")
    # psycopg looks for the system's libpq with ctypes.
    nowhere = "import ctypes.util; ctypes.util.find_library = lambda name: None\n"
    done = installed.run("-c", f"{nowhere}import fairq\nfairq.enqueue")
    assert "ImportError: psycopg finds no libpq here: pip install 'fairq[binary]'" in done.stderr
    main = "import sys; sys.argv[1:] = ['stats']\nfrom fairq.__main__ import main; main()"
    done = installed.run("-c", nowhere + main)
    assert done.returncode == 2
    assert done.stderr == (
        "fairq: 'fairq stats' needs psycopg's libpq, which is not installed\n  pip install 'fairq[binary]'\n"
    )


def test_an_installed_fairq_uses_its_own_files(installed: Installed) -> None:
    code = "from fairq import install as i; print(i.__file__, i.sql_dir(), i.migrations_dir(), sep='\\n')"
    done = installed.run("-c", code)
    assert done.returncode == 0, done.stderr
    for path in done.stdout.splitlines():
        assert Path(path).is_relative_to(installed.folder), path


def test_an_installed_fairq_migrates_a_database(installed: Installed, empty_database: Database) -> None:
    conn = empty_database.connect(autocommit=True)
    done = installed.fairq("migrate", "--json", "--dsn", empty_database.dsn)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after"] == install.head()
    by_wheel = catalog(conn)
    assert installed.fairq("migrate", "--check", "--dsn", empty_database.dsn).returncode == 0
    assert installed.fairq("migrate", "--to", "base", "--dsn", empty_database.dsn).returncode == 0
    install.migrate(empty_database.dsn)
    assert differences(by_wheel, catalog(conn), "wheel", "checkout") == []


def test_an_installed_fairq_prints_the_same_sql(installed: Installed) -> None:
    assert installed.fairq("sql").stdout == install.script()


def test_an_installed_fairq_can_be_part_of_a_tree(
    installed: Installed, empty_database: Database, tmp_path: Path
) -> None:
    """The revision in docs/how-to/embed-in-your-alembic.md, with Alembic's own command line."""
    page = (ROOT / "docs/how-to/embed-in-your-alembic.md").read_text("utf-8")
    revision = next(
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "install.upgrade" in text
    )
    versions = tmp_path / "app" / "versions"
    versions.mkdir(parents=True)
    (versions / "4f1c_fairq.py").write_text(
        revision.replace('down_revision = "3a90"', "down_revision = None")
    )
    (tmp_path / "app" / "env.py").write_text(
        "import os, psycopg\n"
        "from alembic import context\n"
        "from sqlalchemy import create_engine\n"
        "connect = lambda: psycopg.connect(os.environ['APP_DSN'])\n"
        "engine = create_engine('postgresql+psycopg://', creator=connect)\n"
        "with engine.connect() as connection:\n"
        "    context.configure(connection=connection)\n"
        "    with context.begin_transaction():\n"
        "        context.run_migrations()\n"
    )
    (tmp_path / "alembic.ini").write_text("[alembic]\nscript_location = %(here)s/app\n")
    done = installed.run("-m", "alembic", "upgrade", "head", cwd=tmp_path, APP_DSN=empty_database.dsn)
    assert done.returncode == 0, done.stderr
    assert install.check_version(empty_database.connect()) == install.head()


def test_help_of_an_installed_fairq_works_with_nothing_but_its_requirements(installed: Installed) -> None:
    done = installed.fairq()
    assert (done.returncode, done.stderr) == (0, "")
    assert "migrate" in done.stdout


def test_the_sdist_installs_and_has_its_tests(built: Path, tmp_path: Path, empty_database: Database) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"PKG-INFO", "pyproject.toml", "sql/grants.sql", "tests/conftest.py", "docs/README.md"} <= names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith((".venv", ".cache"))]
    installed = install_into(tmp_path, sdist)
    done = installed.fairq("migrate", "--json", "--dsn", empty_database.dsn)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after"] == install.head()
    assert installed.fairq("sql").stdout == install.script()
