"""Workers in this process and in others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import fairq
from fairq.worker import Worker
from tests.support.sessions import wait_until

APPS = Path(__file__).parent / "apps"
ROOT = Path(__file__).parents[2]
EFFECTS = """
create table effects (
  id bigserial primary key, what text not null, task_id bigint not null, attempt integer not null,
  pid integer not null, worker_id bigint not null
)"""

Rows = list[tuple[Any, ...]]


class Running:
    """A worker process, with its output so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def says(self, text: str) -> bool:
        return text in self.output

    def wait_for(self, text: str) -> None:
        def found() -> bool:
            if self.process.poll() is not None and not self.says(text):
                self._reader.join(5)
                assert self.says(text), f"ended with {self.process.returncode}:\n{self.output}"
            return self.says(text)

        try:
            wait_until(found, f"the worker says {text!r}", 40)
        except TimeoutError as exc:
            exc.add_note(self.output)
            raise

    def wait(self, patience: float = 40) -> int:
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired as exc:
            exc.add_note(self.output)
            raise
        self._reader.join(5)
        return code


@contextmanager
def work_process(
    dsn: str, *args: str, app: str = "effects", env: dict[str, str] | None = None
) -> Iterator[Running]:
    """`fairq work` in a process, which is killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "fairq", "work", app, *args],
        cwd=APPS,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAIRQ_DSN": dsn, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Running(process)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        running._reader.join(5)
        assert process.stdout is not None
        process.stdout.close()


class Desk:
    """What a test does with the queue, on connections in autocommit. `dsn` is for workers."""

    def __init__(
        self,
        dsn: str,
        conn: psycopg.Connection[Any],
        app: psycopg.Connection[Any] | None = None,
        owner_dsn: str | None = None,
    ) -> None:
        self.dsn = dsn
        self.owner_dsn = owner_dsn or dsn
        self.conn = conn
        self.app = app or conn

    def enqueue(self, kind: str, payload: Any = None, *, group_key: str = "bob", **options: Any) -> int:
        return fairq.enqueue(self.app, group_key, payload, kind=kind, **options)

    def enqueue_many(self, kind: str, count: int, payload: Any = None, **options: Any) -> list[int]:
        items = [(f"group {number % 5}", payload) for number in range(count)]
        return fairq.enqueue_many(self.app, items, kind=kind, **options)

    def rows(self, query: str, *params: Any) -> Rows:
        return self.conn.execute(query.encode(), params).fetchall()

    def one(self, query: str, *params: Any) -> Any:
        return self.rows(query, *params)[0][0]

    def queue(self, name: str, **settings: Any) -> None:
        self.conn.execute("select fairq.configure_queue(%s)", [name])

    @property
    def live(self) -> int:
        return int(self.one("select count(*) from fairq.tasks"))

    @property
    def running(self) -> int:
        return int(self.one("select count(*) from fairq.live_tasks where state = 'running'"))

    @property
    def workers(self) -> int:
        return int(self.one("select count(distinct worker_id) from fairq.workers"))

    def outcomes(self) -> dict[str, int]:
        return dict(self.rows("select outcome, count(*) from fairq.finished_tasks group by outcome"))

    def effects(self, what: str) -> int:
        return int(self.one("select count(*) from effects where what = %s", what))

    def end(self, id: int) -> tuple[str, int, Any, Any]:
        """Outcome, attempt, result and error of an ended task."""
        found = self.rows(
            "select outcome, attempt, result, error from fairq.finished_tasks where id = %s", id
        )
        assert len(found) == 1, f"task {id} ended {len(found)} times"
        return found[0]

    def attempts(self, id: int) -> Rows:
        return self.rows(
            "select attempt, outcome, error from fairq.attempts where task_id = %s order by ended_at", id
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what, 40)


@contextmanager
def worker_thread(app: fairq.App, dsn: str, **options: Any) -> Iterator[Worker]:
    """A worker in a thread of this process, which is stopped at once at the end. Raises what it raised."""
    worker = Worker(app, dsn, **{"grace": 0.0, **options})
    raised: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop(now=True)
        thread.join(40)
        assert not thread.is_alive(), "the worker does not end"
        if raised:
            raise raised[0]


def drain(app: fairq.App, dsn: str, **options: Any) -> Worker:
    """Run what there is, in this thread."""
    worker = Worker(app, dsn, mode="drain", **options)
    worker.run()
    return worker


def lines_of(running: Running, text: str) -> Sequence[str]:
    return [line for line in running.lines if text in line]


def children_of(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [line.split() for line in listing.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]
