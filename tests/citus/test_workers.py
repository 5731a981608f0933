"""Workers on Citus: one process for all nodes, with one set of slots."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import fairq
from fairq import errors
from fairq.worker import Worker
from fairq.worker import cluster as nodes
from fairq.worker.engine import Engine
from tests.support.calls import column, one, run
from tests.support.cluster import (
    NODES,
    Cluster,
    Conn,
    group_of,
    groups_of,
    on_citus,
    running_cluster,
    say_where,
)
from tests.support.invariants import assert_sound
from tests.support.sessions import wait_until
from tests.support.standby import promote, standby, wait_for_standby
from tests.worker.running import EFFECTS, drain, lines_of, work_process, worker_thread

pytestmark = on_citus


@pytest.fixture
def effects(cluster: Cluster) -> Iterator[Callable[[int], int]]:
    """How many tasks of a node have run, wherever their handlers wrote that."""
    cluster.everywhere(EFFECTS)

    def ran(node: int) -> int:
        ids: set[int] = set()
        for number in NODES:
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(cluster.dsn(number)) as conn:
                ids.update(column(conn, "select task_id from effects where task_id >> 48 = %s", node))
        return len(ids)

    yield ran
    cluster.everywhere("drop table effects")


def workers(conns: list[Conn]) -> list[int]:
    return [one(conn, "select count(*) from fairq.workers where lost_at is null") for conn in conns]


def held(conns: list[Conn]) -> list[int]:
    return [one(conn, "select count(*) from fairq.held") for conn in conns]


def accepts(conn: Conn, group: str, kind: str = "count") -> bool:
    try:
        fairq.enqueue(conn, group, None, kind=kind)
    except (psycopg.Error, errors.FairqError):
        return False
    return True


@pytest.mark.parametrize("commands", [{1: ("--nodes", "own"), 2: ("--nodes", "own")}, {0: ()}])
def test_a_node_that_crashes_stops_no_other_and_is_served_when_it_is_back(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int], commands: dict[int, tuple[str, ...]]
) -> None:
    """By a worker for each node, or one for all of them."""
    first, second = (group_of(conns[0], node) for node in (1, 2))
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(work_process(cluster.dsn(node), "-c", "2", *args))
            for node, args in commands.items()
        ]
        wait_until(lambda: workers(conns[1:]) == [1, 1], "each node has a worker")
        fairq.enqueue_many(conns[0], [(group, None) for group in (first, second) * 5], kind="count")
        wait_until(lambda: (effects(1), effects(2)) == (5, 5), "both nodes have done their tasks")
        cluster.servers[2].stop("immediate")
        conns[2].close()
        fairq.enqueue(conns[0], first, None, kind="count")
        with pytest.raises((psycopg.Error, errors.FairqError)):
            fairq.enqueue(conns[0], second, None, kind="count")
        wait_until(lambda: effects(1) == 6, "the other node goes on")
        cluster.servers[2].start()
        wait_until(lambda: accepts(conns[0], second), "the node is back")
        wait_until(lambda: effects(2) == 6, "its worker, too")
        for process in processes:
            process.send(signal.SIGTERM)
        assert [process.wait() for process in processes] == [0] * len(processes)
    conns[2] = cluster.connect(2)
    assert workers(conns) == [0, 0, 0]


def test_a_node_that_is_away_when_workers_start_is_served_when_it_is_back(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int]
) -> None:
    first, second = (group_of(conns[0], node) for node in (1, 2))
    fairq.enqueue_many(conns[0], [(first, None), (second, None)], kind="count")
    cluster.servers[2].stop("fast")
    conns[2].close()
    with work_process(cluster.dsn(0), "-c", "2") as worker:
        wait_until(lambda: effects(1) == 1, "the other node is served")
        cluster.servers[2].start()
        conns[2] = cluster.connect(2)
        wait_until(lambda: effects(2) == 1, "this one, too")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


def test_a_node_that_hangs_keeps_no_slots_for_long(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int]
) -> None:
    """As a machine does that the network has lost: it refuses nothing, and says nothing."""
    first, second = (group_of(conns[0], node) for node in (1, 2))
    with work_process(cluster.dsn(0), "-c", "2", "--lease", "15") as worker:
        wait_until(lambda: workers(conns) == [1, 1, 1], "each node has a worker")
        sessions = (
            "select pid from pg_stat_activity where application_name in ('fairq worker', 'fairq keeper')"
        )
        wait_until(lambda: len(column(conns[2], sessions)) == 2, "it is connected twice")
        stopped = column(conns[2], sessions)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            fairq.enqueue_many(conns[0], [(first, None)] * 20, kind="count")
            wait_until(lambda: effects(1) == 20, "the other node goes on")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        fairq.enqueue(conns[0], second, None, kind="count")
        wait_until(lambda: effects(2) == 1, "this one, too")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


@pytest.mark.parametrize("what", ["claimed", "to run alone"])
def test_what_waits_for_a_node_that_went_away_keeps_nobody_else_waiting(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int], what: str
) -> None:
    first, second = (group_of(conns[0], node) for node in (1, 2))
    with work_process(cluster.dsn(0), "-c", "1", "--prefetch", "4", "--claim-lease", "600") as worker:
        wait_until(lambda: workers(conns) == [1, 1, 1], "each node has a worker")
        fairq.enqueue(conns[0], first, 4, kind="sleeps")
        wait_until(lambda: held(conns) == [0, 1, 0], "one runs")
        if what == "claimed":
            fairq.enqueue_many(conns[0], [(second, None)] * 4, kind="count")
            count = 4
        else:  # it was lost with its worker
            with conns[2].transaction():
                gone = one(conns[2], "select fairq.register_worker('gone', '{default}', 1, '1 second')")
                run(conns[2], "select fairq_citus.create_task(%s, 'null', p_kind => 'count')", second)
                assert len(run(conns[2], "select * from fairq.pop_tasks('default', 1, %s)", gone)) == 1
            time.sleep(1.1)
            run(conns[2], "select fairq.maintain()")
            count = 1
        wait_until(lambda: held(conns) == [0, 1, count], "others wait behind it")
        cluster.servers[2].stop("immediate")
        conns[2].close()
        fairq.enqueue_many(conns[0], [(first, None)] * 5, kind="count")
        wait_until(lambda: effects(1) == 6, "the others go on")
        cluster.servers[2].start()
        conns[2] = cluster.connect(2)
        wait_until(lambda: waiting(conns) == [0, 0, 0], "all have ended", 60)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert effects(2) == count


def test_slots_are_those_of_the_worker_and_not_of_a_node(cluster: Cluster, conns: list[Conn]) -> None:
    app, running, most = fairq.App(), set[int](), 0
    lock, go = threading.Lock(), threading.Event()

    @app.task
    def waits(payload: Any, ctx: fairq.Context) -> None:
        nonlocal most
        with lock:
            running.add(ctx.id)
            most = max(most, len(running))
        go.wait(20)
        with lock:
            running.remove(ctx.id)

    groups = [group_of(conns[0], node) for node in (1, 2)]
    with worker_thread(app, cluster.dsn(1), concurrency=3):
        # All of them for one node, where the others have nothing to do.
        fairq.enqueue_many(conns[0], [(groups[0], None)] * 3, kind="waits")
        wait_until(lambda: held(conns) == [0, 3, 0], "three run")
        fairq.enqueue_many(conns[0], [(group, None) for group in groups * 20], kind="waits")
        time.sleep(1.5)
        assert held(conns) == [0, 3, 0]
        go.set()
        wait_until(lambda: sum(waiting(conns)) == 0, "all have ended")
    assert most == 3


def waiting(conns: list[Conn]) -> list[int]:
    return [one(conn, "select count(*) from fairq.tasks") for conn in conns]


SLOW = """
create or replace function fairq.standings(p_queues text[]) returns bigint[]
language plpgsql security definer as $$
begin
  perform pg_sleep({});
  return array(
    select s.o_floor
    from unnest(p_queues) with ordinality q(queue, place) cross join lateral fairq._standings(q.queue) s
    order by q.place);
end $$"""


@contextlib.contextmanager
def slow(conn: Conn, seconds: float) -> Iterator[None]:
    """Each look at this node takes so long."""
    before = one(conn, "select pg_get_functiondef('fairq.standings'::regproc)")
    run(conn, "set citus.enable_ddl_propagation = off")
    run(conn, SLOW.format(seconds))
    yield
    run(conn, before)


def order_of(
    cluster: Cluster, conns: list[Conn], tasks: dict[int, int], groups: dict[int, int], **options: Any
) -> list[int]:
    """Of which nodes tasks are that begin one after the other: so many of so many groups of each."""
    app, order = fairq.App(), list[int]()

    @app.task
    async def looks(payload: Any, ctx: fairq.Context) -> None:
        order.append(ctx.id >> 48)

    for node, count in groups.items():
        names = groups_of(conns[0], node, count)
        items = [(names[number % count], None) for number in range(tasks[node])]
        fairq.enqueue_many(conns[0], items, kind="looks")
    with worker_thread(app, **options):
        wait_until(lambda: len(order) == sum(tasks.values()), "all have run")
        wait_until(lambda: sum(waiting(conns)) == 0, "and ended")
    for conn in conns:
        assert_sound(conn)
    return order


def test_groups_have_the_same_share_whatever_node_they_are_on(cluster: Cluster, conns: list[Conn]) -> None:
    """One with two groups, and one with eight: while both have work, a group has one task in ten."""
    order = order_of(
        cluster, conns, {1: 200, 2: 200}, {1: 2, 2: 8}, dsn=cluster.dsn(0), concurrency=4, listen=False
    )
    both = order[: len(order) - next(n for n, node in enumerate(reversed(order)) if node != order[-1])]
    ended = both.index(order[-1]) if order[-1] not in both else len(both)
    first, second = (both[:ended].count(node) for node in (1, 2))
    assert second == 200
    assert abs(first - 200 / 8 * 2) <= 2 * (2 * 4 + 1), (first, second)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_node_that_takes_long_for_each_turn_is_served_beside_the_others(
    cluster: Cluster, conns: list[Conn], slots: int
) -> None:
    """Others have filled the slots when it answers, if none were kept."""
    app, ran = fairq.App(), list[int]()

    @app.task
    async def sleeps(payload: Any, ctx: fairq.Context) -> None:
        await asyncio.sleep(0.2)
        ran.append(ctx.id >> 48)

    for node, count in ((1, 400), (2, 20)):
        fairq.enqueue_many(conns[0], [(group_of(conns[0], node), None)] * count, kind="sleeps")
    with slow(conns[2], 1.5), worker_thread(app, cluster.dsn(0), concurrency=slots):
        wait_until(lambda: ran.count(2) >= 3, "its tasks run", 60)
        assert len(ran) < 400


def test_the_near_node_is_served_first_and_the_others_with_what_it_leaves(
    cluster: Cluster, conns: list[Conn]
) -> None:
    order = order_of(
        cluster, conns, {1: 40, 2: 40}, {1: 4, 2: 4}, dsn=cluster.dsn(2), concurrency=2, nodes="near"
    )
    assert order[2:38] == [2] * 36
    assert order.count(1) == 40


def test_a_worker_of_its_own_node_leaves_the_others_alone(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int]
) -> None:
    groups = [group_of(conns[0], node) for node in (1, 2)]
    fairq.enqueue_many(conns[0], [(group, None) for group in groups], kind="count")
    with work_process(cluster.dsn(2), "--nodes", "own", "--drain") as worker:
        assert worker.wait() == 0
    assert (effects(1), effects(2)) == (0, 1)
    assert waiting(conns) == [0, 1, 0]


def test_who_comes_to_another_node_leaves_the_tasks_of_others_alone(
    cluster: Cluster, conns: list[Conn]
) -> None:
    """Its DSN names two, and the first is gone. The numbers of both workers are the first of their nodes."""
    app, ran, go = fairq.App(), list[int](), threading.Event()

    @app.task
    def waits(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.attempt)
        go.wait(20)

    cluster.everywhere("alter sequence fairq.worker_ids restart")
    cluster.migrate()
    hosts, ports = zip(*map(cluster.place, (1, 2)), strict=True)
    dsn = cluster.dsn(1, host=",".join(hosts), port=",".join(map(str, ports)))
    with (
        worker_thread(app, cluster.dsn(2), concurrency=1, nodes="own"),
        worker_thread(app, dsn, concurrency=1, nodes="own"),
    ):
        wait_until(lambda: workers(conns[1:]) == [1, 1], "each node has a worker")
        fairq.enqueue(conns[0], group_of(conns[0], 2), None, kind="waits")
        wait_until(lambda: ran == [1], "the task runs")
        cluster.servers[1].stop("immediate")
        wait_until(lambda: workers(conns[2:]) == [2], "both workers are there")
        time.sleep(0.5)
        go.set()
        wait_until(lambda: waiting(conns[2:]) == [0], "the task has ended")
        cluster.servers[1].start()
        conns[1] = cluster.connect(1)
    assert ran == [1]


def test_draining_ends_when_nothing_is_left_on_any_node(cluster: Cluster, conns: list[Conn]) -> None:
    """Handlers make work elsewhere, as late as their last moment."""
    app = fairq.App()
    groups = [group_of(conns[0], node) for node in (1, 2)]

    @app.task
    async def passes_on(payload: int) -> None:
        if payload:
            with psycopg.connect(cluster.dsn(0)) as conn:
                fairq.enqueue(conn, groups[payload % 2], payload - 1, kind="passes_on")

    fairq.enqueue(conns[0], groups[0], 6, kind="passes_on")
    drain(app, cluster.dsn(1), concurrency=2)
    assert waiting(conns) == [0, 0, 0]
    ended = "select count(*) from fairq.finished_tasks"
    assert [one(conn, ended) for conn in conns] == [0, 4, 3]
    assert workers(conns) == [0, 0, 0]


def test_draining_ends_though_work_comes_in_the_last_moment(
    cluster: Cluster, conns: list[Conn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node has ended, for nothing was left; another one looks once more and finds a task."""
    app, late = fairq.App(), list[int]()
    groups = [group_of(conns[0], node) for node in (1, 2)]
    is_done = Engine.is_done

    @app.task
    async def nothing(payload: Any) -> None: ...

    def says(engine: Engine) -> bool:
        if not is_done(engine):
            return False
        if not late:
            late.extend(fairq.enqueue_many(conns[0], [(group, None) for group in groups], kind="nothing"))
            time.sleep(1.3)  # the others are to look again by now
        return True

    monkeypatch.setattr(Engine, "is_done", says)
    worker = Worker(app, cluster.dsn(0), mode="drain", concurrency=2)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert workers(conns) == [0, 0, 0]


def test_draining_does_not_end_for_a_look_that_came_too_early(cluster: Cluster, conns: list[Conn]) -> None:
    """A handler makes work on a node while the worker waits for the answer of that one."""
    app = fairq.App()
    groups = [group_of(conns[0], node) for node in (1, 2)]
    looks = (
        "select exists (select from pg_stat_activity "
        "where application_name = 'fairq worker' and wait_event = 'PgSleep')"
    )

    @app.task
    def makes(payload: Any) -> None:
        time.sleep(3)  # until each node had nothing several times
        wait_until(lambda: not one(conns[1], looks), "it is not looked at")
        wait_until(lambda: one(conns[1], looks), "it is looked at")
        fairq.enqueue(conns[0], groups[0], None, kind="nothing")

    @app.task
    async def nothing(payload: Any) -> None: ...

    with slow(conns[1], 0.8):
        fairq.enqueue(conns[0], groups[1], None, kind="makes")
        drain(app, cluster.dsn(0), concurrency=2)
    assert waiting(conns) == [0, 0, 0]


def test_one_look_is_one_at_each_node(cluster: Cluster, conns: list[Conn]) -> None:
    app = fairq.App()

    @app.task
    async def nothing(payload: Any) -> None: ...

    groups = [group_of(conns[0], node) for node in (1, 2)]
    fairq.enqueue_many(conns[0], [(group, None) for group in groups * 2], kind="nothing")
    drain_options: dict[str, Any] = {"mode": "once", "concurrency": 3}
    Worker(app, cluster.dsn(0), **drain_options).run()
    assert sum(waiting(conns)) <= 1
    assert workers(conns) == [0, 0, 0]


def test_the_end_of_a_task_commits_with_what_its_handler_wrote_on_another_node(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int]
) -> None:
    """Its connection leads to the coordinator, wherever the task came from."""
    groups = [group_of(conns[0], node) for node in (1, 2)]
    fairq.enqueue_many(conns[0], [(group, None) for group in groups * 3], kind="once")
    with work_process(cluster.dsn(0), "-c", "4", "--drain") as worker:
        assert worker.wait() == 0, worker.output
    assert (effects(1), effects(2)) == (3, 3)
    assert run(conns[0], "select distinct attempt from effects") == [(1,)]
    assert waiting(conns) == [0, 0, 0]


def test_what_was_lost_with_its_worker_runs_alone_whatever_node_it_is_on(
    cluster: Cluster, conns: list[Conn], effects: Callable[[int], int]
) -> None:
    groups = [group_of(conns[0], node) for node in (1, 2)]
    fairq.enqueue_many(conns[0], [(group, 0.2) for group in groups * 3], kind="sleeps")
    fairq.enqueue(conns[0], groups[0], None, kind="crashes", max_attempts=3)
    with work_process(cluster.dsn(0), "-c", "8", "-p", "2", "--lease", "3") as worker:
        wait_until(lambda: waiting(conns) == [0, 0, 0], "all have ended", 60)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert lines_of(worker, "it runs alone")
    ended = "select count(*) from fairq.finished_tasks where outcome = 'succeeded'"
    assert [one(conn, ended) for conn in conns] == [0, 4, 3]


def test_a_standby_that_takes_over_a_node_is_served_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """With synchronous replication nothing that was acknowledged is lost, and no worker is started anew."""
    monkeypatch.setattr(nodes, "LOOK_SECONDS", 0.5)
    app, ran = fairq.App(), list[int]()

    @app.task
    async def nothing(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.id)

    with running_cluster() as cluster, standby(cluster.servers[2]) as other:
        wait_for_standby(cluster.servers[2])
        conn = cluster.connect(0)
        group = group_of(conn, 2)
        with worker_thread(app, cluster.dsn(1), concurrency=2, db_retry_max_ms=500):
            first = fairq.enqueue(conn, group, None, kind="nothing")
            wait_until(lambda: first in ran, "the node is served")
            cluster.servers[2].stop("immediate")
            old = cluster.place(2)
            promote(other)
            say_where(other)
            cluster.servers[2] = other
            conn.execute(
                "select citus_update_node(nodeid, %s, %s) from pg_dist_node"
                " where nodename = %s and nodeport = %s",
                [*cluster.place(2), *old],
            )
            second = fairq.enqueue(conn, group, None, kind="nothing")
            wait_until(lambda: second in ran, "and served again")
        with cluster.connect(2) as there:
            assert column(there, "select id from fairq.finished_tasks order by id") == [first, second]
            assert_sound(there)


def test_a_node_that_does_not_say_where_the_others_are_keeps_nobody_from_asking_another(
    cluster: Cluster, conns: list[Conn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(nodes, "ANSWER_SECONDS", 0.5)
    caplog.set_level(logging.INFO, "fairq.worker")
    app = fairq.App()

    @app.task
    async def nothing(payload: Any) -> None: ...

    host = cluster.place(2)[0]
    moves = "update pg_dist_node set nodename = %s where groupid = 2"
    with worker_thread(app, cluster.dsn(0), concurrency=1):
        wait_until(lambda: workers(conns) == [1, 1, 1], "each node has a worker")
        try:
            with cluster.connect(0) as other, other.transaction():
                run(other, "lock pg_dist_node")
                run(conns[1], moves, f"{host}/.")
                wait_until(lambda: f"is at {host}/." in caplog.text, "another one says it")
        finally:
            run(conns[1], moves, host)


def test_a_node_that_is_added_again_is_one_and_has_the_settings_of_the_others(
    cluster: Cluster, conns: list[Conn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Citus gives it another number then."""
    monkeypatch.setattr(nodes, "LOOK_SECONDS", 0.2)
    app, ran = fairq.App(), list[int]()

    @app.task
    async def nothing(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.id)

    cluster.start()
    cluster.add(3)
    try:
        cluster.migrate()
        fresh = cluster.connect(3)
        with worker_thread(app, cluster.dsn(0), concurrency=2):
            wait_until(lambda: workers([fresh]) == [1], "it has a worker")
            conns[0].execute("select citus_remove_node(%s, %s)", cluster.place(3))
            run(conns[0], "select fairq.configure_queue('other', '{\"max_attempts\": 7}')")
            cluster.add(3)
            cluster.migrate()
            assert one(fresh, "select max_attempts from fairq.queues where queue = 'other'") == 7
            time.sleep(2)
            local = one(fresh, "select fairq_citus.create_task('g', '{}', p_kind => 'nothing')")
            wait_until(lambda: local in ran, "its tasks run")
            assert workers([fresh]) == [1]
    finally:
        conns[0].execute("select citus_remove_node(%s, %s)", cluster.place(3))
        cluster.servers.pop().close()


def test_a_new_node_is_served_as_soon_as_it_can_be(
    cluster: Cluster, conns: list[Conn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "LOOK_SECONDS", 0.5)
    app, ran = fairq.App(), list[int]()

    @app.task
    async def nothing(payload: Any, ctx: fairq.Context) -> None:
        ran.append(ctx.id)

    with worker_thread(app, cluster.dsn(0), concurrency=2):
        wait_until(lambda: workers(conns) == [1, 1, 1], "each node has a worker")
        cluster.start()
        cluster.add(3)
        try:
            # Before it has fairq, it is left alone, and nobody else is.
            wait_until(lambda: "is not served" in caplog.text, "it is asked")
            fairq.enqueue(conns[0], group_of(conns[0], 1), None, kind="nothing")
            wait_until(lambda: len(ran) == 1, "the others are served")
            cluster.migrate()
            with cluster.connect(3) as fresh:
                wait_until(lambda: workers([fresh]) == [1], "it has a worker")
                local = one(fresh, "select fairq_citus.create_task('g', '{}', p_kind => 'nothing')")
            wait_until(lambda: local in ran, "its tasks run")
        finally:
            conns[0].execute("select citus_remove_node(%s, %s)", cluster.place(3))
            cluster.servers.pop().close()
