"""What each page shows. A page is a function from a question to a template and what stands in it.

None of them reads more than a bounded number of rows: a count that reaches its bound is "at least".
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import Any

from fairq import ledger
from fairq.commands.common import span
from fairq.commands.doctor import examine
from fairq.commands.explain import explanation
from fairq.commands.queues import group_settings, limits, queue_settings
from fairq.commands.schedules import upcoming
from fairq.commands.stats import alive
from fairq.dsn import mask
from fairq.errors import FairqError, UnknownQueue
from fairq.options import check_id, group_text
from fairq.outcome import told
from fairq.queries import inspection
from fairq.queries import web as queries
from fairq.web import changes, timeline
from fairq.web.site import Ask, Page
from fairq.web.standing import standing

GROUPS = 40  # of a page
FEW, MANY = 1_001, 100_001  # what is counted of each group of a page, and of the few that have more
TASKS = 25
SCHEDULES = 100
TICKS = 5
READ = 5_000  # ended tasks read for a history
READ_FAILURES = 20_000
LONGEST_BODY = 20_000


class AtLeast(int):
    """A count that reached its bound."""


def bounded(amount: int, most: int) -> int:
    return AtLeast(most - 1) if amount >= most else amount


# --- Who gets what ---------------------------------------------------------------------------------


TIMES = {"10 min": 600.0, "1 h": 3600.0}  # a day of 200 tenants takes seconds: `fairq shares --since 1d`
AXIS_SEEN, AXIS_HOUR = ("2 min ago", "1 min", "now"), ("1 h ago", "30 min", "now")


def shares(ask: Ask) -> Page:
    """What the ledger says, the busiest first; or all groups that have tasks, by name."""
    names = queries.queue_names(ask.conn)
    queue = _queue(ask, names)
    time = ask.params.get("time", "")
    seconds = TIMES.get(time, TIMES["10 min"])
    ask.site.look(ask)
    looks = ask.site.looks.of(queue)
    slots = {each.queue: each.slots for each in queries.slots(ask.conn)}.get(queue, 0)
    behind = ask.params.get("behind")
    found = ask.site.kept(
        ("shares", queue, seconds),
        seconds / 400,
        lambda: ledger.shares(ask.conn, queue, since=seconds, groups=GROUPS),
    )
    fairness = None
    if behind is None:
        fairness = ask.site.kept(
            ("fairness", queue, seconds),
            seconds / 60,
            lambda: ledger.fairness(ask.conn, queue, since=seconds),
        )
    seen = timeline.stretches(looks)
    if fairness is None or seconds < timeline.HOUR.total_seconds():
        limits = [(ask.now - timeline.LENGTH, timeline.LENGTH.total_seconds(), slots)]
        picture, axis = timeline.draw(seen, limits, ask.now, timeline.LENGTH), AXIS_SEEN
    else:
        picture, axis = _last_hour(ask, queue, fairness.ledger_until or ask.now), AXIS_HOUR
    of_group = ledger.parts(found)
    others = of_group.pop("", None)
    if behind is None:
        keys = sorted(
            of_group, key=lambda key: (-of_group[key].share.received, -of_group[key].share.entitled, key)
        )
        keys += [key for key, _ in timeline.totals(seen).most_common(GROUPS) if key not in of_group]
        if len(keys) < GROUPS:
            named = queries.next_groups(ask.conn, queue=queue, behind="", max_groups=GROUPS)
            keys += [key for key in named if key not in keys]
        keys = keys[:GROUPS]
    else:
        keys = queries.next_groups(ask.conn, queue=queue, behind=behind, max_groups=GROUPS)
    rows: list[dict[str, Any]] = [
        {
            "key": each.group_key,
            "color": picture.color_of.get(each.group_key),
            "slots": each.held,
            "waiting": waiting,
            "oldest": each.oldest_since,
            "weight": each.weight,
            "reason": reason,
        }
        | _received(of_group.get(each.group_key))
        for each, waiting, reason in _groups(ask, queue, keys)
    ]
    return Page(
        "shares.html",
        "Who gets what",
        {
            "now": ask.now,
            "queues": names,
            "queue": queue,
            "times": list(TIMES),
            "time": time if time in TIMES else "10 min",
            "rows": rows,
            "others": {"groups": others.share.groups, **_received(others)} if others else None,
            "widest": max([0.0, *(max(row["part"] or 0, row["entitled"] or 0) for row in rows)]),
            "picture": picture,
            "axis": axis,
            "slots": slots,
            "busy": sum(looks[-1].slots.values()) if looks else 0,
            "fairness": fairness,
            "behind": behind,
            "next": keys[-1] if behind is not None and len(keys) == GROUPS else None,
            "is_full": len(keys) == GROUPS or others is not None,
        },
    )


def _last_hour(ask: Ask, queue: str, until: datetime) -> timeline.Picture:
    """By minutes of the ledger; it ends where that does, half a minute ago."""
    minute = ask.now.replace(second=0, microsecond=0)
    rows = ask.site.kept(
        ("minutes", queue, until),
        30,
        lambda: queries.minutes(
            ask.conn, queue=queue, since=minute - timeline.HOUR, until=until, max_groups=timeline.COLORS
        ),
    )
    found, limits = timeline.minutes(
        ((each.minute, each.group_key, each.seconds, each.slots) for each in rows), until
    )
    return timeline.draw(found, limits, ask.now, timeline.HOUR)


def _received(part: ledger.Part | None) -> dict[str, Any]:
    if part is None:
        return dict.fromkeys(("part", "entitled", "debt", "p95", "before", "eta"))
    return {
        "part": part.received,
        "entitled": part.entitled,
        "debt": part.share.debt_ratio,
        "p95": part.share.wait_p95,
        "before": [*part.share.behind],
        "eta": part.share.eta_seconds,
    }


def _queue(ask: Ask, names: list[str]) -> str:
    """The queue that was asked for; else one that has something to show."""
    asked = ask.params.get("queue")
    if asked is not None and asked in names:
        return asked
    if asked is not None or not names:
        raise UnknownQueue(f'there is no queue "{asked or "default"}"')
    held = Counter[str]()
    for each in queries.held_now(ask.conn):
        held[each.queue] += each.slots
    for queue, _ in held.most_common(1):
        return queue
    busy = [name for name in names if queries.next_groups(ask.conn, queue=name, behind="", max_groups=1)]
    return [*busy, *names][0]


def _groups(ask: Ask, queue: str, keys: list[str]) -> list[tuple[queries.GroupsNowRow, int, str]]:
    """How these groups stand: how many of each wait, and why the next one does."""
    found = queries.groups_now(ask.conn, queue=queue, group_keys=keys, max_count=FEW)
    large = [each.group_key for each in found if each.in_line >= FEW]
    most = max(MANY // max(len(large), 1), FEW)
    counted = {
        key: queries.count_in_line(ask.conn, queue=queue, group_key=key, max_count=most) or 0 for key in large
    }
    reasons = _reasons(ask, [each.head for each in found if each.head is not None])
    order = {key: at for at, key in enumerate(keys)}
    answer = []
    for each in sorted(found, key=lambda each: order[each.group_key]):
        in_line = counted.get(each.group_key, each.in_line)
        waiting = max(in_line - each.held, 0)
        is_cut = in_line >= (most if each.group_key in counted else FEW)
        reason = reasons.get(each.head, "") if each.head is not None else ""
        answer.append((each, AtLeast(waiting) if is_cut else waiting, reason))
    return answer


def _reasons(ask: Ask, ids: list[int]) -> dict[int, str]:
    """Why these tasks are not running, where it is more than their turn."""
    found = {each.task_id: each.reason for each in queries.reasons_of(ask.conn, ids=ids)}
    return {id: reason for id, reason in found.items() if not reason.startswith("behind ")}


# --- Queues ----------------------------------------------------------------------------------------


def queues(ask: Ask) -> Page:
    slots = {each.queue: each.slots for each in queries.slots(ask.conn)}
    settings = {row["queue"]: row for row in queue_settings(ask.conn)}
    number = max(len(settings), 1)
    most = max(MANY // number, FEW)
    rows = [
        {
            "queue": each.queue,
            "state": _state(each.paused_at is not None, each.draining_at is not None),
            "slots": slots.get(each.queue, 0),
            "running": each.running,
            "claimed": each.held - each.running,
            "waiting": _less(each.waiting, each.held + each.blocked, most),
            "blocked": bounded(each.blocked, most),
            "scheduled": bounded(each.scheduled, most),
            "of_groups": limits(settings.get(each.queue, {}), "group_"),
            "of_queue": limits(settings.get(each.queue, {})),
            "fairness": each.fairness,
        }
        for each in queries.queues(ask.conn, max_count=most)
    ]
    return Page("queues.html", "Queues", {"now": ask.now, "rows": rows})


def queue(ask: Ask) -> Page:
    """One queue, and its settings."""
    names = queries.queue_names(ask.conn)
    (row,) = queue_settings(ask.conn, _queue(ask, names))
    stands = next(each for each in queries.queues(ask.conn, max_count=FEW) if each.queue == row["queue"])
    return Page(
        "queue.html",
        row["queue"],
        {
            "now": ask.now,
            "row": row,
            "state": _state(row["paused_at"] is not None, row["draining_at"] is not None),
            "running": stands.running,
            "waiting": _less(stands.waiting, stands.held + stands.blocked, FEW),
            "scheduled": bounded(stands.scheduled, FEW),
            "of_groups": limits(row, "group_"),
            "of_queue": limits(row),
            "fields": changes.fields(row, changes.OF_QUEUE),
        },
    )


def _state(is_paused: bool, drains: bool) -> str:
    return "paused" if is_paused else "drains" if drains else ""


def _less(in_line: int, others: int, most: int) -> int:
    left = max(in_line - others, 0)
    return AtLeast(left) if in_line >= most else left


# --- A tenant --------------------------------------------------------------------------------------


def group(ask: Ask) -> Page:
    names = queries.queue_names(ask.conn)
    queue, key = _queue(ask, names), group_text(ask.params["group"])
    (row,) = queries.groups_now(ask.conn, queue=queue, group_keys=[key], max_count=MANY)
    of_queue = queue_settings(ask.conn, queue)[0]
    own = next(iter(group_settings(ask.conn, queue, key)), {})
    tasks = [
        {
            "id": each.id,
            "kind": each.kind,
            "state": each.state,
            "since": each.started_at or max(each.created_at, each.run_at),
            "priority": each.priority,
            "attempt": each.attempt,
            "max_attempts": each.max_attempts,
            "reason": each.reason,
        }
        for each in queries.group_tasks(ask.conn, queue=queue, group_key=key, max_tasks=TASKS)
    ]
    ended = queries.ended(
        ask.conn, queue=queue, group_key=key, kind=None, outcomes=OUTCOMES, max_read=READ, max_tasks=TASKS
    )
    return Page(
        "group.html",
        key,
        {
            "now": ask.now,
            "queue": queue,
            "key": key,
            "held": row.held,
            "waiting": _less(row.in_line, row.held, MANY),
            "oldest": row.oldest_since,
            "weight": row.weight or of_queue["weight"],
            "is_paused": row.paused_at is not None,
            "queue_is_paused": of_queue["paused_at"] is not None,
            "stands": standing(ask.conn, queue, key),
            "fields": changes.fields(own, changes.OF_GROUP),
            "limits": limits(own),
            "queue_limits": limits(of_queue, "group_"),
            "tasks": tasks,
            "scheduled": queries.group_scheduled(ask.conn, queue=queue, group_key=key, max_tasks=TASKS),
            "ended": ended,
            "read": READ,
        },
    )


OUTCOMES = ["succeeded", "failed", "cancelled", "expired"]

# --- A task ----------------------------------------------------------------------------------------


def task(ask: Ask) -> Page:
    found = explanation(ask.conn, check_id(int(ask.params["id"])))
    has_ended = found.get("finished_at") is not None
    attempts = list(found["attempts"])
    if has_ended:
        last = {key: found.get(key) for key in ("attempt", "worker_id", "started_at", "error")}
        attempts.append({**last, "outcome": found["state"], "ended_at": found["finished_at"]})
    for each in attempts:
        each["told"] = told(each["error"])
        each["traceback"] = each["error"].get("traceback", "") if isinstance(each["error"], dict) else ""
        each["took"] = span(each["ended_at"] - each["started_at"]) if each["started_at"] else ""
    may_read = bool(queries.may_read(ask.conn))
    body = None
    if may_read:
        row = queries.body_of(ask.conn, id=found["task_id"], longest=LONGEST_BODY)
        body = (
            {name: _pretty(getattr(row, name)) for name in ("payload", "headers", "result")} if row else None
        )
    progress = found["progress"]
    return Page(
        "task.html",
        f"Task {found['task_id']}",
        {
            "now": ask.now,
            "found": found,
            "has_ended": has_ended,
            "may_cancel": not has_ended,
            "may_retry": found["state"] in ("failed", "cancelled", "expired", "scheduled"),
            "attempts": attempts,
            "body": body,
            "may_read": may_read,
            "progress": progress,
            "done": progress["done"] / progress["total"]
            if progress and progress["done"] is not None and progress["total"]
            else None,
        },
    )


def _pretty(text: str | None) -> str | None:
    """JSON for people; as it is where it was cut off, or is too deep."""
    if text is None:
        return None
    if len(text) >= LONGEST_BODY:
        return f"{text} …"
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


# --- Workers ---------------------------------------------------------------------------------------


def workers(ask: Ask) -> Page:
    found = inspection.worker_stats(ask.conn)
    rows = [
        {
            "id": each.worker_id,
            "name": each.name,
            "queues": each.queues,
            "held": each.held,
            "slots": each.slots,
            "is_alive": alive(each, ask.now),
            "seen": each.beat_at or each.registered_at,
            "since": each.registered_at,
        }
        for each in found[:500]
    ]
    return Page(
        "workers.html",
        "Workers",
        {
            "now": ask.now,
            "rows": rows,
            "more": len(found) - len(rows),
            "runs": queries.longest_runs(ask.conn, max_tasks=TASKS),
        },
    )


# --- Failures --------------------------------------------------------------------------------------


def failures(ask: Ask) -> Page:
    given = {name: ask.params.get(name) or None for name in ("queue", "group", "kind")}
    rows = queries.ended(
        ask.conn,
        queue=given["queue"],
        group_key=given["group"],
        kind=given["kind"],
        outcomes=["failed"],
        max_read=READ_FAILURES,
        max_tasks=1000,
    )
    may_read = bool(queries.may_read(ask.conn))
    errors: dict[int, Any] = {}
    if may_read:
        ids = [each.id for each in rows]
        errors = {each.id: json.loads(each.error or "null") for each in queries.errors_of(ask.conn, ids=ids)}
    kinds: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in rows:
        what = _type(errors.get(each.id))
        entry = kinds.setdefault(
            (each.queue, each.kind, what),
            {
                "queue": each.queue,
                "kind": each.kind,
                "type": what,
                "tasks": 0,
                "groups": set(),
                "last": each,
                "told": told(errors.get(each.id)),
            },
        )
        entry["tasks"] += 1
        entry["groups"].add(each.group_key)
    return Page(
        "failures.html",
        "Failures",
        {
            "now": ask.now,
            "kinds": sorted(kinds.values(), key=lambda each: -each["tasks"]),
            "tasks": [(each, told(errors.get(each.id))) for each in rows[:50]],
            "given": given,
            "read": READ_FAILURES,
            "may_read": may_read,
            "is_cut": len(rows) == 1000,
        },
        every=5.0,
    )


def _type(error: Any) -> str:
    return str(error.get("type") or error.get("code") or "") if isinstance(error, dict) else ""


# --- Schedules -------------------------------------------------------------------------------------


def schedules(ask: Ask) -> Page:
    behind = {name: ask.params.get(name, "") for name in ("behind_name", "behind_group")}
    found = queries.schedules(ask.conn, **behind, max_schedules=SCHEDULES)
    further = found[-1] if len(found) == SCHEDULES else None
    return Page("schedules.html", "Schedules", {"now": ask.now, "rows": found, "further": further}, every=5.0)


def schedule(ask: Ask) -> Page:
    """One schedule: what it says, and when it fires next."""
    row = changes.stored_schedule(ask)
    shown = {
        "now": ask.now,
        "row": row,
        "state": "paused" if row["paused_at"] else "",
        "times": [] if row["paused_at"] else upcoming(row, ask.now, TICKS),
    }
    return Page("schedule.html", row["name"], shown, every=5.0)


# --- Upkeep ----------------------------------------------------------------------------------------


def upkeep(ask: Ask) -> Page:
    return Page(
        "upkeep.html",
        "Upkeep",
        {
            "now": ask.now,
            "failures": queries.upkeep_failures(ask.conn),
            "ticks": queries.last_ticks(ask.conn),
            "findings": None,
        },
        every=5.0,
    )


def doctor(ask: Ask) -> Page:
    """The round of `fairq doctor`. It counts live tasks and listens for a notice: on demand."""
    page = upkeep(ask)
    page.shown["findings"] = [*examine(ask.site.dsn, None)]
    return Page(page.template, "Doctor", page.shown, every=None)


# --- A tenant's own view ---------------------------------------------------------------------------


def mine(ask: Ask) -> Page:
    """What a pass shows. Nothing else of the question counts."""
    found = standing(ask.conn, ask.params["queue"], ask.params["group"])
    return Page("mine.html", "Where you stand", {"now": ask.now, "mine": found}, every=5.0)


# --- Changes ---------------------------------------------------------------------------------------


def preview(ask: Ask, note: str = "", status: int = 200) -> Page:
    """What a change would do."""
    plan = changes.make_plan(ask)
    # What names the target goes into the address: a line's end in a field is sent as two characters.
    target = {name: value for name, value in ask.params.items() if name in changes.TARGET}
    names = {*changes.OF_QUEUE, *changes.OF_GROUP}
    typed = {name: value for name, value in ask.params.items() if name in names}
    shown = {"now": ask.now, "plan": plan, "target": target, "typed": typed | plan.keeps, "note": note}
    return Page("change.html", plan.title, shown, None, status)


def change(ask: Ask) -> Page:
    """Do what was shown; show it again where that is not what it would do any more."""
    plan = changes.make_plan(ask)
    if plan.is_empty or plan.was != ask.params.get("was"):
        return preview(ask, "It stands otherwise by now: look again.", 409)
    return Page("changed.html", plan.title, {"now": ask.now, "text": plan.does(), "back": plan.back}, None)


# --- What went wrong -------------------------------------------------------------------------------


def trouble(exc: Exception, status: int, text: str) -> Page:
    hint = exc.hint if isinstance(exc, FairqError) else None
    return Page(
        "trouble.html", text, {"now": None, "text": mask(str(exc)), "hint": hint}, every=None, status=status
    )
