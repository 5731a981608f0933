"""Schedules: each tick fires once, by the database's clock; see docs/decisions/0033."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.support.calls import Conn, at, call, column, create, one, pop, refused, register, run, start
from tests.support.database import Database
from tests.support.moves import set_shards

NAME = "report"


def schedule(conn: Conn, group: str = "bob", name: str = NAME, **settings: Any) -> None:
    call(conn, "configure_schedule", name, group, **settings)


def fire(conn: Conn, limit: int = 500) -> dict[str, Any]:
    said: dict[str, Any] = one(conn, "select fairq.fire_schedules(%s) - 'last'", limit)
    return said


def ticks(conn: Conn, group: str = "bob") -> list[str]:
    """What became tasks, in order: hours, minutes and seconds."""
    query = "select headers ->> 'scheduled_for' from fairq.tasks where group_key = %s order by id"
    return [each[11:19] for each in column(conn, query, group)]


def plan(conn: Conn, *times: str, group: str = "bob") -> bool:
    after = one(conn, "select done_until from fairq.schedules where group_key = %s", group)
    return bool(
        one(
            conn,
            "select fairq.plan_schedule(%s, %s, %s, %s::text[]::timestamptz[])",
            NAME,
            group,
            after,
            [f"2030-01-01 {time}+00" for time in times],
        )
    )


def stat(conn: Conn, column_: str, group: str = "bob") -> Any:
    return one(conn, f"select {column_} from fairq.schedule_stats where group_key = %s", group)  # noqa: S608


@pytest.fixture(autouse=True)
def noon(db: Conn) -> None:
    at(db, "12:00:03")


@pytest.fixture
def unsharded(db: Conn) -> None:
    """Each shard is asked for its part of the limit."""
    set_shards(db, 1)


# --- Ticks ----------------------------------------------------------------------------------------


def test_a_tick_becomes_one_task_at_its_time(db: Conn) -> None:
    """S5, S12: whoever asks how often."""
    schedule(db, every=10, payload={"n": 1}, kind="report", priority=3, concurrency_key="k", headers={"a": 1})
    assert fire(db)["fired"] == 0
    at(db, "12:00:10")
    assert [fire(db)["fired"], fire(db)["fired"]] == [1, 0]
    (task,) = run(db, "select group_key, kind, priority, concurrency_key, headers, payload from fairq.tasks")
    headers = {"a": 1, "schedule": NAME, "scheduled_for": "2030-01-01T12:00:10.000000+00:00"}
    assert task == ("bob", "report", 3, "k", headers, {"n": 1})
    assert len(pop(db, register(db))) == 1


@pytest.mark.usefixtures("unsharded")
def test_it_says_when_to_look_again(db: Conn) -> None:
    assert fire(db) == {"fired": 0, "due_in": None, "unplanned": False}
    schedule(db, every=10)
    assert fire(db)["due_in"] == 7
    schedule(db, "alice", every=4)
    assert fire(db)["due_in"] == 1
    at(db, "12:00:04.5")
    assert fire(db, 1) == {"fired": 1, "due_in": 3.5, "unplanned": False}
    at(db, "12:00:20")
    assert fire(db, 1) == {"fired": 1, "due_in": -10, "unplanned": False}


def test_what_a_kind_declares_holds(db: Conn) -> None:
    call(
        db, "configure_kind", "default", "report", max_attempts=2, priority=7, cost=0.5, timeout="30 seconds"
    )
    schedule(db, every=1, kind="report")
    at(db, "12:00:04")
    fire(db)
    query = "select max_attempts, priority, cost, timeout from fairq.tasks"
    assert run(db, query) == [(2, 7, 0.5, timedelta(seconds=30))]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("last", ["12:00:40"]), ("skip", ["12:00:40"]), ("all", ["10", "20", "30", "40"])],
)
def test_missed_ticks(db: Conn, missed: str, expected: list[str]) -> None:
    schedule(db, every=10, missed=missed)
    schedule(db, "alice", cron="* * * * *", missed=missed)
    plan(db, *(f"12:00:{each}0" for each in range(1, 6)), group="alice")
    at(db, "12:00:45")
    while fire(db)["fired"]:
        pass
    expected = [f"12:00:{each[-2:]}" for each in expected]
    assert ticks(db) == ticks(db, "alice") == expected
    assert stat(db, "last_tick") == datetime(2030, 1, 1, 12, 0, 40, tzinfo=UTC)


def test_who_skips_fires_nothing_that_is_a_minute_late(db: Conn) -> None:
    schedule(db, every=600, missed="skip")
    at(db, "12:11:01")
    assert fire(db)["fired"] == 0
    at(db, "12:20:59")
    fire(db)
    assert ticks(db) == ["12:20:00"]


def test_of_all_missed_ticks_the_last_hundred_fire(db: Conn) -> None:
    schedule(db, every=1, missed="all")
    at(db, "12:30:00")
    while fire(db)["fired"]:
        pass
    found = ticks(db)
    assert (len(found), found[0], found[-1]) == (100, "12:28:21", "12:30:00")


@pytest.mark.usefixtures("unsharded")
def test_a_call_is_bounded_and_takes_those_that_wait_longest(db: Conn) -> None:
    for group, seconds in (("bob", 7), ("alice", 5), ("carol", 6)):
        schedule(db, group, every=seconds)
    at(db, "12:00:30")
    said = [fire(db, 1) for _ in range(4)]
    assert [each["fired"] for each in said] == [1, 1, 1, 0]
    assert column(db, "select group_key from fairq.tasks order by id") == ["alice", "carol", "bob"]


def test_a_tick_that_was_planned_twice_fires_once(db: Conn) -> None:
    """Two planners, or one that is late: what is stored is what comes after the last tick, or nothing."""
    schedule(db, cron="* * * * *")
    after = one(db, "select done_until from fairq.schedules")
    assert plan(db, "12:01:00", "12:02:00")
    assert plan(db, "12:01:00", "12:02:00")
    at(db, "12:01:00")
    assert fire(db)["fired"] == 1
    stale = "select fairq.plan_schedule(%s, 'bob', %s, array['2030-01-01 12:01:00+00']::timestamptz[])"
    assert one(db, stale, NAME, after) is False
    assert fire(db)["fired"] == 0
    assert plan(db, "12:02:00")
    at(db, "12:02:00")
    fire(db)
    assert ticks(db) == ["12:01:00", "12:02:00"]


def test_plans_are_asked_for_in_time(db: Conn) -> None:
    schedule(db, cron="* * * * *", time_zone="Europe/Berlin")
    assert fire(db)["unplanned"] is True
    query = "select name, group_key, cron, time_zone, done_until = now from fairq.unplanned_schedules()"
    assert run(db, query) == [(NAME, "bob", "* * * * *", "Europe/Berlin", True)]
    plan(db, *(f"12:{minute:02}:00" for minute in range(1, 11)))
    assert fire(db)["unplanned"] is False
    # When half of it is past; and after a day, because time zones change.
    at(db, "12:06:00")
    assert fire(db)["unplanned"] is True
    far = "array['2031-01-01 00:00+00']::timestamptz[]"
    assert one(db, f"select fairq.plan_schedule('report', 'bob', done_until, {far}) from fairq.schedules")  # noqa: S608
    assert timedelta(hours=12) <= stat(db, "plan_at - fairq._now()") <= timedelta(days=1)
    assert plan(db, "23:00:00")
    # When nothing is planned any more, at once.
    at(db, "23:00:00")
    assert fire(db) == {"fired": 1, "due_in": None, "unplanned": True}


def test_what_cannot_be_planned_is_noted_and_stops_nobody(db: Conn) -> None:
    schedule(db, cron="99 * * * *")
    schedule(db, "alice", every=10)
    query = "select fairq.plan_schedule(name, group_key, done_until, '{}', 'Bad minute') from fairq.schedules"
    run(db, f"{query} where cron is not null")
    assert stat(db, "problem") == "Bad minute"
    at(db, "12:00:10")
    assert fire(db) == {"fired": 1, "due_in": 10, "unplanned": False}
    at(db, "13:00:03")
    assert fire(db)["unplanned"] is True
    assert plan(db)
    assert stat(db, "problem")


@pytest.mark.parametrize(
    "times",
    [["12:00:03"], ["12:02:00", "12:01:00"], ["12:01:00", "12:01:00"]],
    ids=["done", "falling", "twice"],
)
def test_a_plan_ascends_from_what_is_done(db: Conn, times: list[str]) -> None:
    schedule(db, cron="* * * * *")
    with refused(db, "QF009"):
        plan(db, *times)


def buffers(db: Conn) -> int:
    """Pages that a look at schedules visits."""
    for _ in range(3):
        (plan_,) = one(db, "explain (analyze, buffers, format json) select fairq.fire_schedules()")
    return int(plan_["Plan"]["Shared Hit Blocks"] + plan_["Plan"]["Shared Read Blocks"])


@pytest.mark.usefixtures("unsharded")
def test_nothing_due_costs_the_same_however_many_schedules_there_are(db: Conn) -> None:
    schedule(db, every=3600)
    before = buffers(db)
    settings = """{"every": 3600, "spread": 3600}"""
    run(db, "select fairq.configure_schedule('s', 'g' || g, %s) from generate_series(1, 1000) g", settings)
    run(db, "update fairq.schedules set plan_at = fire_at")
    assert buffers(db) <= before + 10


@pytest.mark.usefixtures("unsharded")
def test_others_wait_for_the_ticks_of_one_call_not_for_all_that_are_due(db: Conn) -> None:
    """I6, S5: "daily 00:00" of everybody, and nobody said spread."""
    run(
        db,
        """select fairq.configure_schedule('s', 'g' || g, '{"every": 5}') from generate_series(1, 250) g""",
    )
    worker = register(db, slots=1000)
    at(db, "12:00:05")
    assert one(db, "select fairq.fire_schedules()")["fired"] == 100
    mine = create(db, "alice")
    assert one(db, "select fairq.fire_schedules()")["fired"] == 100
    popped = pop(db, worker, 1000)
    assert len(popped) == 201
    assert list(map(int, popped)).index(mine) <= 100


@pytest.mark.usefixtures("unsharded")
def test_ticks_wait_for_those_of_the_call_before_to_begin(db: Conn) -> None:
    """I6, S5."""
    run(db, """select fairq.configure_schedule('s', 'g' || g, '{"every": 5}') from generate_series(1, 9) g""")
    worker = register(db)
    at(db, "12:00:05")

    def fired(after: int | None) -> tuple[int, int | None]:
        said = one(db, "select fairq.fire_schedules(4, %s)", after)
        return said["fired"], said["last"]

    count, last = fired(None)
    assert count == 4
    assert fired(last) == (0, None), "it waits in line"
    run(db, "select fairq.pop_tasks('default', 100, %s, '1 minute')", worker)
    assert fired(last) == (0, None), "it is claimed"
    start(db, worker, [last or 0])
    count, last = fired(last)
    assert count == 4
    pop(db, worker, 100)
    assert fired(last)[0] == 1


# --- Groups ---------------------------------------------------------------------------------------


def test_a_spread_gives_each_group_a_time_of_its_own(db: Conn) -> None:
    """10,000 tenants' "daily 00:00" do not ring at once."""
    share = "extract(epoch from fairq._share_of('1 hour', 'report', 'g' || g))"
    delays = [float(each) for each in column(db, f"select {share} from generate_series(1, 10000) g")]  # noqa: S608
    assert 0 <= min(delays) < max(delays) < 3600
    by_minute = [sum(minute * 60 <= each < minute * 60 + 60 for each in delays) for minute in range(60)]
    assert min(by_minute) > 100
    assert max(by_minute) < 250

    schedule(db, every=3600, spread=3600)
    delay = stat(db, "fire_at - next_tick")
    assert timedelta(0) < delay < timedelta(hours=1)
    at(db, "13:00:00")
    assert fire(db)["fired"] == 0
    run(db, "select set_config('fairq.now', (timestamptz '2030-01-01 13:00+00' + %s)::text, false)", delay)
    fire(db)
    assert ticks(db) == ["13:00:00"]


def test_what_is_declared_again_changes_nothing(db: Conn) -> None:
    """A week's interval survives a deployment a day."""
    settings: dict[str, Any] = {"every": "7 days", "payload": {"n": 1}, "owner": "shop"}
    schedule(db, **settings)
    before = run(db, "select s.*, s.xmin from fairq.schedules s")
    at(db, "18:00:00")
    schedule(db, **settings)
    assert run(db, "select s.*, s.xmin from fairq.schedules s") == before
    # The payload changes; the time does not.
    schedule(db, payload={"n": 2})
    assert run(db, "select payload, next_tick from fairq.schedules") == [({"n": 2}, before[0][4])]
    schedule(db, every=5)
    assert stat(db, "next_tick") == datetime(2030, 1, 1, 18, 0, 5, tzinfo=UTC)


def test_an_app_does_not_take_anothers(db: Conn) -> None:
    schedule(db, every=5, owner="shop")
    with refused(db, "QF017"):
        schedule(db, every=6, owner="mail")
    with refused(db, "QF017"):
        schedule(db, every=6, owner="")
    schedule(db, every=6)
    schedule(db, owner="shop")
    schedule(db, owner=None)
    schedule(db, owner="mail")
    assert stat(db, "owner") == "mail"
    schedule(db, "alice", every=6, owner="")
    assert stat(db, "owner", "alice") is None
    assert stat(db, "every") == timedelta(seconds=6)


# --- Pause, run, remove ---------------------------------------------------------------------------


def test_a_pause_is_not_made_up_for(db: Conn) -> None:
    for group in ("bob", "alice"):
        schedule(db, group, every=10, missed="all")
    schedule(db, "carol", cron="* * * * *", missed="all")
    plan(db, "12:00:10", "12:00:20", "12:01:00", group="carol")
    assert one(db, "select fairq.pause_schedule(%s)", NAME) == 3
    schedule(db, every=10)
    at(db, "12:00:35")
    assert fire(db) == {"fired": 0, "due_in": None, "unplanned": False}
    assert one(db, "select fairq.resume_schedule(%s, 'bob')", NAME) == 1
    assert one(db, "select fairq.resume_schedule(%s, 'carol')", NAME) == 1
    at(db, "12:01:00")
    while fire(db)["fired"]:
        pass
    assert ticks(db) == ["12:00:40", "12:00:50", "12:01:00"]
    assert ticks(db, "carol") == ["12:01:00"]
    assert ticks(db, "alice") == []


def test_run_now_is_beside_the_ticks(db: Conn) -> None:
    for group in ("alice", "bob"):
        schedule(db, group, every=10, payload=group)
    call(db, "pause_schedule", NAME, "bob")
    ids = column(db, "select fairq.run_schedule(%s)", NAME)
    payloads = column(db, "select payload from fairq.tasks where id = any(%s) order by payload", ids)
    assert payloads == ["alice", "bob"]
    at(db, "12:00:10")
    fire(db)
    assert ticks(db, "alice") == ["12:00:03", "12:00:10"]
    assert ticks(db) == ["12:00:03"]


def test_what_its_last_task_came_to(db: Conn) -> None:
    schedule(db, every=10)
    assert stat(db, "last_state") is None
    at(db, "12:00:10")
    fire(db)
    assert stat(db, "last_state") == "overflow"
    holder = register(db)
    (task,) = pop(db, holder)
    assert stat(db, "last_state") == "running"
    run(db, "select fairq.finish_tasks(%s, array[%s::bigint], '{1}', '{failed}')", holder, int(task))
    assert (stat(db, "last_state"), stat(db, "last_task_id")) == ("failed", task)


def test_removed_schedules_leave_their_tasks(db: Conn) -> None:
    for group in ("bob", "alice"):
        schedule(db, group, every=1)
    at(db, "12:00:04")
    fire(db)
    assert one(db, "select fairq.remove_schedule(%s, 'bob')", NAME) == 1
    assert one(db, "select fairq.remove_schedule(%s)", NAME) == 1
    assert column(db, "select count(*) from fairq.tasks") == [2]


@pytest.mark.parametrize("function", ["pause_schedule", "resume_schedule", "remove_schedule", "run_schedule"])
def test_who_is_not_there_is_an_error(db: Conn, function: str) -> None:
    schedule(db, every=1)
    with refused(db, "QF018"):
        call(db, function, NAME, "alice")


# --- Queues ---------------------------------------------------------------------------------------


def test_a_queue_that_drains_refuses_and_stops_nobody(db: Conn) -> None:
    call(db, "configure_queue", "docs")
    schedule(db, every=1, queue="docs")
    schedule(db, "alice", every=1)
    call(db, "drain_queue", "docs")
    at(db, "12:00:04")
    assert fire(db)["fired"] == 1
    assert "draining" in stat(db, "problem")
    call(db, "resume_queue", "docs")
    at(db, "12:00:05")
    assert fire(db)["fired"] == 2
    assert stat(db, "problem") is None


def test_a_schedule_has_the_rights_of_who_made_it(db: Conn) -> None:
    """The enqueue_role is asked of operators; whoever fires is a worker."""
    run(db, "create role shop")
    call(db, "configure_queue", "docs", enqueue_role="shop")
    schedule(db, every=1, queue="docs")
    at(db, "12:00:04")
    run(db, "set local role fairq_work")
    assert fire(db)["fired"] == 1


def test_maintenance_fires_too(db: Conn) -> None:
    schedule(db, every=1)
    at(db, "12:00:04")
    assert one(db, "select fairq.maintain(p_part => 'schedules')") == {"fired": 1}
    assert one(db, "select fairq.maintain(p_part => 'schedules')") == {}


def test_a_metric_says_how_late_schedules_are(db: Conn) -> None:
    lag = "select value from fairq.metrics() where name = 'fairq_schedule_lag_seconds'"
    assert one(db, lag) == 0
    schedule(db, every=10)
    schedule(db, "alice", every=20)
    assert one(db, lag) == 0
    at(db, "12:00:25")
    assert one(db, lag) == 15


def test_schedules_move_with_the_shards(db: Conn) -> None:
    for group in ("bob", "alice", "carol"):
        schedule(db, group, every=1)
    count = one(db, "select shard_count from fairq.settings")
    set_shards(db, 4 if count == 1 else 1)
    at(db, "12:00:04")
    assert fire(db)["fired"] == 3
    assert one(db, "select count(distinct group_key) from fairq.tasks") == 3


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        ("QF017", {}),
        ("QF017", {"every": 1, "cron": "* * * * *"}),
        ("QF017", {"cron": "* * * *"}),
        ("QF017", {"cron": "* * * * * *"}),
        ("QF017", {"cron": "0 0 * * *; drop"}),
        ("QF017", {"every": 1, "time_zone": "Europe/Berlin'"}),
        ("QF017", {"every": 1, "missed": "some"}),
        ("QF009", {"every": 0.5}),
        ("QF009", {"every": -1}),
        ("QF009", {"every": "1 month"}),
        ("QF009", {"every": "400 days"}),
        ("QF009", {"every": 1, "spread": -1}),
        ("QF009", {"every": 1, "spread": "400 days"}),
        ("QF003", {"every": 1, "queue": "nowhere"}),
        ("QF006", {"every": 1, "kind": ""}),
        ("QF006", {"every": 1, "concurrency_key": ""}),
        ("QF006", {"every": 1, "owner": "x" * 201}),
        ("QF007", {"every": 1, "priority": 2_000_000}),
        ("QF014", {"every": "soon"}),
        ("QF014", {"evry": 1}),
        ("QF014", {"every": 1, "headers": [1]}),
        ("QF014", {"every": 1, "next_tick": None}),
        ("QF002", {"every": 1, "payload": "x" * 1_100_000}),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
)
def test_odd_settings_are_refused(db: Conn, code: str, settings: dict[str, Any]) -> None:
    with refused(db, code):
        schedule(db, **settings)
    assert one(db, "select count(*) from fairq.schedules") == 0


def test_odd_names_are_refused(db: Conn) -> None:
    for name, group, code in (("", "bob", "QF006"), ("x" * 201, "bob", "QF006"), ("x", "", "QF001")):
        with refused(db, code):
            schedule(db, group, name, every=1)


# --- Two at once ----------------------------------------------------------------------------------


def test_a_tick_that_somebody_is_firing_is_left_to_him(database: Database) -> None:
    """S12: and when his transaction rolls back, to the next one."""
    conn, other = database.connect(), database.connect(autocommit=True)
    schedule(other, every=1)
    schedule(other, "alice", every=86400)
    run(other, "update fairq.schedules set fire_at = now(), next_tick = now() where group_key = 'bob'")
    assert fire(conn)["fired"] == 1
    said = fire(other)
    assert said["fired"] == 0
    assert said["due_in"] <= 0
    conn.rollback()
    assert fire(other)["fired"] == 1
    assert column(other, "select count(*) from fairq.tasks") == [1]


def test_who_fires_with_an_old_snapshot_is_refused_and_fires_nothing_twice(database: Database) -> None:
    conn, other = database.connect(), database.connect(autocommit=True)
    schedule(other, every=86400)
    run(other, "update fairq.schedules set fire_at = now(), next_tick = now()")
    conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert column(conn, "select count(*) from fairq.tasks") == [0]
    assert fire(other)["fired"] == 1
    with pytest.raises(psycopg.errors.SerializationFailure):
        fire(conn)
    conn.rollback()
    assert fire(conn)["fired"] == 0


def test_a_plan_and_a_change_at_once(database: Database) -> None:
    """Who planned the rule of before stores nothing."""
    conn = database.connect(autocommit=True)
    schedule(conn, cron="0 3 * * *")
    after = one(conn, "select done_until from fairq.schedules")
    schedule(conn, cron="0 4 * * *")
    late = "select fairq.plan_schedule(%s, 'bob', %s, array['2099-01-01 03:00+00']::timestamptz[])"
    assert one(conn, late, NAME, after) is False
    assert one(conn, "select next_tick from fairq.schedules") is None


@pytest.mark.parametrize(("group_key", "of"), [(None, ""), ("bob", ' of group "bob"')])
def test_a_schedule_that_is_not_there_is_named_as_it_was_asked_for(
    db: Conn, group_key: str | None, of: str
) -> None:
    with pytest.raises(psycopg.Error) as refused:
        run(db, "select fairq.run_schedule('x', %s)", group_key)
    assert refused.value.diag.message_primary == f'there is no schedule "x"{of}'
