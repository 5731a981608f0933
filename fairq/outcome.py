"""How an attempt ends, from what its handler raised or returned. No I/O."""

from __future__ import annotations

import asyncio
import json
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from fairq.codec import encode
from fairq.dsn import mask
from fairq.errors import (
    Cancelled,
    Fail,
    FairqError,
    FinishLost,
    NotDecodable,
    NotEncodable,
    ResultNotEncodable,
    Retry,
    RetryAfter,
    TaskError,
    UnknownTask,
)

if TYPE_CHECKING:
    from fairq.task import Task

__all__ = ["Outcome", "describe", "outcome_of", "told"]

OutcomeName = Literal[
    "succeeded", "failed", "retry", "cancelled", "expired", "released", "declined", "interrupted", "postponed"
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended, for `fairq.finish_tasks`. `result` and `error` are JSON text."""

    outcome: OutcomeName
    result: str | None = None
    error: str | None = None
    retry_delay: float | None = None
    """Seconds; None takes the queue's back-off."""
    hold: str | None = None
    """"group" or "key": start nothing of the same for that long."""

    @property
    def delay(self) -> timedelta | None:
        seconds = self.retry_delay
        return None if seconds is None else timedelta(seconds=min(max(seconds, 0.0), 1e9))


UNHANDLED = "unhandled_error"  # the code of an exception that has none
LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 8_000
LONGEST_CHAIN = 20

# Another attempt cannot help.
_FINAL = (NotDecodable, ResultNotEncodable, Fail)
# Raised by handlers, so the traceback is useful.
_RAISED_ON_PURPOSE = (Fail, Retry, RetryAfter)


def outcome_of(
    exception: BaseException | None,
    task: Task[Any, ..., Any] | None,
    attempt: int,
    *,
    result: Any = None,
    draw: Callable[[], float] = random.random,
) -> Outcome:
    """How an attempt ended, from what its handler raised or, with None, returned. Pure except for `draw`.

    The engine turns `retry` into `failed` when no attempts are left.
    """
    if exception is None:
        try:
            stored = encode(result, "result") if task is not None and task.store_result else None
        except NotEncodable as exc:
            exception = ResultNotEncodable(str(exc), exc.hint)
        else:
            return Outcome("succeeded", result=stored)

    error = describe(exception)
    if isinstance(exception, Cancelled | asyncio.CancelledError):
        return Outcome("cancelled", error=error)
    if isinstance(exception, _FINAL):
        return Outcome("failed", error=error)
    policy = None if task is None else task.retry
    if isinstance(exception, RetryAfter):  # uses no attempt
        return Outcome("postponed", error=error, retry_delay=exception.delay, hold=exception.hold)
    if isinstance(exception, Retry):
        delay = exception.delay
        if delay is None and policy is not None:
            delay = policy.delay(attempt, draw)
        return Outcome("retry", error=error, retry_delay=delay)
    if isinstance(exception, UnknownTask):  # another worker may know the kind; uses no attempt
        return Outcome("declined", error=error)
    if policy is None or isinstance(exception, FinishLost):
        return Outcome("retry", error=error)
    if policy.retries(exception):
        return Outcome("retry", error=error, retry_delay=policy.delay(attempt, draw))
    return Outcome("failed", error=error)


def describe(exception: BaseException) -> str:
    """The JSON to store for an exception: code, type, message and, where it helps, the traceback."""
    ours = isinstance(exception, TaskError)
    code = exception.code if isinstance(exception, TaskError) else UNHANDLED
    if isinstance(exception, asyncio.CancelledError):
        code = Cancelled.code
    cls = type(exception)
    found: dict[str, Any] = {
        "code": _clean(str(code), 200),
        "type": cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}",
        "message": _clean(_message(exception), LONGEST_MESSAGE),
    }
    if isinstance(exception, FairqError) and exception.hint:
        found["hint"] = _clean(exception.hint, LONGEST_MESSAGE)
    if exception.__traceback__ is not None and not (ours and not isinstance(exception, _RAISED_ON_PURPOSE)):
        found["traceback"] = _clean("\n".join(_frames(exception)), LONGEST_TRACEBACK, keep_end=True)
    return json.dumps(found)


def told(error: Any) -> str:
    """A stored error in one line. Consumers in other languages may have stored any JSON."""
    if not isinstance(error, dict) or not error.get("message"):
        return "" if error is None else json.dumps(error, ensure_ascii=False, default=str)
    words = [error.get("code"), error.get("type"), " ".join(str(error["message"]).split())]
    return ": ".join(str(word) for word in words if word and word != UNHANDLED)


def _frames(exception: BaseException) -> list[str]:
    """The traceback, causes first; long messages and deep recursion are cut short."""
    found: list[str] = []
    for each in reversed(_causes(exception)):
        last = traceback.format_tb(each.__traceback__, limit=-20)
        name = type(each).__qualname__
        found += [""] * bool(found)
        found += ["".join(last).rstrip("\n"), f"{name}: {_clean(_message(each), 500)}"]
    return found


def _causes(exception: BaseException) -> list[BaseException]:
    """The exception and its newest causes. A chain may be long, or circular."""
    chain: list[BaseException] = []
    current: BaseException | None = exception
    while current is not None and len(chain) < LONGEST_CHAIN and not any(current is each for each in chain):
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _message(exception: BaseException) -> str:
    try:
        return str(exception) or type(exception).__name__
    except Exception:  # its __str__ is broken, but the task's end must still be written
        return type(exception).__name__


def _clean(text: str, longest: int, *, keep_end: bool = False) -> str:
    """The text without passwords and characters that jsonb refuses, cut to the longest length."""
    text = mask(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    return f"…{text[-longest + 1 :]}" if keep_end else f"{text[: longest - 1]}…"
