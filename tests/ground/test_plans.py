"""The helpers of plan tests read real plans."""

from typing import Any

import psycopg
import pytest

from tests.support.database import Database
from tests.support.plans import (
    explain,
    explain_generic,
    index_names,
    node_types,
    nodes,
    parse_auto_explain,
    recorded_plans,
    relation_names,
    rows_visited,
    shared_buffers,
)


@pytest.fixture
def numbers(database: Database) -> psycopg.Connection[Any]:
    conn = database.connect(autocommit=True)
    conn.execute("create table numbers as select n, n % 10 as digit from generate_series(1, 10000) as n")
    conn.execute("create index numbers_n_idx on numbers (n)")
    conn.execute("vacuum analyze numbers")
    conn.execute(
        "create function count_below(p_n int) returns bigint language plpgsql as "
        "$$ declare v_count bigint; begin select count(*) into v_count from numbers where n < p_n; "
        "return v_count; end $$"
    )
    return conn


def test_a_plan_names_its_index_and_counts_rows_and_buffers(numbers: psycopg.Connection[Any]) -> None:
    plan = explain(numbers, "select digit from numbers where n < %s", [101])
    assert index_names(plan) == {"numbers_n_idx"}
    assert rows_visited(plan) == rows_visited(plan, "numbers") == 100
    assert 0 < shared_buffers(plan) < 10


def test_rows_thrown_away_by_a_filter_count_as_visited(numbers: psycopg.Connection[Any]) -> None:
    plan = explain(numbers, "select n from numbers where digit = 3")
    assert node_types(plan) == ["Seq Scan"]
    assert relation_names(plan, "Seq Scan") == {"numbers"}
    assert rows_visited(plan) == 10_000
    assert rows_visited(plan, "other") == 0


def test_without_analyze_nothing_runs(numbers: psycopg.Connection[Any]) -> None:
    explain(numbers, "delete from numbers", analyze=False)
    row = numbers.execute("select count(*) from numbers").fetchone()
    assert row == (10_000,)


def test_a_generic_plan_does_not_know_its_parameters(numbers: psycopg.Connection[Any]) -> None:
    plan = explain_generic(numbers, "select digit from numbers where n < $1", [101], types=["int"])
    assert rows_visited(plan) == 100
    assert {node["Index Cond"] for node in nodes(plan) if "Index Cond" in node} == {"(n < $1)"}


def test_statements_inside_functions_are_recorded_with_their_plans(
    numbers: psycopg.Connection[Any],
) -> None:
    with recorded_plans(numbers) as recording:
        numbers.execute("select count_below(%s)", [51])
    (inner,) = recording.of("from numbers where")
    assert index_names(inner.plan) == {"numbers_n_idx"}
    assert rows_visited(inner.plan) == 50
    assert [statement.query for statement in recording.of("count_below")] != []
    numbers.execute("select count_below(10)")
    assert len(recording.of("from numbers where")) == 1, "recording ended with the block"


def test_other_notices_are_not_plans() -> None:
    assert parse_auto_explain("duration: 0.021 ms  statement: select 1") is None
    assert parse_auto_explain("something else") is None
