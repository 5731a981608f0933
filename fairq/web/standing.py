"""What a tenant may know: where it stands, and when its turn comes. Nothing about others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fairq import ledger
from fairq.connections import Steps, on_connection
from fairq.options import check_text, group_text
from fairq.queries import web as queries

MOST = 10_001
GROUPS = 100  # whose backlogs count for the estimate
SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A tenant's state in a queue. `waiting` counts to 10,000. Shares are of the last ten minutes."""

    queue: str
    group_key: str
    at: datetime
    running: int
    waiting: int
    waiting_since: datetime | None
    ahead: int | None
    """How many tasks of anybody come before its next one; None: it has none in the order yet."""
    eta_seconds: float | None
    """Until all waiting tasks are done, if no others come; None: unknown, or nothing waits."""
    share: float | None
    """The part of all that it was entitled to."""
    received: float | None
    """The part of all that it received."""
    budget: float | None
    """What it may use per period; None: it has no budget."""
    budget_left: float | None
    budget_renews_at: datetime | None
    held_back_by: str | None
    """What it waits for besides its turn: its own limits, or a shared one."""


@on_connection
def standing(queue: str, group_key: str) -> Steps[Standing]:
    """A tenant's state in a queue. Needs the rights of `fairq_observe`."""
    names = {"queue": check_text("queue", queue), "group_key": group_text(group_key)}
    rows: list[ledger.Share] = yield ledger.shares_call(queue, SECONDS, GROUPS, names["group_key"])
    row: queries.StandingRow | None = yield queries.standing.call(**names, max_count=MOST)
    assert row is not None
    own = next((each for each in rows if each.group_key == group_key), None)
    return Standing(
        **names,
        at=row.at,
        running=row.running,
        waiting=min(max(row.in_line - row.running, 0), MOST - 1),
        waiting_since=row.waiting_since,
        ahead=row.ahead,
        eta_seconds=own.eta_seconds if own and row.waiting_since else None,
        share=own.entitled_part if own else None,
        received=own.received_part if own else None,
        budget=row.budget,
        budget_left=row.available,
        budget_renews_at=row.renews_at,
        held_back_by=_own(own.limited_by if own else None, group_key),
    )


def _own(reason: str | None, group_key: str) -> str | None:
    """The reason for a tenant: only its own limits, because others would name queues, keys and tasks."""
    if reason is None:
        return None
    own = f'group "{group_key}": '
    return reason.removeprefix(own) if reason.startswith(own) else "a limit that is shared"
