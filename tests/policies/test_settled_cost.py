"""Groups that share what handlers charge: fairness = 'cost'. The seconds of a time queue go the same way."""

import random
from collections import defaultdict
from datetime import datetime, timedelta

import pytest

from tests.support.calls import (
    Conn,
    Held,
    call,
    column,
    create,
    create_all,
    create_many,
    finish,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
)
from tests.support.invariants import assert_sound, hear_all

NOON = datetime(2030, 1, 1, 12)

pytestmark = pytest.mark.usefixtures("one_shard")


def share_cost(conn: Conn, **options: object) -> None:
    call(conn, "configure_queue", "default", fairness="cost", **options)


def set_time(conn: Conn, seconds: float) -> None:
    moment = NOON + timedelta(seconds=seconds)
    run(conn, "select set_config('fairq.now', %s, false)", moment.isoformat(sep=" ") + "+00")


def estimate(conn: Conn, group: str = "bob") -> tuple[float, float, int] | None:
    hear_all(conn)
    rows = run(conn, "select used, cost, tasks from fairq.estimates where group_key = %s", group)
    return rows[0] if rows else None


def ahead(conn: Conn, group: str = "bob") -> float:
    """How many rounds of the lane lie ahead of the clock."""
    hear_all(conn)
    query = "select fairq._rounds((fairq._lane(0, 'default', %s)).finish - (fairq._tick(0, 'default')).clock)"
    return float(one(conn, query, group))


# --- Shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "bound"), [(20, 8), (1000, 20)])
def test_what_is_given_back_does_not_add_up(conn: Conn, limit: int, bound: int) -> None:
    """F1, I4: 30 % of the tasks are released, and used nothing; what each group has had is in proportion."""
    share_cost(conn)
    weights = {"alice": 1, "bob": 1, "corp": 3}
    call(conn, "configure_group", "default", "corp", weight=3)
    for group, weight in weights.items():
        for _ in range(weight):
            create_many(conn, group, 1400)
    worker = register(conn)
    draw = random.Random(1)
    used = dict.fromkeys(weights, 0)
    worst = 0.0
    while sum(used.values()) < 5000:
        held = pop(conn, worker, draw.randint(1, limit))
        back = [each for each in held if draw.random() < 0.3]
        rest = [each for each in held if each not in back]
        release(conn, worker, back)
        finish(conn, worker, rest)
        for each in rest:
            used[each.group_key] += 1
        shares = [used[group] / weight for group, weight in weights.items()]
        worst = max(worst, max(shares) - min(shares))
    assert worst <= bound


def test_a_guess_far_too_high_brings_no_flood(conn: Conn) -> None:
    """F1: what was charged too much comes back bit by bit, at twice the share."""
    share_cost(conn)
    create_many(conn, "alice", 1000)
    create_many(conn, "bob", 1000, costs=[10.0] * 1000)
    worker = register(conn)
    served: list[str] = []
    while len(served) < 1000:
        held = pop(conn, worker, 50)
        served += [each.group_key for each in held]
        finish(conn, worker, held, costs=[1.0] * len(held))
    assert served[:100].count("bob") < 15
    # Some of it comes back, and then they share alike.
    assert served[-200:].count("bob") == pytest.approx(100, abs=1)
    bobs = "".join("b" if group == "bob" else " " for group in served)
    assert max(len(run_of_his) for run_of_his in bobs.split()) <= 3


@pytest.mark.parametrize("why", ["idle", "paused"])
@pytest.mark.parametrize("of", ["groups", "users"])
def test_time_without_work_is_no_credit(conn: Conn, why: str, of: str) -> None:
    """I5: who comes back has one turn like everybody else."""
    share_cost(conn)
    worker = register(conn)

    def names(held: list[Held]) -> list[str | None]:
        return [each.group_key if of == "groups" else each.user_key for each in held]

    def add(name: str, count: int) -> None:
        create_many(conn, name if of == "groups" else "g", count, user_keys=[name] * count)

    add("alice", 100)
    add("bob", 1 if why == "idle" else 20)
    finish(conn, worker, pop(conn, worker, 2))
    if why == "paused" and of == "groups":
        call(conn, "pause_group", "default", "bob")
    elif why == "paused":
        call(conn, "configure_user", "default", "g", "bob", max_running=0)
    for _ in range(6):
        finish(conn, worker, [each for each in pop(conn, worker, 10) if "bob" not in names([each])])
    if why == "idle":
        add("bob", 20)
    elif of == "groups":
        call(conn, "resume_group", "default", "bob")
    else:
        call(conn, "configure_user", "default", "g", "bob", max_running=None)
    held = pop(conn, worker, 20)
    assert names(held).count("bob") == pytest.approx(10, abs=1)


def test_tenants_share_tokens_whatever_they_guessed(conn: Conn) -> None:
    """I4 in tokens: outputs log-normal from 10 to 10,000, estimates wrong by up to ten times, both ways; the
    one tenant has short answers and the other long ones.
    """
    share_cost(conn)
    draw = random.Random(7)
    tokens: dict[int, float] = {}
    for group, median in (("brief", 200), ("wordy", 400)):
        used = [min(10_000.0, max(10.0, draw.lognormvariate(0, 1.2) * median)) for _ in range(2600)]
        guesses = [each * 10 ** draw.uniform(-1, 1) for each in used]
        ids = create_many(conn, group, len(used), costs=guesses)
        tokens.update(zip(ids, used, strict=True))
    worker_id = register(conn)
    received: defaultdict[str, float] = defaultdict(float)
    served: defaultdict[str, int] = defaultdict(int)
    while min(served["brief"], served["wordy"]) < 1000:
        held = pop(conn, worker_id, 8)
        finish(conn, worker_id, held, costs=[tokens[each] for each in held])
        for each in held:
            received[each.group_key] += tokens[each]
            served[each.group_key] += 1
    assert served["brief"] > 1.5 * served["wordy"]
    assert received["brief"] == pytest.approx(received["wordy"], rel=0.02)
    assert_sound(conn)


def test_the_published_case_is_half_and_half(conn: Conn) -> None:
    """65 % of the tasks, of 34 seconds against one, took 98 % of the seconds. In turns by seconds: 50."""
    call(conn, "configure_queue", "default", fairness="time")
    create_all(conn, *["slow" if n % 20 < 13 else "quick" for n in range(2600)])
    worker_id = register(conn)
    turn = "select id, attempt, group_key from fairq.turn(%s, '{default}', '{1}', 1, null, %s, %s)"
    used = {"slow": 0.0, "quick": 0.0}
    ended: list[int] = []
    now = 0.0
    while now < 1750:
        set_time(conn, now)
        task, attempt, group = run(conn, turn, worker_id, ended[:1], ended[1:])[0]
        seconds = 34.0 if group == "slow" else 1.0
        used[group] += seconds
        now += seconds
        ended = [task, attempt]
    assert used["slow"] / sum(used.values()) == pytest.approx(0.5, abs=0.01)


def test_weights_are_shares_of_what_is_charged(conn: Conn) -> None:
    share_cost(conn, ready_target=10)
    call(conn, "configure_group", "default", "big", weight=3)
    worker_id = register(conn)
    received: defaultdict[str, float] = defaultdict(float)
    for group in ("big", "small"):
        create_many(conn, group, 400)
    for _ in range(100):
        held = pop(conn, worker_id, 4)
        charges = [5.0 if each.group_key == "big" else 40.0 for each in held]
        finish(conn, worker_id, held, costs=charges)
        for each, charge in zip(held, charges, strict=True):
            received[each.group_key] += charge
    assert received["big"] == pytest.approx(3 * received["small"], rel=0.1)


# --- What counts ----------------------------------------------------------------------------------


def test_the_estimate_is_the_cost_times_what_a_unit_of_it_took(conn: Conn) -> None:
    """A guess that is always ten times too high, or a number of pages, is as good as the truth."""
    share_cost(conn, ready_target=1)
    create_many(conn, "bob", 40, costs=[100.0, 1000.0] * 20)
    worker_id = register(conn)
    for _ in range(16):
        held = pop(conn, worker_id, 2)
        costs = [float(one(conn, "select cost from fairq.tasks where id = %s", each)) / 10 for each in held]
        finish(conn, worker_id, held, costs=costs)
    used, cost, tasks = estimate(conn) or (0, 0, 0)
    assert used / cost == pytest.approx(0.1)
    assert tasks == 16
    create(conn, "alice", cost=7)
    promote(conn)
    charges = run(conn, "select charge / cost from fairq.live_tasks where group_key = 'bob' and charge > 0")
    assert charges
    assert all(share == pytest.approx(0.1) for (share,) in charges)
    assert column(conn, "select charge from fairq.live_tasks where group_key = 'alice'") == [7.0]


def test_the_difference_is_settled(conn: Conn) -> None:
    share_cost(conn)
    create_many(conn, "bob", 3, costs=[100.0] * 3)
    worker_id = register(conn)
    held = pop(conn, worker_id, 2)
    before = one(conn, "select (fairq._lane(0, 'default', 'bob')).finish")
    finish(conn, worker_id, held, costs=[40, 500])
    hear_all(conn)
    moved = one(conn, "select fairq._rounds((fairq._lane(0, 'default', 'bob')).finish - %s)", before)
    assert moved == pytest.approx(40 + 500 - 2 * 100, abs=0.01)


def test_more_than_a_million_is_settled_in_full(conn: Conn) -> None:
    """A step has its limit, what is settled at once has not."""
    share_cost(conn)
    create_many(conn, "bob", 30)
    create_many(conn, "alice", 5)
    worker_id = register(conn)
    held = pop(conn, worker_id, 20)
    finish(conn, worker_id, held, costs=[5e6 if each.group_key == "bob" else 1.0 for each in held])
    bobs = sum(each.group_key == "bob" for each in held)
    assert bobs >= 10
    assert ahead(conn) == pytest.approx(5e6 * bobs, rel=0.01)
    finish(conn, worker_id, pop(conn, worker_id, 20), costs=None)
    call(conn, "configure_group", "default", "bob", weight=0.001)
    create_many(conn, "bob", 5)
    held = pop(conn, worker_id, 5)
    finish(conn, worker_id, held, costs=[1e9] * len(held))
    assert ahead(conn) > 1e9
    assert_sound(conn)


@pytest.mark.parametrize(
    ("leave", "charged", "counts"),
    [
        ("succeeded", None, 100),
        ("succeeded", 7, 7),
        ("succeeded", 0, 0),
        ("failed", 7, 7),
        ("failed", None, 100),
        ("retry", 7, 7),
        ("lost", 7, 7),
        ("lost", None, 100),
        ("release", 7, 7),
        ("release", None, 0),
    ],
)
def test_what_counts(conn: Conn, leave: str, charged: float | None, counts: float) -> None:
    """What was said last; without a word the estimate, if the attempt ended; of one given back, nothing."""
    share_cost(conn)
    keeper = register(conn, lease="1 minute")
    create_many(conn, "bob", 1, costs=[100.0])
    held = pop(conn, keeper, 1)
    if charged is not None:
        report(conn, keeper, held, 3)
        set_time(conn, 1)
        report(conn, keeper, held, charged)
    if leave == "release":
        release(conn, keeper, held)
    elif leave == "lost":
        set_time(conn, 600)
        maintain(conn)
    else:
        finish(conn, keeper, held, leave)
    settled = run(conn, "select sum(used), sum(charged) from fairq.rings where charged is not null")
    assert settled == [(counts, 100)]
    learned = estimate(conn)
    assert (learned is not None) == (charged is not None and leave in {"succeeded", "failed", "retry"})
    assert_sound(conn)


def report(conn: Conn, worker: int, held: list[Held], charged: float) -> list[int]:
    query = "select fairq.report_progress(%s, %s, %s, array[null]::float8[], p_costs => array[%s::float8])"
    return column(conn, query, worker, held, [each.attempt for each in held], charged)


def test_what_is_said_at_the_end_replaces_what_was_reported(conn: Conn) -> None:
    share_cost(conn)
    worker_id = register(conn)
    create(conn, "bob", cost=100)
    held = pop(conn, worker_id, 1)
    assert report(conn, worker_id, held, 3) == held
    assert one(conn, "select count(*) from fairq.task_progress(%s)", held[0]) == 0
    finish(conn, worker_id, held, costs=[12])
    assert run(conn, "select used, charged from fairq.rings where charged is not null") == [(12, 100)]
    # Charged after the end: not this worker's any more.
    assert report(conn, worker_id, held, 500) == []
    assert finish(conn, worker_id, held, costs=[500]) == []


def test_what_one_attempt_reported_is_not_the_next_ones(conn: Conn) -> None:
    share_cost(conn)
    worker_id = register(conn)
    create(conn, "bob", cost=100)
    held = pop(conn, worker_id, 1)
    report(conn, worker_id, held, 30)
    release(conn, worker_id, held)
    held = pop(conn, worker_id, 1)
    assert held[0].attempt == 2
    finish(conn, worker_id, held)
    settled = "select used, charged from fairq.rings where charged is not null order by ring_id"
    assert run(conn, settled) == [(30, 100), (100, 100)]


@pytest.mark.parametrize("cost", ["-1", "NaN", "Infinity", "-Infinity", "1e10"])
def test_absurd_charges_are_refused(conn: Conn, cost: str) -> None:
    share_cost(conn)
    worker_id = register(conn)
    create_many(conn, "bob", 2)
    held = pop(conn, worker_id, 2)
    with refused(conn, "QF008"):
        finish(conn, worker_id, held, costs=["1", cost])
    with refused(conn, "QF008"):
        report(conn, worker_id, held[:1], float(cost))
    with refused(conn, "QF011"):
        finish(conn, worker_id, held, costs=[1.0])
    assert finish(conn, worker_id, held, costs=[1, None]) == held


def test_where_tasks_are_counted_charges_say_nothing(conn: Conn) -> None:
    worker_id = register(conn)
    create_many(conn, "bob", 2)
    held = pop(conn, worker_id, 1)
    assert finish(conn, worker_id, held, costs=[500]) == held
    assert run(conn, "select from fairq.rings where charged is not null") == []
    assert column(conn, "select used from fairq.finished_tasks") == [None]
    assert estimate(conn) is None


def test_another_unit_begins_anew(conn: Conn) -> None:
    """What was learned in seconds means nothing in tokens."""
    call(conn, "configure_queue", "default", fairness="time")
    worker_id = register(conn)
    create_many(conn, "bob", 6)
    set_time(conn, 0)
    held = pop(conn, worker_id, 1)
    set_time(conn, 30)
    finish(conn, worker_id, held)
    assert estimate(conn) == (30, 1, 1)
    share_cost(conn)
    assert estimate(conn) is None
    finish(conn, worker_id, pop(conn, worker_id, 1), costs=[400])
    assert estimate(conn) == (400, 1, 1)
    assert_sound(conn)


@pytest.mark.parametrize("rebuilt", [False, True], ids=["", "rebuilt"])
def test_what_is_in_flight_stays_reserved_while_the_queue_counts_for_a_while(
    conn: Conn, rebuilt: bool
) -> None:
    """I13: a charge is given back by its task, whatever was shared in between."""
    share_cost(conn)
    worker = register(conn)
    create_many(conn, "bob", 3)
    held = pop(conn, worker, 2)
    call(conn, "configure_queue", "default", fairness="count")
    if rebuilt:
        run(conn, "select fairq.rebuild('default')")
    create(conn, "bob")
    promote(conn)
    assert_sound(conn)
    share_cost(conn)
    create(conn, "bob")
    promote(conn)
    assert_sound(conn)
    finish(conn, worker, held)
    assert_sound(conn)
