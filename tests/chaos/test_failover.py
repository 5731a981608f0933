"""The primary is killed, and its standby takes over: workers and producers find it, by a DSN that names both.

With a synchronous standby nothing that was acknowledged is lost (I1). With an asynchronous one it is: the
control that shows that this suite would see it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

import fairq
from fairq import embedded
from tests.support.invariants import assert_sound
from tests.support.server import private_server
from tests.support.sessions import wait_until
from tests.support.standby import dsn_of_both, promote, standby, stop_following, wait_for_standby
from tests.worker.running import EFFECTS, Desk, work_process


@contextmanager
def pair(**settings: embedded.Setting) -> Iterator[tuple[embedded.Server, embedded.Server]]:
    # Nobody removes the shared memory of a server that is killed, but that which is files in its folder.
    with private_server({"dynamic_shared_memory_type": "mmap", **settings}) as primary:
        with psycopg.connect(primary.dsn("fairq")) as conn:
            conn.execute(EFFECTS.encode())
        with standby(primary) as second:
            yield primary, second


@contextmanager
def desk_of(server: embedded.Server) -> Iterator[Desk]:
    with psycopg.connect(server.dsn("fairq"), autocommit=True) as conn:
        yield Desk(server.dsn("fairq"), conn)


def kill(server: embedded.Server) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running(), "the primary is dead")


class Producer(threading.Thread):
    """Enqueues one task after the other, on whichever server takes it; notes what was acknowledged."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.dsn = dsn
        self.acknowledged: list[int] = []
        self.ends = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ends.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True) as conn:
                    while not self.ends.is_set():
                        group = f"group {len(self.acknowledged) % 3}"
                        self.acknowledged.append(fairq.enqueue(conn, group, None, kind="once"))
                        time.sleep(0.005)
            except (psycopg.OperationalError, fairq.Unavailable):
                time.sleep(0.05)

    def wait_for(self, more: int) -> None:
        enough = len(self.acknowledged) + more
        wait_until(lambda: len(self.acknowledged) >= enough, f"{more} more tasks were acknowledged", 60)

    def end(self) -> set[int]:
        self.ends.set()
        self.join(20)
        return set(self.acknowledged)


def missing(desk: Desk, acknowledged: set[int]) -> set[int]:
    """What was acknowledged, and is nowhere."""
    return (
        acknowledged
        - {row[0] for row in desk.rows("select id from fairq.finished_tasks")}
        - {row[0] for row in desk.rows("select id from fairq.tasks")}
    )


def test_with_a_synchronous_standby_nothing_acknowledged_is_lost_and_workers_go_on() -> None:
    with pair() as (primary, second):
        wait_for_standby(primary)
        dsn = dsn_of_both(primary, second)
        with work_process(dsn, "-c", "4") as worker:
            worker.wait_for("slot")
            producer = Producer(dsn)
            producer.wait_for(50)
            kill(primary)
            promote(second)
            promoted = time.monotonic()
            with desk_of(second) as desk:
                before = desk.effects("once")
                desk.wait_until(lambda: desk.effects("once") > before, "the worker goes on")
                print(f"the worker goes on {time.monotonic() - promoted:.1f} s after the promotion")
                producer.wait_for(20)
                acknowledged = producer.end()
                desk.wait_until(lambda: desk.live == 0, "all is done")
                assert missing(desk, acknowledged) == set()
                # Effects and ends commit together, so each is there once.
                once = """
                    select f.id from fairq.finished_tasks f left join effects e on e.task_id = f.id
                    group by 1 having count(*) <> 1 or count(e) <> 1"""
                assert desk.rows(once) == []
                assert set(desk.outcomes()) == {"succeeded"}
                assert_sound(desk.conn)
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0


def test_with_an_asynchronous_standby_what_had_not_arrived_is_lost_and_the_rest_goes_on() -> None:
    with pair() as (primary, second):
        with desk_of(primary) as desk:
            arrived = {desk.enqueue("once") for _ in range(5)}
            desk.wait_until(
                lambda: desk.one(
                    "select bool_and(replay_lsn = pg_current_wal_lsn()) from pg_stat_replication"
                ),
                "the standby has them",
            )
            stop_following(second)
            gone = {desk.enqueue("once") for _ in range(5)}
        kill(primary)
        promote(second)
        with work_process(dsn_of_both(primary, second), "-c", "4", "--drain") as worker:
            assert worker.wait() == 0, worker.output
        with desk_of(second) as desk:
            assert missing(desk, arrived | gone) == gone
            assert {row[0] for row in desk.rows("select task_id from effects")} == arrived
