"""A worker on Citus, which serves all nodes side by side. Every node knows the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

import psycopg

from fairq import citus
from fairq.errors import FairqError
from fairq.worker import log
from fairq.worker.connect import FAILURES, conninfo, explain
from fairq.worker.node import Node

if TYPE_CHECKING:
    from fairq.worker.engine import Engine

# How often to look for new nodes, and to retry those that refused us.
LOOK_SECONDS: Final = 15.0
# How long to wait for a node's list of nodes.
ANSWER_SECONDS: Final = 3.0


class Cluster:
    """`near` is the number of the node to ask first."""

    def __init__(self, engine: Engine, near: int | None) -> None:
        self._engine = engine
        self._near = near
        self._nodes: dict[int, Node] = {}
        self._running: dict[asyncio.Task[None], Node] = {}
        self._refused: BaseException | None = None

    async def run(self, found: list[citus.Node]) -> None:
        """Run until all nodes have ended. An error ends all, unless its node never worked."""
        self._serve(found)
        looking = asyncio.create_task(self._look())
        try:
            while self._running:
                await asyncio.wait({looking, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in self._running if each.done()]:
                    await self._ended(task)
                if looking.done():
                    self._serve(looking.result())
                    looking = asyncio.create_task(self._look())
        finally:
            looking.cancel()
            if self._running:
                await self._end()
        if self._refused is not None and self._engine.settings.mode != "forever":
            raise self._refused

    async def _end(self) -> None:
        for task in self._running:
            task.cancel()
        try:
            await asyncio.wait(self._running)
        except asyncio.CancelledError:  # a second time: still leave nothing running
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)
            raise

    def _serve(self, found: list[citus.Node]) -> None:
        there = {each.group for each in found}
        gone = {node.dsn: group for group, node in self._nodes.items() if group not in there}
        for each in found:
            dsn, name = each.dsn(self._engine.dsn), f"{each.host}:{each.port}"
            if each.group not in self._nodes and dsn in gone:  # removed and added again
                self._nodes[each.group] = self._nodes.pop(gone[dsn])
            known = self._nodes.get(each.group)
            if known is None:
                node = self._engine.node(dsn, name, each.group == self._near)
                # Citus connects nodes directly, without a pooler.
                node.database.prepare_statements()
                self._nodes[each.group] = node
                self._running[asyncio.create_task(node.run(), name=f"fairq-node-{each.group}")] = node
            elif known.dsn != dsn:
                log.info("node_moved", "the node at %s is at %s now", known.name, name)
                known.lead_to(dsn, name)

    async def _ended(self, task: asyncio.Task[None]) -> None:
        node = self._running.pop(task)
        exc = None if task.cancelled() else task.exception()
        if exc is None:
            return
        if node.keeper is not None or not isinstance(exc, FairqError | psycopg.Error):
            raise exc
        self._refused = exc
        if not self._running:
            raise exc
        log.warning("node_refused", "%s is not served: %s", node.name, explain(exc))
        self._nodes = {group: each for group, each in self._nodes.items() if each is not node}
        await self._engine.dismiss(node)

    async def _look(self) -> list[citus.Node]:
        """After a while, the nodes that the first node to answer lists; empty if none answers."""
        await asyncio.sleep(LOOK_SECONDS * random.uniform(0.75, 1.25))
        for node in sorted(self._nodes.values(), key=lambda node: node.database.failures > 0):
            with contextlib.suppress(*FAILURES):
                to = conninfo(node.dsn, "fairq nodes")
                async with (
                    asyncio.timeout(ANSWER_SECONDS),
                    await psycopg.AsyncConnection[Any].connect(to, autocommit=True) as conn,
                ):
                    return (await citus.around(conn))[1]
        return []
