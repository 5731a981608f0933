"""Several worker processes under one: started, restarted when they crash, told to end, waited for.

Each child is a process of its own session, so that a Ctrl-C in the terminal reaches only the supervisor,
which passes it on once. Each child holds the reading end of a pipe whose other end only the supervisor has:
when that is gone, however it went, the child ends gracefully.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from fairq.worker import log, plan

# Names the descriptor of the pipe in a child's environment.
LIFELINE: Final = "FAIRQ_SUPERVISOR_FD"
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
# Who has lived so long is no crash loop.
STEADY_SECONDS: Final = 60.0
# Children get this much more than the grace time before they are killed.
PATIENCE_SECONDS: Final = 15.0
LOOK_SECONDS: Final = 0.5
# Ends that starting once more does not help: wrong usage, a database of another version.
HOPELESS: Final = (2, 4)


@dataclass
class Child:
    """One place among the processes, and who has it now."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    crashes: int = 0
    start_at: float = 0.0
    done: bool = False


def restart_pause(crashes: int) -> float:
    """Seconds to wait after so many crashes in a row."""
    return plan.retry_delay(crashes, FIRST_PAUSE, LONGEST_PAUSE)


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
class _State:
    final: Collection[int]
    stop_level: int = 0
    told_level: int = 0
    kill_at: float | None = None
    exit_code: int = 0
    children: list[Child] = field(default_factory=list)


def supervise(
    argv: Sequence[str],
    processes: int,
    grace: float,
    env: Mapping[str, str] | None = None,
    final: Collection[int] = (0,),
) -> int:
    """Run `argv` so many times until all are done or a signal ends them. Returns the exit code.

    `env` is added to the environment of each. Who ends with a code of `final` is not started again.
    """
    state = _State(final=final, children=[Child(number) for number in range(1, processes + 1)])
    lifeline, held = os.pipe()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    try:
        with _signals(state, grace, wake_write):
            while _tend(state, argv, env or {}, lifeline):
                _rest(wake_read)
    finally:
        for child in state.children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()
                child.process.wait()
        for descriptor in (lifeline, held, wake_read, wake_write):
            os.close(descriptor)
    return state.exit_code


def _rest(wake: int) -> None:
    """Until a signal comes, at most until the next look. Its byte is taken out, or nobody rests again."""
    with contextlib.suppress(InterruptedError):
        if select.select([wake], [], [], LOOK_SECONDS)[0]:
            os.read(wake, 4096)


@contextlib.contextmanager
def _signals(state: _State, grace: float, wake: int) -> Iterator[None]:
    def told(number: int, frame: FrameType | None) -> None:
        level = 2 if number == signal.SIGQUIT or state.stop_level else 1
        if level > state.stop_level:
            state.stop_level = level
            state.kill_at = time.monotonic() + PATIENCE_SECONDS + (grace if level == 1 else 0.0)
            _pass_on(state, signal.SIGTERM if level == 1 else signal.SIGQUIT)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, told) for number in numbers}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_wake)
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(state: _State, number: signal.Signals) -> None:
    for child in state.children:
        if child.process is not None and child.process.poll() is None:
            child.process.send_signal(number)


def _tend(state: _State, argv: Sequence[str], env: Mapping[str, str], lifeline: int) -> bool:
    """Look after every child once. False: there is nothing left to look after."""
    now = time.monotonic()
    if state.stop_level > state.told_level:
        state.told_level = state.stop_level
        what = "ending, a second signal ends them now" if state.stop_level == 1 else "ending now"
        log.info("ending", "processes are told: %s", what)
    for child in state.children:
        if child.process is not None and child.process.poll() is not None:
            _bury(state, child, now)
        if child.process is None and not child.done and not state.stop_level and now >= child.start_at:
            _start(state, child, argv, env, lifeline)
    alive = [child for child in state.children if child.process is not None]
    if state.kill_at is not None and now > state.kill_at:
        for child in alive:
            log.error("killed", "process %d does not end; killing it", child.number)
            if child.process is not None:
                child.process.kill()
    waiting = not state.stop_level and any(not child.done for child in state.children)
    return bool(alive) or waiting


def _start(state: _State, child: Child, argv: Sequence[str], env: Mapping[str, str], lifeline: int) -> None:
    child.started_at = time.monotonic()
    try:
        child.process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env, LIFELINE: str(lifeline)},
            pass_fds=(lifeline,),
            start_new_session=True,
        )
    except OSError as exc:  # no memory, no process to be had, the program being replaced: the others go on
        _start_later(child, child.started_at, f"cannot be started: {exc}")
        return
    if state.stop_level:  # the signal came while it was being made
        child.process.send_signal(signal.SIGTERM if state.stop_level == 1 else signal.SIGQUIT)


def _bury(state: _State, child: Child, now: float) -> None:
    assert child.process is not None
    code = child.process.returncode
    child.process = None
    if state.stop_level:
        if code > 0:
            state.exit_code = state.exit_code or code
        return
    if code in state.final:
        child.done = True
        state.exit_code = state.exit_code or code
        return
    if code in HOPELESS:
        log.logger.error("process %d cannot start (exit code %d)", child.number, code)
        state.exit_code = code
        state.stop_level = 1
        state.kill_at = now + PATIENCE_SECONDS
        _pass_on(state, signal.SIGTERM)
        return
    how = f"signal {_name(-code)}" if code < 0 else f"exit code {code}"
    _start_later(child, now, f"ended with {how}", code)


def _name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, str(number))  # real-time signals have no names


def _start_later(child: Child, now: float, what: str, code: int | None = None) -> None:
    child.crashes = 1 if now - child.started_at >= STEADY_SECONDS else child.crashes + 1
    pause = restart_pause(child.crashes)
    child.start_at = now + pause
    log.warning(
        "restart", "process %d %s; starting it again in %.1f s", child.number, what, pause, exit_code=code
    )
