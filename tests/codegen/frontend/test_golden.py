"""Golden directories of the `psycopg` template: configuration, schema, queries, and the files they give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fairq.codegen.command import gen
from tests.support.mypy import said_of
from tests.support.server import TestServer

GOLDEN = Path(__file__).parents[1] / "golden" / "psycopg"
CASES = sorted(path.parent for path in GOLDEN.glob("*/sqlc.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_generated_files_are_the_golden_ones(case: Path, server: TestServer) -> None:
    """After a wanted change: `fairq gen --config tests/codegen/golden/psycopg/<case>/sqlc.yaml`."""
    arguments = ["--config", str(case / "sqlc.yaml"), "--check", "--dsn", server.dsn("postgres")]
    result = CliRunner().invoke(gen, arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("line_length", [88, 110])
def test_ruff_leaves_generated_files_as_they_are(line_length: int) -> None:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--isolated",
        "--check",
        f"--line-length={line_length}",
    ]
    done = subprocess.run([*command, GOLDEN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_generated_files_pass_strict_type_checks() -> None:
    folders = sorted(path for path in GOLDEN.glob("*/generated"))
    assert len(folders) == len(CASES)
    assert said_of(*folders) == []
