"""A call reads in several statements, and others commit between them: here, between each two of them.

A session that pops, maintains, rebuilds, configures or ends tasks is stopped after each statement that it
passes, one after the other. While it stands everybody else does what they can: they create, finish, retry,
release, cancel, pause, configure, purge and pop. Then it goes on, or rolls back. After each stop the
engine's tables agree with bodies and holders; no cap, key or rate was exceeded; in the end every task has
run once.
"""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any

import pytest

from tests.support.calls import RELEASE, Conn, Held, create_each, finish, held_by, pop, register
from tests.support.database import Database
from tests.support.invariants import assert_sound, violations
from tests.support.sessions import call_in_background, is_blocked, pid_of, result, wait_until
from tests.support.stops import GATE, install_stops, recorded

pytestmark = [pytest.mark.usefixtures("one_shard"), pytest.mark.prepared.with_args(install_stops)]

Call = Callable[[Conn], object]

# `make test` stops at every sixteenth point, `make storm` at each.
EVERY = int(os.environ.get("FAIRQ_TEST_STOPS", "16"))

# Nobody may have more in flight than this, at any moment.
MOST = """
select 'group ' || t.group_key as what, count(*) as running, 2 as most from fairq.live_tasks t
where t.worker_id is not null and t.group_key = 'capped' group by 1
union all
select 'key ' || t.concurrency_key, count(*), 1 from fairq.live_tasks t
where t.worker_id is not null and t.concurrency_key is not null group by 1
union all
select 'queue ' || t.queue, count(*), 6 from fairq.live_tasks t
where t.worker_id is not null and t.queue = 'metered' group by 1
"""


def finish_each(conn: Conn, worker: int, held: list[Held], outcomes: list[str]) -> None:
    """These outcomes in turn; what is tried again is so at once."""
    query = "select fairq.finish_tasks(%s, %s, %s, %s, p_retry_delays => %s::interval[])"
    conn.execute(
        query, [*held_by(worker, held), list(islice(cycle(outcomes), len(held))), ["0 s"] * len(held)]
    )


class Scene:
    """Two queues, a key that tasks of three groups wait for, a cap, a rate, schedules, tasks in flight."""

    def __init__(self, database: Database) -> None:
        self.conn = database.connect(autocommit=True)
        self.conn.execute("""select fairq.configure_queue('metered', '{"max_running": 6}')""")
        for settings in (
            """fairq.configure_group('default', 'capped', '{"max_running": 2}')""",
            """fairq.configure_group('default', 'rated', '{"rate_limit": 20, "rate_period": "1 second"}')""",
        ):
            self.conn.execute(f"select {settings}".encode())
        self.others = [database.connect(autocommit=True) for _ in range(10)]
        self.subject = database.connect()
        self.workers = [register(self.conn, "default", "metered") for _ in range(3)]
        self.random = Random(1)

    def prepare(self) -> None:
        """Work for everybody, some of it in flight."""
        for number in range(2):
            for group in ("a", "b", "c"):
                create_each(self.conn, group, concurrency_key="k")
            create_each(self.conn, "a", queue="metered", concurrency_key="k")
            create_each(self.conn, "capped", "capped", "rated", "rated", "free", "free")
            create_each(self.conn, "free", queue="metered")
            create_each(self.conn, "free", concurrency_key=f"own {number}", priority=number)
        self.conn.execute(
            "select fairq.create_task('late', '{}', p_run_at => clock_timestamp() + interval '20 ms')"
        )
        self.conn.execute(
            "select fairq.create_task('old', '{}', p_expires_at => clock_timestamp() + interval '20 ms')"
        )
        self.held = pop(self.conn, self.workers[0], 6)
        self.waiting = [
            row[0]
            for row in self.conn.execute(
                "select id from fairq.live_tasks where worker_id is null order by id"
            )
        ]

    def interferences(self) -> list[Call]:
        """What others do meanwhile, each in a session of its own."""
        held, waiting, worker = self.held, self.waiting, self.workers

        def keyed(conn: Conn) -> None:
            with conn.transaction():
                create_each(conn, "d", "a", concurrency_key="k")
                create_each(conn, "d", concurrency_key=f"new {self.random.random()}")

        def ends(conn: Conn) -> None:
            finish(conn, worker[0], held[::3])
            finish_each(conn, worker[0], held[1::3], ["retry"])

        return [
            keyed,
            lambda conn: create_each(conn, "capped", "free", "new"),
            ends,
            lambda conn: conn.execute(
                RELEASE,
                held_by(worker[0], held[2::3]),
            ),
            lambda conn: [conn.execute("select fairq.cancel_task(%s)", [one]) for one in waiting[::4]],
            lambda conn: conn.execute("select fairq.pause_group('default', 'b')"),
            lambda conn: conn.execute(
                """select fairq.configure_group('default', 'capped', '{"max_running": 1}')"""
            ),
            lambda conn: conn.execute("select fairq.purge_group('default', 'c')"),
            lambda conn: pop(conn, worker[1], 3),
            lambda conn: pop(conn, worker[1], 3, queue="metered"),
        ]

    def check_limits(self) -> None:
        over = [row for row in self.conn.execute(MOST.encode()).fetchall() if row[1] > row[2]]
        assert not over, over
        wrong = violations(self.conn)
        assert not wrong, wrong

    def run(self, subject: Call, stop: str | None, rolls_back: bool) -> None:
        """`subject` up to the stop, what the others do, and the rest of it."""
        others = self.interferences()
        chosen = self.random.sample(range(len(others)), 5)
        self.conn.execute("select pg_advisory_lock(%s)", [GATE])
        self.subject.execute("select set_config('stops.at', %s, false)", [stop or ""])
        self.subject.commit()

        def whole() -> None:
            with self.subject.transaction(force_rollback=rolls_back):
                subject(self.subject)

        under_way = call_in_background(whole)
        self.wait_for(under_way, self.subject)
        calls = []
        for number in chosen:
            conn = self.others[number]
            call = call_in_background(partial(others[number], conn))
            self.wait_for(call, conn)
            calls.append(call)
        self.check_limits()
        self.conn.execute("select pg_advisory_unlock(%s)", [GATE])
        result(under_way)
        for call in calls:
            result(call)
        self.check_limits()
        assert_sound(self.conn)

    def wait_for(self, call: "Future[Any]", conn: Conn) -> None:
        """The call is over, or waits for somebody."""
        wait_until(lambda: call.done() or is_blocked(self.conn, pid_of(conn)), "it went on")

    def finish_all(self) -> None:
        """Whatever waits runs once, and nothing is left."""
        self.conn.execute("select fairq.resume_group('default', 'b')")
        self.conn.execute("""select fairq.configure_group('default', 'capped', '{"max_running": 2}')""")

        def nothing_is_left() -> bool:
            for worker in self.workers:
                for queue in ("default", "metered"):
                    pop(self.conn, worker, 20, queue=queue)
                self.check_limits()
                held = self.conn.execute(
                    "select id, attempt, '' from fairq.held where worker_id = %s", [worker]
                ).fetchall()
                finish(self.conn, worker, [Held(*row) for row in held])
            row = self.conn.execute("select count(*) from fairq.tasks").fetchone()
            return row == (0,)

        wait_until(nothing_is_left, "every task has run")
        assert_sound(self.conn)
        query = "select id, group_key, outcome, error from fairq.finished_tasks"
        ended = self.conn.execute(query).fetchall()
        assert max(Counter(row[0] for row in ended).values()) == 1
        # A retry that would come after its task has expired fails.
        right = ("succeeded", "cancelled", "expired")
        assert not [row for row in ended if row[2] not in right and row[1:3] != ("old", "failed")]


def popping(scene: Scene) -> Call:
    return lambda conn: pop(conn, scene.workers[2], 4)


def popping_metered(scene: Scene) -> Call:
    return lambda conn: pop(conn, scene.workers[2], 4, queue="metered")


def keeping_house(scene: Scene) -> Call:
    return lambda conn: conn.execute("select fairq.maintain()")


def rebuilding(scene: Scene) -> Call:
    return lambda conn: conn.execute("select fairq.rebuild('default')")


def ending(scene: Scene) -> Call:
    return lambda conn: finish_each(conn, scene.workers[0], scene.held, ["succeeded", "retry"])


def configuring(scene: Scene) -> Call:
    def call(conn: Conn) -> None:
        conn.execute("""select fairq.configure_group('default', 'free', '{"max_running": 1}')""")
        conn.execute("""select fairq.configure_group('default', 'free', '{"max_running": null}')""")

    return call


SUBJECTS: dict[str, Callable[[Scene], Call]] = {
    "pop": popping,
    "pop of a queue with a cap": popping_metered,
    "maintain": keeping_house,
    "rebuild": rebuilding,
    "finish": ending,
    "configure": configuring,
}


@pytest.mark.parametrize("rolls_back", [False, True], ids=["commits", "rolls back"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_between_any_two_statements_everybody_may_do_anything(
    database: Database, name: str, rolls_back: bool
) -> None:
    scene = Scene(database)
    scene.prepare()
    with recorded(scene.subject) as points:
        SUBJECTS[name](scene)(scene.subject)
        scene.subject.rollback()
    assert len(points) >= 8
    scene.finish_all()
    for point in points[int(rolls_back) * (EVERY // 2) :: EVERY]:
        scene.prepare()
        try:
            scene.run(SUBJECTS[name](scene), point, rolls_back)
            scene.finish_all()
        except BaseException as exc:
            exc.add_note(f"stopped at {point}")
            raise
