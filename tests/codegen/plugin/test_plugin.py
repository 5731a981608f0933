"""The process plugin: what it reads and writes, and what it says when it cannot generate."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairq.codegen import plugin, protocol
from fairq.codegen.model import GenerationError
from tests.codegen.plugin import sqlc
from tests.support.database import Database

needs_sqlc = pytest.mark.skipif(bool(sqlc.why_sqlc_cannot_run()), reason=sqlc.why_sqlc_cannot_run())
PLUGIN = Path(sqlc.SCRIPTS, "sqlc-gen-fairq")


def request(*queries: dict[str, Any], options: dict[str, Any] | None = None, **catalog: Any) -> bytes:
    """A request as sqlc writes it in JSON, with `queries` on a schema `public`."""
    given = {"package": "db", "emit_sync_querier": True, **(options or {})}
    message = {
        "settings": {"engine": "postgresql"},
        "catalog": {"default_schema": "public", "schemas": [{"name": "public", **catalog}]},
        "queries": [
            {"filename": "query.sql", "cmd": ":one", "text": "select 1", **query} for query in queries
        ],
        "sqlc_version": "v1.31.1",
        "plugin_options": base64.b64encode(json.dumps(given).encode()).decode(),
    }
    return json.dumps(message).encode()


def column(name: str, type_: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": {"name": type_}, "not_null": True, **more}


def failure(data: bytes) -> GenerationError:
    with pytest.raises(GenerationError) as caught:
        plugin.respond(data)
    return caught.value


def run(data: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The installed program, with an environment as empty as sqlc's."""
    return subprocess.run(
        [PLUGIN, *arguments], input=data, capture_output=True, env={"SQLC_VERSION": "v1.31.1"}
    )


def test_the_program_answers_in_the_form_of_the_request_with_nothing_else_on_stdout() -> None:
    as_json = request({"name": "GetOne", "columns": [column("one", "int")]})
    answers = []
    for data in (as_json, sqlc.as_protobuf(as_json)):
        done = run(data, "/plugin.CodegenService/Generate")
        assert (done.returncode, done.stderr) == (0, b"")
        assert protocol.is_json(done.stdout) == protocol.is_json(data)
        answers.append(sqlc.files_of(done.stdout))
    assert answers[0] == answers[1]
    assert set(answers[0]) == {"models.py", "query.py"}


def test_a_failing_request_writes_to_stderr_only_and_exits_1() -> None:
    done = run(
        request({"name": "GetOne", "columns": [column("one", "any")]}), "/plugin.CodegenService/Generate"
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"query GetOne" in done.stderr
    assert b"hint:" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("data", [b"\x0a\xff", b"{", b'{"queries": 5}', b"select 1"])
def test_an_invalid_request_is_an_error_with_a_hint(data: bytes) -> None:
    done = run(data)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"request on stdin" in done.stderr
    assert b"Traceback" not in done.stderr


def test_another_method_than_generate_exits_2() -> None:
    done = run(b"", "--version")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"sqlc starts this program" in done.stderr


def test_unknown_fields_of_a_newer_sqlc_are_skipped() -> None:
    message = json.loads(request({"name": "GetOne", "columns": [column("one", "int", sparkle=3)]}))
    message["moon"] = {"phase": "full"}
    assert "query.py" in sqlc.respond(json.dumps(message).encode())


def test_the_canonical_json_name_of_parameters_is_read_too() -> None:
    parameter = {"number": 1, "column": column("id", "int")}
    for name in ("params", "parameters"):
        files = sqlc.respond(request({"name": "Do", "cmd": ":exec", name: [parameter]}))
        assert "def do(self, *, id: int) -> None:" in files["query.py"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"package": None}, "'package' is missing"),
        ({"emit_asycn_querier": True}, "did you mean emit_async_querier?"),
        ({"banana": True}, "known options: "),
        ({"emit_sync_querier": "yes"}, "should be true or false"),
        ({"query_parameter_limit": -1}, "invalid query parameter limit"),
        ({"query_parameter_limit": True}, "should be a whole number"),
        ({"inflection_exclude_table_names": "data"}, "should be an array"),
        ({"template": "cobol"}, "should be one of"),
        ({"types": {"a": 1}}, "options.types.a should be a text"),
        ({"package": 3}, "should be a text"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(options: dict[str, Any], words: str) -> None:
    assert words in str(failure(request(options=options)))


@pytest.mark.parametrize("size", [15, 123])
def test_a_protobuf_request_is_told_from_json_by_its_first_byte(size: int) -> None:
    """Settings are the first field, with tag 10, a line break; 123 bytes of them have a brace as length."""
    message = protocol.read_request(request())
    message.settings.CopyFrom(type(message.settings)(engine="postgresql"))
    message.settings.version = "v" * (size - message.settings.ByteSize() - 2)
    data = message.SerializeToString()
    assert data[:2] == bytes([10, size])
    assert protocol.read_request(data) == message
    assert "models.py" in sqlc.respond(data)


def test_options_that_are_not_a_map_are_an_error() -> None:
    message = protocol.read_request(request())
    message.plugin_options = b"[1]"
    assert "must be a map" in str(failure(message.SerializeToString()))


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        ("any", "sqlc says 'any'"),
        ("anyelement", "cast it in the SQL"),
        ("record", "is a whole record"),
        ("point", "types: {point: str}"),
        ("int4range", "has type int4range"),
        ("void", "use :exec"),
        ("audit.amount", "has type audit.amount"),
    ],
)
def test_an_untypable_column_is_an_error_with_the_query_and_a_hint(type_: str, words: str) -> None:
    error = failure(request({"name": "GetOne", "columns": [column("one", type_)]}))
    assert error.query == "GetOne"
    assert words in str(error)
    assert error.hint


def test_a_parameter_that_cannot_be_typed_is_named() -> None:
    named = {"number": 1, "column": column("since", "anyarray")}
    unnamed = {"number": 2, "column": column("", "any")}
    assert "parameter since" in str(failure(request({"name": "Do", "cmd": ":exec", "params": [named]})))
    assert "parameter $2" in str(failure(request({"name": "Do", "cmd": ":exec", "params": [unnamed]})))


def test_a_table_column_that_cannot_be_typed_is_refused_where_a_query_returns_it() -> None:
    """A whole schema is no reason to fail: fairq's own has arrays of composite types."""
    at = column("at", "point", is_array=True, array_dims=1)
    table = {"rel": {"schema": "public", "name": "places"}, "columns": [at, column("name", "text")]}
    models = sqlc.respond(request(tables=[table]))["models.py"]
    assert "    at: Any\n    name: str\n" in models
    assert "from typing import Any" in models
    query = {"name": "GetOne", "columns": [at]}
    assert "column at has type point" in str(failure(request(query, tables=[table])))


def test_a_composite_type_is_refused_because_drivers_disagree_about_it() -> None:
    data = request({"name": "GetOne", "columns": [column("one", "pair")]}, composite_types=[{"name": "pair"}])
    assert "has the composite type public.pair" in str(failure(data))


def test_strict_gives_any_where_the_default_gives_an_error() -> None:
    for type_ in ("any", "anyelement", "record", "point", "int4range", "void", "audit.amount", "_int4"):
        data = request({"name": "GetOne", "columns": [column("one", type_)]}, options={"strict": True})
        assert "def get_one(self) -> Optional[Any]:" in sqlc.respond(data)["query.py"]


def test_remarks_in_a_query_correct_what_sqlc_says_about_null_unless_strict() -> None:
    columns = [column("a", "int"), {**column("b", "int"), "not_null": False}]
    query = {"name": "Get", "columns": columns, "comments": [" fairq: nullable a", " fairq: not null b"]}
    assert "    a: Optional[int]\n    b: int\n" in sqlc.respond(request(query))["query.py"]
    strict = sqlc.respond(request(query, options={"strict": True}))["query.py"]
    assert "    a: int\n    b: Optional[int]\n" in strict


def test_void_is_fine_where_nothing_is_returned() -> None:
    files = sqlc.respond(request({"name": "Nap", "cmd": ":exec", "columns": [column("pg_sleep", "void")]}))
    assert "def nap(self) -> None:" in files["query.py"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"cmd": ":copyfrom"}, "template: psycopg"),
        ({"cmd": ":batchexec"}, "unknown command :batchexec"),
        ({"cmd": ":one"}, "returns columns"),
        ({"cmd": ":many"}, "returns columns"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_command_that_cannot_be_generated_is_an_error(
    query: dict[str, Any], words: str, strict: bool
) -> None:
    error = failure(request({"name": "Do", **query}, options={"strict": strict}))
    assert words in str(error)
    assert error.query == "Do"


def test_another_engine_is_an_error() -> None:
    message = json.loads(request())
    message["settings"]["engine"] = "mysql"
    assert "engine 'mysql' is not supported" in str(failure(json.dumps(message).encode()))


def test_two_classes_of_one_name_are_an_error() -> None:
    catalog: dict[str, Any] = {
        "tables": [{"rel": {"name": "statuses"}, "columns": [column("id", "int")]}],
        "enums": [{"name": "status", "vals": ["on"]}],
    }
    assert "class Status would be made for an enum and for table public.statuses" in str(
        failure(request(**catalog))
    )
    assert sqlc.respond(request(**catalog, options={"strict": True}))["models.py"].count("class Status") == 2


def test_two_methods_of_one_name_are_an_error() -> None:
    columns = [column("one", "int")]
    error = failure(request({"name": "GetOne", "columns": columns}, {"name": "get_one", "columns": columns}))
    assert "get_one is also made for query GetOne" in str(error)


def test_a_query_file_named_models_is_an_error() -> None:
    data = request({"name": "GetOne", "filename": "models.sql", "columns": [column("one", "int")]})
    assert "models.sql would be generated as models.py" in str(failure(data))


def test_an_embed_of_an_unknown_table_is_an_error() -> None:
    columns = [column("t", "", embed_table={"name": "t"}), column("one", "int")]
    assert "sqlc.embed(t): there is no such table" in str(
        failure(request({"name": "GetOne", "columns": columns}))
    )


def test_an_empty_parameter_object_is_left_out_unless_strict() -> None:
    query = {"name": "Clear", "cmd": ":exec", "text": "delete from t"}
    plain = sqlc.respond(request(query, options={"query_parameter_limit": 0}))["query.py"]
    assert "def clear(self) -> None:" in plain
    compile(plain, "query.py", "exec")
    strict = sqlc.respond(request(query, options={"query_parameter_limit": 0, "strict": True}))["query.py"]
    assert "def clear(self, arg: ClearParams) -> None:" in strict


def test_classes_without_fields_are_still_python() -> None:
    catalog: dict[str, Any] = {"tables": [{"rel": {"name": "nothings"}}], "enums": [{"name": "none_of_it"}]}
    models = sqlc.respond(request(**catalog))["models.py"]
    compile(models, "models.py", "exec")
    assert models.count("    pass\n") == 2


def test_bytea_under_pydantic_is_bytes_as_pydantic_knows_no_memoryview() -> None:
    query = {"name": "Get", "columns": [column("a", "bytea"), column("b", "int")]}
    assert "    a: memoryview\n" in sqlc.respond(request(query))["query.py"]
    assert (
        "    a: bytes\n" in sqlc.respond(request(query, options={"emit_pydantic_models": True}))["query.py"]
    )


def test_run_reports_a_failure_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{")))
    assert plugin.run([]) == 1
    assert capsys.readouterr().out == ""


def test_without_the_extra_there_is_a_hint_and_no_traceback() -> None:
    program = (
        "import sys; sys.modules['google.protobuf'] = None; from fairq.codegen import plugin; plugin.main()"
    )
    data = request({"name": "GetOne", "columns": [column("one", "int")]})
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b'pip install "fairq[codegen]"' in done.stderr
    assert b"Traceback" not in done.stderr


@needs_sqlc
def test_an_error_names_file_line_and_query_and_sqlc_shows_it(tmp_path: Path) -> None:
    """The request has no lines: the plugin finds the name line in the file itself."""
    (tmp_path / "queries").mkdir()
    (tmp_path / "schema.sql").write_text("create table t (id int primary key);\n")
    (tmp_path / "queries" / "tasks.sql").write_text(
        "-- name: Fine :many\nselect id from t;\n\n-- name: Highest :one\nselect max(id) from t;\n"
    )
    golden = (sqlc.GOLDEN / "types_real" / "sqlc.yaml").read_text()
    (tmp_path / "sqlc.yaml").write_text(golden.replace("queries: query.sql", "queries: queries"))
    done = sqlc.command("generate", tmp_path)
    assert done.returncode == 1
    assert "queries/tasks.sql:4: query Highest: column max has no type" in done.stderr
    assert not list(tmp_path.glob("generated/*"))


@needs_sqlc
def test_a_star_from_a_function_is_refused_where_sqlc_makes_a_record_of_it(tmp_path: Path) -> None:
    (tmp_path / "schema.sql").write_text(
        "create function f(n int) returns table (a int, b text) language sql as 'select 1, null::text';\n"
    )
    (tmp_path / "query.sql").write_text("-- name: Star :many\nselect * from f($1);\n")
    (tmp_path / "sqlc.yaml").write_text((sqlc.GOLDEN / "types_real" / "sqlc.yaml").read_text())
    done = sqlc.command("generate", tmp_path)
    assert done.returncode == 1
    assert "query.sql:1: query Star: column f is a whole record" in done.stderr
    assert "hint: name the columns" in done.stderr


@needs_sqlc
def test_sqlc_knows_what_a_function_returns_with_a_database(tmp_path: Path, empty_database: Database) -> None:
    """Without one the same query is an error; the how-to page gives this as a way out."""
    schema = (
        "create function f(n int) returns table (a int, b text) language sql as 'select 1, null::text';\n"
    )
    (tmp_path / "schema.sql").write_text(schema)
    (tmp_path / "query.sql").write_text("-- name: Pairs :many\nselect t.a, t.b from f($1) as t(a, b);\n")
    config = (sqlc.GOLDEN / "types_real" / "sqlc.yaml").read_text()
    (tmp_path / "sqlc.yaml").write_text(config)
    assert "column a has no type" in sqlc.command("generate", tmp_path).stderr

    with empty_database.connect() as conn:
        conn.execute(schema.encode())
    database = f"    engine: postgresql\n    database:\n      uri: {json.dumps(empty_database.dsn)}\n"
    (tmp_path / "sqlc.yaml").write_text(config.replace("    engine: postgresql\n", database))
    done = sqlc.command("generate", tmp_path)
    assert done.returncode == 0, done.stderr
    generated = (tmp_path / sqlc.OUT / "query.py").read_text()
    assert "    a: Optional[int]\n    b: Optional[str]\n" in generated
