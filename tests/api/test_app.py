"""Declaring tasks, and deciding how an attempt ends. No database."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import pickle
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fairq
from fairq import testing
from fairq.errors import (
    FinishLost,
    NotDecodable,
    ResultNotEncodable,
    TaskError,
    UnknownTask,
)
from fairq.outcome import Outcome, describe, outcome_of
from fairq.queries.workers import TurnRow


@dataclasses.dataclass
class Parse:
    file: str
    pages: int = 1


app = fairq.App(queue="docs", max_attempts=7, timeout=30)


@app.task
def parse(payload: Parse) -> int:
    """Count pages."""
    return payload.pages


@app.task(kind="mail.send", queue="mail", max_attempts=2, timeout=timedelta(seconds=5), store_result=True)
async def send(payload: dict[str, str], ctx: fairq.Context) -> str:
    return f"{payload['to']} {ctx.attempt}"


# --- Declaring -------------------------------------------------------------------------------------


def test_a_task_takes_what_is_not_said_from_its_app_and_its_function() -> None:
    assert (parse.kind, parse.queue, parse.options["max_attempts"], parse.timeout) == ("parse", "docs", 7, 30)
    assert (send.kind, send.queue, send.options["max_attempts"], send.timeout) == (
        "mail.send",
        "mail",
        2,
        5.0,
    )
    assert (parse.is_async, send.is_async) == (False, True)
    assert (parse.wants_context, send.wants_context) == (False, True)
    assert parse.__name__ == "parse"
    assert parse.__doc__ == "Count pages."


def test_a_task_is_still_a_function() -> None:
    assert parse(Parse("a", 3)) == 3
    assert asyncio.run(send({"to": "bob"}, testing.context(attempt=2))) == "bob 2"


def test_an_app_knows_its_tasks_by_kind() -> None:
    """H4, HR29: an unknown kind is an error that lists the known ones."""
    assert app["parse"] is parse
    assert set(app.tasks) == {"parse", "mail.send"}
    assert "parse" in app
    assert app.queues == ["docs", "mail"]
    with pytest.raises(UnknownTask, match=r"'pars'.*mail\.send, parse") as caught:
        app["pars"]
    assert caught.value.code == "unknown_task"


def test_two_tasks_of_one_kind_are_refused() -> None:
    other = fairq.App()
    other.task(kind="x")(lambda payload: None)
    with pytest.raises(fairq.ConfigurationError, match="two tasks have the kind 'x'"):
        other.task(kind="x")(lambda payload: 1)


def test_apps_are_put_together() -> None:
    whole = fairq.App()
    whole.include(app)
    whole.include(app)
    assert whole["parse"] is parse
    clash = fairq.App()
    clash.task(kind="parse")(lambda payload: None)
    with pytest.raises(fairq.ConfigurationError):
        whole.include(clash)


def third(payload: int, ctx: fairq.Context, other: int) -> None: ...
def payload_and_keywords(payload: int, *, file: str) -> None: ...
def context_first(ctx: fairq.Context) -> None: ...
def anything(*payloads: int) -> None: ...
def any_keyword(**fields: int) -> None: ...


def generator(payload: int) -> Any:
    yield payload


async def async_generator(payload: int) -> Any:
    yield payload


class Service:
    def method(self, payload: int) -> None: ...


HANDLERS = [
    *[third, payload_and_keywords, context_first, anything, any_keyword],
    *[generator, async_generator, Service.method, int, "parse", 5],
]


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_handler_that_cannot_be_called_is_refused_at_once(handler: Any) -> None:
    with pytest.raises(fairq.ConfigurationError):
        fairq.App().task(handler)


def test_a_coroutine_that_nobody_would_await_is_an_error() -> None:
    """A sync wrapper around an async handler would succeed with nothing done."""

    async def real(payload: int) -> None: ...

    @functools.wraps(real)
    def wrapper(payload: int) -> Any:
        return real(payload)

    task = fairq.App().task(wrapper)
    assert not task.is_async
    with pytest.raises(fairq.ConfigurationError, match="returned a coroutine"):
        task.invoke(1, testing.context())


def test_a_partial_of_an_async_function_is_async() -> None:
    async def real(scale: int, payload: int) -> int:
        return scale * payload

    task: Any = fairq.App().task(kind="partial")(functools.partial(real, 3))
    assert task.is_async
    assert testing.call(task, 2) == 6


def test_a_lambda_needs_a_kind() -> None:
    assert fairq.App().task(lambda payload: None).kind == "<lambda>"
    with pytest.raises(fairq.InvalidName):
        fairq.App().task(kind="")(lambda payload: None)


@pytest.mark.parametrize(
    "options",
    [{"max_attempts": 0}, {"timeout": 0}, {"cost": -1}, {"priority": 2_000_000}, {"queue": ""}],
)
def test_options_out_of_range_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(fairq.Refused):
        fairq.App().task(**options)(lambda payload: None)


def test_an_invalid_retry_policy_is_refused_at_once() -> None:
    """Otherwise nobody would know before the first handler fails."""
    with pytest.raises(fairq.ConfigurationError, match="has retry=5"):
        fairq.App().task(retry=5)(lambda payload: None)  # type: ignore[call-overload]


@pytest.mark.parametrize("annotation", ["Nowhere", "typing.Nowhere", "1 +", "1 / 0"])
def test_an_annotation_that_is_no_type_is_told_with_the_other_problems(annotation: str) -> None:
    app = fairq.App()

    @app.task
    def parse(payload: Any) -> None: ...

    parse.handler.__annotations__["payload"] = annotation
    (problem,) = app.problems()
    assert "the annotations of task 'parse' cannot be resolved" in problem


def test_what_only_type_checkers_import_may_annotate_the_rest() -> None:
    app = fairq.App()

    @app.task(store_result=True)
    def parse(payload: int, ctx: Any, more: Any = None) -> Any:
        return payload

    parse.handler.__annotations__ |= {"ctx": "Context", "more": "Elsewhere", "return": "Elsewhere"}
    assert app.problems() == []
    assert testing.call(parse, 1) == 1
    with pytest.raises(fairq.ConfigurationError, match="Elsewhere") as caught:
        _ = parse._result_decoder
    assert "TYPE_CHECKING" in str(caught.value.hint)


def by_keyword(payload: int, *, ctx: fairq.Context) -> int:
    return ctx.id


def by_name(payload: int, ctx: Any) -> int:
    return int(ctx.id)


def by_annotation(payload: int, about: fairq.Context) -> int:
    return about.id


def with_default(payload: int, scale: float = 1.0, ctx: fairq.Context | None = None) -> int:
    assert ctx is not None
    return ctx.id


def by_optional(payload: int, about: fairq.Context | None = None) -> int:
    assert about is not None
    return about.id


def by_annotated(payload: int, about: Annotated[fairq.Context, "a remark"]) -> int:
    return about.id


def in_text(payload: int, about: "fairq.Context | None" = None) -> int:  # noqa: UP037
    assert about is not None
    return about.id


def evaluated(payload: int, about: Any = None) -> int:
    return int(about.id)


evaluated.__annotations__["about"] = fairq.Context | None


class Callable_:
    def __call__(self, payload: int, ctx: fairq.Context) -> int:
        return ctx.id


@pytest.mark.parametrize(
    "handler",
    [
        *(by_keyword, by_name, by_annotation, with_default, by_optional, by_annotated, in_text, evaluated),
        Callable_(),
    ],
)
def test_the_context_is_handed_over_as_the_signature_asks(handler: Any) -> None:
    task: fairq.Task[Any, ..., Any] = fairq.App().task(kind="k")(handler)
    assert task.invoke(1, testing.context(id=42)) == 42
    assert task.decode("1") == 1


forms = fairq.App()


@forms.task
def tick() -> str:
    return "tick"


@forms.task
def tock(*, ctx: fairq.Context) -> int:
    return ctx.id


@forms.task
def split(*, file: str, pages: int = 1, upto: datetime | None = None) -> tuple[Any, ...]:
    return file, pages, upto


@forms.task
async def asplit(*, file: str, ctx: fairq.Context | None = None) -> tuple[str, int]:
    assert ctx is not None
    return file, ctx.id


def test_a_handler_may_take_nothing() -> None:
    assert tick() == "tick"
    assert tick.encode_payload(None) == "null"
    assert testing.call(tick, None) == "tick"
    assert testing.call(tock, {}, testing.context(id=42)) == 42
    assert (tick.wants_context, tock.wants_context) == (False, True)


def test_keyword_arguments_are_the_fields_of_the_payload() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    given = split.arguments(file="a", upto=at)
    assert split.encode_payload(given) == '{"file":"a","upto":"2030-01-01T00:00:00+00:00"}'
    assert testing.call(split, given) == ("a", 1, at)
    assert testing.call(asplit, {"file": "b"}, testing.context(id=42)) == ("b", 42)
    assert split.run('{"file": "c", "unknown": 5}', testing.context()) == ("c", 1, None)
    with pytest.raises(TypeError, match="file"):
        split.arguments(fiel="a")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ctx"):
        asplit.arguments(file="a", ctx=testing.context())


@pytest.mark.parametrize("payload", [{"file": 5}, {"file": "a", "pages": "x"}, {}, None])
def test_arguments_that_do_not_fit_are_refused_when_they_are_enqueued(payload: Any) -> None:
    with pytest.raises(fairq.NotEncodable) as caught:
        split.encode_payload(payload)
    assert "pages" in (caught.value.hint or "")


def undecodable(payload: complex) -> None: ...
def unresolved(payload: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_all_problems_of_an_app_are_told_at_once() -> None:
    bad = fairq.App()
    bad.task(undecodable)
    bad.task(unresolved)
    bad.task(kind="good")(by_name)
    problems = bad.problems()
    assert len(problems) == 2
    assert "'undecodable'" in problems[0]
    assert "Nowhere" in problems[1]


def test_a_payload_is_decoded_to_the_annotation() -> None:
    assert parse.decode('{"file": "a"}') == Parse("a")


def test_enqueueing_refuses_what_the_handler_could_not_decode() -> None:
    assert parse.encode_payload({"file": "a"}) == '{"file":"a"}'  # type: ignore[arg-type]  # a stand-in that fits
    with pytest.raises(fairq.NotEncodable) as caught:
        parse.encode_payload({"file": "a", "pages": "x"})  # type: ignore[arg-type]
    assert caught.value.path == "payload.pages"
    assert "Parse" in (caught.value.hint or "")
    with pytest.raises(fairq.NotEncodable) as caught:
        parse.encode_payload(Parse(file=5))  # type: ignore[arg-type]  # a dataclass takes anything
    assert caught.value.path == "payload.file"
    with pytest.raises(fairq.NotEncodable) as caught:
        parse.enqueue_many(None, [("bob", Parse("a")), ("bob", Parse(5))])  # type: ignore[call-overload,arg-type]
    assert caught.value.path == "items[1].payload.file"


# --- The context -----------------------------------------------------------------------------------


def test_a_context_is_made_of_a_popped_row() -> None:
    row: Any = SimpleNamespace(**dict.fromkeys(TurnRow.__slots__))
    row.id, row.attempt, row.max_attempts, row.queue, row.kind = 5, 2, 3, "q", "k"
    row.group_key, row.user_key, row.headers = "g", "u", '{"trace": "x"}'
    ctx = fairq.Context.of(row, 9)
    assert (ctx.id, ctx.attempt, ctx.max_attempts, ctx.queue, ctx.group_key) == (5, 2, 3, "q", "g")
    assert (ctx.kind, ctx.user_key, ctx.worker_id, ctx.headers) == ("k", "u", 9, {"trace": "x"})
    assert not ctx.is_last_attempt
    row.headers, row.attempt = None, 3
    ctx = fairq.Context.of(row, 9)
    assert (ctx.deadline, ctx.headers, ctx.is_last_attempt) == (None, {}, True)


def test_only_the_newest_progress_is_kept() -> None:
    seen: list[fairq.Context] = []
    ctx = testing.context()
    ctx.on_progress = seen.append
    ctx.progress(1, 10)
    ctx.progress(2, 10, note={"page": 2})
    assert seen == [ctx, ctx]
    assert ctx.last_progress is not None
    assert (ctx.last_progress.done, ctx.last_progress.total, ctx.last_progress.note) == (2, 10, {"page": 2})
    with pytest.raises(fairq.NotEncodable, match=r"^note"):
        ctx.progress(3, note=object())


def test_charges_add_up_until_the_attempt_ends() -> None:
    seen: list[fairq.Context] = []
    ctx = testing.context()
    ctx.on_progress = seen.append
    said = [ctx.charged]
    for amount in (0, 10, 2.5):
        ctx.charge(amount)
        said.append(ctx.charged)
    assert said == [None, 0, 10, 12.5]
    for odd in (-1, float("nan"), float("inf"), 2e9, "many", None, 1e9):
        with pytest.raises(fairq.InvalidCost) as raised:
            ctx.charge(odd)  # type: ignore[arg-type]
        assert raised.value.hint
    ctx.over = True
    with pytest.raises(fairq.NotHeld):
        ctx.charge(1)
    assert [ctx.charged, len(seen)] == [12.5, 3]


def test_a_thread_is_woken_when_its_task_is_cancelled() -> None:
    cancelled = fairq.Cancellation()
    assert not cancelled
    assert cancelled.wait(0) is False
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(cancelled.wait(20)))
    thread.start()
    cancelled.set("timeout")
    thread.join(20)
    assert answers == [True]
    assert cancelled
    cancelled.set("shutdown")
    assert cancelled.reason == "timeout"
    with pytest.raises(fairq.Cancelled, match="timeout"):
        cancelled.raise_if_set()


def test_coroutines_are_woken_from_another_thread() -> None:
    cancelled = fairq.Cancellation()

    async def work() -> None:
        async def wait() -> None:
            await cancelled

        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        threading.Thread(target=cancelled.set).start()
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), 20)
        await cancelled  # at once

    asyncio.run(work())
    assert not cancelled._waiting


def test_a_loop_that_is_gone_does_no_harm() -> None:
    cancelled = fairq.Cancellation()
    loop = asyncio.new_event_loop()
    cancelled._waiting.append((loop, loop.create_future()))
    loop.close()
    cancelled.set()
    assert cancelled


# --- Back-off --------------------------------------------------------------------------------------


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(1, 100),
    st.floats(0, 1),
    st.integers(1, 10**9),
    st.floats(0, 1),
)
def test_a_pause_stays_within_its_bounds(
    base: float, cap: float, factor: float, jitter: float, attempt: int, draw: float
) -> None:
    pause = fairq.Backoff(base, cap, factor, jitter).delay(attempt, lambda: draw)
    assert 0 <= pause <= cap * (1 + jitter) + 1e-6


def test_pauses_double_up_to_the_cap() -> None:
    """HR25: and jitter varies them both ways."""
    backoff = fairq.Backoff(base=2, cap=10, jitter=0.5)
    assert [backoff.delay(n, lambda: 0.5) for n in (1, 2, 3, 4, 10_000)] == [2, 4, 8, 10, 10]
    assert (backoff.delay(1, lambda: 0), backoff.delay(1, lambda: 1)) == (1, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"base": -1},
        {"cap": float("inf")},
        {"factor": 0.5},
        {"jitter": 1.5},
        {"base": float("nan")},
        {"base": "2"},
        {"cap": None},
        {"jitter": True},
        {"on": ValueError},
        {"never": ("x",)},
    ],
)
def test_a_policy_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fairq.ConfigurationError) as caught:
        fairq.Backoff(**options)
    assert caught.value.hint


def test_a_session_that_nobody_can_open_is_refused() -> None:
    with pytest.raises(fairq.ConfigurationError, match="session='postgresql:"):
        fairq.App(session="postgresql:///shop").task(kind="k")(lambda payload: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), timedelta(days=-1), 1e12, "5"])
def test_a_pause_that_cannot_be_is_refused(delay: Any) -> None:
    with pytest.raises(fairq.ConfigurationError):
        fairq.Retry(delay=delay)


# --- Outcomes --------------------------------------------------------------------------------------

POLICY = fairq.Backoff(base=2, jitter=0, on=(OSError, TimeoutError, TypeError), never=(FileNotFoundError,))
plain = fairq.App().task(kind="plain", store_result=True)(by_name)
policed = fairq.App().task(kind="policed", retry=POLICY)(by_name)


def outcome(exception: BaseException | None, task: Any = policed, attempt: int = 3, **given: Any) -> Outcome:
    return outcome_of(exception, task, attempt, **given)


@pytest.mark.parametrize(
    ("exception", "task", "name", "delay", "code"),
    [
        (ValueError("x"), None, "retry", None, "unhandled_error"),
        (ValueError("x"), plain, "retry", None, "unhandled_error"),
        (ValueError("x"), policed, "failed", None, "unhandled_error"),
        (OSError("x"), policed, "retry", 8, "unhandled_error"),
        (FileNotFoundError("x"), policed, "failed", None, "unhandled_error"),
        (fairq.TaskTimeout("x"), policed, "retry", 8, "timeout"),
        (fairq.TaskTimeout("x"), plain, "retry", None, "timeout"),
        (SystemExit(3), plain, "retry", None, "unhandled_error"),
        (SystemExit(3), policed, "failed", None, "unhandled_error"),
        (KeyboardInterrupt(), plain, "retry", None, "unhandled_error"),
        (UnknownTask("x"), None, "declined", None, "unknown_task"),
        (NotDecodable("payload", "x"), policed, "failed", None, "payload_invalid"),
        (ResultNotEncodable("x"), policed, "failed", None, "result_invalid"),
        (FinishLost("x"), policed, "retry", None, "finish_lost"),
        (fairq.Cancelled("x"), policed, "cancelled", None, "cancelled"),
        (asyncio.CancelledError(), policed, "cancelled", None, "cancelled"),
        (fairq.Fail("x"), policed, "failed", None, "failed"),
        (fairq.Fail("x", code="no_such_file"), policed, "failed", None, "no_such_file"),
        (fairq.Retry("x"), policed, "retry", 8, "retry"),
        (fairq.Retry("x"), plain, "retry", None, "retry"),
        (fairq.Retry("x", delay=30, code="busy"), policed, "retry", 30, "busy"),
        (fairq.Retry(delay=timedelta(minutes=1)), plain, "retry", 60, "retry"),
    ],
    ids=lambda each: repr(each) if isinstance(each, BaseException) else "",
)
def test_each_end_has_its_outcome_its_pause_and_its_code(
    exception: BaseException, task: Any, name: str, delay: float | None, code: str
) -> None:
    """HR26, HR27, HR28, HR29: codes tell who is to blame."""
    found = outcome(exception, task)
    assert (found.outcome, found.retry_delay, found.result) == (name, delay, None)
    assert found.error is not None
    error = json.loads(found.error)
    assert error["code"] == code
    assert error["type"].endswith(type(exception).__name__)
    assert error["message"]


def test_a_result_is_kept_only_if_the_task_stores_results() -> None:
    assert outcome(None, plain, result={"pages": 3}) == Outcome("succeeded", result='{"pages":3}')
    assert outcome(None, policed, result={"pages": 3}) == Outcome("succeeded")
    assert outcome(None, policed, result=object()) == Outcome("succeeded")
    assert outcome(None, plain, result=None) == Outcome("succeeded", result="null")


def test_a_result_without_a_json_form_fails_the_task_and_names_the_place() -> None:
    """HR28: the handler ran, and running it again would not help."""
    found = outcome(None, plain, result={"a": [object()]})
    assert found.outcome == "failed"
    assert json.loads(found.error or "")["code"] == "result_invalid"
    assert json.loads(found.error or "")["message"].startswith("result.a[0] ")


def test_the_stored_error_is_bounded_and_clean() -> None:
    """It has no password of a DSN, nothing that jsonb refuses, and no megabytes."""

    def deep(n: int) -> None:
        if n == 0:
            raise RuntimeError("postgresql://bob:secret@db/shop \0 \ud800 " + "x" * 100_000)
        deep(n - 1)

    with pytest.raises(RuntimeError) as caught:
        deep(200)
    text = describe(caught.value)
    assert len(text) < 12_000
    assert "secret" not in text
    found = json.loads(text)
    assert "\0" not in found["message"] + found["traceback"]
    assert "\ud800" not in found["message"] + found["traceback"]
    assert "deep(n - 1)" in found["traceback"]


def test_an_exception_that_cannot_be_shown_is_stored_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert json.loads(describe(Broken()))["message"] == "Broken"


def test_causes_that_lead_in_a_circle_are_each_told_once() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(ValueError, match="first") as caught:
        raise first
    told = json.loads(describe(caught.value))["traceback"]
    assert (told.count("ValueError: first"), told.count("KeyError: 'second'")) == (1, 1)
    assert told.index("KeyError") < told.index("ValueError: first")


def test_a_misfit_payload_stores_no_traceback_and_a_handlers_own_error_does() -> None:
    with pytest.raises(NotDecodable) as misfit:
        parse.decode("{}")
    assert "traceback" not in json.loads(describe(misfit.value))
    with pytest.raises(fairq.Fail) as own:
        raise fairq.Fail("no")
    assert "traceback" in json.loads(describe(own.value))


def test_all_task_errors_have_codes_of_their_own() -> None:
    codes = [each.code for each in TaskError.__subclasses__()]
    assert len(codes) == len(set(codes))


def test_errors_can_be_pickled_across_processes() -> None:
    for error in (fairq.UnknownQueue("x", "hint"), fairq.TaskTimeout("x"), fairq.InTransaction("y", "h")):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back)) == (type(error), str(error))


def test_an_app_says_for_its_tasks_what_they_do_not_say_themselves() -> None:
    own = fairq.App(queue="mail", priority=3, cost=2.0, store_result=True, retry=fairq.Backoff(base=7))
    plain = own.task(kind="plain")(lambda payload: None)
    other = own.task(kind="other", priority=0, store_result=False)(lambda payload: None)
    assert (plain.queue, plain.options["priority"], plain.options["cost"]) == ("mail", 3, 2.0)
    assert (plain.store_result, plain.retry) == (True, fairq.Backoff(base=7))
    assert (other.options["priority"], other.store_result) == (0, False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kind'"):
        fairq.App(kind="x")  # type: ignore[call-arg]


@pytest.mark.parametrize("until", [5, 5.0, timedelta(seconds=5), None])
def test_a_handler_says_how_long_it_was_told_to_wait(until: Any) -> None:
    if until is None:
        until = datetime.now(UTC) + timedelta(seconds=5)
    asked = fairq.RetryAfter(until, hold="key")
    outcome = outcome_of(asked, None, 1)
    assert (outcome.outcome, outcome.hold) == ("postponed", "key")
    assert outcome.retry_delay == pytest.approx(5, abs=1)
    assert fairq.RetryAfter(datetime(2000, 1, 1, tzinfo=UTC)).delay == 0.001


@pytest.mark.parametrize(
    "until", [0, -1, float("nan"), float("inf"), 400 * 86400, True, datetime(2030, 1, 1), "5"]
)
def test_odd_times_to_wait_are_refused(until: Any) -> None:
    with pytest.raises(fairq.ConfigurationError) as raised:
        fairq.RetryAfter(until)
    assert raised.value.hint
    with pytest.raises(fairq.ConfigurationError):
        fairq.RetryAfter(5, hold="tenant")  # type: ignore[arg-type]
