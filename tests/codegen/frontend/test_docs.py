"""The how-to page, followed to the letter."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fairq.codegen.command import gen
from tests.support.database import Database

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "generate-wrappers.md"


def test_the_how_to_works_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Database
) -> None:
    text = PAGE.read_text()
    files = re.findall(r"`([\w/.]+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == ["sqlc.yaml", "schema/001.sql", "queries/orders.sql"]
    for name, content in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    # The blocks without a file name belong into the query file; `payloads` speaks of a table of its own.
    loading, payloads = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)[-2:]
    with (tmp_path / "queries" / "orders.sql").open("a") as file:
        file.write(f"\n{loading}\n{payloads}")
    (tmp_path / "schema" / "002.sql").write_text(
        "create table jobs (id bigint primary key, payload jsonb not null);"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(gen, ["--dsn", empty_database.dsn])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(gen, ["--dsn", empty_database.dsn, "--check"]).exit_code == 0

    with empty_database.connect(autocommit=True) as schema:
        schema.execute((tmp_path / "schema" / "001.sql").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    names = {"dsn": empty_database.dsn, "customers": ["eve", "zoe"]}
    use, pipeline, load = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with empty_database.connect(autocommit=True) as conn:
        exec(use, names)
        exec(pipeline, {**names, "conn": conn})
        exec(f"from shop.queries import orders\n{load}", {**names, "conn": conn})
        stored = conn.execute("select customer from orders order by id").fetchall()
        assert stored == [("bob",), ("bob",), ("alice",), ("eve",), ("zoe",)]
        existing = CliRunner().invoke(gen, ["--dsn", empty_database.dsn, "--existing", "--check"])
        assert "jobs" in existing.output  # this database has no such table: it was read as it is
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]
