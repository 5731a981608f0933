"""retry_task: by hand, of ended tasks and of scheduled ones."""

from typing import Any

import pytest

from tests.support.calls import (
    Conn,
    at,
    column,
    create,
    field,
    finish,
    one,
    pop,
    promote,
    register,
    run,
    state,
)
from tests.support.database import Database


def retry(conn: Conn, id_: int) -> bool:
    return bool(one(conn, "select fairq.retry_task(%s)", id_))


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "expired"])
def test_an_ended_task_runs_again_with_one_attempt_more(db: Conn, outcome: str) -> None:
    at(db, "12:00:00")
    worker = register(db)
    id_ = create(db, max_attempts=1, expires_at="2030-01-01 12:00:10+00", payload='{"p": 1}')
    assert pop(db, worker, 1) == [id_]
    assert finish(db, worker, [id_], outcome) == [id_]
    at(db, "12:00:20")
    assert retry(db, id_)
    assert not retry(db, id_)
    assert one(db, "select count(*) from fairq.finished_tasks") == 0
    assert pop(db, worker, 1) == [id_]
    assert [field(db, id_, c) for c in ("attempt", "max_attempts", "payload")] == [2, 2, {"p": 1}]


def test_what_was_asked_for_is_kept_in_the_history_and_comes_back(db: Conn) -> None:
    """Every column of a task, whatever columns it has."""
    worker = register(db)
    times = {"run_at": "2020-01-01 00:00:00+00", "expires_at": "2040-01-01 00:00:00+00", "timeout": "90 s"}
    id_ = create(
        db, priority=3, cost=2.5, headers='{"trace": 1}', payload='{"p": 1}', max_attempts=2, **times
    )
    held = pop(db, worker, 1)
    names = "from pg_attribute where attrelid = 'fairq.tasks'::regclass and attnum > 0 and not attisdropped"
    texts = column(db, f"select attname {names} and atttypid = 'text'::regtype")
    for name in {*texts} - {"queue", "group_key", "kind"}:
        run(db, f"update fairq.tasks set {name} = 'the {name}' where id = %s", id_)  # noqa: S608

    def row(table: str) -> dict[str, Any]:
        return dict(one(db, f"select to_jsonb(t) from fairq.{table} t where id = %s", id_))  # noqa: S608

    asked = row("tasks")
    assert {name for name, value in asked.items() if value is None} == {"spared", "losses"}
    assert finish(db, worker, held, "failed") == [id_]
    kept = row("finished_tasks")
    lost = {name for name in asked if asked[name] != kept.get(name)}
    assert lost == {"sequence", "attempt", "scheduled"}
    assert retry(db, id_)
    again = row("tasks")
    changed = {name for name in asked if asked[name] != again[name]}
    assert changed == {"sequence", "attempt", "spared", "run_at", "expires_at"}


def test_a_task_that_succeeded_does_not_run_again(db: Conn) -> None:
    worker = register(db)
    id_ = create(db)
    pop(db, worker, 1)
    finish(db, worker, [id_])
    assert not retry(db, id_)
    assert not retry(db, 4711)
    assert not one(db, "select fairq.retry_task(null)")
    assert state(db, id_) == "succeeded"


def test_a_task_that_waits_for_its_schedule_or_back_off_becomes_runnable_now(db: Conn) -> None:
    at(db, "12:00:00")
    worker = register(db)
    id_ = create(db, run_at="2030-01-02 00:00:00+00")
    promote(db)
    assert retry(db, id_)
    assert pop(db, worker, 1) == [id_]
    assert finish(db, worker, [id_], "retry", delay="1 day") == [id_]
    assert retry(db, id_)
    assert pop(db, worker, 1) == [id_]
    assert field(db, id_, "attempt") == 2


def test_waiting_and_running_tasks_are_left_alone(db: Conn) -> None:
    worker = register(db)
    id_ = create(db)
    assert not retry(db, id_)
    promote(db)
    assert not retry(db, id_)
    assert pop(db, worker, 1) == [id_]
    assert not retry(db, id_)


def test_an_open_transaction_that_retries_a_scheduled_task_holds_up_nobody(database: Database) -> None:
    """I2: promotion passes the task that somebody else has locked, and finds it later."""
    conn, app = database.connect(autocommit=True), database.connect()
    run(conn, "set lock_timeout = '1s'")
    at(conn, "12:00:00")
    at(app, "12:00:00")
    worker = register(conn)
    scheduled = create(conn, run_at="2030-01-01 12:00:10+00")
    promote(conn)
    app.commit()
    assert retry(app, scheduled)
    at(conn, "12:00:10")
    other = create(conn, "alice")
    assert pop(conn, worker, 10) == [other]
    run(conn, "select fairq.maintain()")
    app.rollback()
    assert pop(conn, worker, 10) == [scheduled]


def test_both_ends_of_a_race_for_a_due_task_run_it_once(database: Database) -> None:
    conn, app = database.connect(autocommit=True), database.connect()
    at(conn, "12:00:00")
    at(app, "12:00:00")
    worker = register(conn)
    scheduled = create(conn, run_at="2030-01-01 12:00:10+00")
    promote(conn)
    app.commit()
    assert retry(app, scheduled)
    at(conn, "12:00:10")
    assert pop(conn, worker, 10) == []
    app.commit()
    assert pop(conn, worker, 10) == [scheduled]
    assert pop(conn, worker, 10) == []
