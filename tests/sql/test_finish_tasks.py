"""finish_tasks: outcomes, retries, and that only the holder finishes."""

import json
import random
from typing import Any

import pytest

from tests.support.calls import (
    FINISH,
    Conn,
    at,
    column,
    contents,
    create,
    create_many,
    field,
    finish,
    held_by,
    needs_one_order,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
    start,
    state,
)


def held(db: Conn, **options: Any) -> tuple[int, int]:
    worker = register(db)
    id_ = create(db, **options)
    assert pop(db, worker, 1) == [id_]
    return worker, id_


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "cancelled", "expired"])
def test_an_ended_task_moves_to_the_history(db: Conn, outcome: str) -> None:
    """HR14, HR26."""
    at(db, "12:00:00")
    worker, id_ = held(db, priority=3, cost=2.0, kind="parse", headers='{"h": 1}', payload='{"p": 1}')
    at(db, "12:00:05")
    accepted = finish(db, worker, [id_], outcome, results=['{"r": 1}'], errors=['{"e": 1}'])
    assert accepted == [id_]
    assert one(db, "select count(*) from fairq.tasks") == 0
    assert run(
        db,
        """
        select outcome, worker_id, attempt, priority, cost, kind, headers, payload, result, error,
          started_at = '2030-01-01 12:00:00+00', finished_at = '2030-01-01 12:00:05+00'
        from fairq.finished_tasks where id = %s
        """,
        id_,
    ) == [(outcome, worker, 1, 3, 2.0, "parse", {"h": 1}, {"p": 1}, {"r": 1}, {"e": 1}, True, True)]


def test_payloads_of_some_kilobytes_stay_in_their_rows(db: Conn) -> None:
    """Put aside, they would be written twice over, and once more when the task ends. On every day."""
    run(db, "select fairq._rotate_partitions()")
    aside = column(
        db,
        "select format('%%s', c.reltoastrelid::regclass) from pg_class c"
        " left join pg_inherits i on i.inhrelid = c.oid"
        " where c.oid = 'fairq.tasks'::regclass or i.inhparent = 'fairq.finished_tasks'::regclass",
    )
    assert len(aside) >= 3
    payload = json.dumps([random.Random(1).random() for _ in range(150)])
    assert 2500 < len(payload) < 3500
    worker, id_ = held(db, payload=payload)
    finish(db, worker, [id_])
    assert one(db, "select pg_column_size(payload) from fairq.finished_tasks where id = %s", id_) > 1000
    for table in aside:
        assert one(db, f"select count(*) from {table}") == 0  # noqa: S608


def test_null_arrays_mean_that_all_succeeded(db: Conn) -> None:
    worker = register(db)
    ids = create_many(db, "bob", 3)
    assert pop(db, worker, 3) == ids
    accepted = run(db, "select fairq.finish_tasks(%s, %s, %s)", worker, ids, [1, 1, 1])
    assert sorted(r[0] for r in accepted) == ids
    assert {state(db, id_) for id_ in ids} == {"succeeded"}


def test_tasks_of_one_call_may_end_in_different_ways(db: Conn) -> None:
    """D36."""
    worker = register(db)
    ids = create_many(db, "bob", 4)
    assert pop(db, worker, 4) == ids
    outcomes = ["failed", "retry", "succeeded", "cancelled"]
    run(db, "select fairq.finish_tasks(%s, %s, %s, %s)", worker, ids, [1] * 4, outcomes)
    assert [state(db, id_) for id_ in ids] == ["failed", "scheduled", "succeeded", "cancelled"]


def test_nothing_to_finish_is_no_error(db: Conn) -> None:
    assert run(db, "select fairq.finish_tasks(1, '{}', '{}')") == []
    assert run(db, "select fairq.finish_tasks(1, null, null)") == []


@pytest.mark.parametrize(
    "arguments",
    [
        "'{1,2}', '{1}'",
        "'{1}', null",
        "'{1}', '{1}', '{succeeded,failed}'",
        "'{1}', '{1}', null, array['1', '2']::jsonb[]",
        "'{1}', '{1}', null, null, array['1', '2']::jsonb[]",
        "'{1}', '{1}', null, null, null, array['1 s', '2 s']::interval[]",
    ],
)
def test_arrays_of_other_lengths_are_refused(db: Conn, arguments: str) -> None:
    worker, _ = held(db)
    with refused(db, "QF011"):
        run(db, f"select fairq.finish_tasks({worker}, {arguments})")


@pytest.mark.parametrize("outcome", ["done", "", "Succeeded", None])
def test_an_unknown_outcome_is_refused(db: Conn, outcome: str | None) -> None:
    worker, id_ = held(db)
    with refused(db, "QF012"):
        run(db, FINISH, *held_by(worker, [id_]), [outcome])


def test_a_stale_call_changes_nothing_and_says_so(db: Conn) -> None:
    """I10, D3, D6, D7: another worker, another attempt, an unknown task, a task that waits."""
    worker, id_ = held(db)
    other = register(db)
    waiting = create(db)
    before = contents(db)
    for holder, ids, attempt in (
        (other, [id_], 1),
        (worker, [id_], 2),
        (worker, [id_], 0),
        (worker, [4711], 1),
        (worker, [waiting], 0),
        (None, [waiting], 0),
        (None, [id_], 1),
    ):
        for outcome in ("succeeded", "retry"):
            assert finish(db, holder, ids, outcome, attempt=attempt) == []
    assert contents(db) == before
    assert finish(db, worker, [id_]) == [id_]
    assert finish(db, worker, [id_]) == []


def test_a_task_named_twice_is_finished_once(db: Conn) -> None:
    run(db, """select fairq.configure_queue('default', '{"group_max_running": 1}')""")
    worker, id_ = held(db)
    assert finish(db, worker, [id_, id_]) == [id_]
    assert run(db, "select outcome from fairq.finished_tasks where id = %s", id_) == [("succeeded",)]
    assert one(db, "select sum(freed) from fairq.rings where freed > 0") == 1


@pytest.mark.parametrize(
    ("first", "becomes"), [("postponed", "scheduled"), ("succeeded", "succeeded"), ("failed", "failed")]
)
def test_a_task_named_twice_leaves_as_it_is_named_first(db: Conn, first: str, becomes: str) -> None:
    """I1: it does not end because of what else is said."""
    worker, id_ = held(db)
    query = "select fairq.finish_tasks(%s, %s, %s, %s, p_retry_delays => %s::interval[])"
    outcomes = [first, "succeeded", "released"]
    assert run(db, query, worker, [id_] * 3, [1] * 3, outcomes, ["1 day"] * 3) == [(id_,)]
    assert state(db, id_) == becomes


def test_only_the_last_attempt_of_a_task_can_be_finished(db: Conn) -> None:
    """I10: released and taken over by another worker."""
    worker, id_ = held(db)
    other = register(db)
    assert release(db, worker, [id_]) == [id_]
    assert pop(db, other, 1) == [id_]
    assert finish(db, worker, [id_]) == []
    assert finish(db, worker, [id_], attempt=2) == []
    assert finish(db, other, [id_]) == []
    assert finish(db, other, [id_], attempt=2) == [id_]


def test_a_claimed_task_that_never_started_cannot_be_finished(db: Conn) -> None:
    """H3."""
    worker = register(db)
    id_ = create(db)
    assert pop(db, worker, 1, lease="1 minute") == [id_]
    assert finish(db, worker, [id_]) == []
    assert start(db, worker, [id_]) == [id_]
    assert finish(db, worker, [id_]) == [id_]


def test_a_retry_waits_for_its_back_off_and_leaves_an_attempt(db: Conn) -> None:
    """HR14, D10."""
    at(db, "12:00:00")
    worker, id_ = held(db)
    at(db, "12:00:01")
    assert finish(db, worker, [id_], "retry", errors=['{"code": "X"}'], delay="10 seconds") == [id_]
    columns = "state, attempt, worker_id, block, started_at, run_at = '2030-01-01 12:00:11+00'"
    assert run(db, f"select {columns} from fairq.live_tasks") == [("scheduled", 1, None, None, None, True)]  # noqa: S608
    assert run(
        db,
        "select attempt, worker_id, outcome, error, started_at = '2030-01-01 12:00:00+00',"
        " ended_at = '2030-01-01 12:00:01+00' from fairq.attempts where task_id = %s",
        id_,
    ) == [(1, worker, "retry", {"code": "X"}, True, True)]
    assert pop(db, worker, 1) == []
    at(db, "12:00:11")
    assert pop(db, worker, 1) == [id_]
    assert field(db, id_, "attempt") == 2


def test_back_off_doubles_within_its_jitter_up_to_the_cap(db: Conn) -> None:
    """HR25: base 8 s, cap 100 s, 25 percent both ways."""
    run(
        db,
        """select fairq.configure_queue('default',
          '{"retry_base": "8 s", "retry_cap": "100 s", "max_attempts": 50}')""",
    )
    at(db, "12:00:00")
    worker = register(db)
    seen = []
    for attempt, nominal in ((1, 8), (2, 16), (3, 32), (4, 64), (5, 100), (6, 100), (49, 100)):
        ids = create_many(db, "bob", 30)
        run(db, "update fairq.tasks set attempt = %s where id = any(%s)", attempt - 1, ids)
        assert pop(db, worker, 30) == ids
        assert finish(db, worker, ids, "retry", attempt=attempt) == ids
        waits = [float(field(db, i, "extract(epoch from run_at - '2030-01-01 12:00:00+00')")) for i in ids]
        assert all(0.75 * nominal <= wait <= 1.25 * nominal for wait in waits), (attempt, waits)
        assert len(set(waits)) > 1
        seen += waits
    assert max(seen) <= 125


@pytest.mark.parametrize(("delay", "outcome"), [("29 seconds", "scheduled"), ("30 seconds", "failed")])
def test_a_retry_that_would_come_after_the_deadline_is_refused(db: Conn, delay: str, outcome: str) -> None:
    """HR11: it fails at once, with its error, instead of waiting for a start that cannot come."""
    at(db, "12:00:00")
    worker, id_ = held(db, expires_at="2030-01-01 12:00:30+00")
    assert finish(db, worker, [id_], "retry", delay=delay) == [id_]
    assert state(db, id_) == outcome


def test_the_last_attempt_that_asks_for_a_retry_fails(db: Conn) -> None:
    """D11."""
    at(db, "12:00:00")
    worker, id_ = held(db, max_attempts=2)
    assert finish(db, worker, [id_], "retry", delay="0") == [id_]
    assert pop(db, worker, 1) == [id_]
    assert finish(db, worker, [id_], "retry", attempt=2, errors=['{"code": "Y"}']) == [id_]
    assert state(db, id_) == "failed"
    assert run(db, "select attempt, error from fairq.finished_tasks where id = %s", id_) == [
        (2, {"code": "Y"})
    ]
    assert one(db, "select count(*) from fairq.attempts where task_id = %s", id_) == 1


def test_a_retried_task_has_no_better_place_than_others_but_before_younger_ones_of_its_group(
    db: Conn,
) -> None:
    """I12: at a new address; what its group has ready behind it is recalled."""
    needs_one_order(db)
    at(db, "12:00:00")
    worker = register(db)
    bob, alice = create_many(db, "bob", 2), create_many(db, "alice", 4)
    assert pop(db, worker, 2) == [bob[0], alice[0]]
    more = create_many(db, "bob", 2)
    assert finish(db, worker, bob[:1], "retry", delay="1 second") == bob[:1]
    promote(db)
    assert state(db, more[1]) == "queued"
    at(db, "12:00:01")
    assert pop(db, worker, 10) == [bob[0], alice[1], bob[1], alice[2], more[0], alice[3], more[1]]
