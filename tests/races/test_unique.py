"""`p_unique => 'waiting'`: one task of a key waits, and what was written before it an attempt sees."""

import threading
import time
from typing import Any

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    Held,
    call,
    column,
    create,
    finish,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    run,
    states,
)
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.sessions import in_background, pid_of, result, wait_until_blocked

UNIQUE: dict[str, Any] = {"idempotency_key": "index", "unique": "waiting"}
CREATE = "select fairq.create_task('bob', %s, p_idempotency_key => 'index', p_unique => 'waiting')"


def told_to_stop(conn: Conn, worker: int) -> list[tuple[int, ...]]:
    return run(conn, "select fairq.heartbeat(%s)", worker)


def outcomes(conn: Conn) -> dict[int, str]:
    return dict(run(conn, "select id, outcome from fairq.finished_tasks"))


def test_the_newest_waits_and_the_one_before_it_ends(db: Conn) -> None:
    worker = register(db)
    first = create(db, payload='{"n": 1}', **UNIQUE)
    other = create(db, idempotency_key="other", unique="waiting")
    ready = create(db, payload='{"n": 2}', **UNIQUE)
    promote(db)
    last = create(db, payload='{"n": 3}', **UNIQUE)
    assert pop(db, worker) == [other, last]
    assert outcomes(db) == {first: "cancelled", ready: "cancelled"}
    assert create(db, payload='{"n": 3}', idempotency_key="index") == last
    assert_consistent(db)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_one_that_has_begun_goes_on_and_the_new_one_runs_after_it(database: Database, when: str) -> None:
    """Also one that is popped while the transaction of the new one is open: it saw nothing of that."""
    app, conn = database.connect(), database.connect(autocommit=True)
    worker = register(conn)
    first = create(conn, **UNIQUE)
    popped: list[Held] = pop(conn, worker) if when == "before" else []
    second = create(app, **UNIQUE)
    popped = popped or pop(conn, worker)
    assert popped == [first]
    app.commit()
    promote(conn)
    assert told_to_stop(conn, worker) == []
    assert states(conn) == {first: "running", second: "queued"}
    finish(conn, worker, popped)
    (again,) = pop(conn, worker)
    assert again == second
    finish(conn, worker, [again])
    assert outcomes(conn) == {first: "succeeded", second: "succeeded"}
    maintain(conn)
    assert one(conn, "select count(*) from fairq.cancellations") == 0
    assert_consistent(conn)


def test_one_that_begun_and_is_to_be_tried_again_makes_room(db: Conn) -> None:
    worker = register(db)
    first = create(db, **UNIQUE)
    popped = pop(db, worker)
    second = create(db, **UNIQUE)
    finish(db, worker, popped, "retry")
    assert pop(db, worker) == [second]
    assert outcomes(db) == {first: "cancelled"}


def test_a_rollback_leaves_the_one_before_where_it_was(database: Database) -> None:
    app, conn = database.connect(), database.connect(autocommit=True)
    worker = register(conn)
    first = create(conn, **UNIQUE)
    create(app, **UNIQUE)
    app.rollback()
    assert create(conn, idempotency_key="index") == first
    assert pop(conn, worker) == [first]


def test_a_wish_to_cancel_it_is_still_heard(db: Conn) -> None:
    worker = register(db)
    first = create(db, **UNIQUE)
    pop(db, worker)
    create(db, **UNIQUE)
    assert one(db, "select fairq.cancel_task(%s)", first) is True
    assert told_to_stop(db, worker) == [(first,)]


def test_equal_keys_wait_for_each_other_and_one_is_left(database: Database) -> None:
    observer = database.connect(autocommit=True)
    first, second = database.connect(), database.connect()
    run(first, CREATE, "1")
    waiting = in_background(second, CREATE, ["2"])
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.commit()
    result(waiting)
    second.commit()
    worker = register(observer)
    (task,) = pop(observer, worker)
    assert one(observer, "select payload from fairq.tasks where id = %s", task) == 2


def retry(conn: Conn, id_: int, **options: bool) -> bool:
    return bool(call(conn, "retry_task", id_, **options)[0][0])


def failed(conn: Conn) -> int:
    worker = register(conn)
    id_ = create(conn, **UNIQUE)
    finish(conn, worker, pop(conn, worker), "failed")
    return id_


def test_an_ended_one_is_not_run_again_beside_another_of_its_key(db: Conn) -> None:
    first = failed(db)
    second = create(db, **UNIQUE)
    with refused(db, "QF010"):
        retry(db, first)
    assert not retry(db, first, strict=False)
    assert second in states(db)
    assert first not in column(db, "select id from fairq.tasks")
    assert outcomes(db) == {first: "failed"}


def test_a_key_that_was_swept_is_taken_again(db: Conn) -> None:
    first = failed(db)
    run(db, "delete from fairq.idempotency_keys")
    assert retry(db, first)
    assert create(db, idempotency_key="index") == first
    second = create(db, **UNIQUE)
    assert pop(db, register(db)) == [second]
    assert_consistent(db)


@pytest.mark.parametrize("swept", [False, True])
def test_who_takes_the_key_while_a_task_is_retried_waits_and_finds_it_in_line(
    database: Database, swept: bool
) -> None:
    observer = database.connect(autocommit=True)
    retries, creates = database.connect(), database.connect()
    first = failed(observer)
    if swept:
        run(observer, "delete from fairq.idempotency_keys")
    assert retry(retries, first)
    waiting = in_background(creates, CREATE, ["2"])
    assert wait_until_blocked(observer, pid_of(creates)) == [pid_of(retries)]
    retries.commit()
    ((second,),) = result(waiting)
    creates.commit()
    assert pop(observer, register(observer)) == [second]
    assert outcomes(observer) == {first: "cancelled"}
    assert_consistent(observer)


def test_who_retries_while_another_takes_the_key_waits_and_is_refused(database: Database) -> None:
    observer = database.connect(autocommit=True)
    retries, creates = database.connect(), database.connect()
    first = failed(observer)
    second = create(creates, **UNIQUE)
    waiting = in_background(retries, "select fairq.retry_task(%s)", [first])
    assert wait_until_blocked(observer, pid_of(retries)) == [pid_of(creates)]
    creates.commit()
    with pytest.raises(psycopg.Error) as caught:
        result(waiting)
    assert caught.value.sqlstate == "QF010"
    assert pop(observer, register(observer)) == [second]
    assert_consistent(observer)


@pytest.mark.parametrize(
    "wrong", [{"unique": "waiting"}, {"unique": "for ever", "idempotency_key": "x"}, {"unique": ""}]
)
def test_without_a_key_or_by_another_word_it_is_refused(db: Conn, wrong: dict[str, str]) -> None:
    with pytest.raises(psycopg.Error) as caught:
        create(db, **wrong)
    assert caught.value.sqlstate == "QF006"


def test_whatever_was_written_before_an_enqueue_is_seen_by_an_attempt(database: Database) -> None:
    """Three writers, two workers: no write is missed, though few enqueues lead to an attempt of their own."""
    conn = database.connect(autocommit=True)
    run(conn, "create table written (writer integer primary key, number integer not null)")
    run(conn, "insert into written select n, 0 from generate_series(1, 3) n")
    run(conn, "create table seen (writer integer, number integer)")
    done = threading.Event()
    made: list[int] = []
    failed: list[BaseException] = []

    def write(writer: int) -> None:
        own = database.connect()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            run(own, "update written set number = number + 1 where writer = %s", writer)
            run(own, CREATE, "{}")
            own.commit()
            made.append(writer)

    def work() -> None:
        own = database.connect(autocommit=True)
        worker = register(own)
        while not done.is_set() or run(own, "select from fairq.tasks limit 1"):
            held = pop(own, worker, 1)
            if held:
                run(own, "insert into seen select writer, number from written")
                finish(own, worker, held)

    def guarded(function: Any, *args: Any) -> threading.Thread:
        def body() -> None:
            try:
                function(*args)
            except BaseException as exc:
                failed.append(exc)

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    writers = [guarded(write, writer) for writer in (1, 2, 3)]
    working = [guarded(work) for _ in range(2)]
    for thread in writers:
        thread.join()
    done.set()
    for thread in working:
        thread.join()
    assert failed == []
    last = run(conn, "select writer, number from written order by writer")
    seen = run(conn, "select writer, max(number) from seen group by writer order by writer")
    assert seen == last
    attempts = one(conn, "select count(*) from fairq.finished_tasks where outcome = 'succeeded'")
    assert attempts < len(made)
    assert_consistent(conn)
