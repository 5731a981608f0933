"""Change the policies of queues, groups, keys and the cluster, on whatever connection an application has.

One name each, as in `fairq.client`: an async connection gets a coroutine. The functions are those of the
public SQL with the same names and settings; what is not named stays as it is, None takes a setting away. A
change is part of the caller's transaction, and the next promotion after its commit heeds it.

The settings of a function are a typed dict: its arguments, its answer, the options of the command line and
their help are made from the same line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import lru_cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from fairq.client import check_group_key, identity, interval, is_int, stored_bytes
from fairq.connections import AsyncConnection, Call, SyncConnection, run
from fairq.errors import ConfigurationError, InvalidName, InvalidTime, OutOfRange
from fairq.queries import settings as queries

__all__ = [
    "ClusterSettings",
    "GroupSettings",
    "GroupState",
    "KeySettings",
    "QueueSettings",
    "QueueState",
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
Time = TypeVar("Time")  # Seconds where it is set, timedelta where it is answered

# --- What can be set -------------------------------------------------------------------------------
# One line is one setting: its name, its type, what it is for. What may be None in an answer the engine says:
# a setting that has a default is never.


class GroupSettings(TypedDict, Generic[Time], total=False):
    """The settings of a group's own; None: its queue's hold."""

    weight: Annotated[float | None, "Its share beside groups of weight 1: 0.001 to 1000."]
    max_running: Annotated[int | None, "Most tasks in flight at once."]
    rate_limit: Annotated[int | None, "Most tasks begun per --rate-period."]
    rate_period: Annotated[Time | None, "The time that --rate-limit counts in. Default: 1s."]
    rate_burst: Annotated[int | None, "How many tasks may go ahead of the rate. Default: a second's worth."]
    breaker_threshold: Annotated[int | None, "Failures in a row after which nothing is started for a while."]
    breaker_cooldown: Annotated[Time | None, "How long that is, before one task is tried. Default: 1m."]


class QueueSettings(TypedDict, Generic[Time], total=False):
    """The settings of a queue. `weight` and `group_…` are those of its groups that have none of their own."""

    ready_target: Annotated[
        int | None, "How many tasks are kept ready. Default: four per worker slot, at least 1000."
    ]
    max_attempts: Annotated[int | None, "Attempts of a task that names no number of its own."]
    retry_base: Annotated[Time | None, "Back-off before the second attempt; doubled for every further one."]
    retry_cap: Annotated[Time | None, "Longest back-off."]
    retention: Annotated[Time | None, "How long ended tasks and attempts are kept."]
    notify: Annotated[
        bool | None,
        "Announce new work by NOTIFY. It takes a database-wide lock at commit; polling works without.",
    ]
    weight: Annotated[float | None, "Weight of groups that have none of their own."]
    fairness: Annotated[
        Fairness | None, "What groups share: count (as many tasks for each) or time (as many worker seconds)."
    ]
    group_max_running: Annotated[int | None, "The same for each group that has no cap of its own."]
    group_rate_limit: Annotated[
        int | None, "For each group without a rate of its own: most tasks begun per period."
    ]
    group_rate_period: Annotated[Time | None, "The time that --group-rate-limit counts in. Default: 1s."]
    group_rate_burst: Annotated[
        int | None, "How many tasks of a group may go ahead of that rate. Default: a second's worth."
    ]
    group_breaker_threshold: Annotated[
        int | None, "For each group without its own: failures in a row that stop it for a while."
    ]
    group_breaker_cooldown: Annotated[Time | None, "How long that is, before one task is tried. Default: 1m."]
    max_running: Annotated[int | None, "Most tasks in flight at once in the whole queue."]
    rate_limit: Annotated[int | None, "Most tasks begun per --rate-period in the whole queue."]
    rate_period: Annotated[Time | None, "The time that --rate-limit counts in. Default: 1s."]
    rate_burst: Annotated[int | None, "How many tasks may go ahead of the rate. Default: a second's worth."]
    breaker_threshold: Annotated[
        int | None, "Failures in a row, of any group, after which the whole queue stops for a while."
    ]
    breaker_cooldown: Annotated[Time | None, "How long that is, before one task is tried. Default: 1m."]


class KeySettings(TypedDict, total=False):
    """How many tasks with a concurrency key are in flight at once; None: one."""

    max_running: Annotated[int | None, "Most tasks with this key in flight at once. Default: 1."]


class ClusterSettings(TypedDict, total=False):
    """The settings of the installation."""

    shard_count: Annotated[int | None, "Number of shards. Fixed once there are tasks."]
    payload_limit: Annotated[int | None, "Largest payload, in bytes of its text."]
    max_running: Annotated[int | None, "Most tasks in flight at once over all queues and workers."]


# --- What is answered beside settings --------------------------------------------------------------


class QueueState(QueueSettings[timedelta]):
    """A queue as it is."""

    queue: str
    paused_at: datetime | None
    draining_at: datetime | None


class GroupState(GroupSettings[timedelta]):
    """A group as it is."""

    queue: str
    group_key: str
    paused_at: datetime | None


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
def configure_queue(
    conn: SyncConnection, queue: str, **settings: Unpack[QueueSettings[Seconds]]
) -> QueueState: ...
@overload
def configure_queue(
    conn: AsyncConnection, queue: str, **settings: Unpack[QueueSettings[Seconds]]
) -> Coroutine[Any, Any, QueueState]: ...
def configure_queue(
    conn: Any, queue: str, **settings: Unpack[QueueSettings[Seconds]]
) -> QueueState | Coroutine[Any, Any, QueueState]:
    """Create a queue, or change its settings."""
    _check_text("queue", queue)
    given = _given("configure_queue", settings, QueueSettings)
    call = queries.configure_queue.call(queue=queue, settings=given)
    return run(conn, Call(call, _settings(QueueState)))  # type: ignore[no-any-return]


@overload
def configure_group(
    conn: SyncConnection, queue: str, group_key: str, **settings: Unpack[GroupSettings[Seconds]]
) -> GroupState: ...
@overload
def configure_group(
    conn: AsyncConnection, queue: str, group_key: str, **settings: Unpack[GroupSettings[Seconds]]
) -> Coroutine[Any, Any, GroupState]: ...
def configure_group(
    conn: Any, queue: str, group_key: str, **settings: Unpack[GroupSettings[Seconds]]
) -> GroupState | Coroutine[Any, Any, GroupState]:
    """Change settings of one group of a queue. Groups need none: unknown ones have those of their queue."""
    _check_text("queue", queue)
    check_group_key(group_key)
    given = _given("configure_group", settings, GroupSettings)
    call = queries.configure_group.call(queue=queue, group_key=group_key, settings=given)
    return run(conn, Call(call, _settings(GroupState)))  # type: ignore[no-any-return]


@overload
def configure_key(
    conn: SyncConnection, concurrency_key: str, **settings: Unpack[KeySettings]
) -> KeySettings: ...
@overload
def configure_key(
    conn: AsyncConnection, concurrency_key: str, **settings: Unpack[KeySettings]
) -> Coroutine[Any, Any, KeySettings]: ...
def configure_key(
    conn: Any, concurrency_key: str, **settings: Unpack[KeySettings]
) -> KeySettings | Coroutine[Any, Any, KeySettings]:
    """Say how many tasks with a concurrency key may be in flight at once, over all queues and groups."""
    _check_text("concurrency key", concurrency_key)
    given = _given("configure_key", settings, KeySettings)
    call = queries.configure_key.call(concurrency_key=concurrency_key, settings=given)
    return run(conn, Call(call, _settings(KeySettings)))  # type: ignore[no-any-return]


@overload
def configure_cluster(conn: SyncConnection, **settings: Unpack[ClusterSettings]) -> ClusterSettings: ...
@overload
def configure_cluster(
    conn: AsyncConnection, **settings: Unpack[ClusterSettings]
) -> Coroutine[Any, Any, ClusterSettings]: ...
def configure_cluster(
    conn: Any, **settings: Unpack[ClusterSettings]
) -> ClusterSettings | Coroutine[Any, Any, ClusterSettings]:
    """Change settings of the installation."""
    call = queries.configure_cluster.call(settings=_given("configure_cluster", settings, ClusterSettings))
    return run(conn, Call(call, _settings(ClusterSettings)))  # type: ignore[no-any-return]


# --- Stop and go on --------------------------------------------------------------------------------


@overload
def pause_queue(conn: SyncConnection, queue: str) -> None: ...
@overload
def pause_queue(conn: AsyncConnection, queue: str) -> Coroutine[Any, Any, None]: ...
def pause_queue(conn: Any, queue: str) -> Coroutine[Any, Any, None] | None:
    """Stop serving a queue until it is resumed. Tasks can be created all the while; those that run go on."""
    _check_text("queue", queue)
    call = queries.pause_queue.call(queue=queue)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def resume_queue(conn: SyncConnection, queue: str) -> None: ...
@overload
def resume_queue(conn: AsyncConnection, queue: str) -> Coroutine[Any, Any, None]: ...
def resume_queue(conn: Any, queue: str) -> Coroutine[Any, Any, None] | None:
    """Serve a paused queue again, and take new tasks where it was draining."""
    _check_text("queue", queue)
    call = queries.resume_queue.call(queue=queue)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def drain_queue(conn: SyncConnection, queue: str) -> None: ...
@overload
def drain_queue(conn: AsyncConnection, queue: str) -> Coroutine[Any, Any, None]: ...
def drain_queue(conn: Any, queue: str) -> Coroutine[Any, Any, None] | None:
    """Let a queue run empty: new tasks are refused, those that are there are served, until it is resumed."""
    _check_text("queue", queue)
    call = queries.drain_queue.call(queue=queue)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def pause_group(conn: SyncConnection, queue: str, group_key: str) -> None: ...
@overload
def pause_group(conn: AsyncConnection, queue: str, group_key: str) -> Coroutine[Any, Any, None]: ...
def pause_group(conn: Any, queue: str, group_key: str) -> Coroutine[Any, Any, None] | None:
    """Stop serving a group until it is resumed. Its ready tasks go back in line; those that run go on."""
    _check_text("queue", queue)
    check_group_key(group_key)
    call = queries.pause_group.call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def resume_group(conn: SyncConnection, queue: str, group_key: str) -> None: ...
@overload
def resume_group(conn: AsyncConnection, queue: str, group_key: str) -> Coroutine[Any, Any, None]: ...
def resume_group(conn: Any, queue: str, group_key: str) -> Coroutine[Any, Any, None] | None:
    """Serve a paused group again. What it missed is not made up for."""
    _check_text("queue", queue)
    check_group_key(group_key)
    call = queries.resume_group.call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


@overload
def purge_group(conn: SyncConnection, queue: str, group_key: str) -> int: ...
@overload
def purge_group(conn: AsyncConnection, queue: str, group_key: str) -> Coroutine[Any, Any, int]: ...
def purge_group(conn: Any, queue: str, group_key: str) -> int | Coroutine[Any, Any, int]:
    """Cancel everything a group has waiting, and return how many tasks that were. Running ones are left."""
    _check_text("queue", queue)
    check_group_key(group_key)
    call = queries.purge_group.call(queue=queue, group_key=group_key)
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
    call = queries.rate_usage.call(queue=queue, group_key=group_key)
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
    call = queries.reset_rate.call(queue=queue, group_key=group_key)
    return run(conn, Call(call, _nothing))  # type: ignore[no-any-return]


# --- What can be judged without the database -------------------------------------------------------


@lru_cache
def kinds(settings: Any) -> dict[str, tuple[type, str]]:
    """The settings of a typed dict, each with its type (timedelta: a length of time) and what it is for."""
    found = {}
    for name, hint in get_type_hints(settings, include_extras=True).items():
        if get_origin(hint) is Annotated:
            hint, text = get_args(hint)
            (kind,) = {*get_args(hint)} - {NoneType}
            found[name] = (
                timedelta if kind is Time else str if get_origin(kind) is Literal else kind,
                text,
            )
    return found


def _given(function: str, settings: Mapping[str, Any], known: Any) -> str:
    """The settings as the statement takes them. Ranges the engine judges; it knows them better."""
    for name in settings:
        if name not in kinds(known):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return json.dumps({name: _value(name, value, kinds(known)[name][0]) for name, value in settings.items()})


def _value(name: str, value: Any, kind: type) -> Any:
    if value is None:
        return None
    if kind in (bool, str):
        if not isinstance(value, kind):
            raise ConfigurationError(f"{name} is {value!r:.60}: pass {_EXAMPLES[kind]}")
        return value
    if kind is int:
        if not is_int(value, -(2**31), 2**31 - 1):
            raise OutOfRange(f"{name} is {value!r:.60}", "An integer; None takes the setting away.")
        return value
    if kind is timedelta:
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if not _is_number(seconds) or not abs(seconds) <= 1e10:
            raise InvalidTime(f"{name} is {value!r:.60}", "Seconds or a timedelta; None takes it away.")
        return interval(value)
    if not _is_number(value):
        raise OutOfRange(f"{name} is {value!r:.60}", "A number; None takes the setting away.")
    return float(value)


_EXAMPLES = {bool: "True or False", str: "a string"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_text(what: str, name: object) -> None:
    if not isinstance(name, str) or not 1 <= stored_bytes(name) <= 500:
        raise InvalidName(f"the {what} is {name!r:.60}", "A text of 1 to 500 bytes, without U+0000.")


# --- Reading answers -------------------------------------------------------------------------------
# Lengths of time come in seconds, and moments as texts: drivers agree on those.

S = TypeVar("S")


def _settings(answer: Callable[..., S]) -> Callable[[str], S]:
    """Of what the engine answers, what the typed dict names."""
    hints = get_type_hints(answer)

    def read(text: str) -> S:
        row = json.loads(text)
        return answer(**{name: _read(hint, row[name]) for name, hint in hints.items() if name in row})

    return read


def _usage(row: queries.RateUsageRow | None) -> RateUsage | None:
    if row is None:
        return None
    hints = get_type_hints(RateUsage)
    return RateUsage(
        **{each.name: _read(hints[each.name], getattr(row, each.name)) for each in fields(RateUsage)}
    )


def _read(hint: Any, value: Any) -> Any:
    types = {hint, *get_args(hint)}
    if value is None:
        return None
    if types & {timedelta, Time}:
        return timedelta(seconds=value)
    if float in types:
        return float(value)
    return datetime.fromisoformat(value) if datetime in types else value


def _nothing(answer: str) -> None:
    """What a function that returns nothing answers."""
