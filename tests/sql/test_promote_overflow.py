"""promote_overflow, and rings: every one is heard, exactly once."""

from collections import Counter

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    call,
    create,
    create_all,
    create_many,
    finish,
    groups_of,
    needs_one_order,
    one,
    pop,
    promote,
    refused,
    register,
    run,
    state,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound, hear_all


@pytest.mark.parametrize("limit", [0, -1, 100_001])
def test_a_limit_out_of_range_is_refused(db: Conn, limit: int) -> None:
    with refused(db, "QF007"):
        promote(db, limit=limit)


@pytest.mark.parametrize("queue", [None, "nowhere"])
def test_an_unknown_queue_is_refused(db: Conn, queue: str | None) -> None:
    with refused(db, "QF003"):
        run(db, "select fairq.promote_overflow(%s)", queue)


@pytest.mark.parametrize(
    "level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE]
)
def test_promotion_is_refused_outside_read_committed(
    database: Database, level: psycopg.IsolationLevel
) -> None:
    conn = database.connect()
    conn.isolation_level = level
    with pytest.raises(psycopg.Error) as caught:
        promote(conn)
    assert caught.value.sqlstate == "QF005"
    assert caught.value.diag.message_hint


def test_it_says_how_many_tasks_it_promoted_and_the_limit_bounds_them(db: Conn) -> None:
    """F13: the queued set stays small, whatever the backlog."""
    promote(db)
    create_many(db, "bob", 50)
    assert promote(db, limit=7) == 7
    assert one(db, "select count(*) from fairq.live_tasks where state = 'queued'") == 7
    run(db, "update fairq.queues set ready_target = 20")
    worker = register(db)
    for _ in range(10):
        pop(db, worker, 1)
        assert one(db, "select count(*) from fairq.live_tasks where state = 'queued'") <= 30


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("portion", [1, 3, 10])
def test_tasks_that_come_in_portions_wait_like_those_that_come_at_once(
    db: Conn, portion: int, groups: int
) -> None:
    """F13, I4: more come than are popped. As many rounds are ready as one group alone would fill, at most."""
    needs_one_order(db)
    run(db, "update fairq.queues set ready_target = 10")
    worker = register(db)
    most = groups * (2 * 10 + portion)
    for number in range(60):
        create_many(db, f"group {number % groups}" if number % 2 else "group 0", portion)
        promote(db, limit=10)
        if number > 30:
            pop(db, worker, 1)
        assert one(db, "select count(*) from fairq.live_tasks where state = 'queued'") <= most
    left = Counter(group for (group,) in run(db, "select group_key from fairq.live_tasks where attempt = 0"))
    served: Counter[str] = Counter()
    for ids in iter(lambda: pop(db, worker, 7), []):
        for id_ in ids:
            served[one(db, "select group_key from fairq.tasks where id = %s", id_)] += 1
            busy = [served[group] for group in left if served[group] < left[group]]
            assert max(busy, default=0) - min(busy, default=0) <= 2
        assert one(db, "select count(*) from fairq.live_tasks where state = 'queued'") <= most
    assert served == left


def test_promoting_again_finds_nothing_new(db: Conn) -> None:
    create_many(db, "bob", 5)
    assert [promote(db), promote(db), promote(db)] == [5, 0, 0]


def test_rings_of_open_transactions_are_heard_when_they_commit_in_whatever_order(database: Database) -> None:
    """I1."""
    conn = database.connect(autocommit=True)
    promote(conn)
    apps = [database.connect() for _ in range(4)]
    ids = [create(app, f"g{n}") for n, app in enumerate(apps)]
    for n in (2, 0, 3, 1):
        apps[n].commit()
        assert promote(conn) == 1
        assert state(conn, ids[n]) == "queued"
        assert promote(conn) == 0


def test_savepoints_that_roll_back_are_not_heard_and_others_are(database: Database) -> None:
    conn, app = database.connect(autocommit=True), database.connect()
    promote(conn)
    kept = create(app, "a")
    for n in range(20):
        run(app, "savepoint s")
        create(app, f"lost{n}")
        run(app, "rollback to savepoint s" if n % 2 else "savepoint t")
        run(app, "rollback to savepoint s")
        run(app, "release savepoint s")
    run(app, "savepoint s")
    also_kept = create(app, "b")
    run(app, "release savepoint s")
    assert promote(conn) == 0
    app.commit()
    assert promote(conn) == 2
    assert {state(conn, kept), state(conn, also_kept)} == {"queued"}


def test_prepared_transactions_are_heard_when_they_commit(database: Database) -> None:
    conn, app = database.connect(autocommit=True), database.connect()
    if not int(one(conn, "select current_setting('max_prepared_transactions')")):
        pytest.skip("the server has no prepared transactions")
    # PostgreSQL prepares no transaction that notifies.
    run(conn, """select fairq.configure_queue('default', '{"notify": false}')""")
    promote(conn)
    id_ = create(app)
    run(app, "prepare transaction 'fairq_test'")
    app.commit()
    assert promote(conn) == 0
    create(conn, "alice")
    assert promote(conn) == 1
    run(conn, "commit prepared 'fairq_test'")
    assert promote(conn) == 1
    assert state(conn, id_) == "queued"


def test_a_pass_that_stops_among_many_rings_forgets_no_transaction(database: Database) -> None:
    """I1: the cut is at the own transaction's id; another, still open, lies between it and the snapshot."""
    conn, app, mine = database.connect(autocommit=True), database.connect(), database.connect()
    promote(conn)
    late = create(app, "late")
    run(
        mine,
        "select fairq.create_tasks(array(select 'g' || i from generate_series(1, 10002) i),"
        " array_fill('{}'::jsonb, array[10002]))",
    )
    run(mine, "select fairq.promote_overflow('default', 100)")
    mine.commit()
    app.commit()
    worker = register(conn)
    popped = {
        row[0]
        for _ in range(3)
        for row in conn.execute("select id from fairq.pop_tasks('default', 5000, %s)", [worker])
    }
    assert late in popped
    assert len(popped) == 10_003


def shards(conn: Conn) -> int:
    return int(one(conn, "select shard_count from fairq.settings"))


def test_many_transactions_of_one_ring_each_are_heard_in_passes(database: Database) -> None:
    """A million single enqueues while the workers were down: a pass is bounded, none is lost."""
    conn = database.connect(autocommit=True)
    promote(conn)
    conn.execute(
        """
        do $$ begin
          for i in 1 .. 10300 loop
            perform fairq.create_task('g' || (i % 600), '{}');
            commit;
          end loop;
        end $$
        """
    )
    worker = register(conn)
    promote(conn, limit=100)
    assert shards(conn) > 1 or one(conn, "select fairq._has_news(k) from fairq._tick(0, 'default') k")
    popped = [id_ for _ in range(12) for id_ in pop(conn, worker, 1000)]
    assert len(popped) == len(set(popped)) == 10300


def test_own_rings_are_heard_once_whatever_the_order_of_promotions(database: Database) -> None:
    """A transaction is never listed as pending in its own snapshot."""
    app, other = database.connect(), database.connect(autocommit=True)
    promote(other)
    first = create(app, "a")
    assert promote(app) == 1
    second = create(app, "b")
    busy = create(other, "c")
    assert promote(app) == 2
    third = create(app, "d")
    app.commit()
    assert promote(other) == 1
    assert {state(other, i) for i in (first, second, busy, third)} == {"queued"}
    assert promote(other) == 0


def test_a_newcomer_that_waits_keeps_its_place_when_it_adds_more(db: Conn) -> None:
    """I6: its first task was next, and another one must not send it to the end of the round."""
    needs_one_order(db)
    run(db, "update fairq.queues set ready_target = 1 where queue = 'default'")
    worker = register(db)
    promote(db)
    ids = [create(db, group) for group in ("a", "b", "c")]
    promote(db)
    create_many(db, "b", 5)
    assert pop(db, worker, 3) == ids


def test_who_adds_to_a_long_line_costs_a_look_and_no_lane(db: Conn) -> None:
    """Many tenants add to what they have waiting: their lanes stay as they are, and none is drawn from."""
    needs_one_order(db)
    lanes = "select group_key, version, ctid from fairq.lanes order by 1"
    fetched = "select idx_tup_fetch from pg_stat_xact_user_tables where relid = 'fairq.tasks'::regclass"
    groups = [f"group {number}" for number in range(300)]
    for _ in range(10):
        create_all(db, *groups)
    worker = register(db)
    promote(db)
    pop(db, worker, 1)
    before, read = run(db, lanes), one(db, fetched)
    create_all(db, *groups)
    tick = one(db, "select k.tick from fairq._tick(0, 'default') k")
    assert len(pop(db, worker, 2)) == 2
    assert one(db, "select k.tick from fairq._tick(0, 'default') k") == tick + 1
    assert one(db, fetched) - read <= 4
    assert run(db, lanes) == before


def test_a_lane_that_waits_with_a_key_given_to_it_goes_on_waiting_whatever_rings(db: Conn) -> None:
    """I13: the task is in no cursor. A ring about something else must not say that nothing waits."""
    needs_one_order(db)
    call(db, "configure_queue", "default", ready_target=4)
    call(db, "configure_group", "default", "b", weight=0.05)
    first = create(db, "a", concurrency_key="k")
    worker = register(db)
    assert pop(db, worker) == [first]
    second, _ = create(db, "b", concurrency_key="k"), create(db, "b")
    create_many(db, "c", 30)
    assert groups_of(pop(db, worker, 3)) == ["b", "c", "c"]
    finish(db, worker, [first])
    promote(db)
    assert one(db, "select granted from fairq.parked where id = %s", second), "its turn is far ahead"
    for cap in (3, 2):
        call(db, "configure_group", "default", "b", max_running=cap)
        promote(db)
    assert second in pop(db, worker)
    assert_sound(db)


def test_news_are_looked_up_whatever_the_session_plans(database: Database) -> None:
    """The plan is kept by the session: whoever asks first, without settings, must not slow the others."""
    conn = database.connect(autocommit=True)
    create_all(conn, *(f"group {number}" for number in range(3000)))
    hear_all(conn)
    run(conn, "analyze fairq.rings")
    conn = database.connect()
    news = "select bool_or(fairq._has_news(k)) from fairq.domains d, fairq._tick(d.shard_no, d.queue) k"
    # From the sixth time on the plan is one for any values.
    assert [one(conn, news) for _ in range(8)] == [False] * 8
    assert one(conn, "select pg_stat_get_xact_tuples_returned('fairq.rings'::regclass)") == 0
