"""Change the policies of queues, groups, keys and the cluster, on the caller's connection.

As in `fairq.client`, an async connection gets a coroutine. The functions have the names and settings of the
public SQL. Settings that are not named stay unchanged; None takes a setting away. A change is part of the
caller's transaction and takes effect with the next promotion after its commit.

A typed dict declares the settings of a function: its arguments, its answer, the options of the command line
and their help are made from the same line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from fairq.connections import on_connection
from fairq.driver import Call
from fairq.errors import ConfigurationError, InvalidTime, OutOfRange
from fairq.options import (
    GroupKey,
    Seconds,
    check_text,
    group_text,
    in_seconds,
    interval,
    is_int,
    is_number,
    moment,
    options_of,
    refuse_unknown,
)
from fairq.queries import settings as queries

__all__ = ["configure_cluster", "configure_group", "configure_key", "configure_kind"]
__all__ += ["configure_queue", "configure_user", "drain_queue", "hold_group", "hold_key", "pause_group"]
__all__ += ["pause_queue", "purge_group", "reset_rate", "resume_group", "resume_queue"]
__all__ += ["ClusterSettings", "GroupSettings", "KeySettings", "KindSettings", "QueueSettings"]
__all__ += ["GroupState", "KindState", "QueueState", "UserSettings", "UserState"]
__all__ += ["BudgetUsage", "RateUsage", "budget_usage", "rate_usage"]

Fairness = Literal["count", "time", "cost"]
Time = TypeVar("Time")  # Seconds where it is set, timedelta where it is answered

# --- What can be set -------------------------------------------------------------------------------
# One line is one setting: its name, its type, its help. In an answer, a setting with a default is never None.


class UserSettings(TypedDict, Generic[Time], total=False):
    """The settings of one user of a group. Those it lacks come from the group's or queue's `user_…`."""

    weight: Annotated[float | None, "Its share beside those of weight 1: 0.001 to 1000."]
    max_running: Annotated[int | None, "The most tasks in flight at once. 0 starts none."]
    rate_limit: Annotated[int | None, "The most tasks started per --rate-period."]
    rate_period: Annotated[Time | None, "The period of --rate-limit. Default: 1s."]
    rate_burst: Annotated[
        int | None, "How many may go ahead of the rate, 1 to 100,000. Default: a second's worth."
    ]
    breaker_threshold: Annotated[int | None, "After this many failures in a row, start nothing for a while."]
    breaker_cooldown: Annotated[Time | None, "How long, before one task is tried. Default: 1m."]


class _OfUsers(TypedDict, Generic[Time], total=False):
    """Settings of each user without its own."""

    user_weight: Annotated[float | None, "Weight of each user without its own."]
    user_max_running: Annotated[int | None, "For each user without its own: most tasks in flight at once."]
    user_rate_limit: Annotated[int | None, "For each user without its own: most tasks started per period."]
    user_rate_period: Annotated[Time | None, "The period of --user-rate-limit. Default: 1s."]
    user_rate_burst: Annotated[
        int | None, "How many may go ahead of that, 1 to 100,000. Default: a second's worth."
    ]
    user_breaker_threshold: Annotated[int | None, "Failures in a row that stop a user without its own."]
    user_breaker_cooldown: Annotated[Time | None, "How long, before one task is tried. Default: 1m."]


class GroupSettings(UserSettings[Time], _OfUsers[Time], Generic[Time], total=False):
    """A group's own settings. Without a setting, its queue's holds. `user_…` apply to each of its users."""

    budget: Annotated[
        float | None, "The most that its tasks use per --budget-period, in what groups share: 0 to 10^15."
    ]
    budget_period: Annotated[Time | None, "The period of --budget, at least a second. Default: 1d."]


class _OfGroups(TypedDict, Generic[Time], total=False):
    """Settings of a queue's tasks, and of each group without its own."""

    ready_target: Annotated[
        int | None,
        "How many tasks a pass makes ready beside those it hands over, 1 to 1,000,000. Default: twice the"
        " slots of the other live workers, 4,000 at most, and at least what makes 200 with those handed over"
        " (50 unless groups share by count).",
    ]
    max_attempts: Annotated[
        int | None, "Attempts of a task that asks for no number of its own, 1 to 1,000,000."
    ]
    retry_base: Annotated[Time | None, "Back-off before the second attempt; doubled before each further one."]
    retry_cap: Annotated[Time | None, "The longest back-off."]
    retention: Annotated[Time | None, "How long ended tasks and attempts are kept, at most 36,525 days."]
    notify: Annotated[
        bool | None,
        "Announce new tasks by NOTIFY. It takes a database-wide lock at commit; polling needs none.",
    ]
    weight: Annotated[float | None, "Weight of each group without its own: 0.001 to 1000."]
    fairness: Annotated[
        Fairness | None,
        "What groups share: count (tasks, by cost), time (worker seconds) or cost (what handlers charge).",
    ]
    group_max_running: Annotated[int | None, "For each group without its own: most tasks in flight at once."]
    group_rate_limit: Annotated[int | None, "For each group without its own: most tasks started per period."]
    group_rate_period: Annotated[Time | None, "The period of --group-rate-limit. Default: 1s."]
    group_rate_burst: Annotated[
        int | None, "How many may go ahead of that, 1 to 100,000. Default: a second's worth."
    ]
    group_breaker_threshold: Annotated[int | None, "Failures in a row that stop a group without its own."]
    group_breaker_cooldown: Annotated[Time | None, "How long, before one task is tried. Default: 1m."]
    group_budget: Annotated[
        float | None,
        "For each group without its own: the most that its tasks use per period, in what groups share.",
    ]
    group_budget_period: Annotated[Time | None, "The period of --group-budget. Default: 1d."]


class QueueSettings(_OfGroups[Time], _OfUsers[Time], Generic[Time], total=False):
    """The settings of a queue. `weight` and `group_…` apply to each group without its own, `user_…` to each
    user.
    """

    max_running: Annotated[int | None, "The most tasks in flight at once in the whole queue."]
    rate_limit: Annotated[int | None, "The most tasks started per --rate-period in the whole queue."]
    rate_period: Annotated[Time | None, "The period of --rate-limit. Default: 1s."]
    rate_burst: Annotated[
        int | None, "How many may go ahead of the rate, 1 to 100,000. Default: a second's worth."
    ]
    breaker_threshold: Annotated[int | None, "Failures in a row, of any group, that stop the queue."]
    breaker_cooldown: Annotated[Time | None, "How long, before one task is tried. Default: 1m."]
    short_slots: Annotated[
        int | None,
        "How many slots of the workers are kept for short tasks, fewer than --max-running. One is always left"
        " to long ones.",
    ]
    short_under: Annotated[
        float | None,
        "Tasks expected to cost at most this are short, 0.001 to 1,000,000: seconds, if groups share time."
        " Default: 1.",
    ]
    short_idle: Annotated[
        Time | None, "How long those slots may idle while only long tasks wait. Default: 1m."
    ]
    enqueue_role: Annotated[str | None, "Only members of this database role may enqueue."]
    work_role: Annotated[str | None, "Only members of this database role may serve the queue."]


class KindSettings(TypedDict, Generic[Time], total=False):
    """What holds for the tasks of a kind, however they are created; None: nothing is declared."""

    max_attempts: Annotated[
        int | None, "The most attempts of such a task, 1 to 1,000,000; it may ask for fewer."
    ]
    priority: Annotated[int | None, "Priority of a task that has none of its own."]
    cost: Annotated[float | None, "Cost of a task that has none of its own."]
    timeout: Annotated[Time | None, "The most time for one attempt of a task without its own timeout."]
    owner: Annotated[
        str | None, "The app it belongs to; no other app may change it. Empty: an app without a name."
    ]


class KeySettings(TypedDict, total=False):
    """How many tasks with a concurrency key are in flight at once; None: one."""

    max_running: Annotated[int | None, "The most tasks with this key in flight at once. Default: 1."]


class ClusterSettings(TypedDict, total=False):
    shard_count: Annotated[int | None, "Number of shards, 1 to 4096. Groups move to their new homes."]
    payload_limit: Annotated[int | None, "Largest payload, in bytes of its text, up to 256 MiB."]
    max_running: Annotated[int | None, "The most tasks in flight at once over all queues and workers."]


# --- Answers ---------------------------------------------------------------------------------------


class QueueState(QueueSettings[timedelta]):
    queue: str
    paused_at: datetime | None
    draining_at: datetime | None


class KindState(KindSettings[timedelta]):
    queue: str
    kind: str


class UserState(UserSettings[timedelta]):
    queue: str
    group_key: str
    user_key: str
    paused_at: datetime | None


class GroupState(GroupSettings[timedelta]):
    queue: str
    group_key: str
    paused_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateUsage:
    """How much of a rate is used. `available` tasks may start now; if none, the next may at `next_at`."""

    queue: str
    group_key: str | None
    rate_limit: int
    rate_period: timedelta
    rate_burst: int
    used: int
    available: int
    next_at: datetime | None
    full_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUsage:
    """How much of a budget is used: `spent` by ended tasks of this period, `reserved` by those in flight."""

    queue: str
    group_key: str
    budget: float
    budget_period: timedelta
    spent: float
    reserved: float
    available: float
    renews_at: datetime


# --- Settings --------------------------------------------------------------------------------------


@on_connection
def configure_queue(queue: str, **settings: Unpack[QueueSettings[Seconds]]) -> Call[QueueState]:
    """Create a queue, or change its settings."""
    return queue_call(queue, settings)


@on_connection
def configure_kind(queue: str, kind: str, **settings: Unpack[KindSettings[Seconds]]) -> Call[KindState]:
    """Declare what holds for the tasks of a kind in a queue, also for tasks created by SQL."""
    return kind_call(queue, kind, settings)


@on_connection
def configure_group(
    queue: str, group_key: str, **settings: Unpack[GroupSettings[Seconds]]
) -> Call[GroupState]:
    """Change the settings of one group of a queue. Groups need none: without, their queue's hold."""
    given = _given("configure_group", settings, GroupSettings)
    return queries.configure_group.call(**_group(queue, group_key), settings=given).then(
        _settings(GroupState)
    )


@on_connection
def configure_user(
    queue: str, group_key: GroupKey, user: str, **settings: Unpack[UserSettings[Seconds]]
) -> Call[UserState]:
    """Change the settings of one user, which count inside its group. Users need none."""
    given = _given("configure_user", settings, UserSettings)
    named = {**_group(queue, group_key), "user_key": check_text("user", user)}
    return queries.configure_user.call(**named, settings=given).then(_settings(UserState))


@on_connection
def configure_key(concurrency_key: str, **settings: Unpack[KeySettings]) -> Call[KeySettings]:
    """Set how many tasks with a concurrency key may be in flight at once, over all queues and groups."""
    key = check_text("concurrency key", concurrency_key)
    given = _given("configure_key", settings, KeySettings)
    return queries.configure_key.call(concurrency_key=key, settings=given).then(_settings(KeySettings))


@on_connection
def configure_cluster(**settings: Unpack[ClusterSettings]) -> Call[ClusterSettings]:
    """Change the settings of the cluster."""
    given = _given("configure_cluster", settings, ClusterSettings)
    return queries.configure_cluster.call(settings=given).then(_settings(ClusterSettings))


# --- Stop and go on --------------------------------------------------------------------------------


@on_connection
def pause_queue(queue: str) -> Call[None]:
    """Stop serving a queue until it is resumed. It still takes new tasks, and running ones go on."""
    return queries.pause_queue.call(queue=check_text("queue", queue)).then(_nothing)


@on_connection
def resume_queue(queue: str) -> Call[None]:
    """Serve a paused queue again, and accept new tasks if it was draining."""
    return queries.resume_queue.call(queue=check_text("queue", queue)).then(_nothing)


@on_connection
def drain_queue(queue: str) -> Call[None]:
    """Let a queue run empty: until it is resumed, it refuses new tasks and serves those it has."""
    return queries.drain_queue.call(queue=check_text("queue", queue)).then(_nothing)


@on_connection
def pause_group(queue: str, group_key: GroupKey, user: str | None = None) -> Call[None]:
    """Stop serving a group, or one of its users, until it is resumed.

    Ready tasks go back in line; running ones go on.
    """
    return queries.pause_group.call(**_group(queue, group_key), user_key=_user(user)).then(_nothing)


@on_connection
def resume_group(queue: str, group_key: GroupKey, user: str | None = None) -> Call[None]:
    """Serve a paused group, or one of its users, again. It does not catch up on missed turns."""
    return queries.resume_group.call(**_group(queue, group_key), user_key=_user(user)).then(_nothing)


@on_connection
def purge_group(
    queue: str, group_key: GroupKey, user: str | None = None, *, until: datetime | None = None
) -> Call[int]:
    """Cancel all waiting tasks of a group, or of one of its users, and return how many there were. Running
    tasks go on. With `until`, only cancel tasks created up to then.
    """
    return queries.purge_group.call(**_group(queue, group_key), user_key=_user(user), until=_until(until))


@on_connection
def hold_group(queue: str, group_key: GroupKey, until: datetime | timedelta | None) -> Call[None]:
    """Start no task of a group before a time, at most 366 days away. None ends the hold.

    Ready tasks go back in line; running ones go on.
    """
    return queries.hold_group.call(**_group(queue, group_key), until=_until(until)).then(_nothing)


@on_connection
def hold_key(concurrency_key: str, until: datetime | timedelta | None) -> Call[None]:
    """Start no task with a concurrency key before a time, at most 366 days away. None ends the hold."""
    key = check_text("concurrency key", concurrency_key)
    return queries.hold_key.call(concurrency_key=key, until=_until(until)).then(_nothing)


# --- Rates and budgets -----------------------------------------------------------------------------


@on_connection
def budget_usage(queue: str, group_key: GroupKey) -> Call[BudgetUsage | None]:
    """How much of a group's budget is used; None: it has no budget."""
    call = queries.budget_usage.call(**_group(queue, group_key))
    return call.then(lambda row: None if row is None else read_row(BudgetUsage, row))


@on_connection
def rate_usage(queue: str, group_key: GroupKey | None = None) -> Call[RateUsage | None]:
    """How much of a group's rate, or of the whole queue's, is used; None: there is no rate."""
    call = queries.rate_usage.call(**_group(queue, group_key, optional=True))
    return call.then(lambda row: None if row is None else read_row(RateUsage, row))


@on_connection
def reset_rate(queue: str, group_key: GroupKey | None = None) -> Call[None]:
    """Reset a group's rate, or the whole queue's: a full burst may start at once."""
    return queries.reset_rate.call(**_group(queue, group_key, optional=True)).then(_nothing)


# --- What is checked without the database ----------------------------------------------------------


def queue_call(queue: str, settings: Mapping[str, Any]) -> Call[QueueState]:
    given = _given("configure_queue", settings, QueueSettings)
    call = queries.configure_queue.call(queue=check_text("queue", queue), settings=given)
    return call.then(_settings(QueueState))


def kind_call(queue: str, kind: str, settings: Mapping[str, Any]) -> Call[KindState]:
    given = _given("configure_kind", settings, KindSettings)
    names = {"queue": check_text("queue", queue), "kind": check_text("kind", kind, 200)}
    return queries.configure_kind.call(**names, settings=given).then(_settings(KindState))


def _group(queue: str, group_key: GroupKey | None, *, optional: bool = False) -> dict[str, Any]:
    check_text("queue", queue)
    if group_key is not None or not optional:
        group_key = group_text(group_key)
    return {"queue": queue, "group_key": group_key}


def _user(user: str | None) -> str | None:
    return None if user is None else check_text("user", user)


def _until(until: datetime | timedelta | None) -> str | None:
    if isinstance(until, timedelta):
        with suppress(OverflowError):
            until = datetime.now(UTC) + until
    return None if until is None else moment("until", until)


def _given(function: str, settings: Mapping[str, Any], known: Any) -> str:
    """The settings as JSON, for the statement. The engine checks the ranges."""
    refuse_unknown(function, settings, known)
    types = {name: option.type for name, option in options_of(known).items()}
    return json.dumps({name: _value(name, value, types[name]) for name, value in settings.items()})


def _value(name: str, value: Any, kind: type) -> Any:
    if value is None:
        return None
    if kind in (bool, str):
        if not isinstance(value, kind):
            raise ConfigurationError(f"{name} is {value!r:.60}: pass {_EXAMPLES[kind]}")
        # An empty owner is an app without a name.
        return check_text(name, value) if kind is str and (name, value) != ("owner", "") else value
    if kind is int:
        if not is_int(value, -(2**31), 2**31 - 1):
            raise OutOfRange(f"{name} is {value!r:.60}", "An integer; None takes the setting away.")
        return value
    if kind is timedelta:
        seconds = in_seconds(value)
        if not is_number(seconds) or not abs(seconds) <= 1e10:
            raise InvalidTime(f"{name} is {value!r:.60}", "Seconds or a timedelta; None takes it away.")
        return interval(value)
    if not is_number(value):
        raise OutOfRange(f"{name} is {value!r:.60}", "A number; None takes the setting away.")
    return float(value)


_EXAMPLES = {bool: "True or False", str: "a string"}


# --- Reading answers -------------------------------------------------------------------------------
# Lengths of time come as seconds and moments as texts, which all drivers read alike.

S = TypeVar("S")


def _settings(answer: Callable[..., S]) -> Callable[[str], S]:
    """Reads a typed dict from the engine's JSON answer."""
    hints = _hints(answer)

    def read(text: str) -> S:
        row = json.loads(text)
        return answer(**{name: _read(hint, row[name]) for name, hint in hints.items() if name in row})

    return read


def read_row(answer: Callable[..., S], row: object, **known: Any) -> S:
    """A dataclass from a row that has its fields, except those that are known."""
    hints = _hints(answer).items()
    found = {name: _read(hint, getattr(row, name)) for name, hint in hints if name not in known}
    return answer(**found, **known)


_hints = cache(get_type_hints)


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
    """Reads the answer of a function that returns void."""
