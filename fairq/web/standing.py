"""What a tenant may know: where he stands, and when his turn comes. Nothing of anybody else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fairq import ledger
from fairq.connections import Steps, on_connection
from fairq.options import check_text, group_text
from fairq.queries import web as queries

MOST = 10_001
GROUPS = 100  # whose backlogs count for when somebody is through
SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a tenant stands in a queue. `waiting` counts to 10,000. Shares are of the last ten minutes."""

    queue: str
    group_key: str
    at: datetime
    running: int
    waiting: int
    waiting_since: datetime | None
    ahead: int | None
    """Tasks of anybody before its next one; None: it has none in the order yet."""
    eta_seconds: float | None
    """Until all that waits is through, if nothing else comes; None: unknown, or nothing waits."""
    share: float | None
    """The part of all that it was entitled to, and what it received."""
    received: float | None
    budget: float | None
    """What it may use per period, what is left of that, and until when; None: it has no budget."""
    budget_left: float | None
    budget_renews_at: datetime | None
    held_back_by: str | None
    """What holds it back beside its turn: its own limits, or something that is shared."""


@on_connection
def standing(queue: str, group_key: str) -> Steps[Standing]:
    """Say how a tenant stands. The connection needs fairq_observe."""
    names = {"queue": check_text("queue", queue), "group_key": group_text(group_key)}
    rows: list[ledger.Share] = yield ledger.shares_call(queue, SECONDS, GROUPS, names["group_key"])
    row: queries.StandingRow | None = yield queries.standing.call(**names, max_count=MOST)
    assert row is not None
    part = ledger.parts(rows).get(group_key)
    own = part.share if part else None
    return Standing(
        **names,
        at=row.at,
        running=row.running,
        waiting=min(max(row.in_line - row.running, 0), MOST - 1),
        waiting_since=row.waiting_since,
        ahead=row.ahead,
        eta_seconds=own.eta_seconds if own and row.waiting_since else None,
        share=part.entitled if part else None,
        received=part.received if part else None,
        budget=row.budget,
        budget_left=row.available,
        budget_renews_at=row.renews_at,
        held_back_by=_own(own.limited_by if own else None, group_key),
    )


def _own(reason: str | None, group_key: str) -> str | None:
    """The engine names queues, keys and tasks of others; a tenant hears of his own limits only."""
    if reason is None:
        return None
    own = f'group "{group_key}": '
    return reason.removeprefix(own) if reason.startswith(own) else "a limit that is shared"
