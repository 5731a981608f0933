"""Transactions of several calls, and migrations among them: who waits for whom, and who does not."""

import threading

import psycopg
import pytest

from fairq import install
from tests.support.calls import FINISH, Conn, create_each, ending, finish, pop, promote, register, states
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.sessions import (
    call_in_background,
    in_background,
    pid_of,
    result,
    survivor,
    wait_until,
    wait_until_blocked,
)

pytestmark = pytest.mark.new_database


def test_functions_are_replaced_while_workers_run(database: Database) -> None:
    """A migration that replaces every function does not disturb the sessions that call them."""
    stop = threading.Event()
    served: list[int] = []
    created: list[int] = []

    def work() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            worker = register(conn)
            while not stop.is_set():
                created.extend(create_each(conn, "a", "b"))
                served.extend(finish(conn, worker, pop(conn, worker, 10)))

    workers = [call_in_background(work) for _ in range(3)]
    migration = database.connect()
    texts = [
        text.replace("create function", "create or replace function")
        for file in install.sql_files()
        if "create function" in (text := file.read_text("utf-8"))
    ]
    assert len(texts) > 30
    for _ in range(3):
        migration.execute("set check_function_bodies = off")
        for text in texts:
            migration.execute(text.encode())
        migration.commit()
        seen = len(served)
        wait_until(lambda seen=seen: len(served) > seen + 20, "the workers went on")  # type: ignore[misc]
    stop.set()
    for call in workers:
        result(call)
    observer = database.connect(autocommit=True)
    worker = register(observer)
    while held := pop(observer, worker):
        served += finish(observer, worker, held)
    assert sorted(served) == sorted(created)
    assert_consistent(observer)


def test_a_migration_waits_for_a_running_call_of_a_table_and_not_the_other_way_round(
    database: Database,
) -> None:
    """ALTER TABLE waits for an open pop; the session that popped goes on."""
    observer = database.connect(autocommit=True)
    create_each(observer, "g")
    worker = register(observer)
    popper, migration = database.connect(), database.connect()
    held = pop(popper, worker)
    migration.execute("set lock_timeout = '10s'")
    altering = in_background(migration, "alter table fairq.tasks add column extra text")
    assert wait_until_blocked(observer, pid_of(migration)) == [pid_of(popper)]
    assert finish(popper, worker, held) == [held[0]]
    popper.commit()
    result(altering)
    migration.rollback()
    assert_consistent(observer)


def queues(conn: Conn, *names: str) -> None:
    for name in names:
        conn.execute("select fairq.configure_queue(%s)", [name])
        create_each(conn, "g", "h", queue=name)


def test_transactions_that_pop_from_several_queues_in_any_order_do_not_deadlock(database: Database) -> None:
    """Pops take a domain only when it is free, and tasks only when they are."""
    observer = database.connect(autocommit=True)
    queues(observer, "one", "two")
    worker = register(observer, "one", "two")
    sessions = [database.connect() for _ in range(2)]
    for conn in sessions:
        conn.execute("set lock_timeout = 1")
    taken = []
    for first, second in (("one", "two"), ("two", "one")):
        for conn, queue in zip(sessions, (first, second), strict=True):
            held = pop(conn, worker, 1, queue=queue)
            taken += held
            create_each(conn, "x", queue=queue)
            finish(conn, worker, held)
    for conn in sessions:
        conn.commit()
    assert len({*taken}) == len(taken)
    assert_consistent(observer)


def test_promotions_of_two_queues_in_opposite_order_deadlock_and_one_is_told_to_try_again(
    database: Database,
) -> None:
    """
    The documented limit of promote_overflow: it waits for the domain and holds it, so it belongs in a
    transaction of its own. PostgreSQL ends one of the two with 40P01; nothing is lost.
    """
    observer = database.connect(autocommit=True)
    queues(observer, "one", "two")
    first, second = database.connect(), database.connect()
    promote(first, "one")
    promote(second, "two")
    crossing = in_background(first, "select fairq.promote_overflow('two')")
    assert wait_until_blocked(observer, pid_of(first)) == [pid_of(second)]
    closing = in_background(second, "select fairq.promote_overflow('one')")
    conn, _ = survivor({first: crossing, second: closing})
    conn.commit()
    assert_consistent(observer)
    assert set(states(observer).values()) == {"queued"}


def test_pop_and_finish_in_one_transaction_against_each_other(database: Database) -> None:
    """Exactly-once handlers: pop, work, finish in one transaction; a rollback gives everything back."""
    observer = database.connect(autocommit=True)
    created = create_each(observer, *["g", "h"] * 5)
    worker = register(observer)
    one, two = database.connect(), database.connect()
    first = pop(one, worker, 3)
    second = pop(two, worker, 3)
    assert finish(one, worker, first) == sorted(first)
    late = in_background(two, FINISH, ending(worker, second))
    assert [row[0] for row in result(late)] == sorted(second)
    one.rollback()
    two.commit()
    rest = []
    while held := pop(observer, worker):
        rest += finish(observer, worker, held)
    assert sorted(rest) == sorted(set(created) - {*second})
    assert_consistent(observer)


def test_a_worker_is_not_retired_by_a_transaction_that_cannot_see_what_it_holds(database: Database) -> None:
    """I1: with its row gone, nobody would ever take from it what it popped since."""
    conn, old = database.connect(autocommit=True), database.connect()
    worker = register(conn)
    create_each(conn, "a", "b")
    old.execute("set transaction isolation level repeatable read")
    old.execute("select from fairq.workers")
    assert len(pop(conn, worker)) == 2
    with pytest.raises(psycopg.Error) as caught:
        old.execute("select fairq.retire_worker(%s)", [worker])
    assert caught.value.sqlstate == "QF005"
    old.rollback()
    conn.execute("select fairq.retire_worker(%s)", [worker])
    assert len(pop(conn, register(conn))) == 2
    assert_consistent(conn)
