"""Queues as code: storing what an app declares."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import fairq
from tests.api.kinds import Opened
from tests.support.database import Database


@pytest.fixture
def role() -> str:
    return "fairq_admin"


def declaring(name: str) -> fairq.App:
    own = fairq.App()
    own.queue(name, max_attempts=4, group_max_running=2)

    @own.task(queue=name, max_attempts=1, timeout=timedelta(seconds=9), priority=5)
    def once(payload: Any) -> None: ...

    @own.task(queue=f"{name} too")
    def plain(payload: Any) -> None: ...

    return own


def test_an_app_installs_its_queues_and_what_its_tasks_declare(opened: Opened, shared: Database) -> None:
    name = f"mail {uuid.uuid4().hex}"
    own = declaring(name)
    assert own.queues == [name, f"{name} too"]
    for _ in range(2):
        opened.finish(own.install(opened.conn))
    assert opened.finish(fairq.configure_queue(opened.conn, name))["group_max_running"] == 2
    assert opened.finish(fairq.configure_queue(opened.conn, f"{name} too"))["max_attempts"] == 5
    opened.finish(fairq.enqueue(opened.conn, "bob", kind="once", queue=name))
    opened.finish(fairq.enqueue_many(opened.conn, [("bob", 1)], kind="plain", queue=name))
    opened.commit()
    with psycopg.connect(shared.dsn) as conn:
        rows = conn.execute(
            "select kind, max_attempts, priority, timeout from fairq.tasks where queue = %s order by id",
            [name],
        ).fetchall()
    assert rows == [("once", 1, 5, timedelta(seconds=9)), ("plain", 4, 0, None)]


def test_undeclared_queue_settings_stay_and_undeclared_kind_settings_go(
    shared: Database,
) -> None:
    name = f"mail {uuid.uuid4().hex}"
    with shared.connect() as conn:
        declaring(name).install(conn)
        fairq.configure_queue(conn, name, max_running=3, max_attempts=9)
        later = fairq.App()
        later.queue(name, max_attempts=4)
        later.task(queue=name, kind="once", cost=2)(lambda payload: None)
        later.install(conn)
        state = fairq.configure_queue(conn, name)
        assert (state["max_running"], state["max_attempts"], state["group_max_running"]) == (3, 4, 2)
        kind = fairq.configure_kind(conn, name, "once")
        nothing = {"max_attempts": None, "priority": None, "timeout": None, "owner": None}
        assert kind == {"queue": name, "kind": "once", "cost": 2.0, **nothing}


def test_queues_are_declared_once_and_with_settings_that_there_are() -> None:
    own, other = fairq.App(), fairq.App()
    assert own.queue("mail", max_attempts=3) == "mail"
    other.queue("mail")
    with pytest.raises(fairq.ConfigurationError, match="'mail' is declared twice"):
        own.queue("mail")
    with pytest.raises(fairq.ConfigurationError, match="'mail' is declared twice"):
        own.include(other)
    with pytest.raises(TypeError, match="max_atempts"):
        own.queue("docs", max_atempts=3)  # type: ignore[call-arg]
    with pytest.raises(fairq.OutOfRange, match="max_attempts"):
        own.queue("docs", max_attempts="3")  # type: ignore[arg-type]
    third = fairq.App()
    third.include(own)
    third.include(own)
    assert third.queues == ["mail"]
