"""Who may see the page and make changes, and what a browser may do with it."""

from __future__ import annotations

import hashlib
import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairq.errors import ConfigurationError

Rule = Callable[[Request], bool | Awaitable[bool]]

SHORTEST_TOKEN = 16
HERE = ("localhost", "127.0.0.1", "::1")
COOKIE, CSRF_COOKIE = "fairq_web", "fairq_csrf"
LONGEST_FORM = 64 * 1024

# Nothing from elsewhere, nothing inline, no frames: a tenant's text stays text, even if escaping fails.
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",  # with no-referrer a form would come from the origin "null"
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def headers_around(app: ASGIApp) -> ASGIApp:
    """Set the same headers on every answer, errors included. Only files are cached, and asked for again."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                own = {**HEADERS, "cache-control": "no-cache" if b"etag" in there else "no-store"}
                message["headers"] += [(name.encode(), value.encode()) for name, value in own.items()]
            await send(message)

        await app(scope, receive, with_headers if scope["type"] == "http" else send)

    return guarded


def from_here(request: Request) -> bool:
    """Whether a browser on this machine asked for this host: the owner of a name may point it here."""
    host = _split(f"//{request.headers.get('host', '')}").hostname
    client = request.client.host if request.client else ""
    return host in HERE and client in ("127.0.0.1", "::1", "testclient")


class Guard:
    """Lets in whoever has the token, or is allowed by the rule."""

    def __init__(self, token: str | None, allow: Rule | None) -> None:
        if not token and allow is None:
            raise ConfigurationError(
                "nobody may see the page",
                "Pass token=…, or allow=…, a function of the request that returns True to let it in.",
            )
        if token and len(token) < SHORTEST_TOKEN:
            raise ConfigurationError(
                f"the token has {len(token)} characters",
                f"It needs {SHORTEST_TOKEN}: python -c 'import secrets; print(secrets.token_urlsafe())'",
            )
        self._token, self._allow, self.has_token = token, allow, bool(token)
        # The cookie is not the token: neither can be computed from the other without the token.
        self._cookie = hmac.digest((token or "").encode(), b"fairq cookie", hashlib.sha256).hex()

    async def admits(self, request: Request) -> bool:
        if self._token:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() == "bearer" and _same(given.strip(), self._token):
                return True
            if _same(request.cookies.get(COOKIE, ""), self._cookie):
                return True
        return self._allow is not None and await asks(self._allow, request)

    def login(self, request: Request, given: str) -> Response | None:
        """With the right token, set a cookie and redirect to the address without the token."""
        if not self._token or not _same(given, self._token):
            return None
        answer = RedirectResponse(request.scope.get("root_path", "") + "/", 303)
        # Lax, because links in messages may lead here. Changes have their own check.
        _give_cookie(request, answer, COOKIE, self._cookie, "lax")
        return answer


def _give_cookie(
    request: Request, answer: Response, name: str, value: str, samesite: Literal["lax", "strict"]
) -> None:
    path, secure = request.scope.get("root_path", "") or "/", request.url.scheme == "https"
    answer.set_cookie(name, value, path=path, httponly=True, samesite=samesite, secure=secure)


async def asks(rule: Rule, request: Request) -> bool:
    answer = rule(request)
    return bool(await answer) if inspect.isawaitable(answer) else bool(answer)


def _split(address: str) -> SplitResult:
    """The parts of an address that a stranger sent; empty if it is invalid."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


# --- Forms -----------------------------------------------------------------------------------------


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; none if it is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_FORM:
            return {}
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def new_csrf(request: Request) -> str:
    return request.cookies.get(CSRF_COOKIE) or secrets.token_urlsafe()


def keep_csrf(request: Request, answer: Response, csrf: str) -> None:
    if CSRF_COOKIE not in request.cookies:
        _give_cookie(request, answer, CSRF_COOKIE, csrf, "strict")


def wears_csrf(request: Request, form: dict[str, str]) -> bool:
    """Whether a form came from our page: the browser says so, and the form repeats our cookie."""
    cookie = request.cookies.get(CSRF_COOKIE, "")
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None and site != "same-origin":
        return False
    if origin is not None and _split(origin).netloc != request.headers.get("host", ""):
        return False
    return bool(cookie) and _same(form.get("csrf", ""), cookie)
