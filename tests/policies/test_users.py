"""Two levels: groups share a queue, and the users of a group what the group gets (I14)."""

from collections import Counter
from itertools import pairwise

import pytest

from tests.policies.test_time import SLOTS, share_time, simulate
from tests.support.calls import (
    Conn,
    Held,
    at,
    call,
    create,
    create_many,
    create_of,
    drain,
    explain,
    finish,
    groups_of,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
    users_of,
)
from tests.support.invariants import assert_sound

pytestmark = pytest.mark.usefixtures("one_shard")


def lines_of(held: list[Held]) -> list[tuple[str, str | None]]:
    return [(each.group_key, each.user_key) for each in held]


def cap_jane(conn: Conn, of: str, most: int) -> None:
    """A cap of a user of bob's, said of her, of her group's users, or of those of all groups."""
    if of == "user":
        call(conn, "configure_user", "default", "bob", "jane", max_running=most)
    elif of == "group":
        call(conn, "configure_group", "default", "bob", user_max_running=most)
    else:
        call(conn, "configure_queue", "default", user_max_running=most)


def pop_all(conn: Conn, worker: int, size: int = 50) -> list[Held]:
    served: list[Held] = []
    while held := pop(conn, worker, size):
        finish(conn, worker, held)
        served += held
    return served


def test_users_of_a_group_take_its_turns_by_turns(conn: Conn) -> None:
    """I14, I3: bob has every second turn, and none of his two users more of those than the other."""
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 4, *["joe"] * 2)
    create_many(conn, "alice", 4)
    held = pop(conn, worker, 8)
    assert groups_of(held) == ["bob", "alice"] * 4
    assert users_of(held)[::2] == ["jane", "joe", "jane", "joe"]
    assert users_of(held)[1::2] == [None] * 4
    assert users_of(pop(conn, worker)) == ["jane", "jane"]
    assert_sound(conn)


def test_tasks_that_name_nobody_are_one_user_more(conn: Conn) -> None:
    worker = register(conn)
    create_many(conn, "bob", 3)
    create_of(conn, "bob", *["jane"] * 3)
    assert users_of(pop(conn, worker)) == [None, "jane"] * 3


def test_a_thousand_users_have_the_share_of_one(conn: Conn) -> None:
    """I14: by cost, tenants have half each, however many users one of them has, and whoever came first."""
    worker = register(conn)
    many = [f"user {n}" for n in range(1000)]
    create_of(conn, "many", *many, *many, cost=2)
    create_of(conn, "one", *["jane"] * 4000)
    cost = Counter[str]()
    for _ in range(20):
        for held in pop(conn, worker, 100):
            cost[held.group_key] += 2 if held.group_key == "many" else 1
    assert cost["many"] / cost.total() == pytest.approx(0.5, abs=0.01)


def test_a_thousand_users_have_the_seconds_of_one(conn: Conn) -> None:
    """I14 in a queue that shares time: the seconds are settled with the user and with the group."""
    share_time(conn)
    create_of(conn, "many", *[f"user {n % 1000}" for n in range(3000)])
    create_of(conn, "one", *["jane"] * 200)
    used = simulate(conn, lambda group, id_: 1.0 + id_ % 3 if group == "many" else 30.0, until=2000)
    assert used["many"] / sum(used.values()) == pytest.approx(0.5, abs=0.01)
    assert sum(used.values()) == pytest.approx(2000 * SLOTS)


def test_users_of_a_group_share_its_seconds(conn: Conn) -> None:
    share_time(conn, ready_target=10)
    create_of(conn, "bob", *["long"] * 60, *["short"] * 1200)
    lengths: dict[int, float] = {}
    for id_, length in run(
        conn, "select id, case user_key when 'long' then 20.0 else 1.0 end from fairq.tasks"
    ):
        lengths[id_] = float(length)
    seconds = {"long": 0.0, "short": 0.0}

    def duration(_: str, id_: int) -> float:
        seconds["long" if lengths[id_] > 1 else "short"] += lengths[id_]
        return lengths[id_]

    simulate(conn, duration, until=500)
    assert seconds["long"] / sum(seconds.values()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("of", ["group", "user"])
def test_who_sends_one_at_a_time_pays_for_what_it_took(conn: Conn, of: str) -> None:
    """I4, I14: with upkeep while it runs. Others go past what it was expected to use."""
    call(conn, "configure_queue", "default", fairness="cost", ready_target=1)

    def add(name: str, count: int) -> None:
        create_many(conn, name if of == "group" else "g", count, user_keys=[name] * count)

    worker = register(conn)
    add("alice", 300)
    add("bob", 300)
    add("jane", 1)
    used = Counter[str | None]()
    long: list[Held] = []
    for turn in range(100):
        held = pop(conn, worker, 2)
        long += [each for each in held if each.user_key == "jane"]
        held = [each for each in held if each.user_key != "jane"]
        finish(conn, worker, held, costs=[1.0] * len(held))
        used.update(users_of(held))
        maintain(conn)
        if long and turn % 10 == 9:
            finish(conn, worker, [long.pop()], costs=[50.0])
            used["jane"] += 50
            add("jane", 1)
    assert used["jane"] <= used["bob"] + 2 * 50


def test_a_rebuild_tells_whose_charges_they_were(conn: Conn) -> None:
    """I11: those of all users, charged to whom nobody names, would never end."""
    call(conn, "configure_queue", "default", fairness="cost")
    worker = register(conn)
    create_of(conn, "bob", *["jane", "tom", None] * 3)
    held = pop(conn, worker, 6)
    call(conn, "rebuild", "default")
    create_of(conn, "bob", None, "jane")
    assert_sound(conn)
    finish(conn, worker, held, costs=[2.0] * len(held))
    for _ in range(4):
        create(conn, "alice")
        drain(conn, worker)
        maintain(conn)
    assert one(conn, "select count(*) from fairq.lanes where user_key <> '' or queue like '#users %%'") == 0


def test_newcomers_of_both_kinds_are_next(conn: Conn) -> None:
    """I6: whatever is ready already. They then take turns, and the group pays for its new user."""
    worker = register(conn)
    create_of(conn, "bob", *["jane", "joe"] * 500)
    create_many(conn, "alice", 500)
    pop(conn, worker, 10)
    promote(conn, limit=500)
    create_of(conn, "bob", "new", "new")
    create(conn, "carol")
    held = pop(conn, worker, 11)
    assert lines_of(held)[:3] == [("carol", None), ("bob", "new"), ("alice", None)]
    assert groups_of(held)[1:] == ["bob", "alice"] * 5
    assert Counter(users_of(held)[1::2]) == {"new": 2, "joe": 2, "jane": 1}
    assert_sound(conn)


def test_who_sends_one_at_a_time_waits_for_his_turn(conn: Conn) -> None:
    """I5: to come back at once is no way to be first."""
    worker = register(conn)
    create_of(conn, "bob", *["jane", "joe", "jim"] * 100)
    counts = Counter[str | None]()
    create_of(conn, "bob", "eager")
    for _ in range(40):
        (held,) = pop(conn, worker, 1)
        counts[held.user_key] += 1
        finish(conn, worker, [held])
        if held.user_key == "eager":
            create_of(conn, "bob", "eager")
    assert counts["eager"] <= 11
    assert_sound(conn)


def test_newcomers_come_in_together(conn: Conn) -> None:
    """I8: those who stand at one address are served one after the other, also by one place."""
    worker = register(conn)
    call(conn, "configure_group", "default", "bob", max_running=1)
    create_of(conn, "bob", *["old"] * 3)
    finish(conn, worker, pop(conn, worker))
    create_of(conn, "bob", "jane", "joe", "jim")
    served = []
    for _ in range(5):
        (held,) = pop(conn, worker)
        served.append(held.user_key)
        finish(conn, worker, [held])
    assert served == ["jane", "joe", "jim", "old", "old"]


def test_a_busy_past_costs_a_user_nothing(conn: Conn) -> None:
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 50)
    pop_all(conn, worker)
    create_of(conn, "bob", *["joe"] * 5, *["jane"] * 5)
    assert Counter(users_of(pop(conn, worker, 6))) == {"jane": 3, "joe": 3}


def test_users_have_weights(conn: Conn) -> None:
    """Their own, or what the group gives to each, or the queue."""
    call(conn, "configure_queue", "default", user_weight=2)
    call(conn, "configure_group", "default", "bob", user_weight=3)
    call(conn, "configure_user", "default", "bob", "jane", weight=1)
    worker = register(conn)
    for group in ("bob", "alice"):
        create_of(conn, group, *["jane"] * 40, *["joe"] * 40)
    held = Counter(lines_of(pop(conn, worker, 48)))
    assert held == {("bob", "jane"): 6, ("bob", "joe"): 18, ("alice", "jane"): 12, ("alice", "joe"): 12}
    call(conn, "configure_user", "default", "bob", "jane", weight=None)
    held = Counter(lines_of(pop(conn, worker, 48)))
    assert held[("bob", "jane")] in (11, 12, 13)


@pytest.mark.parametrize("of", ["user", "group", "queue"])
def test_the_cap_of_a_user_is_exact(conn: Conn, of: str) -> None:
    """I7: what is ready, and what is held, count from the first; the group's own cap stands beside it."""
    worker = register(conn)
    call(conn, "configure_group", "default", "bob", max_running=5)
    create_of(conn, "bob", *["jane"] * 20, *["joe"] * 20)
    assert users_of(pop(conn, worker, 2)) == ["jane", "joe"]
    promote(conn)
    cap_jane(conn, of, 2)
    assert_sound(conn)
    held = pop(conn, worker)
    assert Counter(users_of(held)) == {"jane": 1, "joe": 2 if of == "user" else 1}
    waiting = one(conn, "select max(id) from fairq.tasks where user_key = 'jane'")
    assert explain(conn, waiting).startswith(
        'group "bob": 5' if of == "user" else 'user "jane" of group "bob": 2'
    )
    jane = [each for each in held if each.user_key == "jane"]
    finish(conn, worker, jane)
    assert users_of(pop(conn, worker)) == ["jane"]
    release(conn, worker, held[:0])
    assert_sound(conn)


def test_what_a_group_says_of_its_users_is_heard_by_those_who_wait(conn: Conn) -> None:
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 5)
    pop(conn, worker, 1)
    for cap, more in ((1, 0), (3, 2), (None, 2)):
        call(conn, "configure_group", "default", "bob", user_max_running=cap)
        assert len(pop(conn, worker)) == more
    assert_sound(conn)


@pytest.mark.parametrize("then", ["nothing", "one that names nobody"])
def test_a_group_whose_users_wait_for_room_is_not_forgotten(conn: Conn, then: str) -> None:
    """Without its lane it would begin as a group without users, and hand out what they have once more."""
    worker = register(conn)
    call(conn, "configure_queue", "default", user_max_running=1)
    create_of(conn, "bob", "jane", "jane", None, None)
    held = pop(conn, worker)
    create_many(conn, "carol", 3)
    drain(conn, worker)
    maintain(conn)
    assert_sound(conn)
    create_many(conn, "bob", int(then != "nothing"))
    assert pop(conn, worker) == []
    finish(conn, worker, held)
    assert users_of(pop(conn, worker)) == ["jane", None]
    assert_sound(conn)


def test_a_paused_user_stops_nobody_else(conn: Conn) -> None:
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 5, *["joe"] * 5)
    pop(conn, worker, 2)
    promote(conn)
    call(conn, "pause_group", "default", "bob", user_key="jane")
    assert users_of(pop(conn, worker)) == ["joe"] * 4
    waiting = one(conn, "select min(id) from fairq.live_tasks where state = 'overflow'")
    assert explain(conn, waiting).startswith('user "jane" of group "bob": paused since')
    call(conn, "resume_group", "default", "bob", user_key="jane")
    assert users_of(pop(conn, worker)) == ["jane"] * 4
    assert_sound(conn)


def test_a_user_has_a_rate(conn: Conn) -> None:
    worker = register(conn)
    call(conn, "configure_user", "default", "bob", "jane", rate_limit=1, rate_period="10 s", rate_burst=2)
    create_of(conn, "bob", *["jane"] * 5, *["joe"] * 5)
    promote(conn)
    assert Counter(users_of(pop(conn, worker))) == {"jane": 2, "joe": 5}
    waiting = one(conn, "select min(id) from fairq.live_tasks where state = 'overflow'")
    assert explain(conn, waiting).startswith('user "jane" of group "bob": rate limited until')
    at(conn, "12:00:09")
    assert pop(conn, worker) == []
    at(conn, "12:00:10")
    assert users_of(pop(conn, worker)) == ["jane"]
    assert_sound(conn)


def test_the_rate_of_a_group_lets_no_more_go_at_once_because_it_has_users(conn: Conn) -> None:
    """What waits is charged to no rate: else what was ready long ago goes together with what is due now."""
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 second", rate_burst=10)
    create_of(conn, "bob", *["jane", "tom"] * 20)
    worker = register(conn)
    assert len(pop(conn, worker, 2)) == 2
    at(conn, "12:00:20")
    assert len(pop(conn, worker)) == 10


def test_a_user_has_a_breaker(conn: Conn) -> None:
    worker = register(conn)
    call(conn, "configure_group", "default", "bob", user_breaker_threshold=2, user_breaker_cooldown="10 s")
    create_of(conn, "bob", *["jane"] * 8, *["joe"] * 4)
    for _ in range(2):
        held = pop(conn, worker, 2)
        finish(conn, worker, [each for each in held if each.user_key == "jane"], "failed")
        finish(conn, worker, [each for each in held if each.user_key == "joe"])
    assert set(users_of(pop(conn, worker))) == {"joe"}
    waiting = one(conn, "select min(id) from fairq.live_tasks where state = 'overflow'")
    assert explain(conn, waiting).startswith('user "jane" of group "bob": its breaker is open')
    at(conn, "12:00:10")
    (probe,) = pop(conn, worker)
    finish(conn, worker, [probe])
    assert users_of(pop(conn, worker)) == ["jane"] * 5
    assert_sound(conn)


def test_priorities_and_returns_are_before_younger_ones_of_their_user_only(conn: Conn) -> None:
    """I12: nobody gets ahead of another user by priorities, or by giving back."""
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 6, *["joe"] * 6)
    first = pop(conn, worker, 2)
    promote(conn)
    urgent = create(conn, "bob", user_key="jane", priority=5)
    release(conn, worker, first)
    held = pop(conn, worker, 6)
    assert users_of(held) == ["jane", "joe"] * 3
    assert [held[0], held[2], held[1]] == [urgent, first[0], first[1]]


def test_users_take_turns_at_a_concurrency_key(conn: Conn) -> None:
    """What was given a place and comes too late for this pass keeps it for the next."""
    worker = register(conn)
    call(conn, "configure_key", "k", max_running=3)
    for user in ("jane", "joe"):
        for _ in range(4):
            create(conn, "bob", user_key=user, concurrency_key="k")
            create(conn, "bob", user_key=user)
    served = []
    for _ in range(16):
        held = pop(conn, worker, 1)
        served += held
        assert_sound(conn)
        finish(conn, worker, held)
    assert len(served) == 16
    for a, b in pairwise(range(0, 16, 4)):
        assert Counter(users_of(served[a:b])) == {"jane": 2, "joe": 2}


def test_a_key_and_a_cap_may_come_free_at_once_for_who_names_nobody(conn: Conn) -> None:
    """What is given to the empty user is told to the group, what he gives back to him: news of one lane."""
    call(conn, "configure_queue", "default", user_max_running=5)
    worker = register(conn)
    create_of(conn, "bob", None, None, "jane", concurrency_keys=["api", "api", None])
    held = pop(conn, worker)
    assert users_of(held) == [None, "jane"]
    finish(conn, worker, held)
    assert users_of(pop(conn, worker)) == [None]
    assert_sound(conn)


def test_a_rebuild_keeps_it(conn: Conn) -> None:
    """I11: bodies and holders tell whose tasks they are, and which places are taken."""
    worker = register(conn)
    call(conn, "configure_user", "default", "bob", "jane", max_running=3)
    create_of(conn, "bob", *["jane"] * 10, *["joe"] * 10)
    pop(conn, worker, 2)
    promote(conn)
    call(conn, "rebuild", "default")
    assert_sound(conn)
    assert Counter(users_of(pop(conn, worker, 6))) == {"jane": 2, "joe": 4}
    assert_sound(conn)


def test_what_is_derived_may_be_lost(conn: Conn) -> None:
    """I11: as in a dump that is restored elsewhere."""
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 10, *["joe"] * 10)
    pop(conn, worker, 3)
    run(conn, "truncate fairq.lanes, fairq.ticks, fairq.rings")
    assert Counter(users_of(pop(conn, worker, 8))) == {"jane": 4, "joe": 4}
    assert_sound(conn)


def test_a_purge_of_one_user_leaves_the_others(conn: Conn) -> None:
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 10, *["joe"] * 5)
    promote(conn)
    assert one(conn, "select fairq.purge_group('default', 'bob', 'jane')") == 10
    assert users_of(pop_all(conn, worker)) == ["joe"] * 5
    assert_sound(conn)


def test_idle_users_leave_nothing(conn: Conn) -> None:
    worker = register(conn)
    create_of(conn, "bob", *[f"user {n}" for n in range(50)])
    create(conn, "alice")
    pop_all(conn, worker)
    for _ in range(4):
        create(conn, "alice")
        drain(conn, worker)
        maintain(conn)
    assert one(conn, "select count(*) from fairq.lanes where user_key <> ''") == 0
    assert one(conn, "select (fairq._tick(0, 'default')).users") is False
    create_of(conn, "bob", "user 1", "user 2", "user 2")
    assert users_of(pop(conn, worker)) == ["user 1", "user 2", "user 2"]


def test_the_time_of_users_never_ends(conn: Conn) -> None:
    """Costs of a million, and years of them."""
    worker = register(conn)
    call(conn, "configure_queue", "default", ready_target=4)
    create_of(conn, "bob", *["jane", "joe"] * 20)
    pop(conn, worker, 5)
    promote(conn)
    run(
        conn,
        "update fairq.lanes set finish = finish + (1::bigint << 60) where queue = '#users default'",
    )
    run(
        conn,
        "update fairq.lanes set inside = ((inside).clock + (1::bigint << 60), (inside).position,"
        " (inside).top + (1::bigint << 60))::fairq.inside where queue = 'default'",
    )
    run(conn, "update fairq.ready set user_block = user_block + (1::bigint << 60)")
    maintain(conn)
    assert one(conn, "select max(finish) from fairq.lanes where queue = '#users default'") < 1 << 41
    create_of(conn, "bob", "new")
    assert users_of(pop(conn, worker, 1)) == ["new"]
    assert Counter(users_of(pop(conn, worker, 20))) == {"jane": 10, "joe": 10}
    assert_sound(conn)


def test_hearing_costs_what_rang(conn: Conn) -> None:
    """I9: one of a thousand waiting users adds a task, and nobody looks at the others."""
    worker = register(conn)
    everybody = [f"user {n}" for n in range(1000)]
    create_of(conn, "bob", *everybody, *everybody)
    pop(conn, worker, 10)
    create_of(conn, "bob", "user 900")
    query = (
        "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_xact_user_tables where relname = 'lanes'"
    )
    with conn.transaction():
        before = one(conn, query)
        run(conn, "select fairq._promote(0, 'default', 1, true)")
        assert one(conn, query) - before <= 10


def test_a_group_without_users_runs_none_of_their_code(conn: Conn) -> None:
    """Also beside a group that has some, in another queue."""
    run(conn, "set track_functions = 'pl'")
    worker = register(conn)
    call(conn, "configure_queue", "other")
    create_of(conn, "bob", "jane", queue="other")
    promote(conn, "other")
    promote(conn)
    with conn.transaction():
        count = (
            "select coalesce(sum(calls), 0) from pg_stat_xact_user_functions"
            " where funcname ~ 'user|_news_of_groups|_share_inside'"
        )
        before = one(conn, count)
        create_many(conn, "alice", 300)
        held = pop(conn, worker, 50)
        create_many(conn, "carol", 3)
        finish(conn, worker, held)
        pop(conn, worker, 50)
        assert one(conn, count) == before


@pytest.mark.parametrize("user", ["", "x" * 501])
def test_odd_users_are_refused(conn: Conn, user: str) -> None:
    with refused(conn, "QF006"):
        create(conn, "bob", user_key=user)
    with refused(conn, "QF006"):
        create_of(conn, "bob", "jane", user)
    with refused(conn, "QF006"):
        call(conn, "configure_user", "default", "bob", user, weight=2)
    with refused(conn, "QF006"):
        call(conn, "pause_group", "default", "bob", user_key=user)


def test_a_user_belongs_to_a_group_and_has_no_users(conn: Conn) -> None:
    with refused(conn, "QF001"):
        run(conn, "select fairq.create_task(null, '{}', p_user_key => 'jane')")
    with refused(conn, "QF006"):
        call(conn, "configure_user", "default", "bob", None, weight=2)
    with refused(conn, "QF014"):
        call(conn, "configure_user", "default", "bob", "jane", user_weight=2)
    # A budget is the tenant's.
    with refused(conn, "QF014"):
        call(conn, "configure_user", "default", "bob", "jane", budget=100)
    with refused(conn, "QF011"):
        run(conn, "select fairq.create_tasks('{bob}', '{1}', p_user_keys => '{jane,joe}')")


def test_tasks_of_nobody_go_on_behind_a_crowd_that_waits_for_a_key(conn: Conn) -> None:
    """I13: who parked as many as fit into a pass goes on in the next one, also where nobody is named."""
    worker = register(conn)
    create(conn, "bob", user_key="jane")
    create(conn, "bob", concurrency_key="k")
    assert len(pop(conn, worker)) == 2
    create_many(conn, "bob", 2500, concurrency_keys=["k"] * 2500)
    last = create(conn, "bob")
    for _ in range(10):
        promote(conn)
        assert_sound(conn)
    assert pop(conn, worker) == [last]


def test_many_priorities_are_there_when_the_first_user_comes(conn: Conn) -> None:
    """I1: beyond eight levels one cursor stands for all below; it does so for whoever names nobody, too."""
    call(conn, "configure_queue", "default", ready_target=1)
    worker = register(conn)
    tasks = [create(conn, "bob", priority=priority) for priority in range(12, 0, -1)]
    for each in tasks[:9]:
        assert pop(conn, worker, 1) == [each]
    tasks.append(create(conn, "bob", user_key="jane"))
    promote(conn)
    assert_sound(conn)
    assert sorted(pop_all(conn, worker)) == tasks[9:]


def test_a_single_user_is_like_none(conn: Conn) -> None:
    """I14: a group has an order inside when a second user comes. Who was alone goes on as one who waits."""
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 50)
    create_many(conn, "alice", 50)
    assert lines_of(pop(conn, worker, 4)) == [("bob", "jane"), ("alice", None)] * 2
    promote(conn)
    assert one(conn, "select count(*) from fairq.lanes where queue = '#users default'") == 0
    create_of(conn, "bob", *["joe"] * 3)
    assert users_of(pop(conn, worker, 16))[::2] == ["joe", "jane"] * 3 + ["jane"] * 2
    assert_sound(conn)


@pytest.mark.parametrize("first", ["jane", None])
@pytest.mark.parametrize("then", ["joe", None, "jane"])
def test_one_after_the_other_they_need_no_order(conn: Conn, first: str | None, then: str | None) -> None:
    worker = register(conn)
    for user in (first, then):
        create_of(conn, "bob", *[user] * 3)
        create_many(conn, "alice", 2)
        promote(conn)
        assert users_of(pop(conn, worker))[::2][:2] == [user] * 2
        assert pop(conn, worker) == []
    assert one(conn, "select count(*) from fairq.lanes where queue = '#users default'") == 0
    assert_sound(conn)


def test_who_was_given_a_key_alone_keeps_it_when_another_comes(conn: Conn) -> None:
    """What was given a place stands behind no cursor: its ring is the only word of it."""
    worker = register(conn)
    call(conn, "configure_key", "k", max_running=1)
    create(conn, "bob", user_key="jane", concurrency_key="k")
    held = pop(conn, worker)
    create(conn, "bob", user_key="jane", concurrency_key="k")
    create_many(conn, "alice", 100)
    promote(conn)
    finish(conn, worker, held)
    promote(conn, limit=1)
    create(conn, "bob", user_key="joe")
    served = pop_all(conn, worker)
    assert Counter(users_of(served)) == {None: 100, "jane": 1, "joe": 1}
    assert_sound(conn)


@pytest.mark.parametrize("of", ["user", "group", "queue"])
def test_a_limit_counts_what_its_only_user_has(conn: Conn, of: str) -> None:
    """I7: of one who had no lane of his own so far."""
    worker = register(conn)
    create_of(conn, "bob", *["jane"] * 20)
    held = pop(conn, worker, 2)
    promote(conn)
    cap_jane(conn, of, 3)
    assert_sound(conn)
    assert len(pop(conn, worker)) == 1
    finish(conn, worker, held)
    assert len(pop(conn, worker)) == 2
    assert_sound(conn)


@pytest.mark.parametrize("then", ["rebuild", "a new limit"])
def test_a_user_who_holds_all_he_has_is_counted(conn: Conn, then: str) -> None:
    """I7, I11: what tells of his places comes while his group has no lane, and nothing of him is in line."""
    worker = register(conn)
    if then == "rebuild":
        call(conn, "configure_user", "default", "bob", "jane", max_running=2)
    create_of(conn, "bob", "jane", "jane")
    held = pop(conn, worker)
    create_many(conn, "alice", 3)
    drain(conn, worker)
    maintain(conn)
    if then == "rebuild":
        call(conn, "rebuild", "default")
        promote(conn)
    else:
        call(conn, "configure_user", "default", "bob", "jane", max_running=2)
    create_of(conn, "bob", "jane", "jane")
    assert pop(conn, worker) == []
    assert_sound(conn)
    finish(conn, worker, held)
    assert len(pop(conn, worker)) == 2
    assert_sound(conn)
