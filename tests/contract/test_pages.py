"""PostgreSQL understands every statement of the pages: functions, arguments and columns exist."""

import re

import psycopg

from tests.support.database import Database
from tests.support.processes import ROOT

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
# What belongs to somebody else.
FOREIGN = re.compile(r"rebalance_table_shards|\binto orders\b")


def statements() -> list[tuple[str, str]]:
    """Statements with their page's name; psql's variables become numbers."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sql.*?\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            code = re.sub(r"(?<!:):[a-z]+\b", "1", re.sub(r"--.*|@(?=\w)", "", block).replace(" \\gset", ";"))
            found += [
                (page.name, statement)
                for statement in map(str.strip, code.split(";"))
                if re.match(r"(?:select|with|insert|update|delete)\b", statement)
                and "fairq" in statement
                and not FOREIGN.search(statement)
            ]
    return found


def test_statements_of_the_pages_can_be_asked(database: Database) -> None:
    wrong = []
    with database.connect() as conn:
        for page, statement in statements():
            try:
                conn.execute(f"prepare page as {statement}".encode())
                conn.execute("deallocate page")
            except psycopg.Error as exc:
                wrong.append((page, statement, str(exc)))
    assert not wrong
    assert len(statements()) > 100
