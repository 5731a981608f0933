"""What each page shows. A page is a function from a request to a template and its content.

Each reads a bounded number of rows; a count that reaches its bound is shown as "at least".
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import Any

from fairq import ledger
from fairq.commands.doctor import examine
from fairq.commands.explain import explanation, told_attempts
from fairq.commands.queues import group_settings, limits, queue_settings
from fairq.commands.schedules import upcoming
from fairq.dsn import mask
from fairq.errors import FairqError, UnknownQueue
from fairq.options import check_id, group_text
from fairq.outcome import told
from fairq.queries import inspection
from fairq.queries import web as queries
from fairq.web import changes, timeline
from fairq.web.site import Ask, Page, less
from fairq.web.standing import standing

GROUPS = 40  # per page
FEW, MANY = 1_001, 100_001  # bounds of counts: of each group on a page, and of the few that have more
TASKS = 25
SCHEDULES = 100
TICKS = 5
WORKERS = 500
READ = 5_000  # ended tasks read for a history
FAILURES = 1_000
LONGEST_BODY = 20_000


# --- Who gets what ---------------------------------------------------------------------------------


TIMES = {"10 min": 600.0, "1 h": 3600.0}  # a day of 200 tenants takes seconds: `fairq shares --since 1d`
AXIS_SEEN, AXIS_HOUR = ("2 min ago", "1 min", "now"), ("1 h ago", "30 min", "now")


def shares(ask: Ask) -> Page:
    """The ledger's groups, busiest first; or all groups with tasks, by name."""
    names = queries.queue_names(ask.conn)
    queue = _queue(ask, names)
    time = ask.params.get("time", "")
    time = time if time in TIMES else "10 min"
    seconds, behind = TIMES[time], ask.params.get("behind")
    ask.site.look(ask)
    looks = ask.site.looks.of(queue)
    slots = {each.queue: each.slots for each in queries.slots(ask.conn)}.get(queue, 0)
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
        limit = (ask.now - timeline.LENGTH, timeline.LENGTH.total_seconds(), slots)
        picture, axis = timeline.draw(seen, [limit], ask.now, timeline.LENGTH), AXIS_SEEN
    else:
        picture, axis = _last_hour(ask, queue, fairness.ledger_until or ask.now), AXIS_HOUR
    of = {each.group_key: each for each in found}
    others = of.pop("", None)
    if behind is None:
        keys = sorted(of, key=lambda key: (-of[key].received, -of[key].entitled, key))
        keys += [key for key, _ in timeline.totals(seen).most_common(GROUPS) if key not in of]
        if len(keys) < GROUPS:
            named = queries.next_groups(ask.conn, queue=queue, behind="", max_groups=GROUPS)
            keys += [key for key in named if key not in keys]
        keys = keys[:GROUPS]
    else:
        keys = queries.next_groups(ask.conn, queue=queue, behind=behind, max_groups=GROUPS)
    rows = [(*row, of.get(row[0].group_key)) for row in _groups(ask, queue, keys)]
    shown = {
        "queues": names,
        "queue": queue,
        "times": TIMES,
        "time": time,
        "rows": rows,
        "others": others,
        "widest": max(
            [0.0, *(max(own.received_part or 0, own.entitled_part or 0) for *_, own in rows if own)]
        ),
        "picture": picture,
        "axis": axis,
        "slots": slots,
        "busy": sum(looks[-1].slots.values()) if looks else 0,
        "fairness": fairness,
        "behind": behind,
        "next": keys[-1] if behind is not None and len(keys) == GROUPS else None,
        "is_full": len(keys) == GROUPS or others is not None,
    }
    return Page("shares.html", "Who gets what", shown)


def _last_hour(ask: Ask, queue: str, until: datetime) -> timeline.Picture:
    """The last hour, by minutes of the ledger, which ends half a minute ago."""
    since = ask.now.replace(second=0, microsecond=0) - timeline.HOUR
    named: Any = {"queue": queue, "since": since, "until": until, "max_groups": timeline.COLORS}
    rows = ask.site.kept(("minutes", queue, until), 30, lambda: queries.minutes(ask.conn, **named))
    return timeline.draw(*timeline.minutes(rows, until), ask.now, timeline.HOUR)


def _queue(ask: Ask, names: list[str]) -> str:
    """The requested queue; else one that has something to show."""
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
    """The state of these groups: how many tasks wait, and why the next one does, if not for its turn."""
    found = {
        each.group_key: each
        for each in queries.groups_now(ask.conn, queue=queue, group_keys=keys, max_count=FEW)
    }
    large = [each.group_key for each in found.values() if each.in_line >= FEW]
    most = max(MANY // max(len(large), 1), FEW)
    counted = {
        key: queries.count_in_line(ask.conn, queue=queue, group_key=key, max_count=most) or 0 for key in large
    }
    heads = [each.head for each in found.values() if each.head is not None]
    reasons = {each.task_id: each.reason for each in queries.reasons_of(ask.conn, ids=heads)}
    answer = []
    for each in (found[key] for key in keys):
        in_line, bound = each.in_line, FEW
        if each.group_key in counted:
            in_line, bound = counted[each.group_key], most
        reason = reasons.get(each.head or 0, "")
        waiting = less(in_line, each.held, bound)
        answer.append((each, waiting, "" if reason.startswith("behind ") else reason))
    return answer


# --- Queues ----------------------------------------------------------------------------------------


def queues(ask: Ask) -> Page:
    settings = {row["queue"]: row for row in queue_settings(ask.conn)}
    most = max(MANY // max(len(settings), 1), FEW)
    rows = [(each, settings.get(each.queue, {})) for each in queries.queues(ask.conn, max_count=most)]
    slots = {each.queue: each.slots for each in queries.slots(ask.conn)}
    return Page("queues.html", "Queues", {"rows": rows, "slots": slots, "most": most})


def queue(ask: Ask) -> Page:
    (row,) = queue_settings(ask.conn, _queue(ask, queries.queue_names(ask.conn)))
    stands = next(each for each in queries.queues(ask.conn, max_count=FEW) if each.queue == row["queue"])
    fields = changes.fields(row, changes.OF_QUEUE)
    return Page("queue.html", row["queue"], {"row": row, "stands": stands, "fields": fields, "most": FEW})


# --- A tenant --------------------------------------------------------------------------------------


def group(ask: Ask) -> Page:
    queue, key = _queue(ask, queries.queue_names(ask.conn)), group_text(ask.params["group"])
    (row,) = queries.groups_now(ask.conn, queue=queue, group_keys=[key], max_count=MANY)
    of_queue = queue_settings(ask.conn, queue)[0]
    own = next(iter(group_settings(ask.conn, queue, key)), {})
    named: Any = {"queue": queue, "group_key": key, "max_tasks": TASKS}
    shown = {
        "queue": queue,
        "key": key,
        "row": row,
        "waiting": less(row.in_line, row.held, MANY),
        "of_queue": of_queue,
        "stands": standing(ask.conn, queue, key),
        "fields": changes.fields(own, changes.OF_GROUP),
        "limits_of_it": limits(own) or limits(of_queue, "group_"),
        "tasks": queries.group_tasks(ask.conn, **named),
        "scheduled": queries.group_scheduled(ask.conn, **named),
        "ended": queries.ended(ask.conn, kind=None, outcomes=OUTCOMES, max_read=READ, **named),
        "read": READ,
    }
    return Page("group.html", key, shown)


OUTCOMES = ["succeeded", "failed", "cancelled", "expired"]

# --- A task ----------------------------------------------------------------------------------------


def task(ask: Ask) -> Page:
    found = explanation(ask.conn, check_id(int(ask.params["id"])))
    has_ended, may_read = found.get("finished_at") is not None, bool(queries.may_read(ask.conn))
    row = queries.body_of(ask.conn, id=found["task_id"], longest=LONGEST_BODY) if may_read else None
    shown = {
        "found": found,
        "has_ended": has_ended,
        "may_cancel": not has_ended,
        "may_retry": found["state"] in ("failed", "cancelled", "expired", "scheduled"),
        "attempts": told_attempts(found),
        "body": row and {name: _pretty(getattr(row, name)) for name in ("payload", "headers", "result")},
        "may_read": may_read,
        "progress": found["progress"],
    }
    return Page("task.html", f"Task {found['task_id']}", shown)


def _pretty(text: str | None) -> str | None:
    """Indented JSON; unchanged if it was cut off, or is too deep."""
    if text is None:
        return None
    if len(text) >= LONGEST_BODY:
        return f"{text} …"
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


# --- Workers, failures, schedules, upkeep ----------------------------------------------------------


def workers(ask: Ask) -> Page:
    found = inspection.worker_stats(ask.conn)
    runs = queries.longest_runs(ask.conn, max_tasks=TASKS)
    shown = {"rows": found[:WORKERS], "more": len(found) - WORKERS, "runs": runs}
    return Page("workers.html", "Workers", shown)


def failures(ask: Ask) -> Page:
    given, rows = changes.newest_failures(ask, FAILURES)
    may_read = bool(queries.may_read(ask.conn))
    errors: dict[int, Any] = {}
    if may_read:
        ids = [each.id for each in rows]
        errors = {each.id: json.loads(each.error or "null") for each in queries.errors_of(ask.conn, ids=ids)}
    kinds: dict[tuple[str, str, str], list[queries.EndedRow]] = {}
    for each in rows:
        error = errors.get(each.id)
        what = str(error.get("type") or error.get("code") or "") if isinstance(error, dict) else ""
        kinds.setdefault((each.queue, each.kind, what), []).append(each)
    shown = {
        "kinds": sorted(kinds.items(), key=lambda each: -len(each[1])),
        "tasks": rows[:50],
        "said": {id: told(error) for id, error in errors.items()},
        "given": given,
        "read": changes.READ,
        "may_read": may_read,
        "is_cut": len(rows) == FAILURES,
    }
    return Page("failures.html", "Failures", shown, every=5.0)


def schedules(ask: Ask) -> Page:
    behind = {name: ask.params.get(name, "") for name in ("behind_name", "behind_group")}
    found = queries.schedules(ask.conn, **behind, max_schedules=SCHEDULES)
    further = found[-1] if len(found) == SCHEDULES else None
    return Page("schedules.html", "Schedules", {"rows": found, "further": further}, every=5.0)


def schedule(ask: Ask) -> Page:
    """One schedule, and when it fires next."""
    row = changes.stored_schedule(ask)
    times = [] if row.paused_at else upcoming(row, ask.now, TICKS)
    return Page("schedule.html", row.name, {"row": row, "times": times}, every=5.0)


def upkeep(ask: Ask) -> Page:
    failures, ticks = queries.upkeep_failures(ask.conn), queries.last_ticks(ask.conn)
    shown = {"failures": failures, "ticks": ticks, "findings": None}
    return Page("upkeep.html", "Upkeep", shown, every=5.0)


def doctor(ask: Ask) -> Page:
    """The checks of `fairq doctor`. Only on demand, because they count live tasks and wait for a notice."""
    shown = upkeep(ask).shown | {"findings": [*examine(ask.site.dsn, None)]}
    return Page("upkeep.html", "Doctor", shown, every=None)


# --- A tenant's own view ---------------------------------------------------------------------------


def mine(ask: Ask) -> Page:
    """A tenant's own view."""
    found = standing(ask.conn, ask.params["queue"], ask.params["group"])
    return Page("mine.html", "Where you stand", {"mine": found}, every=5.0)


# --- Changes ---------------------------------------------------------------------------------------


def preview(ask: Ask, note: str = "", status: int = 200) -> Page:
    plan = changes.make_plan(ask)
    # The target goes into the address, because browsers change line ends in form fields.
    target = {name: value for name, value in ask.params.items() if name in changes.TARGET}
    names = {*changes.OF_QUEUE, *changes.OF_GROUP}
    typed = {name: value for name, value in ask.params.items() if name in names}
    shown = {"plan": plan, "target": target, "typed": typed | plan.keeps, "note": note}
    return Page("change.html", plan.title, shown, None, status)


def change(ask: Ask) -> Page:
    """Make the change that was shown, or show it again if it would now do something else."""
    plan = changes.make_plan(ask)
    if plan.is_empty or plan.was != ask.params.get("was"):
        return preview(ask, "Something has changed meanwhile: look again.", 409)
    return Page("changed.html", plan.title, {"text": plan.does(), "back": plan.back}, None)


# --- What went wrong -------------------------------------------------------------------------------


def trouble(title: str, status: int, text: object) -> Page:
    hint = text.hint if isinstance(text, FairqError) else None
    return Page("trouble.html", title, {"text": mask(str(text)), "hint": hint}, None, status)
