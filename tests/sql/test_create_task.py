"""create_task: what it stores, what it refuses, idempotency keys."""

from typing import Any

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    at,
    create,
    create_many,
    field,
    finish,
    needs_one_order,
    pop,
    promote,
    refused,
    register,
    run,
    state,
)
from tests.support.database import Database

BAD_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("QF003", {"queue": "nowhere"}),
    ("QF003", {"queue": None}),
    ("QF003", {"queue": "#keys"}),
    ("QF006", {"kind": None}),
    ("QF006", {"kind": ""}),
    ("QF006", {"kind": "k" * 201}),
    ("QF006", {"idempotency_key": ""}),
    ("QF006", {"idempotency_key": "k" * 501}),
    ("QF006", {"concurrency_key": ""}),
    ("QF006", {"concurrency_key": "k" * 501}),
    ("QF007", {"priority": 1_000_001}),
    ("QF007", {"priority": -1_000_001}),
    ("QF007", {"max_attempts": 0}),
    ("QF007", {"max_attempts": -1}),
    ("QF007", {"max_attempts": 1_000_001}),
    ("QF008", {"cost": 0.0}),
    ("QF008", {"cost": -1.0}),
    ("QF008", {"cost": float("nan")}),
    ("QF008", {"cost": float("inf")}),
    ("QF008", {"cost": float("-inf")}),
    ("QF008", {"cost": 1_000_001.0}),
    ("QF009", {"run_at": "infinity"}),
    ("QF009", {"run_at": "-infinity"}),
    ("QF009", {"expires_at": "infinity"}),
    ("QF009", {"expires_at": "-infinity"}),
    ("QF009", {"timeout": "0"}),
    ("QF009", {"timeout": "-1 second"}),
    ("QF009", {"timeout": "1000000001 seconds"}),
    ("QF009", {"timeout": "3000000 years"}),
]


def test_every_option_is_stored(db: Conn) -> None:
    """F2, F7, D15."""
    run(db, "select fairq.configure_queue('docs')")
    at(db, "12:00:00")
    options = {
        "queue": "docs",
        "kind": "parse",
        "priority": -7,
        "run_at": "2030-01-01 13:00:00+00",
        "expires_at": "2030-01-01 14:00:00+00",
        "max_attempts": 9,
        "cost": 2.5,
        "timeout": "00:01:30",
        "idempotency_key": "once",
        "concurrency_key": "alone",
        "headers": '{"trace": 1}',
    }
    id_ = create(db, "alice", payload='{"file": "a.pdf"}', **options)
    ((stored),) = run(
        db,
        """
        select group_key, payload, queue, kind, priority, run_at = '2030-01-01 13:00:00+00',
          expires_at = '2030-01-01 14:00:00+00', max_attempts, cost, timeout = '00:01:30', idempotency_key,
          concurrency_key, headers, scheduled, attempt, created_at = '2030-01-01 12:00:00+00'
        from fairq.tasks where id = %s
        """,
        id_,
    )
    expected = ("alice", {"file": "a.pdf"}, "docs", "parse", -7, True, True, 9, 2.5, True)
    assert stored == (*expected, "once", "alone", {"trace": 1}, True, 0, True)
    assert state(db, id_) == "scheduled"


def test_the_defaults_are_those_of_the_queue(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"max_attempts": 3}')""")
    id_ = create(db)
    columns = "queue, kind, priority, max_attempts, cost, state, expires_at, timeout"
    assert run(db, f"select {columns} from fairq.live_tasks where id = %s", id_) == [  # noqa: S608
        ("default", "default", 0, 3, 1.0, "overflow", None, None)
    ]


@pytest.mark.parametrize("group", [None, "", "g" * 501, "ü" * 251])
def test_a_group_key_that_is_missing_or_too_long_is_refused(db: Conn, group: str | None) -> None:
    with refused(db, "QF001"):
        run(db, "select fairq.create_task(%s, '{}')", group)


@pytest.mark.parametrize("group", ["g" * 500, "ü" * 250, "\t", "a'b\"c\\", "日本", "%s {} $1"])
def test_any_other_text_is_a_group(db: Conn, group: str) -> None:
    worker = register(db)
    create(db, group)
    assert run(db, "select group_key from fairq.pop_tasks('default', 1, %s)", worker) == [(group,)]


@pytest.mark.parametrize(("code", "options"), BAD_OPTIONS)
def test_bad_options_are_refused_and_nothing_changes(db: Conn, code: str, options: dict[str, Any]) -> None:
    with refused(db, code):
        create(db, **options)


def test_a_null_payload_is_refused_a_json_null_is_not(db: Conn) -> None:
    with refused(db, "QF002"):
        run(db, "select fairq.create_task('bob', null)")
    create(db, payload="null")


def test_payloads_up_to_the_limit_are_accepted(db: Conn) -> None:
    """Bytes of the text form, quotes included."""
    run(db, """select fairq.configure_cluster('{"payload_limit": 1000}')""")
    create(db, payload=f'"{"x" * 998}"')
    with refused(db, "QF002"):
        create(db, payload=f'"{"x" * 999}"')
    with refused(db, "QF002"):
        create(db, payload=f'"{"ü" * 500}"')


def test_the_default_payload_limit_is_one_mebibyte_also_for_what_compresses_well(db: Conn) -> None:
    create(db, payload=f'"{"x" * (2**20 - 2)}"')
    with refused(db, "QF002"):
        create(db, payload=f'"{"x" * (2**20 - 1)}"')


def test_a_task_is_seen_only_after_commit_and_never_after_a_rollback(database: Database) -> None:
    """S33, I1."""
    app, other = database.connect(), database.connect(autocommit=True)
    worker = register(other)
    create(app)
    assert pop(other, worker, 1) == []
    app.rollback()
    assert pop(other, worker, 1) == []
    id_ = create(app)
    assert pop(other, worker, 1) == []
    app.commit()
    assert pop(other, worker, 1) == [id_]


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
def test_creating_works_in_every_isolation_level(database: Database, level: psycopg.IsolationLevel) -> None:
    """I2."""
    conn = database.connect()
    conn.isolation_level = level
    ids = [create(conn), *create_many(conn, "bob", 2), create(conn, idempotency_key="k")]
    run(conn, "select fairq.cancel_task(%s)", ids[0])
    conn.commit()
    conn.isolation_level = None
    assert sorted(pop(conn, register(conn), 10)) == ids[1:]


def test_a_time_in_the_past_means_now(db: Conn) -> None:
    at(db, "12:00:00")
    id_ = create(db, run_at="2029-01-01 00:00:00+00")
    assert state(db, id_) == "overflow"
    assert pop(db, register(db), 1) == [id_]


def test_a_scheduled_task_is_invisible_until_it_is_due(db: Conn) -> None:
    """HR10, S3, S9."""
    at(db, "12:00:00")
    worker = register(db)
    id_ = create(db, run_at="2030-01-01 12:00:10+00")
    assert state(db, id_) == "scheduled"
    assert pop(db, worker, 1) == []
    at(db, "12:00:09.999")
    assert pop(db, worker, 1) == []
    at(db, "12:00:10")
    assert pop(db, worker, 1) == [id_]


def test_due_tasks_stand_behind_what_their_group_has_waiting(db: Conn) -> None:
    """I12: a schedule saves no place."""
    at(db, "12:00:00")
    worker = register(db)
    later = create(db, run_at="2030-01-01 12:00:10+00")
    promote(db)
    first = create_many(db, "bob", 3)
    at(db, "12:00:10")
    assert pop(db, worker, 10) == [*first, later]


def test_within_a_group_higher_priority_is_first_then_the_older(db: Conn) -> None:
    """H1, H31, S16: also against tasks that are queued already."""
    worker = register(db)
    promote(db)
    low = create_many(db, "bob", 3)
    assert promote(db) == 3
    high = create(db, priority=5)
    middle = create(db, priority=2)
    higher = create(db, priority=5)
    assert pop(db, worker, 10) == [high, higher, middle, *low]


def test_priority_does_not_help_against_other_groups(db: Conn) -> None:
    needs_one_order(db)
    worker = register(db)
    promote(db)
    bob = create_many(db, "bob", 3)
    alice = create_many(db, "alice", 3, priority=1000)
    assert pop(db, worker, 10) == [bob[0], alice[0], bob[1], alice[1], bob[2], alice[2]]


# Idempotency keys


def test_the_same_key_and_payload_give_the_same_id(db: Conn) -> None:
    """S12: also while it runs and after it ended."""
    worker = register(db)
    id_ = create(db, idempotency_key="k", payload='{"a": 1, "b": 2}')
    assert create(db, idempotency_key="k", payload='{"b": 2, "a": 1}') == id_
    assert pop(db, worker, 10) == [id_]
    assert create(db, idempotency_key="k", payload='{"a": 1, "b": 2}') == id_
    assert finish(db, worker, [id_]) == [id_]
    assert create(db, idempotency_key="k", payload='{"a": 1, "b": 2}') == id_
    assert pop(db, worker, 10) == []


@pytest.mark.parametrize("options", [{"payload": '{"a": 2}'}, {"kind": "other"}])
def test_the_same_key_with_another_task_is_refused(db: Conn, options: dict[str, Any]) -> None:
    create(db, idempotency_key="k", payload='{"a": 1}')
    with refused(db, "QF010"):
        create(db, **{"idempotency_key": "k", "payload": '{"a": 1}', **options})


def test_keys_are_those_of_a_group_in_a_queue(db: Conn) -> None:
    run(db, "select fairq.configure_queue('docs')")
    ids = {
        create(db, "bob", idempotency_key="k"),
        create(db, "alice", idempotency_key="k"),
        create(db, "bob", idempotency_key="k", queue="docs"),
        create(db, "bob", idempotency_key="K"),
        create(db, "bob"),
    }
    assert len(ids) == 5


def test_a_key_is_free_again_after_a_rollback(database: Database) -> None:
    conn = database.connect()
    create(conn, idempotency_key="k", payload="1")
    conn.rollback()
    id_ = create(conn, idempotency_key="k", payload="2")
    conn.commit()
    assert pop(conn, register(conn), 10) == [id_]


def test_a_key_is_free_again_when_its_task_ended_longer_ago_than_the_retention(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"retention": "1 hour"}')""")
    at(db, "12:00:00")
    worker = register(db)
    first = create(db, idempotency_key="k")
    pop(db, worker, 1)
    finish(db, worker, [first])
    at(db, "12:59:00")
    run(db, "select fairq.maintain()")
    assert create(db, idempotency_key="k") == first
    at(db, "13:00:01")
    run(db, "select fairq.maintain()")
    assert create(db, idempotency_key="k") != first


def test_a_key_of_a_live_task_is_kept_however_old_it_is(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"retention": "1 second"}')""")
    at(db, "12:00:00")
    first = create(db, idempotency_key="k")
    at(db, "23:00:00")
    run(db, "select fairq.maintain()")
    assert create(db, idempotency_key="k") == first
    assert field(db, first, "idempotency_key") == "k"
