"""Change the policies of queues, groups, keys and the cluster, on whatever connection an application has.

One name each, as in `fairq.client`: an async connection gets a coroutine. The functions are those of the
public SQL with the same names and settings; what is not named stays as it is, a name in `reset` takes a
setting away. A change is part of the caller's transaction, and the next promotion after its commit heeds it.

The settings of a function are a typed dict, and the options of the command line are made from the same: a
new setting is one line here.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, get_type_hints, overload

from fairq.client import check_group_key, identity, interval, is_int, stored_bytes
from fairq.connections import AsyncConnection, Call, SyncConnection, run
from fairq.errors import ConfigurationError, InvalidName, InvalidTime, OutOfRange
from fairq.queries import settings as queries

__all__ = [
    "ClusterSettings",
    "GroupSettings",
    "KeySettings",
    "QueueSettings",
    "RateUsage",
    "configure_cluster",
    "configure_group",
    "configure_key",
    "configure_queue",
    "drain_queue",
    "pause_group",
    "pause_queue",
    "purge_group",
    "rate_usage",
    "reset_rate",
    "resume_group",
    "resume_queue",
]

Seconds = float | timedelta
Fairness = Literal["count", "time"]

# --- What can be set -------------------------------------------------------------------------------
# None is the same as not to name a setting. `docs/reference/python.md` says what each means.

QueueReset = Literal[
    "ready_target",
    "weight",
    "group_max_running",
    "group_rate",
    "group_breaker",
    "max_running",
    "rate",
    "breaker",
]
GroupReset = Literal["weight", "max_running", "rate", "breaker"]
KeyReset = Literal["max_running"]
ClusterReset = Literal["max_running"]


class QueueChanges(TypedDict, total=False):
    ready_target: int | None
    max_attempts: int | None
    retry_base: Seconds | None
    retry_cap: Seconds | None
    retention: Seconds | None
    notify: bool | None
    weight: float | None
    fairness: Fairness | None
    group_max_running: int | None
    group_rate_limit: int | None
    group_rate_period: Seconds | None
    group_rate_burst: int | None
    group_breaker_threshold: int | None
    group_breaker_cooldown: Seconds | None
    max_running: int | None
    rate_limit: int | None
    rate_period: Seconds | None
    rate_burst: int | None
    breaker_threshold: int | None
    breaker_cooldown: Seconds | None
    reset: Iterable[QueueReset]


class GroupChanges(TypedDict, total=False):
    weight: float | None
    max_running: int | None
    rate_limit: int | None
    rate_period: Seconds | None
    rate_burst: int | None
    breaker_threshold: int | None
    breaker_cooldown: Seconds | None
    reset: Iterable[GroupReset]


class KeyChanges(TypedDict, total=False):
    max_running: int | None
    reset: Iterable[KeyReset]


class ClusterChanges(TypedDict, total=False):
    shard_count: int | None
    payload_limit: int | None
    max_running: int | None
    reset: Iterable[ClusterReset]


# --- What is answered ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings of a queue. `group_…` hold for each of its groups that has none of its own."""

    queue: str
    ready_target: int | None
    max_attempts: int
    retry_base: timedelta
    retry_cap: timedelta
    retention: timedelta
    notify: bool
    weight: float
    fairness: str
    group_max_running: int | None
    group_rate_limit: int | None
    group_rate_period: timedelta | None
    group_rate_burst: int | None
    group_breaker_threshold: int | None
    group_breaker_cooldown: timedelta | None
    max_running: int | None
    rate_limit: int | None
    rate_period: timedelta | None
    rate_burst: int | None
    breaker_threshold: int | None
    breaker_cooldown: timedelta | None
    paused_at: datetime | None
    draining_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The settings of a group's own; None: its queue's hold."""

    queue: str
    group_key: str
    weight: float | None
    max_running: int | None
    rate_limit: int | None
    rate_period: timedelta | None
    rate_burst: int | None
    breaker_threshold: int | None
    breaker_cooldown: timedelta | None
    paused_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """How many tasks with a concurrency key are in flight at once; None: one."""

    concurrency_key: str
    max_running: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The settings of the installation."""

    shard_count: int
    payload_limit: int
    max_running: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateUsage:
    """How much of a rate is used. `available` tasks may go now; when none may, one may at `next_at`."""

    queue: str
    group_key: str | None
    rate_limit: int
    rate_period: timedelta
    rate_burst: int
    used: int
    available: int
    next_at: datetime | None
    full_at: datetime | None


# --- Settings --------------------------------------------------------------------------------------


@overload
def configure_queue(conn: SyncConnection, queue: str, **changes: Unpack[QueueChanges]) -> QueueSettings: ...
@overload
def configure_queue(
    conn: AsyncConnection, queue: str, **changes: Unpack[QueueChanges]
) -> Coroutine[Any, Any, QueueSettings]: ...
def configure_queue(
    conn: Any, queue: str, **changes: Unpack[QueueChanges]
) -> QueueSettings | Coroutine[Any, Any, QueueSettings]:
    """Create a queue, or change its settings."""
    _check_text("queue", queue)
    given = _given("configure_queue", changes, QueueChanges)
    call = queries.configure_queue_call(queue=queue, **given)
    return run(conn, Call(call, _reader(QueueSettings)))  # type: ignore[no-any-return]


@overload
def configure_group(
    conn: SyncConnection, queue: str, group_key: str, **changes: Unpack[GroupChanges]
) -> GroupSettings: ...
@overload
def configure_group(
    conn: AsyncConnection, queue: str, group_key: str, **changes: Unpack[GroupChanges]
) -> Coroutine[Any, Any, GroupSettings]: ...
def configure_group(
    conn: Any, queue: str, group_key: str, **changes: Unpack[GroupChanges]
) -> GroupSettings | Coroutine[Any, Any, GroupSettings]:
    """Change settings of one group of a queue. Groups need none: unknown ones have those of their queue."""
    _check_text("queue", queue)
    check_group_key(group_key)
    given = _given("configure_group", changes, GroupChanges)
    call = queries.configure_group_call(queue=queue, group_key=group_key, **given)
    return run(conn, Call(call, _reader(GroupSettings)))  # type: ignore[no-any-return]


@overload
def configure_key(
    conn: SyncConnection, concurrency_key: str, **changes: Unpack[KeyChanges]
) -> KeySettings: ...
@overload
def configure_key(
    conn: AsyncConnection, concurrency_key: str, **changes: Unpack[KeyChanges]
) -> Coroutine[Any, Any, KeySettings]: ...
def configure_key(
    conn: Any, concurrency_key: str, **changes: Unpack[KeyChanges]
) -> KeySettings | Coroutine[Any, Any, KeySettings]:
    """Say how many tasks with a concurrency key may be in flight at once, over all queues and groups."""
    _check_text("concurrency key", concurrency_key)
    given = _given("configure_key", changes, KeyChanges)
    call = queries.configure_key_call(concurrency_key=concurrency_key, **given)
    return run(conn, Call(call, _reader(KeySettings)))  # type: ignore[no-any-return]


@overload
def configure_cluster(conn: SyncConnection, **changes: Unpack[ClusterChanges]) -> ClusterSettings: ...
@overload
def configure_cluster(
    conn: AsyncConnection, **changes: Unpack[ClusterChanges]
) -> Coroutine[Any, Any, ClusterSettings]: ...
def configure_cluster(
    conn: Any, **changes: Unpack[ClusterChanges]
) -> ClusterSettings | Coroutine[Any, Any, ClusterSettings]:
    """Change settings of the installation."""
    given = _given("configure_cluster", changes, ClusterChanges)
    call = queries.configure_cluster_call(**given)
    return run(conn, Call(call, _reader(ClusterSettings)))  # type: ignore[no-any-return]


# --- Stop and go on --------------------------------------------------------------------------------


@overload
def pause_queue(conn: SyncConnection, queue: str) -> None: ...
@overload
def pause_queue(conn: AsyncConnection, queue: str) -> Coroutine[Any, Any, None]: ...
def pause_queue(conn: Any, queue: str) -> Coroutine[Any, Any, None] | None:
    """Stop serving a queue until it is resumed. Tasks can be created all the while; those that run go on."""
    _check_text("queue", queue)
    call = queries.pause_queue_call(queue=queue)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def resume_queue(conn: SyncConnection, queue: str) -> None: ...
@overload
def resume_queue(conn: AsyncConnection, queue: str) -> Coroutine[Any, Any, None]: ...
def resume_queue(conn: Any, queue: str) -> Coroutine[Any, Any, None] | None:
    """Serve a paused queue again, and take new tasks where it was draining."""
    _check_text("queue", queue)
    call = queries.resume_queue_call(queue=queue)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def drain_queue(conn: SyncConnection, queue: str) -> None: ...
@overload
def drain_queue(conn: AsyncConnection, queue: str) -> Coroutine[Any, Any, None]: ...
def drain_queue(conn: Any, queue: str) -> Coroutine[Any, Any, None] | None:
    """Let a queue run empty: new tasks are refused, those that are there are served, until it is resumed."""
    _check_text("queue", queue)
    call = queries.drain_queue_call(queue=queue)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def pause_group(conn: SyncConnection, queue: str, group_key: str) -> None: ...
@overload
def pause_group(conn: AsyncConnection, queue: str, group_key: str) -> Coroutine[Any, Any, None]: ...
def pause_group(conn: Any, queue: str, group_key: str) -> Coroutine[Any, Any, None] | None:
    """Stop serving a group until it is resumed. Its ready tasks go back in line; those that run go on."""
    _check_text("queue", queue)
    check_group_key(group_key)
    call = queries.pause_group_call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def resume_group(conn: SyncConnection, queue: str, group_key: str) -> None: ...
@overload
def resume_group(conn: AsyncConnection, queue: str, group_key: str) -> Coroutine[Any, Any, None]: ...
def resume_group(conn: Any, queue: str, group_key: str) -> Coroutine[Any, Any, None] | None:
    """Serve a paused group again. What it missed is not made up for."""
    _check_text("queue", queue)
    check_group_key(group_key)
    call = queries.resume_group_call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def purge_group(conn: SyncConnection, queue: str, group_key: str) -> int: ...
@overload
def purge_group(conn: AsyncConnection, queue: str, group_key: str) -> Coroutine[Any, Any, int]: ...
def purge_group(conn: Any, queue: str, group_key: str) -> int | Coroutine[Any, Any, int]:
    """Cancel everything a group has waiting, and return how many tasks that were. Running ones are left."""
    _check_text("queue", queue)
    check_group_key(group_key)
    call = queries.purge_group_call(queue=queue, group_key=group_key)
    return run(conn, Call(call, identity))  # type: ignore[no-any-return]


# --- Rates -----------------------------------------------------------------------------------------


@overload
def rate_usage(conn: SyncConnection, queue: str, group_key: str | None = ...) -> RateUsage | None: ...
@overload
def rate_usage(
    conn: AsyncConnection, queue: str, group_key: str | None = ...
) -> Coroutine[Any, Any, RateUsage | None]: ...
def rate_usage(
    conn: Any, queue: str, group_key: str | None = None
) -> RateUsage | Coroutine[Any, Any, RateUsage | None] | None:
    """Say how much is used of a group's rate, or of the rate of the whole queue. None: there is no rate."""
    _check_text("queue", queue)
    if group_key is not None:
        check_group_key(group_key)
    call = queries.rate_usage_call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _usage))  # type: ignore[no-any-return]


@overload
def reset_rate(conn: SyncConnection, queue: str, group_key: str | None = ...) -> None: ...
@overload
def reset_rate(
    conn: AsyncConnection, queue: str, group_key: str | None = ...
) -> Coroutine[Any, Any, None]: ...
def reset_rate(conn: Any, queue: str, group_key: str | None = None) -> Coroutine[Any, Any, None] | None:
    """Forget what was used of a group's rate, or of that of the whole queue: a full burst may go at once."""
    _check_text("queue", queue)
    if group_key is not None:
        check_group_key(group_key)
    call = queries.reset_rate_call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


# --- What can be judged without the database -------------------------------------------------------


def kinds(changes: type) -> dict[str, type]:
    """The settings of a typed dict, each with its type; timedelta for any length of time."""
    found = {}
    for name, hint in get_type_hints(changes).items():
        types = {*get_args(hint)} - {NoneType}
        if name != "reset":
            found[name] = timedelta if timedelta in types else str if Fairness in types else types.pop()
    return found


_kinds = lru_cache(kinds)


def _given(function: str, changes: Mapping[str, Any], known: type) -> dict[str, Any]:
    """The changes as the statement takes them. Ranges the engine judges; it knows them better."""
    found: dict[str, Any] = {"reset": _reset(changes.get("reset", ()))}
    for name, value in changes.items():
        if name == "reset":
            continue
        kind = _kinds(known).get(name)
        if kind is None:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None:
            found[name] = _value(name, value, kind)
    return found


def _reset(names: Any) -> list[str]:
    found = None if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if found is None or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(f"reset is {names!r:.60}: pass a list of names, such as ['rate']")
    return found


def _value(name: str, value: Any, kind: type) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} is {value!r:.60}: pass True or False")
        return value
    if kind is str:
        if not isinstance(value, str):
            raise ConfigurationError(f"{name} is {value!r:.60}: pass a string")
        return value
    if kind is int:
        if not is_int(value, -(2**31), 2**31 - 1):
            raise OutOfRange(f"{name} is {value!r:.60}", "An integer; None leaves it as it is.")
        return value
    if kind is timedelta:
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if not _is_number(seconds) or not abs(seconds) <= 1e10:
            raise InvalidTime(f"{name} is {value!r:.60}", "Seconds or a timedelta; None leaves it as it is.")
        return interval(value)
    if not _is_number(value):
        raise OutOfRange(f"{name} is {value!r:.60}", "A number; None leaves it as it is.")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _check_text(what: str, name: object) -> None:
    if not isinstance(name, str) or not 1 <= stored_bytes(name) <= 500:
        raise InvalidName(f"the {what} is {name!r:.60}", "A text of 1 to 500 bytes, without U+0000.")


# --- Reading answers -------------------------------------------------------------------------------

S = TypeVar("S")


def _reader(answer: type[S]) -> Any:
    """Rows hold lengths of time in seconds, and moments as texts: drivers agree on those."""
    hints = get_type_hints(answer)
    spans = {name for name, hint in hints.items() if timedelta in (hint, *get_args(hint))}
    moments = {name for name, hint in hints.items() if datetime in get_args(hint)}

    def made(name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in spans:
            return timedelta(seconds=value)
        return datetime.fromisoformat(value) if name in moments else value

    def read(row: Any) -> S:
        return answer(**{field.name: made(field.name, getattr(row, field.name)) for field in fields(answer)})  # type: ignore[arg-type]

    return read


def _usage(row: queries.RateUsageRow | None) -> RateUsage | None:
    found: RateUsage | None = None if row is None else _reader(RateUsage)(row)
    return found


def _nothing(answer: str) -> None:
    """What a function that returns nothing answers."""
