"""create_tasks: many at once, all or none."""

from typing import Any

import pytest

from tests.support.calls import (
    Conn,
    at,
    create,
    create_many,
    needs_one_order,
    one,
    pop,
    promote,
    refused,
    register,
    run,
    state,
)

CALL = "select fairq.create_tasks(%s::text[], %s::jsonb[]"


def create_pair(db: Conn, **options: Any) -> list[int]:
    names = "".join(f", p_{name} => %s" for name in options)
    return [r[0] for r in run(db, f"{CALL}{names})", ["a", "b"], ["{}", "{}"], *options.values())]


def test_ids_come_in_the_order_of_the_input(db: Conn) -> None:
    groups = [f"g{n % 3}" for n in range(30)]
    payloads = [str(n) for n in range(30)]
    ids = [r[0] for r in run(db, f"{CALL})", groups, payloads)]
    stored = run(db, "select id, group_key, payload from fairq.tasks order by id")
    assert stored == [(id_, group, n) for n, (id_, group) in enumerate(zip(ids, groups, strict=True))]


def test_each_group_rings_once_per_priority(db: Conn) -> None:
    promote(db)
    run(db, f"{CALL}, p_priorities => %s)", ["a", "a", "b", "a"], ["{}"] * 4, [0, 0, 0, 1])
    assert run(db, "select group_key, priority from fairq.rings order by 1, 2") == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_nothing_is_created_from_empty_arrays(db: Conn) -> None:
    assert run(db, f"{CALL})", [], []) == []
    assert run(db, f"{CALL})", None, None) == []
    assert one(db, "select count(*) from fairq.rings") == 0


def test_options_of_single_tasks_take_precedence(db: Conn) -> None:
    ids = create_pair(
        db, priority=3, priorities=[None, 7], cost=2.0, costs=[0.5, None], concurrency_keys=["x", None]
    )
    rows = run(db, "select id, priority, cost, concurrency_key from fairq.tasks order by id")
    assert rows == [(ids[0], 3, 0.5, "x"), (ids[1], 7, 2.0, None)]


@pytest.mark.parametrize(
    "options",
    [
        {"idempotency_keys": ["k"]},
        {"concurrency_keys": ["k", "l", "m"]},
        {"priorities": []},
        {"costs": [1.0]},
    ],
)
def test_arrays_of_other_lengths_are_refused(db: Conn, options: dict[str, Any]) -> None:
    with refused(db, "QF011"):
        create_pair(db, **options)


def test_as_many_payloads_as_groups_are_needed(db: Conn) -> None:
    for payloads in (["{}"], [], None):
        with refused(db, "QF011"):
            run(db, f"{CALL})", ["a", "b"], payloads)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("QF003", {"queue": "nowhere"}),
        ("QF006", {"kind": ""}),
        ("QF006", {"idempotency_keys": [None, ""]}),
        ("QF006", {"concurrency_keys": [None, "k" * 501]}),
        ("QF007", {"priorities": [0, 1_000_001]}),
        ("QF007", {"priority": 1_000_001, "priorities": [1, None]}),
        ("QF007", {"max_attempts": 0}),
        ("QF008", {"costs": [1.0, 0.0]}),
        ("QF008", {"costs": [1.0, float("nan")]}),
        ("QF008", {"cost": 0.0, "costs": [1.0, None]}),
        ("QF009", {"run_at": "infinity"}),
        ("QF009", {"expires_at": "-infinity"}),
        ("QF009", {"timeout": "0"}),
        ("QF010", {"idempotency_keys": ["taken", "free"]}),
    ],
)
def test_one_bad_task_refuses_them_all(db: Conn, code: str, options: dict[str, Any]) -> None:
    create(db, "a", idempotency_key="taken", payload="1")
    with refused(db, code):
        create_pair(db, **options)


@pytest.mark.parametrize("group", [None, "", "g" * 501])
def test_one_bad_group_refuses_them_all(db: Conn, group: str | None) -> None:
    with refused(db, "QF001"):
        run(db, f"{CALL})", ["a", group], ["{}", "{}"])


def test_one_bad_payload_refuses_them_all(db: Conn) -> None:
    run(db, """select fairq.configure_cluster('{"payload_limit": 100}')""")
    for payload in (None, f'"{"x" * 99}"'):
        with refused(db, "QF002"):
            run(db, f"{CALL})", ["a", "b"], ["{}", payload])


def test_keys_that_are_known_give_the_ids_they_have(db: Conn) -> None:
    known = create(db, "b", idempotency_key="k2")
    first, second = create_pair(db, idempotency_keys=["k1", "k2"])
    assert second == known
    assert create_pair(db, idempotency_keys=["k1", "k2"]) == [first, known]
    same = run(db, f"{CALL}, p_idempotency_keys => %s)", ["a", "a"], ["{}", "{}"], ["x", "x"])
    assert same[0] == same[1]


def test_scheduled_tasks_ring_when_they_are_due(db: Conn) -> None:
    at(db, "12:00:00")
    worker = register(db)
    ids = create_pair(db, run_at="2030-01-01 12:00:10+00")
    assert pop(db, worker, 10) == []
    assert {state(db, id_) for id_ in ids} == {"scheduled"}
    at(db, "12:00:10")
    assert sorted(pop(db, worker, 10)) == ids


def test_each_task_of_a_round_has_its_turn_by_weight_and_cost(db: Conn) -> None:
    """I4: weight 2 is served twice as often; a task of cost 2 uses two turns up."""
    needs_one_order(db)
    run(db, """select fairq.configure_group('default', 'heavy', '{"weight": 2}')""")
    worker = register(db)
    promote(db)
    heavy, plain, dear = (
        create_many(db, "heavy", 8),
        create_many(db, "plain", 4),
        create_many(db, "dear", 4, cost=2),
    )
    served = pop(db, worker, 14)
    assert len(set(served) & set(heavy)) == 8
    assert len(set(served) & set(plain)) == 4
    assert len(set(served) & set(dear)) == 2
