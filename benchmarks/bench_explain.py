"""The article's argument, rerun: what a pop visits in five designs, as backlog and groups grow.

Every statement is run under EXPLAIN (ANALYZE, BUFFERS, WAL) in a transaction that is rolled back; one group
holds half of the tasks. Rows visited are index entries and rows of sequential scans as PostgreSQL's
statistics count them, inside functions, too: unlike times they are the same on every machine. The plans are
kept as text; what fairq's functions run inside is shown where the server has auto_explain.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg

from benchmarks.harness import Scale, Session, clear, hear, timed

BASELINES = ("article",)
LIMIT = 100
WORKERS = 10
HOLD_SECONDS = 0.05

Conn = psycopg.Connection[Any]


# The first three choose from tasks in order of arrival; the row locks are taken on what was chosen.
TAKE = """
update bench_article.arrivals t
set state = 'running'
where t.id in (
  select c.id
  from bench_article.arrivals c
  where c.id in (select n.id from next n)
    and c.state = 'queued'
  for update skip locked
)
returning t.id, t.group_no"""

FIFO = """
with next as materialized (
  select q.ctid
  from bench_article.arrivals q
  where q.state = 'queued'
  order by q.id
  limit {limit}
  for update skip locked
)
update bench_article.arrivals t
set state = 'running'
where t.ctid = any(array(select n.ctid from next n))
returning t.id, t.group_no"""

WINDOW = """
with turn as (
  select q.id, row_number() over (partition by q.group_no order by q.id) as nth
  from bench_article.arrivals q
  where q.state = 'queued'
), next as materialized (
  select u.id
  from turn u
  order by u.nth, u.id
  limit {limit}
){take}"""

LATERAL = """
with next as materialized (
  select f.id
  from bench_article.groups g
  cross join lateral (
    select h.id, row_number() over (order by h.id) as nth
    from (
      select q.id
      from bench_article.arrivals q
      where q.group_no = g.group_no
        and q.state = 'queued'
      order by q.id
      limit {limit}
    ) h
  ) f
  order by f.nth, f.id
  limit {limit}
){take}"""

BLOCK = "select p.id, p.group_no from bench_article.pop_tasks({limit}) p"
POP = "select p.id, p.group_key from fairq.pop_tasks('default', {limit}, {worker}) p"
PROMOTE = "select fairq.promote_overflow('default')"

ARTICLE_WAYS = {"fifo": FIFO, "window": WINDOW, "lateral": LATERAL, "block id": BLOCK}


def estimate(scale: Scale) -> float:
    """Seconds on a small machine: filling, and window functions over everything."""
    return 2.0 + sum(
        len(scale.groups) * tasks * (6 + 3 * scale.repetitions) * 4e-6 for tasks in scale.waiting
    )


def run(session: Session) -> None:
    sizes = [
        (tasks, groups)
        for tasks in session.scale.waiting
        for groups in session.scale.groups
        if 2 * groups <= tasks
    ]
    for number, (tasks, groups) in enumerate(sizes):
        session.say(f"{tasks:,} tasks of {groups:,} groups")
        with session.connect() as conn:
            limit = min(LIMIT, tasks // 20)
            fill_article(conn, tasks, groups)
            for _ in session.repetitions():
                for subject, query in ARTICLE_WAYS.items():
                    measure(session, conn, subject, query.format(limit=limit, take=TAKE), tasks, groups)
            worker_id = fill_fairq(conn, tasks, groups)
            pop = POP.format(limit=limit, worker=worker_id)
            for _ in session.repetitions():
                measure(session, conn, "fairq pop", pop, tasks, groups)
            half_empty(conn, worker_id)
            for _ in session.repetitions():
                measure(session, conn, "fairq promote", PROMOTE, tasks, groups)
            if number == 0:
                at_once(session, conn, tasks, groups, limit)


# --- What waits ------------------------------------------------------------------------------------


def fill_article(conn: Conn, tasks: int, groups: int) -> None:
    """Group 1 comes first with half of the tasks, so its blocks go on long after the others'."""
    clear(conn)
    conn.execute(
        "insert into bench_article.groups (group_key, last_block)"
        " select 'group ' || i, 0 from generate_series(1, %s::int) i",
        (groups,),
    )
    numbers = {"half": tasks // 2, "others": groups - 1, "last": tasks - 1}
    conn.execute(
        "insert into bench_article.arrivals (group_no, payload)"
        " select case when i < %(half)s then 1 else 2 + (i - %(half)s) %% %(others)s end, '{}'"
        " from generate_series(0, %(last)s::int) i order by i",
        numbers,
    )
    conn.execute(
        "insert into bench_article.tasks (id, group_no, payload)"
        " select (row_number() over (partition by a.group_no order by a.id) - 1) * 1048576 + a.group_no,"
        " a.group_no, a.payload from bench_article.arrivals a",
    )
    conn.execute(
        "update bench_article.groups g set last_block = s.last from ("
        "select t.group_no, max(t.id) / 1048576 as last from bench_article.tasks t group by t.group_no"
        ") s where s.group_no = g.group_no"
    )
    conn.execute("vacuum analyze bench_article.tasks, bench_article.arrivals, bench_article.groups")


def fill_fairq(conn: Conn, tasks: int, groups: int) -> int:
    """The same tasks, enqueued in fairq; all are overflow until somebody promotes."""
    clear(conn)
    for start in range(0, tasks, 50_000):
        conn.execute(
            "select count(*) from fairq.create_tasks(array("
            " select 'group ' || case when i < %(half)s then 1 else 2 + (i - %(half)s) %% %(others)s end"
            " from generate_series(%(first)s::int, %(last)s::int) i order by i),"
            " array_fill('{}'::jsonb, array[%(last)s::int - %(first)s::int + 1]))",
            {
                "half": tasks // 2,
                "others": groups - 1,
                "first": start,
                "last": min(start + 50_000, tasks) - 1,
            },
        )
    conn.execute("vacuum analyze fairq.tasks, fairq.ready, fairq.held, fairq.rings, fairq.lanes, fairq.ticks")
    # Hear all rings first, because this measures a pop that finds none.
    hear(conn)
    return register(conn)


def register(conn: Conn) -> int:
    row = conn.execute("select fairq.register_worker('bench', '{default}', 100, '1 hour')").fetchone()
    assert row is not None
    return int(row[0])


def half_empty(conn: Conn, worker_id: int) -> None:
    """Pop until a promotion would have to fill up the ready set, without promoting."""
    conn.execute(
        "with next as ("
        " select r.ctid from fairq.ready r order by r.block, r.position"
        " limit (select count(*) * 3 / 4 from fairq.ready)"
        "), popped as ("
        " delete from fairq.ready r where r.ctid = any(array(select n.ctid from next n)) returning r.*)"
        " insert into fairq.held"
        " (shard_no, attempt, id, worker_id, started_at, meters, counted, user_counted, keyed)"
        " select p.shard_no, 1, p.id, %s, clock_timestamp(), 0, p.counted, p.user_counted, false"
        " from popped p",
        (worker_id,),
    )


# --- What one call visits --------------------------------------------------------------------------

VISITED = """
select coalesce(sum(case when c.relkind = 'i' then pg_stat_get_xact_tuples_returned(c.oid) end), 0)::bigint,
  coalesce(sum(case when c.relkind = 'r' then pg_stat_get_xact_tuples_returned(c.oid) end), 0)::bigint
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.nspname in ('fairq', 'bench_article')
  and c.relkind in ('i', 'r')"""


def measure(session: Session, conn: Conn, subject: str, statement: str, tasks: int, groups: int) -> None:
    """The time, then the plan with its counts; everything is rolled back."""
    scenario = {"tasks": tasks, "groups": groups}
    with rolled_back(conn):
        seconds = timed(partial(conn.execute, statement.encode()))
    with rolled_back(conn):
        before = visited(conn)
        row = conn.execute(f"explain (analyze, buffers, wal, format json) {statement}".encode()).fetchone()
        assert row is not None
        rows = visited(conn) - before
    top = row[0][0]["Plan"]
    session.record(subject, "time", seconds * 1000, "ms", **scenario)
    session.record(subject, "rows visited", rows, "rows", **scenario)
    session.record(
        subject, "buffers", top["Shared Hit Blocks"] + top["Shared Read Blocks"], "buffers", **scenario
    )
    session.record(subject, "WAL", top["WAL Bytes"] / 1024, "kB", **scenario)
    if session.repetition == 0 and session.plans:
        name = f"{subject.replace(' ', '-')}-{tasks}-tasks-{groups}-groups"
        session.plan(name, plan_text(conn, statement))


def visited(conn: Conn) -> int:
    row = conn.execute(VISITED).fetchone()
    assert row is not None
    return int(row[0]) + int(row[1])


def plan_text(conn: Conn, statement: str) -> str:
    """The plan, followed by those of the statements inside functions, if the server can show them."""
    with rolled_back(conn):
        lines = [row[0] for row in conn.execute(f"explain (analyze, buffers, wal) {statement}".encode())]
    inside = nested_plans(conn, statement) if "fairq." in statement or "pop_tasks(" in statement else []
    parts = [statement.strip(), "\n".join(lines), *inside]
    return "\n\n".join(parts) + "\n"


def nested_plans(conn: Conn, statement: str) -> list[str]:
    heard: list[str] = []

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        heard.append(notice.message_primary or "")

    try:
        conn.execute("load 'auto_explain'")
    except psycopg.Error:
        return ["(This server has no auto_explain: what the function runs inside is not shown.)"]
    conn.add_notice_handler(hear)
    try:
        with rolled_back(conn):
            for name, value in (
                ("log_min_duration", "0"),
                ("log_nested_statements", "on"),
                ("log_analyze", "on"),
                ("log_buffers", "on"),
                ("log_wal", "on"),
                ("log_level", "notice"),
            ):
                conn.execute(f"set local auto_explain.{name} = '{value}'".encode())
            conn.execute(statement.encode())
    finally:
        conn.remove_notice_handler(hear)
    # Innermost first, as they end. One-row look-ups of settings are left out, because they do not grow.
    return [text for text in heard if "Scan" in text and "Query Text: set local" not in text]


@contextlib.contextmanager
def rolled_back(conn: Conn) -> Iterator[None]:
    with conn.transaction(force_rollback=True):
        yield


# --- Ten at once -----------------------------------------------------------------------------------


def at_once(session: Session, conn: Conn, tasks: int, groups: int, limit: int) -> None:
    """Ten workers pop at the same moment and commit 50 ms later. Measures what each gets."""
    for _ in session.repetitions():
        fill_article(conn, tasks, groups)
        for subject, query in ARTICLE_WAYS.items():
            got = pops(session.dsn, [query.format(limit=limit, take=TAKE)] * WORKERS)
            report(session, subject, got, limit, tasks, groups)
            conn.execute("update bench_article.arrivals set state = 'queued' where state <> 'queued'")
        fill_fairq(conn, tasks, groups)
        workers = [register(conn) for _ in range(WORKERS)]
        got = pops(session.dsn, [POP.format(limit=limit, worker=worker) for worker in workers])
        report(session, "fairq pop", got, limit, tasks, groups)


def pops(dsn: str, statements: list[str]) -> list[tuple[float, list[tuple[Any, ...]]]]:
    """Seconds and rows of each worker."""
    start = threading.Barrier(len(statements))
    found: list[tuple[float, list[tuple[Any, ...]]]] = []

    def pop(statement: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("select 1")
            conn.commit()
            start.wait()
            begun = time.perf_counter()
            rows = conn.execute(statement.encode()).fetchall()
            seconds = time.perf_counter() - begun
            time.sleep(HOLD_SECONDS)
            conn.commit()
            found.append((seconds, rows))

    threads = [threading.Thread(target=pop, args=(statement,)) for statement in statements]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < len(statements):
        raise RuntimeError("a pop failed")
    return found


def report(
    session: Session,
    subject: str,
    got: list[tuple[float, list[tuple[Any, ...]]]],
    limit: int,
    tasks: int,
    groups: int,
) -> None:
    scenario = {"workers": WORKERS, "limit": limit, "tasks": tasks, "groups": groups}
    counts = [len(rows) for _, rows in got]
    ids = [row[0] for _, rows in got for row in rows]
    session.record(subject, "got by ten workers", len(ids), "tasks", **scenario)
    session.record(subject, "got by the worker with least", min(counts), "tasks", **scenario)
    session.record(subject, "got by more than one", len(ids) - len(set(ids)), "tasks", **scenario)
    session.record(
        subject, "groups among them", len({row[1] for _, rows in got for row in rows}), "groups", **scenario
    )
    session.record(subject, "slowest of ten", max(seconds for seconds, _ in got) * 1000, "ms", **scenario)
