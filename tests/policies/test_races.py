"""Policies while many sessions pop, finish and change them. Schedules vary; what must hold does not."""

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import psycopg
import pytest

from tests.support.calls import (
    RELEASE,
    Conn,
    Held,
    at,
    call,
    create,
    create_many,
    finish,
    groups_of,
    in_flight,
    maintain,
    one,
    pop,
    promote,
    register,
    release,
    run,
    state,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound
from tests.support.sessions import (
    call_in_background,
    in_background,
    is_blocked,
    pid_of,
    result,
    wait_until,
    wait_until_blocked,
)

PATIENCE = 120.0


def together(*calls: Callable[[], Any]) -> None:
    """Run all at the same time, in threads; raises what any of them raised."""
    futures = [call_in_background(each) for each in calls]
    for future in futures:
        future.result(PATIENCE)


def serve(
    database: Database,
    seed: int,
    ended: list[int],
    queues: tuple[str, ...] = ("default",),
    keep: float = 0.3,
    total: int | None = None,
) -> Callable[[], None]:
    """A worker that pops a few, ends some of what it holds in any way, and goes on until all have ended."""

    def run_worker() -> None:
        random = Random(seed)
        held: list[Held] = []
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            me = register(conn, *queues)
            empty = 0
            while (total is None and empty < 5) or (total is not None and len(ended) < total):
                popped = pop(conn, me, random.randint(1, 4), queue=random.choice(queues))
                held += popped
                empty = 0 if popped or held else empty + 1
                random.shuffle(held)
                stays = int(len(held) * keep) if popped else 0
                for each in held[stays:]:
                    how = random.random()
                    if how < 0.1:
                        release(conn, me, [each])
                    elif how < 0.2:
                        finish(conn, me, [each], "retry", delay="0 s")
                    else:
                        ended.extend(finish(conn, me, [each], "failed" if how < 0.3 else "succeeded"))
                held = held[:stays]

    return run_worker


def watch(
    database: Database, query: str, most: Callable[[], int], stop: threading.Event, seen: list[int]
) -> Callable[[], None]:
    """Sample a count from outside until told to stop: never above what is allowed."""

    def sample() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            while not stop.is_set():
                allowed = most()
                (count,) = run(conn, query)[0]
                assert count <= max(allowed, most()), f"{count} held, {allowed} allowed"
                seen.append(count)

    return sample


def after(stop: threading.Event, *calls: Callable[[], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        try:
            together(*calls)
        finally:
            stop.set()

    return all_of_them


HELD = "select count(*) from fairq.live_tasks where worker_id is not null"


def test_eight_workers_never_exceed_a_cap_that_only_grows(database: Database) -> None:
    """I7, H17: eight sessions pop and end tasks of a group of cap 3, then 4, then 6."""
    conn = database.connect(autocommit=True)
    call(conn, "configure_group", "default", "bob", max_running=3)
    total = 240
    create_many(conn, "bob", total, max_attempts=1000)
    stop, seen, ended, cap = threading.Event(), [], [], [3]  # type: ignore[var-annotated]

    def raise_it() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as other:
            for number in (4, 6):
                while len(ended) < number * 20:
                    stop.wait(0.01)
                cap[0] = number  # before it is so: the sampler must not be ahead
                call(other, "configure_group", "default", "bob", max_running=number)

    workers = [serve(database, seed, ended, total=total) for seed in range(8)]
    together(watch(database, HELD, lambda: cap[0], stop, seen), after(stop, raise_it, *workers))
    assert len(ended) == len(set(ended)) == total, "each once"
    assert max(seen, default=0) <= 6
    assert_sound(conn)
    assert in_flight(conn, "bob") == 0


def test_eight_workers_and_a_cap_that_comes_goes_and_changes(database: Database) -> None:
    """I7, I1: whatever the cap was meanwhile, every task ends once and every place is given back."""
    conn = database.connect(autocommit=True)
    total = 300
    for group in ("bob", "alice"):
        create_many(conn, group, total // 2, max_attempts=1000)
    ended: list[int] = []
    stop = threading.Event()

    def change_it() -> None:
        random = Random(7)
        with psycopg.connect(database.dsn, autocommit=True) as other:
            while not stop.is_set():
                cap = random.choice([None, 1, 2, 3, 8])
                target = random.choice(["group", "queue of groups", "queue", "cluster"])
                if target == "group":
                    call(other, "configure_group", "default", "bob", max_running=cap)
                elif target == "queue of groups":
                    call(other, "configure_queue", "default", group_max_running=cap)
                elif target == "queue":
                    call(other, "configure_queue", "default", max_running=cap)
                else:
                    call(other, "configure_cluster", max_running=cap)

    workers = [serve(database, seed, ended, total=total) for seed in range(8)]
    together(change_it, after(stop, *workers))
    assert len(ended) == len(set(ended)) == total
    assert_sound(conn)
    assert run(conn, "select queue, group_key from fairq.lanes where (gate).in_flight <> 0") == []


def test_a_rate_that_is_reset_beside_six_workers_gives_one_burst_each_time(database: Database) -> None:
    """D32, I7: lanes are written by nobody else meanwhile, so no reset is lost, and no place with it."""
    conn = database.connect(autocommit=True)
    burst, total = 5, 60
    call(
        conn,
        "configure_group",
        "default",
        "bob",
        rate_limit=1,
        rate_period="100 days",
        rate_burst=burst,
        max_running=3,
    )
    create_many(conn, "bob", total, max_attempts=1000)
    ended: list[int] = []
    resets = [0]
    stop = threading.Event()

    def reset() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as other:
            while not stop.is_set():
                assert len(ended) <= burst * (1 + resets[0])
                resets[0] += 1  # before it is so: a worker may be ahead of us
                call(other, "reset_rate", "default", "bob")

    together(reset, after(stop, *(serve(database, seed, ended, total=total) for seed in range(6))))
    assert len(ended) == len(set(ended)) == total
    assert total <= burst * (1 + resets[0])
    assert_sound(conn)


def test_two_sets_of_workers_share_the_cap_of_the_cluster(database: Database) -> None:
    """I7, H6, H13, H14, H36: four sessions serve one queue, four another; together never more than five."""
    conn = database.connect(autocommit=True)
    call(conn, "configure_queue", "mail", max_running=3)
    call(conn, "configure_cluster", max_running=5)
    total = 200
    for queue in ("default", "mail"):
        create_many(conn, "bob", total // 2, queue=queue, max_attempts=1000)
    stop, seen, ended = threading.Event(), [], []  # type: ignore[var-annotated]
    workers = [
        serve(database, seed, ended, ("default",) if seed % 2 else ("mail",), keep=0.5, total=total)
        for seed in range(8)
    ]
    together(
        watch(database, HELD, lambda: 5, stop, seen),
        watch(database, HELD + " and queue = 'mail'", lambda: 3, stop, []),
        after(stop, *workers),
    )
    assert len(ended) == len(set(ended)) == total
    assert max(seen) == 5, "the cap was reached, or nothing was tested"
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_keys_shared_by_two_queues_are_never_shared_by_two_tasks(database: Database) -> None:
    """I7, D2, D13: both queues promote at the same time, all the time."""
    conn = database.connect(autocommit=True)
    call(conn, "configure_queue", "mail")
    call(conn, "configure_key", "k0", max_running=2)
    total = 160
    for number in range(total):
        create(
            conn,
            f"g{number % 5}",
            queue="mail" if number % 2 else "default",
            concurrency_key=f"k{number % 4}",
            max_attempts=1000,
        )
    stop, seen, ended = threading.Event(), [], []  # type: ignore[var-annotated]
    over = """
        select count(*) from (
          select from fairq.live_tasks where block is not null group by concurrency_key
          having count(*) > case concurrency_key when 'k0' then 2 else 1 end) x"""
    workers = [serve(database, seed, ended, ("default", "mail"), total=total) for seed in range(6)]
    together(watch(database, over, lambda: 0, stop, seen), after(stop, *workers))
    assert len(ended) == len(set(ended)) == total
    assert len(seen) > 3
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_the_places_of_a_killed_worker_come_back_once(database: Database) -> None:
    """I7, I10, S24, S28: eight maintainers at once, and the dead worker's own finish after that."""
    conn = database.connect(autocommit=True)
    at(conn, "12:00:00")
    call(conn, "configure_group", "default", "bob", max_running=3)
    call(conn, "configure_queue", "default", max_running=4)
    dead, alive = register(conn, lease="1 minute"), register(conn)
    for _ in range(4):
        create(conn, "bob", max_attempts=5)
    for _ in range(2):
        create(conn, "alice", concurrency_key="k", max_attempts=5)
    held = pop(conn, dead)
    assert len(held) == 4

    def recover() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as other:
            at(other, "12:30:00")
            maintain(other)

    at(conn, "12:30:00")
    call(conn, "heartbeat", alive)
    together(*[recover] * 8)
    assert finish(conn, dead, held) == []
    again = pop(conn, alive)
    assert len(again) == 4
    assert groups_of(again).count("bob") == 3
    assert_sound(conn)
    assert pop(conn, alive) == []


def test_a_finish_waits_for_settings_and_is_not_lost(conn: Conn, database: Database) -> None:
    """I7, I10: configure_group begins to count a task while its worker finishes it."""
    for settings in (("configure_group", ("default", "bob"), 3), ("configure_queue", ("default",), 9)):
        function, args, cap = settings
        bob = register(conn)
        create_many(conn, "bob", 3)
        held = pop(conn, bob)
        operator, observer = database.connect(), database.connect(autocommit=True)
        at(operator, "12:00:00")
        call(operator, function, *args, max_running=cap)
        finishing = in_background(
            conn,
            "select fairq.finish_tasks(%s, %s, %s, %s,"
            " p_retry_delays => array_fill('1 hour'::interval, array[3]))",
            [bob, held, [1, 1, 1], ["succeeded", "failed", "retry"]],
        )
        wait_until_blocked(observer, pid_of(conn))
        operator.commit()
        assert sorted(row[0] for row in result(finishing)) == held
        assert_sound(conn)


def test_a_release_waits_for_settings_and_gives_the_place_back(conn: Conn, database: Database) -> None:
    """I7, I10."""
    bob = register(conn)
    create_many(conn, "bob", 3)
    held = pop(conn, bob)
    operator, observer = database.connect(), database.connect(autocommit=True)
    at(operator, "12:00:00")
    call(operator, "configure_group", "default", "bob", max_running=3)
    releasing = in_background(conn, RELEASE, [bob, held, [1, 1, 1]])
    wait_until_blocked(observer, pid_of(conn))
    operator.commit()
    assert len(result(releasing)) == 3
    assert_sound(conn)
    assert len(pop(conn, bob)) == 3


def test_a_cap_that_goes_and_comes_while_a_task_is_being_finished_counts_it_once(
    conn: Conn, database: Database
) -> None:
    """I7: the place of a task that is leaving comes back when its finish commits, and not before."""
    bob = register(conn)
    for function, args in (("configure_group", ("default", "bob")), ("configure_queue", ("default",))):
        call(conn, function, *args, max_running=3)
        create_many(conn, "bob", 6)
        held = pop(conn, bob)
        assert len(held) == 3
        finishing = database.connect()
        at(finishing, "12:00:00")
        finish(finishing, bob, held[:1])
        call(conn, function, *args, max_running=None)
        call(conn, function, *args, max_running=2)
        assert pop(conn, bob) == [], "two are held, and one is not gone yet"
        finishing.commit()
        assert pop(conn, bob) == []
        assert_sound(conn)
        finish(conn, bob, held[1:2])
        assert len(pop(conn, bob)) == 1
        call(conn, function, *args, max_running=None)
        finish(conn, bob, held[2:])
        while rest := pop(conn, bob):
            finish(conn, bob, rest)
        run(conn, "select fairq.retire_worker(%s)", bob)
        bob = register(conn)
        while rest := pop(conn, bob):
            finish(conn, bob, rest)
        assert_sound(conn)


@pytest.mark.parametrize("commit", [True, False])
def test_a_first_cap_of_a_group_counts_what_an_open_pop_is_taking(
    conn: Conn, database: Database, commit: bool
) -> None:
    """I7, I15: and nobody waits for that pop."""
    bob = register(conn)
    create_many(conn, "bob", 8)
    promote(conn)
    popping = database.connect()
    at(popping, "12:00:00")
    assert len(pop(popping, bob, 3)) == 3
    run(conn, "set lock_timeout = '1s'")
    call(conn, "configure_group", "default", "bob", max_running=4)
    assert len(pop(conn, bob)) == 1
    popping.commit() if commit else popping.rollback()
    at(conn, "12:00:01")
    assert len(pop(conn, bob)) == (0 if commit else 3)
    assert_sound(conn)
    at(conn, "12:00:02")
    promote(conn)
    assert in_flight(conn, "bob") == 4, "and by then each has its place"
    assert pop(conn, bob) == []
    assert_sound(conn)


@pytest.mark.parametrize("waiting", [1, 20], ids=["all that waits", "the first of many"])
@pytest.mark.parametrize("of", ["group", "user", "user of a group"])
def test_a_first_cap_of_all_counts_what_an_open_pop_serves_for_the_first_time(
    conn: Conn, database: Database, of: str, waiting: int
) -> None:
    """I7, I15: who sets it sees neither lane nor holder of that group, or user. Nobody waits for that pop."""
    bob = register(conn)
    user = None if of == "group" else "jane"
    create_many(conn, "bob", waiting, user_keys=[user] * waiting)
    popping = database.connect()
    at(popping, "12:00:00")
    early = pop(popping, bob, 1)
    run(conn, "set lock_timeout = '1s'")
    if of == "user of a group":
        call(conn, "configure_group", "default", "bob", user_max_running=1)
    else:
        call(conn, "configure_queue", "default", **{f"{of}_max_running": 1})
    popping.commit()
    if waiting == 1:
        create(conn, user_key=user)
    assert pop(conn, bob) == []
    assert_sound(conn)
    finish(conn, bob, early)
    assert len(pop(conn, bob)) == 1
    assert_sound(conn)


def test_other_limits_of_all_bind_what_an_open_pop_has_made_ready(conn: Conn, database: Database) -> None:
    bob = register(conn)
    create_many(conn, "bob", 20)
    popping = database.connect()
    at(popping, "12:00:00")
    pop(popping, bob, 1)
    call(conn, "configure_queue", "default", group_rate_limit=1, group_rate_period="1 hour")
    popping.commit()
    assert len(pop(conn, bob)) == 1
    assert pop(conn, bob) == []
    assert_sound(conn)


def test_what_is_being_popped_while_a_queue_gets_its_first_cap_escapes_it(
    conn: Conn, database: Database
) -> None:
    """The documented limit: an open pop is neither waited for nor counted. It frees nothing, either."""
    bob = register(conn)
    create_many(conn, "bob", 8)
    promote(conn)
    popping = database.connect()
    at(popping, "12:00:00")
    escaped = pop(popping, bob, 2)
    call(conn, "configure_queue", "default", max_running=3)
    popping.commit()
    assert len(pop(conn, bob)) == 3
    finish(conn, bob, escaped)
    assert pop(conn, bob) == []
    assert_sound(conn)


QUEUE_CAP = """configure_queue('q1', '{"max_running": 3}')"""
CLUSTER_CAP = """configure_cluster('{"max_running": 3}')"""
BOB, KEY, OTHER = (
    "configure_group('q2', 'bob')",
    "configure_key('k')",
    "configure_queue('q2', '{\"weight\": 2}')",
)


@pytest.mark.parametrize(
    ("one_call", "other_call"), [(QUEUE_CAP, CLUSTER_CAP), (QUEUE_CAP, OTHER), (BOB, OTHER), (BOB, KEY)]
)
def test_transactions_that_configure_in_opposite_order_wait_for_each_other_in_no_circle(
    conn: Conn, database: Database, one_call: str, other_call: str
) -> None:
    """C17: who changes settings takes one lock before all others, and keeps it to the end."""
    for queue in ("q1", "q2"):
        call(conn, "configure_queue", queue)
    first, second, observer = database.connect(), database.connect(), database.connect(autocommit=True)

    def all_of_it() -> None:
        run(second, f"select fairq.{other_call}")
        run(second, f"select fairq.{one_call}")
        second.commit()

    run(first, f"select fairq.{one_call}")
    following = call_in_background(all_of_it)
    wait_until_blocked(observer, pid_of(second))
    run(first, f"select fairq.{other_call}")
    first.commit()
    result(following)
    assert_sound(conn)


def test_two_caps_set_while_a_limited_queue_is_popped_both_hold(conn: Conn, database: Database) -> None:
    """C17: both wait for the pop, one behind the other, not one for the other."""
    call(conn, "configure_queue", "q1", max_running=1)
    call(conn, "configure_queue", "q1", max_running=None)
    popping, observer = database.connect(), database.connect(autocommit=True)
    run(popping, "select from fairq.domains where queue in ('#cluster', '#queue q1') for update")
    sessions = [database.connect(autocommit=True) for _ in range(2)]
    calls = []
    for session, text in zip(sessions, (CLUSTER_CAP, QUEUE_CAP), strict=True):
        calls.append(in_background(session, f"select fairq.{text}"))
        wait_until_blocked(observer, pid_of(session))
    popping.commit()
    for each in calls:
        result(each)
    assert run(conn, "select max_running, metered from fairq.queues where queue = 'q1'") == [(3, True)]
    assert one(conn, "select max_running from fairq.settings") == 3


def test_a_pop_that_rolls_back_takes_no_places(conn: Conn, database: Database) -> None:
    """I1, I7."""
    call(conn, "configure_queue", "default", max_running=2, rate_limit=2, rate_period="1 hour", rate_burst=2)
    call(conn, "configure_group", "default", "bob", max_running=1, rate_limit=1, rate_period="1 hour")
    bob = register(conn)
    create_many(conn, "bob", 2)
    create(conn, "alice", concurrency_key="k")
    popping = database.connect()
    at(popping, "12:00:00")
    assert len(pop(popping, bob)) == 2
    popping.rollback()
    assert_sound(conn)
    assert sorted(groups_of(pop(conn, bob))) == ["alice", "bob"]
    assert_sound(conn)


def test_capped_pops_go_one_after_the_other_and_others_do_not_wait(conn: Conn, database: Database) -> None:
    """H36: the lock is taken only where there is something to count."""
    call(conn, "configure_queue", "plain")
    call(conn, "configure_queue", "default", max_running=2)
    bob = register(conn, "default", "plain")
    create_many(conn, "bob", 4)
    create_many(conn, "bob", 2, queue="plain")
    first, second, observer = database.connect(), database.connect(), database.connect(autocommit=True)
    at(first, "12:00:00")
    at(second, "12:00:00")
    assert len(pop(first, bob, 1)) == 1
    waiting = in_background(second, "select id from fairq.pop_tasks('default', 5, %s)", [bob])
    wait_until_blocked(observer, pid_of(second))
    assert len(pop(conn, bob, queue="plain")) == 2
    first.commit()
    assert len(result(waiting)) == 1, "exactly what is left of the cap"
    second.commit()
    assert_sound(conn)


@pytest.mark.parametrize("commit", [True, False])
def test_a_pause_beside_an_open_pop(conn: Conn, database: Database, commit: bool) -> None:
    """What is being popped when the group is paused counts as started, unless that pop rolls back."""
    bob = register(conn)
    ids = create_many(conn, "bob", 4)
    promote(conn)
    popping = database.connect()
    at(popping, "12:00:00")
    held = pop(popping, bob, 1)
    call(conn, "pause_group", "default", "bob")
    promote(conn)
    assert {state(conn, i) for i in ids[1:]} == {"overflow"}
    popping.commit() if commit else popping.rollback()
    assert pop(conn, bob) == []
    assert len(held) == 1
    call(conn, "resume_group", "default", "bob")
    assert len(pop(conn, bob)) == (3 if commit else 4)
    assert one(conn, "select count(*) from fairq.live_tasks where state = 'running'") == 4
    assert_sound(conn)


def test_pops_of_several_queues_in_one_transaction_do_not_block_each_other_for_good(
    conn: Conn, database: Database
) -> None:
    """One holds the keys and asks the meters, the other the other way round: it goes without keys."""
    call(conn, "configure_queue", "keyed")
    call(conn, "configure_queue", "both", max_running=9)
    bob = register(conn, "keyed", "both")
    for queue in ("keyed", "both"):
        for _ in range(3):
            create(conn, "ann", queue=queue)
        promote(conn, queue)
    first, second, observer = database.connect(), database.connect(), database.connect(autocommit=True)
    for session in (first, second):
        session.execute(
            "set deadlock_timeout = '5s'"
        )  # the usual one is a second: longer than such a pop waits
        session.execute("select set_config('fairq.now', '2030-01-01 12:00:00+00', false)")
        session.commit()
    create(conn, "bob", queue="keyed", concurrency_key="more")
    create(conn, "bob", queue="both", concurrency_key="more")
    assert len(pop(first, bob, queue="keyed")) == 4
    run(second, "select from fairq.domains where queue = '#queue both' for update")
    asking = in_background(first, "select id from fairq.pop_tasks('both', 9, %s)", [bob])
    wait_until_blocked(observer, pid_of(first))
    popped = pop(second, bob, queue="both")
    assert len(popped) == 3, "what was ready; the one that needs a key has to wait"
    second.commit()
    assert result(asking) == []
    first.commit()
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_a_keyed_task_that_commits_in_the_midst_of_a_promotion_waits_for_its_key(database: Database) -> None:
    """I7: its group had no keys when the promotion began. It may be served later, never without its key."""
    conn, admin = database.connect(autocommit=True), database.connect()
    promoter = database.connect(autocommit=True)
    call(conn, "configure_queue", "mail")
    bob = register(conn, "default", "mail")
    create(conn, "zed", concurrency_key="k")
    holder = pop(conn, bob)
    assert groups_of(holder) == ["zed"]
    promote(conn, "mail")
    low = create(conn, "bob", queue="mail", priority=-1)
    first = create(conn, "bob", queue="mail")
    other = create(conn, "ann", queue="mail", concurrency_key="another")

    # Keys are being changed: a promotion that meets the first key of its queue may have to wait for that.
    call(admin, "configure_key", "unrelated", max_running=3)
    promotion = in_background(promoter, "select fairq.promote_overflow('mail')")
    wait_until(lambda: promotion.done() or is_blocked(conn, pid_of(promoter)), "it is done or waits")
    keyed = create(conn, "bob", queue="mail", concurrency_key="k")
    behind = create(conn, "bob", queue="mail")
    admin.commit()
    result(promotion)

    held = pop(conn, bob, queue="mail")
    assert sorted(held) == [low, first, other, behind], "all but the one whose key is taken"
    finish(conn, bob, held + holder)
    held = pop(conn, bob, queue="mail")
    assert held == [keyed]
    finish(conn, bob, held)

    # Nothing is left of it: the key has one place, as before.
    for number in range(4):
        create(conn, f"x{number}", concurrency_key="k")
    for number in range(4):
        held = pop(conn, bob)
        assert groups_of(held) == [f"x{number}"]
        finish(conn, bob, held)
    assert_sound(conn)


@pytest.mark.usefixtures("one_shard")
def test_keys_come_up_while_their_groups_are_being_promoted(database: Database) -> None:
    """I7: group after group has a first task without a key and a second one with one, while workers pop."""
    conn = database.connect(autocommit=True)
    keys, groups = 5, 100
    total = 4 * groups
    held_keys: set[str] = set()
    twice: list[str] = []
    ended: list[int] = []
    guard = threading.Lock()

    def produce(number: int) -> Callable[[], None]:
        def create_them() -> None:
            with psycopg.connect(database.dsn, autocommit=True) as app:
                for n in range(groups):
                    create(app, f"g{number}-{n}")
                    create(app, f"g{number}-{n}", concurrency_key=f"k{n % keys}")

        return create_them

    def consume() -> None:
        query = "select id, attempt, concurrency_key from fairq.pop_tasks('default', 20, %s)"
        with psycopg.connect(database.dsn, autocommit=True) as mine:
            me = register(mine)
            before: list[tuple[Any, ...]] = []
            while len(ended) < total and not twice:
                rows = run(mine, query, me)
                with guard:
                    for key in (key for _, _, key in rows if key):
                        if key in held_keys:
                            twice.append(key)
                        held_keys.add(key)
                    # Off this list before it is off the engine's: whoever pops it next adds it again.
                    held_keys.difference_update(key for _, _, key in before)
                ended.extend(finish(mine, me, [Held(*row) for row in before]))
                before = rows

    together(produce(0), produce(1), consume, consume)
    assert not twice, f"{twice} given to two tasks at once"
    assert len(ended) == len(set(ended)) == total
    bob = register(conn)
    for number in range(3 * keys):
        create(conn, f"x{number}", concurrency_key=f"k{number % keys}")
    assert len(pop(conn, bob)) == keys, "one place each"
    assert_sound(conn)
