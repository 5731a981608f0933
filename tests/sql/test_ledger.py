"""The ledger: who got what, who waited, who was entitled to what; against a recount."""

import os
import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.profile import PROFILE
from tests.support.calls import Conn, call, create_many, empty, finish, maintain, one, pop, register, run
from tests.support.database import Database
from tests.support.plans import recorded_plans, rows_visited
from tests.support.simulation import NOON, Simulation

pytestmark = [pytest.mark.usefixtures("one_shard"), pytest.mark.new_database]

PARTS = """
select extract(epoch from begins_at - %s)::double precision, group_key, tasks, ended, cost, seconds, service,
  entitled, weight, judged, waits, waiting_since
from fairq.ledger where queue = 'default' order by 1, 2
"""


def parts(conn: Conn) -> list[tuple[Any, ...]]:
    return run(conn, PARTS, NOON)


def shares(conn: Conn, **options: Any) -> dict[str, dict[str, Any]]:
    names = ", ".join(f"p_{name} => %s" for name in options)
    cursor = conn.execute(f"select * from fairq.shares({names})".encode(), list(options.values()))  # noqa: S608
    assert cursor.description
    columns = [each.name for each in cursor.description]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in cursor.fetchall()}


def overlap(began: float, ended: float, begin: float, end: float) -> float:
    return max(0.0, min(ended, end) - max(began, begin))


@settings(PROFILE, max_examples=PROFILE.max_examples // 5)
@given(seed=st.integers(0, 10**6))
def test_the_ledger_equals_a_recount(conn: Conn, seed: int) -> None:
    """Retries, failures, long runs over several parts, tasks that expire, two workers: what they saw is what
    stands there.
    """
    luck = random.Random(seed)
    empty(
        conn,
        *("tasks", "held", "ready", "rings", "lanes", "ticks", "workers", "finished_tasks", "attempts"),
        *("ledger", "ledger_queues", "totals", "ledger_marks", "sweeps", "groups"),
    )
    groups = ["alice", "bob", "carol", "dave"]
    fairness = luck.choice(["count", "time"])
    call(conn, "configure_queue", "default", fairness=fairness)
    for group in groups:
        call(conn, "configure_group", "default", group, weight=luck.choice([0.5, 1, 1, 3]))
    lengths = {group: luck.choice([0.5, 2.0, 7.0, 45.0]) for group in groups}
    costs = {group: luck.choice([1.0, 2.5]) for group in groups}
    simulation = Simulation(
        conn,
        slots=(luck.randint(1, 4), luck.randint(1, 4)),
        step=2.5,
        length=lambda task: lengths[task.group_key],
        outcome=lambda task: ("succeeded", "succeeded", "failed", "retry")[task % 4],
    )

    def arrive() -> None:
        for group in groups:
            if luck.random() < 0.2:
                count = luck.randint(1, 12)
                deadline = NOON + timedelta(seconds=simulation.now + 10) if luck.random() < 0.3 else None
                create_many(
                    conn, group, count, costs=[costs[group]] * count, max_attempts=2, expires_at=deadline
                )

    simulation.until(110, arrive)
    written = parts(conn)
    until = max(row[0] for row in written) + 30
    assert until >= 90
    expected: dict[tuple[float, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for each in simulation.ran:
        ended = simulation.now if each.ended is None else each.ended
        for begin in range(0, int(until), 30):
            cell = expected[begin, each.task.group_key]
            cell[0] += int(begin <= each.began < begin + 30)
            cell[1] += int(each.ended is not None and begin <= each.ended < begin + 30)
            cell[2] += costs[each.task.group_key] * (begin <= each.began < begin + 30)
            cell[3] += overlap(each.began, ended, begin, begin + 30)
    got = {(row[0], row[1]): list(row[2:6]) for row in written if any(row[2:6])}
    assert got == {key: pytest.approx(row) for key, row in expected.items() if any(row)}
    for row in written:
        assert sum(row[10]) <= row[2]
        assert row[6] == row[5 if fairness == "time" else 4]
    _entitlements_are_poured(written)
    ended = sum(each.ended is not None and each.ended < until for each in simulation.ran)
    lost = one(
        conn,
        "select count(*) from fairq.attempts where ended_at < %s::timestamptz + %s * interval '1 second'",
        NOON,
        until,
    )
    assert one(conn, "select sum(tasks) from fairq.totals where outcome <> 'expired'") == ended - lost


def _entitlements_are_poured(written: list[tuple[Any, ...]]) -> None:
    """By bisection: the level at which all that was received is poured out."""
    for begin in {row[0] for row in written}:
        part = [row for row in written if row[0] == begin]
        received = sum(row[6] for row in part)
        low, high = 0.0, 1e6
        for _ in range(100):
            level = (low + high) / 2
            poured = sum(row[8] * level if row[9] else min(row[6], row[8] * level) for row in part)
            low, high = (level, high) if poured < received else (low, level)
        for row in part:
            entitled = row[8] * high if row[9] else min(row[6], row[8] * high)
            assert row[7] == pytest.approx(entitled, rel=1e-6, abs=1e-6)
        assert sum(row[7] for row in part) == pytest.approx(received)


def test_a_flood_and_a_few_have_no_debt(conn: Conn) -> None:
    """Bob has thousands, Alice a few dozen that take longer: both wait all the time, neither is behind."""
    simulation = Simulation(conn, length=lambda task: 3.0 if task.group_key == "alice" else 1.0)
    create_many(conn, "bob", 3000)
    create_many(conn, "alice", 400)
    simulation.until(100)
    found = shares(conn, since="1 minute")
    assert found["bob"]["tasks"] == pytest.approx(found["alice"]["tasks"], abs=2)
    for group in ("bob", "alice"):
        assert found[group]["debt"] <= found[group]["bound"] == 2
        assert found[group]["entitled"] == pytest.approx(found[group]["received"], abs=2)
        assert found[group]["limited_by"] is None
    assert found["bob"]["behind"][0]["group"] == "alice"
    assert found["alice"]["backlog"] == one(
        conn,
        "select count(*) from fairq.live_tasks where group_key = 'alice' and state in ('overflow', 'queued')",
    )
    # Two seconds a task on average, eight slots: four tasks a second, two of them Alice's;
    # then all slots are Bob's.
    assert found["alice"]["eta_seconds"] == pytest.approx(found["alice"]["backlog"] / 2)
    assert found["alice"]["backlog_seconds"] == pytest.approx(3 * found["alice"]["backlog"])
    both = found["alice"]["backlog_seconds"] + found["bob"]["backlog_seconds"]
    assert found["bob"]["eta_seconds"] == pytest.approx(both / 8)


def test_estimates_heed_weights_and_limits(conn: Conn) -> None:
    """Carol's weight is three: she is through first. Dave may have one task at once, a second each."""
    simulation = Simulation(conn)
    call(conn, "configure_group", "default", "carol", weight=3)
    call(conn, "configure_group", "default", "dave", max_running=1)
    for group in ("bob", "carol", "dave"):
        create_many(conn, group, 900)
    simulation.until(65)
    found = shares(conn)
    assert found["carol"]["eta_seconds"] < found["bob"]["eta_seconds"]
    left = found["carol"]["backlog"]
    assert found["carol"]["eta_seconds"] == pytest.approx(left * (1 + 1 / 3 + 1 / 3) / 8, rel=0.01)
    assert found["dave"]["limited_by"]
    assert found["dave"]["eta_seconds"] == pytest.approx(found["dave"]["backlog"], rel=0.1)


INJECTED = {
    "its lane is put back by a thousand rounds": (
        "update fairq.lanes set finish = finish + 1000 * fairq._round() where group_key = 'alice'"
    ),
    "its lane is taken for one that may not be served": (
        "update fairq.lanes set admissible = false where group_key = 'alice'"
    ),
}


# Where what tasks use is shared, each end of a task settles the second fault.
@pytest.mark.parametrize(
    ("fairness", "how"),
    [("count", how) for how in INJECTED] + [(each, next(iter(INJECTED))) for each in ("time", "cost")],
)
def test_unfairness_is_seen_within_a_minute(conn: Conn, fairness: str, how: str) -> None:
    """Also where a lane far ahead could be one that has to pay for what its tasks used."""
    call(conn, "configure_queue", "default", fairness=fairness)
    simulation = Simulation(conn)
    for group in ("alice", "bob", "carol"):
        create_many(conn, group, 5000)
    simulation.until(100)
    assert worst(conn) <= 1
    simulation.until(160, lambda: run(conn, INJECTED[how]) if simulation.now <= 101 else None)
    assert worst(conn) > 1


def worst(conn: Conn, since: str = "10 minutes") -> float:
    return float(one(conn, "select coalesce(worst_debt, 0) from fairq.fairness(p_since => %s)", since))


def test_a_long_history_is_not_read(conn: Conn) -> None:
    """Only its last block ranges: a part costs what ended in it, whatever ended before."""
    run(
        conn,
        """
        insert into fairq.finished_tasks (shard_no, priority, id, queue, group_key, kind, outcome, created_at,
          run_at, started_at, finished_at, cost, attempt, max_attempts, payload)
        select 0, 0, -g.n, 'default', 'past', 'default', 'succeeded', t.at, t.at, t.at, t.at, 1, 1, 5,
          '{"note": "some words that take their place"}'
        from generate_series(1, 30000) g(n), (select now() - interval '10 minutes') t(at)
        """,
    )
    maintain(conn)
    run(conn, "select fairq._summarize_history()")
    worker = register(conn)
    create_many(conn, "bob", 10)
    assert len(finish(conn, worker, pop(conn, worker))) == 10
    query = "select fairq._tally(0, now() - interval '1 minute', now() + interval '1 minute')"
    run(conn, query)
    (plan,) = run(conn, f"explain (analyze, buffers, format json) {query}")[0]
    assert plan[0]["Plan"]["Shared Hit Blocks"] < 300


def test_shares_read_each_row_of_the_ledger_a_few_times(conn: Conn) -> None:
    """Not each with each other one, which is what a planner thinks best that knows nothing of arrays."""
    rows = run(
        conn,
        "insert into fairq.ledger select 0, 1, b, b + fairq._ledger_step(),"
        " case when mod(g, 3) = 0 then b end, 1, 1, 1, 1, g, 1, 1, 1, 1, 2, mod(g, 3) = 0, 'default',"
        " 'g' || g, array_fill(1::bigint, array[21])"
        " from generate_series(1, 40) n cross join generate_series(1, 100) g"
        " cross join lateral (select fairq._ledger_begin(clock_timestamp()) - n * fairq._ledger_step()) x(b)"
        " returning 1",
    )
    with recorded_plans(conn) as recording:
        found = shares(conn, since="30 minutes", limit=40)
        one(conn, "select worst_debt from fairq.fairness(p_since => '30 minutes')")
    assert len(found) == 41
    behind = {each["group"]: each["seconds"] for each in found["g3"]["behind"]}
    assert behind == {"g100": 4000.0, "g99": 3960.0, "g98": 3920.0}
    assert sum(rows_visited(each.plan) for each in recording.statements) < 40 * len(rows)


def test_of_many_groups_two_hundred_have_a_row(conn: Conn) -> None:
    """The others are one; all together is what was received."""
    simulation = Simulation(conn, slots=(100,), step=1.0)
    run(conn, "select count(fairq.create_task('tenant ' || g, '{}')) from generate_series(1, 3000) g")
    simulation.until(75)
    rows = parts(conn)
    assert 100 < sum(row[0] == 0 for row in rows) <= 201
    assert sum(row[2] for row in rows if row[0] < 60) == sum(each.began < 60 for each in simulation.ran)
    assert worst(conn) <= 1
    found = shares(conn, limit=10)
    assert len(found) == 11
    assert sum(row["tasks"] for row in found.values()) == len(simulation.ran)


@pytest.mark.parametrize("fairness", ["count", "time"])
def test_mixed_load_raises_no_alarm(conn: Conn, fairness: str) -> None:
    """
    Newcomers, floods and trickles, weights that change, caps, rates, pauses, keys, priorities, failures, long
    and short tasks, tasks that expire: the order holds, and is said to hold. For FAIRQ_TEST_LEDGER minutes of
    simulated time.
    """
    luck = random.Random(4711)
    groups = [f"g{n}" for n in range(12)]
    length = {group: luck.choice([0.5, 0.5, 2.0, 10.0]) for group in groups}
    call(conn, "configure_queue", "default", fairness=fairness)
    simulation = Simulation(
        conn,
        slots=(4, 2, 1),
        length=lambda task: length.get(task.group_key, 0.5),
        outcome=lambda task: "failed" if task % 17 == 0 else "retry" if task % 13 == 0 else "succeeded",
    )
    call(conn, "configure_group", "default", "g1", max_running=2)
    call(conn, "configure_group", "default", "g2", rate_limit=30, rate_period="1 minute", rate_burst=2)
    call(conn, "configure_group", "default", "g3", breaker_threshold=2, breaker_cooldown="20 seconds")
    ratios = [0.0]

    def arrive() -> None:
        group = luck.choice(groups)
        dice = luck.random()
        if dice < 0.2:
            create_many(conn, group, luck.choice([1, 3, 150]))
        elif dice < 0.21:
            create_many(conn, group, 20, concurrency_keys=[f"k{luck.randint(0, 2)}"] * 20)
        elif dice < 0.24:
            create_many(conn, group, 5, priority=luck.randint(-2, 2))
        elif dice < 0.26:
            call(conn, "configure_group", "default", group, weight=luck.choice([0.5, 1, 2, 5]))
        elif dice < 0.27:
            call(conn, luck.choice(["pause_group", "resume_group"]), "default", group)
        elif dice < 0.28:
            now = one(conn, "select fairq._now()")
            create_many(conn, group, 10, expires_at=now + timedelta(seconds=luck.choice([1, 5, 20])))
        elif dice < 0.30:
            create_many(conn, f"new {simulation.now}", 2)
        if simulation.now % 7 == 0:
            ratios.append(worst(conn))

    simulation.until(60 * float(os.environ.get("FAIRQ_TEST_LEDGER", "4")), arrive)
    assert max(ratios) <= 1, ratios
    judged = one(conn, "select count(*) from fairq.ledger where judged")
    assert judged >= 5, "it judged too few to say anything"


def test_what_a_lost_worker_cost_raises_no_alarm(conn: Conn) -> None:
    """Where groups share time, Bob pays for what his tasks held until their worker was given up."""
    call(conn, "configure_queue", "default", fairness="time")
    simulation = Simulation(conn, slots=(4,))
    create_many(conn, "bob", 2000)
    gone = register(conn, slots=6, lease="60 seconds")
    assert len(pop(conn, gone, 6)) == 6
    for group in ("alice", "carol"):
        create_many(conn, group, 2000)
    ratios = {0.0: 0.0}

    def look() -> None:
        if simulation.now % 10 == 0:
            ratios[simulation.now] = worst(conn)

    simulation.until(400, look)
    assert one(conn, "select count(*) from fairq.attempts where outcome = 'worker_lost'") == 6
    bob = [each.began for each in simulation.ran if each.task.group_key == "bob" and each.began > 80]
    assert bob[0] > 150, "Bob was not made to pay, so there was nothing to see"
    assert max(ratios.values()) <= 1, ratios


def test_what_commits_late_is_waited_for_ten_seconds(database: Database, conn: Conn) -> None:
    """A part is written when all that ended in it has committed, or after ten seconds."""
    for patient, counted in ((True, 2), (False, 1)):
        simulation = Simulation(conn, slots=(2,), length=lambda task: 1000.0)
        simulation.now = 0.0 if patient else 120.0
        begin = simulation.now
        create_many(conn, "bob", 2)
        simulation.until(begin + 5)
        first, second = (each.task for each in simulation.ran)
        late = database.connect()
        run(late, "select set_config('fairq.now', %s, false)", str(NOON + timedelta(seconds=begin + 20)))
        finish(late, simulation.workers[0], [first])
        finish(conn, simulation.workers[0], [second])
        simulation.until(begin + 39)
        assert not any(row[0] == begin for row in parts(conn))
        if patient:
            late.commit()
        simulation.until(begin + (40 if patient else 60))
        late.commit()
        simulation.until(begin + 90)
        (row,) = (row for row in parts(conn) if row[0] == begin and row[1] == "bob")
        assert row[2:4] == (2, counted)
        for worker in simulation.workers:
            call(conn, "retire_worker", worker)


def test_a_task_counts_as_waiting_from_its_commit_on(database: Database, conn: Conn) -> None:
    """An application that commits late has not been passed over, however old its tasks say they are."""
    simulation = Simulation(conn)
    create_many(conn, "bob", 3000)
    late = database.connect()
    run(late, "select set_config('fairq.now', %s, false)", str(NOON))
    create_many(late, "alice", 500)
    simulation.until(100)
    late.commit()
    for _ in range(6):
        simulation.until(simulation.now + 5)
        assert worst(conn) <= 1
    assert any(row[1] == "alice" and row[11] == NOON for row in parts(conn))


def test_who_was_held_back_for_a_while_is_not_judged(conn: Conn) -> None:
    """A pause or a hold within a part leaves no trace in the settings; the ledger knows of it."""
    simulation = Simulation(conn, length=lambda task: 0.5)
    for group in ("alice", "bob", "carol"):
        create_many(conn, group, 4000)

    def watch() -> None:
        if simulation.now == 92:
            call(conn, "pause_group", "default", "alice")
        if simulation.now == 107:
            call(conn, "resume_group", "default", "alice")
        if simulation.now == 93:
            call(conn, "hold_group", "default", "bob", NOON + timedelta(seconds=105))
        if simulation.now % 8 == 0:
            assert worst(conn) <= 1, simulation.now

    simulation.until(200, watch)
    assert {row[1] for row in parts(conn) if row[0] == 150 and row[9]} == {"alice", "bob", "carol"}
