"""Changes from the page. A plan says what a change would do, and does it.

The preview and the change make the same plan, so nothing is done that was not shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from fairq import client, driver, policies, schedules
from fairq.commands.common import count, parse_duration
from fairq.commands.explain import explanation
from fairq.commands.queues import group_settings, queue_settings
from fairq.commands.schedules import rule, stored_one, upcoming
from fairq.errors import InvalidTime, OutOfRange, UnknownQueue
from fairq.options import check_id, group_text, options_of
from fairq.queries import client as client_queries
from fairq.queries import web as queries
from fairq.queries.models import FairqScheduleStat
from fairq.web.site import Ask

OF_GROUP = ("weight", "max_running", "rate_limit", "rate_period", "rate_burst", "budget", "budget_period")
OF_QUEUE = (
    *("weight", "group_max_running", "group_rate_limit", "group_rate_period"),
    *("max_running", "rate_limit", "rate_period"),
)
TARGET = ("verb", "queue", "group", "kind", "id", "name")
MOST = 1000  # tasks in one go
COUNTED = 100_001
READ = 20_000  # ended tasks among which failures are looked for
SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """A possible change. `effects` are settings with their values before and after."""

    title: str
    button: str
    does: Callable[[], str]
    back: tuple[str, dict[str, Any]]
    says: list[str] = field(default_factory=list)
    effects: list[tuple[str, str, str]] = field(default_factory=list)
    tasks: list[tuple[int, str, str]] = field(default_factory=list)
    keeps: dict[str, str] = field(default_factory=dict)
    """Parameters that the change needs in addition to those of the preview."""
    is_empty: bool = False

    @property
    def was(self) -> str:
        """A fingerprint of what was shown; only of settings, because counts change all the time."""
        stood = repr((self.title, self.effects))
        return hashlib.sha256(stood.encode()).hexdigest()[:16]


def make_plan(ask: Ask) -> Plan:
    """The plan for the address or form. Raises Refused or NoSuchTask; KeyError for an invalid one."""
    return _VERBS[ask.params["verb"]](ask)


# --- Settings --------------------------------------------------------------------------------------


def fields(row: Mapping[str, Any], names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Name, label and value of settings, for a form."""
    return [(name, _label(name), _shown(row.get(name), "")) for name in names]


def _label(name: str) -> str:
    return name.replace("group_", "of each tenant: ").replace("max_running", "at once").replace("_", " ")


def _shown(value: Any, absent: str) -> str:
    if value is None:
        return absent
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _set(ask: Ask) -> Plan:
    queue, group_key = ask.params["queue"], ask.params.get("group")
    of_queue = _queue(ask, queue)
    if group_key is None:
        names, kinds, now = OF_QUEUE, options_of(policies.QueueSettings), of_queue
    else:
        names, kinds = OF_GROUP, options_of(policies.GroupSettings)
        now = next(iter(group_settings(ask.conn, queue, group_key)), {})
    given = {name: _value(name, ask.params[name], kinds[name].type) for name in names if name in ask.params}
    changed = {name: value for name, value in given.items() if value != now.get(name)}

    def said(name: str, value: Any) -> str:
        if value is not None or group_key is None:
            return _shown(value, "none")
        return f"its queue's ({_shown(of_queue.get(f'group_{name}', of_queue.get(name)), 'none')})"

    says = []
    if group_key is not None and changed.get("max_running") is not None:
        held, most = _stands(ask, queue, group_key)[0], changed["max_running"]
        says.append(
            f"{count(held, 'task')} of it {'runs' if held == 1 else 'run'} now."
            + (f" They go on; the next one starts when fewer than {most} run." if held > most else "")
        )
    if "weight" in changed and group_key is not None:
        says.append(
            f"In every round it gets {said('weight', changed['weight'])}; a tenant of weight 1 gets one task."
        )

    def does() -> str:
        if group_key is None:
            policies.configure_queue(ask.conn, queue, **changed)
        else:
            policies.configure_group(ask.conn, queue, group_key, **changed)
        return f"{count(len(changed), 'setting')} changed, from the next promotion on."

    return Plan(
        f"Change the settings of {_whom(queue, group_key)}",
        "Change",
        does,
        _back(queue, group_key),
        says,
        [(_label(name), said(name, now.get(name)), said(name, value)) for name, value in changed.items()],
        is_empty=not changed,
    )


def _value(name: str, text: str, kind: type) -> Any:
    """The value for a setting from the typed text; an empty text takes it away."""
    text = text.strip()
    if not text:
        return None
    if kind is timedelta:
        if (length := parse_duration(text)) is None:
            raise InvalidTime(f"{_label(name)} is {text!r:.60}", "Enter a length of time: 90s, 10m, 1h30m.")
        return length
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise OutOfRange(f"{_label(name)} is {text!r:.60}", "Enter a number.") from None


def _queue(ask: Ask, queue: str) -> dict[str, Any]:
    if not (found := queue_settings(ask.conn, queue)):
        raise UnknownQueue(f'there is no queue "{queue}"')
    return found[0]


def _whom(queue: str, group_key: str | None) -> str:
    return f"queue {queue}" if group_key is None else f"{group_key}, tenant of {queue}"


def _back(queue: str, group_key: str | None) -> tuple[str, dict[str, Any]]:
    if group_key is None:
        return "/queue", {"queue": queue}
    return "/group", {"queue": queue, "group": group_key}


def _stands(ask: Ask, queue: str, group_key: str) -> tuple[int, str, bool]:
    """How many of its tasks run, how many wait, and whether it is paused."""
    group_text(group_key)
    (row,) = queries.groups_now(ask.conn, queue=queue, group_keys=[group_key], max_count=COUNTED)
    waiting = max(row.in_line - row.held, 0)
    return row.held, f"{waiting:,}{'+' if row.in_line >= COUNTED else ''}", row.paused_at is not None


# --- Stop and go on --------------------------------------------------------------------------------


def _paused(ask: Ask, pause: bool) -> Plan:
    queue, group_key = ask.params["queue"], ask.params.get("group")
    row = _queue(ask, queue)
    says = []
    if group_key is None:
        is_paused = row["paused_at"] is not None
    else:
        held, waiting, is_paused = _stands(ask, queue, group_key)
        says.append(f"{waiting} waiting, {held:,} running.")
    if pause:
        verb, of_queue, of_group = "Pause", policies.pause_queue, policies.pause_group
        says.append("Running tasks go on and new ones are accepted, but none start.")
    else:
        verb, of_queue, of_group = "Resume", policies.resume_queue, policies.resume_group
        says.append("It takes its turns again, without catching up on missed ones.")
    states = "paused", "served"

    def does() -> str:
        if group_key is None:
            of_queue(ask.conn, queue)
        else:
            of_group(ask.conn, queue, group_key)
        return f"{_whom(queue, group_key)} is {states[not pause]}."

    return Plan(
        f"{verb} {_whom(queue, group_key)}",
        verb,
        does,
        _back(queue, group_key),
        says,
        [("state", states[not is_paused], states[not pause])],
        is_empty=is_paused is pause and not row["draining_at"],
    )


# --- Tasks -----------------------------------------------------------------------------------------


def _purge(ask: Ask) -> Plan:
    queue, group_key = ask.params["queue"], ask.params["group"]
    _queue(ask, queue)
    held, waiting, _ = _stands(ask, queue, group_key)
    until = _shown_until(ask)
    tasks = queries.group_tasks(ask.conn, queue=queue, group_key=group_key, max_tasks=held + SHOWN)
    return Plan(
        f"Cancel all waiting tasks of {group_key} in {queue}",
        "Cancel them",
        lambda: f"{count(policies.purge_group(ask.conn, queue, group_key, until=until), 'task')} cancelled.",
        _back(queue, group_key),
        [
            f"{waiting} waiting tasks end as cancelled; {held:,} running ones go on.",
            "Later tasks stay. Cancelled ones can be retried one by one.",
        ],
        tasks=[(each.id, each.kind, each.state) for each in tasks if each.worker_id is None][:SHOWN],
        keeps={"until": until.isoformat()},
        is_empty=waiting == "0",
    )


def _shown_until(ask: Ask) -> datetime:
    """When the preview was made, because it did not show what came later."""
    until = datetime.fromisoformat(ask.params["until"]) if ask.params.get("until") else ask.now
    if until.utcoffset() is None:
        raise InvalidTime("until has no time zone")
    return until


def _cancel(ask: Ask) -> Plan:
    id = check_id(int(ask.params["id"]))
    found = explanation(ask.conn, id)
    runs = found["state"] in ("claimed", "running")
    return Plan(
        f"Cancel task {id}",
        "Cancel it",
        lambda: "Cancelled." if client.cancel(ask.conn, id) else "It had ended already.",
        ("/task", {"id": id}),
        [
            "Its worker learns it with the next heartbeat. The handler may stop at once, later, or too late."
            if runs
            else "It never runs."
        ],
        # If it has started since, the preview is shown again.
        [("state", "running" if runs else "waiting", "cancelled")],
        tasks=[(id, found["kind"], found["state"])],
        is_empty=found.get("finished_at") is not None,
    )


def _retry(ask: Ask) -> Plan:
    id = check_id(int(ask.params["id"]))
    found = explanation(ask.conn, id)
    has_ended = found.get("finished_at") is not None
    return Plan(
        f"Run task {id} again" if has_ended else f"Run task {id} now",
        "Retry",
        lambda: (
            "It waits for its turn."
            if client_queries.retry_task(ask.conn, id=id, strict=True)
            else "There was nothing to do."
        ),
        ("/task", {"id": id}),
        ["It gets one more attempt than it had, and waits for its turn."]
        if has_ended
        else ["It no longer waits for its time."],
        tasks=[(id, found["kind"], found["state"])],
        is_empty=found["state"] == "succeeded" or not (has_ended or found["state"] == "scheduled"),
    )


def newest_failures(ask: Ask, most: int) -> tuple[dict[str, str | None], list[queries.EndedRow]]:
    """The filter from the address, and at most `most` of the newest failures that match."""
    given = {name: ask.params.get(name) or None for name in ("queue", "group", "kind")}
    return given, queries.ended(
        ask.conn,
        queue=given["queue"],
        group_key=given["group"],
        kind=given["kind"],
        outcomes=["failed"],
        max_read=READ,
        max_tasks=most,
    )


def _retry_all(ask: Ask) -> Plan:
    given, failed = newest_failures(ask, MOST)
    until = _shown_until(ask)
    found = [each for each in failed if each.finished_at <= until]

    def does() -> str:
        calls = [client_queries.retry_task.call(id=each.id, strict=False) for each in found]
        again = sum(answer is True for answer in driver.run_pipeline(ask.conn, *calls)) if calls else 0
        return f"{count(again, 'task')} will run again."

    which = ", ".join(f"{name} {value}" for name, value in given.items() if value) or "all queues"
    groups = len({each.group_key for each in found})
    return Plan(
        f"Run failed tasks again: {which}",
        f"Retry {count(len(found), 'task')}",
        does,
        ("/failures", given),
        [f"{count(len(found), 'failed task')} of {count(groups, 'tenant')}, each with one more attempt."]
        + ([f"These are the newest {MOST:,}; repeat this for more."] if len(found) == MOST else []),
        tasks=[(each.id, each.kind, each.outcome) for each in found[:SHOWN]],
        keeps={"until": until.isoformat()},
        is_empty=not found,
    )


# --- Schedules -------------------------------------------------------------------------------------


def stored_schedule(ask: Ask) -> FairqScheduleStat:
    return stored_one(ask.conn, ask.params["name"], group_text(ask.params["group"]))


def _paused_schedule(ask: Ask, pause: bool) -> Plan:
    row = stored_schedule(ask)
    is_paused = row.paused_at is not None
    states = "paused", "fires"
    fires = rule(row.cron, row.time_zone, row.every)
    fires += "".join(f", next at {at:%Y-%m-%d %H:%M:%S %Z}" for at in upcoming(row, ask.now, 1))

    def does() -> str:
        change = schedules.pause_schedule if pause else schedules.resume_schedule
        change(ask.conn, row.name, row.group_key)
        return f"{row.name}, a schedule of {row.group_key}, {'is paused' if pause else 'fires again'}."

    return Plan(
        f"{'Pause' if pause else 'Resume'} {row.name}, a schedule of {row.group_key}",
        "Pause" if pause else "Resume",
        does,
        _back_to_schedule(row),
        [
            f"Its rule is {fires}. It does not fire until it is resumed. Tasks that it created stay."
            if pause
            else f"It fires {fires}. Missed ticks are not made up for."
        ],
        [("state", states[not is_paused], states[not pause])],
        is_empty=is_paused is pause,
    )


def _run_schedule(ask: Ask) -> Plan:
    row = stored_schedule(ask)

    def does() -> str:
        (id,) = schedules.run_schedule(ask.conn, row.name, row.group_key)
        return f"Task {id} waits for its turn."

    return Plan(
        f"Run {row.name}, a schedule of {row.group_key}, now",
        "Run it now",
        does,
        _back_to_schedule(row),
        [f"Creates a task of kind {row.kind} in queue {row.queue}, in addition to its ticks."],
        [("its last task", str(row.last_task_id or "none"), "a new one")],
    )


def _back_to_schedule(row: FairqScheduleStat) -> tuple[str, dict[str, Any]]:
    return "/schedule", {"name": row.name, "group": row.group_key}


_VERBS: dict[str, Callable[[Ask], Plan]] = {
    "set": _set,
    "pause": partial(_paused, pause=True),
    "resume": partial(_paused, pause=False),
    "purge": _purge,
    "cancel": _cancel,
    "retry": _retry,
    "retry-all": _retry_all,
    "pause-schedule": partial(_paused_schedule, pause=True),
    "resume-schedule": partial(_paused_schedule, pause=False),
    "run-schedule": _run_schedule,
}
