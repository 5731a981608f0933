"""Run the command line as a user does, in this process or its own, with or without a terminal."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from fairq.cli import main
from tests.support.database import Database
from tests.support.processes import ROOT

PATIENCE_SECONDS = 60.0


def fairq(database: Database | str, *arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run the command in this process, against a database or a DSN."""
    dsn = database if isinstance(database, str) else database.dsn
    return CliRunner().invoke(main, [*arguments, "--dsn", dsn], input=stdin, prog_name="fairq")


def ok(database: Database | str, *arguments: str, stdin: str | bytes | None = None) -> str:
    """The output of a command that must succeed."""
    done = fairq(database, *arguments, stdin=stdin)
    assert done.exit_code == 0, done.output
    return done.stdout


def answer(database: Database | str, *arguments: str, exit_code: int = 0, stdin: str | None = None) -> Any:
    """The one JSON object that a command prints."""
    done = fairq(database, *arguments, "--json", stdin=stdin)
    assert done.exit_code == exit_code, done.output
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def as_role(database: Database, role: str) -> str:
    """A DSN whose sessions have only the rights of a role."""
    return make_conninfo(database.dsn, options=f"-c role={role}")


@contextlib.contextmanager
def process(database: Database | str, *arguments: str, **kwargs: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run the command in its own process; it is killed at the end if it still runs."""
    # Whatever the run itself is shown on: a terminal of a test moves its cursor.
    dsn = database if isinstance(database, str) else database.dsn
    env = {**os.environ, "FAIRQ_DSN": dsn, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    started = subprocess.Popen(
        [sys.executable, "-m", "fairq", *arguments],
        env=env,
        text=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs},
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


class Terminal:
    """A terminal, and what was written to it."""

    def __init__(self, lines: int = 24, columns: int = 80) -> None:
        import fcntl
        import struct
        import termios

        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes = termios.tcgetattr(self.theirs)
        self.written = b""

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def wait_for(self, text: bytes) -> None:
        """Read until this text was written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.written:
            self.read(deadline - time.monotonic(), text)

    def read(self, seconds: float, wanted: bytes = b"") -> None:
        if not select.select([self.ours], [], [], max(seconds, 0))[0]:
            raise TimeoutError(f"waited in vain for {wanted!r} in {self.written!r}")
        self.written += os.read(self.ours, 65536)

    def read_rest(self) -> bytes:
        while select.select([self.ours], [], [], 0)[0]:
            self.read(0)
        return self.written

    def close(self) -> None:
        os.close(self.theirs)
        os.close(self.ours)


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    try:
        yield made
    finally:
        made.close()
