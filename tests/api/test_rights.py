"""The roles of sql/grants.sql allow what they are meant for, and no more."""

from typing import Any, LiteralString

import psycopg
import pytest

import fairq
from fairq import testing

app = fairq.App()


@app.task(store_result=True)
def double(payload: int, ctx: fairq.Context) -> int:
    return payload * 2


def become(conn: psycopg.Connection[Any], role: LiteralString) -> None:
    conn.execute("set local role " + role)


def test_an_application_enqueues_cancels_and_reads_results(db: psycopg.Connection[Any]) -> None:
    become(db, "fairq_enqueue")
    id = double.enqueue(db, "bob", 4, idempotency_key="k", headers={"trace": 1})
    double.enqueue_many(db, [("bob", 1), fairq.Item("alice", 2, idempotency_key="l", priority=3)])
    assert fairq.cancel(db, id + 1) is True
    become(db, "fairq_work")
    testing.drain(db, app)
    become(db, "fairq_enqueue")
    assert fairq.result(db, id, timeout=0).value() == 8
    assert fairq.progress(db, id) is None


def test_an_application_may_not_pop_nor_read_payloads(db: psycopg.Connection[Any]) -> None:
    become(db, "fairq_enqueue")
    double.enqueue(db, "bob", 4)
    with pytest.raises(fairq.NotAllowed), db.transaction():
        testing.drain(db, app)
    with pytest.raises(fairq.NotAllowed) as caught, db.transaction():
        testing.enqueued(db)
    assert caught.value.sqlstate == "42501"
    assert "fairq_enqueue" in (caught.value.hint or "")


def test_a_worker_ends_a_task_in_a_transaction_of_its_own(db: psycopg.Connection[Any]) -> None:
    """`finish_in` needs no more rights than the worker."""
    own = fairq.App()

    @own.task
    def ends(payload: None, ctx: fairq.Context) -> None:
        ctx.finish_in(db)

    become(db, "fairq_work")
    ends.enqueue(db, "bob", None)
    (ran,) = testing.drain(db, own)
    assert ran.outcome == "succeeded"
    become(db, "fairq_admin")
    assert testing.enqueued(db) == []


def test_a_role_without_rights_is_told_which_to_ask_for(db: psycopg.Connection[Any]) -> None:
    become(db, "pg_monitor")
    with pytest.raises(fairq.NotAllowed, match="permission denied") as caught:
        fairq.enqueue(db, "bob")
    assert "fairq_enqueue" in (caught.value.hint or "")
