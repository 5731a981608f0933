"""OpenTelemetry: one trace over a request, the enqueue and the handler. `pip install 'fairq[otel]'`

    fairq.otel.instrument()                                     # where tasks are created
    app = fairq.App(middleware=[fairq.otel.middleware()])       # where they run

Spans are called and described as the semantic conventions for messaging say. The group is an attribute of
spans; for a label of metrics it has too many values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from fairq import client
from fairq.around import Around
from fairq.batch import Batch
from fairq.connections import Steps
from fairq.context import Context

__all__ = ["instrument", "middleware", "uninstrument"]


def instrument(provider: TracerProvider | None = None) -> None:
    """From now on each enqueue of this process is a span, whose context travels in the headers of its tasks.

    Headers that name a trace already stay as they are.
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


def middleware(provider: TracerProvider | None = None) -> tuple[Around, Around]:
    """Each attempt is a span, a child of the one that created the task. That of a batch has links to all of
    these.
    """
    tracer = trace.get_tracer("fairq", tracer_provider=provider)

    @contextmanager
    def processing(ctx: Context | Batch) -> Iterator[None]:
        about = _about("process", ctx.queue, ctx.kind)
        tasks = [ctx] if isinstance(ctx, Context) else ctx.tasks
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
            yield

    def traced(ctx: Context, call_next: Callable[[], Any]) -> Any:
        with processing(ctx):
            return call_next()

    async def atraced(ctx: Context, call_next: Callable[[], Any]) -> Any:
        with processing(ctx):
            return await call_next()

    return traced, atraced


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
    """The span ends with this, and is told of an error."""
    try:
        yield
    except BaseException as exc:
        span.set_attribute("error.type", type(exc).__qualname__)
        span.set_status(Status(StatusCode.ERROR, str(exc)))
        span.record_exception(exc)
        raise
    finally:
        span.end()
