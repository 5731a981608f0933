"""`fairq stats`, and the snapshot that `fairq top` also shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fairq import ledger
from fairq.cli import amount, command, option
from fairq.commands.common import Connection, number, plain, server_time, session, show, span, table
from fairq.commands.shares import debt, percent
from fairq.errors import UnknownQueue
from fairq.ledger import Share
from fairq.queries import inspection, models

GROUPS = 20


@dataclass(frozen=True)
class Snapshot:
    """The state of the queues. `created` and `ended` only grow; their differences give rates."""

    at: datetime
    queues: list[models.FairqQueueStat]
    groups: list[models.FairqGroupStat]
    workers: list[models.FairqWorkerStat]
    created: int
    ended: int
    shares: dict[str, list[Share]] = field(default_factory=dict)


@command(codes={1: "no such queue"}, rights="fairq_observe")
@option("--queue NAME", "Only this queue. Default: all.")
@amount("--groups max_groups", GROUPS, "How many groups of each queue, busiest first.", least=0)
def stats(queue: str | None, max_groups: int) -> None:
    """Waiting tasks could run; ready tasks are those of them that have a place in the order. Blocked tasks
    wait for a concurrency key, scheduled ones for a time. The command counts every live task, so do not run
    it more often than every few seconds.

    fairq stats                          show all queues
    fairq stats --queue docs --groups 5  one queue and its five busiest groups
    fairq stats --json | jq '.queues[] | {queue, overflow, running}'
    """
    with session() as conn:
        found = take(conn, queue, max_groups)
    show(document(found), *render(found))


def take(
    conn: Connection, queue: str | None = None, max_groups: int = GROUPS, shares_since: float | None = None
) -> Snapshot:
    queues = inspection.queue_stats(conn, queue=queue)
    if queue is not None and not queues:
        raise UnknownQueue(f'there is no queue "{queue}"')
    groups = inspection.group_stats(conn, queue=queue, max_groups=max_groups) if max_groups else []
    workers = inspection.worker_stats(conn, queue=queue)
    ever = inspection.rows_ever(conn)
    shares = {
        str(each.queue): ledger.shares(conn, str(each.queue), since=shares_since, groups=max_groups)
        for each in queues
        if shares_since and live(each)
    }
    return Snapshot(server_time(conn), queues, groups, workers, ever.created, ever.ended, shares)


def live(each: models.FairqQueueStat) -> int:
    return each.scheduled + each.overflow + each.blocked + each.queued + each.claimed + each.running


def document(found: Snapshot) -> dict[str, Any]:
    document: dict[str, Any] = plain(found)
    del document["created"], document["ended"]
    if not found.shares:
        del document["shares"]
    return document


def render(found: Snapshot) -> list[RenderableType]:
    parts: list[RenderableType] = [queue_table(found), Text()]
    if found.groups:
        parts += [group_table(found), Text()]
    parts.append(worker_table(found) if found.workers else Text("No workers. Start one: fairq work MODULE"))
    return parts


COUNTS = (">waiting", ">ready", ">running", ">?blocked", ">?scheduled")


def _counts(each: models.FairqQueueStat | models.FairqGroupStat) -> tuple[str, ...]:
    waiting, running = each.overflow + each.queued, each.claimed + each.running
    return tuple(map(number, (waiting, each.queued, running, each.blocked, each.scheduled)))


def queue_table(found: Snapshot, limit: int | None = None) -> RenderableType:
    rows = [
        (each.queue, *_counts(each), number(each.waiting_groups), _age(found, each.oldest_waiting_since))
        for each in found.queues[:limit]
    ]
    return table("Queues", ("queue", *COUNTS, ">groups", ">oldest waits"), rows)


def group_table(found: Snapshot) -> RenderableType:
    groups = sorted(found.groups, key=lambda g: -(g.overflow + g.queued + g.claimed + g.running))
    several = len({each.queue for each in groups}) > 1
    rows = [
        (
            each.queue if several else "",
            each.group_key,
            *_counts(each),
            _age(found, each.oldest_waiting_since),
        )
        for each in groups
    ]
    return table("Groups, busiest first", ("?queue", "group", *COUNTS, ">oldest waits"), rows)


def share_table(found: Snapshot, limit: int | None = None) -> RenderableType:
    """Groups with what they got and were due. Those with a debt above their bound come first."""
    shares = {(queue, each.group_key): each for queue, some in found.shares.items() for each in some}
    rows = []
    for each in found.groups:
        share = shares.get((str(each.queue), str(each.group_key)))
        is_behind = share is not None and (share.debt_ratio or 0) > 1
        waiting, running = each.overflow + each.queued, each.claimed + each.running
        row = (
            each.queue if len(found.shares) > 1 else "",
            each.group_key,
            number(waiting),
            number(running),
            percent(share.received_part if share else None),
            percent(share.entitled_part if share else None),
            debt(share),
            _age(found, each.oldest_waiting_since),
        )
        rows.append((not is_behind, -waiting - running, row))
    columns = ("?queue", "group", ">waiting", ">running", ">got", ">due", ">debt", ">oldest waits")
    shown = [row for *_, row in sorted(rows, key=lambda each: each[:2])[:limit]]
    return table("Groups, busiest first, in the last minute", columns, shown)


def worker_table(found: Snapshot, limit: int | None = None) -> RenderableType:
    rows = []
    for each in found.workers[:limit]:
        seen = found.at - (each.beat_at or each.registered_at)
        state = Text("alive", "green") if each.alive else Text("lost", "bold red")
        busy, seen_at = f"{each.held:,} of {each.slots:,}", f"{span(max(seen.total_seconds(), 0))} ago"
        rows.append((each.worker_id, each.name, ", ".join(each.queues), busy, state, seen_at))
    title = f"Workers: {sum(each.alive for each in found.workers):,} alive"
    return table(title, (">id", "name", "queues", ">busy slots", "state", ">last seen"), rows)


def _age(found: Snapshot, since: datetime | None) -> str:
    return "" if since is None else span(max((found.at - since).total_seconds(), 0))
