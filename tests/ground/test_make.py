"""The two commands on a fresh machine: what make says, and what it says when something is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from fairq import embedded
from tests.support import plpgsql_check
from tests.support.processes import ROOT
from tests.support.schema import load_schema


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a clone as making .venv needs; without any Python on the PATH but those put into `bin`."""
    place = tmp_path / "a clone"
    shutil.copytree(ROOT / ".ci", place / ".ci")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    (place / "bin").mkdir()
    for name in ("sh", "cat", "rm", "touch", "pwd", "mkdir"):
        found = shutil.which(name)
        assert found
        (place / "bin" / name).symlink_to(found)
    return place


def fake_python(clone: Path, text: str) -> None:
    program = clone / "bin/python3"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def make_venv(clone: Path) -> "subprocess.CompletedProcess[str]":
    return run("sh", ".ci/venv", "dev", cwd=clone, PATH=str(clone / "bin"))


def test_plain_make_teaches_every_target() -> None:
    answer = run("make", "--no-print-directory")
    assert answer.returncode == 0
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^  {target} +[A-Z]", answer.stdout, re.MULTILINE), target


def test_without_a_python_the_way_to_one_is_said(clone: Path) -> None:
    answer = make_venv(clone)
    assert answer.returncode == 1
    assert "fairq needs Python 3.11 or newer" in answer.stderr
    assert "apt install python3" in answer.stderr
    assert "brew install python" in answer.stderr


def test_a_python_that_is_too_old_does_not_count(clone: Path) -> None:
    fake_python(clone, "exit 1  # what `import sys; sys.exit(sys.version_info < (3, 11))` gives there")
    answer = make_venv(clone)
    assert answer.returncode == 1
    assert "fairq needs Python 3.11 or newer" in answer.stderr


def test_a_python_without_venv_leaves_nothing_half_made(clone: Path) -> None:
    """Debian's python3 without python3-venv makes the folder and then fails for want of ensurepip."""
    fake_python(clone, 'case "$*" in *venv*) mkdir .venv/half; exit 1;; esac\necho "Python 3.11.2"')
    answer = make_venv(clone)
    assert answer.returncode == 1
    assert "apt install python3-venv" in answer.stderr
    assert not (clone / ".venv").exists()


def test_an_environment_that_came_from_elsewhere_is_made_anew(clone: Path) -> None:
    """Its programs name the place where they were made. Here making it anew fails, for want of Python."""
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(sys.executable)
    (clone / ".venv/.place").write_text("/somewhere/else\n")
    answer = make_venv(clone)
    assert "belongs to another place" in answer.stderr
    assert not (clone / ".venv").exists()


def test_an_environment_that_others_made_is_never_removed(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv/precious").touch()
    answer = make_venv(clone)
    assert answer.returncode == 1
    assert "Remove it" in answer.stderr
    assert (clone / ".venv/precious").exists()


def test_no_file_names_the_address_of_a_package_registry() -> None:
    """Where packages come from is the business of the user's package client."""
    names = ["pypi" + r"\.org", "python" + "hosted", "registry" + r"\.npmjs", "registry" + r"\.yarnpkg"]
    found = run("git", "grep", "-lEI", "|".join(names))
    assert found.returncode in (0, 1), found.stderr
    assert found.stdout == ""


def test_plpgsql_check_finds_a_planted_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    bin_dir = plpgsql_check.find_server()
    if bin_dir is None:
        pytest.skip("no PostgreSQL with plpgsql_check on this machine")
    monkeypatch.setenv("FAIRQ_PG_BIN", str(bin_dir))
    with embedded.start() as server, psycopg.connect(server.dsn()) as conn:
        load_schema(conn)
        conn.execute("set check_function_bodies = off")
        conn.execute(
            "create function fairq.planted() returns int language plpgsql as "
            "$$ begin return (select no_such_column from pg_catalog.pg_class); end $$"
        )
        findings = plpgsql_check.check(conn)
    assert [line for line in findings if line.startswith("fairq.planted()") and "no_such_column" in line]
