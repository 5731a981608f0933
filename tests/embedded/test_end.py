"""However the starting program ends, its server ends too, and no temporary files are left."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fairq import embedded
from tests.embedded.conftest import Ask
from tests.support.processes import is_alive, program, read_json, run_dirs_of
from tests.support.sessions import wait_until

# Starts a server, says where it is, and waits for its end. argv: data folder or "", how to end.
STARTER = """
import json, os, sys, time
from fairq import embedded

home, ending = sys.argv[1:]
server = embedded.start(home or None)
if ending == "forked child":
    child = os.fork()
    if child == 0:
        time.sleep(3600)
else:
    child = 0
pids = {"server": server.pid, "keeper": server._keeper.pid, "child": child}
about = json.dumps({**pids, "run": str(server.run_dir)})
try:
    print(about, flush=True)
    if ending == "ends":
        sys.exit(0)
    if ending == "raises":
        raise RuntimeError("nobody handles this")
    if ending == "os._exit":
        os._exit(1)
    time.sleep(3600)
except KeyboardInterrupt:
    print(json.dumps(server.is_running()), flush=True)
    server.close()
"""


def _wait_until_gone(about: dict[str, object]) -> None:
    for name in ("server", "keeper"):
        pid = about[name]
        assert isinstance(pid, int)
        wait_until(lambda pid=pid: not is_alive(pid), f"the {name} process is gone")  # type: ignore[misc]
    wait_until(lambda: not Path(str(about["run"])).exists(), "the run folder is gone")


@pytest.mark.parametrize("ending", ["ends", "raises", "os._exit"])
def test_a_program_that_ends_without_closing_leaves_nothing(ending: str) -> None:
    with program(STARTER, "", ending) as process:
        about = read_json(process)
        process.wait()
        _wait_until_gone(about)


@pytest.mark.parametrize("kept", [False, True], ids=["throw-away", "kept"])
def test_a_killed_program_takes_its_server_along(kept: bool, home: Path, ask: Ask) -> None:
    with program(STARTER, str(home) if kept else "", "sleeps") as process:
        about = read_json(process)
        process.kill()
        _wait_until_gone(about)
    if kept:
        with embedded.start(home) as server:
            assert ask(server, "select 1") == 1


def test_a_forked_child_that_lives_on_does_not_keep_the_server_alive() -> None:
    with program(STARTER, "", "forked child") as process:
        about = read_json(process)
        process.kill()
        try:
            _wait_until_gone(about)
            assert is_alive(about["child"])
        finally:
            os.kill(about["child"], signal.SIGKILL)


def test_a_forked_child_cannot_close_its_parents_server(ask: Ask) -> None:
    with embedded.start() as server:
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert ask(server, "select 1") == 1


def test_a_program_killed_during_initdb_leaves_nothing(open_folder: Path) -> None:
    slow, marker = open_folder / "bin", open_folder / "started"
    slow.mkdir()
    (slow / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 18.0'\n")
    (slow / "initdb").write_text(f'#!/bin/sh\ntouch "{marker}"; sleep 0.5\n')
    for script in slow.iterdir():
        script.chmod(0o755)
    with program(STARTER, "", "sleeps", env={"FAIRQ_PG_BIN": str(slow)}) as process:
        wait_until(marker.exists, "initdb runs")
        assert len(run_dirs_of(process.pid)) == 1
        process.kill()
        wait_until(lambda: not run_dirs_of(process.pid), "the run folder is gone")


def test_control_c_reaches_the_program_and_not_the_server(ask: Ask) -> None:
    """The terminal signals the whole process group, but the server must live until its program has ended."""
    with program(STARTER, "", "tidies up") as process:
        about = read_json(process)
        os.killpg(process.pid, signal.SIGINT)
        assert read_json(process) is True
        assert process.wait() == 0
        assert not is_alive(about["server"])
        assert not Path(about["run"]).exists()


def test_a_keeper_that_is_told_to_end_stops_the_server_first() -> None:
    with program(STARTER, "", "sleeps") as process:
        about = read_json(process)
        os.kill(about["keeper"], signal.SIGTERM)
        _wait_until_gone(about)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_keeper_rests_while_its_server_is_stopped(ask: Ask) -> None:
    """A suspended program wakes it once, and must not keep it awake."""
    with embedded.start() as server:
        assert server._keeper is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            before = cpu_seconds(server._keeper.pid)
            time.sleep(1)
            assert cpu_seconds(server._keeper.pid) - before < 0.3
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert ask(server, "select 1") == 1


def cpu_seconds(pid: int) -> float:
    """User and system time; Linux counts them in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_server_that_lost_its_keeper_is_still_stopped_by_its_program(ask: Ask) -> None:
    server = embedded.start()
    keeper, postmaster, run_dir = server._keeper, server.pid, server.run_dir
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    assert ask(server, "select 1") == 1
    server.restart()
    assert not is_alive(postmaster)
    assert ask(server, "select 1") == 1
    server.close()
    assert not run_dir.exists()


def test_leftovers_of_a_program_and_its_keeper_are_swept_by_the_next_start() -> None:
    with program(STARTER, "", "sleeps") as process:
        about = read_json(process)
        run_dir = Path(about["run"])
        try:
            os.kill(about["keeper"], signal.SIGKILL)
            os.utime(run_dir, (0, 0))
            with embedded.start():
                assert run_dir.exists(), "its owner lives"
            process.kill()
            process.wait()
            os.utime(run_dir)
            with embedded.start():
                assert run_dir.exists(), "young folders are left alone: their owner may be about to lock them"
            os.utime(run_dir, (0, 0))
            with embedded.start():
                assert not run_dir.exists()
        finally:
            os.kill(about["server"], signal.SIGQUIT)
        wait_until(lambda: not is_alive(about["server"]), "the orphaned server is gone")


def test_the_sweep_leaves_running_servers_and_foreign_folders_alone(tmp_path: Path, ask: Ask) -> None:
    with embedded.start() as server:
        os.utime(server.run_dir, (0, 0))
        link = server.run_dir.parent / f"{embedded.RUN_PREFIX}link-{os.getpid()}"
        (tmp_path / "precious").write_text("x")
        link.symlink_to(tmp_path)
        try:
            with embedded.start():
                pass
        finally:
            link.unlink()
        assert ask(server, "select 1") == 1
        assert (tmp_path / "precious").exists()
