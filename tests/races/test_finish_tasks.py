"""Only the holder finishes, whoever else reaches for the task (I10).

Interleavings (W: the holder, M: maintenance, V: another worker):

    W: begin; finish        M: recover (skips the locked task)    W: commit      ended once, by W
    W: begin; finish        M: recover                            W: rollback    M: recover     back in line
    M: begin; recover       W: finish (waits)                     M: commit      W gets nothing, and is told
    M: begin; recover       W: finish (waits)                     M: rollback    W's finish counts
    M: recover; V: pop      W: finish                                            nothing; V's finish counts
    W: begin; release       W': finish (waits)                    W: commit      W' gets nothing
    W: begin; finish        W': release (waits)                   W: commit      W' gets nothing
    W: begin; retire        W': finish (waits)                    W: commit      W' gets nothing
    W: pop; release; pop    W: the first finish, release, start or report, late     W holds it the second time
    W: begin; finish        W': retire (waits)                    W: commit      nothing is left to give back
    W: begin; finish        W': retire (waits)                    W: rollback    W' gives everything back
    P: begin; counts held   W: finish (waits)                     P: commit      W's finish frees the place
    P: begin; counts held   W: finish (waits)                     P: rollback    W's finish counts
    P: begin; counts held   W: start (waits)                      P: commit      W runs it, and has the place
    P: begin; counts held   W: retire (waits)                     P: commit, and once more    W gives it back
    W: claims; M: lease ran out; begin; give up   W: start (waits)   M: commit   W starts nothing
    W: begin; start         M: lease ran out (skips it)           W: commit      W runs it
    W: start finds it late  W': starts it, or gives it back and takes it again   W ends nothing
    W: finish (waits for a start)   W': finish, when it has started              one is told to try again
    M: begin; maintain      M': maintain                                         returns at once, does nothing
    M: begin; maintain      W: pop, finish, heartbeat; A: create                 none of them waits
"""

from typing import Any

import psycopg
import pytest

from tests.support.calls import (
    FINISH,
    RELEASE,
    START,
    Conn,
    Held,
    at,
    call,
    create,
    create_each,
    ending,
    finish,
    held_by,
    in_flight,
    maintain,
    pop,
    promote,
    register,
    release,
    run,
    start,
    states,
)
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.sessions import in_background, pid_of, result, survivor, wait_until, wait_until_blocked
from tests.support.shards import neighbours
from tests.support.stops import GATE, install_stops

LATER = "select set_config('fairq.now', (clock_timestamp() + interval '2 hours')::text, false)"


Taken = tuple[int, list[Held]]  # a worker and what it holds


@pytest.fixture
def held(observer: Conn) -> Taken:
    """A worker and the two tasks it holds, of a group whose cap of two is used up."""
    call(observer, "configure_group", "default", "g", max_running=2)
    create_each(observer, "g", "g", "g")
    worker = register(observer)
    return worker, pop(observer, worker)


def later(database: Database, **kwargs: Any) -> Conn:
    """A session for which the leases of all others have run out."""
    conn = database.connect(**kwargs)
    conn.execute(LATER)
    if not conn.autocommit:
        conn.commit()
    return conn


def test_recovery_skips_a_task_that_is_being_finished(
    database: Database, observer: Conn, held: Taken
) -> None:
    worker, tasks = held
    holder, keeper = database.connect(), later(database)
    keeper.execute("set lock_timeout = 1")
    assert finish(holder, worker, tasks[:1]) == tasks[:1]
    assert maintain(keeper)["recovered"] == 1
    keeper.commit()
    holder.commit()
    assert states(observer)[tasks[0]] == "succeeded"
    assert_consistent(observer)
    assert in_flight(observer, "g") == 2
    assert observer.execute("select task_id, outcome from fairq.attempts").fetchall() == [
        (tasks[1], "worker_lost")
    ]


def test_a_finish_that_is_rolled_back_leaves_the_task_to_recovery(
    database: Database, observer: Conn, held: Taken
) -> None:
    worker, tasks = held
    holder, keeper = database.connect(), later(database, autocommit=True)
    finish(holder, worker, tasks)
    assert maintain(keeper).get("recovered", 0) == 0
    holder.rollback()
    assert maintain(keeper)["recovered"] == 2
    assert finish(observer, worker, tasks) == []
    assert_consistent(observer)
    assert in_flight(observer, "g") == 2


@pytest.mark.parametrize("outcome", [None, "failed", "retry"])
def test_a_finish_that_waited_for_recovery_changes_nothing(
    database: Database, observer: Conn, held: Taken, outcome: str | None
) -> None:
    """I7, I10, D7: the place is freed once, by recovery."""
    worker, tasks = held
    holder, keeper = database.connect(), later(database)
    assert maintain(keeper)["recovered"] == 2
    late = in_background(holder, FINISH, ending(worker, tasks, outcome))
    assert wait_until_blocked(observer, pid_of(holder)) == [pid_of(keeper)]
    keeper.commit()
    assert result(late) == []
    holder.commit()
    assert set(states(observer).values()) <= {"overflow", "queued"}
    assert_consistent(observer)
    assert in_flight(observer, "g") == 2


@pytest.mark.parametrize("outcome", [None, "retry"])
def test_a_finish_that_waited_counts_when_recovery_is_rolled_back(
    database: Database, observer: Conn, held: Taken, outcome: str | None
) -> None:
    worker, tasks = held
    holder, keeper = database.connect(), later(database)
    assert maintain(keeper)["recovered"] == 2
    late = in_background(holder, FINISH, ending(worker, tasks, outcome))
    assert wait_until_blocked(observer, pid_of(holder)) == [pid_of(keeper)]
    keeper.rollback()
    assert [row[0] for row in result(late)] == sorted(tasks)
    holder.commit()
    assert_consistent(observer)


def test_a_lost_worker_cannot_finish_what_another_holds_now(
    database: Database, observer: Conn, held: Taken
) -> None:
    """I10: worker and attempt are the token; the other one's finish counts."""
    worker, tasks = held
    keeper = later(database, autocommit=True)
    maintain(keeper)
    other = register(observer)
    again = pop(observer, other)
    assert {task: task.attempt for task in again} == dict.fromkeys(tasks, 2)
    assert finish(observer, worker, tasks) == []
    assert finish(observer, worker, again) == []
    assert finish(observer, other, tasks) == []
    assert finish(observer, other, again) == sorted(again)
    assert_consistent(observer)


@pytest.mark.parametrize("committed", [True, False], ids=["commit", "rollback"])
def test_a_finish_that_waited_for_a_release(
    database: Database, observer: Conn, held: Taken, committed: bool
) -> None:
    worker, tasks = held
    releasing, finishing = database.connect(), database.connect()
    released = releasing.execute(RELEASE, held_by(worker, tasks)).fetchall()
    assert [row[0] for row in released] == sorted(tasks)
    late = in_background(finishing, FINISH, ending(worker, tasks))
    assert wait_until_blocked(observer, pid_of(finishing)) == [pid_of(releasing)]
    if committed:
        releasing.commit()
    else:
        releasing.rollback()
    assert len(result(late)) == (0 if committed else 2)
    finishing.commit()
    assert_consistent(observer)


def test_a_release_that_waited_for_a_finish_gives_nothing_back(
    database: Database, observer: Conn, held: Taken
) -> None:
    worker, tasks = held
    finishing, releasing = database.connect(), database.connect()
    finish(finishing, worker, tasks)
    late = in_background(releasing, RELEASE, held_by(worker, tasks))
    assert wait_until_blocked(observer, pid_of(releasing)) == [pid_of(finishing)]
    finishing.commit()
    assert result(late) == []
    releasing.commit()
    assert [states(observer)[task] for task in tasks] == ["succeeded"] * 2
    assert_consistent(observer)


def test_a_release_that_waited_for_a_retry_gives_nothing_back(
    database: Database, observer: Conn, held: Taken
) -> None:
    """The row is still there when the release gets it, but not in this worker's hands."""
    worker, tasks = held
    finishing, releasing = database.connect(), database.connect()
    finish(finishing, worker, tasks, "retry")
    late = in_background(releasing, RELEASE, held_by(worker, tasks))
    assert wait_until_blocked(observer, pid_of(releasing)) == [pid_of(finishing)]
    finishing.commit()
    assert result(late) == []
    releasing.commit()
    assert [states(observer)[task] for task in tasks] == ["scheduled"] * 2
    assert_consistent(observer)


@pytest.mark.parametrize("first", ["retire", "finish"])
def test_retiring_against_finishing(database: Database, observer: Conn, held: Taken, first: str) -> None:
    """Whoever comes first has the tasks; the other one finds nothing left."""
    worker, tasks = held
    retire = ("select fairq.retire_worker(%s)", [worker])
    end = (FINISH, ending(worker, tasks))
    one, two = database.connect(), database.connect()
    one.execute(*(retire if first == "retire" else end))
    late = in_background(two, *(end if first == "retire" else retire))
    assert wait_until_blocked(observer, pid_of(two)) == [pid_of(one)]
    one.commit()
    if first == "retire":
        assert result(late) == []
    result(late)
    two.commit()
    ended = [states(observer)[task] for task in tasks]
    assert set(ended) == ({"overflow"} if first == "retire" else {"succeeded"})
    assert_consistent(observer)
    assert in_flight(observer, "g") == (2 if first == "retire" else 1)
    assert observer.execute("select count(*) from fairq.workers").fetchone() == (0,)


def test_a_finish_that_is_rolled_back_leaves_the_tasks_to_who_retires(
    database: Database, observer: Conn, held: Taken
) -> None:
    """I1: nobody knows the worker any more, and nobody else would look for what it holds."""
    worker, tasks = held
    one, two = database.connect(), database.connect(autocommit=True)
    finish(one, worker, tasks)
    late = in_background(two, "select fairq.retire_worker(%s)", [worker])
    assert wait_until_blocked(observer, pid_of(two)) == [pid_of(one)]
    one.rollback()
    result(late)
    assert {states(observer)[task] for task in tasks} == {"overflow"}
    assert observer.execute("select count(*) from fairq.held").fetchone() == (0,)
    assert_consistent(observer)


@pytest.mark.parametrize("committed", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("prefetched", [False, True], ids=["finish", "start"])
def test_a_task_that_is_being_counted_is_found_again(
    database: Database, observer: Conn, committed: bool, prefetched: bool
) -> None:
    """I7, I10: a first cap replaces rows of holders; who ends or starts a task meanwhile looks again."""
    create_each(observer, "g", "g", "g")
    worker = register(observer)
    tasks = pop(observer, worker, 2, lease="1 minute" if prefetched else None)
    configuring, working = database.connect(), database.connect(autocommit=True)
    call(configuring, "configure_group", "default", "g", max_running=2)
    promote(configuring)
    late = in_background(
        working, START if prefetched else FINISH, (held_by if prefetched else ending)(worker, tasks)
    )
    assert wait_until_blocked(observer, pid_of(working)) == [pid_of(configuring)]
    if committed:
        configuring.commit()
    else:
        configuring.rollback()
    assert sorted(row[0] for row in result(late)) == sorted(tasks)
    promote(observer)
    assert_consistent(observer)
    if prefetched:
        assert in_flight(observer, "g") == (2 if committed else 0)
        assert finish(observer, worker, tasks) == sorted(tasks)
        promote(observer)
    assert in_flight(observer, "g") == int(committed)
    assert_consistent(observer)


def test_a_task_that_is_being_counted_goes_back_in_line_when_its_worker_retires(
    database: Database, observer: Conn
) -> None:
    """I1, I8: nobody would know its holder any more, and it would never run."""
    (group,) = neighbours(observer, "g")  # who retires goes from shard to shard
    create_each(observer, group)
    worker = register(observer)
    (task,) = pop(observer, worker)
    grouping, queueing, beating = database.connect(), database.connect(), database.connect()
    retiring = database.connect(autocommit=True)
    call(beating, "heartbeat", worker)
    call(grouping, "configure_group", "default", group, max_running=2)
    promote(grouping)
    retired = in_background(retiring, "select fairq.retire_worker(%s)", [worker])
    assert wait_until_blocked(observer, pid_of(retiring)) == [pid_of(grouping)]
    grouping.commit()
    wait_until(
        lambda: wait_until_blocked(observer, pid_of(retiring)) == [pid_of(beating)], "it waits for the worker"
    )
    call(queueing, "configure_queue", "default", max_running=5)
    beating.commit()
    wait_until(
        lambda: wait_until_blocked(observer, pid_of(retiring)) == [pid_of(queueing)], "it waits for the task"
    )
    queueing.commit()
    result(retired)
    assert_consistent(observer)
    assert pop(observer, register(observer)) == [task]
    assert_consistent(observer)


def claimed(observer: Conn) -> Taken:
    create_each(observer, "h", "h")
    worker = register(observer, lease="1 day")
    return worker, pop(observer, worker, lease="1 minute")


def test_a_start_that_waited_for_the_end_of_its_lease_starts_nothing(
    database: Database, observer: Conn
) -> None:
    """H3, H20, HR12: ownership is looked at once more before user code runs."""
    worker, tasks = claimed(observer)
    starting, keeper = database.connect(), later(database)
    assert maintain(keeper)["unclaimed"] == 2
    late = in_background(starting, START, held_by(worker, tasks))
    assert wait_until_blocked(observer, pid_of(starting)) == [pid_of(keeper)]
    keeper.commit()
    assert result(late) == []
    starting.commit()
    assert set(states(observer).values()) == {"queued"}  # maintenance rang, and promoted
    assert_consistent(observer)


@pytest.mark.prepared.with_args(install_stops)
@pytest.mark.parametrize("again", [False, True], ids=["started", "popped again"])
def test_a_start_that_comes_late_ends_nothing_that_was_started_meanwhile(
    database: Database, observer: Conn, again: bool
) -> None:
    """I10: what it saw claimed, and past its deadline, may run by the time it would end it."""
    late = database.connect(autocommit=True)
    at(observer, "12:00:00")
    at(late, "12:02:00")
    create(observer, "h", expires_at="2030-01-01 12:01:00+00")
    worker = register(observer, lease="1 day")
    tasks = pop(observer, worker, lease="5 minutes")
    run(late, "set stops.at = 'start_tasks:3'")
    run(observer, "select pg_advisory_lock(%s)", GATE)
    starting = in_background(late, START, held_by(worker, tasks))
    wait_until_blocked(observer, pid_of(late))
    if again:
        assert release(observer, worker, tasks) == tasks
        tasks = pop(observer, worker)
    else:
        assert start(observer, worker, tasks) == tasks
    run(observer, "select pg_advisory_unlock(%s)", GATE)
    assert result(starting) == []
    assert finish(observer, worker, tasks) == tasks
    assert_consistent(observer)


def test_a_claim_that_is_being_started_is_not_given_up(database: Database, observer: Conn) -> None:
    worker, tasks = claimed(observer)
    starting, keeper = database.connect(), later(database)
    keeper.execute("set lock_timeout = 1")
    assert sorted(starting.execute(START, held_by(worker, tasks)).fetchall()) == sorted(
        (task,) for task in tasks
    )
    assert "unclaimed" not in maintain(keeper)
    keeper.commit()
    starting.commit()
    assert finish(observer, worker, tasks) == sorted(tasks)
    assert_consistent(observer)


REPORT = "select r.id from fairq.report_progress(%s, %s::bigint[], %s::int[], array[0.5, 0.5]) as r(id)"
HELD = "select h.id from fairq.held_tasks(%s, %s::bigint[], %s::int[]) as h(id)"


@pytest.mark.parametrize("given_back", ["released", "its lease ran out"])
@pytest.mark.parametrize(
    "late", [FINISH, RELEASE, START, REPORT, HELD], ids=["finish", "release", "start", "report", "ask"]
)
def test_a_message_about_a_task_given_back_says_nothing_about_the_next_time(
    database: Database, observer: Conn, given_back: str, late: str
) -> None:
    """I10: the same worker takes the task again while a message about the first time is still under way.

    A release whose answer was lost is sent again: it must not take the running task from its handler.
    """
    worker, first = claimed(observer)
    if given_back == "released":
        assert observer.execute(RELEASE, held_by(worker, first)).rowcount == 2
    else:
        assert maintain(later(database, autocommit=True))["unclaimed"] == 2
    second = pop(observer, worker, lease="1 minute" if late == START else None)
    assert second == first
    parameters = ending(worker, first) if late == FINISH else held_by(worker, first)
    assert observer.execute(late, parameters).fetchall() == []
    if late == START:
        assert observer.execute(START, held_by(worker, second)).rowcount == 2
    assert finish(observer, worker, second) == sorted(second)
    assert_consistent(observer)


def test_a_task_given_back_has_as_many_attempts_left_as_before(observer: Conn) -> None:
    (task,) = create_each(observer, "g", max_attempts=2)
    worker = register(observer)
    for _ in range(5):
        assert observer.execute(RELEASE, held_by(worker, pop(observer, worker))).rowcount == 1
    observer.execute(
        "select fairq.finish_tasks(%s, array_agg(t.id), array_agg(t.attempt), array['retry'],"
        " p_retry_delays => array[interval '0'])"
        " from fairq.pop_tasks('default', 1, %s) t",
        [worker, worker],
    )
    assert states(observer) == {task: "overflow"}
    assert len(finish(observer, worker, pop(observer, worker), "retry")) == 1
    assert states(observer) == {task: "failed"}


def test_one_maintenance_runs_at_a_time_and_the_other_returns_at_once(
    database: Database, observer: Conn, held: Taken
) -> None:
    first, second = later(database), later(database)
    second.execute("set lock_timeout = 1")
    assert maintain(first)["recovered"] == 2
    assert maintain(second) == {}
    second.commit()
    first.commit()
    assert_consistent(observer)


def test_nobody_waits_for_maintenance(database: Database, observer: Conn, held: Taken) -> None:
    """
    Its transaction is open and has recovered, promoted and swept: all calls of others go through. The
    exception is the day on which it makes the first partitions: it locks the default ones for a moment.
    """
    later(database, autocommit=True).execute("select fairq.maintain(p_part => 'partitions')")
    keeper = later(database)
    create_each(observer, "h")
    other = register(observer, lease="1 day")
    ours = pop(observer, other, 1)
    create_each(observer, "i", "i")
    assert maintain(keeper)["recovered"] == 2
    conn = database.connect()
    conn.execute("set lock_timeout = 1")
    create_each(conn, "g", "k")
    pop(conn, other)
    assert finish(conn, other, ours) == ours
    conn.execute("select fairq.heartbeat(%s)", [other])
    conn.execute("select fairq.cancel_task(max(id)) from fairq.tasks")
    conn.commit()
    keeper.commit()
    assert_consistent(observer)


def test_two_finishes_of_the_same_tasks_in_opposite_order_do_not_deadlock(
    database: Database, observer: Conn, held: Taken
) -> None:
    """A worker that sends its batch again over a new connection, while the old one is still at it."""
    worker, tasks = held
    first, second = database.connect(), database.connect()
    assert finish(first, worker, tasks) == sorted(tasks)
    late = in_background(second, FINISH, ending(worker, tasks[::-1]))
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    first.commit()
    assert result(late) == []
    second.commit()
    assert_consistent(observer)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.prepared.with_args(install_stops)
def test_two_finishes_and_a_start_may_deadlock_and_one_is_told_to_try_again(database: Database) -> None:
    """
    The documented limit of finish_tasks: a started task has another row, which may come before those that the
    first finish has taken. PostgreSQL ends one of the two with 40P01; nothing is lost.
    """
    observer = database.connect(autocommit=True)
    create_each(observer, "g", "g", "g")
    worker = register(observer)
    gone, *tasks = pop(observer, worker, lease="1 hour")
    release(observer, worker, [gone])
    observer.execute("vacuum (index_cleanup on) fairq.held")
    starting, first, second = (database.connect() for _ in range(3))
    assert start(starting, worker, tasks[1:]) == tasks[1:]
    first.execute("set stops.at = 'finish_tasks:9'")
    run(observer, "select pg_advisory_lock(%s)", GATE)
    crossing = in_background(first, RELEASE, held_by(worker, tasks))
    assert wait_until_blocked(observer, pid_of(first)) == [pid_of(starting)]
    starting.commit()
    assert wait_until_blocked(observer, pid_of(first)) == [pid_of(observer)]
    closing = in_background(second, RELEASE, held_by(worker, tasks))
    assert wait_until_blocked(observer, pid_of(second)) == [pid_of(first)]
    run(observer, "select pg_advisory_unlock(%s)", GATE)
    conn, rows = survivor({first: crossing, second: closing})
    assert [row[0] for row in rows] == tasks
    conn.commit()
    assert release(observer, worker, tasks) == []
    assert_consistent(observer)


def test_a_worker_is_told_that_it_is_lost(database: Database, observer: Conn, held: Taken) -> None:
    """QF004: it must not go on as if nothing had happened."""
    worker, _ = held
    keeper = later(database, autocommit=True)
    maintain(keeper)
    maintain(keeper)
    for statement in ("select fairq.heartbeat(%s)", "select fairq.pop_tasks('default', 1, %s)"):
        with pytest.raises(psycopg.Error) as caught:
            observer.execute(statement, [worker])
        assert caught.value.sqlstate == "QF004"
