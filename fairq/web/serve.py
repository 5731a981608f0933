"""Serves the page on a port."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from fairq.web.app import Web

PORT = 8377
GRACE_SECONDS = 1  # for open streams when it ends; browsers reconnect


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.is_over = True  # type: ignore[union-attr]
        await super().shutdown(sockets)


def server(app: Web) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # addresses may hold tokens
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


@contextlib.contextmanager
def in_background(app: Web) -> Iterator[str]:
    """Serve this machine in a thread, at the usual port if it is free. Yields the address."""
    try:
        listening = bound("127.0.0.1", PORT)
    except OSError:
        listening = bound("127.0.0.1", 0)
    serving = server(app)
    thread = threading.Thread(target=serving.run, args=([listening],), name="fairq-web", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        serving.should_exit = True
        thread.join()
        listening.close()
