"""Tenants that try to get more than their share, and what masses of gated work cost the others."""

import threading
from collections import Counter

import psycopg
import pytest

from tests.contract.loads import ROWS
from tests.support.calls import (
    Conn,
    call,
    create,
    create_many,
    finish,
    groups_of,
    one,
    pop,
    promote,
    register,
    run,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound
from tests.support.plans import explain, shared_buffers
from tests.support.sessions import call_in_background

pytestmark = pytest.mark.usefixtures("one_shard")


# `make test-long` sets a million rows: 500,000 gated tasks, 100,000 groups, 10,000 enqueues at once.
GATED = ROWS // 2
GROUPS = ROWS // 10
ENQUEUES = ROWS // 100
PATIENCE = 300.0


def test_a_storm_of_enqueues_of_one_tenant_delays_nobody(database: Database) -> None:
    """I2, I6: bob enqueues from eight sessions at once; what others enqueue meanwhile is served next."""
    conn = database.connect(autocommit=True)
    bob = register(conn)
    storm_is_over = threading.Event()

    def enqueue(session: int) -> None:
        with psycopg.connect(database.dsn, autocommit=True) as other:
            for _ in range(ENQUEUES // 8):
                create(other, "bob")

    futures = [call_in_background(lambda s=session: enqueue(s)) for session in range(8)]  # type: ignore[misc]
    served = 0
    waits: list[int] = []
    for number in range(20):
        mine = create(conn, f"newcomer {number}")
        held = pop(conn, bob, 4)
        waits.append(next((place for place, task in enumerate(held) if task == mine), 99))
        served += len(finish(conn, bob, held))
    for future in futures:
        future.result(PATIENCE)
    storm_is_over.set()
    assert max(waits) <= 1, waits
    while held := pop(conn, bob, 1000):
        served += len(finish(conn, bob, held))
    assert served == ENQUEUES // 8 * 8 + 20


def test_a_tenant_that_shards_into_a_thousand_keys_gets_a_thousand_turns(conn: Conn) -> None:
    """What fairness cannot do: a group is what the application says. A newcomer still comes at once (I6)."""
    bob = register(conn)
    run(
        conn,
        "select fairq.create_tasks(array_agg('evil ' || n %% 1000), array_agg('{}'::jsonb))"
        " from generate_series(1, 3000) n",
    )
    # Each has had its first turn, and ten their second one.
    pop(conn, bob, 1010)
    create_many(conn, "alice", 3)
    served = groups_of(pop(conn, bob, 1100))
    assert served[0] == "alice"
    assert served.count("alice") <= 3


def test_a_concurrency_key_per_tenant_bounds_one_that_shards(conn: Conn) -> None:
    """The remedy: the same key on all tasks of the tenant, whatever its groups are called."""
    call(conn, "configure_key", "tenant evil", max_running=2)
    bob = register(conn)
    run(
        conn,
        "select fairq.create_tasks(array_agg('evil ' || n), array_agg('{}'::jsonb),"
        " p_concurrency_keys => array_agg('tenant evil'::text)) from generate_series(1, 300) n",
    )
    create_many(conn, "alice", 30)
    held = pop(conn, bob, 20)
    assert Counter(group.split()[0] for group in groups_of(held)) == {"evil": 2, "alice": 18}
    finish(conn, bob, held)
    assert Counter(group.split()[0] for group in groups_of(pop(conn, bob, 20))) == {"evil": 2, "alice": 12}
    assert_sound(conn)


def test_a_tenant_whose_tasks_never_end_keeps_its_places_and_no_more(conn: Conn) -> None:
    """I7, I8: a cap is what bounds it; without one it would hold every slot there is."""
    call(conn, "configure_queue", "default", group_max_running=3)
    bob = register(conn)
    create_many(conn, "endless", 100)
    create_many(conn, "alice", 100)
    ended = 0
    for _ in range(60):
        held = [each for each in pop(conn, bob, 8) if each.group_key == "alice"]
        ended += len(finish(conn, bob, held))
    assert ended == 100
    assert one(conn, "select count(*) from fairq.live_tasks where state = 'running'") == 3
    assert_sound(conn)


def cost_of_a_pop(conn: Conn, worker_id: int, limit: int = 10) -> int:
    """Pages that a pop touches, all that it promotes included; the tasks stay popped."""
    return shared_buffers(
        explain(conn, "select * from fairq.pop_tasks('default', %s, %s)", [limit, worker_id])
    )


@pytest.mark.new_database
def test_masses_of_gated_tasks_cost_a_runnable_group_nothing(database: Database) -> None:
    """I9, S10: capped, paused, rate limited, scheduled and blocked tasks ahead of one group: below 2x."""
    costs = {}
    for gated in (100, GATED):
        run_in = f"gated {gated}"
        conn = database.connect(autocommit=True, application_name=run_in)
        run(
            conn,
            "truncate fairq.tasks, fairq.held, fairq.ready, fairq.parked, fairq.rings, fairq.lanes,"
            " fairq.ticks,"
            " fairq.groups",
        )
        call(conn, "configure_queue", "default", ready_target=100)
        call(conn, "configure_group", "default", "capped", max_running=2)
        call(conn, "configure_group", "default", "slow", rate_limit=1, rate_period="1 day")
        call(conn, "pause_group", "default", "paused")
        bob = register(conn)
        for group in ("capped", "slow", "paused"):
            create_many(conn, group, gated // 5)
        create_many(conn, "later", gated // 5, run_at="2130-01-01 00:00:00+00")
        create(conn, "holder", concurrency_key="k")
        create_many(conn, "blocked", gated // 5, concurrency_keys=["k"] * (gated // 5))
        create_many(conn, "free", 2000 + gated // 250)
        # Each is parked once, 500 with each pass.
        for _ in range(gated // 2500):
            finish(conn, bob, [each for each in pop(conn, bob, 10) if each.group_key == "free"])
        for _ in range(20):
            pop(conn, bob, 10)
        run(conn, "vacuum (analyze) fairq.tasks")
        run(conn, "vacuum (analyze) fairq.lanes")
        samples = []
        for _ in range(30):
            samples.append(cost_of_a_pop(conn, bob))
        # Where others make and drop tables, a session has to read the catalogue anew now and then.
        costs[gated] = sum(sorted(samples)[:-2])
        held = run(
            conn, "select group_key, count(*) from fairq.live_tasks where worker_id is not null group by 1"
        )
        counts: dict[str, int] = dict(held)
        assert counts.pop("free") >= 496
        assert counts == {"capped": 2, "slow": 1, "holder": 1}
    assert costs[GATED] < 2 * costs[100], costs


@pytest.mark.new_database
def test_promotion_of_capped_groups_costs_what_it_promotes(database: Database) -> None:
    """I9: a hundred tasks end and a hundred others take their places, among few capped groups or many."""
    costs = {}
    for groups in (500, GROUPS):
        conn = database.connect(autocommit=True)
        run(
            conn,
            "truncate fairq.tasks, fairq.held, fairq.ready, fairq.parked, fairq.rings, fairq.lanes,"
            " fairq.ticks,"
            " fairq.groups, fairq.finished_tasks",
        )
        call(conn, "configure_queue", "default", group_max_running=1, ready_target=200)
        bob = register(conn)
        run(
            conn,
            "select fairq.create_tasks(array_agg('g' || n %% %s), array_agg('{}'::jsonb))"
            " from generate_series(1, 3 * %s) n",
            groups,
            groups,
        )
        while run(
            conn,
            "select 1 from fairq.domains d cross join lateral fairq._tick(d.shard_no, d.queue) k"
            " where d.queue = 'default' and fairq._has_news(k)",
        ):
            promote(conn)
        held = pop(conn, bob, 100)
        for table in ("tasks", "held", "ready", "lanes", "rings"):
            run(conn, f"vacuum (analyze) fairq.{table}")
        spent = 0
        for _ in range(8):
            assert len(finish(conn, bob, held)) == 100
            spent += shared_buffers(explain(conn, "select fairq.promote_overflow('default', 200)"))
            held = pop(conn, bob, 100)
            assert len(held) == 100
        costs[groups] = spent
        assert_sound(conn)
    assert costs[GROUPS] < 2 * costs[500], costs
