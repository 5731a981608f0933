"""One trace over a request, its enqueue and the handler, with OpenTelemetry's own in-memory exporter."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, LiteralString

import psycopg
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

import fairq
import fairq.otel
from fairq import testing
from fairq.worker import Worker
from tests.api.kinds import Opened
from tests.support.calls import call, one, run
from tests.support.database import Database
from tests.support.proxy import proxy
from tests.support.sessions import wait_until
from tests.worker.running import worker_thread

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("the application")

app = fairq.App(middleware=[fairq.otel.middleware(provider)])


@app.task
def parse(payload: str) -> None:
    get_current_span().set_attribute("pages", 3)
    if payload == "breaks":
        raise fairq.Fail("no such file")


@app.task
async def aparse(payload: str) -> None:
    await asyncio.sleep(0)
    with tracer.start_as_current_span("inside"):
        await asyncio.sleep(0)


@app.task(batch=10)
def several(numbers: list[int]) -> None: ...


@pytest.fixture(autouse=True)
def spans() -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    fairq.otel.instrument(provider)
    yield exporter
    fairq.otel.uninstrument()


def ended() -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def parent(span: ReadableSpan) -> Any:
    assert span.parent is not None
    return span.parent.span_id


def own(span: ReadableSpan) -> Any:
    assert span.context is not None
    return span.context.span_id


def test_one_trace_leads_from_the_request_to_the_handler(database: Database) -> None:
    """With a worker: the attempt is a child of the enqueue, and linked to it."""
    conn = database.connect(autocommit=True)
    with tracer.start_as_current_span("request"):
        id = aparse.enqueue(conn, "bob", "a")
    Worker(app, database.dsn, mode="drain").run()
    found = ended()
    assert found.keys() == {"request", "create default", "process default", "inside"}
    request, create, process = found["request"], found["create default"], found["process default"]
    assert len({span.context.trace_id for span in found.values() if span.context}) == 1
    assert [parent(create), parent(process), parent(found["inside"])] == [
        own(request),
        own(create),
        own(process),
    ]
    assert [link.context.span_id for link in process.links] == [own(create)]
    assert (create.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert create.attributes == {
        "messaging.system": "fairq",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "default",
        "messaging.message.id": str(id),
        "fairq.kind": "aparse",
        "fairq.group": "bob",
    }
    assert process.attributes == {
        **create.attributes,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "fairq.attempt": 1,
    }


def test_a_span_says_what_its_task_waited_for(database: Database) -> None:
    """Behind whom it waits, by the ledger, and what limits its group: here a cap."""
    conn = database.connect(autocommit=True)
    waits = fairq.App(middleware=[fairq.otel.middleware(provider, waits=database.dsn_as("fairq_observe"))])

    @waits.task
    async def slow(payload: int) -> None: ...

    @waits.task
    def slow_too(payload: int) -> None: ...

    call(conn, "configure_group", "default", "bob", max_running=1)
    slow.enqueue(conn, "bob", 1)
    slow_too.enqueue(conn, "bob", 2)
    began = run(
        conn,
        "update fairq.tasks set (created_at, run_at) = (created_at - x.past, run_at - x.past)"
        " from (values (interval '100 seconds')) x(past) returning greatest(created_at, run_at)",
    )
    for group, seconds in (("alice", 20.0), ("carol", 5.0), ("bob", 3.0), ("", 90.0)):
        run(
            conn,
            "insert into fairq.ledger select 0, 1, b, b + interval '30 seconds', null, 1, 1, 1, 1, %s,"
            " 1, 1, 1, 1, 0, false, 'default', %s, '{}'"
            " from (select fairq._ledger_begin(clock_timestamp() - interval '40 s')) x(b)",
            seconds,
            group,
        )
    Worker(waits, database.dsn, mode="drain", concurrency=1).run()
    first, second = (span for span in exporter.get_finished_spans() if span.kind == SpanKind.CONSUMER)
    for span, (runnable_at,) in zip((first, second), began, strict=True):
        runnable, started = span.events
        assert (runnable.name, started.name) == ("fairq.runnable", "fairq.started")
        assert runnable.timestamp == pytest.approx(runnable_at.timestamp() * 1e9, rel=1e-12)
        assert started.attributes is not None
        assert started.attributes["fairq.wait.seconds"] == pytest.approx(100, abs=30)
        assert started.attributes["fairq.wait.behind"] == ("alice", "carol")
        assert started.attributes["fairq.wait.behind_seconds"] == (20.0, 5.0)
    assert first.events[1].attributes is not None
    assert "cap is 1" in str(first.events[1].attributes["fairq.wait.limited_by"])
    assert second.events[1].attributes is not None
    assert "fairq.wait.limited_by" not in second.events[1].attributes


def test_failing_queries_of_traces_stop_no_work(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    conn = database.connect(autocommit=True)
    blind = fairq.App(middleware=[fairq.otel.middleware(provider, waits="host=/nowhere")])

    @blind.task
    def works(payload: int) -> None: ...

    works.enqueue(conn, "bob", 1)
    works.enqueue(conn, "bob", 2)
    Worker(blind, database.dsn, mode="drain", concurrency=1).run()
    assert one(conn, "select count(*) from fairq.finished_tasks where outcome = 'succeeded'") == 2
    assert [span.events for span in exporter.get_finished_spans() if span.kind == SpanKind.CONSUMER] == [
        (),
        (),
    ]
    assert [each.getMessage() for each in caplog.records if each.name == "fairq.otel"] == [
        "traces do not say what tasks wait for: OperationalError"
    ]


def test_a_database_that_says_nothing_and_threads_that_hang_stop_no_work(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fairq.otel, "ANSWER_SECONDS", 0.2)
    conn = database.connect(autocommit=True)
    release, pool = threading.Event(), ThreadPoolExecutor(1)
    with proxy(database.dsn) as network:
        own = fairq.App(middleware=[fairq.otel.middleware(provider, waits=network.dsn)])

        @own.task
        async def works(payload: int) -> None:
            asyncio.get_running_loop().set_default_executor(pool)
            pool.submit(release.wait, 60)
            network.freeze()

        with worker_thread(own, database.dsn):
            for number in range(3):
                works.enqueue(conn, "bob", number)
                wait_until(lambda: one(conn, "select count(*) from fairq.tasks") == 0, "it ends")
            release.set()
    assert [each.getMessage() for each in caplog.records if each.name == "fairq.otel"] == [
        "traces do not say what tasks wait for: TimeoutError"
    ]


def test_the_span_of_a_batch_is_linked_to_what_created_its_tasks(database: Database) -> None:
    conn = database.connect(autocommit=True)
    several.enqueue(conn, "bob", 1)
    several.enqueue(conn, "alice", 2)
    Worker(app, database.dsn, mode="drain", concurrency=2).run()
    *created, process = exporter.get_finished_spans()
    assert [link.context.span_id for link in process.links] == [own(each) for each in created]
    assert process.attributes is not None
    assert process.attributes["messaging.batch.message_count"] == 2
    assert "fairq.group" not in process.attributes


def test_the_span_records_what_a_handler_raises(db: psycopg.Connection[Any]) -> None:
    parse.enqueue(db, "bob", "breaks")
    parse.enqueue(db, "bob", "works")
    testing.drain(db, app)
    failed, worked = (span for span in exporter.get_finished_spans() if span.kind == SpanKind.CONSUMER)
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "no such file")
    assert failed.attributes is not None
    assert (failed.attributes["error.type"], failed.attributes["pages"]) == ("Fail", 3)
    assert [event.name for event in failed.events] == ["exception"]
    assert worked.status.status_code == StatusCode.UNSET


def test_every_kind_of_connection_and_a_batch_carry_the_trace(
    opened: Opened, observer: psycopg.Connection[Any], group: str
) -> None:
    with tracer.start_as_current_span("request"):
        opened.finish(fairq.enqueue(opened.conn, group, headers={"mine": "kept"}))
        opened.finish(fairq.enqueue_many(opened.conn, [(group, 1), (group, 2)], kind="parse"))
        opened.commit()
    one, many = (span for span in exporter.get_finished_spans() if span.name == "create default")
    assert many.attributes is not None
    assert (many.attributes["messaging.batch.message_count"], many.attributes["fairq.group"]) == (2, group)
    query: LiteralString = "select headers from fairq.tasks where group_key = %s order by id"
    rows = observer.execute(query, [group]).fetchall()
    assert [row[0]["traceparent"].split("-")[2] for row in rows] == [
        f"{own(span):016x}" for span in (one, many, many)
    ]
    assert rows[0][0]["mine"] == "kept"


def test_a_trace_in_the_headers_stays_as_it_is(db: psycopg.Connection[Any]) -> None:
    known = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    id = fairq.enqueue(db, "bob", headers=known)
    assert db.execute("select headers from fairq.tasks where id = %s", [id]).fetchone() == (known,)


def test_an_enqueue_that_is_refused_ends_its_span(db: psycopg.Connection[Any]) -> None:
    for wrong in ({"group_key": ""}, {"queue": "nowhere"}, {"headers": 5}):
        given: dict[str, Any] = {"group_key": "bob", **wrong}
        with pytest.raises(fairq.FairqError):
            fairq.enqueue(db, **given)
        db.rollback()
    types = [dict(span.attributes or {}).get("error.type") for span in exporter.get_finished_spans()]
    assert types == ["InvalidGroupKey", "UnknownQueue", "ConfigurationError"]


def test_headers_that_are_no_trace_do_no_harm(db: psycopg.Connection[Any]) -> None:
    fairq.otel.uninstrument()
    for odd in ({"traceparent": 5}, {"traceparent": "odd"}, {"tracestate": ["x"]}):
        fairq.enqueue(db, "bob", "x", kind="parse", headers=odd)
    assert [each.outcome for each in testing.drain(db, app)] == ["succeeded"] * 3
    assert all(not span.links for span in exporter.get_finished_spans())


def test_without_it_nothing_is_added(db: psycopg.Connection[Any]) -> None:
    fairq.otel.uninstrument()
    with tracer.start_as_current_span("request"):
        id = fairq.enqueue(db, "bob")
    assert db.execute("select headers from fairq.tasks where id = %s", [id]).fetchone() == (None,)
    assert json.dumps(sorted(ended())) == '["request"]'
