"""`fairq gen`: configurations, files, exit codes and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fairq.codegen.command import gen
from tests.codegen.frontend.build import connect
from tests.support.database import Database
from tests.support.server import TestServer

CONFIG = """
version: "2"
plugins: [{name: mine, process: {cmd: ./bin/sqlc-gen-fairq}}, {name: other, process: {cmd: other}}]
sql:
  - engine: postgresql
    schema: schema
    queries: queries
    codegen:
      - {plugin: mine, out: out, options: {package: out, template: psycopg}}
      - {plugin: other, out: elsewhere}
"""
Run = Callable[..., Result]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project, which is the current folder."""
    for folder in ("schema", "queries"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sqlc.yaml").write_text(CONFIG)
    (tmp_path / "schema" / "2_more.sql").write_text("alter table t add b text;\n")
    (tmp_path / "schema" / "1_table.sql").write_text("create table t (a int not null);\n")
    (tmp_path / "queries" / "t.sql").write_text("-- name: ListT :many\nselect a, b from t;\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(server: TestServer) -> Run:
    def run(*arguments: str, dsn: str | None = None) -> Result:
        # As the group calls it, so that failures print as they do for users.
        return CliRunner().invoke(gen, [*arguments, "--dsn", dsn or server.dsn("postgres")])

    return run


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_written_where_the_configuration_says(project: Path, run: Run) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert files(project / "out") == ["__init__.py", "models.py", "t.py"]
    assert "class T:\n    a: int\n    b: str | None\n" in (project / "out" / "models.py").read_text()
    assert not (project / "elsewhere").exists()
    assert "5 changed" not in result.output
    assert "3 files generated, 0 changed" in run().output


def test_check_tells_stale_files_and_what_to_run_and_writes_nothing(project: Path, run: Run) -> None:
    assert run("--check").exit_code == 1
    assert not (project / "out").exists()
    run()
    assert run("--check").exit_code == 0
    (project / "queries" / "t.sql").write_text("-- name: ListT :many\nselect a from t;\n")
    before = (project / "out" / "t.py").read_bytes()
    result = run("--check")
    assert result.exit_code == 1
    assert "out/t.py" in result.output
    assert "fairq gen --config sqlc.yaml" in result.output
    assert (project / "out" / "t.py").read_bytes() == before


def test_a_module_whose_queries_are_gone_is_removed_and_nothing_else(project: Path, run: Run) -> None:
    run()
    (project / "out" / "own.py").write_text("# my own\n")
    (project / "queries" / "t.sql").rename(project / "queries" / "u.sql")
    assert run("--check").exit_code == 1
    result = run()
    assert "removed out/t.py" in result.output
    assert files(project / "out") == ["__init__.py", "models.py", "own.py", "u.py"]


def test_output_depends_on_nothing_but_the_input(project: Path, run: Run) -> None:
    run("--out", "first")
    (project / "schema" / "0_noise.sql").write_text("create table noise (x int); drop table noise;")
    run("--out", "second")
    first, second = (
        {path.name: path.read_bytes() for path in (project / name).iterdir()} for name in ("first", "second")
    )
    assert first == second


def test_the_answer_can_be_json(project: Path, run: Run) -> None:
    document = json.loads(run("--json").output)
    assert sorted(Path(name).name for name in document["files"]) == [
        "__init__.py",
        "models.py",
        "t.py",
    ]
    assert len(document["stale"]) == 3


def test_the_configuration_is_found_in_the_sql_folder(project: Path, run: Run) -> None:
    (project / "sql").mkdir()
    for name in ("sqlc.yaml", "schema", "queries"):
        (project / name).rename(project / "sql" / name)
    assert run().exit_code == 0
    assert (project / "sql" / "out" / "t.py").exists()


def test_files_folders_and_patterns_are_loaded_in_the_order_given(project: Path, run: Run) -> None:
    (project / "types.sql").write_text("create domain later as int;")
    (project / "schema" / "3_use.sql").write_text("create table u (x later);")
    (project / "schema" / "3_use.down.sql").write_text("drop table u;")
    (project / "schema" / "4_goose.sql").write_text(
        "-- +goose Up\ncreate table g (x int);\n-- +goose Down\ndrop table g;"
    )
    config = CONFIG.replace("schema: schema", "schema: [types.sql, 'schema/[12]_*.sql', schema]")
    (project / "sqlc.yaml").write_text(config)
    (project / "queries" / "u.sql").write_text("-- name: ListU :many\nselect u.x, g.x as y from u, g;\n")
    result = run()
    assert result.exit_code == 0, result.output


def test_several_entries_have_databases_of_their_own(project: Path, run: Run) -> None:
    (project / "other").mkdir()
    (project / "other" / "schema.sql").write_text("create table t (a text not null);")
    (project / "other" / "q.sql").write_text("-- name: ListT :many\nselect a from t;")
    (project / "sqlc.yaml").write_text(
        CONFIG
        + """
  - engine: postgresql
    schema: other/schema.sql
    queries: other/q.sql
    codegen:
      - {plugin: mine, out: out2, options: {package: out2, template: psycopg}}
      - {plugin: mine, out: out3, options: {package: out3}}
"""
    )
    assert run().exit_code == 0
    assert "list[str]" in (project / "out2" / "q.py").read_text()
    assert "import sqlalchemy" in (project / "out3" / "q.py").read_text()
    result = run("--out", "x")
    assert result.exit_code == 1
    assert "one codegen entry" in result.output


def test_an_existing_database_is_read_and_left_as_it_is(
    project: Path, run: Run, empty_database: Database
) -> None:
    with connect(empty_database.dsn) as conn:
        conn.execute("create table t (a int, b uuid not null)")
        before = conn.execute("select count(*) from pg_class").fetchone()
        assert run("--existing", dsn=empty_database.dsn).exit_code == 0
        assert conn.execute("select count(*) from pg_class").fetchone() == before
    assert "a: int | None\n    b: uuid.UUID\n" in (project / "out" / "models.py").read_text()


def test_a_database_that_takes_no_temporary_function_is_an_error(
    project: Path, run: Run, empty_database: Database
) -> None:
    """Otherwise every column would count as nullable, and nobody would know why."""
    with connect(empty_database.dsn) as conn:
        conn.execute("create table t (a int, b text)")
        conn.execute(f"alter database {empty_database.name} set default_transaction_read_only = on".encode())
    result = run("--existing", dsn=empty_database.dsn)
    assert result.exit_code == 1
    assert "t.sql:1: query ListT" in result.output
    assert "temporary" in result.output


def test_scratch_databases_are_dropped_also_after_an_error(
    project: Path, run: Run, server: TestServer
) -> None:
    (project / "schema" / "3_bad.sql").write_text("create table;")
    assert run().exit_code == 1
    with connect(server.dsn("postgres")) as conn:
        left = conn.execute("select datname from pg_database where datname like 'fairq\\_gen\\_%'").fetchall()
    assert left == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("schema/3.sql", "select 1;\nselect oops;", ["3.sql:2", "oops"]),
        (
            "queries/t.sql",
            "-- name: A :one\nselect a\n  from nowhere",
            ["queries/t.sql:3: query A", "nowhere"],
        ),
        (
            "queries/t.sql",
            "-- name: A :one\nselect $1 is null as x",
            ["t.sql:1: query A", "could not determine", "::text"],
        ),
        (
            "queries/t.sql",
            "-- name: A :exec\ndelete from t returning a;\n\n-- name: A :one\nselect 1",
            ["name is taken"],
        ),
        (
            "queries/t.sql",
            "-- name: A :one\nselect row(1, 2) as r",
            ["query A", "column r", "record", "name the columns"],
        ),
        ("queries/t.sql", "-- name: A :one\nselect pg_notify('a', 'b')", ["void", ":exec"]),
        ("queries/t.sql", "-- name: A :many\nupdate t set a = 1", ["no columns", ":execrows"]),
        ("queries/t.sql", "-- name: A :many\nselect * from pg_stat_get_activity(null)", ["* from function"]),
        (
            "queries/t.sql",
            "-- name: A :many\nselect 1, s.* from t, lateral unnest(array[1]) s",
            ["function s"],
        ),
        (
            "queries/t.sql",
            "-- name: A :many\nselect * from t left join rows from (now()) x on true",
            ["tion x"],
        ),
        ("queries/t.sql", "-- name: A :one\nselect '{}'::aclitem[] as x", ["aclitem", "cast it"]),
        (
            "queries/t.sql",
            "-- name: A :copyfrom\ninsert into t (a) values ($1 + 1)",
            [":copyfrom", "as they are"],
        ),
        ("queries/t.sql", "-- name: A :copyfrom\nselect 1", [":copyfrom needs an insert"]),
        ("queries/t.sql", "-- name: A :one\n-- fairq: not null x\nselect a from t", ["names x", "known: a"]),
        ("queries/t.sql", "-- name: A :one\n-- fairq: notnull a\nselect a from t", ["not understood"]),
        ("queries/t.sql", f"-- name: A :one\nselect 1{' + 1' * 3000} as x", ["query A", "nested too deeply"]),
        ("queries/models.sql", "-- name: A :one\nselect 1 as x", ["models.py", "rename"]),
        ("sqlc.yaml", "version: '1'\nsql: []", ["version"]),
        ("sqlc.yaml", CONFIG.replace("psycopg", "psycopgg"), ["template"]),
        ("sqlc.yaml", CONFIG.replace("postgresql", "mysql"), ["engine"]),
        ("sqlc.yaml", CONFIG.replace("queries: queries", "queries: nope"), ["nope"]),
        ("sqlc.yaml", CONFIG.replace("sqlc-gen-fairq", "sqlc-gen-go"), ["no codegen entry"]),
        ("sqlc.yaml", "{", ["cannot be read"]),
        ("sqlc.yaml", CONFIG.replace("plugins: [", "plugins: [5, "), ["`plugins` must be a list of maps"]),
        ("sqlc.yaml", CONFIG.replace("mine, process", "[1], process"), ["no codegen entry"]),
        ("sqlc.yaml", CONFIG.replace("{cmd: ./bin/sqlc-gen-fairq}", "5"), ["no codegen entry"]),
        ("sqlc.yaml", CONFIG + "  - 5", ["`sql` must be a list of maps"]),
        ("sqlc.yaml", CONFIG.replace("package:", "5: 6, package:"), ["unknown option 5"]),
    ],
)
def test_an_error_names_file_line_and_query(
    project: Path, run: Run, file: str, text: str, said: list[str]
) -> None:
    (project / file).write_text(text)
    # Hypothesis raises the limit for its examples, and in this process it stays raised.
    sys.setrecursionlimit(2000)
    result = run()
    assert result.exit_code == 1
    for part in said:
        assert part in result.output
    assert not (project / "out").exists()


@pytest.mark.parametrize("file", ["sqlc.yaml", "schema/1_table.sql", "queries/t.sql"])
def test_files_are_utf_8_whatever_the_locale_says_with_or_without_its_mark(
    project: Path, run: Run, file: str
) -> None:
    (project / file).write_text((project / file).read_text(), "utf-8-sig")
    assert run().exit_code == 0
    (project / file).write_bytes(b"\xff")
    result = run()
    assert result.exit_code == 1
    assert f"{file}: cannot be read" in result.output


def test_all_queries_with_errors_are_told_at_once(project: Path, run: Run) -> None:
    (project / "queries" / "t.sql").write_text("-- name: A :one\nselect x\n\n-- name: B :one\nselect y\n")
    (project / "queries" / "u.sql").write_text("select 1")
    result = run()
    assert all(
        part in result.output for part in ('"x" does not exist', '"y" does not exist', "u.sql:1: a statement")
    )


def test_it_starts_a_server_of_its_own(project: Path) -> None:
    result = CliRunner().invoke(gen, [])
    assert result.exit_code == 0, result.output
    assert "3 files generated, 3 changed" in result.output


def test_a_dsn_in_the_environment_is_not_taken(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes and drops a database, so only on a server that is named."""
    monkeypatch.setenv("FAIRQ_DSN", "postgresql://nobody:secret@127.0.0.1:1/none")
    assert CliRunner().invoke(gen, []).exit_code == 0


def test_gen_is_a_command_of_fairq() -> None:
    from fairq.cli import main

    context = click.Context(main)
    assert main.get_command(context, "gen") is gen
