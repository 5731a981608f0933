"""Who gets what, and how fair that is: what each group received, and what it was entitled to.

for share in fairq.shares(conn, "docs", since=600):
    print(share.group_key, share.received, share.entitled, share.debt, share.bound)
fairq.fairness(conn, "docs").worst_debt
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta

from fairq.connections import on_connection
from fairq.driver import Call
from fairq.options import check_text, in_seconds
from fairq.policies import read_row
from fairq.queries import ledger as queries

__all__ = ["Fairness", "Share", "fairness", "shares", "shares_call"]


@dataclass(frozen=True, slots=True)
class Share:
    """A row of `fairq.shares()` in SQL. Times are in seconds. The group "" stands for all other groups.

    `debt` is how much less the group received, by weight, than the group furthest ahead; at most `bound`.
    None: its tasks did not wait all the time, or its own limits held it back.
    """

    group_key: str
    groups: int
    weight: float | None
    tasks: int
    seconds: float
    cost: float
    received: float
    entitled: float
    debt: float | None
    bound: float | None
    wait_p50: float | None
    wait_p95: float | None
    waiting_since: datetime | None
    backlog: int | None
    backlog_seconds: float | None
    eta_seconds: float | None
    limited_by: str | None
    behind: dict[str, float]
    received_part: float | None
    """Its part of all that was received; None: nobody received anything."""
    entitled_part: float | None
    """The part of the same that it was entitled to."""

    @property
    def debt_ratio(self) -> float | None:
        """The debt as a part of its bound. Above 1 the order is broken."""
        return self.debt / self.bound if self.debt is not None and self.bound else None


@dataclass(frozen=True, slots=True)
class Fairness:
    """The row of `fairq.fairness()` in SQL. With `worst_debt` above 1 the order is broken."""

    groups: int
    tasks: int
    seconds: float
    shortfall: float
    jain: float
    worst_debt: float | None
    worst_group: str | None
    idle_slots: float | None
    newcomer_p99: float | None
    wait_p50: float | None
    wait_p95: float | None
    ledger_until: datetime | None


@on_connection
def shares(queue: str = "default", *, since: float | timedelta = 600, groups: int = 100) -> Call[list[Share]]:
    """Who got what in the last `since` seconds: the `groups` groups most behind or with the most received."""
    return shares_call(queue, since, groups)


@on_connection
def fairness(queue: str = "default", *, since: float | timedelta = 600) -> Call[Fairness]:
    """How fair a queue was in the last `since` seconds."""
    call = queries.read_fairness.call(queue=check_text("queue", queue), seconds=float(in_seconds(since)))
    return call.then(lambda row: read_row(Fairness, row))


def shares_call(
    queue: str, since: float | timedelta, groups: int, group_key: str | None = None
) -> Call[list[Share]]:
    """The call of `shares`, which also includes a named group."""
    call = queries.read_shares.call(
        queue=check_text("queue", queue),
        seconds=float(in_seconds(since)),
        max_groups=groups,
        group_key=group_key,
    )
    return call.then(lambda rows: [_share(row) for row in rows])


def _share(row: queries.ReadSharesRow) -> Share:
    behind = {each["group"]: each["seconds"] for each in json.loads(row.behind or "[]")}
    return read_row(Share, row, behind=behind)
