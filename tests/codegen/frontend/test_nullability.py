"""The nullability that `fairq gen` infers, compared with what the queries return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fairq.codegen import catalog, parse
from fairq.codegen.model import Query
from tests.codegen.frontend.build import connect
from tests.support.database import Database
from tests.support.server import TestServer, create_database, drop_database

SCHEMA = """
create domain code as text not null;
create table t (id bigint primary key, a text not null, b text, payload jsonb not null default '{}');
create table u (id bigint primary key, t_id bigint, c int not null, d int, k code);
create table child (e int) inherits (t);
create table parent (id bigint primary key, a text constraint given not null);
create table heir () inherits (parent);
create view joined as select t.id, t.a, u.c, t.b, upper(t.a) as big from t left join u on u.t_id = t.id;
create view inner_joined as select t.a, u.c from t join u on u.t_id = t.id;
create view nested as select j.a, j.c, i.c as c2 from joined j full join inner_joined i on i.a = j.a;
create materialized view counts as select a, count(*) as n from t group by a;
create function rows_of_t() returns setof t language sql as 'select * from t';
create function one_t(p_id bigint) returns t language sql as 'select * from t where id = p_id';
create function pairs() returns table (x int, y text) language sql as $$ values (1, null), (null, 'y') $$;
create function scalar(p int) returns int language sql as 'select null::int';
create function maybe(a text, b text) returns int language sql immutable as 'select null::int';
create operator % (leftarg = text, rightarg = text, function = maybe);
do $$ begin
  if current_setting('server_version_num')::int < 180000 then
    alter table heir alter a drop not null;
    insert into heir values (1, null);
  else
    alter table parent drop constraint given;
  end if;
end $$;
insert into t values (1, 'x', null), (2, 'y', 'z'), (3, 'x', 'w');
insert into u values (1, 1, 5, null, 'k'), (2, null, 6, 7, 'k');
"""

# The query, and for each column whether it can never be NULL.
CASES: list[tuple[str, list[bool]]] = [
    ("select id, a, b from t", [True, True, False]),
    ("select * from t", [True, True, False, True]),
    ("select t.a, u.c from t left join u on u.t_id = t.id", [True, False]),
    ("select t.a, u.c from t right join u on u.t_id = t.id", [False, True]),
    ("select t.a, u.c from t full join u on u.t_id = t.id", [False, False]),
    ("select t.a, u.c from t join u on u.t_id = t.id", [True, True]),
    (
        "select t.a, u.c, v.a from t left join (u join t v on v.id = u.t_id) on u.t_id = t.id",
        [True, False, False],
    ),
    (
        "select t.a, s.c from t left join lateral (select c from u where u.t_id = t.id) s on true",
        [True, False],
    ),
    ("select id, t.a, c from t left join (select t_id as id, c from u) s using (id)", [True, True, False]),
    ("select id from t full join (select t_id as id, c from u) s using (id)", [False]),
    ("select j.c from (t left join u on u.t_id = t.id) as j (i, a, b, p, i2, t, c)", [False]),
    ("select a, c, b, big from joined", [True, False, False, True]),
    ("select a, c from inner_joined", [True, True]),
    ("select a, c, c2 from nested", [False, False, False]),
    ("select a, n from counts", [True, True]),
    ("select k from u", [True]),
    ("select k from t left join u on u.t_id = t.id", [False]),
    ("select id, a, b from rows_of_t()", [True, True, False]),
    ("select o.id, o.a from one_t(99) as o", [False, False]),
    ("select p.x, p.y from pairs() as p", [False, False]),
    ("select r.id, r.n from rows_of_t() with ordinality as r (id, a, b, p, n)", [True, True]),
    ("select scalar(1), scalar(1)::int", [False, False]),
    ("select set_config('a.b', 'c', true), set_config('a.b', null, true)", [True, False]),
    ("select 'a'::text % 'b'::text, 1 % 2", [False, True]),
    ("select count(*), count(b), max(id), sum(id) from t", [True, True, False, False]),
    ("select a, count(*), max(id), max(b), array_agg(b) from t group by a", [True, True, True, False, True]),
    ("select a, max(id) filter (where id > 100) from t group by a", [True, False]),
    ("select a, count(*) from t group by rollup (a)", [False, True]),
    ("select a, id, grouping(a) from t group by grouping sets ((a), (id))", [False, False, True]),
    ("select row_number() over (), lag(a) over (), rank() over (order by a) from t", [True, False, True]),
    ("select coalesce(b, 'none'), coalesce(b, b), coalesce(b, a) from t", [True, False, True]),
    ("select nullif(a, 'x'), greatest(b, a), least(b, b) from t", [False, True, False]),
    ("select case when id = 1 then a else 'n' end, case when id = 1 then a end from t", [True, False]),
    (
        "select a || 'x', a || b, length(a), upper(b), a = 'x', b = 'x' from t",
        [True, False, True, False, True, False],
    ),
    ("select payload -> 'q', payload ->> 'q', payload || '{}' from t", [False, False, True]),
    ("select (payload -> 'n')::int from t", [False]),
    (
        "select lower(a), lower(int4range(null, 1)), 'infinity'::timestamptz::time from t",
        [True, False, False],
    ),
    ("select extract(month from 'infinity'::date), to_char('infinity'::date, 'MM')", [False, False]),
    ("select a, id from parent", [False, True]),
    ("select substring(a from 'q+'), regexp_match(a, 'q') from t", [False, False]),
    ("select null, 1, 'x', now(), current_timestamp, current_schema", [False, True, True, True, True, False]),
    (
        "select b is null, b is distinct from 'x', not (a = 'x'), b = 'x' or a = 'x' from t",
        [True, True, True, False],
    ),
    (
        "select exists (select 1 from u), array(select a from t), (select c from u limit 1)",
        [True, True, False],
    ),
    ("select (select count(*) from u where u.t_id = t.id) from t", [True]),
    ("select (select count(*) from u having count(*) > 5) from t", [False]),
    ("select id = any (array[1, null]) from t", [False]),
    ("select array[b], row(b), (array[1])[5] from t", [True, True, False]),
    ("values (1, 'a'), (2, null)", [True, False]),
    ("select v.x, v.y from (values (1, 'a'), (2, null)) as v (x, y)", [True, False]),
    ("select a from t union all select 'x'", [True]),
    ("select a from t union all select b from t", [False]),
    ("select b from t intersect select a from t", [True]),
    ("select a from t except select b from t", [True]),
    ("with s as (select a, b from t) select s.a, s.b from s", [True, False]),
    ("with recursive r (n) as (select 1 union all select n + 1 from r where n < 3) select n from r", [True]),
    (
        "with recursive r (n) as (select 1 union all select d from r join u on true) select n from r limit 5",
        [False],
    ),
    (
        "with i as (insert into u values (9, 1, 1, null, 'k') returning c, d) select c, d from i",
        [True, False],
    ),
    ("select n from generate_series(1, 3) as n", [True]),
    ("select x from unnest(array[1, null]) as x", [False]),
    ("select e.key, e.value from jsonb_each_text('{\"a\": null}') as e", [True, False]),
    ("select s.q from json_to_record('{}') as s (q int)", [False]),
    ("insert into t values (7, 'n', null) returning *", [True, True, False, True]),
    ("update t set b = u.d::text from u where u.t_id = t.id returning t.a, t.b, u.c", [True, False, True]),
    ("update t set a = 'x' from (t s left join u on u.t_id = s.id) where s.id = t.id returning u.c", [False]),
    ("delete from u returning c, d", [True, False]),
    ("select t from t", [True]),
    ("select u from t left join u on u.t_id = t.id", [False]),
    ("select tableoid, ctid from t", [True, True]),
    ("select t.tableoid from joined j join t on t.id = j.id", [True]),
]


@pytest.fixture(scope="module")
def database(server: TestServer, worker: str) -> Iterator[Database]:
    name = f"fairq_nulls_{server.run_id}_{worker}"
    create_database(server, name, "template0")
    database = Database(name, server.dsn(name))
    with connect(database.dsn) as conn:
        conn.execute(SCHEMA.encode())
        conn.execute("refresh materialized view counts")
    yield database
    drop_database(server, name)


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with connect(database.dsn) as connection:
        yield connection


def described(conn: psycopg.Connection[Any], sql: str) -> Query:
    (statement,) = parse.parse_file(f"-- name: Q :many\n{sql}", "q.sql")
    return catalog.describe(catalog.Reader(conn), statement)


@pytest.mark.parametrize(("sql", "expected"), CASES)
def test_a_column_is_not_null_only_when_it_is_sure(
    conn: psycopg.Connection[Any], sql: str, expected: list[bool]
) -> None:
    query = described(conn, sql)
    assert [column.not_null for column in query.columns] == expected
    with conn.transaction(force_rollback=True):
        rows = psycopg.RawCursor(conn).execute(query.text.encode()).fetchall()
    for row in rows:
        for value, never_null in zip(row, expected, strict=True):
            assert value is not None or not never_null


def test_not_null_without_a_check_of_the_rows_is_none(conn: psycopg.Connection[Any]) -> None:
    if conn.info.server_version < 180000:
        pytest.skip("not null … not valid is new in PostgreSQL 18")
    with conn.transaction(force_rollback=True):
        conn.execute("create table late (x int); insert into late values (null)")
        conn.execute("alter table late add constraint n not null x not valid")
        assert [column.not_null for column in described(conn, "select x from late").columns] == [False]


def test_old_and_new_rows_may_be_missing(conn: psycopg.Connection[Any]) -> None:
    if conn.info.server_version < 180000:
        pytest.skip("returning old and new is new in PostgreSQL 18")
    query = described(conn, "insert into u values (11, 1, 1, 1, 'k') returning old.c, new.c, c")
    assert [column.not_null for column in query.columns] == [False, False, True]


def test_the_source_of_a_merge_may_be_missing(conn: psycopg.Connection[Any]) -> None:
    if conn.info.server_version < 170000:
        pytest.skip("merge … returning is new in PostgreSQL 17")
    query = described(
        conn,
        "merge into t using u on u.id = t.id when not matched by source then delete "
        "when matched then update set b = 'm' returning t.a, u.c, merge_action()",
    )
    assert [column.not_null for column in query.columns] == [True, False, True]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("insert into t (id, a, b) values ($1, $2, $3)", [("id", True), ("a", True), ("b", False)]),
        ("insert into t (id, a, b) values ($1, $2, $2)", [("id", True), ("a", True)]),
        ("insert into t (id, a, b) values (1, $1, $2), (2, $3, $4)", [("a", True), ("b", False)] * 2),
        ("insert into t (id, a, b) select $1, $2, $3", [("id", True), ("a", True), ("b", False)]),
        (
            "insert into t (id, a) values (1, 'x') on conflict (id) do update set a = $1, b = $2",
            [("a", True), ("b", False)],
        ),
        ("update t set b = $1 where id = $2 and a = any($3)", [("b", False), ("id", True), ("a", True)]),
        (
            "select id from t where b = $1 limit $2 offset $3",
            [("b", True), ("limit", True), ("offset", True)],
        ),
        ("select one_t(p_id => $1), scalar($2)", [("p_id", True), ("p", True)]),
        ("select $1::int + 1, sqlc.narg(x)::int".replace("$1", "@y"), [("y", True), ("x", False)]),
        ("insert into u (id, c, k) values (1, 2, $1)", [("k", True)]),
        ("select $1::int", [("", True)]),
    ],
)
def test_a_parameter_is_named_and_nullable_by_where_it_stands(
    conn: psycopg.Connection[Any], sql: str, expected: list[tuple[str, bool]]
) -> None:
    query = described(conn, sql)
    assert [(param.column.name, param.column.not_null) for param in query.params] == expected


def test_a_nullable_parameter_makes_what_is_built_of_it_nullable(conn: psycopg.Connection[Any]) -> None:
    query = described(conn, "select @a::int + 1 as a, sqlc.narg(b)::int + 1 as b")
    assert [column.not_null for column in query.columns] == [True, False]


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select * from t", "select id, a, b, payload from t"),
        ("select t.*, 1 as one from t", "select t.id, t.a, t.b, t.payload, 1 as one from t"),
        ("select *, 1 as one from t x", "select id, a, b, payload, 1 as one from t x"),
        (
            "select u.*, t.* from t join u on u.t_id = t.id",
            "select u.id, u.t_id, u.c, u.d, u.k, t.id, t.a, t.b, t.payload from t join u on u.t_id = t.id",
        ),
        (
            "select * from counts join t using (a)",
            "select a, n, id, b, payload from counts join t using (a)",
        ),
        (
            "select distinct on (a) * from (select * from t) s",
            "select distinct on (a) id, a, b, payload from (select * from t) s",
        ),
        ("delete from u returning *", "delete from u returning id, t_id, c, d, k"),
        ("select count(*), 2 * 3 from t", "select count(*), 2 * 3 from t"),
        (
            'with s as (select * from t) select s.* from s, (values (1)) as "Odd Name" ("X y")',
            "with s as (select * from t) select s.id, s.a, s.b, s.payload from s, "
            '(values (1)) as "Odd Name" ("X y")',
        ),
        (
            'select * from (values (1)) as "Odd Name" ("X y")',
            'select "X y" from (values (1)) as "Odd Name" ("X y")',
        ),
    ],
)
def test_a_star_is_written_as_the_columns_it_stands_for(
    conn: psycopg.Connection[Any], sql: str, text: str
) -> None:
    """A column added later must not change the shape of a prepared statement."""
    assert described(conn, sql).text == text


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select 1", True),
        ("select scalar(1), @x::int", True),
        ("select exists (select from t)", True),
        ("select max(id), count(*) from t where a = 'none'", True),
        ("select id from t", False),
        ("select 1 where false", False),
        ("select unnest(@x::int[])", False),
        ("select p.x from pairs() p", False),
        ("select count(*) from t group by a", False),
        ("select count(*) from t having count(*) > 1", False),
        ("select 1 limit 0", False),
        ("select 1 union select 2", False),
        ("insert into u values (12, 1, 1, 1, 'k') returning id", False),
    ],
)
def test_a_query_that_always_gives_one_row_is_known(
    conn: psycopg.Connection[Any], sql: str, expected: bool
) -> None:
    (statement,) = parse.parse_file(f"-- name: Q :one\n{sql}", "q.sql")
    assert catalog.describe(catalog.Reader(conn), statement).one_row == expected


def test_promises_of_functions_are_believed(conn: psycopg.Connection[Any]) -> None:
    sql = (
        "select scalar(null), p.x, p.y, u.x, o.b, maybe('a', 'b')"
        " from pairs() p left join pairs() u on true, one_t(1) o"
    )
    (statement,) = parse.parse_file(f"-- name: Q :many\n{sql}", "q.sql")
    query = catalog.describe(catalog.Reader(conn, ["public.[so]*", "*.pairs"]), statement)
    assert [column.not_null for column in query.columns] == [True, True, True, False, True, False]
