"""`fairq doctor`: is this installation well, and what to do where it is not.

Every check is two functions: one asks the database, the other judges what it said, apart from it. Each stands
alone, in a transaction of its own: one that fails itself is a finding like the others, and the others go on.
A check that the role has no right to make says so and is none of the wrong ones.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import click
import psycopg
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fairq import install
from fairq.cli import Exit, command, named_dsn
from fairq.commands.common import (
    Connection,
    clean,
    connect,
    count,
    duration,
    plain,
    rows,
    server_time,
    show,
    span,
)
from fairq.dsn import describe, mask, resolve
from fairq.embedded import OLDEST_MAJOR
from fairq.errors import FairqError

Verdict = Literal["ok", "look", "wrong", "unknown", "failed"]

LONG_WAIT = timedelta(hours=1)
LONG_TRANSACTION = timedelta(minutes=15)
DEAD_ROWS = 1_000_000
LISTEN_SECONDS = 2.0
SKEW_SECONDS = 2.0
CHECK_SECONDS = 20.0  # for all statements of a check, whatever the role's own timeout
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


def ok(text: str, remedy: str | None = None) -> Finding:
    return Finding("ok", text, remedy)


def look(text: str, remedy: str) -> Finding:
    return Finding("look", text, remedy)


def wrong(text: str, remedy: str | None) -> Finding:
    return Finding("wrong", text, remedy)


Row = dict[str, Any]


@command(
    codes={0: "nothing is wrong", 1: "something is, or a check failed", 3: "database cannot be reached"},
    rights="any; fairq_observe sees more, fairq_work and pg_monitor see all",
)
@click.option(
    "--max-wait",
    type=duration,
    metavar="TIME",
    help="A task that has waited longer than this is wrong. Default: over an hour deserves a look.",
)
def doctor(max_wait: timedelta | None) -> None:
    """Check the installation, and say what to do.

    It reads, and sends itself one notification; it changes nothing. Each check ends as ok, look (worth your
    attention), wrong, unknown (this role may not look), or failed (the check itself; the others go on).

    \b
    fairq doctor
    fairq doctor --max-wait 10m              a task may not wait any longer
    fairq doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    where = resolve(named_dsn())
    found = [*examine(where, max_wait)]
    is_well = not any(each.verdict in ("wrong", "failed") for each in found)
    show({"database": describe(where), "ok": is_well, "findings": found}, _render(found), Text(), _sum(found))
    if not is_well:
        raise click.exceptions.Exit(Exit.NO)


_STYLES: dict[Verdict, str] = {
    "ok": "green",
    "look": "yellow",
    "wrong": "bold red",
    "unknown": "dim",
    "failed": "bold red",
}


def _render(found: list[Finding]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for each in found:
        text = Text(clean(each.text))
        if each.remedy:
            text.append(f"\n{each.remedy}", "dim" if each.verdict in ("ok", "unknown") else "")
        grid.add_row(Text(each.verdict, _STYLES[each.verdict]), Text(each.check), text)
    return grid


def _sum(found: list[Finding]) -> str:
    wrong, failed, look = (
        sum(each.verdict == verdict for each in found) for verdict in ("wrong", "failed", "look")
    )
    bad = [
        *([f"{count(wrong, 'thing is', 'things are')} wrong"] if wrong else []),
        *([f"{count(failed, 'check')} failed"] if failed else []),
    ]
    if bad:
        return f"{', '.join(bad)}."
    deserves = count(look, "thing deserves", "things deserve")
    return f"Nothing is wrong; {deserves} a look." if look else "All is well."


# --- The round -------------------------------------------------------------------------------------


def examine(dsn: str, max_wait: timedelta | None) -> Iterator[Finding]:
    """All checks, in the order in which their answers make sense."""

    answers: dict[str, list[Row]] = {}  # two checks count what waits, and that reads every live task

    def answer(conn: Connection, query: str) -> list[Row]:
        if query not in answers:
            answers[query] = rows(conn, query)
        return answers[query]

    def asks(judge: Callable[..., Finding], *queries: str, **parameters: Any) -> Callable[..., Finding]:
        return lambda conn: judge(*(answer(conn, query) for query in queries), **parameters)

    checks: dict[str, Callable[[Connection], Finding]] = {
        "connection": lambda conn: judge_connection(rows(conn, CONNECTION)[0], dsn, conn.info.backend_pid),
        "server": asks(judge_server, SERVER),
        "clock": lambda conn: judge_clock(datetime.now(UTC), server_time(conn), datetime.now(UTC)),
        "timeouts": asks(judge_timeouts, TIMEOUTS),
        "schema": judge_schema,
        "rights": asks(judge_rights, RIGHTS),
        "workers": asks(judge_workers, QUEUES, WORKERS),
        "kinds": asks(judge_kinds, KINDS),
        "waiting": asks(judge_waiting, QUEUES, max_wait=max_wait),
        "fairness": asks(judge_fairness, FAIRNESS),
        "maintenance": asks(judge_maintenance, MAINTENANCE, FAILURES),
        "schedules": asks(judge_schedules, SCHEDULES),
        "history": asks(judge_history, HISTORY),
        "horizon": asks(judge_horizon, HORIZON),
        "listen": lambda conn: _judge_notices(rows(conn, CONNECTION)[0]["standby"], dsn),
        "connections": asks(judge_connections, CONNECTIONS),
        "dead rows": asks(judge_dead_rows, DEAD),
    }
    of_fairq = {
        "rights",
        "workers",
        "kinds",
        "waiting",
        "fairness",
        "maintenance",
        "schedules",
        "history",
        "dead rows",
    }
    conn = connect(dsn)
    try:
        is_there = True
        with contextlib.suppress(psycopg.Error):
            is_there = rows(conn, IS_THERE)[0]["yes"]
        for name, check in checks.items():
            if is_there or name not in of_fairq:
                if conn.closed:
                    with contextlib.suppress(psycopg.Error):
                        conn = connect(dsn)
                yield replace(_alone(conn, check), check=name)
    finally:
        conn.close()


# Where the role may not even look into the schema, one finding says so.
IS_THERE = """
select coalesce(has_schema_privilege(to_regnamespace('fairq')::oid, 'usage'), false) as yes
"""


def _alone(conn: Connection, check: Callable[[Connection], Finding]) -> Finding:
    """What a check finds; what it fails of is a finding, too."""
    try:
        with conn.transaction():
            # Local to the transaction, so it works behind a pooler, too.
            conn.execute(
                "select set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)",
                [f"{CHECK_SECONDS * 1000:.0f}ms", f"{LOCK_SECONDS * 1000:.0f}ms"],
            )
            return check(conn)
    except psycopg.errors.InsufficientPrivilege as exc:
        remedy = "Ask as a role that is granted fairq_observe, or fairq_work."
        return Finding("unknown", f"this role may not look: {_why(exc)}", remedy)
    except (
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.UndefinedFunction,
    ) as exc:
        return Finding("unknown", f"not in this schema: {_why(exc)}", "See schema above.")
    except psycopg.errors.QueryCanceled as exc:
        text = f"the check was stopped: {_why(exc)}"
        return Finding(
            "failed", text, f"It has {CHECK_SECONDS:.0f} s. Is the server busy, or the queue very long?"
        )
    except psycopg.errors.LockNotAvailable as exc:
        remedy = (
            "Who holds it: select pid, query from pg_stat_activity where state <> 'idle' order by xact_start;"
        )
        return Finding("failed", f"a lock was not to be had in {LOCK_SECONDS:.0f} s: {_why(exc)}", remedy)
    except Exception as exc:  # whatever it is: the next check may say why
        return Finding("failed", f"the check failed: {_why(exc)}", "See what the other checks say.")


def _why(exc: Exception) -> str:
    primary = exc.diag.message_primary if isinstance(exc, psycopg.Error) else None
    return mask(primary or f"{type(exc).__name__}: {' '.join(str(exc).split())}")


# --- Connection and server -------------------------------------------------------------------------

CONNECTION = """
select current_user as role, pg_backend_pid() as pid, pg_is_in_recovery() as standby,
  current_setting('default_transaction_isolation') as isolation,
  current_setting('default_transaction_read_only') as read_only
"""


def judge_connection(row: Row, dsn: str, pid: int) -> Finding:
    text = f"{describe(dsn)}, as {row['role']}"
    if row["standby"]:
        remedy = "Name the primary: several hosts and target_session_attrs=read-write find it by themselves."
        return wrong(f"{text}: a standby, nothing can be enqueued here", remedy)
    if row["read_only"] == "on":
        remedy = f"alter role {row['role']} reset default_transaction_read_only;"
        return wrong(f"{text}: transactions are read only by default", remedy)
    if row["isolation"] != "read committed":
        remedy = (
            "Enqueueing works in every isolation level. pop_tasks and promote_overflow refuse all but READ "
            "COMMITTED (QF005): consumers of your own must ask for it. fairq's workers do."
        )
        return look(f"{text}: the default isolation is {row['isolation']}", remedy)
    if row["pid"] != pid:
        return ok(f"{text}, through a pooler")
    return ok(text)


SERVER = """
select current_setting('server_version') as version, current_setting('server_version_num')::integer as number,
  current_setting('fsync') as fsync, current_setting('full_page_writes') as full_page_writes,
  current_setting('autovacuum') as autovacuum, current_setting('track_counts') as track_counts
"""

_MUST_BE_ON = {
    "fsync": "a crash may lose or damage everything",
    "full_page_writes": "a crash may lose or damage everything",
    "autovacuum": "dead rows are never removed",
    "track_counts": "dead rows are never removed",
}


def judge_server(found: list[Row]) -> Finding:
    (row,) = found
    text = f"PostgreSQL {row['version']}"
    if row["number"] // 10000 < OLDEST_MAJOR:
        return wrong(f"{text} is older than {OLDEST_MAJOR}", "Upgrade PostgreSQL.")
    for name, harm in _MUST_BE_ON.items():
        if row[name] == "off":
            remedy = f"alter system set {name} = on; select pg_reload_conf();"
            return wrong(f"{text} with {name} off: {harm}", remedy)
    return ok(text)


def judge_clock(before: datetime, at: datetime, after: datetime) -> Finding:
    """The server's time lies between two looks at ours, or the clocks differ."""
    skew = max(before - at, at - after, timedelta(0)).total_seconds()
    if skew <= SKEW_SECONDS:
        return ok("this machine and the server agree")
    side = "behind" if at > after else "ahead of"
    return look(
        f"this machine is {span(skew)} {side} the server",
        "Leases and due times go by the server's clock alone; a run_at that is computed here is off by that "
        "much. Synchronise both (chrony, systemd-timesyncd).",
    )


# Of this session before the round began, and of roles that work with fairq.
TIMEOUTS = """
select true as here, current_user::text as role, s.name, s.reset_val || coalesce(s.unit, '') as value
from pg_catalog.pg_settings s
where s.name in ('statement_timeout', 'transaction_timeout', 'idle_session_timeout')
union all
select false, r.rolname, split_part(c.setting, '=', 1), split_part(c.setting, '=', 2)
from pg_catalog.pg_db_role_setting d
join pg_catalog.pg_roles r on r.oid = d.setrole
cross join unnest(d.setconfig) c(setting)
where d.setdatabase in (0, (select b.oid from pg_catalog.pg_database b where b.datname = current_database()))
  and split_part(c.setting, '=', 1) in ('statement_timeout', 'transaction_timeout', 'idle_session_timeout')
  and r.rolname <> current_user
  and exists (
    select from pg_catalog.pg_roles f
    where f.rolname in ('fairq_enqueue', 'fairq_work', 'fairq_admin') and pg_has_role(r.oid, f.oid, 'member')
  )
order by 1 desc, 2, 3
"""
_MILLISECONDS = {"us": 0.001, "": 1, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def judge_timeouts(found: list[Row]) -> Finding:
    """A turn or a round of upkeep that is stopped is made again, and stopped again."""
    short, remedy = [], ""
    for row in found:
        number, unit = re.fullmatch(r"(-?[\d.]+)\s*([a-z]*)", row["value"]).groups()  # type: ignore[union-attr]
        length = timedelta(milliseconds=float(number) * _MILLISECONDS[unit])
        if (
            timedelta(0)
            < length
            < (SHORT_SESSION if row["name"] == "idle_session_timeout" else SHORT_TIMEOUT)
        ):
            who = "this session" if row["here"] else f"role {row['role']}"
            short.append((length, f"{who}: {row['name']} is {span(length)}"))
            remedy = remedy or f"alter role {row['role']} set {row['name']} = '1min';"
            if row["here"] and len(short) == 1:
                remedy += " Or it is in the connection string, in PGOPTIONS, or set for the database."
    if not short:
        return ok("long enough for turns and upkeep")
    text = "; ".join(each for _, each in short)
    if any(length < timedelta(seconds=1) for length, _ in short):
        return wrong(f"{text}: what takes longer is stopped, and made again in vain", remedy)
    return look(f"{text}: what takes longer is stopped", remedy)


def judge_schema(conn: Connection) -> Finding:
    try:
        version = install.check_version(conn)
    except FairqError as exc:
        return wrong(mask(str(exc)), exc.hint)
    except psycopg.errors.InsufficientPrivilege as exc:
        return wrong(f"this role may not look: {_why(exc)}", _GRANT)
    if version != install.head():
        text = f"{version}; this fairq brings {install.head()}, and works with both"
        return look(text, "fairq migrate")
    return ok(str(version))


_GRANT = "Let an operator grant it fairq_enqueue, fairq_work, fairq_observe or fairq_admin."
RIGHTS = """
select r.rolsuper as superuser, f.*, has_table_privilege('fairq.queue_stats', 'select') as observe
from pg_catalog.pg_roles r
cross join (
  select bool_or(p.proname = 'create_task' and c.may) as enqueue,
    bool_or(p.proname = 'pop_tasks' and c.may) as work,
    bool_or(p.proname = 'configure_queue' and c.may) as admin
  from pg_catalog.pg_proc p
  cross join lateral (select has_function_privilege(p.oid, 'execute') as may) c
  where p.pronamespace = to_regnamespace('fairq')
) f
where r.rolname = current_user
"""


def judge_rights(found: list[Row]) -> Finding:
    (row,) = found
    if row["superuser"]:
        return ok(
            "superuser: may do everything", "Applications and workers need less: fairq_enqueue, fairq_work."
        )
    able = [name for name in ("enqueue", "work", "observe", "admin") if row[name]]
    if not able:
        return wrong("this role may do nothing with fairq", _GRANT)
    return ok(f"may {', '.join(able)}")


# --- The queues ------------------------------------------------------------------------------------

QUEUES = """
select s.queue, s.overflow + s.queued as waiting, s.oldest_waiting_since, clock_timestamp() as now,
  q.paused_at is not null as paused
from fairq.queue_stats s
join fairq.queues q on q.queue = s.queue
order by s.queue
"""
WORKERS = """
select w.worker_id, w.name, w.queues, extract(epoch from w.lease)::double precision as lease,
  clock_timestamp() <= coalesce(w.beat_at, w.registered_at) + w.lease as alive,
  w.circuit_open, w.circuit_trips
from fairq.worker_stats w
order by w.worker_id
"""


def judge_workers(queues: list[Row], workers: list[Row]) -> Finding:
    living = [each for each in workers if each["alive"]]
    unserved = [
        each["queue"]
        for each in queues
        if each["waiting"] and not each["paused"] and not any(each["queue"] in w["queues"] for w in living)
    ]
    text = count(len(living), "worker alive", "workers alive")
    if unserved:
        text = f"{text}; tasks wait and nobody serves {_names(unserved)}"
        return wrong(text, "Start one: fairq work myapp.tasks --queue NAME")
    if not living:
        return look(f"{text}; nothing waits, either", "fairq work myapp.tasks")
    cut_off = [each for each in living if each["circuit_open"]]
    if cut_off:
        who = _names([f"{each['worker_id']} ({each['name']})" for each in cut_off])
        trips = sum(each["circuit_trips"] for each in cut_off)
        return look(
            f"{text}; the circuit breaker is open, {count(trips, 'time')} so far, of worker {who}",
            "It is alive, but its turns fail, and it rests for some seconds after each. Its log says why.",
        )
    longest = max(living, key=lambda each: each["lease"])
    if longest["lease"] > LONG_LEASE.total_seconds():
        who = f"worker {longest['worker_id']} ({longest['name']})"
        return look(
            f"{text}; {who} has a lease of {span(longest['lease'])}",
            "When it dies, its tasks run elsewhere after that only. 60 s is the default: fairq work --lease.",
        )
    return ok(text)


# Whoever met a task of a kind that he does not know gave it back, to wait for its next time.
KINDS = """
select t.queue, t.kind, count(*) as tasks
from fairq.tasks t
where t.scheduled and t.spared > 0
  and (
    select not bool_or(coalesce(w.kinds ? t.kind, true))
    from fairq.workers w
    where w.shard_no = t.shard_no and t.queue = any(w.queues) and w.lost_at is null
  )
group by t.queue, t.kind
order by t.queue, t.kind
"""


def judge_kinds(found: list[Row]) -> Finding:
    if not found:
        return ok("no worker gave back a kind that nobody knows")
    names = _names([f"{each['kind']} ({each['queue']})" for each in found])
    tasks = count(sum(each["tasks"] for each in found), "task is", "tasks are")
    remedy = (
        "They burn no attempt, and wait for a worker that knows them. Is it one of an older version, or of"
        " another app on this queue? Start the right one, or give each app queues of its own."
    )
    return wrong(f"{tasks} of a kind that no live worker knows: {names}", remedy)


def _names(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def judge_waiting(queues: list[Row], max_wait: timedelta | None) -> Finding:
    waits = [
        (each["now"] - each["oldest_waiting_since"], each["queue"])
        for each in queues
        if each["oldest_waiting_since"] is not None and not each["paused"]
    ]
    if not waits:
        return ok("no task waits")
    longest, queue = max(waits)
    text = f'the oldest waits for {span(longest)}, in queue "{queue}"'
    if longest <= (max_wait or LONG_WAIT):
        return ok(text)
    remedy = (
        "fairq groups --queue NAME shows whose it is, fairq explain ID why. A tenant with a large backlog "
        "waits, and so does one with a cap or a rate: that may be meant. More slots help everybody."
    )
    if max_wait is None:
        return look(text, remedy)
    return wrong(f"{text}, longer than {span(max_wait)}", remedy)


# Of queues in which somebody waited all the time: each stretch up to now, of ten minutes at most.
FAIRNESS = """
select q.queue, f.worst_debt, f.worst_group
from fairq.queues q
cross join lateral fairq.fairness(q.queue) f
where q.paused_at is null
  and exists (
    select from fairq.ledger_queues l
    where l.shard_no = any(array(select d.shard_no from fairq.domains d))
      and l.begins_at > clock_timestamp() - interval '3 minutes'
      and l.queue = q.queue and l.judged
  )
order by f.worst_debt desc nulls last
"""


def judge_fairness(found: list[Row]) -> Finding:
    broken = [each for each in found if (each["worst_debt"] or 0) > 1]
    if not broken:
        worst = max((each["worst_debt"] or 0.0 for each in found), default=None)
        text = (
            "nobody waited all the time" if worst is None else f"the largest debt is {worst:.2f} of its bound"
        )
        return ok(text)
    worst = broken[0]
    text = (
        f'the bound is broken: in queue "{worst["queue"]}" group "{worst["worst_group"]}" is behind by '
        f"{worst['worst_debt']:.1f} times what it may be"
    )
    remedy = (
        f"This is a fault of fairq: please report it, with fairq shares --queue {worst['queue']} --json. "
        f"fairq rebuild {worst['queue']} makes the order anew; no task is lost."
    )
    return wrong(text, remedy)


MAINTENANCE = """
select (select count(*) from fairq.worker_stats w
    where clock_timestamp() - coalesce(w.beat_at, w.registered_at) - w.lease > interval '1 minute') as lost,
  (select count(*) from (select 1 from fairq.tasks t
    where t.shard_no = any(array(select d.shard_no from fairq.domains d))
      and not exists (select from fairq.held h where h.shard_no = t.shard_no and h.id = t.id)
      and t.expires_at > t.created_at
      and t.expires_at < clock_timestamp() - interval '5 minutes' limit 1000) e) as expired,
  (select count(*) from (select 1 from fairq.tasks t
    where t.shard_no = any(array(select d.shard_no from fairq.domains d))
      and t.scheduled
      and t.run_at < clock_timestamp() - interval '5 minutes' limit 1000) s) as overdue,
  s.moving_from, s.shard_count
from fairq.settings s
"""


FAILURES = """
select f.part, min(f.failed_since) as since, min(f.message) as message
from fairq.upkeep_failures f
where f.part in (select fairq.upkeep_parts())
group by f.part
order by since, f.part
"""


def judge_maintenance(found: list[Row], failures: list[Row]) -> Finding:
    """Nothing notes when maintenance ran; what it would have done long ago shows that it does not.

    A part that fails is noted, though: then somebody does run it, and what is left lying is its doing.
    """
    (row,) = found
    left = [
        text
        for amount, text in (
            (row["lost"], f"{count(row['lost'], 'lost worker')} still on the list"),
            (row["expired"], f"{count(row['expired'], 'task')} past its deadline"),
            (row["overdue"], f"{count(row['overdue'], 'scheduled task')} overdue"),
        )
        if amount
    ]
    if failures:
        texts = [
            f"{each['part']}: fails since {plain(each['since'])}, {each['message']}" for each in failures
        ]
        if len(texts) > 3:
            texts[3:] = [f"and {len(texts) - 3} more"]
        text = "; ".join(texts) + (f". Left lying: {', '.join(left)}" if left else "")
        part = failures[0]["part"].replace("'", "''")
        remedy = (
            "Mend what the message names; the other parts go on meanwhile. To try it again: "
            f"select fairq.maintain(p_part => '{part}');"
        )
        return wrong(text, remedy)
    if not left and row["moving_from"] is not None:
        shards = row["shard_count"]
        text = f"groups have not all moved from {count(row['moving_from'], 'shard')} to {shards}"
        return look(text, f"If nobody is at it, go on: fairq cluster set --shard-count {shards}")
    if not left:
        return ok("nothing is left lying")
    remedy = "Workers do it by the way. Without workers: fairq maintain --every 5s, or pg_cron."
    return wrong(f"nobody seems to run it: {', '.join(left)}", remedy)


SCHEDULES = """
select count(*) as schedules,
  count(*) filter (where s.fire_at < clock_timestamp() - interval '1 minute') as late,
  max(clock_timestamp() - s.fire_at) as behind,
  count(*) filter (where s.fire_at is null and s.paused_at is null and s.problem is null
    and s.plan_at < clock_timestamp() - interval '1 minute') as unplanned,
  count(*) filter (where s.problem is not null) as problems,
  min(format('%s of %s: %s', s.name, s.group_key, s.problem)) filter (where s.problem is not null) as problem
from fairq.schedules s
"""


def judge_schedules(found: list[Row]) -> Finding:
    (row,) = found
    if row["late"]:
        text = f"{count(row['late'], 'schedule')} late, by up to {span(row['behind'])}: nobody fires them"
        return wrong(
            text, "Workers do it by the way. Without workers: fairq maintain --every 5s, or pg_cron."
        )
    if row["unplanned"]:
        text = f"{count(row['unplanned'], 'schedule')} by cron not planned: nobody reads cron expressions"
        return wrong(text, "Workers do it by the way. SQL alone cannot: let fairq maintain run once a day.")
    if row["problems"]:
        more = f"; and {row['problems'] - 1} more" if row["problems"] > 1 else ""
        return look(f"{row['problem']}{more}", "fairq schedules shows them, fairq schedules set mends them.")
    return ok(f"{count(row['schedules'], 'schedule')}, none late")


HISTORY = """
select to_regclass(format('fairq.finished_tasks_%s',
    to_char((clock_timestamp() at time zone 'UTC')::date + 1, 'YYYYMMDD'))) is not null as tomorrow
"""


def judge_history(found: list[Row]) -> Finding:
    """Days are dropped whole. What ends on a day without a partition of its own is removed row by row."""
    if found[0]["tomorrow"]:
        return ok("the coming days have their partitions")
    remedy = "fairq maintain makes a week of them, and so do workers: none has run yet, or not for a week."
    return look("there is no partition for tomorrow", remedy)


# --- What the rest of the server does to us --------------------------------------------------------

# What keeps dead rows from being removed. Of other roles' sessions only pg_monitor sees start and name.
HORIZON = """
select 'session' as kind,
  format('pid %s (%s%s)', a.pid, coalesce(nullif(a.application_name, ''), a.backend_type),
    coalesce(', user ' || a.usename, '')) as who,
  a.pid::text as handle,
  clock_timestamp() - a.xact_start as held_for, age(a.backend_xmin) as age
from pg_catalog.pg_stat_activity a
where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.backend_type <> 'autovacuum worker'
  and (a.datname is null or a.datname = current_database())
union all
select case when c.node is null then 'prepared' else 'citus' end,
  format('prepared transaction %s of %s', p.gid, p.owner), coalesce(c.node, quote_literal(p.gid)),
  clock_timestamp() - p.prepared, age(p.transaction)
from pg_catalog.pg_prepared_xacts p
cross join lateral (select substring(p.gid from '^citus_([0-9]+)_') as node) c
where p.database = current_database()
union all
select case when s.active then 'slot' else 'idle slot' end, format('replication slot %s', s.slot_name),
  quote_literal(s.slot_name), null,
  greatest(age(s.xmin), age(s.catalog_xmin))
from pg_catalog.pg_replication_slots s
where s.xmin is not null or s.catalog_xmin is not null
order by age desc
"""
HELD_TRANSACTIONS = 1_000_000


def judge_horizon(rows: list[Row]) -> Finding:
    held = [each for each in rows if _holds(each)]
    if not held:
        return ok("nothing keeps dead rows from being removed")
    worst = held[0]
    since = f" for {span(worst['held_for'])}" if worst["held_for"] else f" for {worst['age']:,} transactions"
    more = f"; and {len(held) - 1} more" if len(held) > 1 else ""
    text = f"{worst['who']} holds the xmin horizon{since}{more}: dead rows pile up in every table"
    handle = worst["handle"]
    remedy = {
        "session": f"Let it end, or: select pg_terminate_backend({handle});",
        "prepared": f"Decide it: commit prepared {handle}; or: rollback prepared {handle};",
        # By hand it might end otherwise than on the other nodes.
        "citus": f"Leave it to Citus. Is the node of group {handle} in pg_dist_node back? Then, there: "
        "select recover_prepared_transactions();",
        "slot": "Is that replica slow, or does it run a long report with hot_standby_feedback on?",
        "idle slot": f"Nobody reads it. If it is not needed: select pg_drop_replication_slot({handle});",
    }[worst["kind"]]
    forgotten = worst["kind"] in ("prepared", "citus", "idle slot")
    return Finding("wrong" if forgotten else "look", text, remedy)


def _holds(row: Row) -> bool:
    held_for: timedelta | None = row["held_for"]
    if held_for is not None:
        return held_for > LONG_TRANSACTION
    return bool((row["age"] or 0) > HELD_TRANSACTIONS)


def _hears(dsn: str) -> bool:
    """Whether a notification comes through on a connection like those of workers."""
    channel = f"fairq_doctor_{secrets.token_hex(8)}"
    with contextlib.closing(connect(dsn)) as listener, contextlib.closing(connect(dsn)) as speaker:
        listener.execute(psycopg.sql.SQL("listen {}").format(psycopg.sql.Identifier(channel)))
        speaker.execute("select pg_notify(%s, 'hello')", (channel,))
        heard = bool(list(listener.notifies(timeout=LISTEN_SECONDS, stop_after=1)))
        # A pooler hands out the session used last first, mostly.
        for _ in range(1 if heard else 20):
            listener.execute(psycopg.sql.SQL("unlisten {}").format(psycopg.sql.Identifier(channel)))
        return heard


def _judge_notices(is_standby: bool, dsn: str) -> Finding:
    if is_standby:
        return Finding("unknown", "a standby takes neither LISTEN nor NOTIFY", "Ask the primary.")
    try:
        return judge_listen(_hears(dsn))
    except psycopg.errors.ProgramLimitExceeded as exc:
        text = f"NOTIFY fails, and with it enqueueing into queues that announce new work: {_why(exc)}"
        return wrong(text, "See connections below. Until then: fairq queues set NAME --no-notify")


def judge_listen(heard: bool) -> Finding:
    if heard:
        return ok("notifications come through")
    return look(
        "LISTEN is accepted and silent: a pooler in transaction mode is in between",
        "Workers poll then, and start tasks later. Give them a direct connection for listening: fairq work "
        "--listen-dsn.",
    )


CONNECTIONS = """
select (select count(*) from pg_catalog.pg_stat_activity a where a.backend_type = 'client backend') as used,
  current_setting('max_connections')::integer as most, pg_notification_queue_usage() as queue,
  (select a.pid from pg_catalog.pg_stat_activity a
    where a.state like 'idle in transaction%' order by a.xact_start limit 1) as idler
"""


def judge_connections(found: list[Row]) -> Finding:
    (row,) = found
    text = f"{row['used']} of {row['most']} in use"
    if row["queue"] > 0.5:
        remedy = "A session that listens stays in a transaction: find it in pg_stat_activity, and end it."
        if row["idler"]:
            remedy += f" Longest idle in one: select pg_terminate_backend({row['idler']});"
        share = f"{row['queue']:.0%}"
        return wrong(f"the server's queue of notifications is {share} full", remedy)
    if row["used"] > 0.9 * row["most"]:
        remedy = "Put a pooler in front (docs: fairq works behind PgBouncer), or raise max_connections."
        return look(text, remedy)
    return ok(text)


DEAD = """
select s.relname as name, s.n_live_tup as live, s.n_dead_tup as dead, s.last_autovacuum
from pg_catalog.pg_stat_all_tables s
where s.schemaname = 'fairq'
order by s.n_dead_tup desc
"""


def judge_dead_rows(rows: list[Row]) -> Finding:
    if not rows:
        return ok("none")
    worst = rows[0]
    text = f"at most {worst['dead']:,} in a table, in {worst['name']}" if worst["dead"] else "none"
    if worst["dead"] <= DEAD_ROWS or worst["dead"] <= 10 * worst["live"]:
        return ok(text)
    when = f"vacuumed {plain(worst['last_autovacuum'])}" if worst["last_autovacuum"] else "never vacuumed"
    return look(
        f"{worst['dead']:,} in {worst['name']}, beside {worst['live']:,} living; {when}",
        "The queue stays fast all the same, the disk fills up. See horizon above; then: "
        f"vacuum fairq.{worst['name']};",
    )
