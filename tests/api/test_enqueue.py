"""Enqueue in the caller's transaction, on every kind of connection."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

import fairq
from fairq import testing
from fairq.connections import run
from fairq.queries import client
from tests.api.kinds import Opened
from tests.support.calls import Conn

COUNT = "select count(*) from fairq.tasks where group_key = %s"
LEVELS: dict[str, LiteralString] = {
    "read committed": "set transaction isolation level read committed",
    "repeatable read": "set transaction isolation level repeatable read",
    "serializable": "set transaction isolation level serializable",
}


def count(observer: psycopg.Connection[Any], group: str) -> int:
    row = observer.execute(COUNT, [group]).fetchone()
    assert row is not None
    return int(row[0])


def enqueue(opened: Opened, group: str, payload: Any = None, **options: Any) -> int:
    return int(opened.finish(fairq.enqueue(opened.conn, group, payload, **options)))


@pytest.mark.parametrize("level", LEVELS)
def test_a_task_appears_with_the_commit_and_not_before(
    opened: Opened, observer: psycopg.Connection[Any], group: str, level: str
) -> None:
    """S33, I1, I2: in every isolation level."""
    opened.do(LEVELS[level])
    id = enqueue(opened, group, {"file": "a.pdf"})
    ids = opened.finish(fairq.enqueue_many(opened.conn, [(group, 1), (group, 2)]))
    assert opened.value("select current_setting('transaction_isolation')") == level
    assert count(observer, group) == 0
    opened.commit()
    assert observer.execute(
        "select id from fairq.tasks where group_key = %s order by id", [group]
    ).fetchall() == [(each,) for each in (id, *ids)]


def test_a_rollback_leaves_nothing(opened: Opened, observer: psycopg.Connection[Any], group: str) -> None:
    """I1."""
    enqueue(opened, group)
    opened.finish(fairq.enqueue_many(opened.conn, [(group, 1)] * 3))
    opened.rollback()
    opened.commit()
    assert count(observer, group) == 0


def test_a_savepoint_takes_back_what_came_after_it(
    opened: Opened, observer: psycopg.Connection[Any], group: str
) -> None:
    """I1."""
    enqueue(opened, group, "before")
    opened.do("savepoint here")
    enqueue(opened, group, "inside")
    opened.do("rollback to savepoint here")
    enqueue(opened, group, "after")
    opened.commit()
    found = observer.execute("select payload from fairq.tasks where group_key = %s order by id", [group])
    assert found.fetchall() == [("before",), ("after",)]


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_of_the_engine_is_ours_and_keeps_the_databases_own(opened: Opened, level: str) -> None:
    """The transaction is then as PostgreSQL leaves it: only a rollback helps."""
    opened.do(LEVELS[level])
    with pytest.raises(fairq.UnknownQueue) as caught:
        enqueue(opened, "bob", queue="nowhere")
    assert caught.value.sqlstate == "QF003"
    assert "configure_queue" in (caught.value.hint or "")
    assert caught.value.__cause__ is not None
    assert not isinstance(caught.value.__cause__, fairq.FairqError)
    opened.rollback()
    assert enqueue(opened, "bob") > 0


def test_an_aborted_transaction_is_named_as_such(opened: Opened) -> None:
    with pytest.raises(fairq.UnknownQueue):
        enqueue(opened, "bob", queue="nowhere")
    opened.after_error()
    with pytest.raises(fairq.TransactionAborted):
        enqueue(opened, "bob")
    opened.rollback()


def test_a_savepoint_survives_an_error_of_the_engine(
    opened: Opened, observer: psycopg.Connection[Any], group: str
) -> None:
    enqueue(opened, group, "before")
    opened.do("savepoint here")
    with pytest.raises(fairq.UnknownQueue):
        enqueue(opened, group, queue="nowhere")
    opened.after_error()
    opened.do("rollback to savepoint here")
    opened.commit()
    assert count(observer, group) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"group_key": ""}, fairq.InvalidGroupKey),
        ({"group_key": None}, fairq.InvalidGroupKey),
        ({"group_key": "x" * 501}, fairq.InvalidGroupKey),
        ({"group_key": "nul\0"}, fairq.InvalidGroupKey),
        ({"group_key": "half \ud800"}, fairq.InvalidGroupKey),
        ({"payload": {"a": [0, object()]}}, fairq.InvalidPayload),
        ({"payload": {"a": "\0"}}, fairq.InvalidPayload),
        ({"payload": {"a": "\udfff"}}, fairq.InvalidPayload),
        ({"payload": float("nan")}, fairq.InvalidPayload),
        ({"headers": {"a": float("inf")}}, fairq.InvalidPayload),
        ({"queue": ""}, fairq.InvalidName),
        ({"kind": ""}, fairq.InvalidName),
        ({"idempotency_key": ""}, fairq.InvalidName),
        ({"unique": "waiting"}, fairq.InvalidName),
        ({"unique": "always", "idempotency_key": "k"}, fairq.InvalidName),
        ({"unique": True, "idempotency_key": "k"}, fairq.InvalidName),
        ({"concurrency_key": "x" * 501}, fairq.InvalidName),
        ({"priority": 1_000_001}, fairq.OutOfRange),
        ({"priority": 1.5}, fairq.OutOfRange),
        ({"priority": True}, fairq.OutOfRange),
        ({"max_attempts": 0}, fairq.OutOfRange),
        ({"cost": 0}, fairq.InvalidCost),
        ({"cost": float("nan")}, fairq.InvalidCost),
        ({"cost": "1"}, fairq.InvalidCost),
        ({"cost": 10**400}, fairq.InvalidCost),
        ({"timeout": 10**400}, fairq.InvalidTime),
        ({"run_at": datetime(2030, 1, 1)}, fairq.InvalidTime),
        ({"run_at": timedelta(seconds=-1)}, fairq.InvalidTime),
        ({"delay": -1}, fairq.InvalidTime),
        ({"delay": "1 minute"}, fairq.InvalidTime),
        ({"delay": 1, "run_at": timedelta(seconds=1)}, fairq.InvalidTime),
        ({"group_key": 1.5}, fairq.InvalidGroupKey),
        ({"group_key": True}, fairq.InvalidGroupKey),
        ({"expires_at": "tomorrow"}, fairq.InvalidTime),
        ({"timeout": 0}, fairq.InvalidTime),
        ({"timeout": timedelta(seconds=-1)}, fairq.InvalidTime),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(
    db: psycopg.Connection[Any], change: dict[str, Any], error: type[fairq.Refused]
) -> None:
    """The transaction stays usable, and the engine would have refused it with the same exception."""
    arguments: dict[str, Any] = {"group_key": "bob", "payload": {}, **change}
    with pytest.raises(error) as caught:
        fairq.enqueue(db, **arguments)
    assert caught.value.__cause__ is None
    assert db.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert fairq.enqueue(db, "bob") > 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"group_key": ""}, fairq.InvalidGroupKey),
        ({"group_key": "x" * 501}, fairq.InvalidGroupKey),
        ({"group_key": "ä" * 251}, fairq.InvalidGroupKey),
        ({"kind": ""}, fairq.InvalidName),
        ({"kind": "x" * 201}, fairq.InvalidName),
        ({"idempotency_key": ""}, fairq.InvalidName),
        ({"concurrency_key": "x" * 501}, fairq.InvalidName),
        ({"priority": 1_000_001}, fairq.OutOfRange),
        ({"priority": -1_000_001}, fairq.OutOfRange),
        ({"max_attempts": 0}, fairq.OutOfRange),
        ({"max_attempts": 1_000_001}, fairq.OutOfRange),
        ({"cost": 0.0}, fairq.InvalidCost),
        ({"cost": 1_000_001.0}, fairq.InvalidCost),
        ({"cost": float("nan")}, fairq.InvalidCost),
        ({"timeout": 0}, fairq.InvalidTime),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_the_engine_refuses_the_same_with_the_same_exception(
    db: psycopg.Connection[Any], change: dict[str, Any], error: type[fairq.Refused]
) -> None:
    """Python's checks only come earlier; what is just within the limits passes both."""
    with pytest.raises(error):
        fairq.enqueue(db, **{"group_key": "bob", "payload": {}, **change})
    given: dict[str, Any] = {
        "group_key": "bob",
        "payload": "{}",
        "queue": "default",
        "kind": "k",
        "priority": 0,
    }
    given |= {"cost": 1.0, **change}
    if "timeout" in change:
        given["timeout"] = f"{change['timeout']} seconds"
    with pytest.raises(error) as caught:
        run(db, client.enqueue.call(**given))
    assert caught.value.__cause__ is not None
    db.rollback()


def test_values_just_within_the_limits_are_accepted(db: psycopg.Connection[Any]) -> None:
    for options in (
        {"group_key": "ä" * 250},
        {"kind": "x" * 200, "idempotency_key": "x" * 500, "concurrency_key": "y" * 500},
        {"priority": 1_000_000, "max_attempts": 1_000_000, "cost": 1_000_000},
        {"priority": -1_000_000, "max_attempts": 1, "cost": 0.001, "timeout": 1e-6},
        {"timeout": 1e9},
    ):
        arguments: dict[str, Any] = {"group_key": "bob", **options}
        assert fairq.enqueue(db, **arguments) > 0


def test_a_payload_over_the_limit_is_refused_by_the_engine(db: psycopg.Connection[Any]) -> None:
    db.execute("""select fairq.configure_cluster('{"payload_limit": 1000}')""")
    with pytest.raises(fairq.InvalidPayload, match="more than 1000 bytes") as caught:
        fairq.enqueue(db, "bob", "x" * 2000)
    assert not isinstance(caught.value, fairq.NotEncodable)
    assert "configure_cluster" in (caught.value.hint or "")


def test_every_option_arrives(opened: Opened, observer: Conn, group: str) -> None:
    at = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    enqueue(
        opened,
        group,
        {"file": "ä 🙂.pdf", "n": 10**30},
        kind="parse",
        priority=7,
        run_at=at,
        expires_at=at + timedelta(days=1),
        max_attempts=9,
        cost=2.5,
        timeout=timedelta(seconds=90, microseconds=5),
        idempotency_key="once",
        concurrency_key="printer",
        headers={"trace": "abc"},
    )
    opened.commit()
    row = observer.execute(
        """
        select t.kind, t.priority, t.run_at = '2040-01-02 03:04:05.678901+00',
          t.expires_at = '2040-01-03 03:04:05.678901+00', t.max_attempts, t.cost,
          extract(epoch from t.timeout)::text, t.idempotency_key, t.concurrency_key,
          t.headers ->> 'trace', t.payload ->> 'file', t.payload ->> 'n', t.scheduled
        from fairq.tasks t where t.group_key = %s""",
        [group],
    ).fetchall()
    assert row == [
        (
            "parse",
            7,
            True,
            True,
            9,
            2.5,
            "90.000005",
            "once",
            "printer",
            "abc",
            "ä 🙂.pdf",
            str(10**30),
            True,
        )
    ]


def test_times_do_not_depend_on_the_settings_of_the_session(
    opened: Opened, observer: Conn, group: str
) -> None:
    opened.do("set local datestyle = 'SQL, DMY'")
    opened.do("set local intervalstyle = 'sql_standard'")
    opened.do("set local timezone = 'Asia/Kathmandu'")
    at = datetime(2040, 2, 1, 12, tzinfo=UTC)
    enqueue(opened, group, run_at=at, timeout=1.5)
    opened.commit()
    found = observer.execute(
        "select t.run_at = '2040-02-01T12:00:00Z'::timestamptz, t.timeout = interval '1.5 seconds' "
        "from fairq.tasks t where t.group_key = %s",
        [group],
    ).fetchall()
    assert found == [(True, True)]


def test_a_delay_counts_from_the_databases_now(opened: Opened, observer: Conn, group: str) -> None:
    enqueue(opened, group, delay=60)
    enqueue(opened, group, run_at=timedelta(seconds=60))
    opened.finish(fairq.enqueue_many(opened.conn, [(group, {})], delay=timedelta(minutes=1)))
    opened.commit()
    found = observer.execute(
        "select t.scheduled, extract(epoch from t.run_at - t.created_at) between 59 and 60"
        " from fairq.tasks t where t.group_key = %s",
        [group],
    ).fetchall()
    assert found == [(True, True)] * 3


def test_a_delay_counts_from_where_a_test_has_put_the_clock(db: Conn) -> None:
    db.execute("set local fairq.now = '2040-01-01T00:00:00Z'")
    id = fairq.enqueue(db, "bob", delay=timedelta(days=1))
    row = db.execute("select run_at = '2040-01-02T00:00:00Z' from fairq.tasks where id = %s", [id]).fetchone()
    assert row == (True,)


def test_ids_of_tenants_become_texts(opened: Opened, observer: Conn) -> None:
    tenant = uuid.uuid4()
    number = tenant.int % 2**62
    enqueue(opened, tenant)  # type: ignore[arg-type]
    opened.finish(fairq.enqueue_many(opened.conn, [(number, {}), fairq.Item(tenant, {})]))
    opened.commit()
    names = [str(tenant), str(number)]
    found = observer.execute(
        "select group_key, count(*) from fairq.tasks where group_key = any(%s) group by group_key", [names]
    ).fetchall()
    assert dict(found) == {str(tenant): 2, str(number): 1}
    with pytest.raises(fairq.InvalidGroupKey):
        enqueue(opened, 10**200)  # type: ignore[arg-type]


def test_items_of_a_bulk_call_have_keys_costs_and_priorities_of_their_own(
    opened: Opened, observer: Conn, group: str
) -> None:
    def items() -> Iterator[tuple[str, Any] | fairq.Item]:
        yield group, {"n": 1}
        yield fairq.Item(group, {"n": 2}, priority=5, cost=2.0, concurrency_key="c")
        yield [group, {"n": 3}]  # type: ignore[misc]  # a list will do

    ids = opened.finish(fairq.enqueue_many(opened.conn, items(), priority=1, kind="bulk"))
    opened.commit()
    found = observer.execute(
        "select t.id, t.priority, t.cost, t.concurrency_key, (t.payload ->> 'n')::integer "
        "from fairq.tasks t where t.group_key = %s order by t.id",
        [group],
    ).fetchall()
    assert found == [(ids[0], 1, 1.0, None, 1), (ids[1], 5, 2.0, "c", 2), (ids[2], 1, 1.0, None, 3)]


def test_equal_idempotency_keys_give_the_same_task(opened: Opened, group: str) -> None:
    first = enqueue(opened, group, {"a": {1: "x"}.get(1)}, idempotency_key="k")
    assert enqueue(opened, group, {"a": "x"}, idempotency_key="k") == first
    items = [fairq.Item(group, {"a": "x"}, idempotency_key="k"), fairq.Item(group, 2, idempotency_key="l")]
    again = opened.finish(fairq.enqueue_many(opened.conn, items))
    assert again[0] == first != again[1]
    with pytest.raises(fairq.IdempotencyConflict):
        enqueue(opened, group, {"a": "y"}, idempotency_key="k")
    opened.rollback()


def test_enqueueing_nothing_in_bulk_is_no_error(opened: Opened) -> None:
    assert opened.finish(fairq.enqueue_many(opened.conn, [])) == []


def test_a_cancelled_task_is_gone_after_the_commit(opened: Opened, observer: Conn, group: str) -> None:
    id = enqueue(opened, group)
    opened.commit()
    assert opened.finish(fairq.cancel(opened.conn, id)) is True
    opened.commit()
    observer.execute("select fairq.promote_overflow('default')")
    assert opened.finish(fairq.cancel(opened.conn, id)) is False
    assert opened.finish(fairq.result(opened.conn, id, timeout=0)).outcome == "cancelled"


def test_no_setting_of_the_session_changes(opened: Opened, group: str) -> None:
    settings: LiteralString = (
        # Those of a language come with its first call.
        "select s.name, s.setting from pg_settings s where s.name not like 'plpgsql.%' order by s.name"
    )
    before = opened.rows(settings)
    enqueue(opened, group)
    opened.finish(fairq.enqueue_many(opened.conn, [(group, 1)]))
    assert opened.rows(settings) == before
    opened.rollback()


def test_a_bulk_call_is_one_statement_whatever_its_size(database: Any, group: str) -> None:
    """One round trip: the server executes one statement for 20,000 tasks."""
    conn = database.connect()
    statements: list[str] = []
    original = psycopg.RawCursor.execute

    def spy(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        statements.append(query)
        return original(self, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.RawCursor, "execute", spy)
        ids = fairq.enqueue_many(conn, ((group, {"n": n}) for n in range(20_000)))
    assert len(statements) == 1
    assert ids == sorted(ids)
    assert len(set(ids)) == 20_000


def test_a_wrong_item_of_a_bulk_call_is_named_by_its_place(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(fairq.NotEncodable) as caught:
        fairq.enqueue_many(db, [("bob", {}), ("bob", {"items": [1, {"file": b"x"}]})])
    assert caught.value.path == "items[1].payload.items[1].file"
    with pytest.raises(fairq.ConfigurationError, match=r"items\[0\]"):
        fairq.enqueue_many(db, ["bob"])  # type: ignore[list-item]


def test_more_than_the_server_can_take_at_once_is_refused_before_anything_is_sent(
    db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairq.client.LARGEST_CALL", 100)
    with pytest.raises(fairq.OutOfRange, match="120 bytes"):
        fairq.enqueue_many(db, [("bob", "x" * 10)] * 10)
    assert len(fairq.enqueue_many(db, [("bob", "x" * 10)] * 8)) == 8


def test_other_objects_are_no_connections(shared: Any) -> None:
    for wrong in (None, "postgresql://x", object(), fairq):
        with pytest.raises(fairq.UnsupportedConnection) as caught:
            fairq.enqueue(wrong, "bob")  # type: ignore[call-overload]
        assert isinstance(caught.value, TypeError)


def test_in_autocommit_a_task_is_there_at_once(observer: psycopg.Connection[Any], group: str) -> None:
    fairq.enqueue(observer, group)
    assert count(observer, group) == 1


@pytest.mark.parametrize(
    ("forget", "name"),
    [
        (lambda conn: fairq.enqueue(conn, "bob"), "fairq.enqueue"),
        (lambda conn: fairq.result(conn, 1), "fairq.result"),
        (lambda conn: testing.drain(conn, fairq.App()), "fairq.testing.drain"),
        (lambda conn: fairq.App().task(lambda payload: None).enqueue(conn, "bob", 1), "fairq.Task.enqueue"),
    ],
)
def test_a_forgotten_await_is_a_warning_that_names_the_function(
    observer: psycopg.Connection[Any], forget: Callable[[Any], Any], name: str
) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(observer.info.dsn) as conn:
            forget(conn)

    with pytest.warns(RuntimeWarning, match=f"coroutine '{name}' was never awaited"):
        asyncio.run(run())
