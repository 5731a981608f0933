"""The how-to page, followed to the letter."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fairq.cli import main
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
    loading, payloads, shipping = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)[-3:]
    with (tmp_path / "queries" / "orders.sql").open("a") as file:
        file.write(f"\n{loading}\n{payloads}\n{shipping}")
    fairqs_own = CliRunner().invoke(main, ["sql"])
    (tmp_path / "schema" / "000_fairq.sql").write_text(fairqs_own.output)
    (option,) = re.findall(r"```yaml\n( .*?)```", text, re.DOTALL)
    with (tmp_path / "sqlc.yaml").open("a") as file:
        file.write(option)
    (tmp_path / "schema" / "002.sql").write_text(
        "create table jobs (id bigint primary key, payload jsonb not null);"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(gen, ["--dsn", empty_database.dsn])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(gen, ["--dsn", empty_database.dsn, "--check"]).exit_code == 0

    with empty_database.connect(autocommit=True) as schema:
        for name in ("000_fairq.sql", "001.sql"):
            schema.execute((tmp_path / "schema" / name).read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    names = {"dsn": empty_database.dsn, "customers": ["eve", "zoe"]}
    use, pipeline, load = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with empty_database.connect(autocommit=True) as conn:
        exec(use, names)
        exec(pipeline, {**names, "conn": conn})
        exec(f"from shop.queries import orders\n{load}", {**names, "conn": conn})
        stored = conn.execute("select customer from orders order by id").fetchall()
        assert stored == [("bob",), ("bob",), ("alice",), ("eve",), ("zoe",)]
        exec(
            "from shop.queries import orders\nadded = orders.add_order_to_ship(conn, customer='bob')",
            names | {"conn": conn},
        )
        tasks = conn.execute("select group_key, kind, payload from fairq.tasks").fetchall()
        assert tasks == [("bob", "ship", {"order": 6})]
        existing = CliRunner().invoke(gen, ["--dsn", empty_database.dsn, "--existing", "--check"])
        assert "jobs" in existing.output  # this database has no such table: it was read as it is
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]
