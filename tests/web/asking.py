"""Call the page's app as a browser would, without a network, for whole answers and streams."""

import asyncio
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import unquote, urlencode

from starlette.types import ASGIApp, Message, Scope

from fairq import web
from tests.support.database import Database

TOKEN = "a-token-of-more-than-sixteen-characters"
STREAM = {"accept": "text/event-stream"}


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: dict[str, str]
    parts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Browser:
    """A browser that keeps cookies and follows no redirects."""

    app: ASGIApp
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self._ask("GET", path, headers or {}, b"", None)

    def post(self, path: str, data: dict[str, str], headers: dict[str, str] | None = None) -> Answer:
        return self._ask("POST", path, headers or {}, urlencode(data).encode(), None)

    def stream(self, path: str, events: int = 1) -> Answer:
        """The first events of a stream. Then the browser disconnects, and the stream has to end."""
        return self._ask("GET", path, STREAM, b"", events)

    def streams(self, paths: list[str]) -> list[int]:
        """The status of each of these streams, all open at once."""

        async def all_of_them() -> list[int]:
            all_open = asyncio.Barrier(len(paths))
            calls = [_call(self.app, self._scope("GET", path, STREAM), b"", 1, all_open) for path in paths]
            return [each.status_code for each in await asyncio.gather(*calls)]

        return asyncio.run(asyncio.wait_for(all_of_them(), 60))

    def gets(self, paths: list[str]) -> list[int]:
        """The status of each of these, asked for at once."""

        async def all_of_them() -> list[int]:
            calls = [_call(self.app, self._scope("GET", path, {}), b"", None) for path in paths]
            return [each.status_code for each in await asyncio.gather(*calls)]

        return asyncio.run(asyncio.wait_for(all_of_them(), 60))

    def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes, events: int | None
    ) -> Answer:
        scope = self._scope(method, path, headers)
        answer = asyncio.run(asyncio.wait_for(_call(self.app, scope, body, events), 60))
        cookies = SimpleCookie(answer.headers.get("set-cookie", ""))
        self.cookies |= {name: each.value for name, each in cookies.items()}
        return answer

    def _scope(self, method: str, path: str, headers: dict[str, str]) -> Scope:
        plain, _, query = path.partition("?")
        sent = {"host": "localhost", "cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
        return {
            "type": "http",
            "method": method,
            "path": unquote(plain),
            "raw_path": plain.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in (sent | headers).items()],
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 5000),
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }


async def _call(
    app: ASGIApp, scope: Scope, body: bytes, events: int | None, all_open: asyncio.Barrier | None = None
) -> Answer:
    asked, enough = False, asyncio.Event()
    start: dict[str, Any] = {}
    parts: list[str] = []

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            if all_open:
                await all_open.wait()
        elif message.get("body"):
            parts.append(message["body"].decode())
        if events is not None and len(parts) >= events:
            enough.set()

    await app(scope, receive, send)
    headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    return Answer(start["status"], headers, parts)


def client(database: Database | str, **options: Any) -> Browser:
    """A browser on a page that lets everybody in, unless the options say otherwise."""
    dsn = database if isinstance(database, str) else database.dsn
    if "token" not in options:
        options.setdefault("allow", lambda request: True)
    return Browser(web.asgi(dsn, **options))


def page(browser: Browser, path: str, status: int = 200) -> "Seen":
    answer = browser.get(path)
    assert answer.status_code == status, answer.text
    return Seen(answer.text)


class Seen(HTMLParser):
    """A parsed page: its elements with their attributes, its links and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self._texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    @property
    def links(self) -> list[str]:
        return [each["href"] or "" for tag, each in self.elements if tag == "a" and "href" in each]
