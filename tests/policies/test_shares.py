"""Turns among those who may run are the same turns, whatever holds others back meanwhile."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.policies.test_all_together import TABLES, THOROUGH
from tests.support.calls import (
    Conn,
    at,
    call,
    create,
    empty,
    finish,
    groups_of,
    one,
    pop,
    promote,
    register,
    run,
)
from tests.support.invariants import assert_sound

pytestmark = pytest.mark.usefixtures("one_shard")

FREE = ["f", "g", "h"]
HELD_BACK = ["capped", "paused", "rated", "keyed", "broken", "scheduled"]
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0])
COSTS = st.sampled_from([0.01, 0.5, 1.0, 1.0, 3.0, 20.0])
CHANGES = st.sampled_from(
    ["cap up", "cap down", "pause", "resume", "reset rate", "more of theirs", "high priority", "nothing"]
)


def change(conn: Conn, what: str) -> None:
    """An operator or a tenant does something about those who are held back."""
    if what == "cap up":
        call(conn, "configure_group", "default", "capped", max_running=3)
    elif what == "cap down":
        call(conn, "configure_group", "default", "capped", max_running=0)
    elif what == "pause":
        call(conn, "pause_group", "default", "capped")
    elif what == "resume":
        call(conn, "resume_group", "default", "capped")
    elif what == "reset rate":
        call(conn, "reset_rate", "default", "rated")
    elif what == "more of theirs":
        for group in HELD_BACK:
            create(conn, group, concurrency_key="k" if group == "keyed" else None)
    elif what == "high priority":
        create(conn, "capped", priority=9)


def hold_back(conn: Conn) -> None:
    call(conn, "configure_group", "default", "capped", max_running=1, weight=10)
    call(conn, "pause_group", "default", "paused")
    call(conn, "configure_group", "default", "rated", rate_limit=1, rate_period="1 second", rate_burst=2)
    call(conn, "configure_group", "default", "broken", breaker_threshold=1, breaker_cooldown="1 hour")
    for group in HELD_BACK:
        for _ in range(6):
            create(
                conn,
                group,
                concurrency_key="k" if group == "keyed" else None,
                run_at="2030-01-01 12:00:07+00" if group == "scheduled" else None,
            )


@settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not THOROUGH,
    database=None,
    max_examples=300 if THOROUGH else 25,
)
@given(
    tenants=st.lists(st.tuples(WEIGHTS, st.lists(COSTS, min_size=5, max_size=15)), min_size=3, max_size=3),
    target=st.one_of(st.none(), st.integers(1, 6)),
    size=st.integers(1, 5),
    changes=st.lists(CHANGES, max_size=12),
)
def test_the_bound_on_service_holds_beside_groups_that_are_held_back(
    conn: Conn,
    tenants: list[tuple[float, list[float]]],
    target: int | None,
    size: int,
    changes: list[str],
) -> None:
    """I4, I8, D28, F31: |Wf/wf - Wg/wg| <= cf/wf + cg/wg while both wait; no pop gives less than it could."""
    empty(conn, *TABLES.split())
    at(conn, "12:00:00")
    run(conn, "update fairq.queues set ready_target = %s where not internal", target)
    bob, hanging = register(conn, slots=size), register(conn, slots=1)
    hold_back(conn)
    pop(conn, hanging, 3)  # these never end: a place of "capped" may be gone for good
    cost_of: dict[int, float] = {}
    for name, (weight, costs) in zip(FREE, tenants, strict=True):
        call(conn, "configure_group", "default", name, weight=weight)
        cost_of.update((create(conn, name, cost=cost), cost) for cost in costs)

    served: list[tuple[int, str]] = []
    steps = iter(changes)
    for second in range(2000):
        waiting = one(conn, "select count(*) from fairq.tasks where group_key = any(%s)", FREE)
        if not waiting:
            break
        at(conn, f"12:{second // 60:02}:{second % 60:02}")
        held = pop(conn, bob, size)
        assert len(held) >= min(size, waiting), "a pop gives what there is"
        served += [(task, task.group_key) for task in held if task.group_key in FREE]
        broken = [task for task in held if task.group_key == "broken"]
        finish(conn, bob, [task for task in held if task.group_key != "broken"])
        finish(conn, bob, broken, "failed")
        if (what := next(steps, None)) is not None:
            change(conn, what)
    assert len(served) == len(cost_of), "nobody starves"

    for f, g in combinations(range(len(FREE)), 2):
        bound = sum(max(tenants[n][1]) / tenants[n][0] for n in (f, g))
        last = min(max(k for k, (_, group) in enumerate(served) if group == FREE[n]) for n in (f, g))
        lead, lowest, highest = 0.0, 0.0, 0.0
        for id_, group in served[:last]:
            for sign, n in ((1, f), (-1, g)):
                lead += sign * cost_of[id_] / tenants[n][0] if group == FREE[n] else 0
            lowest, highest = min(lowest, lead), max(highest, lead)
        assert highest - lowest <= bound + 1e-3, (FREE[f], FREE[g])
    assert_sound(conn)


def test_a_capped_group_has_its_full_turn_as_long_as_its_cap_allows(conn: Conn) -> None:
    """I3, I7, F30: a cap that does not bind takes nothing away; one that binds gives the rest to others."""
    call(conn, "configure_group", "default", "capped", max_running=2)
    for group in ("capped", "other"):
        for _ in range(40):
            create(conn, group)
    bob = register(conn)
    for _ in range(5):
        held = pop(conn, bob, 4)
        assert sorted(groups_of(held)) == ["capped", "capped", "other", "other"]
        finish(conn, bob, held)
    call(conn, "configure_group", "default", "capped", max_running=1)
    promote(conn)
    for _ in range(5):
        held = pop(conn, bob, 4)
        assert groups_of(held).count("capped") == 1
        assert len(held) == 4
        finish(conn, bob, held)


def test_a_step_is_a_million_rounds_at_most(conn: Conn) -> None:
    """So that a million tasks of the dearest kind, in the lightest group, still have addresses."""
    call(conn, "configure_group", "default", "bob", weight=0.001)
    for _ in range(3):
        create(conn, "bob", cost=1_000_000)
    create(conn, "alice", cost=1_000_000)
    create(conn, "alice")
    worker = register(conn)
    first = pop(conn, worker, 2)
    assert groups_of(first) == ["bob", "alice"]
    lane = "select (fairq._lane(0, 'default', %s)).finish"
    assert one(conn, lane, "bob") == 2**40
    # In a group of weight 1 the dearest task counts in full; the one behind it has its address, too.
    assert one(conn, lane, "alice") == (1_000_000 + 1) * 2**20
    assert groups_of(pop(conn, worker, 5)) == ["alice", "bob", "bob"]
    assert_sound(conn)
