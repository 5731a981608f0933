"""Load the engine as it is in `sql/` into an empty database."""

import os
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg.abc import Query

SQL_DIR = Path(__file__).parents[2] / "sql"


def schema_files() -> list[Path]:
    """Structure in number order, then functions by name, then grants."""
    grants = SQL_DIR / "grants.sql"
    return [
        *sorted((SQL_DIR / "schema").glob("*.sql")),
        *sorted((SQL_DIR / "functions").glob("*.sql")),
        *([grants] if grants.exists() else []),
    ]


def load_schema(conn: psycopg.Connection[Any]) -> None:
    """Run all files in one transaction. Functions may name each other: bodies are checked when they run."""
    with conn.transaction():
        conn.execute("set local check_function_bodies = off")
        for path in schema_files():
            try:
                conn.execute(cast(Query, path.read_text()))
            except psycopg.Error as exc:
                exc.add_note(f"in {path.relative_to(SQL_DIR.parent)}")
                raise
    shards = os.environ.get("FAIRQ_TEST_SHARDS")
    if shards:
        conn.execute("select fairq.configure_cluster(p_shard_count => %s::int)", [int(shards)])
        conn.commit()
