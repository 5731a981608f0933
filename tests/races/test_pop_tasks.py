"""Poppers share no task, wait for nobody, and lose nothing when they are killed.

Interleavings (W, V: workers, P: a promoter, C: who cancels, A: an application):

    W1..W8: begin; pop, one after the other; commit in another order    disjoint full batches
    W1..W8: pop, all at the same moment, until all is served            each task once
    W1..W10: pop, all at the same moment, where nothing is ready yet    full batches
    W: begin; pop     V: pop          W: rollback    V: pop             V gets what W gave back
    P: begin; holds the domain        W: pop                            gets what is queued, does not wait
    P: begin; holds the domain        W: pop, nothing queued            gets nothing, does not wait
    W: begin; pop     C: cancel; commit; promote     W: commit          W holds it, and is told
    W: begin; pop     C: cancel; commit; promote     W: rollback        the wish stays
    C: begin; cancel                  W: pop         C: commit          W holds it, and is told
    C: begin; cancel  P: promote      C: commit      P: promote         cancelled by the second
    C: cancel; commit                 W: pop                            never handed out
    P: holds shard 1                  W: pop, from shard 0 on           W has shard 0's, does not wait for 1
    P: begin; refills                 W1..W4: pop (wait)                P: commit: it is filled once
    W: begin; heartbeat               R: retires W   W: pop; commit     both get through
    W: begin; pops shard 1            W: heartbeat   W: pops shard 0    both get through
    W: begin; pops shard 1            R: retires W   W: pops shard 0    both get through
    a backend is killed after create, promote, pop, start, finish       as if that transaction never was
"""

import threading
from collections.abc import Callable
from functools import partial

import psycopg
import pytest

from tests.properties.model import shard_of
from tests.support.calls import (
    LOCK_DOMAIN,
    POP,
    Conn,
    Held,
    call,
    create_each,
    drain,
    finish,
    held_by,
    maintain,
    pop,
    promote,
    register,
    states,
)
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.moves import set_shards
from tests.support.sessions import (
    call_in_background,
    in_background,
    kill,
    pid_of,
    result,
    wait_until_blocked,
)
from tests.support.shards import neighbours


def fill(conn: Conn, tasks: int, groups: int, *, one_order: bool = False) -> list[int]:
    names = [f"g{number} " for number in range(groups)]
    rows = conn.execute(
        """
        select fairq.create_tasks(array_agg((%s::text[])[1 + n %% %s::int]), array_agg('{}'::jsonb))
        from generate_series(1, %s) n
        """,
        [neighbours(conn, *names) if one_order else names, groups, tasks],
    ).fetchall()
    return [row[0] for row in rows]


def impatient(database: Database) -> Conn:
    conn = database.connect()
    conn.execute("set lock_timeout = 1")
    conn.commit()
    return conn


@pytest.mark.parametrize("groups", [1, 7, 1000])
def test_eight_poppers_in_open_transactions_get_disjoint_full_batches(
    database: Database, groups: int
) -> None:
    """I1, F4, F10, F27, H29: none waits for another, and together they have the first 800 in order."""
    observer = database.connect(autocommit=True)
    fill(observer, 1000, groups, one_order=True)
    promote(observer, limit=1000)
    order = [
        row[0]
        for row in observer.execute(
            "select id from fairq.live_tasks where state = 'queued' order by block, position"
        )
    ]
    sessions = [impatient(database) for _ in range(8)]
    workers = [register(observer) for _ in sessions]
    batches = [pop(conn, worker, 100) for conn, worker in zip(sessions, workers, strict=True)]
    for conn in sessions[::-1]:
        conn.commit()
    assert [len(batch) for batch in batches] == [100] * 8
    assert [task for batch in batches for task in batch] == order[:800]


def test_eight_poppers_at_once_serve_each_task_once(database: Database) -> None:
    """I1, HR31, S20: pop and finish as fast as they can beside creators; no errors, nothing twice."""
    observer = database.connect(autocommit=True)
    created = fill(observer, 1200, 13)
    barrier = threading.Barrier(9)

    def work() -> list[int]:
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            worker = register(conn)
            barrier.wait()
            return drain(conn, worker)

    def enqueue() -> list[int]:
        with psycopg.connect(database.dsn, autocommit=True) as conn:
            barrier.wait()
            return [task for number in range(100) for task in create_each(conn, f"g{number % 17}")]

    workers = [call_in_background(work) for _ in range(8)]
    created += result(call_in_background(enqueue))
    served = [task for future in workers for task in result(future)]
    served += drain(observer, register(observer))
    assert sorted(served) == sorted(created)
    assert set(states(observer).values()) == {"succeeded"}
    assert_consistent(observer)


def test_ten_poppers_at_once_where_nothing_is_ready_each_get_their_batch(database: Database) -> None:
    """I8: one of them promotes, and makes enough ready for all who are there."""
    observer = database.connect(autocommit=True)
    fill(observer, 5000, 100)
    workers = [(database.connect(autocommit=True), register(observer)) for _ in range(10)]
    barrier = threading.Barrier(10)

    def work(conn: Conn, worker: int) -> list[Held]:
        barrier.wait()
        return pop(conn, worker, 50)

    calls = [call_in_background(partial(work, *one)) for one in workers]
    popped = [result(call) for call in calls]
    assert [len(tasks) for tasks in popped] == [50] * 10
    assert len({task for tasks in popped for task in tasks}) == 500
    assert_consistent(observer)


def test_a_pop_that_is_rolled_back_gives_the_tasks_back_at_their_addresses(database: Database) -> None:
    """I1: not lost, not moved; and meanwhile another popper gets the next ones."""
    observer = database.connect(autocommit=True)
    fill(observer, 10, 5, one_order=True)
    promote(observer)
    first, second = impatient(database), impatient(database)
    worker = register(observer)
    taken = pop(first, worker, 3)
    others = pop(second, worker, 3)
    assert not {*taken} & {*others}
    first.rollback()
    assert held_by(worker, pop(second, worker, 3)) == held_by(worker, taken)
    second.commit()
    assert_consistent(observer)


def test_a_popper_does_not_wait_for_whoever_holds_the_domain(database: Database) -> None:
    """I8: what is queued is handed out; what is not will be promoted by the one who holds the domain."""
    observer = database.connect(autocommit=True)
    worker = register(observer)
    queued = create_each(observer, "g1", "g2")
    promote(observer)
    (waiting,) = create_each(observer, "g3")
    holder, popper = database.connect(), impatient(database)
    holder.execute(LOCK_DOMAIN, ["default"])
    assert sorted(pop(popper, worker)) == queued
    assert pop(popper, worker) == []
    popper.commit()
    holder.commit()
    assert pop(popper, worker) == [waiting]


def test_a_pop_waits_for_no_shard_with_another_in_hand(database: Database) -> None:
    """I8: who promotes all shards has the next one already, and waits for the one in hand."""
    observer = database.connect(autocommit=True)
    set_shards(observer, 2)
    # Were it to wait, it would wait for ever.
    observer.execute("alter function fairq._await_domain set lock_timeout = 0")
    promote(observer)
    worker = register(observer)
    by_shard = [next(f"g{n}" for n in range(99) if shard_of(f"g{n}", 2) == shard) for shard in (0, 1)]
    first, second = create_each(observer, *by_shard)
    # A pop begins with a shard by chance: a chance that begins with shard 0.
    popper = database.connect(autocommit=True)
    for seed in range(99):
        popper.execute("select setseed(%s)", [seed / 100])
        if popper.execute("select floor(random() * 2)::integer").fetchone() == (0,):
            break
    popper.execute("select setseed(%s)", [seed / 100])

    promoter = database.connect()
    promoter.execute("select from fairq.domains where queue = 'default' and shard_no = 1 for update")
    popped = in_background(popper, POP, ["default", 10, worker, None, None])
    assert [Held(*row) for row in result(popped)] == [first]
    promoter.commit()
    assert pop(popper, worker) == [second]
    assert_consistent(observer)


def told(conn: Conn, worker: int) -> list[int]:
    return [row[0] for row in conn.execute("select fairq.heartbeat(%s)", [worker])]


@pytest.mark.parametrize("committed", [True, False], ids=["pop commits", "pop rolls back"])
def test_a_task_that_is_cancelled_while_it_is_being_popped_counts_as_held(
    database: Database, committed: bool
) -> None:
    """Cancel against pop: the promotion that hears the wish skips the locked row, and does not wait."""
    observer = database.connect(autocommit=True)
    worker = register(observer)
    (task,) = create_each(observer, "g")
    promote(observer)
    popper, promoter = database.connect(), impatient(database)
    held = pop(popper, worker)
    assert held == [task]
    assert observer.execute("select fairq.cancel_task(%s)", [task]).fetchone() == (True,)
    promote(promoter)
    promoter.commit()
    if committed:
        popper.commit()
        assert told(observer, worker) == [task]
        assert finish(observer, worker, held, "cancelled") == [task]
    else:
        popper.rollback()
        assert pop(observer, worker) == []  # the wish was rung again, and the task is waiting again
    assert told(observer, worker) == []
    assert states(observer) == {task: "cancelled"}
    assert_consistent(observer)


def test_a_cancellation_that_commits_after_the_pop_is_told_to_the_holder(database: Database) -> None:
    """Cancelling locks nothing: the task can be popped while the wish is not yet committed."""
    observer = database.connect(autocommit=True)
    worker = register(observer)
    (task,) = create_each(observer, "g")
    app, popper = database.connect(), impatient(database)
    app.execute("select fairq.cancel_task(%s)", [task])
    assert pop(popper, worker) == [task]
    popper.commit()
    assert told(observer, worker) == []
    app.commit()
    assert told(observer, worker) == [task]
    promote(observer)
    assert told(observer, worker) == [task]
    assert_consistent(observer)


@pytest.mark.parametrize("where", ["overflow", "queued", "scheduled"])
def test_cancelling_in_a_long_transaction_holds_up_nobody_and_counts_at_commit(
    database: Database, where: str
) -> None:
    """Cancel against promote, in an application's transaction; rolled back, it never was."""
    observer = database.connect(autocommit=True)
    call(observer, "configure_group", "default", "g", max_running=1)
    promote(observer)
    app, promoter = database.connect(), impatient(database)
    if where == "scheduled":
        row = observer.execute("select fairq.create_task('g', '{}', p_run_at => 'tomorrow')").fetchone()
        assert row is not None
        task = row[0]
    else:
        blocker, task = create_each(observer, "g", "g")
        if where == "queued":
            task = blocker
    app.execute("select fairq.cancel_task(%s)", [task])
    promote(promoter)
    promoter.commit()
    assert states(observer)[task] == where
    app.rollback()
    promote(observer)
    assert states(observer)[task] == where
    app.execute("select fairq.cancel_task(%s)", [task])
    create_each(observer, "other")
    promote(observer)
    assert states(observer)[task] == where
    app.commit()
    promote(observer)
    assert states(observer)[task] == "cancelled"
    assert_consistent(observer)


def test_a_cancelled_task_is_never_handed_out(database: Database) -> None:
    """The next pop hears the wish before it picks; places it held are free at once (I7)."""
    observer = database.connect(autocommit=True)
    worker = register(observer)
    call(observer, "configure_group", "default", "g", max_running=1)
    first, second = create_each(observer, "g", "g")
    promote(observer)
    observer.execute("select fairq.cancel_task(%s)", [first])
    served = pop(observer, worker)
    assert first not in served
    served += pop(observer, worker)
    assert served == [second]
    assert_consistent(observer)


def test_a_task_can_be_cancelled_by_the_transaction_that_created_it(database: Database) -> None:
    observer = database.connect(autocommit=True)
    app = database.connect()
    (task,) = create_each(app, "g")
    app.execute("select fairq.cancel_task(%s)", [task])
    app.commit()
    assert pop(observer, register(observer)) == []
    assert states(observer) == {task: "cancelled"}
    assert_consistent(observer)


STEPS: dict[str, Callable[[Conn, int], object]] = {
    "create": lambda conn, worker: create_each(conn, "g", "h"),
    "create and promote": lambda conn, worker: (create_each(conn, "g"), promote(conn)),
    "promote": lambda conn, worker: promote(conn),
    "pop": lambda conn, worker: pop(conn, worker, 3),
    "claim": lambda conn, worker: pop(conn, worker, 3, lease="1 minute"),
    "pop and finish": lambda conn, worker: finish(conn, worker, pop(conn, worker, 3)),
    "pop and retry": lambda conn, worker: finish(conn, worker, pop(conn, worker, 3), "retry"),
    "cancel and promote": lambda conn, worker: (
        conn.execute("select fairq.cancel_task(min(id)) from fairq.tasks"),
        promote(conn),
    ),
    "heartbeat": lambda conn, worker: told(conn, worker),
    "maintain": lambda conn, worker: maintain(conn),
    "retire": lambda conn, worker: conn.execute("select fairq.retire_worker(%s)", [worker]),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_backend_killed_in_an_open_transaction_leaves_no_trace(database: Database, step: str) -> None:
    """I1, HR30: at any step; everything it had locked is free, and all tasks are served once."""
    observer = database.connect(autocommit=True)
    call(observer, "configure_group", "default", "g", max_running=2)
    created = create_each(observer, "g", "h", "g", "i", "g")
    worker = register(observer)
    running = pop(observer, worker, 2)
    victim = database.connect()
    STEPS[step](victim, worker)
    kill(observer, victim)
    assert sorted(states(observer)) == created
    served = finish(observer, worker, running)
    assert sorted(served + drain(observer, worker)) == created
    assert_consistent(observer)


@pytest.mark.usefixtures("one_shard")
@pytest.mark.parametrize("fairness", ["count", "time"])
def test_pops_that_waited_for_a_promoter_do_not_each_fill_the_ready_set_again(
    database: Database, fairness: str
) -> None:
    """I9: they saw it empty, but who went before has seen to that."""
    observer = database.connect(autocommit=True, application_name="observer")
    observer.execute("alter function fairq._await_domain set lock_timeout = 0")
    observer.execute(
        "select fairq.configure_queue('default',"
        " jsonb_build_object('ready_target', 20, 'fairness', %s::text))",
        [fairness],
    )
    fill(observer, 500, 1)
    worker = register(observer)
    promoter = database.connect()
    assert len(pop(promoter, worker, 4)) == 4
    waiting = []
    for _ in range(4):
        conn = database.connect(autocommit=True)
        waiting.append(in_background(conn, POP, ["default", 1, worker, None, None]))
        wait_until_blocked(observer, pid_of(conn))
    promoter.commit()
    assert [len(result(each)) for each in waiting] == [1] * 4
    # The ready target counts what is ready beside those that were handed over.
    assert [*states(observer).values()].count("queued") == 20 - 4
    assert_consistent(observer)


def test_a_worker_that_is_retired_while_it_beats_and_pops_is_waited_for(database: Database) -> None:
    observer = database.connect(autocommit=True)
    worker = register(observer)
    (task,) = create_each(observer, "bob")
    popping, retiring = database.connect(), database.connect(autocommit=True)
    call(popping, "heartbeat", worker)
    waiting = in_background(retiring, "select fairq.retire_worker(%s)", [worker])
    assert wait_until_blocked(observer, pid_of(retiring)) == [pid_of(popping)]
    assert pop(popping, worker) == [task]
    popping.commit()
    result(waiting)
    assert states(observer) == {task: "overflow"}


def test_a_sign_of_life_waits_for_no_pop_of_its_worker(database: Database) -> None:
    """Each goes through the shards in an order of its own, and both renew what is old."""
    observer = database.connect(autocommit=True)
    set_shards(observer, 2)
    worker = register(observer)
    observer.execute("update fairq.heartbeats set beat_at = beat_at - interval '1 hour'")
    popping, beating = database.connect(), database.connect(autocommit=True)
    popping.execute(POP, ["default", 1, worker, None, 1])
    beating.execute("set lock_timeout = 1")
    call(beating, "heartbeat", worker)
    popping.execute(POP, ["default", 1, worker, None, 0])
    popping.commit()
    query = "select count(*) from fairq.heartbeats where beat_at < clock_timestamp() - interval '59 minutes'"
    assert observer.execute(query).fetchone() == (0,)


def test_a_worker_that_is_retired_while_it_pops_from_one_shard_after_the_other(database: Database) -> None:
    """I1: who retires it goes through them in another order, and gives way."""
    observer = database.connect(autocommit=True)
    set_shards(observer, 2)
    worker = register(observer)
    groups = [next(name for name in "abcdefgh" if shard_of(name, 2) == shard) for shard in (1, 0)]
    tasks = create_each(observer, *groups)
    popping, retiring = database.connect(), database.connect(autocommit=True)
    assert popping.execute(POP, ["default", 1, worker, None, 1]).fetchall()[0][0] == tasks[0]
    waiting = in_background(retiring, "select fairq.retire_worker(%s)", [worker])
    assert wait_until_blocked(observer, pid_of(retiring)) == [pid_of(popping)]
    popping.execute("set local deadlock_timeout = '20s'")
    assert popping.execute(POP, ["default", 1, worker, None, 0]).fetchall()[0][0] == tasks[1]
    popping.commit()
    result(waiting)
    assert states(observer) == dict.fromkeys(tasks, "overflow")
    assert_consistent(observer)
