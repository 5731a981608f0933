"""`fairq demo` as a process that shows, draws, and leaves nothing behind."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairq.cli import Exit
from tests.cli.running import as_role
from tests.support.database import Database
from tests.support.processes import ROOT, is_alive, run_dirs_of

TINY = ("--tasks", "300", "--tenants", "4", "--slots", "8")


@contextmanager
def fairq_demo(folder: Path, *arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the command in its own folder and home; it is killed at the end if it still runs."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("FAIRQ_DSN", "DATABASE_URL", "MPLCONFIGDIR")}
    env |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "fairq", "demo", *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a complete file: signature, header first, end last."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def postmaster_of(folder: Path) -> int:
    return int((folder / ".cache/demo/pgdata/postmaster.pid").read_text().split("\n", 1)[0])


def read_until(process: "subprocess.Popen[str]", pattern: str) -> str:
    """The output up to a line that matches the pattern."""
    assert process.stdout is not None
    text = ""
    while not re.search(pattern, text):
        line = process.stdout.readline()
        assert line, f"it ended first: {text}"
        text += line
    return text


def test_it_prints_a_table_and_draws_a_picture_twice_in_a_row(tmp_path: Path) -> None:
    """The second run uses the same data folder. Neither leaves a process, or a file elsewhere."""
    picture = tmp_path / "demo-output" / "fairness.png"
    for _ in range(2):
        picture.unlink(missing_ok=True)
        with fairq_demo(tmp_path, *TINY) as process:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert err == ""
            assert run_dirs_of(process.pid) == set()
        rows = dict(re.findall(r"^ +(\w+) +([\d,]+) +[\d.]+ m?s ", out, re.MULTILINE))
        assert rows == {"bob": "300", "alice": "3", "carol": "3", "dave": "3", "others": "9"}
        assert out.count("With fairq instead of FIFO") == 1
        assert "fsync on" in out
        assert re.search(r"^Who gets what, in a browser: http://127\.0\.0\.1:\d+/$", out, re.MULTILINE)
        assert "309 of 309 started" in out
        assert "\x1b" not in out, "no colours in a pipe"
        width, height = png_size(picture)
        assert width >= 1200
        assert height >= 400
        assert not (tmp_path / ".cache/demo/pgdata/postmaster.pid").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "demo-output", "home"]
    assert list((tmp_path / "home").rglob("*")) == []


def test_the_page_shows_bob_and_alice_while_it_runs(tmp_path: Path) -> None:
    with fairq_demo(tmp_path, "--tasks", "20000") as process:
        (address,) = re.findall(r"http://\S+/", read_until(process, r"[1-9]\d* of [\d,]+ started.*\|"))
        deadline = time.monotonic() + 30
        seen = ""
        while not ("bob" in seen and "alice" in seen) and time.monotonic() < deadline:
            with urllib.request.urlopen(address, timeout=10) as answer:
                seen = answer.read().decode()
        assert "bob" in seen
        assert "alice" in seen
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_its_server(tmp_path: Path, number: signal.Signals) -> None:
    with fairq_demo(tmp_path, "--tasks", "100000") as process:
        read_until(process, r"[1-9]\d* of [\d,]+ started.*\|")
        postmaster = postmaster_of(tmp_path)
        assert is_alive(postmaster)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert out.endswith("Stopped. Nothing is left running.\n")
        assert err == ""
        assert gone(postmaster)
        assert run_dirs_of(process.pid) == set()


def test_on_a_terminal_it_draws_and_gives_the_cursor_back(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 130, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("FAIRQ_DSN", "DATABASE_URL", "NO_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fairq", "demo", "--tasks", "100000"],
        cwd=tmp_path,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def read() -> bytes:
        try:
            return os.read(ours, 65536)
        except OSError:  # how Linux says that nobody writes any more
            return b""

    try:
        while not re.search(rb"[1-9]\d* of 102,250 started", seen):
            more = read()
            assert more, seen
            seen += more
        screen = seen.decode(errors="replace")
        assert "FIFO · first come, first served" in screen
        assert "fairq · everyone in turn" in screen
        assert "alice" in screen
        process.send_signal(signal.SIGINT)
        while more := read():
            seen += more
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "the cursor is shown again"
    assert seen.endswith(b"Stopped. Nothing is left running.\r\n")


def test_its_server_dies_with_it_when_it_is_killed(tmp_path: Path) -> None:
    with fairq_demo(tmp_path, "--tasks", "100000") as process:
        read_until(process, r"[1-9]\d* of [\d,]+ started.*\|")
        postmaster = postmaster_of(tmp_path)
        process.kill()
        process.wait()
        assert gone(postmaster)


def test_a_second_demo_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with fairq_demo(tmp_path, "--tasks", "100000") as process:
        read_until(process, r"[1-9]\d* of [\d,]+ started.*\|")
        with fairq_demo(tmp_path, *TINY) as second:
            _, err = second.communicate(timeout=60)
            assert second.returncode == Exit.NO
            assert "already uses" in err
            assert "Is another demo running here?" in err
        assert process.poll() is None


def exists(database: Database, said: str) -> bool:
    """Whether the database that the demo names exists."""
    (name,) = re.findall(r"fairq_demo_\w+", said)
    conn = database.connect(autocommit=True)
    return conn.execute("select 1 from pg_database where datname = %s", (name,)).fetchone() is not None


def test_on_a_server_that_is_named_it_makes_a_database_and_drops_it(
    database: Database, tmp_path: Path
) -> None:
    with fairq_demo(tmp_path, *TINY, "--dsn", database.dsn) as process:
        said = read_until(process, r"started.*\|")
        assert exists(database, said)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "others" in out
    assert not (tmp_path / ".cache" / "demo").exists(), "no server of its own"
    assert not exists(database, said)
    assert database.connect().execute("select count(*) from fairq.finished_tasks").fetchone() == (0,)


def test_stopped_on_a_server_that_is_named_it_drops_its_database_too(
    empty_database: Database, tmp_path: Path
) -> None:
    """fairq need not be installed in that database."""
    with fairq_demo(tmp_path, "--tasks", "20000", "--dsn", empty_database.dsn) as process:
        said = read_until(process, r"[1-9]\d* of [\d,]+ started.*\|")
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert not exists(empty_database, said)
    conn = empty_database.connect()
    assert conn.execute("select to_regnamespace('fairq')").fetchone() == (None,)


def test_a_role_that_may_not_make_databases_is_told(database: Database, tmp_path: Path) -> None:
    with fairq_demo(tmp_path, *TINY, "--dsn", as_role(database, "fairq_admin")) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == Exit.DATABASE
    assert "permission denied to create database" in err


def test_a_database_named_by_a_variable_is_not_used(tmp_path: Path) -> None:
    """Nobody who types `make demo` means their application's database."""
    nowhere = "postgresql://bob:s3cr3t@127.0.0.1:1/shop?connect_timeout=2"
    with fairq_demo(tmp_path, *TINY, FAIRQ_DSN=nowhere) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "The demo ignores FAIRQ_DSN" in out
    assert "s3cr3t" not in out + err
