"""Groups move while everybody goes on: a stop between any two statements of who moves, enqueues or pops."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial

import psycopg
import pytest

from tests.properties.model import shard_of
from tests.races.test_stops import Call, Scene, popping
from tests.support.calls import (
    Conn,
    call,
    column,
    create,
    create_all,
    create_many,
    finish,
    one,
    pop,
    promote,
    register,
    run,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound, violations
from tests.support.moves import assert_moved, begin, go_on, set_shards, step
from tests.support.sessions import (
    call_in_background,
    in_background,
    is_blocked,
    kill,
    pid_of,
    result,
    wait_until,
    wait_until_blocked,
)
from tests.support.stops import GATE, install_stops, recorded

pytestmark = pytest.mark.usefixtures("one_shard")

EVERY = int(os.environ.get("FAIRQ_TEST_STOPS", "16"))

# A key holds in each shard; of a group, or a queue, there is one.
MOST = """
select 'group ' || t.group_key as what, count(*) as running, 2 as most from fairq.live_tasks t
where t.worker_id is not null and t.group_key = 'capped' group by 1
union all
select 'key ' || t.concurrency_key, count(*), 1 from fairq.live_tasks t
where t.worker_id is not null and t.concurrency_key like 'own%' group by 1
union all
select 'queue ' || t.queue, count(*), 6 from fairq.live_tasks t
where t.worker_id is not null and t.queue = 'metered' group by 1
"""


FINISH_ONE = "select fairq.finish_tasks(%s, array[%s]::bigint[], array[%s]::int[])"


class Moving(Scene):
    """The same scene, in the middle of a move: from one shard to four, or back."""

    def prepare(self) -> None:
        super().prepare()
        self.shards = 1 if one(self.conn, "select shard_count from fairq.settings") == 4 else 4
        self.begin()

    def begin(self) -> None:
        begin(self.conn, self.shards)
        step(self.conn)

    def check_limits(self) -> None:
        over = [row for row in self.conn.execute(MOST.encode()).fetchall() if row[1] > row[2]]
        assert not over, over
        wrong = violations(self.conn)
        assert not wrong, wrong

    def finish_all(self) -> None:
        begin(self.conn, self.shards)

        def ended() -> bool:
            for worker in self.workers:
                for row in run(self.conn, "select id, attempt from fairq.held where worker_id = %s", worker):
                    self.conn.execute(FINISH_ONE, [worker, *row])
            return str(step(self.conn)["state"]) == "done"

        wait_until(ended, "it moved")
        super().finish_all()
        assert_moved(self.conn)


class Beginning(Moving):
    def begin(self) -> None:
        pass


def moving(scene: Scene) -> Call:
    return step


def beginning(scene: Scene) -> Call:
    assert isinstance(scene, Moving)
    return lambda conn: begin(conn, scene.shards)


SUBJECTS: dict[str, tuple[type[Moving], Callable[[Scene], Call]]] = {
    "move": (Moving, moving),
    "begin": (Beginning, beginning),
    "pop": (Moving, popping),
}


@pytest.mark.prepared.with_args(install_stops)
@pytest.mark.parametrize("rolls_back", [False, True], ids=["commits", "rolls back"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_between_any_two_statements_of_a_move_everybody_may_do_anything(
    database: Database, name: str, rolls_back: bool
) -> None:
    kind, subject = SUBJECTS[name]
    scene = kind(database)
    scene.prepare()
    with recorded(scene.subject) as points:
        subject(scene)(scene.subject)
        scene.subject.rollback()
    assert len(points) >= 8
    # The end of a move waits for whatever is open.
    scene.subject.commit()
    scene.finish_all()
    for point in points[int(rolls_back) * (EVERY // 2) :: EVERY]:
        scene.prepare()
        try:
            scene.run(subject(scene), point, rolls_back)
            scene.finish_all()
        except BaseException as exc:
            exc.add_note(f"stopped at {point}")
            raise


# To so many the group "bob" moves; to four it would not.
MORE = 5

# What producers do, and how often their key may be there in the end.
PRODUCERS: dict[str, Callable[[Conn], object]] = {
    "create": lambda conn: create(conn, "bob"),
    "create with a key": lambda conn: create(conn, "bob", idempotency_key="k"),
    "create unique": lambda conn: create(conn, "bob", idempotency_key="u", unique="waiting"),
    "create many": lambda conn: create_all(conn, "bob", "new", "bob"),
    "create scheduled": lambda conn: create(conn, "bob", run_at="2001-01-01"),
    "cancel": lambda conn: call(conn, "cancel_task", 1),
    "pause": lambda conn: call(conn, "pause_group", "default", "bob"),
    "resume": lambda conn: call(conn, "resume_group", "default", "bob"),
    "hold": lambda conn: run(conn, "select fairq.hold_group('default', 'bob', now() + interval '1 hour')"),
    "end a hold": lambda conn: call(conn, "hold_group", "default", "bob", None),
    "purge": lambda conn: call(conn, "purge_group", "default", "bob"),
}


@pytest.mark.prepared.with_args(install_stops)
@pytest.mark.parametrize("shards", [MORE, 1], ids=["more", "fewer"])
@pytest.mark.parametrize("name", PRODUCERS)
def test_whatever_is_said_to_a_group_while_it_moves_reaches_it(
    database: Database, name: str, shards: int
) -> None:
    """The caller stands between any two of its statements, and the whole group moves meanwhile."""
    conn, caller, other, gate = (database.connect(autocommit=True) for _ in range(4))
    if shards == 1:
        set_shards(conn, MORE)
    worker = register(conn)
    run(conn, "set lock_timeout = '5s'")
    with recorded(caller) as points:
        create_many(conn, "bob", 2)
        PRODUCERS[name](caller)
    clean_up(conn)
    # Who promotes passes a hundred statements more, where test_stops stands, too.
    every = EVERY if len(points) > 50 else max(1, EVERY // 4)
    for point in points[(shards == 1) * (every // 2) :: every]:
        begin(conn, 1 if shards == MORE else MORE)
        go_on(conn)
        conn.execute("select setval('fairq.task_ids', 1, false)")
        # All of them before the move, one known only to its body.
        tasks = create_many(conn, "bob", 3)
        if name == "resume":
            call(conn, "pause_group", "default", "bob")
        if name == "end a hold":
            PRODUCERS["hold"](conn)
        promote(conn)
        tasks += create_many(conn, "bob", 1)
        # Not held by who moves: he waits for the caller a moment only, and a circle would be seen before.
        gate.execute("select pg_advisory_lock(%s)", [GATE])
        caller.execute("select set_config('stops.at', %s, false)", [point])
        begin(conn, shards)
        under_way = call_in_background(partial(PRODUCERS[name], caller))
        wait_until(lambda call=under_way: call.done() or is_blocked(conn, pid_of(caller)), "it stands")  # type: ignore[misc]
        try:
            for _ in range(3):
                if step(conn)["left"] == 0:
                    break
            if name in ("create with a key", "create unique"):
                again = call_in_background(partial(PRODUCERS[name], other))
                wait_until(lambda call=again: call.done() or is_blocked(conn, pid_of(other)), "it waits")  # type: ignore[misc]
            gate.execute("select pg_advisory_unlock(%s)", [GATE])
            said = result(under_way)
            if name == "create with a key":
                assert result(again) == said
            elif name == "create unique":
                result(again)
            go_on(conn)
            assert_moved(conn)
            if name == "create unique":
                # Whoever has the key now, it is the only one that waits.
                PRODUCERS[name](conn)
            check(conn, name, worker, tasks)
            assert_sound(conn)
        except BaseException as exc:
            exc.add_note(f"stopped at {point}")
            raise
        clean_up(conn)


def check(conn: Conn, name: str, worker: int, tasks: list[int]) -> None:
    served = [int(task) for task in pop(conn, worker, 1)]
    while held := pop(conn, worker, 10):
        served += held
    ids = column(conn, "select id from fairq.live_tasks order by id")
    match name:
        case "pause" | "hold":
            assert served == []
            assert ids == tasks
        case "purge":
            # One that nobody had heard of is there for whoever looks.
            assert ids == []
        case "cancel":
            assert served == tasks[1:]
        case "create with a key":
            assert served == ids
            assert len(ids) == len(tasks) + 1
        case "create unique":
            assert served == ids
            assert len(ids) == len(tasks) + 1
        case "create many":
            assert sorted(served) == ids
            assert len(ids) == len(tasks) + 3
        case _:
            # In the order in which they were enqueued.
            assert served == ids
            assert len(ids) == len(tasks) + (name.startswith("create"))


def clean_up(conn: Conn) -> None:
    call(conn, "configure_group", "default", "bob", max_running=None)
    call(conn, "resume_group", "default", "bob")
    call(conn, "hold_group", "default", "bob", None)
    for row in run(conn, "select worker_id, id, attempt from fairq.held"):
        conn.execute(FINISH_ONE, row)
    for group in ("bob", "new"):
        call(conn, "purge_group", "default", group)
    call(conn, "promote_overflow")
    assert run(conn, "select id from fairq.tasks") == []
    for table in ("idempotency_keys", "finished_tasks", "attempts", "cancellations"):
        conn.execute(f"delete from fairq.{table}")  # noqa: S608


def test_the_end_of_a_move_waits_for_transactions_that_began_before(database: Database) -> None:
    conn, old = database.connect(autocommit=True), database.connect()
    old.execute("set transaction isolation level repeatable read")
    create_many(conn, "bob", 2)
    worker = register(conn)
    assert one(old, "select count(*) from fairq.tasks") == 2
    begin(conn, MORE)
    for _ in range(10):
        said = step(conn)
    assert (said["state"], said["left"], said["transactions"]) == ("waiting", 0, 1)
    # It knows nothing of the move.
    late = create(old, "bob")
    assert one(old, "select shard_no from fairq.tasks where id = %s", late) == 0
    old.commit()
    go_on(conn)
    assert_moved(conn)
    assert pop(conn, worker, 5) == [1, 2, late]


def test_what_came_late_to_the_shard_that_a_group_moves_to_is_served_with_the_rest(
    database: Database,
) -> None:
    """Nobody promoted there, so it was not sent home before."""
    conn, old, other = database.connect(autocommit=True), database.connect(), database.connect()
    old.execute("set transaction isolation level repeatable read")
    assert one(old, "select count(*) from fairq.tasks") == 0
    moved_but_for_the_end(conn, MORE)
    tasks = create_many(old, "bob", 3)
    assert one(old, "select max(shard_no) from fairq.tasks") == 0
    run(other, "select from fairq.domains where shard_no = 0 and queue = 'default' for update")
    old.commit()
    go_on(conn)
    other.commit()
    worker = register(conn)
    tasks += create_many(conn, "bob", 2)
    run(conn, "select fairq.promote_overflow('default', 1, fairq._shard_of('bob', %s))", MORE)
    begin(conn, 1)
    go_on(conn)
    assert_moved(conn)
    assert pop(conn, worker, 5) == tasks


def test_a_snapshot_from_before_fewer_shards_leaves_nothing_in_one_that_went(database: Database) -> None:
    """Also where nothing was stored yet: tasks, schedules and settings."""
    conn, old = database.connect(autocommit=True), database.connect()
    set_shards(conn, MORE)
    old.execute("set transaction isolation level repeatable read")
    run(old, "select 1")
    begin(conn, 1)
    for _ in range(5):
        assert step(conn)["state"] != "done"
    late = [create(old, "bob"), *create_all(old, "bob", "bob"), create(old, "bob", run_at="2001-01-01")]
    scheduled = create(old, "bob", run_at="2100-01-01")
    call(old, "configure_schedule", "nightly", "bob", every="1 day")
    call(old, "pause_group", "default", "ann")
    assert one(old, "select min(shard_no) from fairq.tasks") > 0
    old.commit()
    go_on(conn)
    assert_moved(conn)
    assert pop(conn, register(conn), 9) == late
    assert call(conn, "cancel_task", scheduled)
    assert call(conn, "remove_schedule", "nightly", "bob") == [(1,)]
    assert column(conn, "select group_key from fairq.groups where paused_at is not null") == ["ann"]


def test_keys_of_before_and_after_the_move_wait_for_each_other(database: Database) -> None:
    conn, old, new = database.connect(autocommit=True), database.connect(), database.connect(autocommit=True)
    register(conn)
    first = create(old, "bob", idempotency_key="k")
    begin(conn, MORE)
    go = in_background(new, "select fairq.create_task('bob', '{}', p_idempotency_key => 'k')")
    assert wait_until_blocked(conn, pid_of(new)) == [pid_of(old)]
    for _ in range(5):
        assert step(conn)["state"] != "done"
    old.commit()
    assert result(go) == [(first,)]
    go_on(conn)
    assert_moved(conn)
    assert create(conn, "bob", idempotency_key="k") == first


def test_a_crash_in_the_middle_of_a_group_leaves_it_where_it_was(database: Database) -> None:
    conn, mover = database.connect(autocommit=True), database.connect()
    worker = register(conn)
    tasks = create_all(conn, *"abcdefgh" * 3)
    promote(conn)
    begin(conn, MORE)
    while step(mover)["left"] > 3:
        mover.commit()
    kill(conn, mover)
    assert one(conn, "select count(*) from fairq.moving") == 4
    # Enqueued and popped in between, too.
    tasks += create_all(conn, *"abcdefgh")
    held = pop(conn, worker, 5)
    finish(conn, worker, held)
    go_on(conn)
    assert_moved(conn)
    served = [int(task) for task in held]
    while held := pop(conn, worker, 10):
        finish(conn, worker, held)
        served += held
    assert sorted(served) == tasks


# `make test` moves this many tasks; scaling.md says what a run of 100,000 showed.
TASKS = int(os.environ.get("FAIRQ_TEST_MOVED_TASKS", "2000"))


def test_from_one_shard_to_sixteen_and_back_while_workers_run(database: Database) -> None:
    """Nothing is lost or runs twice; of each group two at once; equal keys give one id."""
    conn = database.connect(autocommit=True)
    conn.execute("""select fairq.configure_queue('default', '{"group_max_running": 2}')""")
    groups = [f"g{n}" for n in range(max(20, TASKS // 100))]
    create_all(conn, *groups * (TASKS // len(groups)))
    stop, full = threading.Event(), threading.Event()
    served: list[tuple[str, int]] = []
    created: list[int] = []
    most = "select group_key from fairq.live_tasks where worker_id is not null group by 1 having count(*) > 2"

    def work() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as mine:
            worker = register(mine, slots=20)
            while not full.is_set():
                held = pop(mine, worker, 20)
                served.extend((task.group_key, int(task)) for task in held)
                assert finish(mine, worker, held) == sorted(held)
                if stop.is_set() and not held and not one(mine, "select exists (select from fairq.tasks)"):
                    full.set()
                # Slow enough that there is something to move.
                time.sleep(0 if stop.is_set() else 0.02)

    def produce() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as mine:
            while not stop.is_set():
                for group in groups[::7]:
                    first = create(mine, group, idempotency_key=f"{len(created)}")
                    assert create(mine, group, idempotency_key=f"{len(created)}") == first
                    created.append(first)
                time.sleep(0.01)

    def look() -> None:
        with psycopg.connect(database.dsn, autocommit=True) as mine:
            while not full.is_set():
                assert run(mine, most) == []
                time.sleep(0.05)

    calls = [call_in_background(each) for each in (work, work, produce, look)]
    took = {}
    for shards in (16, 1):
        seen = len(served) + TASKS // 20
        wait_until(lambda seen=seen: len(served) > seen, "they work", 60)  # type: ignore[misc]
        began = time.monotonic()
        begin(conn, shards)
        groups_to_move = one(conn, "select count(*) from fairq.moving")
        go_on(conn, patience=600)
        took[shards] = (round(time.monotonic() - began, 1), groups_to_move, len(served))
        assert run(conn, "select * from fairq.moving") == []
    stop.set()
    # One that failed is done before.
    wait_until(lambda: full.is_set() or any(each.done() for each in calls[:2]), "all is served", 600)
    for each in calls:
        result(each)
    print(took)
    assert len(served) == len(set(served))
    assert {task for _, task in served} == {*range(1, TASKS // len(groups) * len(groups) + 1), *created}
    assert_moved(conn)


@pytest.mark.parametrize("shards", [MORE, 1], ids=["more", "fewer"])
def test_a_key_that_somebody_fails_to_take_at_the_end_stays_its_tasks(
    database: Database, shards: int
) -> None:
    conn, taker = database.connect(autocommit=True), database.connect()
    if shards == 1:
        set_shards(conn, MORE)
    register(conn)
    first = create(conn, "bob", idempotency_key="k")
    begin(conn, shards)
    while (said := step(conn))["state"] != "waiting":
        assert said["state"] != "done"
    # Who begins now is not waited for.
    create(taker, "bob", idempotency_key="k", unique="waiting")
    for _ in range(5):
        step(conn)
    taker.rollback()
    go_on(conn)
    assert_moved(conn)
    assert create(conn, "bob", idempotency_key="k") == first


def test_a_schedule_that_is_configured_while_its_group_moves_is_one(database: Database) -> None:
    conn, mover, caller = database.connect(autocommit=True), database.connect(), database.connect()
    create(conn, "bob")
    call(conn, "configure_schedule", "nightly", "bob", every="1 day", kind="a")
    begin(conn, MORE)
    assert step(mover)["left"] == 0
    configured = in_background(
        caller, """select fairq.configure_schedule('nightly', 'bob', '{"kind": "b"}')"""
    )
    wait_until_blocked(conn, pid_of(caller))
    mover.commit()
    result(configured)
    caller.commit()
    found = "select kind, every = interval '1 day', shard_no = fairq._shard_of('bob', 5) from fairq.schedules"
    assert run(conn, found) == [("b", True, True)]
    go_on(conn)
    assert_moved(conn)


def test_a_rate_that_is_forgotten_while_its_group_moves_is_so(database: Database) -> None:
    conn, mover, caller = database.connect(autocommit=True), database.connect(), database.connect()
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="1 hour")
    worker = register(conn)
    create_many(conn, "bob", 2)
    finish(conn, worker, pop(conn, worker, 2))
    begin(conn, MORE)
    assert step(mover)["left"] == 0
    forgotten = in_background(caller, "select fairq.reset_rate('default', 'bob')")
    wait_until_blocked(conn, pid_of(caller))
    mover.commit()
    result(forgotten)
    caller.commit()
    go_on(conn)
    assert_moved(conn)
    assert len(pop(conn, worker, 2)) == 1


def test_a_move_that_waits_for_who_promotes_keeps_no_other_queue_waiting(database: Database) -> None:
    conn, promoter, mover = database.connect(autocommit=True), database.connect(), database.connect()
    call(conn, "configure_queue", "other")
    worker = register(conn)
    tasks = create_many(conn, "bob", 2)
    promote(promoter, "other")
    # Who moves takes "default" before "other", which is not to be had.
    waiting = in_background(mover, """select fairq.configure_cluster('{"shard_count": 5}')""")
    wait_until_blocked(conn, pid_of(mover))
    wait_until(lambda: pop(conn, worker, 2) == tasks, "they are served")
    promoter.commit()
    result(waiting)
    mover.commit()


def moved_but_for_the_end(conn: Conn, shards: int) -> None:
    """From here on nobody is waited for who begins now."""
    begin(conn, shards)
    while (said := step(conn))["state"] != "waiting" or said["left"]:
        assert said["state"] != "done"


def test_who_ends_a_move_does_not_wait_for_upkeep_which_may_wait_for_him(database: Database) -> None:
    """Upkeep holds its notes and asks for keys; the end of a move holds the keys, and deletes such notes."""
    conn, other = database.connect(autocommit=True), database.connect()
    set_shards(conn, MORE)
    moved_but_for_the_end(conn, 1)
    run(other, "select fairq.maintain(10000, 'expiry')")
    run(conn, "set statement_timeout = '2s'")
    for _ in range(3):
        step(conn)
    other.commit()
    assert step(conn)["state"] == "done"
    assert_moved(conn)


def test_a_wish_to_cancel_follows_a_task_to_the_shard_it_came_from_late(database: Database) -> None:
    conn, old, caller = database.connect(autocommit=True), database.connect(), database.connect()
    set_shards(conn, MORE)
    register(conn)
    create(old, "bob", run_at="2100-01-01")
    moved_but_for_the_end(conn, 1)
    old.commit()
    assert one(caller, "select fairq.cancel_task(1)") is True
    go_on(conn)
    caller.commit()
    promote(conn)
    assert run(conn, "select id, outcome from fairq.finished_tasks") == [(1, "cancelled")]


def test_who_watches_a_task_while_its_group_moves_hears_of_its_end(database: Database) -> None:
    conn, mover, caller = database.connect(autocommit=True), database.connect(), database.connect()
    worker = register(conn)
    create(conn, "bob")
    promote(conn)
    run(conn, "listen fairq_done")
    begin(conn, MORE)
    assert one(caller, "select fairq.watch_task(1)") is True
    assert step(mover)["moved"] == 1
    mover.commit()
    caller.commit()
    go_on(conn)
    finish(conn, worker, pop(conn, worker, 1))
    assert [notice.payload for notice in conn.notifies(timeout=5, stop_after=1)] == ["1"]


@pytest.mark.parametrize("name", ["scheduled", "ended"])
def test_a_task_is_tried_again_that_moves_from_one_look_to_the_next(database: Database, name: str) -> None:
    conn, mover, caller = database.connect(autocommit=True), database.connect(), database.connect()
    set_shards(conn, MORE)
    worker = register(conn)
    create(conn, "bob", run_at="2100-01-01" if name == "scheduled" else None)
    if name == "ended":
        finish(conn, worker, pop(conn, worker, 1), "failed")
        # The ledger has counted it.
        run(conn, "update fairq.finished_tasks set finished_at = finished_at - interval '2 minutes'")
        run(conn, "select fairq.maintain()")
    begin(conn, 1)
    table = "tasks" if name == "scheduled" else "finished_tasks"
    while one(mover, f"select max(shard_no) from fairq.{table}"):  # noqa: S608
        mover.commit()
        step(mover)
    again = in_background(caller, "select fairq.retry_task(1)")
    wait_until_blocked(conn, pid_of(caller))
    mover.commit()
    assert result(again) == [(True,)]
    caller.commit()
    go_on(conn)
    assert len(pop(conn, worker, 1)) == 1


def test_keys_that_nobody_heard_of_do_not_keep_a_move_from_ending(database: Database) -> None:
    conn = database.connect(autocommit=True)
    set_shards(conn, MORE)
    worker = register(conn)
    create(conn, "bob", concurrency_key="k")
    held = pop(conn, worker, 1)
    # Nobody waits for a key: its queue does not look for keys any more.
    run(conn, "select fairq.maintain()")
    finish(conn, worker, held)
    # Else the move would wait for the ledger, which counts whole minutes.
    run(conn, "update fairq.finished_tasks set finished_at = finished_at - interval '2 minutes'")
    begin(conn, 1)
    go_on(conn)


def test_settings_of_a_snapshot_from_before_the_move_are_pauses_at_most(database: Database) -> None:
    """All others are refused there, so that nothing else has to be brought along."""
    conn, old = database.connect(autocommit=True), database.connect()
    create(conn, "bob")
    old.execute("set transaction isolation level repeatable read")
    for change in (
        """configure_group('default', 'bob', '{"weight": 2}')""",
        """configure_user('default', 'bob', 'jane', '{"weight": 2}')""",
    ):
        with pytest.raises(psycopg.Error) as refused, old.transaction():
            old.execute(f"select fairq.{change}".encode())
        assert refused.value.sqlstate == "QF005"


def test_a_queue_that_a_snapshot_from_before_the_move_would_make_is_refused(database: Database) -> None:
    """It would know only the shards there were."""
    conn, old = database.connect(autocommit=True), database.connect()
    old.execute("set transaction isolation level repeatable read")
    run(old, "select 1")
    begin(conn, MORE)
    with pytest.raises(psycopg.errors.SerializationFailure):
        call(old, "configure_queue", "late")


def test_a_worker_that_registers_with_a_snapshot_from_before_the_move_is_known_everywhere(
    database: Database,
) -> None:
    conn, old = database.connect(autocommit=True), database.connect()
    old.execute("set transaction isolation level repeatable read")
    run(old, "select 1")
    moved_but_for_the_end(conn, MORE)
    worker = register(old)
    old.commit()
    go_on(conn)
    tasks = create_all(conn, *"abcdefgh")
    assert sorted(pop(conn, worker, 8)) == tasks


@pytest.mark.parametrize("ends", [False, True], ids=["begins", "ends"])
def test_a_hold_of_a_key_that_changes_while_shards_come_is_so_in_each(database: Database, ends: bool) -> None:
    conn, mover, caller = database.connect(autocommit=True), database.connect(), database.connect()
    worker = register(conn)
    create(conn, "bob", concurrency_key="k")
    held = pop(conn, worker, 1)
    if ends:
        finish(conn, worker, held, "postponed", delay="1 hour", holds=["key"])
        begin(mover, MORE)
        changed = in_background(caller, "select fairq.hold_key('k', null)")
        wait_until_blocked(conn, pid_of(caller))
        mover.commit()
        result(changed)
    else:
        finish(caller, worker, held, "postponed", delay="1 hour", holds=["key"])
        begin(conn, MORE)
    caller.commit()
    go_on(conn)
    others = [create(conn, group, concurrency_key="k") for group in "abcdefgh"]
    found = pop(conn, worker, 20)
    assert len(found) == (len({shard_of(group, MORE) for group in ["bob", *"abcdefgh"]}) if ends else 0), (
        others
    )
    assert_sound(conn)


def test_the_ledger_counts_an_attempt_whose_task_has_moved_since(database: Database) -> None:
    conn = database.connect(autocommit=True)
    worker = register(conn)
    create(conn, "bob")
    run(conn, "select fairq.maintain()")
    finish(conn, worker, pop(conn, worker, 1), "retry", delay="1 hour")
    begin(conn, MORE)
    go_on(conn)
    tally = (
        "select t.group_key, t.attempts from fairq._tally(0, now() - interval '1 minute', now()) q"
        " cross join unnest(q.tallies) t"
    )
    assert run(conn, tally) == [("bob", 1)]


def test_who_asks_about_a_group_that_is_to_move_learns_of_it(database: Database) -> None:
    conn = database.connect(autocommit=True)
    worker = register(conn)
    create_many(conn, "bob", 2)
    pop(conn, worker, 1)
    begin(conn, MORE)
    assert step(conn)["leaving"] == 1
    (reason,) = run(conn, "select reason from fairq.explain_task(2)")[0]
    assert reason == 'group "bob" moves to another shard, and what it has in flight ends first'


@pytest.mark.parametrize("name", ["rebuild", "promote_overflow"])
def test_a_shard_that_goes_while_somebody_is_about_to_enter_it_is_passed_over(
    database: Database, name: str
) -> None:
    conn, mover, caller = database.connect(autocommit=True), database.connect(), database.connect()
    set_shards(conn, MORE)
    worker = register(conn)
    tasks = create_many(conn, "bob", 2)
    moved_but_for_the_end(conn, 1)
    while step(mover)["state"] != "done":
        mover.commit()
    entering = in_background(caller, f"select fairq.{name}('default') is not null")
    wait_until_blocked(conn, pid_of(caller))
    mover.commit()
    assert result(entering) == [(True,)]
    caller.commit()
    assert pop(conn, worker, 5) == tasks
