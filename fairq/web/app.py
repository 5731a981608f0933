"""The ASGI app: routes, answers, and the streams that refresh pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import psycopg
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from fairq import metrics
from fairq.commands.common import plain
from fairq.dsn import mask
from fairq.errors import (
    DatabaseError,
    FairqError,
    NoSuchTask,
    NotAllowed,
    Refused,
    UnknownQueue,
    UnknownSchedule,
)
from fairq.web import pages
from fairq.web.guard import Guard, Rule, asks, form_of, headers_around, keep_csrf, new_csrf, wears_csrf
from fairq.web.signing import check_secret, read_pass
from fairq.web.site import Ask, Page, Site

STREAM_SECONDS = 600.0  # then the browser reconnects
STREAMS = 50  # at once for operators, and as many for tenants
STREAMS_OF_TENANT = 5
MINE_SECONDS = 4.0  # how long a tenant's answer is kept
FOR_TENANTS = 2  # threads for tenants' queries
HEALTH_SECONDS = 1.0  # how long an answer to probes is kept
GLANCE_EVERY = 1.0
SHOWS_ONLY = pages.trouble("Not allowed", 403, "This page does not allow changes.")
FOREIGN_FORM = pages.trouble(
    "Not allowed", 403, "This form is not from this page. Go back and reload the page."
)
LOOK_SECONDS = 0.2  # how often a stream looks whether the server is about to end
BREATHE = 9  # a slow page is computed at most a tenth of the time

Shows = Callable[[Ask], Page]
# Served at their names.
PAGES: tuple[Shows, ...] = (
    *(pages.queues, pages.queue, pages.group, pages.task, pages.workers, pages.failures),
    *(pages.schedules, pages.schedule, pages.upkeep, pages.doctor),
)


def asgi(
    dsn: str | None = None,
    *,
    token: str | None = None,
    allow: Rule | None = None,
    allow_changes: bool | Rule = False,
    secret: str | bytes | None = None,
) -> Web:
    """The page as an ASGI app, to serve or to mount.

    `dsn`: the database; by default FAIRQ_DSN, then DATABASE_URL. A login with fairq_observe sees everything
    except payloads and errors; changes need fairq_admin.
    `token`: lets in whoever has it. `allow`: a function of the request, sync or async, that lets in others.
    `allow_changes`: whether they may also make changes; True, or a function of the request.
    `secret`: signs the links for tenants, see `link`.
    """
    return Web(Site(dsn), Guard(token, allow), allow_changes, secret)


class Web:
    is_over = False
    """Set when the server is about to end: streams end, too."""

    def __init__(
        self, site: Site, guard: Guard, allow_changes: bool | Rule, secret: str | bytes | None
    ) -> None:
        self.site, self.guard, self.secret = site, guard, secret
        if secret:
            check_secret(secret)
        self._allow_changes: Rule = (
            (lambda _: allow_changes) if isinstance(allow_changes, bool) else allow_changes
        )
        self._streams: Counter[str] = Counter()
        self._for_tenants = ThreadPoolExecutor(FOR_TENANTS, "fairq-tenants")
        self._for_probes = ThreadPoolExecutor(1, "fairq-probes")
        starlette = Starlette(
            routes=[
                Route("/", self._page(pages.shares)),
                *(Route(f"/{shows.__name__}", self._page(shows)) for shows in PAGES),
                Route("/preview", partial(self._plan, changes=False), methods=["GET", "POST"]),
                Route("/change", partial(self._plan, changes=True), methods=["POST"]),
                Route("/mine", self._mine),
                Route("/login", self._login, methods=["POST"]),
                Route("/metrics", self._metrics),
                Route("/health", self._health),
                Mount("/static", StaticFiles(packages=[("fairq.web", "static")])),
            ],
            exception_handlers={404: self._nowhere},
            lifespan=self._watching,
        )
        self._answer = headers_around(starlette)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _watching(self, _: Starlette) -> AsyncIterator[None]:
        """Look at the slots even while nobody watches. A mounted app has no lifespan, and does not."""

        async def watch() -> None:
            while True:
                await run_in_threadpool(self._glance)
                await asyncio.sleep(GLANCE_EVERY)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    def _glance(self) -> None:
        with contextlib.suppress(FairqError, psycopg.Error), self.site.ask() as ask:
            self.site.look(ask)

    # --- Pages -------------------------------------------------------------------------------------

    def _page(self, shows: Shows) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            if refusal := await self._refuse(request):
                return refusal
            params = dict(request.query_params)

            async def show() -> Page:
                return await run_in_threadpool(self._show, shows, params)

            if "text/event-stream" in request.headers.get("accept", ""):
                return self._stream(request, show)
            return self._html(request, await show(), await asks(self._allow_changes, request))

        return answer

    def _show(self, shows: Shows, params: Mapping[str, str], changes: bool = False) -> Page:
        """The page, or a page about the error."""
        try:
            if any("\0" in value for value in params.values()):
                raise ValueError("U+0000 is not allowed.")
            with self.site.ask(params, changes=changes) as ask:
                return replace(shows(ask), now=ask.now)
        except (UnknownQueue, UnknownSchedule, NoSuchTask) as exc:
            return pages.trouble("Not found", 404, exc)
        except KeyError as exc:
            return pages.trouble("Bad request", 400, f"{exc.args[0]} is missing.")
        except (Refused, ValueError) as exc:
            return pages.trouble("Bad request", 400, exc)
        except NotAllowed as exc:
            return pages.trouble("The database role may not do this", 403, exc)
        except (DatabaseError, psycopg.Error) as exc:
            return pages.trouble("The database does not answer", 503, exc)

    def _html(self, request: Request, page: Page, may_change: bool) -> Response:
        csrf = new_csrf(request) if may_change else ""
        base = request.scope.get("root_path", "")
        html = self.site.html(page, base, may_change=may_change, csrf=csrf, here=request.url.query)
        answer = HTMLResponse(html, page.status, {"vary": "Accept, Cookie"})
        if may_change:
            keep_csrf(request, answer, csrf)
        return answer

    # --- A tenant's own view -----------------------------------------------------------------------

    async def _mine(self, request: Request) -> Response:
        """The page of a pass, its stream, or JSON. The guard does not apply."""
        text = request.query_params.get("pass", "")
        shown = read_pass(self.secret, text, time.time()) if self.secret else None
        if shown is None:
            return PlainTextResponse("This link has expired.", 404)
        show = partial(self._standing, shown.queue, shown.group_key)
        if "text/event-stream" in request.headers.get("accept", ""):
            ends = min(STREAM_SECONDS, shown.expires - time.time())
            return self._stream(request, show, ends, json.dumps([shown.queue, shown.group_key]))
        page = await show()
        if page.status != 200:
            return PlainTextResponse("This page is not available now.", page.status)
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse(plain(page.shown["mine"]))
        return self._html(request, page, False)

    async def _standing(self, queue: str, group_key: str) -> Page:
        """A tenant's page, kept for some seconds. Its queries have their own threads, so that many tenants
        keep neither operators waiting nor the database busy."""
        key = ("mine", queue, group_key)
        if (kept := self.site.found(key)) is not None:
            page: Page = kept
            return page

        def ask() -> Page:
            show = partial(self._show, pages.mine, {"queue": queue, "group": group_key})
            return self.site.kept(key, MINE_SECONDS, show)

        return await asyncio.get_running_loop().run_in_executor(self._for_tenants, ask)

    # --- Changes -----------------------------------------------------------------------------------

    async def _plan(self, request: Request, changes: bool) -> Response:
        """Preview a change, or make it."""
        if refusal := await self._refuse(request):
            return refusal
        if not await asks(self._allow_changes, request):
            return self._html(request, SHOWS_ONLY, False)
        form = await form_of(request)
        if changes and not wears_csrf(request, form):
            return self._html(request, FOREIGN_FORM, True)
        shows, asked = pages.change if changes else pages.preview, form | dict(request.query_params)
        page = await run_in_threadpool(self._show, shows, asked, changes)
        return self._html(request, page, True)

    # --- Streams -----------------------------------------------------------------------------------

    def _stream(
        self,
        request: Request,
        show: Callable[[], Awaitable[Page]],
        seconds: float = STREAM_SECONDS,
        tenant: str = "",
    ) -> Response:
        of_operators = self._streams[""]
        of_tenants = self._streams.total() - of_operators
        full = of_operators >= STREAMS
        if tenant:  # tenants have their own limit, and each has a smaller one
            full = of_tenants >= STREAMS or self._streams[tenant] >= STREAMS_OF_TENANT
        if full:
            return PlainTextResponse("Too many pages are open.", 503)
        headers = {"x-accel-buffering": "no"}
        base = request.scope.get("root_path", "")
        # Counted before anything is awaited, because many requests may come at once.
        self._streams[tenant] += 1
        return _Stream(self._events(base, show, seconds), headers, partial(self._left, tenant))

    def _left(self, tenant: str) -> None:
        self._streams -= Counter([tenant])  # drops zeros

    async def _events(
        self, base: str, show: Callable[[], Awaitable[Page]], seconds: float
    ) -> AsyncIterator[str]:
        """The live part of a page whenever it has changed, else a comment."""
        ends, before = time.monotonic() + seconds, ""
        while time.monotonic() < ends and not self.is_over:
            started = time.monotonic()
            page = await show()
            if page.status != 200:
                yield _event(json.dumps(page.title), "trouble")
            else:
                html = await run_in_threadpool(self.site.live, page, base)
                yield _event(html) if html != before else ": still here\n\n"
                before = html
            if page.every is None:
                return
            pause = max(page.every, BREATHE * (time.monotonic() - started))
            while pause > 0 and not self.is_over:
                await asyncio.sleep(min(pause, LOOK_SECONDS))
                pause -= LOOK_SECONDS

    # --- Around ------------------------------------------------------------------------------------

    async def _refuse(self, request: Request) -> Response | None:
        if await self.guard.admits(request):
            return None
        given = request.query_params.get("token")
        if given and (answer := self.guard.login(request, given)):
            return answer
        shown = {"database": "", "has_token": self.guard.has_token}
        return self._html(request, Page("login.html", "Log in", shown, None, 401), False)

    async def _login(self, request: Request) -> Response:
        form = await form_of(request)
        if answer := self.guard.login(request, form.get("token", "")):
            return answer
        return RedirectResponse(request.scope.get("root_path", "") + "/", 303)

    async def _metrics(self, request: Request) -> Response:
        if refusal := await self._refuse(request):
            return refusal

        def read() -> str:
            with self.site.ask() as ask:
                return metrics.render(ask.conn)

        try:
            return Response(await run_in_threadpool(read), media_type=metrics.CONTENT_TYPE)
        except (FairqError, psycopg.Error) as exc:
            return PlainTextResponse(mask(str(exc)), 503)

    async def _health(self, request: Request) -> Response:
        """For probes: whether the database answers. It shows nothing else, so it needs no token. However many
        ask, one connection is made at a time, and none for a second, so that strangers keep nobody waiting.
        """

        def look() -> bool:
            with contextlib.suppress(FairqError, psycopg.Error), self.site.ask():
                return True
            return False

        kept = partial(self.site.kept, ("health",), HEALTH_SECONDS, look)
        is_well = await asyncio.get_running_loop().run_in_executor(self._for_probes, kept)
        return JSONResponse({"ok": is_well}, 200 if is_well else 503)

    async def _nowhere(self, request: Request, exc: Exception) -> Response:
        page = pages.trouble("Not found", 404, "There is no such page.")
        page.shown["database"] = ""
        return self._html(request, page, False)


class _Stream(StreamingResponse):
    """Calls `over` when it ends, however that happens."""

    def __init__(
        self, events: AsyncIterator[str], headers: Mapping[str, str], over: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


def _event(data: str, kind: str = "message") -> str:
    lines = "".join(f"data: {line}\n" for line in data.splitlines())
    return f"event: {kind}\n{lines}\n"
