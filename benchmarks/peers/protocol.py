"""What an adapter is asked and what it says: the Python half. The JavaScript half is protocol.mjs.

An adapter is a process of its own, in an environment of its own, so this file needs nothing but the standard
library. It is started as `python -m benchmarks.peers.run <name> <role>` with these roles:

    about      prints one line: version, configuration, fairness option, what is missing, documentation
    setup      makes the peer's tables in an empty database
    enqueue    answers requests from standard input, one line each, until that ends
    work       runs the peer's own worker with a real handler until it is told to stop; says every 50 ms how
               many handlers have started, and for watched tasks when they were sent and when they started

What is printed is JSON, one object a line; anything else a peer prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, ClassVar, TextIO

REPORT_SECONDS = 0.05
NOTE = "x" * 60

Payload = dict[str, Any]


@dataclass(frozen=True)
class About:
    """What readers must know of a peer to judge its numbers."""

    package: str
    configuration: str  # how the worker is set up for throughput
    lacks: tuple[str, ...]
    docs: tuple[str, ...]
    fairness: str = ""  # the option that keeps tenants apart; "" if there is none
    always_fair: bool = False


class Peer:
    """One queue. `fair` says whether the option that keeps tenants apart is on."""

    about: ClassVar[About]
    left: ClassVar[str]  # a query: how many tasks are not finished

    def __init__(self, dsn: str, fair: bool) -> None:
        self.dsn, self.fair = dsn, fair

    async def setup(self) -> None:
        raise NotImplementedError

    async def open(self) -> None:
        """Prepare to enqueue."""

    async def enqueue(self, payloads: list[Payload]) -> None:
        """Enqueue all of them by the peer's fastest documented call."""
        raise NotImplementedError

    async def work(self, slots: int | None) -> None:
        """Run `handle` for each task, `slots` at once; None: as many as suit the peer best."""
        raise NotImplementedError


# --- Handlers ----------------------------------------------------------------------------------------


@dataclass
class Starts:
    """What the handlers of this process have seen so far."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0
    watched: list[tuple[str, float, float]] | None = None


STARTS = Starts(watched=[])
LOCK = threading.Lock()


def started(payload: Payload) -> None:
    now = time.time()
    with LOCK:
        STARTS.first = STARTS.first or now
        STARTS.last = now
        STARTS.count += 1
        if payload["sent"] and STARTS.watched is not None:
            STARTS.watched.append((payload["group"], payload["sent"], now))


async def handle(payload: Payload) -> None:
    started(payload)
    if payload["ms"]:
        await asyncio.sleep(payload["ms"] / 1000)


def handle_in_thread(payload: Payload) -> None:
    started(payload)
    if payload["ms"]:
        time.sleep(payload["ms"] / 1000)


# --- Roles -------------------------------------------------------------------------------------------


def main(peer: type[Peer], role: str) -> None:
    with _own_output() as out:
        match role:
            case "about":
                facts = asdict(peer.about) | {"version": _version(peer.about.package), "left": peer.left}
                say(out, facts)
            case "setup":
                asyncio.run(_made(peer).setup())
                say(out, {"done": True})
            case "enqueue":
                asyncio.run(_enqueue(_made(peer), out))
            case "work":
                _report(out)
                slots = int(os.environ.get("PEER_SLOTS", "0")) or None
                asyncio.run(_made(peer).work(slots))


def _made(peer: type[Peer]) -> Peer:
    return peer(os.environ["PEER_DSN"], bool(os.environ.get("PEER_FAIR")))


async def _enqueue(peer: Peer, out: TextIO) -> None:
    await peer.open()
    say(out, {"ready": True})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        say(out, await answer(peer, json.loads(line)))


async def answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Enqueue on request, in calls of `batch` tasks with `pause` seconds after each."""
    payloads = made(request)
    enqueued, seconds = 0, 0.0
    while batch := list(islice(payloads, request["batch"])):
        start = time.perf_counter()
        if request["watched"]:
            for payload in batch:
                payload["sent"] = time.time()
        await peer.enqueue(batch)
        seconds += time.perf_counter() - start
        enqueued += len(batch)
        if seconds > request["seconds"]:
            break
        if request["pause"]:
            await asyncio.sleep(request["pause"])
    return {"enqueued": enqueued, "seconds": seconds}


def made(request: dict[str, Any]) -> Iterator[Payload]:
    for number in range(request["count"]):
        group = request["group"] or f"group {number % 100}"
        yield {"group": group, "ms": request["ms"], "sent": 0, "note": NOTE}


def _report(out: TextIO) -> None:
    def run() -> None:
        said = -1
        while True:
            time.sleep(REPORT_SECONDS)
            with LOCK:
                count, first, last, watched = STARTS.count, STARTS.first, STARTS.last, STARTS.watched
                STARTS.watched = []
            if count != said:
                say(out, {"count": count, "first": first, "last": last, "starts": watched})
                said = count

    def watch() -> None:
        sys.stdin.read()  # ends when the process that started us is gone
        os._exit(0)

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    threading.Thread(target=watch, daemon=True).start()
    threading.Thread(target=run, daemon=True).start()


def say(out: TextIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


@contextlib.contextmanager
def _own_output() -> Iterator[TextIO]:
    """Reserve standard output for reports, so that libraries' prints do not get between the lines."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
