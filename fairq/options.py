"""The options of tasks. One line declares one option: its name, its type, its help, and how it is sent.

The arguments of `enqueue` and `@app.task`, the options of the command line and the parameters of the
statements are made from these lines. None takes the default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from fairq.codec import encode
from fairq.errors import (
    ConfigurationError,
    InvalidCost,
    InvalidGroupKey,
    InvalidName,
    InvalidTime,
    OutOfRange,
    Refused,
    is_within,
)

Seconds = float | timedelta
GroupKey = str | int | UUID
T = TypeVar("T")

# --- How values are checked and sent ---------------------------------------------------------------
# Whatever needs no database is checked before anything is sent, so a wrong argument leaves the transaction
# usable. Values are sent as numbers and texts, which all drivers send alike; the statements cast them.


def stored_bytes(text: str) -> int:
    """The length as PostgreSQL counts it; longer than any limit if the text cannot be stored at all."""
    try:
        return len(text.encode()) if "\0" not in text else 10**9
    except UnicodeEncodeError:
        return 10**9


def check_text(what: str, value: object, longest: int = 500) -> str:
    if isinstance(value, str) and 1 <= stored_bytes(value) <= longest:
        return value
    raise InvalidName(f"the {what} is {value!r:.60}", f"Pass a text of 1 to {longest} bytes, without U+0000.")


def group_text(group_key: object) -> str:
    """The group key as it is stored. Integers and UUIDs become text."""
    if isinstance(group_key, UUID):
        return str(group_key)
    if is_int(group_key, -(2**127), 2**127):
        return f"{group_key:d}"
    if isinstance(group_key, str) and 1 <= stored_bytes(group_key) <= 500:
        return group_key
    raise InvalidGroupKey(
        f"the group key is {group_key!r:.60}",
        "Pass the tenant's id: a text of 1 to 500 bytes without U+0000, an integer or a UUID.",
    )


def interval(length: Seconds | None) -> str | None:
    """A length of time as PostgreSQL reads it, whatever the session's settings."""
    if length is None:
        return None
    if not isinstance(length, timedelta):
        length = timedelta(seconds=length)
    return f"{length // timedelta(microseconds=1)} microseconds"


def in_seconds(length: T | timedelta) -> T | float:
    """A timedelta as a number of seconds; any other value unchanged."""
    return length.total_seconds() if isinstance(length, timedelta) else length


def is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    return is_within(value, -sys.float_info.max, sys.float_info.max)


def check_id(value: object) -> int:
    if isinstance(value, int) and is_int(value, -(2**63), 2**63 - 1):
        return value
    raise OutOfRange(f"the id of a task is {value!r:.60}", "Pass the number that enqueue returned.")


def _name(what: str, value: Any) -> str:
    return check_text(what, value, 200)


def _key(what: str, value: Any) -> str:
    return check_text(what.replace("_", " "), value)


def _number(
    kind: type[int | float], least: float, most: float, error: type[Refused], hint: str
) -> Callable[[str, Any], Any]:
    """A check for a number in this range, but not a boolean."""
    fits: Callable[[Any, Any, Any], bool] = is_int if kind is int else is_within

    def send(what: str, value: Any) -> Any:
        if fits(value, least, most):
            return kind(value)
        raise error(f"the {what} is {value!r:.60}", hint)

    return send


_priority = _number(int, -1_000_000, 1_000_000, OutOfRange, "Higher runs first: -1000000 to 1000000.")
_cost = _number(float, 0.001, 1_000_000, InvalidCost, "Relative to an ordinary task: 0.001 to 1000000.")
_attempts = _number(int, 1, 1_000_000, OutOfRange, "1 to 1000000; None takes the queue's default.")


def moment(what: str, value: Any) -> str:
    if isinstance(value, datetime) and value.utcoffset() is not None:
        # In UTC, because PostgreSQL refuses offsets of more than 15:59.
        with suppress(OverflowError):
            return value.astimezone(UTC).isoformat()
    raise InvalidTime(
        f"{what} is {value!r:.80}, which names no time zone or is out of range",
        "Pass an aware datetime: datetime.now(timezone.utc) + timedelta(hours=1).",
    )


def _delay(
    what: str, value: Any, least: float = 0.0, hint: str = "Seconds or a timedelta, not less than 0."
) -> str | None:
    if is_within(seconds := in_seconds(value), least, 1e9):
        return interval(value)
    raise InvalidTime(f"the {what} is {seconds!r:.60}", hint)


_timeout = partial(_delay, least=1e-6, hint="Seconds or a timedelta, more than 0; None: no limit.")


def _unique(what: str, value: Any) -> str:
    if isinstance(value, str) and value == "waiting":
        return value
    raise InvalidName(f"the {what} is {value!r:.60}", _UNIQUE_HINT)


# As the engine says it.
_UNIQUE_HINT = (
    '"waiting" is the only way, and goes with an idempotency key: while a task with that key waits, a new one'
    " takes its place."
)


def _run_at(what: str, value: Any) -> str | None:
    return _delay(what, value) if isinstance(value, timedelta) else moment(what, value)


def _headers(what: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"the headers are {value!r:.60}", "Pass a dictionary.")
    return encode(dict(value), "headers")


# --- The options -----------------------------------------------------------------------------------


class Declared(TypedDict, total=False):
    """Options of the tasks of one kind, set where their handler is declared."""

    queue: Annotated[str | None, "The queue.", _name]
    priority: Annotated[int | None, "Higher first, within the group. Default: its kind's, or 0.", _priority]
    cost: Annotated[float | None, "Relative to an ordinary task. Default: its kind's, or 1.", _cost]
    max_attempts: Annotated[int | None, "At most its kind's. Default: its kind's, or the queue's.", _attempts]
    timeout: Annotated[Seconds | None, "The most time for one attempt: 30s, 10m.", _timeout]


class BatchOptions(Declared, total=False):
    """Options for all tasks of one call."""

    run_at: Annotated[
        datetime | timedelta | None, "Start not before: +10m, or 2030-01-31T08:00:00+00:00.", _run_at
    ]
    delay: Annotated[Seconds | None, "The same, counted from the database's clock: 30s, 10m.", _delay]
    expires_at: Annotated[datetime | None, "The task does not start after this time.", moment]
    headers: Annotated[Mapping[str, Any] | None, "A JSON object that travels with the task.", _headers]


class TaskOptions(BatchOptions, total=False):
    """Options for one task."""

    user: Annotated[str | None, "The user inside the group. Users share what their group gets.", _key]
    idempotency_key: Annotated[
        str | None, "A second call of the group with this key returns the first task.", _key
    ]
    unique: Annotated[
        Literal["waiting"] | None, "waiting: replace a waiting task with the same idempotency key.", _unique
    ]
    concurrency_key: Annotated[str | None, "Tasks with the same key do not run at the same time.", _key]


class _Kind(TypedDict, total=False):
    kind: Annotated[str | None, "Which handler runs it.", _name]


class EnqueueManyOptions(_Kind, BatchOptions, total=False):
    """The options of `fairq.enqueue_many`."""


class EnqueueOptions(_Kind, TaskOptions, total=False):
    """The options of `fairq.enqueue`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One task of `enqueue_many` that needs more than a group key and a payload."""

    group_key: GroupKey
    payload: Any
    priority: int | None = None
    cost: float | None = None
    idempotency_key: str | None = None
    concurrency_key: str | None = None
    user: str | None = None


OF_ITEMS = Item.__slots__[2:]
DEFAULTS: Mapping[str, Any] = {"queue": "default", "kind": "default"}


# --- Reading the declarations ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    type: Any  # timedelta also stands for seconds
    help: str
    send: Callable[[str, Any], Any] | None = None  # checks a value and returns what the statement takes


@cache
def options_of(declared: Any) -> dict[str, Option]:
    found = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        if get_origin(hint) is Annotated:
            hint, text, *send = get_args(hint)
            found[name] = Option(_type(hint), text, *send)
    return found


def _type(hint: Any) -> Any:
    members = {*get_args(hint)} if get_origin(hint) in (Union, UnionType) else {hint}
    members -= {NoneType}
    if datetime in members:
        return datetime
    if timedelta in members or any(isinstance(each, TypeVar) for each in members):
        return timedelta
    (only,) = members
    return str if get_origin(only) is Literal else get_origin(only) or only


@cache
def _names(declared: Any) -> frozenset[str]:
    return declared.__optional_keys__ | declared.__required_keys__  # type: ignore[no-any-return]


def refuse_unknown(function: str, given: Mapping[str, Any], declared: Any) -> None:
    """Raise Python's own error for an unknown keyword argument."""
    known = _names(declared)
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def sent(given: Mapping[str, Any]) -> dict[str, Any]:
    """A task's options, checked, as the statement takes them."""
    known = options_of(EnqueueOptions)
    found = dict(DEFAULTS)
    for name, value in given.items():
        send = known[name].send
        if value is not None and send is not None:
            try:
                found[name] = send(name, value)
            except Refused as exc:
                exc.about = name
                raise
    if "delay" in found and "run_at" in found:
        raise InvalidTime("the task has both a delay and a run_at", "Pass only one of them.")
    if "unique" in found and "idempotency_key" not in found:
        raise InvalidName('the task is to be unique: "waiting", without an idempotency key', _UNIQUE_HINT)
    if isinstance(given.get("run_at"), timedelta):
        found["delay"] = found.pop("run_at")
    return found


def pair(item: Any, position: int) -> tuple[GroupKey, Any]:
    if isinstance(item, Sequence) and not isinstance(item, str | bytes) and len(item) == 2:
        return item[0], item[1]
    raise ConfigurationError(
        f"items[{position}] is neither a pair of group key and payload nor a fairq.Item: {item!r:.80}"
    )
