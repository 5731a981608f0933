"""One pop of 100 with many tasks waiting, over few and many groups, beside the article's four queries.

Rows and buffers are counted by EXPLAIN (ANALYZE, BUFFERS), so they are the same on every machine.
"""

import json
from typing import Any

import psycopg

from benchmarks.harness import Session, clear, timed

BASELINES = ("article",)

QUERIES = {
    "article: fifo": """
        select t.id from bench_article.tasks t where t.state = 'queued'
        order by t.id limit 100 for update skip locked""",
    "article: window": """
        with turn as (
          select t.id, row_number() over (partition by t.group_no order by t.id) as nth
          from bench_article.tasks t where t.state = 'queued'
        ), next as (select turn.id from turn order by turn.nth, turn.id limit 100)
        select t.id from bench_article.tasks t
        where t.id in (select next.id from next) for update skip locked""",
    "article: lateral": """
        select n.id from bench_article.groups g
        cross join lateral (
          select t.id, row_number() over () as nth from (
            select q.id from bench_article.tasks q
            where q.group_no = g.group_no and q.state = 'queued' order by q.id limit 100
          ) t
        ) n order by n.nth, n.id limit 100""",
    "article: block id": "select p.id from bench_article.pop_tasks(100) p",
}


def run(session: Session) -> None:
    tasks = session.scale.tasks
    for _ in session.repetitions():
        for groups in (10, 1_000, 100_000):
            if groups > tasks:
                continue
            with session.connect() as conn:
                fill_article(conn, tasks, groups)
                for subject, statement in QUERIES.items():
                    explain(session, conn, subject, statement, tasks, groups)
                worker_id = fill_fairq(conn, tasks, groups)
                pop = f"select p.id from fairq.pop_tasks('default', 100, {worker_id:d}) p"  # noqa: S608  # a number
                conn.execute(pop.encode())  # the first one rebuilds and promotes
                explain(session, conn, "fairq", pop, tasks, groups)


def fill_article(conn: psycopg.Connection[Any], tasks: int, groups: int) -> None:
    clear(conn)
    conn.execute(
        "insert into bench_article.groups (group_key, last_block)"
        " select 'group ' || i, %s from generate_series(1, %s::int) i",
        (tasks // groups, groups),
    )
    conn.execute(
        "insert into bench_article.tasks (id, group_no, payload)"
        " select (i / %s)::bigint * 1048576 + i %% %s + 1, i %% %s + 1, '{}'"
        " from generate_series(0, %s::int) i",
        (groups, groups, groups, tasks - 1),
    )
    conn.execute("vacuum analyze bench_article.tasks, bench_article.groups")


def fill_fairq(conn: psycopg.Connection[Any], tasks: int, groups: int) -> int:
    clear(conn)
    for start in range(0, tasks, 50_000):
        conn.execute(
            "select count(*) from fairq.create_tasks("
            " array(select 'group ' || i %% %s::int from generate_series(%s::int, %s::int) i),"
            " array_fill('{}'::jsonb, array[%s::int]))",
            (groups, start, min(start + 50_000, tasks) - 1, min(50_000, tasks - start)),
        )
    conn.execute("vacuum analyze fairq.tasks, fairq.rings, fairq.lanes, fairq.ticks")
    row = conn.execute("select fairq.register_worker('bench', '{default}', 100, '1 hour')").fetchone()
    assert row is not None
    return int(row[0])


def explain(
    session: Session, conn: psycopg.Connection[Any], subject: str, statement: str, tasks: int, groups: int
) -> None:
    row = conn.execute(f"explain (analyze, buffers, format json) {statement}".encode()).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    top = plan[0]["Plan"]
    buffers = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
    session.record(subject, "buffers of one pop", buffers, "buffers", tasks=tasks, groups=groups)
    session.record(subject, "time of one pop", plan[0]["Execution Time"], "ms", tasks=tasks, groups=groups)
    again = timed(lambda: conn.execute(statement.encode()).fetchall())
    session.record(subject, "time of the next pop", again * 1000, "ms", tasks=tasks, groups=groups)
