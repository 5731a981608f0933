"""The pages about the plugin and the sqlalchemy template are true: options, types, and the example."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import psycopg
import pytest
import sqlalchemy

from fairq.codegen.model import Catalog, Column, Options
from fairq.codegen.plugin import parse_type
from fairq.codegen.sqlalchemy_types import PyType, python_type
from tests.codegen.plugin import sqlc
from tests.support.database import Database

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "codegen-sqlalchemy.md").read_text()
HOW_TO = (DOCS / "how-to" / "use-with-sqlc.md").read_text()
OPTIONS = (
    {"package", "out", "emit_exact_table_names", "emit_sync_querier", "emit_async_querier"}
    | {"emit_pydantic_models", "emit_str_enum", "query_parameter_limit", "inflection_exclude_table_names"}
    | {"template", "strict", "types"}
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_every_option_of_the_reference_and_ours_is_documented() -> None:
    rows = re.findall(r"^- `(\w+)`", REFERENCE, re.MULTILINE)
    assert set(rows) >= OPTIONS


def test_the_table_of_types_is_what_is_generated() -> None:
    table = REFERENCE.split("## Types")[1]
    rows = re.findall(r"^- (`.*`): `(\S+)`$", table, re.MULTILINE)
    assert len(rows) >= 14
    for spellings, expected in rows:
        for text in re.findall(r"`([^`]+)`", spellings):
            type_, _ = parse_type("", text)
            found = python_type(Column("c", type_, not_null=True), Catalog(), Options())
            assert found == PyType(expected), text


@pytest.mark.skipif(bool(sqlc.why_sqlc_cannot_run()), reason=sqlc.why_sqlc_cannot_run())
def test_the_example_generates_and_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    empty_database: Database,
    capsys: pytest.CaptureFixture[str],
) -> None:
    schema, queries = blocks(HOW_TO, "sql")
    config = blocks(HOW_TO, "yaml")[0]
    (program,) = blocks(HOW_TO, "python")
    for name, text in {"schema.sql": schema, "query.sql": queries, "sqlc.yaml": config}.items():
        (tmp_path / name).write_text(text)
    done = sqlc.command("generate", tmp_path)
    assert done.returncode == 0, done.stderr

    with empty_database.connect() as conn:
        conn.execute(schema.encode())
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(empty_database.dsn),
        poolclass=sqlalchemy.NullPool,
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sqlalchemy, "create_engine", lambda _url: engine)
    importlib.invalidate_caches()
    try:
        exec(compile(program, "use-with-sqlc.md", "exec"), {})
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "authors"]:
            del sys.modules[name]
    assert capsys.readouterr().out == "['Ann']\n"
