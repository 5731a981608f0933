"""What a page reads does not grow with groups and backlog, counted in rows that scans fetched."""

import os
import time

import psycopg
import pytest

from fairq.web import pages
from tests.support.calls import column, one, run
from tests.support.database import Database
from tests.web.asking import client

pytestmark = pytest.mark.new_database

GROUPS = int(os.environ.get("FAIRQ_TEST_ROWS", "20000")) // 10
BOUNDED = ("/queues", "/task?id=12", "/failures", "/workers")
# The ledger looks at up to 5,000 lanes, and counts what a group has waiting up to a million.
OF_THE_LEDGER = ("/", "/?time=1+h", "/?behind=", "/group?queue=default&group=bob")
LOOKS = 6


def fill(conn: psycopg.Connection[object], groups: int) -> None:
    """So many groups with a task each, and Bob with as many tasks as all of them."""
    run(
        conn,
        "select count(*) from fairq.create_tasks((select array_agg(g) from (select 'tenant ' || n from"
        " generate_series(1, %s) n union all select 'bob' from generate_series(1, %s)) x(g)),"
        " array_fill('{}'::jsonb, array[%s]))",
        groups,
        groups,
        2 * groups,
    )
    run(conn, "select fairq.promote_overflow('default', 10)")
    run(conn, "vacuum analyze")


def serve(conn: psycopg.Connection[object]) -> None:
    """Some ended, some failed, and some running."""
    worker = one(conn, "select fairq.register_worker('w', array['default'], 50)")
    for _ in range(4):
        ids = column(conn, "select id from fairq.pop_tasks('default', 50, %s)", worker)
        outcomes = ["failed", "succeeded"] * (len(ids) // 2)
        run(conn, "select fairq.finish_tasks(%s, %s, array_fill(1, array[50]), %s)", worker, ids, outcomes)
    run(conn, "select fairq.pop_tasks('default', 50, %s)", worker)


def fetched(conn: psycopg.Connection[object]) -> int:
    """Rows and index entries of the engine's tables that ended sessions fetched; they report at their end."""
    while one(conn, "select count(*) from pg_stat_activity where application_name = 'fairq'"):
        time.sleep(0.01)
    run(conn, "select pg_stat_force_next_flush()")  # what this session has done itself
    run(conn, "select pg_stat_clear_snapshot()")
    return int(
        one(
            conn,
            "select sum(coalesce(idx_tup_fetch, 0) + seq_tup_read) from pg_stat_all_tables"
            " where schemaname = 'fairq'",
        )
    )


def costs(conn: psycopg.Connection[object], database: Database) -> dict[str, int]:
    found = {}
    for path in (*BOUNDED, *OF_THE_LEDGER):
        before = fetched(conn)
        assert client(database).get(path).status_code == 200
        found[path] = fetched(conn) - before
    return found


def test_a_page_reads_as_much_of_ten_times_as_many_groups(
    conn: psycopg.Connection[object], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small that both sizes reach them.
    monkeypatch.setattr(pages, "FEW", 51)
    monkeypatch.setattr(pages, "MANY", 101)
    run(conn, "select fairq.configure_queue('default', '{\"ready_target\": 20}')")
    fill(conn, GROUPS // 10)
    serve(conn)
    few = costs(conn, database)
    fill(conn, GROUPS)
    many = costs(conn, database)
    assert {path: (few[path], many[path]) for path in BOUNDED if many[path] > 1.5 * few[path] + 100} == {}
    grown = {path: (few[path], many[path]) for path in OF_THE_LEDGER}
    assert {path: each for path, each in grown.items() if each[1] > each[0] + LOOKS * GROUPS} == {}
