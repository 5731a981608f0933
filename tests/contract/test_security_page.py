"""docs/explanation/security.md says what each role holds today, no more and no less."""

import re
from typing import Any

import psycopg

from tests.support.processes import ROOT

INSERTS = """
select c.relname::text
from pg_catalog.pg_class c
where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
  and has_table_privilege('fairq_enqueue', c.oid, 'insert')
"""
WRITES = """
select c.relname::text
from pg_catalog.pg_class c
where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p')
  and (has_table_privilege(%s, c.oid, 'update') or has_table_privilege(%s, c.oid, 'delete'))
"""
COLUMNS = """
select c.relname::text || '.' || a.attname::text
from pg_catalog.pg_class c
join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
  and a.attname = any(%s) and has_column_privilege(%s, c.oid, a.attnum, 'select')
"""


def section(title: str) -> str:
    page = (ROOT / "docs" / "explanation" / "security.md").read_text("utf-8")
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names(conn: psycopg.Connection[Any], query: str, *parameters: object) -> set[str]:
    return {row[0] for row in conn.execute(query.encode(), parameters or None)}


def test_producers_may_insert_where_the_page_says(db: psycopg.Connection[Any]) -> None:
    told = section("What fairq_enqueue can do today").split("may insert into")[1].split("and read")[0]
    assert set(re.findall(r"`fairq\.(\w+)`", told)) == names(db, INSERTS)


def test_producers_change_and_remove_nothing(db: psycopg.Connection[Any]) -> None:
    assert names(db, WRITES, "fairq_enqueue", "fairq_enqueue") == set()


def test_who_reads_payloads_results_and_errors(db: psycopg.Connection[Any]) -> None:
    private = ["payload", "headers", "result", "error", "note"]
    producers = {"finished_tasks.result", "finished_tasks.error", "progress.note"}
    assert names(db, COLUMNS, private, "fairq_enqueue") == producers
    assert names(db, COLUMNS, private, "fairq_observe") == {"attempts.error", "progress.note"}


def test_a_producer_with_sql_of_its_own_can_exceed_a_cap(db: psycopg.Connection[Any]) -> None:
    """What the page warns of. When this fails, the page has good news to tell."""
    db.execute("""select fairq.configure_group('default', 'bob', '{"max_running": 1}')""")
    db.execute("select fairq.create_task('bob', '{}') from generate_series(1, 3)")
    row = db.execute("select fairq.register_worker('w', '{default}', 9)").fetchone()
    pop = "select count(*) from fairq.pop_tasks('default', 9, %s)"
    assert db.execute(pop, row).fetchone() == (1,)
    assert db.execute(pop, row).fetchone() == (0,)
    db.execute("set local role fairq_enqueue")
    db.execute(
        "insert into fairq.rings (shard_no, queue, group_key, freed)"
        " select r.shard_no, 'default', 'bob', 1 from fairq.rings r limit 1"
    )
    db.execute("reset role")
    assert db.execute(pop, row).fetchone() == (1,)
