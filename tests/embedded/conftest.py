"""Servers for these tests."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from fairq import embedded

Ask = Callable[[embedded.Server, str], object]


@pytest.fixture
def ask() -> Ask:
    """Run a query on a server, and return the first column of the first row."""

    def ask(server: embedded.Server, query: str) -> object:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            cursor = conn.execute(query)
            row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None

    return ask


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter and write, because pytest's are closed to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="fairq-test-") as place:
        Path(place).chmod(0o777)
        yield Path(place)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data folder that does not exist yet."""
    return tmp_path / "data"
