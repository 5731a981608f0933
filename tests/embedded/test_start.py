"""Start, stop and restart of an embedded server."""

import os
import signal
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from fairq import embedded
from tests.embedded.conftest import Ask
from tests.support.processes import is_alive, run_dirs_of
from tests.support.sessions import wait_until


def test_a_throw_away_server_answers_and_leaves_nothing(ask: Ask) -> None:
    with embedded.start() as server:
        assert ask(server, "select 1") == 1
        pid, run_dir = server.pid, server.run_dir
        assert is_alive(pid)
        assert server.data_dir.is_relative_to(run_dir)
    assert not is_alive(pid)
    assert not run_dir.exists()


def test_durability_is_traded_for_speed_only_where_data_is_thrown_away(ask: Ask, home: Path) -> None:
    with embedded.start() as server:
        assert ask(server, "show fsync") == "off"
        assert ask(server, "show full_page_writes") == "off"
    with embedded.start(home) as server:
        assert ask(server, "show fsync") == "on"
        assert ask(server, "show full_page_writes") == "on"
        assert ask(server, "show synchronous_commit") == "on"


def test_the_callers_locale_and_pg_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    for name, value in {
        "LC_ALL": "xx_XX.nonsense",
        "LANG": "de_DE.ISO-8859-1",
        "TZ": "Asia/Kathmandu",
        "PGDATA": "/nowhere",
        "PGPORT": "1",
        "PGOPTIONS": "-c nonsense=1",
        "LD_LIBRARY_PATH": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    with embedded.start() as server:
        monkeypatch.undo()
        assert ask(server, "show server_encoding") == "UTF8"
        assert (
            ask(server, "select datcollate || datctype from pg_database where datname = 'template1'") == "CC"
        )
        assert ask(server, "show timezone") == "UTC"


def test_settings_are_passed_on_and_a_restart_may_change_them(ask: Ask) -> None:
    with embedded.start(
        settings={"max_connections": 17, "log_lock_waits": True, "work_mem": "5MB"}
    ) as server:
        assert ask(server, "show max_connections") == "17"
        assert ask(server, "show log_lock_waits") == "on"
        server.restart(settings={"max_connections": 18, "port": 5433})
        assert ask(server, "show max_connections") == "18"
        assert ask(server, "show work_mem") == "5MB"


def test_a_name_that_is_no_setting_is_refused_before_it_reaches_the_server() -> None:
    with pytest.raises(embedded.EmbeddedError, match="not the name of a PostgreSQL setting"):
        embedded.start(settings={"fsync=off -c x": 1})


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    before = run_dirs_of(os.getpid())
    with pytest.raises(embedded.EmbeddedError, match=r"no_such_setting"):
        embedded.start(settings={"no_such_setting": 1})
    assert run_dirs_of(os.getpid()) == before


def test_a_kept_folder_has_its_data_the_next_time(ask: Ask, home: Path) -> None:
    with embedded.start(home) as server:
        ask(server, "create table kept as select 42 as answer")
    assert home.exists()
    with embedded.start(home) as server:
        assert ask(server, "select answer from kept") == 42


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_serves_the_same_data_at_the_same_address(mode: embedded.StopMode, ask: Ask) -> None:
    with embedded.start() as server:
        dsn, pid = server.dsn(), server.pid
        ask(server, "create table kept as select 42 as answer")
        server.restart(mode)
        assert server.dsn() == dsn
        assert server.pid != pid
        assert ask(server, "select answer from kept") == 42


def test_a_stopped_server_refuses_connections_until_it_is_started(ask: Ask) -> None:
    with embedded.start() as server:
        open_conn = psycopg.connect(server.dsn())
        server.stop()
        assert not server.is_running()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn())
        with pytest.raises(psycopg.OperationalError):
            open_conn.execute("select 1")
        server.start()
        assert server.is_running()
        assert ask(server, "select 1") == 1
        server.start()
        open_conn.close()


def test_a_smart_stop_that_a_connection_holds_up_says_so() -> None:
    with embedded.start() as server, closing(psycopg.connect(server.dsn())):
        with pytest.raises(embedded.EmbeddedError, match="use `fast`"):
            server.stop("smart", wait_seconds=0.05)
        server.stop("fast")


def test_a_crashed_server_is_seen_and_starts_again_beside_its_stale_socket_and_pid_file(ask: Ask) -> None:
    with embedded.start() as server:
        ask(server, "create table kept as select 42 as answer")
        stale = server.socket_dir / f".s.PGSQL.{embedded.SOCKET_PORT}.lock"
        server.stop("immediate")
        server.start()
        _crash(server)
        assert stale.exists()
        server.start()
        assert ask(server, "select answer from kept") == 42


def _crash(server: embedded.Server) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running(), "the postmaster is gone")


def test_closing_twice_is_harmless_and_a_closed_server_says_that_it_is() -> None:
    server = embedded.start()
    server.close()
    server.close()
    with pytest.raises(embedded.EmbeddedError, match="closed"):
        server.start()


@pytest.mark.parametrize(
    "name", ["two words", 'it\'s, "quoted" %d $HOME', "ünïcode", "long-" * 45], ids=range(4)
)
def test_any_path_will_do_for_a_kept_folder(name: str, tmp_path: Path, ask: Ask) -> None:
    home = tmp_path / name / "data" if len(name) < 200 else tmp_path / name / name / "data"
    with embedded.start(home) as server:
        ask(server, "create table kept as select 42 as answer")
    with embedded.start(home) as server:
        assert ask(server, "select answer from kept") == 42


def test_no_tcp_port_is_open_and_none_lets_anybody_in(ask: Ask) -> None:
    with embedded.start() as server:
        assert ask(server, "show listen_addresses") == ""
        rules = "select array_agg(distinct auth_method) from pg_hba_file_rules where type <> 'local'"
        assert ask(server, rules) == ["reject"]


def test_only_the_servers_user_may_reach_its_socket_and_data() -> None:
    with embedded.start() as server:
        assert server.socket_dir.stat().st_mode & 0o077 == 0
        assert (server.data_dir / "pgdata").stat().st_mode & 0o077 == 0
