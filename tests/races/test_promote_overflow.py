"""Every ring is heard exactly once, in whatever order transactions commit; one promoter at a time.

Rings that tell of new tasks would survive being heard twice; rings that tell of freed places would not: the
count of a lane with a cap shows each of them.

Interleavings (A: application or worker, P, Q: promoters, T1, T2: ticks):

    A: begin; ring    P: promote (T1)                A: commit    P: promote (T2)     heard in T2
    A: begin; ring    P: promote (T1)  promote (T2)  A: commit    P: promote (T3)     heard in T3
    A: begin          B: begin, ring, commit   P: promote    A: ring, commit   P: promote      both once
    A: begin; ring    P: begin; promote; (open)      A: commit    P: commit    Q: promote      heard by Q
    P: begin; ring; promote; ring; commit            Q: promote              first by P, second by Q
    P: begin; promote; rollback                      Q: promote              heard by Q
    P: begin; savepoint; ring; promote; rollback to; promote; commit         nothing of the savepoint
    A: begin; ring; savepoint; ring; rollback to; commit                     the first one only
    A: begin; ring; prepare transaction   P: promote   A: commit prepared    P: promote    heard in the second
    P: begin; promote; prepare transaction           Q: promote (waits)      P: commit prepared
    a cut at a transaction id, with an older transaction still open
    the very first promotion (rebuild) with an older transaction still open
"""

import psycopg
import pytest
from psycopg import IsolationLevel

from tests.support.calls import (
    Conn,
    Held,
    call,
    create_each,
    create_many,
    drain,
    finish,
    in_flight,
    pop,
    promote,
    register,
    release,
    states,
)
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.sessions import in_background, pid_of, result, wait_until_blocked
from tests.support.shards import neighbours


def queued(conn: Conn) -> list[int]:
    return [
        row[0] for row in conn.execute("select id from fairq.live_tasks where state = 'queued' order by 1")
    ]


def test_a_ring_of_a_transaction_older_than_the_tick_is_heard_when_it_commits(
    database: Database, observer: Conn
) -> None:
    """I1: however many ticks pass meanwhile, and with rings of later transactions heard before."""
    app = database.connect()
    (late,) = create_each(app, "late")
    for number in range(3):
        (early,) = create_each(observer, f"early {number}")
        assert promote(observer) == 1
        assert queued(observer)[-1] == early
    app.commit()
    assert promote(observer) == 1
    assert late in queued(observer)
    assert promote(observer) == 0
    assert_consistent(observer)


def test_a_late_ring_lowers_the_cursor_of_its_lane(database: Database, observer: Conn) -> None:
    """I1: a task with a smaller sequence than those promoted already is not overlooked; they come after."""
    app = database.connect()
    (late,) = create_each(app, "g")
    younger = create_each(observer, "g", "g")
    assert promote(observer) == 2
    app.commit()
    assert promote(observer) == 3
    served = observer.execute("select id from fairq.ready order by block, position").fetchall()
    assert [row[0] for row in served] == [late, *younger]
    assert_consistent(observer)


def test_a_transaction_that_began_before_the_tick_and_rings_after_it_is_heard(
    database: Database, observer: Conn
) -> None:
    """Its id lies before the tick's, its ring comes after: the tick knows it as pending all the same."""
    app = database.connect()
    app.execute("select pg_current_xact_id()")
    create_each(observer, "other")
    assert promote(observer) == 1
    (late,) = create_each(app, "g")
    assert promote(observer) == 0
    app.commit()
    assert promote(observer) == 1
    assert late in queued(observer)


def capped(conn: Conn, running: int) -> tuple[int, list[Held]]:
    """A group of ten tasks whose cap of `running` is used up; the worker and what it holds."""
    call(conn, "configure_group", "default", "capped", max_running=running)
    create_each(conn, *["capped"] * 10)
    worker = register(conn)
    held = pop(conn, worker, 10)
    assert len(held) == running
    assert in_flight(conn, "capped") == running
    return worker, held


@pytest.mark.parametrize("ticks_before", [0, 1, 2])
@pytest.mark.parametrize("ticks_after", [1, 2])
def test_freed_places_are_counted_once_whenever_the_finish_commits(
    database: Database, observer: Conn, ticks_before: int, ticks_after: int
) -> None:
    """I7, H17: the ring of a finish that was open during some ticks."""
    worker, held = capped(observer, 4)
    finisher = database.connect()
    assert len(finish(finisher, worker, held[:2])) == 2
    for _ in range(ticks_before):
        create_each(observer, "other")  # or the promotion would find nothing and write no tick
        promote(observer)
        assert in_flight(observer, "capped") == 4
    finisher.commit()
    for _ in range(ticks_after):
        create_each(observer, "other")
        promote(observer)
        assert in_flight(observer, "capped") == 4  # two freed, two promoted
    assert len([row for row in states(observer).values() if row == "queued"]) >= 2
    assert_consistent(observer)
    assert len(pop(observer, worker, 100)) == 2 + ticks_before + ticks_after


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "retry", "cancelled", "expired"])
def test_each_way_to_end_frees_the_place_once(database: Database, observer: Conn, outcome: str) -> None:
    """I7: whatever the outcome, also that of an attempt which is followed by another."""
    worker, held = capped(observer, 3)
    assert len(finish(observer, worker, held, outcome)) == 3
    assert_consistent(observer)
    assert in_flight(observer, "capped") == 3
    assert len(pop(observer, worker, 100)) == 3


def test_a_release_frees_its_places_once(database: Database, observer: Conn) -> None:
    """I7, I12."""
    worker, held = capped(observer, 3)
    observer.execute("select fairq.retire_worker(%s)", [worker])
    assert_consistent(observer)
    assert in_flight(observer, "capped") == 3
    again = pop(observer, register(observer), 100)
    assert sorted(again) == sorted(held)


def test_a_promoter_waits_for_another_and_hears_what_it_has_not(database: Database, observer: Conn) -> None:
    """Two promoters: the second waits for the domain, then sees the first one's tick."""
    first, second = database.connect(), database.connect()
    (one,) = create_each(observer, "g1")
    assert promote(first) == 1
    (two,) = create_each(observer, "g2")
    waiting = in_background(second, "select fairq.promote_overflow()")
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.commit()
    assert result(waiting) == [(1,)]
    second.commit()
    assert queued(observer) == [one, two]
    assert_consistent(observer)


def test_a_promoter_that_waited_takes_over_when_the_first_rolls_back(
    database: Database, observer: Conn
) -> None:
    """Nothing the first one heard is lost with it."""
    worker, held = capped(observer, 2)
    finish(observer, worker, held)
    first, second = database.connect(), database.connect()
    assert promote(first) == 2
    waiting = in_background(second, "select fairq.promote_overflow()")
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.rollback()
    assert result(waiting) == [(2,)]
    second.commit()
    assert in_flight(observer, "capped") == 2
    assert_consistent(observer)


def test_a_finish_that_commits_while_a_promotion_is_open_is_heard_by_the_next(
    database: Database, observer: Conn
) -> None:
    worker, held = capped(observer, 2)
    finisher, promoter = database.connect(), database.connect()
    finish(finisher, worker, held[:1])
    create_each(observer, "other")
    assert promote(promoter) == 1
    finisher.commit()
    promoter.commit()
    assert in_flight(observer, "capped") == 2
    assert promote(observer) == 1
    assert in_flight(observer, "capped") == 2
    assert_consistent(observer)


def test_a_transaction_hears_its_own_rings_up_to_each_promotion(database: Database, observer: Conn) -> None:
    """Its own id is in no list of pending ones: create, promote, pop, finish, promote in one transaction."""
    conn = database.connect()
    worker = register(conn)
    call(conn, "configure_group", "default", "g", max_running=2)
    created = create_each(conn, *["g"] * 5)
    assert promote(conn) == 2
    assert promote(conn) == 0
    held = pop(conn, worker, 10)
    assert len(held) == 2
    finish(conn, worker, held[:1])
    assert promote(conn) == 1
    assert promote(conn) == 0
    finish(conn, worker, held[1:])
    conn.commit()
    assert promote(observer) == 1
    assert in_flight(observer, "g") == 2
    assert_consistent(observer)
    assert sorted(states(observer)) == created


def test_what_a_promoter_rings_after_its_promotion_is_heard_by_another(
    database: Database, observer: Conn
) -> None:
    promoter = database.connect()
    create_each(promoter, "g1")
    assert promote(promoter) == 1
    (after,) = create_each(promoter, "g1")
    promoter.commit()
    assert promote(observer) == 1
    assert after in queued(observer)
    assert promote(observer) == 0
    assert_consistent(observer)


def test_who_creates_and_promotes_holds_the_domain(database: Database, observer: Conn) -> None:
    """Whoever else promotes waits for the commit."""
    app, other = database.connect(), database.connect()
    (created,) = create_each(app, "g")
    assert promote(app) == 1
    assert app.execute("select state from fairq.live_tasks where id = %s", [created]).fetchone() == (
        "queued",
    )
    waiting = in_background(other, "select fairq.promote_overflow()")
    assert wait_until_blocked(observer, pid_of(other)) == [pid_of(app)]
    app.commit()
    assert result(waiting) == [(0,)]
    other.commit()
    assert queued(observer) == [created]
    assert_consistent(observer)


def test_a_savepoint_that_is_rolled_back_has_rung_nothing(database: Database, observer: Conn) -> None:
    app = database.connect()
    (kept,) = create_each(app, "g")
    app.execute("savepoint s")
    create_each(app, "g", "h")
    app.execute("rollback to s")
    (kept_too,) = create_each(app, "i")
    app.commit()
    assert promote(observer) == 2
    assert queued(observer) == [kept, kept_too]
    assert_consistent(observer)


def test_a_promotion_in_a_savepoint_that_is_rolled_back_never_was(database: Database, observer: Conn) -> None:
    worker, held = capped(observer, 3)
    conn = database.connect()
    finish(conn, worker, held[:1])
    conn.execute("savepoint s")
    finish(conn, worker, held[1:2])
    assert promote(conn) == 2
    conn.execute("rollback to s")
    assert promote(conn) == 1
    conn.commit()
    assert in_flight(observer, "capped") == 3
    assert_consistent(observer)
    assert sorted(finish(observer, worker, held)) == sorted(held[1:])
    assert_consistent(observer)


def test_a_tick_written_in_a_released_savepoint_is_trusted(database: Database, observer: Conn) -> None:
    """Its xmin is the subtransaction's; taking it for a restored one would rebuild, and forget open rings."""
    app, conn = database.connect(), database.connect()
    (late,) = create_each(app, "late")
    g, h = neighbours(observer, "g", "h")
    create_each(conn, g)
    conn.execute("savepoint s")
    assert promote(conn) == 1
    conn.execute("release s")
    conn.commit()
    ticks = "select max(tick), count(*) from fairq.ticks where shard_no = 0"
    before = observer.execute(ticks).fetchone()
    create_each(observer, h)
    assert promote(observer) == 1
    after = observer.execute(ticks).fetchone()
    assert before is not None
    assert after == (before[0] + 1, before[1] + 1), "a rebuild would have removed the earlier ticks"
    app.commit()
    assert promote(observer) == 1
    assert late in queued(observer)
    assert_consistent(observer)


def test_a_prepared_transaction_rings_when_it_is_committed(database: Database, observer: Conn) -> None:
    """Its session may be long gone; its id stays pending. PostgreSQL refuses where the queue notifies."""
    observer.execute("""select fairq.configure_queue('default', '{"notify": false}')""")
    worker, held = capped(observer, 2)
    app = database.connect()
    name = f"{database.name}_rings"
    app.tpc_begin(name)
    (created,) = create_each(app, "g")
    finish(app, worker, held[:1])
    app.tpc_prepare()
    app.close()
    for _ in range(2):
        create_each(observer, "other")
        assert promote(observer) == 1
    observer.execute(f"commit prepared '{name}'".encode())
    assert promote(observer) == 2
    assert created in queued(observer)
    assert in_flight(observer, "capped") == 2
    assert_consistent(observer)


def test_a_prepared_promotion_is_waited_for(database: Database, observer: Conn) -> None:
    """The domain's lock is a row lock: it outlives the session, and a rollback frees it."""
    promoter, other = database.connect(), database.connect()
    name = f"{database.name}_promotion"
    (created,) = create_each(observer, "g")
    promoter.tpc_begin(name)
    assert promote(promoter) == 1
    promoter.tpc_prepare()
    waiting = in_background(other, "select fairq.promote_overflow()")
    assert wait_until_blocked(observer, pid_of(other)) == [0]
    observer.execute(f"rollback prepared '{name}'".encode())
    assert result(waiting) == [(1,)]
    other.commit()
    assert queued(observer) == [created]
    assert_consistent(observer)


def test_rings_beyond_the_cut_of_a_pass_are_left_for_the_next(database: Database, observer: Conn) -> None:
    """More rings than one pass takes, with an older and a newer transaction open all the while."""
    old, new = database.connect(), database.connect()
    (late,) = create_each(old, "old")
    with observer.transaction():
        bulk = (
            "select fairq.create_tasks(array_agg('a' || n), array_agg('{}'::jsonb))"
            " from generate_series(1, 6000) n"
        )
        observer.execute(bulk)
    (later,) = create_each(new, "new")
    observer.execute(bulk.replace("'a'", "'b'"))
    observer.execute(bulk.replace("'a'", "'c'"))
    promote(observer)
    old.commit()
    promote(observer)
    new.commit()
    worker = register(observer)
    served = []
    while held := pop(observer, worker, 5000):
        served += held
        finish(observer, worker, held)
    assert len(served) == len(set(served)) == 18_002
    assert {late, later} <= set(served)
    assert_consistent(observer)


def test_the_first_promotion_ever_does_not_forget_transactions_that_are_open(database: Database) -> None:
    """I11: derived state is made from the tasks that are visible; others ring when they commit."""
    observer = database.connect(autocommit=True)
    app = database.connect()
    (late,) = create_each(app, "late")
    (early,) = create_each(observer, "early")
    assert promote(observer) == 1
    assert queued(observer) == [early]
    app.commit()
    assert promote(observer) == 1
    assert queued(observer) == sorted([early, late])
    assert_consistent(observer)


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_promotion_refuses_an_isolation_level_that_would_not_see_the_last_tick(
    database: Database, observer: Conn, level: IsolationLevel
) -> None:
    conn = database.connect()
    conn.isolation_level = level
    with pytest.raises(psycopg.Error) as caught:
        promote(conn)
    assert caught.value.sqlstate == "QF005"


def test_hundreds_of_open_transactions_are_each_heard_once(database: Database, observer: Conn) -> None:
    """Fifty open at a time, committing in another order than they began, a tick between any two."""
    worker = register(observer)
    apps = [database.connect() for _ in range(50)]
    created = []
    for _ in range(3):
        for number, app in enumerate(apps):
            created += create_each(app, f"g{number % 7}")
        for app in apps[::2] + apps[1::2][::-1]:
            app.commit()
            promote(observer)
    assert sorted(drain(observer, worker)) == sorted(created)
    assert_consistent(observer)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("of", ["group_key", "user_key"])
def test_turns_that_others_took_meanwhile_are_not_given_out_again(database: Database, of: str) -> None:
    """I4, I14: a pop goes past a task that somebody has just locked; then one before both comes back."""
    observer = database.connect(autocommit=True)
    bob, alice = (
        create_many(observer, name if of == "group_key" else "g", 10, user_keys=[name] * 10)
        for name in ("bob", "alice")
    )
    worker = register(observer)
    first = pop(observer, worker, 2)
    assert first == [bob[0], alice[0]]
    promote(observer)
    locking = database.connect()
    locking.execute("select from fairq.ready where id = %s for update", [bob[1]])
    assert pop(observer, worker, 3) == [alice[1], bob[2], alice[2]]
    locking.rollback()
    assert release(observer, worker, first[:1]) == [bob[0]]
    rest = [held.user_key for held in pop(observer, worker, 20)]
    assert rest == ["bob", *["bob", "alice"] * 7, "bob"]
    assert_consistent(observer)
