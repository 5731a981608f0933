"""A network between a client and the test server, over TCP, that can be cut, or can stop to carry anything.

with proxy(server.dsn("fairq")) as network:
    psycopg.connect(network.dsn)
    network.cut()       # connections break, and new ones are refused
    network.freeze()    # connections are taken, and nothing arrives
    network.mend()
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["Network", "proxy"]

Writer = asyncio.StreamWriter


class Network:
    """All methods but the loop's own may be called from any thread, and return when they are done."""

    def __init__(self, dsn: str) -> None:
        self._parts = conninfo_to_dict(dsn)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._carries = asyncio.Event()
        self._carries.set()
        self._door: asyncio.Server | None = None
        self._ends: set[Writer] = set()
        self._carriers: set[asyncio.Task[None]] = set()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port: int = probe.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", hostaddr=None, port=self._port, sslmode="disable")

    def start(self) -> None:
        self._thread.start()
        self._do(self._open)

    def cut(self) -> None:
        self._do(self._cut)

    def freeze(self) -> None:
        self._do(self._freeze)

    def mend(self) -> None:
        self._do(self._open)

    def close(self) -> None:
        self._do(self._cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(20)

    # --- On the loop ---

    async def _open(self) -> None:
        self._carries.set()
        if self._door is None:
            self._door = await asyncio.start_server(self._carry, "127.0.0.1", self._port)

    async def _freeze(self) -> None:
        self._carries.clear()

    async def _cut(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
            for _ in range(3):  # whoever was let in at this moment gets his carrier
                await asyncio.sleep(0)
        for end in self._ends:
            end.transport.abort()  # a reset, not a farewell
        self._carries.set()
        if self._carriers:
            await asyncio.wait(self._carriers, timeout=5)

    async def _carry(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carriers.add(task)
        ends = {writer}
        self._ends.add(writer)
        try:
            with contextlib.suppress(OSError):
                await self._carries.wait()
                server_reader, server_writer = await self._reach_server()
                ends.add(server_writer)
                self._ends.add(server_writer)
                await asyncio.gather(self._pump(reader, server_writer), self._pump(server_reader, writer))
        finally:
            for end in ends:
                end.transport.abort()
            self._ends -= ends
            self._carriers.discard(task)

    async def _reach_server(self) -> tuple[asyncio.StreamReader, Writer]:
        host, port = str(self._parts.get("host") or "localhost"), self._parts.get("port") or 5432
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, int(port))

    async def _pump(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._carries.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.contextmanager
def proxy(dsn: str) -> Iterator[Network]:
    """A way to that server by TCP, whether it listens on TCP or on a Unix socket."""
    network = Network(dsn)
    network.start()
    try:
        yield network
    finally:
        network.close()
