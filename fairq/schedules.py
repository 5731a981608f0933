"""Schedules: tasks that recur. A schedule is a row of `fairq.schedules` and creates a task of one group per
tick.

The engine fires schedules, each tick once (`fairq.fire_schedules`), but does not read cron expressions:
Python computes their ticks some days ahead and stores them. The upkeep calls `plan_due` for that. Plans are
made by the database's clock.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, TypedDict, Unpack
from zoneinfo import ZoneInfo

import psycopg

from fairq.codec import encode
from fairq.connections import Steps, on_connection
from fairq.driver import Call
from fairq.errors import InvalidSchedule
from fairq.options import GroupKey, Seconds, check_text, group_text
from fairq.policies import Time, _given, _settings
from fairq.queries import settings as queries
from fairq.queries import workers

if TYPE_CHECKING:
    from fairq.task import Task

__all__ = ["Schedule", "ScheduleSettings", "ScheduleState", "configure_schedule", "pause_schedule"]
__all__ += ["preview_schedule", "remove_schedule", "resume_schedule", "run_schedule"]

Missed = Literal["last", "skip", "all"]

# How far a plan reaches, and its fewest and most ticks; also the most past ticks that are made up for.
PLAN_AHEAD: Final = timedelta(days=8)
PLAN_LEAST: Final = 2
PLAN_MOST: Final = 100

# --- Settings --------------------------------------------------------------------------------------


class ScheduleSettings(TypedDict, Generic[Time], total=False):
    """The settings of a schedule; None takes one away."""

    cron: Annotated[str | None, "Minute, hour, day of month, month, day of week: '0 3 * * *'."]
    time_zone: Annotated[str | None, "The time zone of --cron: Europe/Berlin. Default: UTC."]
    every: Annotated[
        Time | None, "Instead of --cron: 10s, 5m, 1h, at most 366d; at its multiples since 1970."
    ]
    spread: Annotated[Time | None, "Each group fires at its own moment within this time after the tick."]
    missed: Annotated[
        Missed | None,
        "Which late ticks to make up for: last (the last one), skip (none that is a minute late) or all (each"
        " of the last 100). Default: last.",
    ]
    queue: Annotated[str | None, "The queue of its tasks. Default: default."]
    kind: Annotated[str | None, "Which handler runs them. Default: default."]
    priority: Annotated[int | None, "Higher first, within the group. Default: its kind's, or 0."]
    concurrency_key: Annotated[str | None, "Tasks with the same key do not run at the same time."]
    headers: Annotated[Mapping[str, Any] | None, "A JSON object that travels with each task."]
    owner: Annotated[str | None, "The app it belongs to; no other app may change it."]


class ScheduleState(ScheduleSettings[timedelta]):
    name: str
    group_key: str
    paused_at: datetime | None
    next_tick: datetime | None
    fire_at: datetime | None
    last_tick: datetime | None
    last_task_id: int | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a task recurs, for whom, and with what.

    `rule` is a cron expression, "0 3 * * *", or a length of time: "every 10s", timedelta(seconds=10).
    """

    rule: str | timedelta
    group_key: GroupKey = "system"
    payload: Any = None
    _: KW_ONLY
    time_zone: str = "UTC"
    spread: Seconds | None = None
    missed: Missed = "last"
    priority: int | None = None
    concurrency_key: str | None = None
    headers: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise InvalidSchedule if the rule is invalid."""
        cron, every = read_rule(self.rule)
        next(ticks_of(cron, self.time_zone, every, datetime.now(UTC)), None)

    def settings(self) -> ScheduleSettings[Seconds]:
        """All settings; those that are not set are taken away."""
        cron, every = read_rule(self.rule)
        names = ("time_zone", "spread", "missed", "priority", "concurrency_key", "headers")
        said: Any = {"cron": cron, "every": every, **{name: getattr(self, name) for name in names}}
        return said  # type: ignore[no-any-return]


_EVERY = re.compile(r"every (\d{1,8}(?:\.\d+)?) ?(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def read_rule(rule: str | timedelta) -> tuple[str | None, timedelta | None]:
    """cron and every, one of which is None."""
    if isinstance(rule, timedelta):
        return None, rule
    if isinstance(rule, str) and (found := _EVERY.fullmatch(rule.strip())):
        return None, timedelta(seconds=float(found[1]) * _UNITS[found[2]])
    if isinstance(rule, str):
        return rule.strip(), None
    raise InvalidSchedule(
        f"the rule of the schedule is {rule!r:.60}", "Pass '0 3 * * *', 'every 10s' or a timedelta."
    )


@on_connection
def configure_schedule(
    name: str, group_key: GroupKey, *, payload: Any = ..., **settings: Unpack[ScheduleSettings[Seconds]]
) -> Steps[ScheduleState]:
    """Create a schedule of one group, or change its settings. Settings that are not named stay unchanged."""
    return schedule_steps(name, group_key, settings, None if payload is ... else encode(payload))


@on_connection
def pause_schedule(name: str, group_key: GroupKey | None = None) -> Call[int]:
    """Stop a schedule of one group, or of all, until it is resumed. Return how many schedules that are."""
    return queries.pause_schedule.call(**_named(name, group_key))


@on_connection
def resume_schedule(name: str, group_key: GroupKey | None = None) -> Call[int]:
    """Resume a paused schedule of one group, or of all. Return how many. Missed ticks are not made up for."""
    return queries.resume_schedule.call(**_named(name, group_key))


@on_connection
def remove_schedule(name: str, group_key: GroupKey | None = None) -> Call[int]:
    """Remove a schedule of one group, or of all. Return how many. Tasks that it created stay."""
    return queries.remove_schedule.call(**_named(name, group_key))


@on_connection
def run_schedule(name: str, group_key: GroupKey | None = None) -> Call[list[int]]:
    """Create a task of a schedule now, or one per group, in addition to its ticks. Return their ids."""
    return queries.run_schedule.call(**_named(name, group_key))


def _named(name: str, group_key: GroupKey | None) -> dict[str, Any]:
    group = None if group_key is None else group_text(group_key)
    return {"name": check_text("name of the schedule", name, 200), "group_key": group}


def declared_steps(
    name: str, task: Task[Any, ..., Any], schedule: Schedule, owner: str | None
) -> Steps[ScheduleState]:
    """Store a declared schedule with all settings, so that those no longer declared are taken away."""
    settings = {**schedule.settings(), "kind": task.kind, "queue": task.queue, "owner": owner}
    return schedule_steps(name, schedule.group_key, settings, task.encode_payload(schedule.payload))


def schedule_steps(
    name: str, group_key: GroupKey, settings: Mapping[str, Any], payload: str | None
) -> Steps[ScheduleState]:
    """Call `fairq.configure_schedule`, then store the first plan. The payload is JSON text."""
    group = group_text(group_key)
    cron, zone = settings.get("cron"), settings.get("time_zone")
    if cron is not None or zone is not None:
        _cron("* * * * *" if cron is None else cron, "UTC" if zone is None else zone, datetime.now(UTC))
    plain = {key: value for key, value in settings.items() if key != "headers"}
    members = [_given("configure_schedule", plain, ScheduleSettings)[1:-1]]
    if "headers" in settings:
        members.append(f'"headers": {encode(settings["headers"], "headers")}')
    if payload is not None:
        members.append(f'"payload": {payload}')
    call = queries.configure_schedule.call(
        name=check_text("name of the schedule", name, 200),
        group_key=group,
        settings=f"{{{', '.join(filter(None, members))}}}",
    )
    row = json.loads((yield call))
    state = _settings(ScheduleState)(json.dumps(row))
    if row["cron"] is not None and row["next_tick"] is None:
        done_until = datetime.fromisoformat(row["done_until"])
        ticks = plan(row["cron"], row["time_zone"], done_until, done_until)
        yield queries.plan_first.call(
            name=name, group_key=group, done_until=row["done_until"], ticks=[t.isoformat() for t in ticks]
        )
        if ticks:
            state["next_tick"] = ticks[0]
            state["fire_at"] = None if row["paused_at"] else ticks[0] + timedelta(seconds=row["delay"])
    return state


# --- What a rule means -----------------------------------------------------------------------------


def preview_schedule(
    rule: str | timedelta, *, time_zone: str = "UTC", count: int = 5, after: datetime | None = None
) -> list[datetime]:
    """The next ticks of a rule, in its time zone; by default after this machine's now. Needs no database."""
    cron, every = read_rule(rule)
    ticks = ticks_of(cron, time_zone, every, datetime.now(UTC) if after is None else after)
    return [tick.astimezone(_zone(time_zone)) for tick in islice(ticks, count)]


def ticks_of(
    cron: str | None, time_zone: str, every: timedelta | None, after: datetime
) -> Iterator[datetime]:
    """The ticks after a time, in UTC."""
    if every is None:
        return _cron(cron or "", time_zone, after)
    if not timedelta(seconds=1) <= every <= timedelta(days=366):
        raise InvalidSchedule(f"every is {every}", "It must be a second to 366 days.")
    epoch = datetime.fromtimestamp(0, UTC)
    first = (after - epoch) // every + 1
    return (epoch + (first + nth) * every for nth in range(2**31))


def plan(cron: str, time_zone: str, done_until: datetime, now: datetime) -> list[datetime]:
    """The ticks to store: those after `done_until`, up to some days from now. Of past ticks only the last
    ones, found by looking back further and further, so that after a year it does not compute half a million.
    """
    past: deque[datetime] = deque(maxlen=PLAN_MOST)
    window = timedelta(hours=2)
    while now > done_until and len(past) < PLAN_MOST:
        start = max(done_until, now - window)
        past = deque(takewhile(lambda tick: tick <= now, _cron(cron, time_zone, start)), PLAN_MOST)
        if start == done_until:
            break
        window *= 10
    ahead: list[datetime] = []
    for tick in _cron(cron, time_zone, max(now, done_until)):
        if len(ahead) >= PLAN_MOST or (len(ahead) >= PLAN_LEAST and tick > now + PLAN_AHEAD):
            break
        ahead.append(tick)
    return [*past, *ahead]


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError) as exc:
        raise InvalidSchedule(
            f"there is no time zone {name!r:.60}",
            "Use a name such as Europe/Berlin. If this machine has no tz database: pip install tzdata",
        ) from exc


def _cron(expression: str, time_zone: str, after: datetime) -> Iterator[datetime]:
    """The ticks after a time, in UTC, ascending. Times that a change of clocks moves to the same moment are
    one tick, because the library places times of the repeated hour in the first of the two.
    """
    from cronsim import CronSim, CronSimError

    zone = _zone(time_zone)
    if not isinstance(expression, str) or len(expression.split()) != 5:
        raise InvalidSchedule(
            f"the cron expression is {expression!r:.60}",
            "It needs five fields: minute, hour, day of month, month, day of week. For seconds: 'every 10s'.",
        )
    try:
        found = CronSim(expression, after.astimezone(zone))
    except CronSimError as exc:
        raise InvalidSchedule(f"the cron expression {expression!r:.60}: {exc}") from exc
    return _ascending(found, after)


def _ascending(found: Iterator[datetime], after: datetime) -> Iterator[datetime]:
    last = after
    for tick in found:
        utc = tick.astimezone(UTC)
        if utc > last:
            yield utc
            last = utc


# --- For the upkeep --------------------------------------------------------------------------------


def plan_due(conn: psycopg.Connection[Any], most: int = 20) -> int:
    """Renew at most `most` plans that are due, and return how many."""
    rows = workers.unplanned_schedules(conn, max_schedules=most)
    for row in rows:
        ticks, problem = list[datetime](), None
        try:
            ticks = plan(row.cron, row.time_zone, row.done_until, row.now)
        except InvalidSchedule as exc:
            problem = str(exc)
        named: Any = {"name": row.name, "group_key": row.group_key, "done_until": row.done_until}
        workers.plan_schedule(conn, **named, ticks=ticks, problem=problem)
    return len(rows)
