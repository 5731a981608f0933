"""`fairq explain`: why a task waits, or how it ended."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, TypeVar

import click
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairq import client
from fairq.cli import command
from fairq.commands.common import Connection, clean, ident, plain, rows, server_time, session, show, span
from fairq.outcome import told
from fairq.queries import inspection

T = TypeVar("T")

# Errors and notes where the role may read them.
ERROR = """
select {f.error} as error
from fairq.finished_tasks f
where f.shard_no = any(array(select fairq._shards(null))) and f.id = %(id)s
"""
ATTEMPTS = """
select a.attempt, a.outcome, a.worker_id, a.started_at, a.ended_at, {a.error} as error
from fairq.attempts a
where a.shard_no = any(array(select fairq._shards(null))) and a.task_id = %(id)s
order by a.ended_at, a.attempt
"""
PROGRESS = """
select p.done, p.total, {p.note} as note, p.reported_at
from fairq.progress p
where p.shard_no = any(array(select fairq._shards(null))) and p.task_id = %(id)s
order by p.reported_at desc
limit 1
"""


@command(codes={1: "no such task"}, rights="fairq_observe")
@click.argument("task_id", metavar="ID", type=ident)
def explain(task_id: int) -> None:
    """The reason is the engine's own: promotion and this command use the same function. Then come the task's
    attempts, with their errors. Payloads are not shown.

    fairq explain 42
    fairq explain 42 --json | jq -r .reason
    """
    with session() as conn:
        found = explanation(conn, task_id)
        now = server_time(conn)
    show(found, *_render(found, now))


def explanation(conn: Connection, task_id: int) -> dict[str, Any]:
    with conn.transaction():
        parts = client.get(conn, task_id), client.explain(conn, task_id)
        may = inspection.may_read_errors(conn)
        error, attempts, progress = (
            rows(conn, re.sub(r"\{(.*?)\}", r"\1" if may else "null::jsonb", query), id=task_id)
            for query in (ERROR, ATTEMPTS, PROGRESS)
        )
    answer = {name: getattr(part, name) for part in parts for name in part.__slots__ if name != "id"}
    answer |= {"error": error[0]["error"] if error else None, "shows_errors": may}
    return {**answer, "attempts": attempts, "progress": next(iter(progress), None)}


def told_attempts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The ended attempts, the last one included."""
    attempts = list(found["attempts"])
    if found.get("finished_at"):
        last = {key: found.get(key) for key in ("attempt", "worker_id", "started_at", "error")}
        attempts.append({**last, "outcome": found["state"], "ended_at": found["finished_at"]})
    return attempts


def _render(found: dict[str, Any], now: Any) -> list[RenderableType]:
    def ago(at: Any) -> str:
        if at is None:
            return ""
        seconds = (now - at).total_seconds()
        distance = f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"
        return f"{at:%Y-%m-%d %H:%M:%S %Z}  ({distance})"

    head = Text()
    head.append(f"Task {found['task_id']}", "bold")
    reason = str(found["reason"])
    named = found.get("finished_at") is not None or reason.startswith(found["state"])
    head.append(": " if named else f" is {found['state']}: ")
    head.append(clean(reason))
    lines: dict[str, str] = {
        **_facts(found, str),
        "ahead": _ahead(found),
        "next look": ago(found["next_look_at"]),
        "attempt": f"{found['attempt']} of {found['max_attempts']}",
        "worker": str(found["worker_id"] or ""),
        "progress": _progress(found["progress"]),
        "priority": str(found["priority"] or ""),
        "cost": f"{found['cost']:g}" if found["cost"] != 1 else "",
        **{name: ago(at) for name, at in _facts(found, datetime).items()},
    }
    facts = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        if value:
            facts.add_row(Text(f"  {name}", "dim"), Text(clean(value)))
    attempts = told_attempts(found)
    if found["state"] == "succeeded":
        attempts.pop()
    parts: list[RenderableType] = [head, facts]
    if attempts:
        parts += [Text(), Text("How its attempts ended", "bold")]
    for each in attempts:
        took = f" after {span(each['ended_at'] - each['started_at'])}" if each["started_at"] else ""
        where = f", worker {each['worker_id']}" if each["worker_id"] else ""
        parts.append(
            Text(f"  {each['attempt']}  {each['outcome']}{took}, {each['ended_at']:%Y-%m-%d %H:%M:%S}{where}")
        )
        if text := told(each["error"]):
            parts.append(Padding(Text(clean(text)), (0, 0, 0, 5)))
    if attempts and not found["shows_errors"]:
        parts.append(Text("  (Only fairq_admin may read errors.)", "dim"))
    return parts


def _facts(found: dict[str, Any], kind: type[T]) -> dict[str, T]:
    """A task's texts, or its times, that are shown as they are. The reason says the rest."""
    names = {"group_key": "group", "user_key": "user", "finished_at": "ended"}
    return {
        names.get(name, name.removesuffix("_at").replace("_", " ")): found[name]
        for name in client.TaskInfo.__slots__
        if isinstance(found.get(name), kind) and name not in ("state", "run_at")
    }


def _ahead(found: dict[str, Any]) -> str:
    counts = {"in the order": found.get("ahead"), "of its own group": found.get("ahead_in_group")}
    return ", ".join(f"{count:,} {where}" for where, count in counts.items() if count is not None)


def _progress(report: dict[str, Any] | None) -> str:
    if report is None or report["done"] is None:
        return ""
    share = f" of {report['total']:g} ({report['done'] / report['total']:.0%})" if report["total"] else ""
    return f"{report['done']:g}{share}" + (f", {plain(report['note'])}" if report["note"] is not None else "")
