"""A queue for workers to work on."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.support.database import Database, Preparation
from tests.worker.running import EFFECTS, Desk


def effects(conn: psycopg.Connection[Any]) -> None:
    conn.execute(EFFECTS)
    conn.execute("grant all on effects, effects_id_seq to public")


@pytest.fixture
def preparation() -> Preparation:
    return effects


@pytest.fixture
def desk(database: Database) -> Desk:
    """Workers have the role of workers, producers that of applications, and the test itself may observe."""
    conn = database.connect(autocommit=True)
    app = database.connect_as("fairq_enqueue", autocommit=True)
    return Desk(database.dsn_as("fairq_work"), conn, app, database.dsn)
