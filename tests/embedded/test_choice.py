"""Which server a test run uses, and says that it uses."""

import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.processes import ROOT
from tests.support.server import Choice, TestServer, choose, docker_answers, with_database


def never() -> bool:
    raise AssertionError("nobody needs to look for Docker")


def test_a_dsn_comes_first_and_docker_is_not_even_looked_for() -> None:
    assert choose({"FAIRQ_TEST_DSN": "dbname=x"}, never).backend == "dsn"


def test_docker_comes_next_if_a_daemon_answers() -> None:
    assert choose({}, lambda: True) == Choice("docker", "a Docker daemon answers")


def test_without_any_the_embedded_server_is_used() -> None:
    assert choose({}, lambda: False).backend == "embedded"


@pytest.mark.parametrize("backend", ["dsn", "docker", "embedded"])
def test_a_backend_can_be_forced(backend: str) -> None:
    env = {"FAIRQ_TEST_DSN": "dbname=x", "FAIRQ_TEST_BACKEND": backend}
    assert choose(env, never) == Choice(backend, "FAIRQ_TEST_BACKEND says so")


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of dsn, docker, embedded"):
        choose({"FAIRQ_TEST_BACKEND": "oracle"}, never)


def test_forcing_a_dsn_without_giving_one_is_refused() -> None:
    with pytest.raises(ValueError, match="FAIRQ_TEST_DSN is not set"):
        choose({"FAIRQ_TEST_BACKEND": "dsn"}, never)


@pytest.mark.parametrize(
    ("dsn", "changed"),
    [
        (
            "postgresql://me:pw@db:5433/app?sslmode=require",
            "postgresql://me:pw@db:5433/other?sslmode=require",
        ),
        ("postgresql://postgres@/app?host=%2Ftmp%2Fx", "postgresql://postgres@/other?host=%2Ftmp%2Fx"),
        ("host=db dbname=app", "host=db dbname=other"),
        ("host=db", "host=db dbname=other"),
    ],
)
def test_the_database_of_a_dsn_can_be_changed_in_both_notations(dsn: str, changed: str) -> None:
    assert conninfo_to_dict(with_database(dsn, "other")) == conninfo_to_dict(changed)


class _Daemon(BaseHTTPRequestHandler):
    """The part of Docker's API that a client uses to see whether a daemon answers."""

    status = 200

    def do_GET(self) -> None:
        body = b"OK" if self.path.endswith("/_ping") else b'{"ApiVersion": "1.44", "MinAPIVersion": "1.24"}'
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def daemon_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = Path("/tmp") / f"fairq-test-docker-{os.getpid()}.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), _Daemon) as daemon:
        thread = threading.Thread(target=daemon.serve_forever)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield path
        daemon.shutdown()
        thread.join()
    path.unlink(missing_ok=True)


def test_a_docker_daemon_that_answers_is_seen(daemon_socket: Path) -> None:
    assert docker_answers()


def test_a_docker_daemon_that_fails_does_not_count(
    daemon_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Daemon, "status", 500)
    assert not docker_answers()


def test_a_socket_that_nobody_serves_is_no_docker_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert not docker_answers()


def run_pytest(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """A test run of its own, with the same interpreter."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FAIRQ_TEST_", "PYTEST_"))
    }
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "tests/ground/test_fixtures.py",
            *arguments,
        ],
        cwd=ROOT,
        env={**kept, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_says_which_server_it_uses_and_why() -> None:
    ended = run_pytest(FAIRQ_TEST_BACKEND="embedded")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "server: embedded from " in ended.stdout
    assert "(FAIRQ_TEST_BACKEND says so)" in ended.stdout


def test_a_run_on_a_given_server_uses_it_and_leaves_no_database(server: TestServer) -> None:
    query = "select datname from pg_database where datname like 'fairq_test_%%' and datname not like %s"
    with psycopg.connect(server.admin_dsn, autocommit=True) as conn:
        # Other runs may be under way: what is new is ours.
        before = set(conn.execute(query, [f"fairq_test_{server.run_id}%"]).fetchall())
        ended = run_pytest("-n", "2", FAIRQ_TEST_DSN=server.admin_dsn)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "server: FAIRQ_TEST_DSN, PostgreSQL " in ended.stdout
        assert set(conn.execute(query, [f"fairq_test_{server.run_id}%"]).fetchall()) <= before


def test_a_wrong_choice_ends_the_run_with_a_message() -> None:
    ended = run_pytest(FAIRQ_TEST_BACKEND="oracle")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "must be one of dsn, docker, embedded" in ended.stderr


def test_a_server_that_cannot_be_reached_ends_the_run_without_showing_the_password() -> None:
    ended = run_pytest(FAIRQ_TEST_DSN="postgresql://me:s3cret@127.0.0.1:1/x")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "No PostgreSQL for the tests" in ended.stderr
    assert "s3cret" not in ended.stdout + ended.stderr
