"""Derived state is made anew from the tasks: when it is lost, and when a dump is restored elsewhere."""

import subprocess
from itertools import pairwise

import psycopg
import pytest

from fairq import embedded
from tests.support.calls import (
    Conn,
    at,
    create,
    create_many,
    finish,
    maintain,
    needs_one_order,
    one,
    pop,
    promote,
    register,
    run,
    state,
)
from tests.support.database import Database
from tests.support.moves import set_shards
from tests.support.server import private_server

pytestmark = pytest.mark.new_database


@pytest.mark.parametrize("lost", ["lanes", "ticks", "rings", "lanes, fairq.ticks, fairq.rings"])
def test_lost_state_is_made_anew(database: Database, lost: str) -> None:
    """I11."""
    conn = database.connect(autocommit=True)
    run(conn, "update fairq.queues set ready_target = 3 where queue = 'default'")
    at(conn, "12:00:00")
    worker = register(conn)
    ids = [create(conn, f"g{n % 4}", priority=n % 3) for n in range(40)]
    scheduled = create(conn, run_at="2030-01-01 12:00:10+00")
    held = pop(conn, worker, 5)
    run(conn, f"truncate fairq.{lost}")
    if "ticks" not in lost:
        # Only the tick is what the engine looks at; an operator who lost something else removes it.
        run(conn, "delete from fairq.ticks")
    served = [id_ for _ in range(20) for id_ in pop(conn, worker, 3)]
    assert sorted(served + held) == ids
    at(conn, "12:00:10")
    assert pop(conn, worker, 1) == [scheduled]


def test_the_order_survives_a_rebuild_for_groups_that_wait(database: Database) -> None:
    """I3: backlogged groups keep their turns."""
    conn = database.connect(autocommit=True)
    needs_one_order(conn)
    run(conn, "update fairq.queues set ready_target = 5 where queue = 'default'")
    worker = register(conn)
    for group in "abc":
        create_many(conn, group, 10)
    groups: list[str] = []
    for n in range(30):
        if n % 4 == 3:
            run(conn, "delete from fairq.ticks")
        groups += [r[0] for r in run(conn, "select group_key from fairq.pop_tasks('default', 1, %s)", worker)]
    assert len(groups) == 30
    for group in "abc":
        places = [n for n, g in enumerate(groups) if g == group]
        assert max(b - a for a, b in pairwise(places)) <= 5


def test_waiting_wishes_to_cancel_survive_a_rebuild(database: Database) -> None:
    conn = database.connect(autocommit=True)
    worker = register(conn)
    promote(conn)
    first, second = create_many(conn, "bob", 2)
    run(conn, "select fairq.cancel_task(%s)", first)
    run(conn, "truncate fairq.rings, fairq.lanes, fairq.ticks")
    assert pop(conn, worker, 10) == [second]
    assert state(conn, first) == "cancelled"


def test_caps_are_counted_from_the_tasks(database: Database) -> None:
    """I7."""
    conn = database.connect(autocommit=True)
    worker = register(conn)
    run(conn, """select fairq.configure_group('default', 'bob', '{"max_running": 2}')""")
    ids = create_many(conn, "bob", 5)
    assert pop(conn, worker, 10) == ids[:2]
    run(conn, "truncate fairq.rings, fairq.lanes, fairq.ticks")
    assert pop(conn, worker, 10) == []
    assert finish(conn, worker, ids[:1]) == ids[:1]
    assert pop(conn, worker, 10) == ids[2:3]


def tick_is_trusted(conn: Conn) -> bool:
    return bool(
        one(
            conn,
            "select count(*) from fairq.domains d cross join fairq._tick(d.shard_no, d.queue) k"
            " where d.queue = 'default'",
        )
    )


@pytest.mark.parametrize("way", ["vacuum freeze", "vacuum full", "cluster"])
def test_ticks_survive_maintenance_of_their_table(database: Database, way: str) -> None:
    conn = database.connect(autocommit=True)
    create(conn)
    promote(conn)
    run(conn, f"{way} fairq.ticks" + (" using ticks_pkey" if way == "cluster" else ""))
    assert tick_is_trusted(conn)


def test_ticks_written_in_savepoints_are_trusted(database: Database) -> None:
    """The row's xmin is the subtransaction's then."""
    conn, other = database.connect(), database.connect(autocommit=True)
    create(conn)
    promote(conn)
    run(conn, "savepoint a")
    run(conn, "savepoint b")
    create(conn, "alice")
    promote(conn)
    assert tick_is_trusted(conn)
    run(conn, "release savepoint b")
    assert tick_is_trusted(conn)
    conn.commit()
    assert tick_is_trusted(other)
    with conn.transaction(), conn.transaction():
        create(conn, "carol")
        promote(conn)
    conn.commit()
    assert tick_is_trusted(other)
    assert len(pop(other, register(other), 10)) == 3


def program(name: str) -> str:
    found = embedded.find_binaries().bin_dir / name
    if not found.exists():
        pytest.skip(f"there is no {name} beside the server's programs")
    return str(found)


def test_a_dump_restored_where_transaction_ids_are_lower_works_by_itself() -> None:
    """I11: every stored transaction id lies in the future there. In the database next door, too."""
    pg_dump, psql = program("pg_dump"), program("psql")
    with private_server() as old, private_server() as new:
        with psycopg.connect(old.dsn("fairq"), autocommit=True) as conn:
            conn.execute(
                "do $$ begin for i in 1 .. 3000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            run(conn, "update fairq.queues set ready_target = 4 where queue = 'default'")
            worker = register(conn, lease="1 day")
            ids = [create(conn, f"g{n % 3}") for n in range(12)]
            held = pop(conn, worker, 3)
            run(conn, "select fairq.cancel_task(%s)", ids[-1])
            for _ in range(3):
                maintain(conn)
            horizon = one(conn, "select max(next_xid::text::bigint) from fairq.ticks")
        dump = subprocess.run(
            [pg_dump, "--no-owner", old.dsn("fairq")], capture_output=True, text=True, check=True
        ).stdout
        for server in (old, new):
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute("create database restored template template0")
            restore = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.dsn("restored")]
            subprocess.run(restore, input=dump, capture_output=True, text=True, check=True)
            with psycopg.connect(server.dsn("restored"), autocommit=True) as conn:
                if server is new:
                    assert int(one(conn, "select pg_current_xact_id()::text::bigint")) < horizon
                assert not tick_is_trusted(conn)
                late = create(conn, "late")
                served = [id_ for _ in range(6) for id_ in pop(conn, worker, 2)]
                assert sorted([*held, *served]) == sorted([*ids[:-1], late])
                assert tick_is_trusted(conn)
                assert state(conn, ids[-1]) == "cancelled"
                assert finish(conn, worker, held) == sorted(held)
                # Sweeping starts anew as well.
                for n in range(10):
                    finish(conn, worker, [create(conn, f"g{n}")] and pop(conn, worker, 1))
                for _ in range(4):
                    maintain(conn)
                assert one(conn, "select count(*) from fairq.ticks where queue = 'default'") == one(
                    conn, "select shard_count from fairq.settings"
                )


def test_a_dump_taken_between_the_end_of_a_task_and_the_next_promotion_keeps_what_waits_for_its_key() -> None:
    """I11: the ring that tells of the free key is in the dump, and means nothing where it is restored."""
    pg_dump, psql = program("pg_dump"), program("psql")
    with private_server() as server:
        with psycopg.connect(server.dsn("fairq"), autocommit=True) as conn:
            set_shards(conn, 1)
            worker = register(conn, lease="1 day")
            first, held = create(conn, concurrency_key="free"), create(conn, concurrency_key="held")
            assert pop(conn, worker, 10) == [first, held]
            behind = [create(conn, group, concurrency_key="free") for group in ("bob", "bob", "alice")]
            behind_held = create(conn, concurrency_key="held")
            assert pop(conn, worker, 10) == []
            assert finish(conn, worker, [first]) == [first]
        dump = subprocess.run(
            [pg_dump, "--no-owner", server.dsn("fairq")], capture_output=True, text=True, check=True
        ).stdout
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute("create database restored template template0")
        restore = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.dsn("restored")]
        subprocess.run(restore, input=dump, capture_output=True, text=True, check=True)
        with psycopg.connect(server.dsn("restored"), autocommit=True) as conn:
            served: list[int] = []
            for _ in behind:
                popped = pop(conn, worker, 10)
                assert len(popped) == 1, "one at a time, as ever"
                served += finish(conn, worker, popped)
            assert sorted(served) == behind
            assert pop(conn, worker, 10) == []
            assert finish(conn, worker, [held]) == [held]
            assert pop(conn, worker, 10) == [behind_held]
