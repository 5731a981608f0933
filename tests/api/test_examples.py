"""The applications in `examples/` pass their own tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.processes import ROOT
from tests.support.server import TestServer


@pytest.mark.parametrize("example", ["fastapi"])
def test_an_example_passes_its_own_tests(server: TestServer, example: str) -> None:
    """Also a worker in a lifespan, and requests in a transaction that is rolled back."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "."],
        cwd=ROOT / "examples" / example,
        env={**os.environ, "FAIRQ_TEST_DSN": server.dsn("postgres"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_page_shows_what_is_in_the_example() -> None:
    example = "".join(file.read_text("utf-8") for file in (ROOT / "examples" / "fastapi").glob("*.py"))
    there = {line.strip() for line in example.replace("shop.", "").splitlines()}
    page = (ROOT / "docs" / "how-to" / "use-with-fastapi.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in there] == []


def test_the_gateway_shares_tokens_by_weight(
    server: TestServer, empty_database: Database, tmp_path: Path
) -> None:
    """Runs only for a short time, so the shares are only approximate."""
    plot = tmp_path / "shares.png"
    ran = subprocess.run(
        [sys.executable, "main.py", "--dsn", empty_database.dsn, "--seconds", "0.6", "--plot", str(plot)],
        cwd=ROOT / "examples" / "llm_gateway",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {line.split()[0]: line.split() for line in ran.stdout.splitlines() if "%" in line}
    assert [rows[tenant][-2] for tenant in ("acme", "globex", "initech")] == ["50.0%", "25.0%", "25.0%"]
    assert all(int(row[2].replace(",", "")) > 0 for row in rows.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
