"""The pages of docs/reference/sql are complete, and their SQL was really run."""

import os
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairq import policies
from fairq.errors import BY_SQLSTATE
from fairq.options import options_of
from tests.support.database import Database
from tests.support.sql_pages import blocks, run

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference" / "sql"
ROLES_OF_EXAMPLES = ("shop_app", "shop_worker", "grafana")

SIGNATURES = """
select p.proname::text as name,
  (select coalesce(json_agg(json_build_array(a.name, format_type(t.type, null),
      pg_get_function_arg_default(p.oid, a.nth::integer)) order by a.nth), '[]')
   from unnest(p.proargnames[:p.pronargs]) with ordinality a(name, nth)
   join unnest(p.proargtypes::oid[]) with ordinality t(type, nth) using (nth)) as parameters,
  pg_get_function_result(p.oid) as result
from pg_catalog.pg_proc p
where p.pronamespace = 'fairq'::regnamespace and p.proname !~ '^_'
order by 1
"""


def functions(conn: psycopg.Connection[Any]) -> dict[str, tuple[list[list[str]], str]]:
    return {name: (parameters, result) for name, parameters, result in conn.execute(SIGNATURES)}


def spelled(parameter: list[str]) -> tuple[str, str, str]:
    """Name, type and default as the pages spell them."""
    name, kind, default = parameter
    default = re.sub(r"::[a-z ]+(\[\])?$", "", default or "")
    kind = kind.replace("timestamp with time zone", "timestamptz")
    return name, kind, "null" if default == "NULL" else default


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text("utf-8")


def test_every_function_has_a_page_and_every_page_a_function(db: psycopg.Connection[Any]) -> None:
    written = {path.stem for path in PAGES.glob("*.md")} - {"README", "roles", "tables-and-views"}
    assert written == set(functions(db))


def test_pages_spell_signatures_as_the_catalogue_does(db: psycopg.Connection[Any]) -> None:
    for name, (parameters, result) in functions(db).items():
        text = page(name)
        rows = re.findall(r"^- `(p_\w+)` ([^:=`]+?)(?: = `(.*?)`)?: .", text, re.MULTILINE)
        assert rows == [spelled(each) for each in parameters], name
        returns = result.replace("SETOF", "setof").replace("timestamp with time zone", "timestamptz")
        returns = "table (…)" if returns.startswith("TABLE") else returns
        assert f"fairq.{name}({'…' if parameters else ''}) returns {returns}\n" in text, name


def test_pages_have_their_sections_and_an_example(db: psycopg.Connection[Any]) -> None:
    for name in functions(db):
        text = page(name)
        for section in ("Returns", "Errors", "Locks", "Cost", "Example"):
            assert f"\n## {section}\n" in text, (name, section)
        assert f"fairq.{name}(" in text.split("## Example")[1], name
        assert any(block.expected for block in blocks(text)), name


def test_every_code_on_a_page_is_an_error_of_fairq(db: psycopg.Connection[Any]) -> None:
    errors = (PAGES.parent / "errors.md").read_text("utf-8")
    anchors = {
        heading.lower().replace(" ", "-") for heading in re.findall(r"^### (.+)$", errors, re.MULTILINE)
    }
    for name in functions(db):
        for code, anchor in re.findall(r"\[(QF\d+)\]\(\.\./errors\.md#([\w-]+)\)", page(name)):
            assert code in BY_SQLSTATE, (name, code)
            assert anchor in anchors, (name, anchor)


def test_a_page_names_every_code_that_its_function_raises_itself(db: psycopg.Connection[Any]) -> None:
    query = "select p.proname, p.prosrc from pg_proc p where p.pronamespace = 'fairq'::regnamespace"
    for name, source in db.execute(query).fetchall():
        if not name.startswith("_"):
            assert set(re.findall(r"'(QF\d{3})'", source)) <= set(re.findall(r"QF\d{3}", page(name))), name


def test_the_overview_links_every_function(db: psycopg.Connection[Any]) -> None:
    overview = page("README")
    for name in functions(db):
        assert f"[{name}]({name}.md)" in overview, name


def test_the_page_of_tables_has_every_table_view_and_column(db: psycopg.Connection[Any]) -> None:
    text = page("tables-and-views")
    relations = db.execute(
        """
        select c.relname::text, array_agg(a.attname::text)
        from pg_catalog.pg_class c
        join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        where c.relnamespace = 'fairq'::regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
        group by c.relname
        """
    ).fetchall()
    for name, columns in relations:
        if f"\n## fairq.{name}\n" not in text:
            assert f"- `fairq.{name}`: " in text, name
            continue
        section = text.split(f"\n## fairq.{name}\n")[1].split("\n## ")[0]
        settings = {row[0] for row in settings_of(page(SETTINGS[name]))} if name in SETTINGS else set()
        # Columns that mean what they mean in another table share a line.
        shown = " ".join(
            item.split(":")[0] for item in re.findall(r"^- (`(?:.|\n(?=  ))*)", section, re.MULTILINE)
        )
        assert set(re.findall(r"`(\w+)`", shown)) | settings == set(columns), name


SETTINGS = {
    "queues": "configure_queue",
    "kinds": "configure_kind",
    "groups": "configure_group",
    "settings": "configure_cluster",
}


def settings_of(text: str) -> list[tuple[str, str, str]]:
    """Name, type and default of each setting in a page's list."""
    return re.findall(r"^- `(?!p_)(\w+)` ([a-z ]+?)(?: = `(.*?)`)?: .", text.split("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize(("table", "name"), SETTINGS.items())
def test_pages_list_settings_as_the_engine_has_them(
    db: psycopg.Connection[Any], table: str, name: str
) -> None:
    """The columns of a configure_… function that Python knows, too, with types and defaults."""
    rows = settings_of(page(name))
    known = list(options_of(getattr(policies, f"{name.removeprefix('configure_').title()}Settings")))
    columns = db.execute(
        """
        select a.attname::text, format_type(a.atttypid, null), pg_get_expr(d.adbin, d.adrelid)
        from pg_catalog.pg_attribute a
        left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where a.attrelid = %s::regclass and a.attname = any(%s)
        order by a.attnum
        """,
        [f"fairq.{table}", known],
    ).fetchall()
    assert [row[0] for row in rows] == known == [row[0] for row in columns]
    for (_, kind, shown), (column, its_kind, preset) in zip(rows, columns, strict=True):
        assert kind == its_kind, column
        cast = f"select {preset} = %s::{kind}" if shown else f"select {preset or 'null'} is null"
        assert db.execute(cast.encode(), [shown] if shown else []).fetchone() == (True,), column


def test_the_page_of_roles_names_each(db: psycopg.Connection[Any]) -> None:
    roles = db.execute(
        "select rolname::text from pg_roles where rolname ~ '^fairq_' and not rolcanlogin"
    ).fetchall()
    for (role,) in roles:
        assert f"| `{role}` |" in page("roles"), role


@pytest.mark.parametrize("name", sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README"))
def test_examples_answer_what_the_page_shows(database: Database, name: str) -> None:
    """Rewrite them with: python -m tests.support.sql_pages docs/reference/sql/*.md"""
    if os.environ.get("FAIRQ_TEST_SHARDS"):
        pytest.skip("the pages show an installation with one shard")
    conn = database.connect(autocommit=True)
    try:
        for block in blocks(page(name)):
            shown = run(conn, block)
            assert block.expected is None or shown == block.expected, f"{name}.md, line {block.line}"
    finally:
        if name == "roles":
            conn.execute("reset role")
            for role in ROLES_OF_EXAMPLES:
                conn.execute(f"drop role if exists {role}".encode())
