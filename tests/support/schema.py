"""Load the engine as it is in `sql/` into an empty database, set up as this test run wants it."""

import os
from pathlib import Path
from typing import Any

import psycopg

from fairq.install import load_sql
from tests.support.invariants import FUNCTION
from tests.support.moves import set_shards


def load_schema(conn: psycopg.Connection[Any]) -> None:
    """`load_sql`, with checks of rows and tables, and FAIRQ_TEST_SHARDS shards (test-shards)."""
    load_sql(conn)
    conn.execute((Path(__file__).parent / "checks.sql").read_text())
    conn.execute(FUNCTION.encode())
    shards = os.environ.get("FAIRQ_TEST_SHARDS")
    if shards:
        set_shards(conn, int(shards))
    conn.commit()
