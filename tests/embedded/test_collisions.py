"""Folders that are in use or not allowed: errors are clear, and nothing of others is touched."""

import os
import signal
from pathlib import Path

import pytest

from fairq import embedded
from tests.embedded.conftest import Ask
from tests.support.processes import is_alive, program, read_json
from tests.support.sessions import wait_until


def test_servers_side_by_side_share_no_socket(ask: Ask) -> None:
    with embedded.start() as one, embedded.start() as two:
        assert one.dsn() != two.dsn()
        ask(one, "create table mine ()")
        assert ask(two, "select to_regclass('mine')") is None


def test_a_second_server_on_the_same_folder_is_refused_and_the_first_goes_on(home: Path, ask: Ask) -> None:
    with embedded.start(home) as first:
        with pytest.raises(embedded.EmbeddedError, match=rf"already uses .*process {first.pid}"):
            embedded.start(home)
        assert ask(first, "select 1") == 1
    with embedded.start(home) as again:
        assert ask(again, "select 1") == 1


ORPHAN = """
import json, sys, time
from fairq import embedded
server = embedded.start(sys.argv[1])
print(json.dumps({"server": server.pid, "keeper": server._keeper.pid}), flush=True)
time.sleep(3600)
"""


def test_a_server_that_lost_its_program_and_its_keeper_still_guards_its_folder(home: Path) -> None:
    with program(ORPHAN, str(home)) as process:
        about = read_json(process)
        try:
            os.kill(about["keeper"], signal.SIGKILL)
            process.kill()
            process.wait()
            with pytest.raises(embedded.EmbeddedError, match=rf"already uses .*process {about['server']}"):
                embedded.start(home)
        finally:
            os.kill(about["server"], signal.SIGINT)
        wait_until(lambda: not is_alive(about["server"]), "the orphaned server is gone")
    embedded.start(home).close()


def test_a_pid_file_that_survived_a_power_cut_does_not_matter(home: Path, ask: Ask) -> None:
    """By now its process id belongs to another process, here to this one."""
    embedded.start(home).close()
    (home / "pgdata/postmaster.pid").write_text(
        f"{os.getpid()}\n/somewhere\n0\n5432\n/nowhere\n\n  1 2\nready\n"
    )
    with embedded.start(home) as server:
        assert ask(server, "select 1") == 1


def test_an_initdb_that_was_interrupted_is_done_again(home: Path, ask: Ask) -> None:
    (home / "pgdata.new/base").mkdir(parents=True)
    (home / "lock").touch()
    with embedded.start(home) as server:
        assert ask(server, "select 1") == 1


def test_a_folder_with_other_things_in_it_is_refused_and_untouched(home: Path) -> None:
    home.mkdir(mode=0o755)
    (home / "thesis.txt").write_text("precious")
    before = home.stat()
    with pytest.raises(embedded.EmbeddedError, match="not empty"):
        embedded.start(home)
    assert os.listdir(home) == ["thesis.txt"]
    assert home.stat().st_mode == before.st_mode


def test_a_path_below_a_file_is_a_clear_error(home: Path) -> None:
    home.write_text("I am a file")
    with pytest.raises(embedded.EmbeddedError, match=r"Cannot keep .* Choose a folder that you may write"):
        embedded.start(home / "data")
    with pytest.raises(embedded.EmbeddedError, match="Cannot keep"):
        embedded.start(home)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_a_clear_error(home: Path) -> None:
    home.mkdir(mode=0o500)
    with pytest.raises(embedded.EmbeddedError, match=r"Permission denied\. Choose a folder"):
        embedded.start(home)
    with pytest.raises(embedded.EmbeddedError, match=r"Permission denied\. Choose a folder"):
        embedded.start(home / "data")


def test_data_of_another_version_is_served_by_that_version_or_refused(
    home: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.start(home).close()
    (home / "pgdata/PG_VERSION").write_text("99\n")
    with pytest.raises(embedded.EmbeddedError, match="No PostgreSQL 99 programs found"):
        embedded.start(home)
