"""The SQL on the pages about policies was really run, and what it answers is what they show."""

from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.shards import shows_one_shard
from tests.support.sql_pages import blocks, run

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"


@shows_one_shard
@pytest.mark.parametrize(
    ("page", "answers"),
    [
        ("limit-a-tenant", 8),
        ("budgets", 3),
        ("share-a-resource", 6),
        ("pause-and-resume", 6),
        ("serve-in-order-of-arrival", 2),
        ("uneven-arrivals", 1),
        ("short-tasks-beside-long-ones", 3),
        ("when-a-queue-is-wrong", 2),
    ],
)
def test_examples_answer_what_the_page_says(database: Database, page: str, answers: int) -> None:
    """H12, H15: what each limit is for, shown with calls that were made."""
    conn = database.connect(autocommit=True)
    shown = 0
    for block in blocks((HOW_TO / f"{page}.md").read_text("utf-8")):
        answer = run(conn, block)
        assert block.expected is None or answer == block.expected, f"{page}.md, line {block.line}"
        shown += block.expected is not None
    assert shown == answers
