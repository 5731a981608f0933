"""What pages need: the database, the templates, and what was seen of the slots."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import urlencode

import jinja2
import psycopg

from fairq import install
from fairq.commands.common import Connection, connect, number, span
from fairq.commands.queues import limits
from fairq.commands.schedules import rule
from fairq.dsn import clean, describe, resolve
from fairq.errors import translating
from fairq.outcome import told
from fairq.queries import web as queries
from fairq.web.timeline import Looks

T = TypeVar("T")

TIMEOUT = "5s"  # of a statement, so that a page does not become the load
CHANGE_TIMEOUT = "1min"
CONNECTIONS = 8  # at once; further requests wait for one
LOOK_EVERY = timedelta(seconds=0.9)


@dataclass(frozen=True)
class Ask:
    """A request: its parameters, on a connection."""

    site: Site
    conn: Connection
    now: datetime
    params: Mapping[str, str]


@dataclass(frozen=True)
class Page:
    """A template with its content. A live page is refreshed every so many seconds."""

    template: str
    title: str
    shown: dict[str, Any] = field(default_factory=dict)
    every: float | None = 2.0
    status: int = 200
    now: datetime | None = None
    """The database's time; None: it was not asked."""


class AtLeast(int):
    """A count that reached its bound."""


def less(in_line: int, others: int, most: int) -> int:
    """A count up to a bound, minus others that it includes."""
    left = max(min(in_line, most - 1) - others, 0)
    return AtLeast(left) if in_line >= most else left


class Site:
    def __init__(self, dsn: str | None) -> None:
        self.dsn = resolve(dsn)
        self.name = describe(self.dsn)
        self.looks = Looks()
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self._checked = False
        self._guard = threading.Lock()
        self._kept: dict[tuple[Any, ...], tuple[float, Any]] = {}
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("fairq.web"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "number": number,
            "span": span,
            "reason": reason_text,
            "share": lambda value: "" if value is None else f"{value:.1%}",
            "text": lambda value: clean(str(value)),
            "lines": lambda value: "\n".join(map(clean, str(value).replace("\t", "    ").split("\n"))),
            "moment": lambda at: "" if at is None else f"{at:%Y-%m-%d %H:%M:%S}",
        }
        parts: Any = self._templates.get_template("parts.html").module
        # As globals, because the live part of a page is rendered without the head of its template.
        macros = {
            name: getattr(parts, name)
            for name in ("bar", "debt_bar", "many", "pause_of", "settings_form", "share_bar", "state_of")
        }
        functions = {each.__name__: each for each in (less, limits, rule, told)}
        self._templates.globals |= functions | macros

    @contextlib.contextmanager
    def ask(self, params: Mapping[str, str] | None = None, *, changes: bool = False) -> Iterator[Ask]:
        """A transaction for one page, read only unless it `changes` something."""
        with self._connections, contextlib.closing(connect(self.dsn)) as conn, translating():
            if not self._checked:
                install.check_version(conn)
                self._checked = True
            conn.read_only, timeout = not changes, CHANGE_TIMEOUT if changes else TIMEOUT
            # One snapshot for the whole page. Changes promote, which needs READ COMMITTED.
            if not changes:
                conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            with conn.transaction():
                begun = queries.beginning(conn, statement_timeout=timeout)
                yield Ask(self, conn, begun.now, params or {})

    def found(self, key: tuple[Any, ...]) -> Any:
        """The cached answer, if there is one."""
        with self._guard:
            until, answer = self._kept.get(key, (0.0, None))
        return answer if until > time.monotonic() else None

    def kept(self, key: tuple[Any, ...], seconds: float, ask: Callable[[], T]) -> T:
        """An expensive answer, cached for so many seconds."""
        answer: T | None = self.found(key)
        if answer is None:
            answer = ask()
            now = time.monotonic()
            with self._guard:
                self._kept = {each: kept for each, kept in self._kept.items() if kept[0] > now}
                self._kept[key] = now + seconds, answer
        return answer

    def look(self, ask: Ask) -> None:
        """Record who has the slots now, unless that was just done."""
        if self.looks.is_due(ask.now, LOOK_EVERY):
            queues = queries.queue_names(ask.conn)
            held = [(each.queue, each.group_key, each.slots) for each in queries.held_now(ask.conn)]
            self.looks.add(ask.now, queues, held)

    def html(self, page: Page, base: str, **more: Any) -> str:
        return self._templates.get_template(page.template).render(self._context(page, base) | more)

    def live(self, page: Page, base: str, **more: Any) -> str:
        template = self._templates.get_template(page.template)
        context = template.new_context(self._context(page, base) | more)
        return "".join(template.blocks["live"](context))

    def _context(self, page: Page, base: str) -> dict[str, Any]:
        def to(path: str, **query: Any) -> str:
            return url(base + path, **query)

        def ago(at: datetime | None) -> str:
            return "" if at is None or page.now is None else span(max((page.now - at).total_seconds(), 0))

        about = {"title": page.title, "database": self.name, "every": page.every, "now": page.now}
        return {**about, "url": to, "ago": ago, **page.shown}


_MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)(?:\.\d+)?[+-]\d\d(?::\d\d)*")


def reason_text(reason: str, group_key: str | None = None) -> str:
    """The engine's reason, with shorter times, and without the name of the group that it stands beside."""
    return clean(_MOMENT.sub(r"\1 \2", reason.removeprefix(f'group "{group_key}": ')))


def url(path: str, **query: Any) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return path + ("?" + urlencode(given) if given else "")
