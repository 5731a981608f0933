"""Tests that also run with several shards (`make test-shards`).

Each shard has an order of its own. A test about the order of several groups gives them names of one shard,
and then what it says holds however many there are.
"""

import os
from typing import Any

import psycopg
import pytest

from tests.properties.model import shard_of

# Where a page shows in which order it works, it shows one shard.
shows_one_shard = pytest.mark.skipif(
    "FAIRQ_TEST_SHARDS" in os.environ, reason="the page shows the order of one shard"
)


def shard_count(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select shard_count from fairq.settings").fetchone()
    assert row is not None
    return int(row[0])


def neighbours(conn: psycopg.Connection[Any], *names: str) -> list[str]:
    """The names, with a number appended where needed to put them in the first shard."""
    count = shard_count(conn)
    return [
        next(each for n in range(10**6) if shard_of(each := f"{name}{n or ''}", count) == 0) for name in names
    ]
