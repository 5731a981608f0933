"""Creating tasks waits for no one (I2).

Interleavings, each in READ COMMITTED, REPEATABLE READ and SERIALIZABLE:

    A: begin; create g1, g2 ...          B: begin; create g2, g1          nobody waits, all commit
    P: begin; promote (holds the domain) A: create                        does not wait for P
    W: begin; pop (holds tasks)          A: create, same groups           does not wait for W
    M: begin; maintain                   A: create                        does not wait for M
    A: begin; create; sees nothing of B  B: create, commit                A is not aborted, whatever it read

The deliberate exception is an equal idempotency key:

    A: create key k    B: create key k (waits)    A: commit    -> B gets A's id
    A: create key k    B: create key k (waits)    A: rollback  -> B creates
    the same above READ COMMITTED, A commits                   -> B fails with 40001 and may try again
"""

import itertools

import psycopg
import pytest
from psycopg import IsolationLevel

from tests.support.calls import Conn, create_each, drain, maintain, pop, promote, register, states
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.sessions import in_background, pid_of, result, wait_until_blocked

LEVELS = (IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE)

by_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())


def impatient(database: Database, level: IsolationLevel, name: str = "app") -> Conn:
    """A session that fails as soon as it has to wait for a lock at all."""
    conn = database.connect(application_name=name)
    conn.isolation_level = level
    conn.execute("set lock_timeout = 1")
    conn.commit()
    return conn


def waiting(observer: Conn) -> list[tuple[int, ...]]:
    return observer.execute(
        "select l.pid, l.locktype::text, l.relation::regclass::text"
        " from pg_locks l join pg_stat_activity a using (pid)"
        " where not l.granted and a.datname = current_database()"
    ).fetchall()


@by_level
def test_transactions_create_for_the_same_groups_in_any_order_and_never_wait(
    database: Database, level: IsolationLevel
) -> None:
    """I1, I2, S33: six sessions, every order of three groups, all open at once, stepping in turn."""
    observer = database.connect(autocommit=True)
    orders = list(itertools.permutations(("g1", "g2", "g3")))
    sessions = [impatient(database, level) for _ in orders]
    ids: list[int] = []
    for step in range(3):
        for conn, order in zip(sessions, orders, strict=True):
            ids += create_each(conn, order[step])
            assert waiting(observer) == []
    for conn in sessions:
        assert observer.execute("select pg_blocking_pids(%s)", [pid_of(conn)]).fetchone() == ([],)
    for conn in reversed(sessions):
        conn.commit()
    assert sorted(states(observer)) == sorted(ids)
    worker = register(observer)
    assert sorted(drain(observer, worker)) == sorted(ids)
    assert_consistent(observer)


@by_level
def test_creating_does_not_wait_for_promotion_pop_or_maintenance_in_open_transactions(
    database: Database, level: IsolationLevel
) -> None:
    """I2: the engine's own locks are no locks for applications."""
    observer = database.connect(autocommit=True)
    worker = register(observer)
    create_each(observer, "g1", "g2", "g1")
    promote(observer)
    promoter, popper, keeper = (
        database.connect(application_name=n) for n in ("promoter", "popper", "keeper")
    )
    create_each(promoter, "g3")
    promote(promoter)
    assert pop(popper, worker, 1)
    maintain(keeper)
    app = impatient(database, level)
    created = create_each(app, "g1", "g2", "g3", "g4")
    created += [
        row[0]
        for row in app.execute(
            "select fairq.create_tasks(array['g4', 'g1'], array_fill('{}'::jsonb, array[2]))"
        ).fetchall()
    ]
    app.commit()
    for conn in (promoter, popper, keeper):
        conn.commit()
    assert set(created) <= set(states(observer))
    assert_consistent(observer)


@by_level
def test_creating_fails_for_nobody_else_has_done(database: Database, level: IsolationLevel) -> None:
    """I2: a snapshot taken before others created and promoted for the same group is no reason to fail."""
    observer = database.connect(autocommit=True)
    app = impatient(database, level)
    app.execute("select count(*) from fairq.queues").fetchone()
    create_each(observer, "g1", "g2")
    promote(observer)
    worker = register(observer)
    served = drain(observer, worker)
    assert len(served) == 2
    (created,) = create_each(app, "g1")
    app.commit()
    assert drain(observer, worker) == [created]
    assert_consistent(observer)


@by_level
def test_a_rolled_back_transaction_leaves_nothing(database: Database, level: IsolationLevel) -> None:
    """I1, S33: neither a task nor a ring that is heard."""
    observer = database.connect(autocommit=True)
    app = impatient(database, level)
    create_each(app, "g1", "g2")
    app.rollback()
    assert states(observer) == {}
    assert promote(observer) == 0
    assert observer.execute("select count(*) from fairq.lanes").fetchone() == (0,)


@by_level
def test_equal_idempotency_keys_wait_and_the_second_gets_the_first_ones_task(
    database: Database, level: IsolationLevel
) -> None:
    """I2, the exception. Above READ COMMITTED the second cannot see the first one's row: 40001, try again."""
    observer = database.connect(autocommit=True)
    first, second = (database.connect() for _ in range(2))
    for conn in (first, second):
        conn.isolation_level = level
    (created,) = create_each(first, "g", idempotency_key="k")
    create_each(second, "other")  # its snapshot is taken
    late = in_background(second, "select fairq.create_task('g', '{}', p_idempotency_key => 'k')")
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.commit()
    if level is IsolationLevel.READ_COMMITTED:
        assert result(late) == [(created,)]
        second.commit()
    else:
        with pytest.raises(psycopg.errors.SerializationFailure):
            result(late)
        second.rollback()
        assert create_each(second, "g", idempotency_key="k") == [created]
        second.commit()
    assert [state for task, state in states(observer).items() if task == created] == ["overflow"]


@by_level
def test_equal_idempotency_keys_wait_and_the_second_creates_when_the_first_rolls_back(
    database: Database, level: IsolationLevel
) -> None:
    """I1: the key of a transaction that never was is free."""
    observer = database.connect(autocommit=True)
    first, second = (database.connect() for _ in range(2))
    for conn in (first, second):
        conn.isolation_level = level
    (lost,) = create_each(first, "g", idempotency_key="k")
    late = in_background(second, "select fairq.create_task('g', '{}', p_idempotency_key => 'k')")
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.rollback()
    ((created,),) = result(late)
    second.commit()
    assert created != lost
    assert states(observer) == {created: "overflow"}


def test_other_keys_and_other_groups_with_the_same_key_do_not_wait(database: Database) -> None:
    """I2: only equal keys of one group."""
    first = database.connect()
    create_each(first, "g", idempotency_key="k")
    app = impatient(database, IsolationLevel.READ_COMMITTED)
    create_each(app, "g", idempotency_key="another")
    create_each(app, "h", idempotency_key="k")
    app.commit()
    first.commit()


def test_two_bulk_calls_with_the_same_keys_in_opposite_order_do_not_deadlock(database: Database) -> None:
    """create_tasks takes its keys in one order, whatever the order of its input."""
    observer = database.connect(autocommit=True)
    first, second = database.connect(), database.connect()
    bulk = (
        "select fairq.create_tasks(array['g', 'g'], array_fill('{}'::jsonb, array[2]),"
        " p_idempotency_keys => %s::text[])"
    )
    ids = [row[0] for row in first.execute(bulk, [["a", "b"]])]
    late = in_background(second, bulk, [["b", "a"]])
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.commit()
    assert [row[0] for row in result(late)] == ids[::-1]
    second.commit()
    assert len(states(observer)) == 2
