"""`fairq shares`: who gets what."""

from __future__ import annotations

from datetime import timedelta

from rich.console import RenderableType
from rich.text import Text

from fairq import ledger
from fairq.cli import amount, command, option
from fairq.commands.common import clean, count, duration, number, server_time, session, show, span, table
from fairq.ledger import Fairness, Share


@command(codes={1: "no such queue"}, rights="fairq_observe")
@option("--queue NAME", "The queue.", default="default")
@option("--since TIME", "How far back to look.", type=duration, default="10m")
@amount("--groups", 20, "How many groups: those most behind or with the most received.")
def shares(queue: str, since: timedelta, groups: int) -> None:
    """For each tenant: the part it received, the part it was due by weight, and how far it is behind (its
    debt, never more than its bound). Also how long its tasks waited (median and 95 %), how many wait now, and
    when they will be done.

    fairq shares
    fairq shares --queue docs --since 1h --groups 5
    fairq shares --json | jq '.shares[] | select(.debt > .bound)'
    """
    with session() as conn:
        found = ledger.shares(conn, queue, since=since, groups=groups)
        fair = ledger.fairness(conn, queue, since=since)
        now = server_time(conn)
    document = {"queue": queue, "at": now, "fairness": fair, "shares": found}
    show(document, *_render(queue, since, found, fair))


def _render(queue: str, since: timedelta, found: list[Share], fair: Fairness) -> list[RenderableType]:
    if not found:
        return [Text(f"Nothing ran or waited in queue {clean(queue)}.")]
    rows = [
        (
            each.group_key or f"{count(each.groups, 'other')}",
            percent(each.received_part),
            percent(each.entitled_part),
            debt(each),
            _short(each.wait_p50),
            _short(each.wait_p95),
            number(each.backlog),
            _short(each.eta_seconds),
        )
        for each in found
    ]
    columns = ("group", ">got", ">due", ">debt", ">wait", ">95 %", ">waiting", ">done in")
    parts: list[RenderableType] = [table(f"Queue {clean(queue)}, last {span(since)}", columns, rows)]
    held_back = [Text(clean(each.limited_by)) for each in found if each.limited_by]
    if held_back:
        parts += [Text(), Text("Held back", "bold"), *held_back]
    return [*parts, Text(), _sum(fair)]


def percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}".replace("%", " %")


def debt(each: Share | None) -> Text:
    """The debt and its bound, red above the bound."""
    if each is None or each.debt is None or each.bound is None:
        return Text()
    return Text(f"{each.debt:.3g} of {each.bound:.3g}", "bold red" if (each.debt_ratio or 0) > 1 else "")


def _short(seconds: float | None) -> str:
    minutes, unit, _ = span(seconds).partition(" min ")
    return minutes + unit.rstrip()


def _sum(fair: Fairness) -> Text:
    if fair.worst_debt is None:
        text = Text("No group waited all the time.")
    elif fair.worst_debt > 1:
        text = Text(
            f"The order is broken: {clean(str(fair.worst_group))} is behind by {fair.worst_debt:.1f} bounds.",
            "bold red",
        )
    else:
        text = Text(f"The order holds: the largest debt is {fair.worst_debt:.2f} of its bound.", "green")
    if fair.newcomer_p99 is not None:
        text.append(f" 99 % of newcomers waited at most {span(fair.newcomer_p99)}.", "default")
    return text
