"""A queue for workers to work on."""

from __future__ import annotations

import pytest

from tests.support.database import Database
from tests.worker.running import EFFECTS, Desk


@pytest.fixture
def desk(database: Database) -> Desk:
    conn = database.connect(autocommit=True)
    conn.execute(EFFECTS)
    return Desk(database.dsn, conn)
