"""The engine in a database whose tables somebody publishes for logical replication."""

import pytest
from psycopg.types.json import Jsonb

from tests.support.calls import (
    Conn,
    at,
    create,
    finish,
    maintain,
    one,
    pop,
    promote,
    register,
    release,
    run,
    state,
)
from tests.support.database import Database

pytestmark = pytest.mark.new_database

PUBLICATIONS = [
    "for all tables",
    "for all tables with (publish_via_partition_root = true)",
    "for tables in schema fairq",
]


def use_everything(conn: Conn, day: int) -> None:
    """Calls that change or remove what is stored, each of them, and the upkeep after it."""

    def clock(time: str) -> None:
        run(conn, "select set_config('fairq.now', %s, false)", f"2030-01-{day:02d} {time}+00")

    clock("12:00:00")
    worker, lost = register(conn, lease="1 hour"), register(conn, lease="10 seconds")
    done, failed, retried, released, cancelled = (create(conn, f"g{n}") for n in range(5))
    keyed = [create(conn, "keyed", concurrency_key="k", idempotency_key=f"{day} {n}") for n in range(3)]
    late = create(conn, "late", expires_at=f"2030-01-{day:02d} 12:00:10+00")
    scheduled = create(conn, "scheduled", run_at=f"2030-01-{day:02d} 12:00:10+00")
    promote(conn)
    run(conn, "select fairq.cancel_task(%s)", cancelled)
    assert one(conn, "select fairq.watch_task(%s)", done)
    assert sorted(pop(conn, worker, 20)) == [done, failed, retried, released, keyed[0], late]
    assert finish(conn, worker, [done, late]) == [done, late]
    assert finish(conn, worker, [failed], "failed") == [failed]
    assert finish(conn, worker, [retried], "retry") == [retried]
    assert release(conn, worker, [released]) == [released]
    assert one(conn, "select fairq.retry_task(%s)", failed)
    for done_so_far in (1, 2):
        query = "select fairq.report_progress(%s, array[%s::bigint], array[1], array[%s::float8])"
        run(conn, query, worker, keyed[0], done_so_far)
        clock(f"12:00:0{done_so_far}")
    run(conn, "select fairq.cancel_task(%s)", keyed[1])
    run(
        conn,
        "select fairq.configure_queue('default', %s)",
        Jsonb({"group_max_running": 3, "max_running": 50}),
    )
    run(conn, "select fairq.configure_group('default', 'keyed', %s)", Jsonb({"rate_limit": 10}))
    run(conn, "select fairq.configure_key('k', %s)", Jsonb({"max_running": 2}))
    run(conn, "select fairq.pause_group('default', 'g2')")
    assert sorted(pop(conn, lost, 20)) == [failed, released, keyed[2]]
    run(conn, "select fairq.resume_group('default', 'g2')")
    assert one(conn, "select fairq.purge_group('default', 'g2')") == 1
    for second in (30, 31, 32):
        clock(f"12:00:{second}")
        run(conn, "select fairq.heartbeat(%s)", worker)
        maintain(conn)
    assert sorted(pop(conn, worker, 20)) == [failed, released, keyed[2], scheduled]
    assert finish(conn, worker, [keyed[0], scheduled]) == [keyed[0], scheduled]
    run(
        conn,
        "select fairq.configure_queue('default', %s)",
        Jsonb({"group_max_running": None, "max_running": None}),
    )
    run(conn, "select fairq.retire_worker(%s)", worker)
    assert one(conn, "select fairq.purge_group('default', 'keyed')") == 1
    assert {state(conn, i) for i in (cancelled, retried, *keyed[1:])} == {"cancelled"}
    # History that is past its retention, and what nobody needs any more.
    run(conn, "select fairq.configure_queue('default', %s)", Jsonb({"retention": "1 second"}))
    clock("23:00:00")
    maintain(conn)
    maintain(conn)
    run(conn, "select fairq.configure_queue('default', %s)", Jsonb({"retention": "7 days"}))
    run(conn, "select fairq.configure_group('default', 'keyed', %s)", Jsonb({"rate_limit": None}))
    run(conn, "select fairq.configure_key('k', %s)", Jsonb({"max_running": None}))
    for group in ("g1", "g3"):
        assert one(conn, "select fairq.purge_group('default', %s)", group) == 1


@pytest.mark.parametrize("tables", PUBLICATIONS)
def test_every_table_may_be_published(database: Database, tables: str) -> None:
    """A row that is changed or removed needs an identity then, also in a day of the history made later."""
    conn = database.connect(autocommit=True)
    at(conn, "12:00:00")
    run(conn, f"create publication everything {tables}")
    # The history of the first tasks is in no day's partition; that of the second in one made by the first.
    for day in (1, 2):
        use_everything(conn, day)
