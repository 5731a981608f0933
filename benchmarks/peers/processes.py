"""The runner's side of adapters: processes that get requests and report."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.places import ROOT, Place

START_SECONDS = 60.0


class Failed(Exception):
    """A peer did not do what it was asked; the message says what."""


@dataclass
class Report:
    """The last report of a worker process, and its history."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0
    steps: list[tuple[float, int]] = field(default_factory=list)  # (time of the last start, starts so far)
    watched: list[tuple[str, float, float]] = field(default_factory=list)  # (group, sent, started)

    def take(self, record: dict[str, Any]) -> None:
        self.count, self.first, self.last = record["count"], record["first"], record["last"]
        self.steps.append((self.last, self.count))
        self.watched += [(group, sent, start) for group, sent, start in record["starts"]]

    def count_at(self, moment: float) -> int:
        """The number of starts until then, as exactly as the reports allow."""
        return max((count for at, count in self.steps if at <= moment), default=0)


class Adapter:
    """One running adapter."""

    def __init__(self, place: Place, role: str, dsn: str, *, fair: bool = False, slots: int = 0) -> None:
        self.place, self.role = place, role
        command = place.command(role)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        env = place.environment() | {"PEER_DSN": dsn}
        env |= {"PEER_FAIR": "1"} if fair else {}
        env |= {"PEER_SLOTS": str(slots)} if slots else {}
        self.process = subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.report = Report()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            record = json.loads(line)
            if "count" in record:
                self.report.take(record)
            else:
                self.answers.put(record)

    def answer(self, seconds: float = START_SECONDS) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self.answers.get(timeout=0.05)
            self.check()
        raise Failed(f"{self.role} said nothing for {seconds:g} s")

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.check()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer(seconds)

    def check(self) -> None:
        """Fail if a worker or enqueuer has ended; other roles end after their answer."""
        if self.process.poll() is not None and self.answers.empty():
            self.reader.join(1)
            if self.answers.empty():
                raise Failed(f"{self.role} ended with {self.process.returncode}: {self._last_words()}")

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip(" ^~|\n")]
        return lines[-1][-300:] if lines else "no message"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(1)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()


@contextlib.contextmanager
def running(place: Place, role: str, dsn: str, **options: Any) -> Iterator[Adapter]:
    adapter = Adapter(place, role, dsn, **options)
    try:
        yield adapter
    finally:
        adapter.close()


def said_once(place: Place, role: str, dsn: str = "", seconds: float = START_SECONDS) -> dict[str, Any]:
    """The answer of a role that prints one line."""
    with running(place, role, dsn) as adapter:
        return adapter.answer(seconds)
