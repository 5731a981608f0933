"""What the functions of the `psycopg` template do on real connections."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.array import ListDumper
from psycopg.types.json import set_json_loads

from fairq import driver
from tests.codegen.frontend.build import Package, build, connect, forget
from tests.support.database import Database
from tests.support.server import TestServer, create_database, drop_database

SCHEMA = """
create type state as enum ('queued', 'running');
create table jobs (id bigint generated always as identity primary key, name text not null,
  state state not null default 'queued', payload jsonb not null default '{}', tags text[]);
create table notes (id bigint primary key, job_id bigint references jobs, body text not null);
comment on table jobs is 'Work to do.';
comment on column jobs.tags is 'Free words.';
"""
QUERIES = r"""
-- name: AddJob :one
-- Adds a job; says "hello" with a backslash \ and a quote "
-- fairq: always
insert into jobs (name, payload, tags) values (@name, @payload, @tags) returning *;

-- name: GetJob :one
select * from jobs where id = $1;

-- name: CountJobs :one
-- fairq: always
select count(*) from jobs;

-- name: JobName :one
select name from jobs where id = $1;

-- name: ListJobs :many
select id, name, state, payload from jobs
 where state = sqlc.narg(state) or sqlc.narg(state) is null order by id;

-- name: JobIds :many
select id from jobs where name = any(@names::text[]) order by id;

-- name: RenameJobs :execrows
update jobs set name = @name where id = any(@ids::bigint[]);

-- name: DeleteJobs :exec
delete from jobs;

-- name: TouchJobs :execresult
update jobs set name = name || '%s "quoted" \n' || E'\\';

-- name: RawJobs :many
-- fairq: raw payload
select id, payload, jsonb_build_object('n', name) as decoded from jobs order by id;

-- name: AddRawJobs :exec
-- fairq: raw
insert into jobs (name, payload) select n, p from unnest(@names::text[], @payloads::jsonb[]) as s (n, p);

-- name: AddJobs :exec
insert into jobs (name, payload) select n, p from unnest(@names::text[], @payloads::jsonb[]) as s (n, p);

-- name: CopyJobs :copyfrom
insert into jobs (name, payload, tags) values (@name, @payload, @tags);

-- name: CopyStates :copyfrom
-- fairq: raw payload
insert into jobs (name, state, payload) values ($1, $2, $3);

-- name: CopyNames :copyfrom
insert into jobs (name) values ($1);

-- name: JobsWithNotes :many
select sqlc.embed(j), sqlc.embed(n), n.body from jobs j left join notes n on n.job_id = j.id order by j.id;

-- name: AddNote :exec
insert into notes (id, job_id, body) values ($1, $2, $3);

-- name: Nobody :one
-- fairq: always
select name from jobs where false;

-- name: NullAlways :one
-- fairq: always
select max(id) as top from jobs;

-- name: Fail :one
select 1 / @zero::int as x;

-- name: Names :many
select conn, "driver", "class", "from" from (values (@conn::int, @driver::int, @class::int, 1)) as
  v (conn, "driver", "class", "from");
"""


@pytest.fixture(scope="module")
def calls_database(server: TestServer, worker: str) -> Iterator[Database]:
    name = f"fairq_calls_{server.run_id}_{worker}"
    create_database(server, name, "template0")
    yield Database(name, server.dsn(name))
    drop_database(server, name)


@pytest.fixture(scope="module")
def package(calls_database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    built = build(calls_database.dsn, tmp_path_factory.mktemp("calls"), SCHEMA, QUERIES)
    yield built
    forget(built)


@pytest.fixture
def queries(package: Package) -> Any:
    return package.module("queries")


@pytest.fixture
def conn(calls_database: Database) -> Iterator[psycopg.Connection[Any]]:
    with connect(calls_database.dsn) as connection:
        connection.execute("truncate jobs restart identity cascade")
        yield connection


def test_each_command_returns_what_it_is_for(
    queries: Any, package: Package, conn: psycopg.Connection[Any]
) -> None:
    models = package.module("models")
    job = queries.add_job(conn, name="a", payload={"n": 1}, tags=["x"])
    assert job == models.Job(1, "a", models.State.QUEUED, {"n": 1}, ["x"])
    assert queries.get_job(conn, id=1) == job
    assert queries.get_job(conn, id=99) is None
    assert queries.job_name(conn, id=1) == "a"
    assert queries.job_name(conn, id=99) is None
    assert queries.count_jobs(conn) == 1
    listed = [queries.ListJobsRow(1, "a", models.State.QUEUED, {"n": 1})]
    assert queries.list_jobs(conn, state=models.State.QUEUED) == queries.list_jobs(conn) == listed
    assert queries.list_jobs(conn, state=models.State.RUNNING) == []
    assert queries.job_ids(conn, names=["a", "b"]) == [1]
    assert queries.rename_jobs(conn, name="b", ids=[1, 2]) == 1
    assert queries.touch_jobs(conn) == ("UPDATE 1", 1)
    assert queries.job_name(conn, id=1) == 'b%s "quoted" \\n\\'
    assert queries.delete_jobs(conn) is None
    assert queries.count_jobs(conn) == 0


def test_a_many_call_is_sent_at_once_and_returns_a_list(queries: Any, conn: psycopg.Connection[Any]) -> None:
    queries.add_jobs(conn, names=["a", "b"], payloads=[{}, []])
    assert queries.job_ids(conn, names=["a", "b"]) == [1, 2]


def test_rows_are_frozen_and_slotted(queries: Any, conn: psycopg.Connection[Any]) -> None:
    job = queries.add_job(conn, name="a", payload=None)
    assert not hasattr(job, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.name = "b"


def test_json_null_is_a_value_and_not_sql_null(queries: Any, conn: psycopg.Connection[Any]) -> None:
    queries.add_job(conn, name="a", payload=None)
    assert conn.execute("select payload::text from jobs").fetchone() == ("null",)


def test_nullable_parameters_are_optional(queries: Any, conn: psycopg.Connection[Any]) -> None:
    assert queries.add_job(conn, name="a", payload={}).tags is None
    with pytest.raises(TypeError):
        queries.add_job(conn, payload={})


def test_a_row_that_is_always_there_is_an_error_when_it_is_not(
    queries: Any, conn: psycopg.Connection[Any]
) -> None:
    with pytest.raises(psycopg.DataError):
        queries.nobody(conn)


def test_a_null_in_a_row_that_is_always_there_is_no_missing_row(
    queries: Any, package: Package, conn: psycopg.Connection[Any]
) -> None:
    assert queries.null_always(conn) is None
    call = queries.null_always.call()
    assert driver.run_pipeline(conn, call, call) == (None, None)


def test_names_that_python_or_the_functions_need_are_changed(
    queries: Any, conn: psycopg.Connection[Any]
) -> None:
    (row,) = queries.names(conn, conn=1, driver_=2, class_=3)
    assert (row.conn, row.driver_, row.class_, row.from_) == (1, 2, 3, 1)


def test_functions_hide_nothing_that_those_below_need(empty_database: Database, tmp_path: Path) -> None:
    names = ("List", "Int", "Str", "Driver", "Models", "Datetime", "Dataclasses", "Uuid", "Class", "Index")
    text = "-- name: {} :many\nselect id, state, @at::timestamptz as at from jobs where id = @id;\n"
    built = build(empty_database.dsn, tmp_path, SCHEMA, "\n".join(map(text.format, names)))
    queries, conn = built.module("queries"), empty_database.connect(autocommit=True)
    for name in names:
        function = getattr(queries, "index" if name == "Index" else f"{name.lower()}_")
        assert function(conn, id=1, at=datetime.now(UTC)) == []
    forget(built)


def strange_connection(dsn: str) -> psycopg.Connection[Any]:
    """Connections as an application, Django or SQLAlchemy may have changed them."""

    class Upper(psycopg.adapt.Loader):
        def load(self, data: Any) -> Any:
            return "loaded by somebody else"

    conn = psycopg.connect(dsn, autocommit=True, row_factory=dict_row, cursor_factory=psycopg.ClientCursor)
    for name in ("text", "int8", "jsonb"):
        conn.adapters.register_loader(name, Upper)
    set_json_loads(lambda data: "decoded by somebody else", conn)
    conn.adapters.register_dumper(list, ListDumper)
    return conn


def test_settings_of_the_connection_change_nothing(
    queries: Any, package: Package, calls_database: Database, conn: psycopg.Connection[Any]
) -> None:
    with strange_connection(calls_database.dsn) as strange:
        queries.add_jobs(strange, names=["ä", "b"], payloads=[{"ü": 1}, {}])
        got = queries.get_job(strange, id=1)
        raw = queries.raw_jobs(strange)
        assert strange.execute("select 1 as x").fetchone() == {"x": 1}
    assert got == queries.get_job(conn, id=1)
    assert (got.name, got.payload) == ("ä", {"ü": 1})
    assert json.loads(raw[0].payload) == {"ü": 1}


def test_raw_json_is_text_that_nobody_decodes(queries: Any, conn: psycopg.Connection[Any]) -> None:
    queries.add_raw_jobs(conn, names=["a", "b"], payloads=['{"n": 1.50}', "[1]"])
    first, second = queries.raw_jobs(conn)
    # jsonb keeps 1.50; a float would not.
    assert (first.payload, second.payload) == ('{"n": 1.50}', "[1]")
    assert first.decoded == {"n": "a"}


def test_raw_json_for_a_whole_package(
    empty_database: Database, tmp_path_factory: pytest.TempPathFactory
) -> None:
    built = build(empty_database.dsn, tmp_path_factory.mktemp("raw"), SCHEMA, QUERIES, raw_json=True)
    queries = built.module("queries")
    conn = empty_database.connect(autocommit=True)
    assert queries.add_job(conn, name="a", payload='{"n": 1.50}').payload == '{"n": 1.50}'
    queries.copy_jobs(conn, [queries.CopyJobsRow("c", "[2]", None)])
    assert [row.j.payload for row in queries.jobs_with_notes(conn)] == ['{"n": 1.50}', "[2]"]
    forget(built)


def test_copy_sends_rows(queries: Any, package: Package, conn: psycopg.Connection[Any]) -> None:
    models = package.module("models")
    rows = (queries.CopyJobsRow(f"job {n}", {"n": n}, None if n % 2 else ["t", 'u"']) for n in range(1000))
    assert queries.copy_jobs(conn, rows) == 1000
    assert queries.copy_names(conn, ["x", "y"]) == 2
    assert queries.copy_states(conn, [queries.CopyStatesRow("z", models.State.RUNNING, '{"a":1}')]) == 1
    assert queries.copy_names(conn, []) == 0
    assert queries.count_jobs(conn) == 1003
    assert queries.get_job(conn, id=999).tags == ["t", 'u"']
    assert queries.get_job(conn, id=1003) == models.Job(1003, "z", models.State.RUNNING, {"a": 1}, None)


def test_embedded_rows_are_whole_or_none(
    queries: Any, package: Package, conn: psycopg.Connection[Any]
) -> None:
    models = package.module("models")
    queries.add_jobs(conn, names=["a", "b"], payloads=[{}, {}])
    queries.add_note(conn, id=7, job_id=2, body="n")
    first, second = queries.jobs_with_notes(conn)
    assert first == queries.JobsWithNotesRow(queries.get_job(conn, id=1), None, None)
    assert second == queries.JobsWithNotesRow(queries.get_job(conn, id=2), models.Note(7, 2, "n"), "n")


# ------------------------------------------------------------------------------------------------ pipelines


def test_several_calls_take_one_round_trip(
    queries: Any, package: Package, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    queries.add_jobs(conn, names=["a", "b"], payloads=[{}, {}])
    trace = tmp_path / "trace"
    with trace.open("w") as file:
        conn.pgconn.trace(file.fileno())
        renamed, count, nothing, job, status = driver.run_pipeline(
            conn,
            queries.rename_jobs.call(name="c", ids=[1, 2]),
            queries.count_jobs.call(),
            queries.job_ids.call(names=["none"]),
            queries.get_job.call(id=1),
            queries.touch_jobs.call(),
        )
        conn.pgconn.untrace()
    assert (renamed, count, nothing, job.name, status) == (2, 2, [], "c", ("UPDATE 2", 2))
    # What was sent (F) before the first answer (B), message by message: all of it.
    sent = [line.split("\t")[1:4:2] for line in trace.read_text().splitlines() if "\t" in line]
    directions = "".join(direction for direction, *_ in sent)
    assert "F" in directions
    assert "B" in directions
    assert "B" not in directions.rstrip("B"), directions


def test_a_failing_call_undoes_the_pipeline_in_autocommit(
    queries: Any, package: Package, conn: psycopg.Connection[Any]
) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        driver.run_pipeline(
            conn,
            queries.add_job.call(name="a", payload={}),
            queries.fail.call(zero=0),
            queries.count_jobs.call(),
        )
    assert queries.count_jobs(conn) == 0


def test_a_result_can_only_be_read_when_it_is_there(
    queries: Any, package: Package, conn: psycopg.Connection[Any]
) -> None:
    with conn.pipeline() as pipeline:
        sent = driver.send(conn, queries.count_jobs.call())
        with pytest.raises(psycopg.InterfaceError):
            sent.result()
        pipeline.sync()
        assert sent.result() == 0
        nobody = driver.send(conn, queries.nobody.call())
    assert sent.result() == 0
    with pytest.raises(psycopg.DataError):
        nobody.result()


def test_plain_functions_work_inside_a_pipeline(queries: Any, conn: psycopg.Connection[Any]) -> None:
    with conn.pipeline():
        queries.add_jobs(conn, names=["a", "b"], payloads=[{}, {}])
        assert queries.rename_jobs(conn, name="c", ids=[2]) == 1
        assert queries.job_name(conn, id=2) == "c"
        assert queries.touch_jobs(conn).rows == 2
        assert len(queries.list_jobs(conn, state="queued")) == 2
        assert queries.job_name(conn, id=99) is None


def test_the_async_twins_do_the_same(queries: Any, package: Package, calls_database: Database) -> None:

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(
            calls_database.dsn, autocommit=True, row_factory=dict_row
        ) as conn:
            await conn.execute("truncate jobs restart identity cascade")
            job = await queries.add_job(conn, name="a", payload={"n": 1})
            assert await queries.get_job(conn, id=1) == job
            assert await queries.rename_jobs(conn, name="b", ids=[1]) == 1
            assert (await queries.touch_jobs(conn)).status == "UPDATE 1"
            assert await queries.copy_names(conn, ["x"]) == 1
            assert await queries.job_ids(conn, names=["x"]) == [2]
            with pytest.raises(psycopg.DataError):
                await queries.nobody(conn)
            renamed, ids, names = await driver.run_pipeline_async(
                conn,
                queries.rename_jobs.call(name="c", ids=[1, 2]),
                queries.job_ids.call(names=["c"]),
                queries.job_name.call(id=2),
            )
            assert (renamed, ids, names) == (2, [1, 2], "c")
            async with conn.pipeline():
                sent = await driver.send_async(conn, queries.count_jobs.call())
                assert await queries.rename_jobs(conn, name="d", ids=[1]) == 1
                assert await queries.job_name(conn, id=1) == "d"
            assert sent.result() == 2
            await queries.delete_jobs(conn)
            assert await queries.count_jobs(conn) == 0

    asyncio.run(run())


def test_a_call_neither_commits_nor_breaks_the_transaction(
    queries: Any, calls_database: Database, conn: psycopg.Connection[Any]
) -> None:
    with psycopg.connect(calls_database.dsn) as app:
        queries.add_job(app, name="a", payload={})
        assert app.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert queries.count_jobs(conn) == 0
        app.rollback()
    assert queries.count_jobs(conn) == 0


def test_signatures_and_types_are_those_of_the_sql(package: Package, queries: Any) -> None:
    hints: Callable[[Any], dict[str, Any]] = lambda query: {  # noqa: E731
        name: str(hint) for name, hint in query.__annotations__.items()
    }
    assert hints(queries.rename_jobs) == {
        "name": "str",
        "ids": "Sequence[int | None]",
        "return": "driver.Params",
    }
    text = package.files["queries.py"]
    for statement in ("[models.Job | None]", "[int]", "[list[ListJobsRow]]"):
        assert f"@driver.Statement{statement}(" in text
    assert queries.add_job.__doc__ == 'Adds a job; says "hello" with a backslash \\ and a quote " '
    assert package.module("models").Job.__doc__ == "Work to do."
