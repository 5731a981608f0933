"""register_worker, heartbeat, retire_worker, start_tasks, releases, and workers that are lost."""

from contextlib import suppress

import pytest

from tests.support.calls import (
    Conn,
    Held,
    at,
    contents,
    create,
    create_many,
    field,
    finish,
    maintain,
    one,
    pop,
    refused,
    register,
    release,
    run,
    start,
    state,
)
from tests.support.database import Database
from tests.support.sessions import call_in_background, pid_of, result, wait_until_blocked


def heartbeat(conn: Conn, worker: int | None) -> list[int]:
    return sorted(r[0] for r in run(conn, "select fairq.heartbeat(%s)", worker))


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("QF006", "null, '{default}', 1"),
        ("QF006", "'', '{default}', 1"),
        ("QF006", "repeat('x', 201), '{default}', 1"),
        ("QF003", "'w', null, 1"),
        ("QF003", "'w', '{}', 1"),
        ("QF003", "'w', '{default,nowhere}', 1"),
        ("QF003", "'w', '{null}', 1"),
        ("QF007", "'w', '{default}', null"),
        ("QF007", "'w', '{default}', 0"),
        ("QF007", "'w', '{default}', -1"),
        ("QF009", "'w', '{default}', 1, null"),
        ("QF009", "'w', '{default}', 1, '0'"),
        ("QF009", "'w', '{default}', 1, '-1 second'"),
    ],
)
def test_a_worker_with_bad_settings_is_refused(db: Conn, code: str, arguments: str) -> None:
    with refused(db, code):
        run(db, f"select fairq.register_worker({arguments})")


def test_worker_ids_are_never_used_again(db: Conn) -> None:
    first = register(db)
    run(db, "select fairq.retire_worker(%s)", first)
    assert register(db) > first


@pytest.mark.parametrize("stranger", [None, 0, 4711])
def test_a_heartbeat_of_a_stranger_is_refused(db: Conn, stranger: int | None) -> None:
    with refused(db, "QF004"):
        heartbeat(db, stranger)


def test_a_heartbeat_names_the_running_tasks_to_be_cancelled_until_they_are_finished(db: Conn) -> None:
    worker, other = register(db), register(db)
    mine, also_mine, theirs = create_many(db, "bob", 3)
    assert pop(db, worker, 2) == [mine, also_mine]
    assert pop(db, other, 1) == [theirs]
    run(db, "select fairq.cancel_task(i) from unnest(%s) i", [mine, theirs])
    run(db, "select fairq.cancel_task(%s)", mine)
    assert heartbeat(db, worker) == [mine]
    assert heartbeat(db, worker) == [mine]
    assert heartbeat(db, other) == [theirs]
    assert finish(db, worker, [mine], "cancelled") == [mine]
    assert heartbeat(db, worker) == []
    assert state(db, mine) == "cancelled"


def test_only_the_newest_sign_of_life_is_kept(db: Conn) -> None:
    at(db, "12:00:00")
    worker = register(db)
    for second in range(1, 5):
        at(db, f"12:00:0{second}")
        heartbeat(db, worker)
    assert run(
        db,
        "select count(*), max(beat_at) = '2030-01-01 12:00:04+00' from fairq.heartbeats where shard_no = 0",
    ) == [(1, True)]


def test_a_worker_that_gives_no_sign_of_life_loses_its_tasks(db: Conn) -> None:
    """S13, S28, S29, HR30: recorded as worker_lost, no failure; but what may be tried only once was tried."""
    at(db, "12:00:00")
    worker = register(db, lease="30 seconds")
    again = create(db)
    last = create(db, max_attempts=1)
    assert pop(db, worker, 2) == [again, last]
    claimed = create(db)
    assert pop(db, worker, 1, lease="1 hour") == [claimed]
    at(db, "12:00:30")
    maintain(db)
    assert [state(db, i) for i in (again, last, claimed)] == ["running", "running", "claimed"]
    at(db, "12:00:30.001")
    assert maintain(db)["recovered"] == 3
    assert state(db, last) == "failed"
    assert one(db, "select error ->> 'code' from fairq.finished_tasks where id = %s", last) == "worker_lost"
    assert run(db, "select task_id, attempt, worker_id, outcome from fairq.attempts order by 1") == [
        (again, 1, worker, "worker_lost"),
        (claimed, 1, worker, "lease_expired"),
    ]
    assert (attempts_left(db, again), attempts_left(db, claimed)) == (5, 5)
    other = register(db)
    assert pop(db, other, 10) == [again, claimed]
    assert (attempts_left(db, again), attempts_left(db, claimed)) == (4, 4)
    assert [field(db, i, "losses") for i in (again, claimed)] == [1, 0]


def lose(db: Conn, id_: int) -> None:
    worker = register(db)
    assert pop(db, worker, 1) == [id_]
    run(db, "update fairq.workers set lost_at = clock_timestamp() where worker_id = %s", worker)
    maintain(db)


def test_whoever_loses_three_workers_in_a_row_has_failed(db: Conn) -> None:
    """I15"""
    id_ = create(db, max_attempts=2)
    lose(db, id_)
    lose(db, id_)
    assert (field(db, id_, "losses"), attempts_left(db, id_)) == (2, 2)
    lose(db, id_)
    assert (state(db, id_), one(db, "select error ->> 'code' from fairq.finished_tasks")) == (
        "failed",
        "worker_lost",
    )


def test_an_attempt_that_ends_by_itself_clears_a_task_of_its_losses_and_failures_count_apart(
    db: Conn,
) -> None:
    """I15: a failure burns an attempt, a loss does not."""
    run(db, """select fairq.configure_queue('default', '{"retry_base": "0 s"}')""")
    id_ = create(db, max_attempts=3)
    lose(db, id_)
    worker = register(db)
    assert finish(db, worker, pop(db, worker, 1), "retry") == [id_]
    assert (field(db, id_, "losses"), attempts_left(db, id_)) == (0, 2)
    lose(db, id_)
    lose(db, id_)
    assert (field(db, id_, "losses"), attempts_left(db, id_)) == (2, 2)
    assert finish(db, worker, pop(db, worker, 1), "retry") == [id_]
    assert finish(db, worker, pop(db, worker, 1), "retry") == [id_]
    assert state(db, id_) == "failed"


def test_a_turn_only_claims_what_was_lost_before_and_the_row_says_so(db: Conn) -> None:
    """I15: it is started when nothing else is in flight; no lease ends the claim but the worker's own."""
    suspect = create(db)
    lose(db, suspect)
    fresh = create(db, "alice")
    worker = register(db)
    turn = """
        select id, losses, started_at is null from fairq.turn(%s, '{default}', '{9}', 9)
        where id is not null order by 1"""
    assert run(db, turn, worker) == [(suspect, 1, True), (fresh, None, False)]
    assert (state(db, suspect), field(db, suspect, "lease_expires_at")) == ("claimed", None)
    maintain(db)
    assert start(db, worker, [Held(suspect, 2, "bob")]) == [suspect]
    assert state(db, suspect) == "running"


def test_what_a_worker_only_claimed_was_not_lost_with_it(db: Conn) -> None:
    suspect = create(db)
    lose(db, suspect)
    gone = register(db)
    run(db, "select from fairq.turn(%s, '{default}', '{9}', 9)", gone)
    run(db, "update fairq.workers set lost_at = clock_timestamp() where worker_id = %s", gone)
    maintain(db)
    assert (field(db, suspect, "losses"), attempts_left(db, suspect)) == (1, 5)


def test_a_declined_task_pauses_for_twice_as_long_each_time_and_burns_no_attempt(db: Conn) -> None:
    """I15"""
    at(db, "11:00:00")
    worker = register(db, lease="20 hours")
    id_ = create(db)
    pauses = []
    for hour in range(12, 24):
        at(db, f"{hour}:00:00")
        assert finish(db, worker, pop(db, worker, 1), "declined") == [id_]
        pauses.append(
            float(one(db, "select extract(epoch from run_at - fairq._now()) from fairq.live_tasks"))
        )
        assert (state(db, id_), attempts_left(db, id_)) == ("scheduled", 5)
    for pause, doubled in zip(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300], strict=True):
        assert 0.75 * doubled <= pause <= 1.25 * doubled
    assert run(db, "select distinct outcome from fairq.attempts") == [("declined",)]


def test_a_declined_task_comes_back_soon_where_somebody_knows_its_kind(db: Conn) -> None:
    """A rolling deploy: nine old workers, and a new one."""
    worker = register(db)
    run(db, """select fairq.register_worker('new', '{default}', 1, p_kinds => '{"mail": null}')""")
    id_ = create(db, kind="mail")
    for _ in range(6):
        run(db, "select fairq.retry_task(%s)", id_)
        assert finish(db, worker, pop(db, worker, 1), "declined") == [id_]
    assert field(db, id_, "run_at - clock_timestamp() < interval '2.5 seconds'")


def test_a_worker_that_comes_wakes_what_was_declined_and_it_knows(db: Conn) -> None:
    """Not what waits for a back-off or a time of its own, and not other kinds; each at its old place."""
    old = register(db)
    first, second = create(db, kind="mail"), create(db, kind="mail")
    strange, failed = create(db, kind="strange"), create(db, kind="mail")
    assert finish(db, old, pop(db, old, 3), "declined") == [first, second, strange]
    assert finish(db, old, pop(db, old, 1), "retry") == [failed]
    later = create(db, kind="mail", run_at="2100-01-01")
    run(db, "select fairq.cancel_task(%s)", second)
    new = int(one(db, """select fairq.register_worker('new', '{default}', 1, p_kinds => '{"mail": null}')"""))
    assert pop(db, new) == [first]
    assert [state(db, task) for task in (second, strange, failed, later)] == ["cancelled", *["scheduled"] * 3]
    run(db, """select fairq.register_worker('next', '{default}', 1, p_kinds => '{"mail": null}')""")
    assert pop(db, new) == []


def test_a_worker_says_how_its_circuit_breaker_is(db: Conn) -> None:
    """D26. A turn, or a sign of life that does not say, leaves it as it was."""
    worker = register(db)
    seen = "select circuit_open, circuit_trips from fairq.worker_stats"
    assert run(db, seen) == [(False, 0)]
    run(db, "select fairq.heartbeat(%s, null, true, 3)", worker)
    assert run(db, seen) == [(True, 3)]
    heartbeat(db, worker)
    pop(db, worker)
    assert run(db, seen) == [(True, 3)]
    run(db, "select fairq.heartbeat(%s, null, false)", worker)
    assert run(db, seen) == [(False, 3)]


def test_a_worker_that_declares_fewer_attempts_is_heeded(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"retry_base": "0 s"}')""")
    worker = one(
        db, "select fairq.register_worker('w', '{default}', 9, p_kinds => '{\"parse\": 2, \"mail\": null}')"
    )
    parse, mail = create(db, kind="parse"), create(db, "alice", kind="mail")
    for _ in range(2):
        assert sorted(finish(db, worker, pop(db, worker, 2), "retry")) == [parse, mail]
    assert [state(db, i) for i in (parse, mail)] == ["failed", "overflow"]


@pytest.mark.parametrize(
    "kinds", ["[]", "7", '{"parse": 0}', '{"parse": 1.5}', '{"parse": "3"}', '{"parse": 99999999}']
)
def test_odd_kinds_are_refused(db: Conn, kinds: str) -> None:
    with refused(db, "QF014"):
        run(db, "select fairq.register_worker('w', '{default}', 9, p_kinds => %s::jsonb)", kinds)


def test_late_messages_of_a_lost_worker_change_nothing(db: Conn) -> None:
    """I10, D7: not even after another worker took the task over."""
    at(db, "12:00:00")
    lost = register(db, lease="30 seconds")
    id_ = create(db)
    assert pop(db, lost, 1) == [id_]
    at(db, "12:01:00")
    maintain(db)
    maintain(db)
    other = register(db)
    assert pop(db, other, 1) == [id_]
    before = contents(db)
    assert finish(db, lost, [id_]) == []
    assert finish(db, lost, [id_], attempt=2) == []
    assert release(db, lost, [id_], 1) == []
    assert start(db, lost, [id_], 1) == []
    assert contents(db) == before
    with refused(db, "QF004"):
        heartbeat(db, lost)
    with refused(db, "QF004"):
        pop(db, lost, 1)


def test_working_is_a_sign_of_life(db: Conn) -> None:
    """D14: who works needs no heartbeat to keep what it holds."""
    at(db, "12:00:00")
    worker = register(db, lease="30 seconds")
    at(db, "12:00:25")
    assert pop(db, worker, 1) == []
    at(db, "12:00:50")
    maintain(db)
    assert heartbeat(db, worker) == []


def test_a_worker_is_not_lost_while_a_pop_of_it_is_in_flight(database: Database) -> None:
    """I1: its tasks would be held by a worker that nobody knows and nobody recovers."""
    conn, house = database.connect(), database.connect(autocommit=True)
    watch = database.connect(autocommit=True)
    at(house, "12:00:00")
    lost, id_ = register(house, lease="30 seconds"), create(house)
    at(conn, "12:01:00")
    conn.commit()
    at(house, "12:01:00")
    assert pop(conn, lost, 1) == [id_]
    sweep = call_in_background(lambda: maintain(house))
    with suppress(TimeoutError):  # it need not wait
        wait_until_blocked(watch, pid_of(house), patience=1)
    conn.commit()
    result(sweep)
    at(house, "12:05:00")
    for _ in range(3):
        maintain(house)
    worker = register(house)
    assert pop(house, worker, 1) == [id_]


def test_a_worker_that_retires_while_a_pop_of_it_is_in_flight_leaves_nothing_behind(
    database: Database,
) -> None:
    """I1."""
    conn, other = database.connect(), database.connect(autocommit=True)
    watch = database.connect(autocommit=True)
    worker, id_ = register(other), create(other)
    assert pop(conn, worker, 1) == [id_]
    retiring = call_in_background(lambda: run(other, "select fairq.retire_worker(%s)", worker))
    with suppress(TimeoutError):  # it need not wait
        wait_until_blocked(watch, pid_of(other), patience=1)
    conn.commit()
    result(retiring)
    known = one(other, "select count(*) from fairq.workers where worker_id = %s", worker)
    assert known or state(other, id_) == "overflow", "the task is held by a worker that nobody knows"


def attempts_left(db: Conn, id_: int) -> int:
    return int(one(db, "select max_attempts - attempt from fairq.live_tasks where id = %s", id_))


def test_retiring_gives_everything_back_and_burns_no_attempt(db: Conn) -> None:
    """S27, HR17."""
    worker, other = register(db), register(db)
    running, claimed = create_many(db, "bob", 2)
    assert pop(db, worker, 1) == [running]
    assert pop(db, worker, 1, lease="1 minute") == [claimed]
    run(db, "select fairq.retire_worker(%s)", worker)
    run(db, "select fairq.retire_worker(%s)", worker)
    assert one(db, "select count(*) from fairq.workers where worker_id = %s", worker) == 0
    assert one(db, "select count(*) from fairq.heartbeats where worker_id = %s", worker) == 0
    assert pop(db, other, 10) == [running, claimed]
    assert {attempts_left(db, i) for i in (running, claimed)} == {4}, "of 5, with this one"
    with refused(db, "QF004"):
        pop(db, worker, 1)


def test_released_tasks_go_back_in_line_and_burn_no_attempt(db: Conn) -> None:
    """S27, I12."""
    worker = register(db)
    bob = create_many(db, "bob", 2)
    alice = create(db, "alice")
    assert sorted(pop(db, worker, 3)) == sorted([*bob, alice])
    assert release(db, worker, [bob[0], alice]) == [bob[0], alice]
    assert release(db, worker, [bob[0]]) == []
    assert sorted(pop(db, worker, 10)) == [bob[0], alice]
    assert {attempts_left(db, i) for i in (bob[0], alice)} == {4}, "of 5, with this one"
    columns = "task_id, attempt, worker_id, outcome, error"
    assert run(db, f"select {columns} from fairq.attempts order by 1") == [  # noqa: S608
        (id_, 1, worker, "released", None) for id_ in (bob[0], alice)
    ]


@pytest.mark.parametrize("call", ["finish_tasks", "start_tasks", "held_tasks"])
def test_ids_without_attempts_are_refused(db: Conn, call: str) -> None:
    worker = register(db)
    create(db)
    (id_,) = pop(db, worker, 1, lease="1 minute")
    for attempts in ([], [1, 1], None):
        with refused(db, "QF011"):
            run(db, f"select fairq.{call}(%s, %s, %s)", worker, [id_], attempts)


def test_stale_releases_and_starts_change_nothing(db: Conn) -> None:
    """I10, H3, HR12."""
    worker, other = register(db), register(db)
    id_ = create(db)
    waiting = create(db)
    assert pop(db, worker, 1, lease="1 minute") == [id_]
    before = contents(db)
    for call in (release, start):
        assert call(db, other, [id_], 1) == []
        assert call(db, worker, [id_], 2) == []
        assert call(db, worker, [waiting], 0) == []
        assert call(db, None, [waiting], 0) == []
    assert contents(db) == before


def test_a_claimed_task_starts_once_and_only_within_its_lease(db: Conn) -> None:
    """H3, H20."""
    at(db, "12:00:00")
    worker = register(db)
    first, second = create_many(db, "bob", 2)
    assert pop(db, worker, 2, lease="10 seconds") == [first, second]
    at(db, "12:00:09")
    assert start(db, worker, [first]) == [first]
    assert start(db, worker, [first]) == []
    assert run(
        db,
        "select state, lease_expires_at, started_at is not null from fairq.live_tasks where id = %s",
        first,
    ) == [("running", None, True)]
    at(db, "12:00:10")
    assert start(db, worker, [second]) == []
    assert maintain(db)["unclaimed"] == 1
    assert state(db, first) == "running"
    assert state(db, second) in ("overflow", "queued")


def test_no_worker_holds_nothing(db: Conn) -> None:
    """I10: null is not the holder of tasks that wait, whatever their attempt."""
    worker = register(db)
    id_ = create(db)
    assert pop(db, worker, 1) == [id_]
    at(db, "12:00:00")
    assert finish(db, worker, [id_], "retry", delay="0") == [id_]
    before = contents(db)
    for call in ("finish_tasks", "start_tasks", "held_tasks"):
        assert run(db, f"select fairq.{call}(null, %s, %s)", [id_], [1]) == []
    assert run(db, "select fairq.report_progress(null, %s, %s, %s)", [id_], [1], [0.5]) == []
    assert contents(db) == before
