"""When creating a task sends a NOTIFY: unless one is on its way that no promotion has heeded yet.

NOTIFY takes a database-wide lock until its transaction is on disk. A thousand enqueues a second would commit
one by one, to tell workers what the first of them already told.
"""

import threading
import time

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    call,
    create,
    create_many,
    finish,
    maintain,
    one,
    pop,
    promote,
    register,
    run,
)
from tests.support.database import Database

pytestmark = pytest.mark.usefixtures("one_shard")


@pytest.fixture
def db(database: Database) -> Conn:
    return database.connect(autocommit=True)


@pytest.fixture
def ear(database: Database) -> Conn:
    """A session that listens, as a worker does."""
    conn = database.connect(autocommit=True)
    conn.execute("listen fairq")
    return conn


def heard(db: Conn, ear: Conn) -> int:
    """How many notices since last asked."""
    return len(heard_of(db, ear))


def heard_of(db: Conn, ear: Conn) -> list[str]:
    """The queues of those. A notice of our own marks the end: they come in the order of the commits."""
    queues: list[str] = []
    run(db, "notify fairq, 'that is all'")
    for notice in ear.notifies(timeout=10):
        if notice.payload == "that is all":
            return queues
        queues.append(notice.payload)
    raise AssertionError("the notice sent last did not come")


def test_the_first_is_announced_and_the_next_when_it_was_heeded(db: Conn, ear: Conn) -> None:
    create(db)
    assert heard(db, ear) == 1
    create(db, "alice")
    create_many(db, "bob", 3)
    create(db, run_at="2100-01-01")
    assert heard(db, ear) == 0, "the first one is still to be heeded"
    worker = register(db)
    assert len(pop(db, worker, 100)) == 5
    create(db)
    assert heard(db, ear) == 1
    create(db)
    assert heard(db, ear) == 0


def test_a_call_for_many_announces_them_once(db: Conn, ear: Conn) -> None:
    create_many(db, "bob", 3)
    assert heard(db, ear) == 1
    assert run(db, "select count(*) from fairq.rings where announced") == [(1,)]
    create_many(db, "bob", 3)
    create(db)
    assert heard(db, ear) == 0


def test_scheduled_tasks_are_announced_as_well(db: Conn, ear: Conn) -> None:
    """A worker that sleeps learns when to wake up."""
    create(db, run_at="2100-01-01")
    assert heard(db, ear) == 1


def test_what_rolls_back_silences_nobody(db: Conn, ear: Conn) -> None:
    with db.transaction(force_rollback=True):
        create(db)
    assert heard(db, ear) == 0
    create(db)
    assert heard(db, ear) == 1


def test_an_open_transaction_silences_nobody_but_itself(db: Conn, ear: Conn, database: Database) -> None:
    """What is not committed may never be: it has told nobody yet."""
    other = database.connect()
    create(other)
    create(db)
    assert heard(db, ear) == 1
    create(other)
    other.commit()
    assert heard(db, ear) == 1


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_older_snapshots_announce_in_any_case(db: Conn, ear: Conn, database: Database, level: str) -> None:
    """They cannot know whether a notice was heeded since they began; and to look would make them fail."""
    create(db)
    assert heard(db, ear) == 1
    other = database.connect()
    other.execute(f"set transaction isolation level {level}")
    create(other)
    other.commit()
    assert heard(db, ear) == 1


def test_a_promotion_by_the_creator_leaves_the_next_to_be_announced(db: Conn, ear: Conn) -> None:
    """Its own promotion heard the ring: whoever comes next may not take it for one still to be heeded."""
    create(db)
    promote(db)
    assert heard(db, ear) == 1
    create(db)
    assert heard(db, ear) == 1


def test_places_that_come_free_silence_nobody(db: Conn, ear: Conn) -> None:
    """Rings that no NOTIFY went with tell no sleeping worker anything."""
    run(db, """select fairq.configure_group('default', 'bob', '{"max_running": 5}')""")
    worker = register(db)
    create(db)
    (task,) = pop(db, worker, 1)
    heard(db, ear)
    run(db, "select fairq.finish_tasks(%s, array[%s]::bigint[], array[1])", worker, task)
    create(db, "alice")
    assert heard(db, ear) == 1


def test_a_queue_without_notify_says_nothing(db: Conn, ear: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"notify": false}')""")
    heard(db, ear)
    create(db)
    create_many(db, "bob", 2)
    assert heard(db, ear) == 0
    assert one(db, "select count(*) from fairq.rings where announced") == 0


@pytest.mark.parametrize("how", ["raised", "free", "cluster"])
def test_a_key_or_a_cluster_that_has_room_again_wakes_those_who_wait(db: Conn, ear: Conn, how: str) -> None:
    """I8: in whatever queues they are, and of a key nobody else."""
    call(db, "configure_queue", "mail")
    call(db, "configure_queue", "idle", notify=how != "cluster")
    worker = register(db, "default", "mail")
    if how == "free":
        run(db, "select fairq.hold_key('k', now() + interval '1 day')")
    if how == "cluster":
        call(db, "configure_cluster", max_running=1)
    for queue in ("default", "mail"):
        create_many(db, "bob", 2, queue=queue, concurrency_keys=["k"] * 2)
        pop(db, worker, queue=queue)
    heard(db, ear)
    if how == "raised":
        call(db, "configure_key", "k", max_running=3)
    elif how == "free":
        call(db, "hold_key", "k", None)
    else:
        call(db, "configure_cluster", max_running=2)
    assert heard(db, ear) == 2


def test_a_key_that_comes_free_wakes_the_workers_of_another_queue(db: Conn, ear: Conn) -> None:
    """I8: the worker that gave the place back promotes its own queue only.

    They are told when it is given back, and when it is granted; a turn is one transaction, which says it
    once.
    """
    call(db, "configure_queue", "mail")
    worker = register(db, "default", "mail")
    create(db, "bob", concurrency_key="k")
    held = pop(db, worker)
    create(db, "alice", queue="mail", concurrency_key="k")
    assert pop(db, worker, queue="mail") == []
    heard(db, ear)
    finish(db, worker, held)
    assert heard_of(db, ear) == ["mail"]
    assert pop(db, worker) == []
    assert heard_of(db, ear) == ["mail"]
    assert len(pop(db, worker, queue="mail")) == 1


@pytest.mark.parametrize("how", ["nothing of its own waits", "its queue is paused", "its worker stops"])
def test_a_key_wakes_the_workers_of_another_queue_though_its_own_has_no_use_for_it(
    db: Conn, ear: Conn, how: str
) -> None:
    """I8: when the place is given back, and nobody promotes the queue of the task that had it."""
    call(db, "configure_queue", "mail")
    worker, other = register(db, "default"), register(db, "mail")
    create(db, "bob", concurrency_key="k")
    held = pop(db, worker)
    maintain(db)  # forgets that there were tasks with keys here
    create(db, "alice", queue="mail", concurrency_key="k")
    assert pop(db, other, queue="mail") == []
    if how == "its queue is paused":
        call(db, "pause_queue", "default")
    heard(db, ear)
    if how == "its worker stops":
        call(db, "retire_worker", worker)
    else:
        finish(db, worker, held)
        assert pop(db, worker) == []
    assert "mail" in heard_of(db, ear)
    assert len(pop(db, other, queue="mail")) == 1


def test_a_place_of_the_cluster_that_nobody_takes_wakes_the_workers_of_other_queues(
    db: Conn, ear: Conn
) -> None:
    """I8: and nobody, while those who freed it have work for it."""
    call(db, "configure_queue", "mail")
    call(db, "configure_queue", "idle")
    call(db, "configure_cluster", max_running=1)
    worker, other = register(db, "default"), register(db, "mail")
    create_many(db, "bob", 2)
    create(db, "alice", queue="mail")
    turn = """
        select id, attempt from fairq.turn(%s, %s::text[], '{1}', 1, p_ended_ids => %s::bigint[],
          p_ended_attempts => %s::integer[])
        where id is not null"""
    ((first, attempt),) = run(db, turn, worker, ["default"], [], [])
    assert run(db, turn, other, ["mail"], [], []) == []
    heard(db, ear)
    ((second, attempt),) = run(db, turn, worker, ["default"], [first], [attempt])
    assert heard(db, ear) == 0
    assert run(db, turn, worker, ["default"], [second], [attempt]) == []
    assert heard_of(db, ear) == ["mail"]
    assert len(run(db, turn, other, ["mail"], [], [])) == 1
    assert run(db, turn, worker, ["default"], [], []) == []
    assert heard(db, ear) == 0, "there is no room"


def test_slots_that_are_kept_no_longer_wake_those_who_wait(db: Conn, ear: Conn) -> None:
    """I8: long tasks may have them at once."""
    call(db, "configure_queue", "default", short_slots=1, short_under=1, short_idle=600)
    worker = register(db, slots=2)
    create_many(db, "bob", 3, cost=100)
    assert len(pop(db, worker)) == 1
    heard(db, ear)
    call(db, "configure_queue", "default", short_slots=None)
    assert heard(db, ear) == 1
    assert len(pop(db, worker)) == 2


def test_a_worker_that_retires_wakes_the_others(db: Conn, ear: Conn) -> None:
    """I8: what it gave back waits for them."""
    worker = register(db)
    create_many(db, "bob", 2)
    assert len(pop(db, worker)) == 2
    heard(db, ear)
    call(db, "retire_worker", worker)
    assert heard(db, ear) == 1
    call(db, "retire_worker", worker)
    assert heard(db, ear) == 0, "it has gone already"


@pytest.mark.parametrize("settings", [{}, {"group_rate_limit": 10}])
def test_upkeep_wakes_workers_for_what_a_lost_one_had(db: Conn, ear: Conn, settings: dict[str, int]) -> None:
    """I8: also if only a pop may make it ready."""
    call(db, "configure_queue", "default", **settings)
    run(db, "select set_config('fairq.now', '2030-01-01 12:00+00', false)")
    worker = register(db, lease="1 minute")
    create_many(db, "bob", 2)
    assert len(pop(db, worker)) == 2
    run(db, "select set_config('fairq.now', '2030-01-01 12:05+00', false)")
    heard(db, ear)
    maintain(db)
    assert heard(db, ear) == 1


def test_to_ask_costs_the_same_beside_a_huge_open_transaction(db: Conn, database: Database) -> None:
    """I9: 20,000 rings of a transaction that is still open are not stepped over by those who enqueue."""

    def pages() -> int:
        plan = one(db, "explain (analyze, buffers, format json) select fairq.create_task('alice', '{}')")
        return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])

    for _ in range(8):
        create(db)
    pop(db, register(db), 1)
    before = pages()
    other = database.connect()
    groups = [f"g{n}" for n in range(20_000)]
    run(other, "select count(*) from fairq.create_tasks(%s, array_fill('{}'::jsonb, array[20000]))", groups)
    # The first one may have to plan anew: an autovacuum tells all sessions to.
    assert min(pages(), pages()) <= before + 20
    other.rollback()


def test_who_listens_and_looks_again_misses_nothing(database: Database) -> None:
    """The promise to whoever sleeps by it: each task was announced, or a look that came later found it.

    A consumer looks at each notice, then after 10, 20, 40 ... ms, and gets every task of two enqueuers.
    """
    count = 150
    seen: set[int] = set()
    consumer = database.connect(autocommit=True)
    ear = database.connect(autocommit=True)
    ear.execute("listen fairq")
    worker = register(consumer)

    def enqueue(group: str) -> None:
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            for n in range(count):
                create(conn, group)
                if n % 10 == 9:
                    time.sleep(0.02)

    threads = [threading.Thread(target=enqueue, args=(group,)) for group in ("alice", "bob")]
    for thread in threads:
        thread.start()
    pause = 0.01
    looks = 0
    while len(seen) < 2 * count and looks < 5_000:
        found = pop(consumer, worker, 100)
        looks += 1
        assert seen.isdisjoint(found)
        seen.update(found)
        woken = next(ear.notifies(timeout=pause, stop_after=1), None) if not found else None
        pause = 0.01 if found or woken else min(pause * 2, 5)
    for thread in threads:
        thread.join()
    assert len(seen) == 2 * count
