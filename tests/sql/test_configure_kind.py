"""configure_kind: what is declared of a kind holds however a task is created."""

from typing import Any

import pytest

from tests.support.calls import (
    Conn,
    call,
    column,
    create,
    create_all,
    field,
    finish,
    one,
    pop,
    refused,
    register,
    run,
)

DECLARED: dict[str, Any] = {"max_attempts": 2, "priority": 7, "cost": 0.5, "timeout": "30 seconds"}
FIELDS = ("max_attempts", "priority", "cost", "extract(epoch from timeout)")


def declare(conn: Conn, kind: str = "parse", queue: str = "default", **settings: Any) -> None:
    call(conn, "configure_kind", queue, kind, **settings)


def fields(conn: Conn, id_: int) -> list[Any]:
    return [field(conn, id_, name) for name in FIELDS]


def test_what_the_caller_does_not_say_is_as_declared(db: Conn) -> None:
    declare(db, **DECLARED)
    parse = create(db, kind="parse")
    assert fields(db, parse) == [2, 7, 0.5, 30]
    assert fields(db, create(db, kind="other")) == [5, 0, 1, None]
    both = create_all(db, "bob", "alice", kind="parse")
    keyed = create_all(db, "bob", "alice", kind="parse", idempotency_keys=["a", "b"])
    for id_ in (*both, *keyed):
        assert fields(db, id_) == [2, 7, 0.5, 30]
    assert set(
        column(db, "select priority from fairq.rings where sequence = any(%s)", [parse, *both, *keyed])
    ) == {7}


def test_what_the_caller_says_goes_before_but_for_more_attempts(db: Conn) -> None:
    declare(db, **DECLARED)
    said: dict[str, Any] = {"priority": 0, "cost": 1, "timeout": "1 second", "kind": "parse"}
    assert fields(db, create(db, max_attempts=1, **said)) == [1, 0, 1, 1]
    assert fields(db, create(db, max_attempts=9, **said)) == [2, 0, 1, 1]
    assert fields(db, create_all(db, "bob", max_attempts=9, priorities=[0], **said)[0]) == [2, 0, 1, 1]


def test_a_declaration_is_of_one_queue_and_what_is_taken_away_holds_no_more(db: Conn) -> None:
    call(db, "configure_queue", "docs", max_attempts=8)
    declare(db, **DECLARED)
    assert fields(db, create(db, kind="parse", queue="docs")) == [8, 0, 1, None]
    declare(db, max_attempts=None, timeout=None)
    assert fields(db, create(db, kind="parse")) == [5, 7, 0.5, None]


def test_a_task_of_which_one_attempt_is_declared_never_runs_twice(db: Conn) -> None:
    declare(db, max_attempts=1)
    id_ = create(db, kind="parse")
    worker = register(db)
    assert finish(db, worker, pop(db, worker), "retry") == [id_]
    assert one(db, "select outcome from fairq.finished_tasks where id = %s", id_) == "failed"


@pytest.mark.parametrize(
    ("code", "queue", "kind", "settings"),
    [
        ("QF003", "nowhere", "parse", {}),
        ("QF003", "#keys", "parse", {}),
        ("QF006", "default", "", {}),
        ("QF006", "default", None, {}),
        ("QF006", "default", "x" * 201, {}),
        ("QF007", "default", "parse", {"max_attempts": 0}),
        ("QF007", "default", "parse", {"priority": 1_000_001}),
        ("QF007", "default", "parse", {"cost": 0}),
        ("QF009", "default", "parse", {"timeout": 0}),
        ("QF009", "default", "parse", {"timeout": "1000000001 seconds"}),
        ("QF014", "default", "parse", {"queue": "docs"}),
        ("QF014", "default", "parse", {"owner": "x" * 201}),
        ("QF014", "default", "parse", {"retention": "1 day"}),
    ],
)
def test_what_cannot_be_declared_is_refused(
    db: Conn, code: str, queue: str, kind: str | None, settings: dict[str, Any]
) -> None:
    with refused(db, code):
        call(db, "configure_kind", queue, kind, **settings)
    assert run(db, "select from fairq.kinds") == []


def test_what_belongs_to_an_app_no_other_one_changes(db: Conn) -> None:
    declare(db, max_attempts=2, owner="")
    declare(db, **DECLARED, owner="shop")
    for owner in ("", "mail"):
        with refused(db, "QF014"):
            declare(db, **{**DECLARED, "max_attempts": 3}, owner=owner)
        declare(db, **DECLARED, owner=owner)
    assert run(db, "select owner, max_attempts from fairq.kinds") == [("shop", 2)]
    declare(db, max_attempts=4)
    declare(db, owner=None)
    declare(db, max_attempts=5, owner="mail")
    assert run(db, "select owner, max_attempts from fairq.kinds") == [("mail", 5)]
