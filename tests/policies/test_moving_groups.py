"""More shards, or fewer, while there are tasks: what a group had before, it has after."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.properties.model import shard_of
from tests.support.calls import (
    Conn,
    at,
    call,
    column,
    create,
    create_all,
    create_each,
    create_many,
    create_of,
    explain,
    finish,
    held_by,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
    states,
)
from tests.support.database import Database
from tests.support.moves import assert_moved, begin, go_on, move, set_shards, step

GROUPS = [f"g{n}" for n in range(20)]


def shards_of(conn: Conn, table: str) -> Counter[int]:
    return Counter(column(conn, f"select shard_no from fairq.{table}"))  # noqa: S608


@pytest.fixture(autouse=True)
def _from_one_shard(conn: Conn) -> None:
    set_shards(conn, 1)


def served(conn: Conn, worker: int, at_once: int = 7) -> Iterator[tuple[str, int]]:
    """All there is, in the order in which it is served."""
    while held := pop(conn, worker, at_once):
        finish(conn, worker, held)
        yield from ((task.group_key, int(task)) for task in held)


def test_an_idle_group_moves_with_nothing_but_its_settings(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", max_running=3)
    call(conn, "pause_group", "default", "alice")
    register(conn)
    begin(conn, 16)
    go_on(conn)
    assert_moved(conn)
    found = run(conn, "select group_key, max_running, paused_at is null from fairq.groups order by 1")
    assert found == [("alice", None, False), ("bob", 3, True)]


@pytest.mark.parametrize("shards", [2, 16])
def test_tasks_that_wait_are_served_once_each_and_in_order_there_and_back(conn: Conn, shards: int) -> None:
    worker = register(conn, slots=50)
    created = create_all(conn, *GROUPS * 10)
    seen = []
    for _ in range(3):
        held = pop(conn, worker, 10)
        finish(conn, worker, held)
        seen += [(task.group_key, int(task)) for task in held]
    move(conn, shards)
    assert shards_of(conn, "tasks").keys() == {shard_of(group, shards) for group in GROUPS}
    for _ in range(3):
        held = pop(conn, worker, 10)
        finish(conn, worker, held)
        seen += [(task.group_key, int(task)) for task in held]
    move(conn, 1)
    assert shards_of(conn, "tasks") == {0: len(created) - len(seen)}
    seen += served(conn, worker)
    assert sorted(task for _, task in seen) == created
    for group in GROUPS:
        mine = [task for key, task in seen if key == group]
        assert mine == sorted(mine)


def test_a_group_with_something_in_flight_stops_and_moves_when_that_has_ended(conn: Conn) -> None:
    worker = register(conn)
    tasks = create_many(conn, "bob", 5)
    others = create_many(conn, "alice", 5)
    [held] = pop(conn, worker, 1)
    begin(conn, 16)
    for _ in range(5):
        said = step(conn)
    assert (said["left"], said["leaving"], said["state"]) == (1, 1, "waiting")
    # What is in flight is its worker's, as before; nothing more of the group starts, and the others go on.
    mine = "select fairq.held_tasks(%s, %s::bigint[], %s::int[])"
    assert column(conn, mine, *held_by(worker, [held])) == [held]
    assert pop(conn, worker, 3) == others[:3]
    assert "moves to another shard" in explain(conn, tasks[1])
    finish(conn, worker, [held])
    finish(conn, worker, others[:3])
    go_on(conn)
    assert_moved(conn)
    assert sorted(task for _, task in served(conn, worker)) == sorted([*tasks[1:], *others[3:]])


@pytest.mark.parametrize("outcome", ["retry", "released", "lost"])
def test_one_that_comes_back_goes_before_the_younger_ones_of_its_group(conn: Conn, outcome: str) -> None:
    worker = register(conn, lease="1 second")
    tasks = create_many(conn, "bob", 3)
    held = pop(conn, worker, 1)
    begin(conn, 16)
    step(conn)
    if outcome == "retry":
        finish(conn, worker, held, "retry", delay="1 microsecond")
    elif outcome == "released":
        release(conn, worker, held)
    else:
        run(conn, "update fairq.heartbeats set beat_at = beat_at - interval '1 hour'")
        run(conn, "update fairq.workers set registered_at = registered_at - interval '1 hour'")
        run(conn, "select fairq._recover_worker(0, %s, 10, fairq._now())", worker)
        worker = register(conn)
    at(conn, "12:00:01")
    go_on(conn)
    assert_moved(conn)
    assert [task for _, task in served(conn, worker)] == tasks


def test_limits_go_with_what_was_used_of_them(conn: Conn) -> None:
    """Cap, rate, budget, breaker, hold and debt: as they stood."""
    call(conn, "configure_queue", "default", fairness="cost", user_weight=1)
    rate = {"rate_limit": 10, "rate_period": "1 hour", "rate_burst": 4}
    budget = {"budget": 100, "budget_period": "1 day"}
    call(conn, "configure_group", "default", "bob", **rate, **budget, breaker_threshold=3, max_running=2)
    worker = register(conn)
    create_many(conn, "bob", 20)
    for outcome in ("succeeded", "retry", "retry"):
        finish(conn, worker, pop(conn, worker, 1), outcome, costs=[3], delay="1 hour")
    call(conn, "hold_group", "default", "bob", one(conn, "select fairq._now() + interval '1 hour'"))
    call(conn, "promote_overflow")
    gate = "select (l).gate, (l).pace from (select fairq._lane(%s, 'default', 'bob') as l) x"
    there = one(conn, "select fairq._shard_of('bob', 16)")
    before = run(conn, gate, 0)
    assert before[0][0] is not None
    usage = [call(conn, function, "default", "bob") for function in ("budget_usage", "rate_usage")]
    move(conn, 16)
    after = run(conn, gate, there)
    assert after[0][0] == before[0][0]
    assert [call(conn, function, "default", "bob") for function in ("budget_usage", "rate_usage")] == usage
    assert pop(conn, worker, 5) == []
    move(conn, 1)
    assert run(conn, gate, 0)[0][0] == before[0][0]


def test_caps_are_exact_after_a_move(conn: Conn) -> None:
    call(conn, "configure_queue", "default", group_max_running=2)
    worker = register(conn, slots=100)
    create_all(conn, *GROUPS * 5)
    move(conn, 16)
    held = pop(conn, worker, 100)
    assert Counter(task.group_key for task in held) == dict.fromkeys(GROUPS, 2)
    finish(conn, worker, held[:3])
    begin(conn, 1)
    for _ in range(60):
        step(conn)
    assert len(pop(conn, worker, 100)) <= 6
    finish(conn, worker, column(conn, "select id from fairq.held order by id"))
    go_on(conn)
    assert_moved(conn)
    held = pop(conn, worker, 100)
    assert Counter(task.group_key for task in held).most_common(1)[0][1] == 2


def test_users_keep_their_places_among_themselves(conn: Conn) -> None:
    worker = register(conn)
    call(conn, "configure_user", "default", "bob", "u1", weight=2)
    create_of(conn, "bob", *["u1"] * 12, *["u2"] * 6, *["u3"] * 6)
    first = pop(conn, worker, 4)
    finish(conn, worker, first)
    move(conn, 16)
    order = [task.user_key for task in first]
    while held := pop(conn, worker, 4):
        order += [task.user_key for task in held]
        finish(conn, worker, held)
    for end in range(4, 21, 4):
        seen = Counter(order[:end])
        assert abs(seen["u1"] / 2 - seen["u2"]) <= 1.5
        assert abs(seen["u2"] - seen["u3"]) <= 1


def test_a_key_of_one_group_stays_exact_and_frees_its_waiters(conn: Conn) -> None:
    worker = register(conn, slots=50)
    for group in GROUPS[:6]:
        create_many(conn, group, 4, concurrency_keys=[f"key of {group}"] * 4)
    promote(conn)
    move(conn, 16)
    for _ in range(4):
        held = pop(conn, worker, 50)
        assert Counter(task.group_key for task in held) == dict.fromkeys(GROUPS[:6], 1)
        finish(conn, worker, held)
    assert pop(conn, worker, 50) == []
    assert one(conn, "select count(*) from fairq.tasks") == 0


def test_a_group_among_those_of_another_shard_has_its_share_at_once(conn: Conn) -> None:
    """Debt goes along, credit there is none: nobody gains by a move, or loses."""
    worker = register(conn)
    create_all(conn, *GROUPS * 60)
    count: Counter[str] = Counter()
    for turn in range(60):
        if turn == 20:
            move(conn, 4)
        if turn == 40:
            move(conn, 2)
        held = pop(conn, worker, 10)
        count.update(task.group_key for task in held)
        finish(conn, worker, held)
    # Of each shard two pops at most, after each of the moves.
    assert max(count.values()) - min(count.values()) <= 2 + 2 * 2, count


def test_scheduled_tasks_and_schedules_go_along(conn: Conn) -> None:
    worker = register(conn)
    later = [
        create(conn, group, run_at=one(conn, "select fairq._now() + interval '1 hour'")) for group in GROUPS
    ]
    call(conn, "configure_schedule", "nightly", "bob", every="1 day", kind="default")
    move(conn, 16)
    assert len(shards_of(conn, "tasks")) > 5
    for task in later:
        assert call(conn, "retry_task", task) == [(True,)]
    assert len(call(conn, "run_schedule", "nightly")) == 1
    assert len(list(served(conn, worker))) == len(GROUPS) + 1
    assert run(conn, "select id from fairq.tasks") == []


def test_a_key_of_before_gives_the_same_id_meanwhile_and_afterwards(conn: Conn) -> None:
    first = {group: create(conn, group, idempotency_key="k") for group in GROUPS}
    later: dict[str, int] = {}
    unique = {group: create(conn, group, idempotency_key="u", unique="waiting") for group in GROUPS}
    begin(conn, 16)

    def ask() -> None:
        for group in GROUPS:
            assert create(conn, group, idempotency_key="k") == first[group]
            second = create(conn, group, idempotency_key="l")
            assert second == later.setdefault(group, second)

    ask()
    go_on(conn, meanwhile=ask)
    ask()
    assert_moved(conn)
    worker = register(conn)
    newest = {group: create(conn, group, idempotency_key="u", unique="waiting") for group in GROUPS}
    assert {task for _, task in served(conn, worker)} == {*first.values(), *later.values(), *newest.values()}
    assert not {*unique.values()} & {*newest.values()}
    move(conn, 1)
    assert {group: create(conn, group, idempotency_key="k") for group in GROUPS} == first


def test_results_history_and_totals_stay_readable(conn: Conn) -> None:
    worker = register(conn)
    tasks = create_all(conn, *GROUPS)
    finish(conn, worker, pop(conn, worker, 50))
    for shards in (16, 3, 1):
        move(conn, shards)
        assert {one(conn, "select outcome from fairq.task_result(%s)", task) for task in tasks} == {
            "succeeded"
        }
        assert shards_of(conn, "finished_tasks").keys() <= set(range(16 if shards == 16 else shards))
    failed = create(conn, "bob")
    finish(conn, worker, pop(conn, worker, 1), "failed")
    move(conn, 16)
    assert call(conn, "retry_task", failed) == [(True,)]
    assert_moved(conn)
    assert pop(conn, worker, 1) == [failed]


def test_a_wish_to_cancel_follows_its_task(conn: Conn) -> None:
    register(conn)
    tasks = create_many(conn, "bob", 4)
    call(conn, "cancel_task", tasks[1])
    begin(conn, 16)
    call(conn, "cancel_task", tasks[2])
    go_on(conn)
    call(conn, "promote_overflow")
    assert_moved(conn)
    assert states(conn) == {
        tasks[0]: "queued",
        tasks[1]: "cancelled",
        tasks[2]: "cancelled",
        tasks[3]: "queued",
    }


def strays(database: Database, *batches: tuple[str, int, int]) -> dict[str, list[int]]:
    """Of each group and priority so many tasks that a move to five left in shard 0, unheard of."""
    conn, old, other = database.connect(autocommit=True), database.connect(), database.connect()
    old.execute("set transaction isolation level repeatable read")
    run(old, "select 1")
    begin(conn, 5)
    while step(conn)["state"] != "waiting":
        pass
    tasks: dict[str, list[int]] = {}
    for group, priority, count in batches:
        assert shard_of(group, 5) > 0
        tasks.setdefault(group, []).extend(create_many(old, group, count, priority=priority))
    # Who begins now is not waited for.
    run(other, "select from fairq.domains where shard_no = 0 and queue = 'default' for update")
    old.commit()
    go_on(conn)
    other.commit()
    return tasks


PASSES = [("alice", 0, 3000), ("bob", 5, 3000), ("bob", 0, 5000)]


def test_many_strays_go_home_a_portion_with_each_pass(database: Database, conn: Conn) -> None:
    """In the order of their lines, so that none is served before one that is before it."""
    tasks = strays(database, *PASSES)
    for left in (6000, 1000, 0):
        call(conn, "promote_overflow", "default", 1, 0)
        assert shards_of(conn, "tasks")[0] == left
    worker = register(conn, slots=1000)
    found = list(served(conn, worker, 1000))
    for group, ids in tasks.items():
        assert [task for of, task in found if of == group] == ids
    assert_moved(conn)


def test_what_each_kind_used_goes_home_once(conn: Conn) -> None:
    """A stray that was held where its group no longer is rings there when it ends."""
    call(conn, "configure_queue", "default", fairness="time")
    set_shards(conn, 5)
    for kind in ("a", "b", "c"):
        ring = "insert into fairq.rings (shard_no, queue, group_key, used, charged, ran)"
        run(conn, f"{ring} values (0, 'default', 'bob', 3, 1, (%s, 2, 3, 2)::fairq.estimate)", kind)
    call(conn, "promote_overflow", "default", 1, 0)
    there = "from fairq.rings where shard_no = %s and used is not null"
    assert sorted(column(conn, f"select (ran).kind {there}", shard_of("bob", 5))) == ["a", "b", "c"]
    assert run(conn, f"select sum(used), sum(charged) {there}", shard_of("bob", 5)) == [(9, 3)]


def test_strays_whose_group_comes_to_where_they_are_stay_there(database: Database, conn: Conn) -> None:
    tasks = strays(database, *PASSES)
    for shard in (0, shard_of("bob", 5)):
        call(conn, "promote_overflow", "default", 1, shard)
    begin(conn, 1)
    go_on(conn)
    assert_moved(conn)
    found = list(served(conn, register(conn, slots=1000), 1000))
    for group, ids in tasks.items():
        assert [task for of, task in found if of == group] == ids


def test_counts_that_cannot_be_are_refused(conn: Conn) -> None:
    create_many(conn, "bob", 1)
    for count in (0, -1, 4097):
        with refused(conn, "QF007"):
            begin(conn, count)
    begin(conn, 16)
    with refused(conn, "QF013"):
        begin(conn, 8)
    with refused(conn, "QF013"):
        begin(conn, 1)
    begin(conn, 16)
    go_on(conn)
    assert_moved(conn)
    assert step(conn)["state"] == "done"


def test_moving_to_the_number_there_is_moves_nothing(conn: Conn) -> None:
    create_many(conn, "bob", 1)
    begin(conn, 1)
    assert one(conn, "select moving_from from fairq.settings") is None
    said = step(conn)
    assert (said.pop("state"), said.pop("from"), said.pop("to"), set(said.values())) == ("done", 1, 1, {0})


def test_the_number_of_groups_left_only_falls(conn: Conn) -> None:
    create_all(conn, *GROUPS)
    promote(conn)
    begin(conn, 16)
    left = []
    go_on(conn, meanwhile=lambda: left.append(one(conn, "select count(*) from fairq.moving")))
    assert left[0] > 5
    assert all(a >= b for a, b in pairwise(left))


def test_tasks_that_all_wait_for_a_key_go_along(conn: Conn) -> None:
    """Upkeep forgets the lane of such a group, which has nothing in line."""
    worker = register(conn, slots=50)
    create(conn, "alice", concurrency_key="k")
    held = pop(conn, worker, 1)
    tasks = create_many(conn, "bob", 3, concurrency_keys=["k"] * 3)
    assert pop(conn, worker, 5) == []
    maintain(conn)
    assert column(conn, "select id from fairq.parked order by id") == tasks
    assert run(conn, "select group_key from fairq.lanes where queue = 'default' and group_key = 'bob'") == []
    begin(conn, 16)
    finish(conn, worker, held)
    go_on(conn)
    assert_moved(conn)
    assert [task for _, task in served(conn, worker)] == tasks


def test_what_a_user_has_used_goes_along_though_the_group_has_nothing_left(conn: Conn) -> None:
    call(conn, "configure_queue", "default", user_rate_limit=1, user_rate_period="1 hour")
    worker = register(conn)
    create_of(conn, "bob", "u1")
    finish(conn, worker, pop(conn, worker, 1))
    promote(conn)
    maintain(conn)
    assert run(conn, "select queue from fairq.lanes where group_key = 'bob'") == [("#users default",)]
    move(conn, 16)
    create_of(conn, "bob", "u1", "u2")
    assert [task.user_key for task in pop(conn, worker, 5)] == ["u2"]


def test_a_key_that_is_held_is_so_in_the_new_shards(conn: Conn) -> None:
    worker = register(conn)
    call(conn, "hold_key", "k", one(conn, "select fairq._now() + interval '1 hour'"))
    tasks = create_each(conn, *GROUPS, concurrency_key="k")
    move(conn, 16)
    assert pop(conn, worker, 50) == []
    call(conn, "hold_key", "k", None)
    assert sorted(task for _, task in served(conn, worker)) == tasks


def test_a_purge_finds_what_is_scheduled_where_the_group_was(conn: Conn) -> None:
    register(conn)
    later = one(conn, "select fairq._now() + interval '1 hour'")
    tasks = [*create_many(conn, "bob", 2), create(conn, "bob", run_at=later)]
    begin(conn, 16)
    assert step(conn)["left"] == 0
    assert call(conn, "purge_group", "default", "bob") == [(3,)]
    assert states(conn) == dict.fromkeys(tasks, "cancelled")
    go_on(conn)
    assert_moved(conn)


def test_one_whose_deadline_passes_on_the_way_is_ended_by_upkeep(conn: Conn, database: Database) -> None:
    other = database.connect()
    call(conn, "pause_group", "default", "bob")
    task = create(conn, "bob", expires_at="2030-01-01 12:00:05+00")
    begin(conn, 16)
    at(conn, "12:00:10")
    # Somebody promotes where it is: there upkeep does not get to it. Where it goes, it has been.
    run(other, "select from fairq.domains where queue = 'default' and shard_no = 0 for update")
    assert "expired" not in maintain(conn)
    other.rollback()
    go_on(conn)
    assert_moved(conn)
    maintain(conn)
    assert states(conn) == {task: "expired"}


def test_keys_that_come_all_the_while_do_not_keep_a_move_from_ending(conn: Conn) -> None:
    keys = (f"k{n}" for n in range(1000))
    create(conn, "bob")
    for shards in (16, 1):
        begin(conn, shards)
        go_on(conn, meanwhile=lambda: create(conn, "bob", idempotency_key=next(keys)), patience=10)
        assert_moved(conn)


def test_how_the_last_task_of_a_schedule_ended_is_known_afterwards(conn: Conn) -> None:
    worker = register(conn)
    call(conn, "configure_schedule", "nightly", "bob", every="1 day")
    call(conn, "run_schedule", "nightly")
    finish(conn, worker, pop(conn, worker, 1))
    move(conn, 16)
    assert column(conn, "select last_state from fairq.schedule_stats") == ["succeeded"]


def test_what_an_earlier_move_left_does_not_say_where_a_group_is(conn: Conn) -> None:
    """A lane in another shard than its group's: taken for its place, the settings there were lost."""
    move(conn, 4)
    group = next(one for one in GROUPS if 0 < shard_of(one, 4) != shard_of(one, 3) > 0)
    call(conn, "configure_group", "default", group, max_running=3)
    create(conn, group)
    promote(conn)
    run(
        conn,
        "insert into fairq.lanes select (jsonb_populate_record(l, '{\"shard_no\": 0}')).* from fairq.lanes l"
        " where l.queue = 'default' and l.group_key = %s",
        group,
    )
    begin(conn, 3)
    assert column(conn, "select shard_no from fairq.moving where group_key = %s", group) == [
        shard_of(group, 4)
    ]
    run(conn, "delete from fairq.lanes where shard_no = 0 and group_key = %s", group)
    go_on(conn)
    assert column(conn, "select max_running from fairq.groups where group_key = %s", group) == [3]
