"""The storm, while its groups move from one number of shards to the next all the time."""

import threading
from pathlib import Path
from random import Random

import pytest

from tests.races.test_storm import drain, judge, rage
from tests.support.calls import Conn
from tests.support.database import Database
from tests.support.moves import assert_moved, begin, step
from tests.support.storm import MOST, QUEUES, SETTINGS

pytestmark = [pytest.mark.usefixtures("one_shard"), pytest.mark.new_database]


def end_move(conn: Conn, stop: threading.Event) -> None:
    while not stop.is_set() and (last := step(conn))["state"] != "done":
        if last["state"] == "waiting":
            stop.wait(0.005)


def test_a_storm_over_shards_that_come_and_go_is_accounted_for(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A key counts in each shard by itself, and groups of different shards may be pops apart.
    groups = {what: most for what, most in MOST.items() if not what.startswith("key ")}
    monkeypatch.setattr("tests.races.test_storm.MOST", groups)
    monkeypatch.setenv("FAIRQ_TEST_SHARDS", "4")
    observer, mover = database.connect(autocommit=True), database.connect(autocommit=True)
    observer.execute(f"grant pg_signal_backend to {database.logins['fairq_admin']}".encode())
    for queue in QUEUES:
        for settings in SETTINGS:
            observer.execute(settings.encode(), {"queue": queue})
    over, never = threading.Event(), threading.Event()
    failed: list[BaseException] = []
    moves: list[int] = []

    def move() -> None:
        chance = Random(3)
        try:
            while not over.is_set():
                moves.append(chance.choice([1, 2, 3, 4]))
                begin(mover, moves[-1])
                end_move(mover, over)
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        rage(database, observer, tmp_path)
    finally:
        over.set()
        thread.join(30)
    assert not failed, failed
    assert len(moves) > 2
    # Those that were killed hold tasks of groups that are to move.
    while step(mover)["state"] != "done":
        observer.execute("select fairq.maintain()")
        never.wait(0.02)
    assert_moved(observer)
    judge(observer, tmp_path, *drain(observer))
