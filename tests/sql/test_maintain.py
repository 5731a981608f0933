"""maintain: one house, many who may clean it."""

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    at,
    contents,
    create,
    create_many,
    finish,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    run,
    state,
)
from tests.support.database import Database


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_a_limit_out_of_range_is_refused(db: Conn, limit: int | None) -> None:
    with refused(db, "QF007"):
        run(db, "select fairq.maintain(%s)", limit)


def test_it_is_refused_outside_read_committed(database: Database) -> None:
    conn = database.connect()
    conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error) as caught:
        maintain(conn)
    assert caught.value.sqlstate == "QF005"
    assert caught.value.diag.message_hint


def test_doing_it_again_finds_nothing_to_do(db: Conn) -> None:
    at(db, "12:00:00")
    worker = register(db, lease="1 day")
    ids = create_many(db, "bob", 20)
    finish(db, worker, pop(db, worker, 10))
    for id_ in ids[10:15]:
        run(db, "select fairq.cancel_task(%s)", id_)
    for _ in range(3):
        maintain(db)
    before = contents(db)
    assert maintain(db) == {}
    assert contents(db) == before


def test_one_cleans_at_a_time_and_the_others_return_at_once(database: Database) -> None:
    first, second = database.connect(), database.connect(autocommit=True)
    run(second, "set lock_timeout = '1s'")
    create(second)
    assert maintain(first)
    assert maintain(second) == {}
    first.rollback()
    assert maintain(second) != {}


def test_expired_tasks_of_every_waiting_state_are_ended(db: Conn) -> None:
    """H41: their owners learn of it in time, not when their turn would have come."""
    at(db, "12:00:00")
    late = "2030-01-01 12:00:10+00"
    queued = create(db, "a", expires_at=late)
    promote(db)
    overflow = create(db, "b", expires_at=late)
    scheduled = create(db, "c", expires_at=late, run_at="2030-01-02 00:00:00+00")
    fresh = create(db, "d", expires_at="2030-01-01 12:00:11+00")
    worker = register(db)
    at(db, "12:00:10")
    assert maintain(db)["expired"] == 3
    assert {state(db, i) for i in (queued, overflow, scheduled)} == {"expired"}
    assert pop(db, worker, 10) == [fresh]


def test_tasks_that_run_do_not_expire(db: Conn) -> None:
    at(db, "12:00:00")
    worker = register(db, lease="1 day")
    id_ = create(db, expires_at="2030-01-01 12:00:10+00")
    assert pop(db, worker, 1) == [id_]
    at(db, "12:00:20")
    assert "expired" not in maintain(db)
    assert state(db, id_) == "running"


def test_a_sweep_is_bounded_by_its_limit_and_comes_to_an_end(db: Conn) -> None:
    """Also when a bulk call gave all tasks one deadline."""
    at(db, "12:00:00")
    for seconds in (10, 11):
        create_many(
            db, "bob", 30, expires_at=f"2030-01-01 12:00:{seconds}+00", run_at="2030-01-02 00:00:00+00"
        )
    at(db, "12:00:20")
    ended = [maintain(db, 7).get("expired", 0) for _ in range(12)]
    assert sum(ended) == 60
    assert max(ended) <= 8


def test_due_tasks_are_promoted(db: Conn) -> None:
    """S3."""
    at(db, "12:00:00")
    id_ = create(db, run_at="2030-01-01 12:00:10+00")
    maintain(db)
    at(db, "12:00:10")
    assert maintain(db)["promoted"] == 1
    assert state(db, id_) == "queued"


def test_what_was_heard_is_swept_and_what_was_not_is_kept(database: Database) -> None:
    """Rings of a transaction that is still open survive any number of sweeps."""
    app, conn = database.connect(), database.connect(autocommit=True)
    promote(conn)
    late = create(app, "late")
    worker = register(conn)
    for n in range(30):
        finish(conn, worker, [create(conn, f"g{n}")] and pop(conn, worker, 1))
    for _ in range(3):
        maintain(conn)
    app.commit()
    assert pop(conn, worker, 1) == [late]
    finish(conn, worker, [late])
    for _ in range(3):
        maintain(conn)
    shards = int(one(conn, "select shard_count from fairq.settings"))
    assert one(conn, "select count(*) from fairq.rings") <= 2 * shards
    assert one(conn, "select count(*) from fairq.ticks where queue = 'default'") <= shards


def test_lanes_of_idle_groups_are_swept_and_come_back_as_newcomers(db: Conn) -> None:
    """I9: the number of groups that ever were costs nothing."""
    worker = register(db, lease="1 day")
    promote(db)
    for n in range(40):
        create(db, f"g{n}")
        finish(db, worker, pop(db, worker, 1))
    busy = create_many(db, "busy", 50)
    assert pop(db, worker, 40) == busy[:40]
    promote(db)
    for _ in range(3):
        maintain(db)
    assert one(db, "select count(*) from fairq.lanes where queue = 'default' and group_key <> 'busy'") == 0
    again = create(db, "g7")
    if one(db, "select shard_count from fairq.settings") == 1:
        assert pop(db, worker, 1) == [again]


def test_groups_that_send_one_task_each_leave_no_lanes(db: Conn) -> None:
    """I9: an idle queue has no use for the lanes of those it served."""
    worker = register(db, lease="1 day")
    promote(db)
    for n in range(40):
        create(db, f"g{n}")
        finish(db, worker, pop(db, worker, 1))
    for _ in range(3):
        promote(db)
        maintain(db)
    assert one(db, "select count(*) from fairq.lanes where queue = 'default'") <= 1


def test_partitions_are_made_a_week_ahead_and_dropped_after_the_retention(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"retention": "2 days"}')""")
    at(db, "12:00:00")
    worker = register(db, lease="90 days")
    maintain(db)

    def days() -> list[str]:
        query = """
            select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
            where i.inhparent = 'fairq.finished_tasks'::regclass and c.relname ~ '[0-9]{8}$' order by 1
        """
        return [r[0].removeprefix("finished_tasks_") for r in run(db, query)]

    assert days() == [f"203001{day:02}" for day in range(1, 9)]
    old = create(db)
    finish(db, worker, pop(db, worker, 1))
    assert (
        one(db, "select tableoid::regclass::text from fairq.finished_tasks")
        == "fairq.finished_tasks_20300101"
    )
    run(db, "select set_config('fairq.now', '2030-01-03 12:00:00+00', false)")
    maintain(db)
    assert state(db, old) == "succeeded"
    run(db, "select set_config('fairq.now', '2030-01-04 12:00:00+00', false)")
    maintain(db)
    assert state(db, old) is None
    assert days()[0] > "20300101"


def test_history_without_a_day_of_its_own_is_kept_and_swept_too(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"retention": "1 hour"}')""")
    at(db, "12:00:00")
    worker = register(db, lease="90 days")
    id_ = create(db)
    finish(db, worker, pop(db, worker, 1))
    assert (
        one(db, "select tableoid::regclass::text from fairq.finished_tasks") == "fairq.finished_tasks_default"
    )
    at(db, "12:59:00")
    maintain(db)
    assert state(db, id_) == "succeeded"
    at(db, "13:00:01")
    maintain(db)
    assert state(db, id_) is None


def test_transactions_of_another_server_are_not_waited_for(db: Conn) -> None:
    """After a restore, or in a database that a publication filled, noted ids may be far ahead of any here."""
    noted = "select array_agg(what order by what) from fairq.sweeps where floor >= 2^60"
    run(db, "select fairq.configure_queue('default', '{\"max_running\": 5}')")
    at(db, "12:00:00")
    maintain(db)
    for what in ("count held #queue default", "claims next xid"):
        run(db, "select fairq._set_sweep_floor(0, %s, (2^60)::bigint)", what)
    assert one(db, noted) == ["claims next xid", "count held #queue default"]
    at(db, "12:05:00")
    maintain(db)
    assert one(db, noted) is None
    ended = "select to_timestamp(floor / 1000000.0) from fairq.sweeps where shard_no = 0 and what = 'claims'"
    assert one(db, ended) == one(db, "select '2030-01-01 11:59:00+00'::timestamptz")


def test_a_clock_that_is_set_back_hides_nothing_from_the_sweeps(db: Conn) -> None:
    """I1: a claim that ran out would stay with its worker, a paused group never hear of a deadline."""
    at(db, "12:02:00")
    for what, when in {
        "claims": "12:00",
        "claims next": "12:01",
        "keys next": "12:01",
        "keys": "12:00",
    }.items():
        floor = "(extract(epoch from %s::timestamptz) * 1000000)::bigint"
        run(db, f"select fairq._set_sweep_floor(0, %s, {floor})", what, f"2030-01-01 {when}:00+00")
    maintain(db)
    at(db, "11:00:00")
    worker = register(db, lease="1 day")
    claimed = create(db, idempotency_key="k")
    assert pop(db, worker, 1, lease="10 seconds") == [claimed]
    run(db, "select fairq.pause_group('default', 'late')")
    late = create(db, "late", expires_at="2030-01-01 11:10:00+00")
    at(db, "11:30:00")
    did = maintain(db)
    assert (did["unclaimed"], did["expired"]) == (1, 1)
    assert (state(db, claimed), state(db, late)) == ("queued", "expired")
    assert pop(db, worker, 1) == [claimed]
    assert finish(db, worker, [claimed], attempt=2) == [claimed]
    run(db, "select fairq.configure_queue('default', '{\"retention\": 60}')")
    run(db, "update fairq.finished_tasks set finished_at = finished_at - interval '1 hour'")
    maintain(db)
    assert one(db, "select count(*) from fairq.idempotency_keys") == 0


def test_a_clock_that_is_set_back_and_forward_between_two_upkeeps_hides_nothing_from_the_sweeps(
    db: Conn,
) -> None:
    """I1: no upkeep saw it, but a worker that gave a sign of life before and meanwhile did."""
    at(db, "12:00:00")
    worker = register(db, lease="1 day")
    for minute in ("00", "01", "02", "03"):
        at(db, f"12:{minute}:00")
        maintain(db)
    run(db, "select fairq.heartbeat(%s)", worker)
    at(db, "11:00:00")
    claimed = create(db, concurrency_key="k")
    assert pop(db, worker, 1, lease="10 seconds") == [claimed]
    run(db, "select fairq.pause_group('default', 'late')")
    late = create(db, "late", expires_at="2030-01-01 11:00:10+00")
    run(db, "select fairq.heartbeat(%s)", worker)  # a pop is a sign of life only in the shards that it asks
    at(db, "12:03:05")
    did = maintain(db)
    assert (did["unclaimed"], did["expired"]) == (1, 1)
    assert state(db, late) == "expired"
    assert pop(db, worker, 1) == [claimed]


def test_a_dead_worker_is_lost_in_time_though_the_clock_was_set_back(db: Conn) -> None:
    """I7: not only when the clock has come as far again. Who lives goes on, and is no less alive."""
    at(db, "12:00:00")
    dead, alive = register(db, lease="1 minute"), register(db, lease="1 minute")
    tasks = create_many(db, "bob", 2)
    assert pop(db, dead, 1) + pop(db, alive, 1) == tasks
    at(db, "12:00:01")
    run(db, "select fairq.heartbeat(%s, p_circuit_trips => 3)", alive)
    at(db, "11:00:00")
    maintain(db)
    for seconds in ("40", "59"):
        at(db, f"11:00:{seconds}")
        run(db, "select fairq.heartbeat(%s)", alive)
    at(db, "11:01:30")
    assert maintain(db)["recovered"] == 1
    assert run(db, "select distinct worker_id from fairq.workers") == [(alive,)]
    assert run(db, "select distinct circuit_trips from fairq.heartbeats") == [(3,)]
    assert pop(db, alive, 1) == tasks[:1]
    assert finish(db, alive, tasks[1:]) == tasks[1:]


def test_what_is_known_of_idle_keys_is_swept_after_the_clock_was_set_back(db: Conn) -> None:
    at(db, "12:00:00")
    worker = register(db, lease="1 day")
    for time in ("12:00:00", "11:00:00"):
        at(db, time)
        create(db, concurrency_key=time)
        finish(db, worker, pop(db, worker))
        for minute in ("02", "04", "06"):
            at(db, time.replace("00:00", f"{minute}:00"))
            maintain(db)
        assert run(db, "select from fairq.lanes where queue = '#keys'") == []
