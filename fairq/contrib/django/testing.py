"""Helpers for the tests of a Django project. Migrations install fairq in the test database.

    from fairq.contrib.django import testing

    class Upload(django.test.TestCase):
        def test_it_is_parsed(self):
            self.client.post("/upload", {"file": "a.pdf"})
            self.assertEqual([each.kind for each in testing.enqueued()], ["shop.tasks.parse"])
            testing.run_tasks()

In a `TestCase` all of it happens in the test's transaction, and is rolled back. A `TransactionTestCase`
commits: use the one here, because Django's only empties the tables of models.
"""

from __future__ import annotations

from typing import Any

from django import test

from fairq import testing
from fairq.contrib.django import database
from fairq.contrib.django.worker import discover

__all__ = ["TransactionTestCase", "enqueued", "reset", "run_tasks"]

# What a project sets up once, and what `fairq.rebuild` makes. All other rows are a test's.
_KEPT = [
    *("schema_version", "settings", "queues", "kinds", "domains", "maintenance", "sweeps"),
    *("ready", "parked", "lanes", "ticks", "rings"),
]


def enqueued(**which: Any) -> list[testing.Enqueued]:
    """The live tasks that the test sees, oldest first, filtered by `kind=`, `queue=` and `group_key=`."""
    found: list[testing.Enqueued] = testing.enqueued(database.connection(), **which)
    return found


def run_tasks(**options: Any) -> list[testing.Ran]:
    """Run all tasks that may run now, in this thread and on the test's connection. Takes the options of
    `fairq.testing.drain`; `at=` moves the clock.
    """
    conn = database.connection()
    if options.get("at") is not None:
        with conn.cursor() as cursor:
            cursor.execute("update fairq.settings set test_clock = true where not test_clock")
    ran: list[testing.Ran] = testing.drain(conn, discover(in_this_thread=True), **options)
    return ran


class TransactionTestCase(test.TransactionTestCase):
    """Django's, which also empties fairq's tables when a test ends."""

    def _fixture_teardown(self) -> None:
        super()._fixture_teardown()
        reset()


def reset() -> None:
    """Remove all tasks, the history and tenants' settings. Queues keep theirs."""
    with database.connection().cursor() as cursor:
        cursor.execute(
            "select c.relname from pg_catalog.pg_class c where c.relnamespace = 'fairq'::regnamespace"
            " and c.relkind in ('r', 'p') and not c.relispartition and c.relname <> all (%s)",
            [_KEPT],
        )
        for (table,) in cursor.fetchall():
            cursor.execute(f'delete from fairq."{table}"')  # noqa: S608  # a name of the catalogue
        cursor.execute("select fairq.rebuild(q.queue) from fairq.queues q where not q.internal")
