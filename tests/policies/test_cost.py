"""What policies cost those who use none."""

import pytest

from tests.support.calls import Conn, call, create, create_many, finish, pop, promote, register, release, run

pytestmark = pytest.mark.new_database

# Everything that only limits need. What a plain queue calls besides is its ordinary work.
OF_LIMITS = {
    "_allowance",
    "_charge",
    "_hear_counters",
    "_lock_counters",
    "_may_go_on",
    "_meter",
    "_next_turn",
    "_open_keys",
    "_park",
    "_policy",
    "_settle",
    "_settle_meter",
    "_take_keys",
    "_take_keys_back",
    "_take_place",
    "_write_lane",
}


def calls_of(conn: Conn) -> dict[str, int]:
    """How often this transaction called each function of the engine so far."""
    rows = run(conn, "select funcname, calls from pg_stat_xact_user_functions where schemaname = 'fairq'")
    return {row[0]: row[1] for row in rows}


@pytest.mark.parametrize("limits_elsewhere", [False, True])
def test_a_queue_without_limits_runs_none_of_their_code(conn: Conn, limits_elsewhere: bool) -> None:
    """H36: also when another queue has every limit there is. Only the cap of the cluster is everybody's."""
    run(conn, "set track_functions = 'pl'")
    bob = register(conn)
    if limits_elsewhere:
        call(
            conn,
            "configure_queue",
            "other",
            group_max_running=1,
            max_running=1,
            rate_limit=1,
            breaker_threshold=1,
        )
        call(conn, "configure_group", "other", "g1", max_running=1)
        create(conn, "g1", queue="other", concurrency_key="k")
        promote(conn, "other")
    promote(conn)
    with conn.transaction():
        before = calls_of(conn)
        for number in range(20):
            create_many(conn, f"g{number}", 10)
        for _ in range(4):
            held = pop(conn, bob, 50)
            release(conn, bob, held[:5])
            finish(conn, bob, held[5:10], "retry")
            finish(conn, bob, held[10:])
        promote(conn)
        after = calls_of(conn)
    called = {name for name in after if after[name] > before.get(name, 0)}
    assert "_promote" in called
    assert not called & OF_LIMITS


def test_limits_do_run_it(conn: Conn) -> None:
    """The names above are the right ones."""
    run(conn, "set track_functions = 'pl'")
    bob = register(conn)
    call(conn, "configure_queue", "default", group_max_running=2, max_running=4)
    with conn.transaction():
        before = calls_of(conn)
        create(conn, concurrency_key="k")
        create(conn, concurrency_key="k")
        create_many(conn, "bob", 5)
        finish(conn, bob, pop(conn, bob))
        pop(conn, bob)
        after = calls_of(conn)
    called = {name for name in after if after[name] > before.get(name, 0)}
    assert called >= OF_LIMITS
