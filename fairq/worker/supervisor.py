"""Runs several worker processes: starts them, restarts those that crash, and ends them.

Each child has a session of its own, so that a Ctrl-C in the terminal reaches only the supervisor, which
passes it on once. Each child reads from a pipe whose other end only the supervisor holds: when the supervisor
dies, in whatever way, the child ends gracefully.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from fairq.worker import log, plan
from fairq.worker.signals import handled

# The variable with the pipe's descriptor in a child's environment.
LIFELINE: Final = "FAIRQ_SUPERVISOR_FD"
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
# A child that lived this long is in no crash loop.
STEADY_SECONDS: Final = 60.0
# How much longer than the grace time children get before they are killed.
PATIENCE_SECONDS: Final = 15.0
# Between two looks at the children. A signal is passed on at once.
LOOK_SECONDS: Final = 0.2
# Exit codes that a restart does not help: wrong usage, a database of another version.
HOPELESS: Final = (2, 4)
# The signals to children by level: end, end at once.
TOLD: Final = {1: signal.SIGTERM, 2: signal.SIGQUIT}


@dataclass
class Child:
    """One of the processes, by number; restarts keep it."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    crashes: int = 0
    start_at: float = 0.0
    done: bool = False


def watch_supervisor(stop: Callable[[], None]) -> None:
    """In a child: call `stop` when the supervisor is gone. Does nothing without one."""
    number = os.environ.pop(LIFELINE, "")
    if not number:
        return
    descriptor = int(number)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 64):
                pass
        log.warning("orphaned", "the supervisor is gone; the worker ends")
        stop()

    threading.Thread(target=watch, name="fairq-lifeline", daemon=True).start()


@dataclass
class Supervisor:
    """Runs `argv` in so many processes until all are done or a signal ends them.

    `env` is added to their environment. A process that ends with a code in `final` is not restarted.
    """

    argv: Sequence[str]
    processes: int
    grace: float
    env: Mapping[str, str] = field(default_factory=dict)
    final: Collection[int] = (0,)

    def __post_init__(self) -> None:
        self._children = [Child(number) for number in range(1, self.processes + 1)]
        self._stop_level = 0
        self._told_level = 0
        self._kill_at: float | None = None
        self._exit_code = 0
        self._lifeline = -1

    def run(self) -> int:
        """Run until the end, and return the exit code."""
        self._lifeline, held = os.pipe()
        try:
            with handled(self._signalled):
                while self._tend():
                    time.sleep(LOOK_SECONDS)
        finally:
            for child in self._children:
                if child.process is not None and child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
            os.close(self._lifeline)
            os.close(held)
        return self._exit_code

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        level = 2 if number == signal.SIGQUIT or self._stop_level else 1
        if level > self._stop_level:
            self._stop(level, self.grace if level == 1 else 0.0)

    def _stop(self, level: int, grace: float) -> None:
        self._stop_level = level
        self._kill_at = time.monotonic() + PATIENCE_SECONDS + grace
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(TOLD[level])

    def _tend(self) -> bool:
        """Look after every child once. False: none is left."""
        now = time.monotonic()
        if self._stop_level > self._told_level:
            self._told_level = self._stop_level
            what = "; a second signal ends them at once" if self._stop_level == 1 else " at once"
            log.info("ending", "ending the processes%s", what)
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._bury(child, child.process.returncode)
            if child.process is None and not child.done and not self._stop_level and now >= child.start_at:
                self._start(child)
        alive = [child for child in self._children if child.process is not None]
        if self._kill_at is not None and now > self._kill_at:
            for child in alive:
                log.error("killed", "process %d does not end: killing it", child.number)
                if child.process is not None:
                    child.process.kill()
        waiting = not self._stop_level and any(not child.done for child in self._children)
        return bool(alive) or waiting

    def _start(self, child: Child) -> None:
        child.started_at = time.monotonic()
        try:
            child.process = subprocess.Popen(
                list(self.argv),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env, LIFELINE: str(self._lifeline)},
                pass_fds=(self._lifeline,),
                start_new_session=True,
            )
        except OSError as exc:  # for example, no memory; the others go on
            self._start_later(child, f"cannot be started: {exc}")
            return
        if self._stop_level:  # the signal came while the process was being started
            child.process.send_signal(TOLD[self._stop_level])

    def _bury(self, child: Child, code: int) -> None:
        child.process = None
        if self._stop_level:
            if code > 0:
                self._exit_code = self._exit_code or code
        elif code in self.final:
            child.done = True
            self._exit_code = self._exit_code or code
        elif code in HOPELESS:
            log.logger.error("process %d cannot start (exit code %d)", child.number, code)
            self._exit_code = code
            self._stop(1, 0.0)
        else:
            how = f"signal {_name(-code)}" if code < 0 else f"exit code {code}"
            self._start_later(child, f"ended with {how}", code)

    def _start_later(self, child: Child, what: str, code: int | None = None) -> None:
        now = time.monotonic()
        child.crashes = 1 if now - child.started_at >= STEADY_SECONDS else child.crashes + 1
        pause = plan.retry_delay(child.crashes, FIRST_PAUSE, LONGEST_PAUSE)
        child.start_at = now + pause
        text = "process %d %s; starting it again in %.1f s"
        log.warning("restart", text, child.number, what, pause, exit_code=code)


def _name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, str(number))  # real-time signals have no names
