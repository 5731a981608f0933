"""TERM, INT and QUIT while a worker has them. Children that a handler forks have what was there before."""

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


# Blocked meanwhile: a signal that comes before the child has its own handlers waits for them.
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *, for_good: bool = False) -> Iterator[None]:
    """They go to `handler`, which also runs while a handler of tasks blocks the loop.

    `for_good`: the process ends afterwards, and what still comes is ignored; it is too late to die of it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("signals can be handled in the main thread only")
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
