"""Metrics for Prometheus: one exporter for the database, however many workers there are.

    from fairq import metrics

    text = metrics.render(conn)      # a psycopg connection of a role that is granted fairq_observe

`fairq.metrics()` in the database makes the samples; this module formats them. No state is kept between
scrapes, so all exporters say the same.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg

from fairq.queries import inspection

__all__ = ["CONTENT_TYPE", "METRICS", "render", "samples"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# What there is: of each its type, its labels, and its help.
METRICS: dict[str, tuple[str, str, str]] = {
    "fairq_tasks": ("gauge", "queue,state", "Tasks waiting, scheduled or running; counts stop at a million."),
    "fairq_oldest_wait_seconds": ("gauge", "queue", "The longest that any group's next task has waited."),
    "fairq_wait_seconds": ("histogram", "queue", "How long ended tasks had waited for their last attempt."),
    "fairq_run_seconds": ("histogram", "queue,kind", "How long the last attempts of ended tasks ran."),
    "fairq_ended_total": ("counter", "queue,kind,outcome", "Ended tasks."),
    "fairq_slots": ("gauge", "queue,state", "Slots of the queue's workers, busy and idle."),
    "fairq_idle_slots": ("gauge", "queue", "Slots that were idle while a group waited only for its turn."),
    "fairq_backlog_seconds": ("gauge", "queue", "Worker seconds that the waiting tasks will take."),
    "fairq_desired_slots": (
        "gauge",
        "queue",
        "Slots to do in 5 minutes what came in the last 5 minutes or waits.",
    ),
    "fairq_fairness_error": (
        "gauge",
        "queue",
        "What groups got less than they were entitled to, as a part of all.",
    ),
    "fairq_fairness_jain": ("gauge", "queue", "Jain's index of received over entitled shares."),
    "fairq_worst_debt_ratio": ("gauge", "queue", "The largest debt as a part of its bound; above 1: broken."),
    "fairq_newcomer_p99_seconds": (
        "gauge",
        "queue",
        "How long the first tasks of formerly idle groups waited.",
    ),
    "fairq_groups": ("gauge", "queue", "Groups that had tasks in the last half minute."),
    "fairq_group_slots": ("gauge", "queue,group", "Worker seconds per second of a group."),
    "fairq_group_started_per_second": ("gauge", "queue,group", "Attempts of a group that began per second."),
    "fairq_group_oldest_wait_seconds": (
        "gauge",
        "queue,group",
        "How long the next task of a group has waited.",
    ),
    "fairq_group_shortfall": (
        "gauge",
        "queue,group",
        "What a group got less than it was entitled to in half a minute.",
    ),
    "fairq_upkeep_failures": ("gauge", "", "Failing parts of the upkeep."),
    "fairq_circuits_open": ("gauge", "", "Workers whose circuit breaker is open, as they last reported."),
    "fairq_horizon_age_seconds": ("gauge", "", "Age of the oldest transaction that can be seen."),
    "fairq_schedule_lag_seconds": ("gauge", "", "How late the most overdue schedule is; 0: none is due."),
    "fairq_ledger_age_seconds": (
        "gauge",
        "",
        "Time since the ledger was last written; grows without upkeep.",
    ),
}


def samples(conn: psycopg.Connection[Any], *, groups: int = 20) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample. `groups` limits how many groups have series, over all queues."""
    rows = inspection.samples(conn, max_groups=groups)
    return [(row.name, json.loads(row.labels), row.value) for row in rows]


def render(conn: psycopg.Connection[Any], *, groups: int = 20) -> str:
    """All samples in Prometheus's text format."""
    of: dict[str, list[str]] = {name: [] for name in METRICS}
    for name, labels, value in samples(conn, groups=groups):
        metric = name if name in METRICS else name.rsplit("_", 1)[0]
        shown = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels.items())
        of[metric].append(f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}")
    lines = []
    for metric, its in of.items():
        if its:
            kind, _, about = METRICS[metric]
            lines += [f"# HELP {metric} {about}", f"# TYPE {metric} {kind}", *its]
    return "".join(f"{line}\n" for line in lines)


def _escaped(value: Any) -> str:
    """Names come from anybody, and may contain a line break."""
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
