"""Each benchmark runs once, tiny, so that none rots."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import NAMES, main
from tests.support.database import Database


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs(name: str, empty_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(
        main,
        ["run", name, "--scale", "tiny", "--dsn", empty_database.dsn, "--out", str(out)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    facts, *records = map(json.loads, out.read_text().splitlines())
    assert facts["facts"]["postgresql"]
    assert all(record["value"] >= 0 for record in records)
    assert {record["subject"] for record in records} > {"machine"}
