"""`fairq web`: serves the web page."""

from __future__ import annotations

import contextlib
import secrets
import signal
from urllib.parse import urlencode

import click

from fairq.cli import Failure, amount, command, named_dsn, option
from fairq.web import asgi
from fairq.web.guard import HERE, from_here
from fairq.web.serve import PORT, bound, server


@command(
    codes={0: "ended by you", 1: "cannot listen there"},
    rights="fairq_observe; payloads, errors and changes need fairq_admin",
    json=False,
)
@option("--host ADDRESS", "Where to listen.", default="127.0.0.1")
@amount("--port", PORT, "Which port; 0: any free one.", least=0, most=65535)
@option(
    "--token TEXT",
    "Lets in whoever has it. Default: FAIRQ_WEB_TOKEN, or a new one if other machines can connect.",
    envvar="FAIRQ_WEB_TOKEN",
)
@option(
    "--secret TEXT",
    "Signs the links for tenants. Default: FAIRQ_WEB_SECRET; without one there are no links.",
    envvar="FAIRQ_WEB_SECRET",
)
@option("--allow-changes", "Let users of the page make changes.")
def web(host: str, port: int, token: str | None, secret: str | None, allow_changes: bool) -> None:
    """The page shows tenants and what they receive, queues, tasks and why they wait, workers, failures and
    the upkeep. It refreshes by itself, and changes nothing unless you allow it.

    fairq web                  for browsers on this machine
    fairq web --host 0.0.0.0   also for other machines; prints a token
    fairq web --allow-changes  pause, limits, cancel, retry, each with a preview
    """
    if token is None and host not in HERE:
        token = secrets.token_urlsafe()
    allow = None if token else from_here
    app = asgi(named_dsn(), token=token, allow=allow, allow_changes=allow_changes, secret=secret)
    try:
        listening = bound(host, port)
    except OSError as exc:
        text = f"cannot listen at {host}, port {port}: {exc.strerror}"
        hint = "Choose another port: --port N, or --port 0 for any free one."
        raise Failure(text, hint=hint, code="port") from exc
    with listening:
        shown = f"[{host}]" if ":" in host else host
        query = "?" + urlencode({"token": token}) if token else ""
        click.echo(f"http://{shown}:{listening.getsockname()[1]}/{query}")
        # As for Ctrl-C: uvicorn passes the signal on when it has ended.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            server(app).run([listening])
