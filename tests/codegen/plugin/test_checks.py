"""`select *` from a function is found, whatever stands around it, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairq.codegen import checks, parse
from fairq.codegen.model import UNKNOWN_TYPE, Column, GenerationError, Query, TypeName


@pytest.mark.parametrize(
    ("sql", "function"),
    [
        ("select * from f()", "f"),
        ("SELECT  *\nFROM fairq.pop_tasks($1, $2) AS t", "fairq.pop_tasks"),
        ('select * from "Odd"."Name"(1)', '"Odd"."Name"'),
        ("select t.* from f(1) t", "f"),
        ("select t.* from f(1) as t (a, b) where a > 1", "f"),
        ("select f.* from f(1)", "f"),
        ("select s.id, t.* from s join f(s.id) as t on true", "f"),
        ("select s.id, t.* from s, lateral f(s.id) as t", "f"),
        ("select s.id, t.* from s left join lateral f(s.id) t on true", "f"),
        ("select * from s cross join generate_series(1, 2)", "generate_series"),
        ("select * from unnest($1::text[]) with ordinality as u", "unnest"),
        ("select * from rows from (f(1), g(2)) as t", "rows from"),
        ("select id from t where id in (select * from f(1))", "f"),
        ("with picked as (select * from f($1)) select id from picked", "f"),
        ("select 1 union all select * from f()", "f"),
        ("select distinct * from f()", "f"),
        ("select /* all */ * -- every one\nfrom f()", "f"),
        ("insert into t select * from f()", "f"),
        ("select (select 1), * from f()", "f"),
        ("select * from (select 1) as s, f() as t", "f"),
    ],
)
def test_a_star_from_a_function_is_found(sql: str, function: str) -> None:
    assert checks.star_from_function(sql) == function


@pytest.mark.parametrize(
    "sql",
    [
        "select * from tasks",
        "select t.* from tasks as t join f(t.id) as g on true",
        "select t.*, g.a from tasks as t, f(t.id) as g",
        "select g.a from f(1) as g",
        "select count(*) from f(1)",
        "select a * b from f(1) as g(a, b)",
        "select 2 * 3 from f(1)",
        "select '* from f(' from tasks",
        'select "*" from f(1)',
        "select (select count(*) from f(1)), * from tasks",
        "select * from (select a from f(1)) as t",
        "select * from tasks where id = any(f(1))",
        "select * from tasks where exists (select 1 from f(1))",
        "insert into tasks (a, b) select a, b from f(1)",
        "insert into tasks (a) values ($1) returning *",
        "delete from tasks using f(1) as g where g.a = tasks.id returning tasks.*",
        "select extract(epoch from now()), id from tasks",
        "select *",
        "",
    ],
)
def test_nothing_else_is_taken_for_one(sql: str) -> None:
    assert checks.star_from_function(sql) is None


def test_a_record_in_a_result_is_refused_and_other_types_are_not() -> None:
    columns = (Column("a", TypeName("pg_catalog", "int4")), Column("b", UNKNOWN_TYPE))
    checks.refuse_records([Query("Fine", ":many", "select 1", "q.sql", columns=columns)])
    record = Column("f", TypeName("pg_catalog", "record", "record"))
    with pytest.raises(GenerationError, match="column f is a record"):
        checks.refuse_records(
            [Query("Star", ":many", "select f from f()", "q.sql", columns=(*columns, record))]
        )


def test_no_query_of_fairq_selects_a_star_from_a_function() -> None:
    files = sorted(Path(__file__).parents[3].glob("sql/queries/*.sql"))
    statements = [each for file in files for each in parse.parse_file(file.read_text(), file.name)]
    assert statements
    assert [each.name for each in statements if checks.star_from_function(each.text)] == []
