"""Load the engine as it is in `sql/` into an empty database."""

import os
from typing import Any

import psycopg

from fairq import install


def load_schema(conn: psycopg.Connection[Any]) -> None:
    """The whole engine, and as many shards as FAIRQ_TEST_SHARDS says."""
    install.load_sql(conn)
    shards = os.environ.get("FAIRQ_TEST_SHARDS")
    if shards:
        conn.execute("select fairq.configure_cluster(p_shard_count => %s::int)", [int(shards)])
        conn.commit()
