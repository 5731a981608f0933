"""A worker's run: the app's lifespan, the work inside it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from fairq import citus
from fairq.app import App
from fairq.around import living, name_of
from fairq.worker import log
from fairq.worker.breaker import State
from fairq.worker.cluster import Cluster
from fairq.worker.config import Settings, banner, limits
from fairq.worker.ending import Ending, LifespanFailed, Stuck
from fairq.worker.held import Held
from fairq.worker.node import UNWIND_SECONDS, Node
from fairq.worker.rota import Rota

# Gets a line about the worker when it starts; the command line prints it.
Announce = Callable[[str], None]
T = TypeVar("T")

PULSE_SECONDS: Final = 0.5


@dataclass(eq=False, repr=False)
class Engine:
    """The state of one run. Everything happens on the loop, unless it says otherwise."""

    app: App
    dsn: str
    settings: Settings
    queues: tuple[str, ...]
    announce: Announce
    owns_process: bool

    def __post_init__(self) -> None:
        self._limit: asyncio.Timeout | None = None
        """The time limit of the lifespan while it starts or ends."""
        self.loop = asyncio.get_running_loop()
        self.pulse = time.monotonic()
        self.ending = Ending(self.settings.grace, owns_process=self.owns_process)
        self.slots = limits(self.settings).slots
        self.held = Held(self)
        self.rota = Rota(self.slots, strict=not isinstance(self.settings.queues, Mapping))
        self.nodes: list[Node] = []
        """The nodes that are served, or being connected."""
        self._gave_up: set[Node] = set()
        self._done = False

    def node(self, dsn: str, name: str = "", is_near: bool = False) -> Node:
        node = Node(self, dsn, name, is_near)
        self.nodes.append(node)
        return node

    @property
    def circuit(self) -> State:
        """The best state of all nodes' breakers."""
        states: list[State] = [node.database.state for node in self.nodes]
        order: tuple[State, ...] = ("closed", "half_open", "open")
        return min(states, key=order.index, default="closed")

    def request_stop(self, level: int) -> None:
        """Ask for the end, from any thread or a signal handler."""
        if self.ending.request(level):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._told)

    def _told(self) -> None:
        if self.ending.level == 1 and self.held.taken:
            log.info(
                "ending",
                "ending: no new tasks, %d handlers have %g s; a second signal ends at once",
                self.held.taken,
                self.settings.grace,
            )
        self._hurry()

    def _hurry(self) -> None:
        if self.ending.at is not None and self._limit is not None and not self._limit.expired():
            left = max(self.ending.at - time.monotonic(), UNWIND_SECONDS)
            self._limit.reschedule(self.loop.time() + left)
        for node in self.nodes:
            node.hurry()

    def wake(self) -> None:
        """There may be something to do, because fewer handlers run than before."""
        for node in self.nodes:
            node.waking.wake.set()

    def stuck(self) -> None:
        """End the worker, because only hanging handlers are left."""
        if self.ending.fatal is None:
            self.ending.fatal = Stuck(
                f"{self.held.overdue} handlers hang, and nothing else can run; the worker ends",
                "Handlers should check ctx.cancelled, or use timeouts of their own.",
            )
            self.request_stop(2)

    # --- The run ---

    async def run(self) -> None:
        with self.ending.watched():
            pulse = asyncio.create_task(self._beat_pulse(), name="fairq-pulse")
            try:
                await self._live()
            finally:
                pulse.cancel()
                self.held.threads.close()
                await asyncio.gather(*(node.close() for node in self.nodes))
        if self.ending.fatal is not None:
            raise self.ending.fatal

    async def _live(self) -> None:
        """The work, inside the app's lifespan."""
        manager = living(self.app.lifespan)
        try:
            self.held.state = await self._limited("start", manager.__aenter__())
        except LifespanFailed:
            if self.ending.level:  # the worker is ending anyway
                return
            raise
        try:
            await self._serve()
        except BaseException as exc:
            if not await self._limited("end", manager.__aexit__(type(exc), exc, exc.__traceback__)):
                raise
        else:
            await self._limited("end", manager.__aexit__(None, None, None))

    async def _serve(self) -> None:
        """Serve the database or, on Citus, its nodes."""
        first = self.node(self.dsn)
        found = await first.answer(citus.around)
        if found is None:  # told to stop
            return
        near, nodes = found
        if not nodes:
            await first.run()
            return
        await self.dismiss(first)
        # On Citus nobody announces tasks.
        self.settings = replace(self.settings, listen=False)
        if self.settings.nodes == "own":
            await self.node(self.dsn).run()
        else:
            preferred = near if self.settings.nodes == "near" else None
            await Cluster(self, preferred).run(nodes)

    async def dismiss(self, node: Node) -> None:
        self.nodes.remove(node)
        await node.close()

    async def _limited(self, what: str, step: Coroutine[Any, Any, T]) -> T:
        """A step of the lifespan. If the worker is ending, the step has only the rest of the grace time."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limit = limit
                self._hurry()
                return await step
        except Exception as exc:
            how = " within the grace time" if limit.expired() else f": {type(exc).__name__}: {exc}"
            error = LifespanFailed(f"the lifespan {name_of(self.app.lifespan)} did not {what}{how}")
            log.error("lifespan_failed", "%s", error, exc_info=exc)
            raise error from exc
        finally:
            self._limit = None

    async def _beat_pulse(self) -> None:
        while True:
            self.pulse = time.monotonic()
            await asyncio.sleep(PULSE_SECONDS)

    # --- What nodes ask, and tell ---

    def registered(self, node: Node, worker_id: int) -> None:
        listening = node.waking.is_listening
        line = banner(
            worker_id, self.queues, self.settings, node.turns.limits, listening=listening, at=node.name
        )
        self.announce(line)

    def is_done(self) -> bool:
        """Whether a worker with mode once or drain is done, on all nodes."""
        mode = self.settings.mode
        if self._done:  # some nodes have ended already, so it is too late for more
            return True
        if mode == "forever" or self.held.may_end or any(node.outbox.unwritten for node in self.nodes):
            return False
        looks = [node.waking for node in self.nodes]
        self._done = all(each.looked if mode == "once" else each.nothing_left for each in looks)
        if self._done and self.held.overdue:
            self.stuck()
        if self._done:
            self.wake()
        return self._done

    def is_last(self, node: Node) -> bool:
        """Whether all others failed as often as they may. Modes once and drain do not wait for others."""
        others, most = [each for each in self.nodes if each is not node], self.settings.db_retry_max_attempts
        return self.settings.mode != "forever" or all(each.database.failures >= most for each in others)

    def give_up(self, node: Node, dead: bool) -> None:
        """From a keeper's thread. The process ends when all keepers that reach their database gave up."""
        self._gave_up.add(node)
        others = [each.keeper for each in self.nodes if each not in self._gave_up]
        if all(keeper is None or keeper.failures for keeper in others):
            self.ending.give_up(dead)

    def health(self) -> dict[str, object]:
        """The content of the health file. From a keeper's thread."""
        keepers = [node.keeper for node in self.nodes if node.keeper is not None]
        return {
            "tasks": self.held.taken,
            "circuit": "closed" if self.circuit == "closed" else "open",
            "database": not all(keeper.failures for keeper in keepers),
        }
