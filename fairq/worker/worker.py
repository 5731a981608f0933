"""`Worker`, the public class: checks its settings, runs the loop, handles signals, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

from fairq.app import App
from fairq.dsn import VARIABLES, NoDsn, mask, resolve
from fairq.errors import ConfigurationError, FairqError
from fairq.worker import log
from fairq.worker.breaker import State
from fairq.worker.config import Settings, problems
from fairq.worker.ending import Stuck
from fairq.worker.engine import Announce, Engine
from fairq.worker.handlers import whereabouts
from fairq.worker.node import UNWIND_SECONDS
from fairq.worker.signals import handled


class Worker:
    """Runs the tasks of an app.

        Worker(app, "postgresql://…", queues=["mail"], concurrency=20).run()

    `options` are those of `Settings`. Raises ConfigurationError with everything that is wrong, before it
    connects.
    """

    def __init__(
        self,
        app: App,
        dsn: str | None = None,
        *,
        settings: Settings | None = None,
        announce: Announce | None = None,
        also_wrong: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if not isinstance(app, App):
            hint = "Pass the app itself: fairq.Worker(app, dsn)"
            raise ConfigurationError(f"{app!r:.60} is no fairq.App", hint)
        settings = _settings(settings, options)
        if not settings.queues and len(app.queues) > 1:
            settings = replace(settings, queues=dict.fromkeys(app.queues, 1.0))
        self.app = app
        self.settings = settings
        self.queues: tuple[str, ...] = tuple(settings.queues) or tuple(app.queues) or ("default",)
        found = [*also_wrong, *problems(settings)]
        if not tuple(app):
            found.append("the app has no tasks: import the modules that declare them")
        found += app.problems()
        self.dsn = ""
        if not isinstance(dsn, str | None):
            found.append(
                f"the DSN is of type {type(dsn).__name__}; pass a text: workers connect by themselves"
            )
        else:
            try:
                self.dsn = resolve(dsn)
                if settings.listen_dsn:
                    resolve(settings.listen_dsn)
            except NoDsn as exc:
                found.append(f"{exc}: pass its DSN, or set {' or '.join(VARIABLES)}")
            except FairqError as exc:
                found.append(str(exc))
        if found:
            raise ConfigurationError(
                "this worker cannot start:\n" + "\n".join(f"  - {mask(each)}" for each in found),
                "fairq.worker.Settings has every option, with its default.",
            )
        self._announce = announce or (lambda line: log.logger.info("%s", line))
        self._engine: Engine | None = None
        self._stop_level = 0
        self._owns_process = False
        self.left_behind = 0
        """After the end: how many handlers still run in this process, and threads that they made."""

    @property
    def circuit(self) -> State:
        """The state of the circuit breaker in front of the database."""
        engine = self._engine
        return "closed" if engine is None else engine.circuit

    def stop(self, *, now: bool = False) -> None:
        """End: let handlers finish within the grace time, or give everything back now. Thread-safe."""
        self._stop_level = max(self._stop_level, 2 if now else 1)
        engine = self._engine
        if engine is not None:
            engine.request_stop(self._stop_level)

    async def arun(self) -> None:
        """Run on the running event loop, until `stop`, or until the mode is done."""
        if self._engine is not None:
            raise ConfigurationError("this worker is running already", "Make another one for another run.")
        engine = self._engine = Engine(
            self.app, self.dsn, self.settings, self.queues, self._announce, self._owns_process
        )
        if self._stop_level:
            engine.request_stop(self._stop_level)
        try:
            await engine.run()
        finally:
            self.left_behind = engine.held.abandoned
            self._engine = None

    def run(self, *, handle_signals: bool = False) -> None:
        """Run on a new event loop until the end.

        With `handle_signals`, which works only in the main thread, TERM and INT end the worker gracefully,
        and a second one or QUIT at once. The worker then also ends the process if a handler holds up the end.
        """
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise ConfigurationError("a loop is running here already", "There, await worker.arun().")
        self._owns_process = handle_signals
        with contextlib.ExitStack() as stack:
            if handle_signals:
                stack.enter_context(handled(self._signalled))
            loop = asyncio.new_event_loop()
            # For asyncio.to_thread().
            threads = ThreadPoolExecutor(thread_name_prefix=f"fairq-to-thread-{id(loop)}")
            loop.set_default_executor(threads)
            there = set(threading.enumerate())
            try:
                asyncio.set_event_loop(loop)
                self._run_on(loop)
            finally:
                asyncio.set_event_loop(None)
                threads.shutdown(wait=False, cancel_futures=True)
                mine = [
                    thread
                    for thread in set(threading.enumerate()) - there
                    if thread.name.startswith(f"fairq-to-thread-{id(loop)}") or self._owns_process
                ]
                self.left_behind += _still_busy(mine)
                loop.close()

    def _run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        main = loop.create_task(self.arun(), name="fairq-worker")
        try:
            while not main.done():
                try:
                    loop.run_until_complete(main)
                except (SystemExit, KeyboardInterrupt) as exc:
                    if main.done():
                        raise
                    # asyncio lets these two leave the loop if they come from a task that a handler made.
                    if isinstance(exc, KeyboardInterrupt):
                        self.stop(now=self._stop_level > 0)
                    else:
                        log.logger.error("ignoring sys.exit(%s) in an asyncio task of a handler", exc.code)
                except asyncio.CancelledError as exc:
                    raise Stuck("a handler cancelled every task on the loop, the worker's own, too") from exc
                except RuntimeError:
                    if main.done():
                        raise
                    log.logger.error("a handler stopped the loop; it goes on")
        finally:
            _tidy(loop)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = number == signal.SIGQUIT or self._stop_level > 0
        self.stop(now=now)


def _tidy(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what handlers left on the loop, and give it a moment to end."""
    leftover = asyncio.all_tasks(loop)
    for each in leftover:
        each.cancel()
    if leftover:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(asyncio.wait(leftover, timeout=UNWIND_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())


def _still_busy(threads: Sequence[threading.Thread]) -> int:
    """How many of these threads do not end soon. Python would wait for them at exit, perhaps for ever."""
    until = time.monotonic() + UNWIND_SECONDS
    while (busy := [each for each in threads if _holds_up(each)]) and time.monotonic() < until:
        busy[0].join(0.02)
    for thread in busy:
        log.warning("left_behind", "left behind: %s", whereabouts(thread))
    return len(busy)


def _holds_up(thread: threading.Thread) -> bool:
    """Whether Python would wait for the thread at exit: it is no daemon, or it is busy in a pool of
    concurrent.futures. Idle threads of such pools end by themselves.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is not None and _is_of_pool(frame):
        return False
    while frame is not None and not _is_of_pool(frame):
        frame = frame.f_back
    return thread.is_alive() and (frame is not None or not thread.daemon)


def _is_of_pool(frame: FrameType) -> bool:
    return (
        frame.f_code.co_name == "_worker" and frame.f_globals.get("__name__") == ThreadPoolExecutor.__module__
    )


def _settings(settings: Settings | None, options: dict[str, Any]) -> Settings:
    if settings is not None:
        if options:
            raise ConfigurationError("a worker takes settings or options, not both")
        return settings
    if isinstance(options.get("queues"), list):
        options = {**options, "queues": tuple(options["queues"])}
    try:
        return Settings(**options)
    except TypeError:
        known = set(Settings.__dataclass_fields__)
        strange = ", ".join(sorted(set(options) - known))
        raise ConfigurationError(
            f"a worker has no option {strange}", f"Options: {', '.join(sorted(known))}"
        ) from None
