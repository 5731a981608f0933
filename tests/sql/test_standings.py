"""standings: how far queues have come, in rounds of their groups."""

import pytest

from tests.support.calls import Conn, create_many, one, pop, promote, register, run
from tests.support.database import Database
from tests.support.moves import set_shards
from tests.support.shards import neighbours

ROUND = 2**20


def standing(conn: Conn, *queues: str) -> list[int | None]:
    return list(one(conn, "select fairq.standings(%s)", list(queues or ["default"])))


def test_a_round_is_one_task_of_each_group(db: Conn) -> None:
    worker = register(db)
    for group in neighbours(db, "bob", "alice"):
        create_many(db, group, 20)
    promote(db)
    (before,) = standing(db)
    assert before is not None
    for rounds in range(1, 10):
        assert len(pop(db, worker, 2)) == 2
        assert standing(db) == [before + rounds * ROUND]


def test_where_nothing_is_in_line_there_is_none_and_answers_are_in_the_order_of_the_queues(db: Conn) -> None:
    run(db, "select fairq.configure_queue('mail')")
    worker = register(db, "default", "mail")
    assert standing(db, "default", "nowhere", "mail") == [None] * 3
    create_many(db, "bob", 3, queue="mail")
    pop(db, worker, 1, queue="mail")
    first, second, third = standing(db, "mail", "default", "mail")
    assert (first is not None, second, third) == (True, None, first)
    assert standing(db, "nowhere") == [None]
    pop(db, worker, 9, queue="mail")
    assert standing(db, "mail") == [None]


@pytest.mark.new_database
def test_of_several_shards_the_hindmost_counts(database: Database) -> None:
    conn = database.connect()
    set_shards(conn, 2)
    worker = register(conn)
    groups: dict[int, str] = {}
    for number in range(20):
        groups.setdefault(one(conn, "select fairq._shard_of(%s, 2)", f"g{number}"), f"g{number}")
    for group in groups.values():
        create_many(conn, group, 20)
        promote(conn)
    for shard, count in ((0, 9), (1, 4)):
        assert len(pop(conn, worker, count, shard=shard)) == count
    (hindmost,) = standing(conn)
    pop(conn, worker, 3, shard=0)
    assert standing(conn) == [hindmost]
    pop(conn, worker, 3, shard=1)
    assert standing(conn) == [(hindmost or 0) + 3 * ROUND]
