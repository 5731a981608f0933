"""Load the engine as it is in `sql/` into an empty database, set up as this test run wants it."""

import os
from typing import Any

import psycopg

from fairq.install import load_sql


def load_schema(conn: psycopg.Connection[Any]) -> None:
    """`fairq.install.load_sql`, and as many shards as FAIRQ_TEST_SHARDS says (`make test-shards`)."""
    load_sql(conn)
    shards = os.environ.get("FAIRQ_TEST_SHARDS")
    if shards:
        conn.execute("select fairq.configure_cluster(p_shard_count => %s::int)", [int(shards)])
    conn.commit()
