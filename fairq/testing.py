"""Helpers for the tests of applications that use fairq.

    fairq.testing.call(parse, Parse(file="a.pdf"))      # the handler alone, payload through JSON and back

    def test_upload(fairq_db):                          # a fixture of the pytest plugin
        upload(fairq_db, "a.pdf")
        assert [task.kind for task in testing.enqueued(fairq_db)] == ["parse"]
        testing.drain(fairq_db, app)                    # pops, runs and finishes, all in this transaction

`drain` works as a real worker with one slot, on the real engine, but inside the test's transaction, which is
rolled back afterwards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from fairq import driver
from fairq.app import App
from fairq.around import Runner, runner
from fairq.batch import Batch
from fairq.connections import Step, Steps, Wait, awaited, on_connection
from fairq.context import Context, finish_call
from fairq.driver import Call
from fairq.errors import (
    Cancelled,
    ConfigurationError,
    DatabaseError,
    Fail,
    FairqError,
    FinishLost,
    Retry,
    RetryAfter,
    TaskTimeout,
)
from fairq.options import GroupKey, group_text
from fairq.outcome import Outcome, outcome_of
from fairq.queries import client as queries
from fairq.queries import workers
from fairq.results import Progress
from fairq.task import Task, checked

__all__ = ["Enqueued", "Ran", "call", "call_async", "context", "drain", "enqueued", "freeze"]

T = TypeVar("T")

# --- A handler alone -------------------------------------------------------------------------------


context: Final = partial(
    Context, id=1, attempt=1, max_attempts=1, group_key="test", queue="default", kind="test", worker_id=0
)
"""A context for calling a handler yourself; pass the fields that matter."""


def call(task: Task[T, ..., Any], payload: T, ctx: Context | None = None) -> Any:
    """Run a handler as a worker would, without a database: the payload goes through JSON and back.

    Returns its result, and raises what it raises. An async handler runs in an event loop of its own.
    """
    invoked, whole = _invoked(task, payload, ctx)
    answer = _run_coroutine(invoked) if task.is_async else invoked
    return _checked_result(task, answer, whole)


async def call_async(task: Task[T, ..., Any], payload: T, ctx: Context | None = None) -> Any:
    """`call` for a running event loop."""
    invoked, whole = _invoked(task, payload, ctx)
    return _checked_result(task, await invoked if task.is_async else invoked, whole)


def _invoked(task: Task[T, ..., Any], payload: T, ctx: Context | None) -> tuple[Any, Any]:
    payload = task.decode(task.encode_payload(payload))
    whole: Any = ctx or context(kind=task.kind, queue=task.queue)
    if task.batch is None:
        return task.invoke(payload, whole), whole
    several: Any = [payload]
    whole = Batch([whole])
    return task.invoke(several, whole), whole


def _checked_result(task: Task[Any, ..., Any], answer: Any, ctx: Any) -> Any:
    checked(answer)
    if isinstance(ctx, Batch):
        ((_, exception, answer),) = ctx.ends(answer)
        if exception is not None:
            raise exception
    outcome = outcome_of(None, task, 1, result=answer)
    if outcome.error is not None:
        raise ConfigurationError(json.loads(outcome.error)["message"])
    return answer


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    coroutine.close()
    raise ConfigurationError(
        "an async handler cannot run here: an event loop is already running",
        "Await fairq.testing.call_async(…), or drain an async connection.",
    )


# --- What is in the queue --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A live task as the database has it."""

    id: int
    queue: str
    kind: str
    group_key: str
    user_key: str | None
    state: str
    priority: int
    attempt: int
    run_at: datetime
    headers: Any
    payload: Any
    concurrency_key: str | None
    idempotency_key: str | None


@on_connection
def enqueued(
    *,
    task: Task[Any, ..., Any] | None = None,
    kind: str | None = None,
    queue: str | None = None,
    group_key: GroupKey | None = None,
) -> Call[list[Enqueued]]:
    """The live tasks that this transaction sees, oldest first. With a declared `task`, only its tasks, with
    payloads decoded to its type.
    """
    if task is not None:
        kind, queue = task.kind, queue or task.queue
    group = None if group_key is None else group_text(group_key)
    query = queries.live_tasks.call(kind=kind, queue=queue, group_key=group)
    return query.then(lambda rows: [_enqueued(row, task) for row in rows])


def _enqueued(row: queries.LiveTasksRow, task: Task[Any, ..., Any] | None) -> Enqueued:
    values = {name: getattr(row, name) for name in Enqueued.__slots__}
    values["run_at"] = datetime.fromisoformat(row.run_at)
    values["headers"] = json.loads(row.headers or "null")
    values["payload"] = json.loads(row.payload) if task is None else task.decode(row.payload)
    return Enqueued(**values)


@on_connection
def freeze(at: datetime | None) -> Steps[None]:
    """Stop the engine's clock at this time, until the transaction ends or until None lets it run again."""
    return _freeze(at)


def _freeze(at: datetime | None) -> Steps[None]:
    if at is not None and at.utcoffset() is None:
        raise ConfigurationError(f"at={at!r} names no time zone", "Pass an aware datetime.")
    if not (yield queries.set_clock.call(at="" if at is None else at.isoformat())).obeyed:
        raise ConfigurationError(
            "this database does not allow tests to set its clock",
            "If it is a test database: update fairq.settings set test_clock = true;",
        )


# --- A worker in the test's transaction ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """One attempt that `drain` made."""

    id: int
    queue: str
    kind: str
    group_key: str
    attempt: int
    payload: Any
    outcome: str
    result: Any
    error: Any
    exception: BaseException | None
    progress: Progress | None


@on_connection
def drain(
    app: App,
    *,
    queues: Sequence[str] | None = None,
    at: datetime | None = None,
    limit: int = 1000,
    raise_errors: bool = True,
    state: Any = None,
) -> Steps[list[Ran]]:
    """Run all tasks that may run now, one after the other, in served order, and the tasks that they enqueue.

    All of it happens in the transaction of `conn`; nothing is committed. `conn` is also the session of tasks
    that have one. Each handler runs in a savepoint, which is rolled back if it raises. `at` moves the clock,
    so that tasks due then run, retries and scheduled ones too. An exception other than Fail, Retry,
    RetryAfter and Cancelled is raised here once its task has been finished as by a worker; with
    `raise_errors=False` it is only in the returned list. Timeouts of sync handlers are not enforced. `state`
    replaces what the app's lifespan would open. Needs READ COMMITTED, as every worker does.
    """
    names = app.queues or ["default"] if queues is None else list(queues)
    manager = nullcontext(state) if state is not None or app.lifespan is None else app.lifespan()
    state = yield _span(manager)
    try:
        return (yield from _drain(app, names, at, limit, raise_errors, state))
    finally:
        yield _span(manager, ends=True)


def _span(manager: Any, ends: bool = False) -> Step:
    """Enter a lifespan, or leave it."""

    async def step(conn: Any, wait: Wait) -> Any:
        if wait is awaited and hasattr(manager, "__aenter__"):
            return await (manager.__aexit__(None, None, None) if ends else manager.__aenter__())
        if not hasattr(manager, "__enter__"):
            raise ConfigurationError(
                "the app's lifespan is async",
                "Drain an async connection, or pass what it opens: drain(…, state=…)",
            )
        return manager.__exit__(None, None, None) if ends else manager.__enter__()

    return step


def _invoke(task: Task[Any, ..., Any], run: Runner, payload: Any, ctx: Any) -> Step:
    """Run a handler, with what is around it, on this event loop or on a new one."""

    async def step(conn: Any, wait: Wait) -> Any:
        ctx.session = conn if task.session is not None else None
        answer = run(payload, ctx)
        if not task.is_async:
            return checked(answer)
        coroutine = _in_time(answer, task)
        return checked(await coroutine if wait is awaited else _run_coroutine(coroutine))

    return step


async def _in_time(coroutine: Coroutine[Any, Any, Any], task: Task[Any, ..., Any]) -> Any:
    try:
        async with asyncio.timeout(task.timeout) as scope:
            return await coroutine
    except TimeoutError as exc:
        if scope.expired():
            raise TaskTimeout(f"the handler of {task.kind!r} took longer than {task.timeout:g} s") from exc
        raise


def _drain(
    app: App, queues: list[str], at: datetime | None, limit: int, raise_errors: bool, state: Any
) -> Steps[list[Ran]]:
    """The steps of one worker."""
    if at is not None:
        yield from _freeze(at)
    worker_id = yield queries.register_tester.call(name="fairq.testing", queues=queues)
    ran: list[Ran] = []
    savepoints = yield from _savepoints_work()
    try:
        while row := (yield from _pop(queues, worker_id)):
            if len(ran) == limit:
                raise FairqError(
                    f"drain made {limit} attempts, and there is still work",
                    "Does a task enqueue itself? To raise the limit: drain(…, limit=…)",
                )
            attempt = yield from _attempt(app, worker_id, row, savepoints, state)
            ran.append(attempt)
            on_purpose = isinstance(attempt.exception, Fail | Retry | RetryAfter | Cancelled)
            if raise_errors and attempt.exception is not None and not on_purpose:
                raise attempt.exception
    finally:
        with suppress(DatabaseError):
            yield workers.retire_worker.call(worker_id=worker_id)
            if at is not None:
                yield queries.set_clock.call(at="")
    return ran


def _pop(queues: list[str], worker_id: int) -> Steps[queries.PopOneRow | None]:
    for queue in queues:
        for row in (yield queries.pop_one.call(queue=queue, worker_id=worker_id)):
            return row  # type: ignore[no-any-return]
    return None


def _savepoints_work() -> Steps[bool]:
    """Whether savepoints work. In autocommit they do not, and are not needed."""
    try:
        yield _SAVEPOINT
    except DatabaseError as exc:
        if exc.sqlstate != "25P01":
            raise
        return False
    yield _RELEASE
    return True


_SAVEPOINT = Call[None](driver.Statement[None]("exec", "savepoint fairq_testing"))
_ROLLBACK = Call[None](driver.Statement[None]("exec", "rollback to savepoint fairq_testing"))
_RELEASE = Call[None](driver.Statement[None]("exec", "release savepoint fairq_testing"))


def _attempt(app: App, worker_id: int, row: queries.PopOneRow, savepoints: bool, state: Any) -> Steps[Ran]:
    about: Any = {name: getattr(row, name) for name in ("id", "queue", "kind", "group_key", "attempt")}
    ctx = Context.of(row, worker_id, state=state)
    if row.seconds is not None:
        ctx.deadline = datetime.now(UTC) + timedelta(seconds=row.seconds)
    task: Task[Any, ..., Any] | None = None
    exception: BaseException | None = None
    payload: Any = None
    answer: Any = None
    if savepoints:
        yield _SAVEPOINT
    try:
        task = app[row.kind]
        payload = task.decode(row.payload)
        run = runner(task, app.middleware, session=False)
        if task.batch is None:
            answer = yield _invoke(task, run, row.payload, ctx)
        else:
            batch = Batch([ctx])
            answer = yield _invoke(task, run, [row.payload], batch)
            ((_, exception, answer),) = batch.ends(answer)
    except (Exception, SystemExit, asyncio.CancelledError) as exc:
        exception = exc
    if savepoints:
        if exception is not None:
            yield _ROLLBACK
        yield _RELEASE

    outcome = outcome_of(exception, task, row.attempt, result=answer)
    if exception is None and ctx.finished_in:
        # Accepted only if that transaction rolled back, so that the task is still ours.
        lost = outcome_of(FinishLost("the transaction of ctx.finish_in rolled back"), task, row.attempt)
        outcome = lost if (yield finish_call(ctx, lost)) else Outcome("succeeded")
    else:
        yield finish_call(ctx, outcome)
    name = outcome.outcome
    if name == "retry" and row.attempt >= row.max_attempts:
        name = "failed"
    return Ran(
        **about,
        payload=payload,
        outcome=name,
        result=answer,
        error=json.loads(outcome.error or "null"),
        exception=exception,
        progress=ctx.last_progress,
    )
