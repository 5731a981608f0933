"""Handles TERM, INT and QUIT for a worker. Children that a handler forks get the previous handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from fairq.errors import ConfigurationError

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_before: dict[signal.Signals, Any] = {}
_masks = threading.local()


def _block() -> None:
    _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, _before)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


def _restore() -> None:
    for number, old in _before.items():
        signal.signal(number, old)
    _unblock()


# Blocked during the fork, so that a signal waits until the child has its handlers.
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *, for_good: bool = False) -> Iterator[None]:
    """Send the signals to `handler`, which also runs while a task's handler blocks the loop.

    With `for_good` the process ends afterwards, so later signals are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("signals can only be handled in the main thread")
    outermost = not _before
    old = {number: signal.signal(number, handler) for number in NUMBERS}
    if outermost:
        _before.update(old)
    try:
        yield
    finally:
        for number, each in old.items():
            signal.signal(number, signal.SIG_IGN if for_good else each)
        if outermost:
            _before.clear()
