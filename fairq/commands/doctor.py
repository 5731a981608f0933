"""`fairq doctor`: whether the installation is well, and what to do where it is not.

A check queries the database (`sql/queries/doctor.sql`), and a pure function judges the answer. Each check has
a transaction of its own, so one that fails is a finding itself and does not stop the others. A check that the
role may not make is reported as unknown, not wrong.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Literal

import click
import psycopg
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fairq import install
from fairq.cli import Exit, command, named_dsn, option
from fairq.commands.common import Connection, clean, connect, count, duration, plain, server_time, show, span
from fairq.dsn import describe, mask, resolve
from fairq.embedded import OLDEST_MAJOR
from fairq.errors import FairqError
from fairq.queries import doctor as queries

Verdict = Literal["ok", "look", "wrong", "unknown", "failed"]
_STYLES = {"ok": "green", "look": "yellow", "wrong": "bold red", "unknown": "dim", "failed": "bold red"}

LONG_WAIT = timedelta(hours=1)
LONG_TRANSACTION = timedelta(minutes=15)
HELD_TRANSACTIONS = 1_000_000
DEAD_ROWS = 1_000_000
LISTEN_SECONDS = 2.0
SKEW_SECONDS = 2.0
CHECK_SECONDS = 20.0  # for each statement of a check, whatever the role's own timeout
LOCK_SECONDS = 3.0
LONG_LEASE = timedelta(hours=1)
SHORT_TIMEOUT = timedelta(seconds=5)
SHORT_SESSION = timedelta(minutes=1)


@dataclass(frozen=True)
class Finding:
    """What a check found. `remedy` says what to do about it."""

    verdict: Verdict
    text: str
    remedy: str | None = None
    check: str = ""


ok, look, wrong = partial(Finding, "ok"), partial(Finding, "look"), partial(Finding, "wrong")


@command(
    codes={0: "nothing wrong", 1: "something wrong, or a check failed", 3: "database cannot be reached"},
    rights="any; fairq_observe sees more, fairq_work and pg_monitor see all",
)
@option(
    "--max-wait TIME",
    "Report wrong if a task has waited longer. Default: report look after an hour.",
    type=duration,
)
def doctor(max_wait: timedelta | None) -> None:
    """It changes nothing: it reads, and sends itself one notification. Each check reports ok, look (deserves
    attention), wrong, unknown (this role may not read it) or failed (the check itself).

    fairq doctor
    fairq doctor --max-wait 10m              no task may wait longer
    fairq doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    where = resolve(named_dsn())
    found = [*examine(where, max_wait)]
    is_well = not any(each.verdict in ("wrong", "failed") for each in found)
    show({"database": describe(where), "ok": is_well, "findings": found}, _render(found), Text(), _sum(found))
    if not is_well:
        raise click.exceptions.Exit(Exit.NO)


def _render(found: list[Finding]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for wraps in (False, False, True):
        grid.add_column(no_wrap=not wraps)
    for each in found:
        text = Text(clean(each.text))
        if each.remedy:
            text.append(f"\n{each.remedy}", "dim" if each.verdict in ("ok", "unknown") else "")
        grid.add_row(Text(each.verdict, _STYLES[each.verdict]), Text(each.check), text)
    return grid


def _sum(found: list[Finding]) -> str:
    times = Counter(each.verdict for each in found)
    bad = [count(times["wrong"], "thing is", "things are") + " wrong"] if times["wrong"] else []
    bad += [count(times["failed"], "check") + " failed"] if times["failed"] else []
    if bad:
        return f"{', '.join(bad)}."
    deserves = count(times["look"], "thing deserves", "things deserve")
    return f"Nothing is wrong; {deserves} a look." if times["look"] else "All is well."


# --- The round -------------------------------------------------------------------------------------


def examine(dsn: str, max_wait: timedelta | None) -> Iterator[Finding]:
    """All checks, in the order in which their answers make sense."""
    # Cached because two checks need it and it reads every live task.
    stands = cache(lambda: queries.check_queues(conn))
    # Checks with a star read the schema fairq.
    checks: dict[str, Callable[[], Finding]] = {
        "connection": lambda: judge_connection(queries.check_session(conn), dsn, conn.info.backend_pid),
        "server": lambda: judge_server(queries.check_server(conn)),
        "clock": lambda: judge_clock(datetime.now(UTC), server_time(conn), datetime.now(UTC)),
        "timeouts": lambda: judge_timeouts(queries.check_timeouts(conn)),
        "schema": lambda: judge_schema(conn),
        "*rights": lambda: judge_rights(queries.check_rights(conn)),
        "*workers": lambda: judge_workers(stands(), queries.check_workers(conn)),
        "*kinds": lambda: judge_kinds(queries.check_kinds(conn)),
        "*waiting": lambda: judge_waiting(stands(), max_wait),
        "*fairness": lambda: judge_fairness(queries.check_fairness(conn)),
        "*maintenance": lambda: judge_maintenance(
            queries.check_maintenance(conn), queries.check_upkeep(conn)
        ),
        "*schedules": lambda: judge_schedules(queries.check_schedules(conn)),
        "*history": lambda: judge_history(queries.check_history(conn)),
        "horizon": lambda: judge_horizon(queries.check_horizon(conn)),
        "listen": lambda: _judge_notices(queries.check_session(conn), dsn),
        "connections": lambda: judge_connections(queries.check_connections(conn)),
        "*dead rows": lambda: judge_dead_rows(queries.check_dead_rows(conn)),
    }
    conn = connect(dsn)
    try:
        is_open = True
        with contextlib.suppress(psycopg.Error):
            is_open = queries.check_schema_is_open(conn)
        for name, check in checks.items():
            if is_open or not name.startswith("*"):
                if conn.closed:
                    with contextlib.suppress(psycopg.Error):
                        conn = connect(dsn)
                yield replace(_alone(conn, check), check=name.lstrip("*"))
    finally:
        conn.close()


def _alone(conn: Connection, check: Callable[[], Finding]) -> Finding:
    """What a check finds; an error is a finding too."""
    try:
        with conn.transaction():
            # Local to the transaction, so it also works behind a pooler.
            conn.execute(
                "select set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)",
                [f"{CHECK_SECONDS * 1000:.0f}ms", f"{LOCK_SECONDS * 1000:.0f}ms"],
            )
            return check()
    except psycopg.errors.InsufficientPrivilege as exc:
        remedy = "Use a role that is granted fairq_observe or fairq_work."
        return Finding("unknown", f"this role may not read it: {_why(exc)}", remedy)
    except _NOT_THERE as exc:
        return Finding("unknown", f"not in this schema: {_why(exc)}", "See schema above.")
    except psycopg.errors.QueryCanceled as exc:
        remedy = f"The limit is {CHECK_SECONDS:.0f} s. Is the server busy, or the queue very long?"
        return Finding("failed", f"the check was stopped: {_why(exc)}", remedy)
    except psycopg.errors.LockNotAvailable as exc:
        remedy = (
            "Who holds it: select pid, query from pg_stat_activity where state <> 'idle' order by xact_start;"
        )
        return Finding("failed", f"the check got no lock in {LOCK_SECONDS:.0f} s: {_why(exc)}", remedy)
    except Exception as exc:  # the next check may say why
        return Finding("failed", f"the check failed: {_why(exc)}", "See what the other checks report.")


_NOT_THERE = psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedFunction


def _why(exc: Exception) -> str:
    primary = exc.diag.message_primary if isinstance(exc, psycopg.Error) else None
    return mask(primary or f"{type(exc).__name__}: {' '.join(str(exc).split())}")


# --- Connection and server -------------------------------------------------------------------------


def judge_connection(row: queries.CheckSessionRow, dsn: str, pid: int) -> Finding:
    text = f"{describe(dsn)}, as {row.role}"
    if row.standby:
        remedy = "Name the primary: with several hosts, target_session_attrs=read-write finds it."
        return wrong(f"{text}: a standby, where nothing can be enqueued", remedy)
    if row.read_only == "on":
        remedy = f"alter role {row.role} reset default_transaction_read_only;"
        return wrong(f"{text}: transactions are read only by default", remedy)
    if row.isolation != "read committed":
        remedy = (
            "Enqueueing works in every isolation level, and fairq's workers set theirs. Your own consumers "
            "need READ COMMITTED: pop_tasks and promote_overflow refuse all others (QF005)."
        )
        return look(f"{text}: the default isolation level is {row.isolation}", remedy)
    return ok(text if row.pid == pid else f"{text}, through a pooler")


_MUST_BE_ON = {
    "fsync": "a crash may lose or damage everything",
    "full_page_writes": "a crash may lose or damage everything",
    "autovacuum": "dead rows are never removed",
    "track_counts": "dead rows are never removed",
}


def judge_server(row: queries.CheckServerRow) -> Finding:
    text = f"PostgreSQL {row.version}"
    if row.number // 10000 < OLDEST_MAJOR:
        return wrong(f"{text} is older than {OLDEST_MAJOR}", "Upgrade PostgreSQL.")
    for name, harm in _MUST_BE_ON.items():
        if getattr(row, name) == "off":
            remedy = f"alter system set {name} = on; select pg_reload_conf();"
            return wrong(f"{text} with {name} off: {harm}", remedy)
    if row.encoding != "UTF8":
        return look(
            f"{text}; the database has the encoding {row.encoding}, and refuses what has other letters",
            "Move to a new one: create database … encoding 'UTF8' template template0;",
        )
    return ok(text)


def judge_clock(before: datetime, at: datetime, after: datetime) -> Finding:
    """The server's time lies between two looks at ours, or the clocks differ."""
    skew = max(before - at, at - after, timedelta(0)).total_seconds()
    if skew <= SKEW_SECONDS:
        return ok("this machine and the server agree")
    side = "behind" if at > after else "ahead of"
    return look(
        f"this machine is {span(skew)} {side} the server",
        "Leases and due times use only the server's clock, but a run_at computed here is off by that much. "
        "Synchronise both clocks (chrony, systemd-timesyncd).",
    )


def judge_timeouts(found: Sequence[queries.CheckTimeoutsRow]) -> Finding:
    """A turn or a round of the upkeep that a timeout stops is repeated, and stopped again. A session that was
    idle for too long is only made again.
    """
    short, remedy, in_vain, stops = list[str](), "", False, False
    for row in found:
        about_session = row.name == "idle_session_timeout"
        least = SHORT_SESSION if about_session else SHORT_TIMEOUT
        if row.length is None or not timedelta(0) < row.length < least:
            continue
        who = "this session" if row.here else f"role {row.role}"
        short.append(f"{who}: {row.name} is {span(row.length)}")
        stops = stops or not about_session
        in_vain = in_vain or (not about_session and row.length < timedelta(seconds=1))
        remedy = remedy or f"alter role {row.role} set {row.name} = '1min';"
        if row.here and len(short) == 1:
            remedy += " It may also be set in the connection string, in PGOPTIONS, or for the database."
    if not short:
        return ok("long enough for turns and the upkeep")
    text = "; ".join(short)
    if in_vain:
        return wrong(f"{text}: longer calls are stopped, and repeated in vain", remedy)
    if stops:
        return look(f"{text}: longer calls are stopped", remedy)
    return look(f"{text}: workers that wait are cut off, and connect again", remedy)


def judge_schema(conn: Connection) -> Finding:
    try:
        version = install.check_version(conn)
    except FairqError as exc:
        return wrong(mask(str(exc)), exc.hint)
    except psycopg.errors.InsufficientPrivilege as exc:
        return wrong(f"this role may not read it: {_why(exc)}", f"{_GRANT}\n{_grant_again()}")
    if version != install.head():
        return look(f"{version}; this fairq brings {install.head()}, and works with both", "fairq migrate")
    return ok(version)


_GRANT = "Ask an operator to grant it fairq_enqueue, fairq_work, fairq_observe or fairq_admin."


def _grant_again() -> str:
    return f"After a restore without privileges, as its owner: psql -1 -f {install.sql_dir() / 'grants.sql'}"


def judge_rights(row: queries.CheckRightsRow) -> Finding:
    if not row.granted:
        return wrong("fairq's roles have no rights here, so neither has a worker", _grant_again())
    if row.superuser:
        less = "Applications and workers need less: fairq_enqueue and fairq_work."
        return ok("superuser: may do everything", less)
    able = [name for name in ("enqueue", "work", "observe", "admin") if getattr(row, name)]
    return ok(f"may {', '.join(able)}") if able else wrong("this role may do nothing with fairq", _GRANT)


# --- The queues ------------------------------------------------------------------------------------


def judge_workers(
    stand: Sequence[queries.CheckQueuesRow], workers: Sequence[queries.CheckWorkersRow]
) -> Finding:
    living = [each for each in workers if each.alive]
    served = {queue for each in living for queue in each.queues}
    unserved = [each.queue for each in stand if each.waiting and not each.paused and each.queue not in served]
    text = count(len(living), "worker alive", "workers alive")
    if unserved:
        text = f"{text}; tasks wait, and nobody serves {_names(unserved)}"
        return wrong(text, "Start a worker: fairq work myapp.tasks --queue NAME")
    if not living:
        return look(f"{text}, and nothing waits", "Start a worker: fairq work myapp.tasks")
    if cut_off := [each for each in living if each.circuit_open]:
        who = _names([f"{each.worker_id} ({each.name})" for each in cut_off])
        trips = sum(each.circuit_trips or 0 for each in cut_off)
        return look(
            f"{text}; the circuit breaker of worker {who} is open ({count(trips, 'time')} so far)",
            "The worker is alive, but its turns fail, and it pauses after each. Its log says why.",
        )
    longest = max(living, key=lambda each: each.lease)
    if longest.lease > LONG_LEASE.total_seconds():
        return look(
            f"{text}; worker {longest.worker_id} ({longest.name}) has a lease of {span(longest.lease)}",
            "If it dies, its tasks wait that long before they run elsewhere. Default: fairq work --lease 60.",
        )
    return ok(text)


def judge_kinds(found: Sequence[queries.CheckKindsRow]) -> Finding:
    if not found:
        return ok("every kind that workers gave back has a worker")
    names = _names([f"{each.kind} ({each.queue})" for each in found])
    tasks = count(sum(each.tasks for each in found), "task is", "tasks are")
    remedy = (
        "They wait for a worker that knows their kind, and use no attempts. Does a worker run an older"
        " version, or another app on this queue? Start the right one, or give each app its own queues."
    )
    return wrong(f"{tasks} of a kind that no live worker knows: {names}", remedy)


def _names(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def judge_waiting(stand: Sequence[queries.CheckQueuesRow], max_wait: timedelta | None) -> Finding:
    waits = [
        (each.now - each.oldest_waiting_since, each.queue)
        for each in stand
        if each.oldest_waiting_since is not None and not each.paused
    ]
    if not waits:
        return ok("no task waits")
    longest, queue = max(waits)
    text = f'the oldest task has waited for {span(longest)}, in queue "{queue}"'
    if longest <= (max_wait or LONG_WAIT):
        return ok(text)
    remedy = (
        "fairq groups --queue NAME shows whose it is, fairq explain ID why. Tenants with a large backlog, a "
        "cap or a rate wait, which may be intended. More slots help everybody."
    )
    return look(text, remedy) if max_wait is None else wrong(f"{text}, longer than {span(max_wait)}", remedy)


def judge_fairness(found: Sequence[queries.CheckFairnessRow]) -> Finding:
    """`found` has the largest debt first."""
    if not found:
        return ok("no group waited all the time")
    worst, debt = found[0], found[0].worst_debt or 0.0
    if debt <= 1:
        return ok(f"the largest debt is {debt:.2f} of its bound")
    return wrong(
        f'the bound is broken: in queue "{worst.queue}" the debt of group "{worst.worst_group}" is '
        f"{debt:.1f} times its bound",
        f"This is a bug in fairq. Please report it, with fairq shares --queue {worst.queue} --json. "
        f"fairq rebuild {worst.queue} rebuilds the order and loses no task.",
    )


_BY_THE_WAY = "Workers do this themselves. Without workers: fairq maintain --every 5s, or pg_cron."


def judge_maintenance(
    row: queries.CheckMaintenanceRow, failures: Sequence[queries.CheckUpkeepRow]
) -> Finding:
    """No table records when the upkeep ran, so what is long overdue shows that nobody runs it.

    But failures of its parts are recorded. Then somebody runs it, and these failures left the rest undone.
    """
    found = (
        (row.lost, count(row.lost, "lost worker")),
        (row.expired, count(row.expired, "expired task")),
        (row.overdue, count(row.overdue, "overdue scheduled task")),
    )
    left = ", ".join(text for amount, text in found if amount)
    if failures:
        texts = [f"{each.part} has failed since {plain(each.since)}: {each.message}" for each in failures]
        if len(texts) > 3:
            texts[3:] = [f"and {len(texts) - 3} more"]
        part = failures[0].part.replace("'", "''")
        return wrong(
            "; ".join(texts) + (f". Not done: {left}" if left else ""),
            "Fix what the message says; the other parts go on meanwhile. To try again: "
            f"select fairq.maintain(p_part => '{part}');",
        )
    if left:
        return wrong(f"nobody seems to run the upkeep: {left}", _BY_THE_WAY)
    if row.moving_from is not None:
        text = f"not all groups have moved from {count(row.moving_from, 'shard')} to {row.shard_count}"
        return look(text, f"If nobody is moving them: fairq cluster set --shard-count {row.shard_count}")
    return ok("nothing is overdue")


def judge_schedules(row: queries.CheckSchedulesRow) -> Finding:
    if row.late:
        late = count(row.late, "schedule")
        return wrong(f"{late} late, by up to {span(row.behind)}: nobody fires them", _BY_THE_WAY)
    if row.unplanned:
        text = f"{count(row.unplanned, 'schedule')} by cron not planned: nobody reads cron expressions"
        return wrong(text, "Workers do. SQL alone cannot: without workers, run fairq maintain once a day.")
    if row.problems:
        more = f"; and {row.problems - 1} more" if row.problems > 1 else ""
        return look(f"{row.problem}{more}", "fairq schedules shows them, fairq schedules set changes them.")
    return ok(f"{count(row.schedules, 'schedule')}, none late")


def judge_history(has_tomorrow: bool) -> Finding:
    """The partitions of days are dropped whole. Without one, history is removed row by row."""
    if has_tomorrow:
        return ok("the coming days have their partitions")
    remedy = "Workers and fairq maintain make them for a week ahead: neither has run in the last week."
    return look("there is no partition for tomorrow", remedy)


# --- The rest of the server ------------------------------------------------------------------------


def judge_horizon(found: Sequence[queries.CheckHorizonRow]) -> Finding:
    held = [each for each in found if _holds(each)]
    if not held:
        return ok("nothing keeps PostgreSQL from removing dead rows")
    worst, handle = held[0], held[0].handle
    since = span(worst.held_for) if worst.held_for else f"{worst.age:,} transactions"
    more = f"; and {len(held) - 1} more" if len(held) > 1 else ""
    text = f"{worst.who} has held the xmin horizon for {since}{more}: dead rows pile up in every table"
    remedy = {
        "session": f"Let it end, or: select pg_terminate_backend({handle});",
        "prepared": f"End it: commit prepared {handle}; or: rollback prepared {handle};",
        # Ended by hand, it might end differently on the other nodes.
        "citus": f"Leave it to Citus. When the node of group {handle} in pg_dist_node is back, run there: "
        "select recover_prepared_transactions();",
        "slot": "Is that replica slow, or does it run a long report with hot_standby_feedback on?",
        "idle slot": f"Nobody reads it. If it is not needed: select pg_drop_replication_slot({handle});",
    }[worst.kind]
    forgotten = worst.kind in ("prepared", "citus", "idle slot")
    return Finding("wrong" if forgotten else "look", text, remedy)


def _holds(row: queries.CheckHorizonRow) -> bool:
    if row.held_for is not None:
        return row.held_for > LONG_TRANSACTION
    return (row.age or 0) > HELD_TRANSACTIONS


def _judge_notices(row: queries.CheckSessionRow, dsn: str) -> Finding:
    if row.standby:
        return Finding("unknown", "a standby accepts neither LISTEN nor NOTIFY", "Check the primary.")
    try:
        return judge_listen(_hears(dsn))
    except psycopg.errors.ProgramLimitExceeded as exc:
        text = f"NOTIFY fails, and with it enqueueing in queues that announce new tasks: {_why(exc)}"
        return wrong(text, "See connections below. Until then: fairq queues set NAME --no-notify")


def _hears(dsn: str) -> bool:
    """Whether a notification arrives on a connection like those of workers."""
    channel = f"fairq_doctor_{secrets.token_hex(8)}"
    with contextlib.closing(connect(dsn)) as listener, contextlib.closing(connect(dsn)) as speaker:
        listener.execute(psycopg.sql.SQL("listen {}").format(psycopg.sql.Identifier(channel)))
        speaker.execute("select pg_notify(%s, 'hello')", (channel,))
        # Others may be for whoever had the same session of a pooler a moment ago.
        heard = any(each.channel == channel for each in listener.notifies(timeout=LISTEN_SECONDS))
        # A pooler mostly hands out the session that was used last.
        for _ in range(1 if heard else 20):
            listener.execute(psycopg.sql.SQL("unlisten {}").format(psycopg.sql.Identifier(channel)))
        return heard


def judge_listen(heard: bool) -> Finding:
    if heard:
        return ok("notifications arrive")
    return look(
        "LISTEN is accepted, but no notification arrives: a pooler in transaction mode is in between",
        "Workers then poll, and start tasks later. Give them a direct connection to listen on: fairq work "
        "--listen-dsn.",
    )


def judge_connections(row: queries.CheckConnectionsRow) -> Finding:
    if row.queue > 0.5:
        remedy = "A listening session stays in a transaction: find it in pg_stat_activity, and end it."
        if row.idler:
            remedy += f" The longest idle one: select pg_terminate_backend({row.idler});"
        return wrong(f"the server's notification queue is {row.queue:.0%} full", remedy)
    text = f"{row.used} of {row.most} in use"
    if row.used > 0.9 * row.most:
        remedy = "Put a pooler in front (docs: fairq works behind PgBouncer), or raise max_connections."
        return look(text, remedy)
    return ok(text)


def judge_dead_rows(found: Sequence[queries.CheckDeadRowsRow]) -> Finding:
    worst = found[0] if found else None
    if worst is None or not worst.dead:
        return ok("none")
    if worst.dead <= DEAD_ROWS or worst.dead <= 10 * worst.live:
        return ok(f"at most {worst.dead:,} in a table, in {worst.name}")
    when = f"vacuumed {plain(worst.last_autovacuum)}" if worst.last_autovacuum else "never vacuumed"
    return look(
        f"{worst.dead:,} in {worst.name}, beside {worst.live:,} live ones; {when}",
        f"The queue stays fast, but the disk fills up. See horizon above; then: vacuum fairq.{worst.name};",
    )
