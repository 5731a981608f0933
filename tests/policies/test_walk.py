"""Anything in any order: nothing wrong after any step, and nobody starves at the end."""

import os

import pytest

from tests.support.database import Database
from tests.support.walk import Walk

WALKS = int(os.environ.get("FAIRQ_TEST_WALKS", "2"))


@pytest.mark.parametrize("seed", range(WALKS))
def test_whatever_is_done_nothing_is_lost_doubled_or_stuck(database: Database, seed: int) -> None:
    """I1, I7, I11, I13, I15. In every other walk groups move between shards."""
    Walk(database, seed, moves=seed % 2 == 1).go(60 if WALKS <= 2 else 150)


@pytest.mark.parametrize("seed", range(WALKS // 2))
def test_no_rate_is_exceeded_whatever_is_done(database: Database, seed: int) -> None:
    """I7. Settings change around those of some groups and a user, whose rates stay as they are."""
    Walk(database, seed, moves=seed % 2 == 1, rates_stay=True).go(60 if WALKS <= 2 else 150)
