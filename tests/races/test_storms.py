"""Many sessions doing everything at once: what single interleavings do not show.

The seeds are fixed, the schedule is not. After each storm nothing is lost, nothing was served twice, and
derived state equals fairq.tasks.
"""

import threading
from random import Random

import psycopg
import pytest

from fairq import install
from tests.races.engine import (
    FINISH,
    RELEASE,
    Conn,
    assert_consistent,
    cap,
    create,
    finish,
    finish_parameters,
    maintain,
    pop,
    promote,
    register,
    release_parameters,
    states,
)
from tests.support.database import Database
from tests.support.sessions import (
    call_in_background,
    in_background,
    pid_of,
    result,
    wait_until,
    wait_until_blocked,
)

CAPS = {"capped 1": 1, "capped 3": 3}
GROUPS = [*CAPS, "a", "b", "c"]


def storm_worker(database: Database, seed: int, turns: int, served: list[int]) -> None:
    """Pops, finishes, retries, releases, loses its connection, rolls back."""
    random = Random(seed)
    with psycopg.connect(database.dsn) as conn:
        worker = register(conn)
        conn.commit()
        for _ in range(turns):
            held = pop(conn, worker, random.randint(1, 12))
            if random.random() < 0.15:
                conn.rollback()
                continue
            conn.commit()
            random.shuffle(held)
            for part, outcome in ((held[::3], "succeeded"), (held[1::3], None), (held[2::3], "release")):
                if outcome == "release":
                    conn.execute(RELEASE, release_parameters(worker, part))
                elif outcome is None and random.random() < 0.3:
                    conn.execute(
                        "select fairq.finish_tasks(%s, %s::bigint[], %s::int[], %s::text[],"
                        " p_retry_delays => %s::interval[])",
                        [*finish_parameters(worker, part, "retry"), ["0 s"] * len(part)],
                    )
                else:
                    ended = finish(conn, worker, part, "succeeded")
                    if random.random() < 0.1:
                        conn.rollback()
                        conn.execute(RELEASE, release_parameters(worker, part))
                    else:
                        served += ended
                conn.commit()
            in_flight = conn.execute(
                "select group_key, count(*) from fairq.live_tasks where state = 'running' group by 1"
            ).fetchall()
            conn.commit()
            for group_key, count in in_flight:
                assert count <= CAPS.get(group_key, 10**9), f"{count} running in {group_key}"
        conn.execute("select fairq.retire_worker(%s)", [worker])


def storm_app(database: Database, seed: int, turns: int, created: list[int]) -> None:
    """Creates in transactions of several statements: rolled back, with savepoints, cancelled."""
    random = Random(seed)
    with psycopg.connect(database.dsn) as conn:
        for _ in range(turns):
            conn.isolation_level = psycopg.IsolationLevel(random.choice([2, 3, 4]))
            ids = create(conn, *random.choices(GROUPS, k=random.randint(1, 6)), priority=random.randint(0, 2))
            conn.execute("savepoint s")
            create(conn, *random.choices(GROUPS, k=2))
            if random.random() < 0.5:
                conn.execute("rollback to s")
            else:
                ids = []
                conn.rollback()
            if ids and random.random() < 0.3:
                conn.execute("select fairq.cancel_task(%s)", [random.choice(ids)])
            conn.commit()
            created += ids


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_workers_and_applications_loses_nothing_and_keeps_the_caps(
    database: Database, seed: int
) -> None:
    """I1, I2, I7, I10, H17: six workers, three applications in all isolation levels."""
    observer = database.connect(autocommit=True)
    for group_key, most in CAPS.items():
        cap(observer, group_key, most)
    created: list[int] = []
    served: list[int] = []
    calls = [
        call_in_background(lambda n=number: storm_app(database, seed * 100 + n, 40, created))  # type: ignore[misc]
        for number in range(3)
    ] + [
        call_in_background(lambda n=number: storm_worker(database, seed * 100 + n, 30, served))  # type: ignore[misc]
        for number in range(6)
    ]
    while not all(call.done() for call in calls):
        maintain(observer)
        promote(observer)
    for call in calls:
        result(call)

    assert_consistent(observer)
    worker = register(observer)
    observer.execute("select set_config('fairq.now', (clock_timestamp() + interval '1 hour')::text, false)")
    for _ in range(1000):
        held = pop(observer, worker, 20)
        if not held:
            break
        served += finish(observer, worker, held)
    ended = states(observer)
    assert sorted(ended) == sorted(created)
    assert set(ended.values()) <= {"succeeded", "cancelled", "failed"}
    assert len(served) == len(set(served))
    assert_consistent(observer)


def test_functions_are_replaced_while_workers_run(database: Database) -> None:
    """A migration that replaces every function does not disturb the sessions that call them."""
    stop = threading.Event()
    served: list[int] = []
    created: list[int] = []

    def work() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            worker = register(conn)
            while not stop.is_set():
                created.extend(create(conn, "a", "b"))
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
    create(observer, "g")
    worker = register(observer)
    popper, migration = database.connect(), database.connect()
    held = pop(popper, worker)
    migration.execute("set lock_timeout = '10s'")
    altering = in_background(migration, "alter table fairq.tasks add column extra text")
    assert wait_until_blocked(observer, pid_of(migration)) == [pid_of(popper)]
    assert finish(popper, worker, held) == [held[0][0]]
    popper.commit()
    result(altering)
    migration.rollback()
    assert_consistent(observer)


def queues(conn: Conn, *names: str) -> None:
    for name in names:
        conn.execute("select fairq.configure_queue(%s)", [name])
        create(conn, "g", "h", queue=name)


def test_transactions_that_pop_from_several_queues_in_any_order_do_not_deadlock(database: Database) -> None:
    """Pops take a domain only when it is free, and tasks only when they are."""
    observer = database.connect(autocommit=True)
    queues(observer, "one", "two")
    worker = register(observer, queues=("one", "two"))
    sessions = [database.connect() for _ in range(2)]
    for conn in sessions:
        conn.execute("set lock_timeout = 1")
    taken = []
    for first, second in (("one", "two"), ("two", "one")):
        for conn, queue in zip(sessions, (first, second), strict=True):
            held = pop(conn, worker, 1, queue=queue)
            taken += held
            create(conn, "x", queue=queue)
            finish(conn, worker, held)
    for conn in sessions:
        conn.commit()
    assert len({row[0] for row in taken}) == len(taken)
    assert_consistent(observer)


def test_promotions_of_two_queues_in_opposite_order_deadlock_and_one_is_told_to_try_again(
    database: Database,
) -> None:
    """
    The documented limit of p_promote and promote_overflow: they wait for the domain and hold it, so they
    belong in transactions of their own. PostgreSQL ends one of the two with 40P01; nothing is lost.
    """
    observer = database.connect(autocommit=True)
    queues(observer, "one", "two")
    first, second = database.connect(), database.connect()
    promote(first, "one")
    promote(second, "two")
    crossing = in_background(first, "select fairq.promote_overflow('two')")
    assert wait_until_blocked(observer, pid_of(first)) == [pid_of(second)]
    closing = in_background(second, "select fairq.promote_overflow('one')")
    ended = {first: crossing, second: closing}
    wait_until(lambda: any(f.done() and f.exception() for f in ended.values()), "one of the two fails")
    victim = next(conn for conn, f in ended.items() if f.done() and f.exception())
    with pytest.raises(psycopg.errors.DeadlockDetected):
        result(ended.pop(victim))
    victim.rollback()
    ((survivor, future),) = ended.items()
    result(future)
    survivor.commit()
    assert_consistent(observer)
    assert set(states(observer).values()) == {"queued"}


def test_pop_and_finish_in_one_transaction_against_each_other(database: Database) -> None:
    """Exactly-once handlers: pop, work, finish in one transaction; a rollback gives everything back."""
    observer = database.connect(autocommit=True)
    created = create(observer, *["g", "h"] * 5)
    worker = register(observer)
    one, two = database.connect(), database.connect()
    first = pop(one, worker, 3)
    second = pop(two, worker, 3)
    assert finish(one, worker, first) == sorted(row[0] for row in first)
    late = in_background(two, FINISH, finish_parameters(worker, second))
    assert [row[0] for row in result(late)] == sorted(row[0] for row in second)
    one.rollback()
    two.commit()
    rest = []
    while held := pop(observer, worker):
        rest += finish(observer, worker, held)
    assert sorted(rest) == sorted(set(created) - {row[0] for row in second})
    assert_consistent(observer)
