"""OpenTelemetry: one trace over a request, its enqueue and the handler. `pip install 'fairq[otel]'`

    fairq.otel.instrument()                                     # where tasks are created
    app = fairq.App(middleware=[fairq.otel.middleware()])       # where they run

With `middleware(waits=dsn)` the span of an attempt also says what the task waited for, at one query each.

Spans follow the semantic conventions for messaging. The group is an attribute of spans only: it has too many
values for a label of metrics.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
from opentelemetry import propagate, trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from fairq import client
from fairq.around import Around
from fairq.batch import Batch
from fairq.connections import Steps
from fairq.context import Context
from fairq.queries import inspection, web

__all__ = ["instrument", "middleware", "uninstrument"]

logger = logging.getLogger("fairq.otel")

CONNECT_SECONDS = 3
ASK_TIMEOUT = "1s"  # then the server gives up
ANSWER_SECONDS = 3.0  # and then we do
AGAIN_SECONDS = 30.0  # after a failure


def instrument(provider: TracerProvider | None = None) -> None:
    """Make each enqueue of this process a span, whose context travels in the headers of its tasks.

    Headers that already name a trace are kept.
    """
    tracer = trace.get_tracer("fairq", tracer_provider=provider)

    def traced(make: client.Make[Any], options: Mapping[str, Any]) -> Steps[Any]:
        about = _about("create", options.get("queue"), options.get("kind"))
        span = tracer.start_span(_name(about), kind=SpanKind.PRODUCER, attributes=about)
        with _ending(span):
            headers: dict[str, Any] = {}
            propagate.inject(headers, trace.set_span_in_context(span))
            given = options.get("headers")
            if given is None or isinstance(given, Mapping):
                options = {**options, "headers": {**headers, **(given or {})}}
            call = make(options)
            groups = call.params[0]
            if not isinstance(groups, str):
                groups = groups.value
                span.set_attribute("messaging.batch.message_count", len(groups))
                groups = groups[0] if len({*groups}) == 1 else None
            if groups is not None:
                span.set_attribute("fairq.group", groups)
            answer = yield call
            if isinstance(answer, int):
                span.set_attribute("messaging.message.id", str(answer))
            return answer

    client.tracing = traced


def uninstrument() -> None:
    client.tracing = None


def middleware(provider: TracerProvider | None = None, *, waits: str | None = None) -> tuple[Around, Around]:
    """Make each attempt a span, a child of the span that created the task. A batch's span links to all of
    them.

    `waits` is the DSN of a login with fairq_work or fairq_observe. With it, recorded spans have two events
    for each task, `fairq.runnable` and `fairq.started`; the latter says behind whom the task waited, and what
    limits its group.
    """
    tracer = trace.get_tracer("fairq", tracer_provider=provider)
    asks = _Waits(waits) if waits else None

    @contextmanager
    def processing(ctx: Context | Batch) -> Iterator[Span]:
        about = _about("process", ctx.queue, ctx.kind)
        tasks = _tasks(ctx)
        creations = [_creation(each) for each in tasks]
        spans = [trace.get_current_span(each).get_span_context() for each in creations]
        links = [Link(each) for each in spans if each.is_valid]
        if isinstance(ctx, Context):
            about |= {"messaging.message.id": str(ctx.id), "fairq.group": ctx.group_key}
            about["fairq.attempt"] = ctx.attempt
            parent = creations[0]
        else:
            about["messaging.batch.message_count"] = len(tasks)
            parent = propagate.extract({})
        span = tracer.start_span(_name(about), parent, SpanKind.CONSUMER, about, links)
        with _ending(span), trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span

    def traced(ctx: Context, call_next: Callable[[], Any]) -> Any:
        with processing(ctx) as span:
            if asks and span.is_recording():
                asks.tell(span, _tasks(ctx))
            return call_next()

    async def atraced(ctx: Context, call_next: Callable[[], Any]) -> Any:
        with processing(ctx) as span:
            if asks and span.is_recording():
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(asks.thread, asks.tell, span, _tasks(ctx))
            return await call_next()

    return traced, atraced


def _tasks(ctx: Context | Batch) -> Sequence[Context]:
    return [ctx] if isinstance(ctx, Context) else ctx.tasks


class _Waits:
    """Reads what tasks waited for, on a connection of its own. Traces must not stop the work: if that fails,
    spans go without these events for a while.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._opened: list[psycopg.Connection[Any]] = []
        weakref.finalize(self, _close, self._opened)
        self._guard = threading.Lock()
        self._not_before = 0.0
        self.thread = ThreadPoolExecutor(1, "fairq-traces")
        """For handlers on a loop, whose own pool may be full."""

    def tell(self, span: Span, tasks: Sequence[Context]) -> None:
        for row in self._read([each.id for each in tasks]):
            about: dict[str, Any] = {"messaging.message.id": str(row.id)}
            span.add_event("fairq.runnable", about, int(row.runnable_at.timestamp() * 1e9))
            about["fairq.wait.seconds"] = (row.started_at - row.runnable_at).total_seconds()
            about["fairq.wait.behind"] = row.behind
            about["fairq.wait.behind_seconds"] = row.behind_seconds
            if row.limited_by is not None:
                about["fairq.wait.limited_by"] = row.limited_by
            span.add_event("fairq.started", about, int(row.started_at.timestamp() * 1e9))

    def _read(self, ids: list[int]) -> list[inspection.ReadWaitsRow]:
        # Not at the top: who creates tasks needs no worker.
        from fairq.worker.connect import FAILURES, answering

        with self._guard:
            if time.monotonic() < self._not_before:
                return []
            try:
                if not self._opened:
                    conn = psycopg.connect(
                        self._dsn,
                        autocommit=True,
                        prepare_threshold=None,
                        client_encoding="utf8",
                        connect_timeout=CONNECT_SECONDS,
                        fallback_application_name="fairq traces",
                    )
                    self._opened.append(conn)
                (conn,) = self._opened
                with answering(conn, ANSWER_SECONDS), conn.transaction():
                    web.beginning(conn, statement_timeout=ASK_TIMEOUT)
                    return inspection.read_waits(conn, ids=ids)
            except FAILURES as exc:
                self._not_before = time.monotonic() + AGAIN_SECONDS
                _close(self._opened)
                logger.warning(
                    "traces do not say what tasks wait for: %s", type(exc).__name__, extra={"action": "trace"}
                )
                return []


def _close(opened: list[psycopg.Connection[Any]]) -> None:
    while opened:
        opened.pop().close()


def _about(operation: str, queue: str | None, kind: str | None) -> dict[str, Any]:
    return {
        "messaging.system": "fairq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": queue or "default",
        "fairq.kind": kind or "default",
    }


def _creation(ctx: Context) -> Any:
    return propagate.extract({name: text for name, text in ctx.headers.items() if isinstance(text, str)})


def _name(about: Mapping[str, Any]) -> str:
    return f"{about['messaging.operation.name']} {about['messaging.destination.name']}"


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    """End the span afterwards, and record an error in it."""
    try:
        yield
    except BaseException as exc:
        span.set_attribute("error.type", type(exc).__qualname__)
        span.set_status(Status(StatusCode.ERROR, str(exc)))
        span.record_exception(exc)
        raise
    finally:
        span.end()
