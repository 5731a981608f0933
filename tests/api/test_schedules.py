"""Schedules in Python: rules, and what an app declares."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import fairq
from fairq import schedules, testing
from tests.support.calls import Conn, one, run
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "how-to" / "run-tasks-on-a-schedule.md"
AWKWARD = re.findall(r"^\| `(.+?)` \| (\S+) \| (\S+ \S+) \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)


def noon(text: str = "2030-01-01 12:00:00") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# --- What a rule means ----------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "zone", "start", "expected"), AWKWARD)
def test_awkward_dates_fire_as_the_page_says(rule: str, zone: str, start: str, expected: str) -> None:
    times = expected.split(", ")
    after = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone))
    found = fairq.preview_schedule(rule, time_zone=zone, count=len(times), after=after)
    assert [f"{tick:%m-%d %H:%M%z}" for tick in found] == times


@pytest.mark.parametrize(("rule", "zone", "start", "expected"), AWKWARD)
def test_the_next_tick_depends_on_nothing_but_the_time(
    rule: str, zone: str, start: str, expected: str
) -> None:
    """All planners get the same ticks, wherever they begin."""
    after = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    ticks = fairq.preview_schedule(rule, time_zone=zone, count=80, after=after)
    for minutes in range(0, 26 * 60, 25):
        moment = after + timedelta(minutes=minutes)
        expected_next = next((tick for tick in ticks if tick > moment), None)
        if expected_next is not None:
            assert fairq.preview_schedule(rule, time_zone=zone, count=1, after=moment) == [expected_next]


def test_the_page_has_the_awkward_dates() -> None:
    assert {zone for _, zone, _, _ in AWKWARD} == {"Europe/Berlin", "America/Santiago", "Australia/Lord_Howe"}


def test_a_plan_reaches_some_days_ahead_and_not_far_back() -> None:
    now = noon()
    daily = schedules.plan("0 3 * * *", "UTC", now, now)
    assert (len(daily), daily[0], daily[-1]) == (8, noon("2030-01-02 03:00:00"), noon("2030-01-09 03:00:00"))
    assert len(schedules.plan("* * * * *", "UTC", now, now)) == 100
    assert [tick.year for tick in schedules.plan("0 0 29 2 *", "UTC", now, now)] == [2032, 2036]
    # Of what was missed the last hundred; all of it, where it is less.
    late = schedules.plan("* * * * *", "UTC", now - timedelta(days=400), now)
    assert (len(late), late[0], late[99]) == (200, now - timedelta(minutes=99), now)
    some = schedules.plan("0 3 * * *", "UTC", now - timedelta(days=40), now)
    assert (len(some), some[0]) == (48, noon("2029-11-23 03:00:00"))


@pytest.mark.parametrize(
    ("rule", "every"),
    [("every 10s", 10), ("every 1.5 h", 5400), ("every 2d", 172800), (timedelta(minutes=1), 60)],
)
def test_rules_by_length(rule: str | timedelta, every: float) -> None:
    first, second = fairq.preview_schedule(rule, count=2, after=noon("2030-01-01 12:00:03"))
    assert (second - first).total_seconds() == every
    assert first.timestamp() % every == 0


@pytest.mark.parametrize(
    "schedule",
    [
        fairq.Schedule("every ten"),
        fairq.Schedule("* * * * * *"),
        fairq.Schedule("61 * * * *"),
        fairq.Schedule("* * * * *", time_zone="Europe/Atlantis"),
        fairq.Schedule("* * * * *", time_zone="../etc/passwd"),
        fairq.Schedule(timedelta(0)),
        fairq.Schedule(timedelta.max),
        fairq.Schedule("every 999999999999d"),
        fairq.Schedule(10),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_rules_that_say_no_time_are_refused_where_they_are_declared(schedule: fairq.Schedule) -> None:
    def handler(payload: Any) -> None: ...

    declare = fairq.App().task(schedule=schedule)
    with pytest.raises(fairq.InvalidSchedule):
        declare(handler)


# --- What an app declares -------------------------------------------------------------------------


def shop() -> fairq.App:
    app = fairq.App(name="shop")

    @app.task(kind="night", schedule=fairq.Schedule("0 3 * * *", "bob", {"n": 1}, time_zone="Europe/Berlin"))
    def night(payload: dict[str, int], ctx: fairq.Context) -> None:
        assert ctx.scheduled_for is not None

    app.schedule(
        "often", night, fairq.Schedule("every 10s", payload={"n": 2}, missed="skip", spread=5, priority=1)
    )
    return app


def test_install_declares_schedules_and_plans_them(db: Conn) -> None:
    shop().install(db)
    query = "select name, group_key, owner, cron, time_zone, kind, payload from fairq.schedules order by 1"
    assert run(db, query) == [
        ("night", "bob", "shop", "0 3 * * *", "Europe/Berlin", "night", {"n": 1}),
        ("often", "system", "shop", None, "UTC", "night", {"n": 2}),
    ]
    query = "select every, spread, missed, priority from fairq.schedules order by name"
    often = (timedelta(seconds=10), timedelta(seconds=5), "skip", 1)
    assert run(db, query) == [(None, None, "last", None), often]
    query = (
        "select cardinality(ticks) between 8 and 9, fire_at = ticks[1] from fairq.schedules where cron <> ''"
    )
    assert run(db, query) == [(True, True)]
    before = run(db, "select s.*, s.xmin from fairq.schedules s order by name")
    shop().install(db)
    assert run(db, "select s.*, s.xmin from fairq.schedules s order by name") == before


def test_another_deployment_deletes_nothing_and_another_app_is_refused(db: Conn) -> None:
    shop().install(db)
    newer = fairq.App(name="shop")

    @newer.task(kind="night", schedule="every 1h")
    def night(payload: None) -> None: ...

    newer.install(db)
    assert one(db, "select count(*) from fairq.schedules") == 3
    other = fairq.App(name="mail")
    other.include(shop())
    with pytest.raises(fairq.InvalidSchedule), db.transaction():
        other.install(db)
    nameless = fairq.App()
    nameless.task(kind="mine", schedule="every 1h")(lambda payload: None)
    nameless.install(db)
    before = run(db, "select s.* from fairq.schedules s order by name, group_key")
    nameless.schedule("often", nameless["mine"], fairq.Schedule("every 1h"))
    with pytest.raises(fairq.InvalidSchedule), db.transaction():
        nameless.install(db)
    assert run(db, "select s.* from fairq.schedules s order by name, group_key") == before


def test_a_schedule_is_declared_once_and_its_payload_fits(db: Conn) -> None:
    app = shop()
    with pytest.raises(fairq.ConfigurationError):
        app.schedule("often", app["night"], fairq.Schedule("every 5s", payload={"n": 1}))
    with pytest.raises(fairq.NotEncodable):
        app.schedule("other", app["night"], fairq.Schedule("every 5s", payload={"n": "one"}))


def test_a_schedule_at_run_time(db: Conn) -> None:
    night = shop()["night"]
    state = night.schedule(db, fairq.Schedule("0 3 * * *", "alice", {"n": 1}, spread=3600), "alice's")
    assert state["next_tick"] is not None
    assert state["next_tick"].hour == 3
    assert state["fire_at"] is not None
    stored = run(db, "select next_tick, fire_at from fairq.schedules where name = 'alice''s'")
    assert stored == [(state["next_tick"], state["fire_at"])]

    state = fairq.configure_schedule(db, "alice's", "alice", missed="all", headers={"a": 1}, payload=[1])
    assert (state["missed"], state["headers"], state["cron"]) == ("all", {"a": 1}, "0 3 * * *")
    assert fairq.pause_schedule(db, "alice's") == 1
    assert fairq.resume_schedule(db, "alice's", "alice") == 1
    (id_,) = fairq.run_schedule(db, "alice's")
    assert one(db, "select payload from fairq.tasks where id = %s", id_) == [1]
    assert fairq.remove_schedule(db, "alice's") == 1
    with pytest.raises(fairq.UnknownSchedule):
        fairq.remove_schedule(db, "alice's")


def test_plans_that_are_due_are_renewed_and_the_impossible_is_noted(db: Conn) -> None:
    for group, cron, zone in (
        ("bob", "0 3 * * *", "UTC"),
        ("alice", "61 3 * * *", "UTC"),
        ("carol", "0 3 * * *", "Atlantis"),
    ):
        settings = json.dumps({"cron": cron, "time_zone": zone})
        run(db, "select fairq.configure_schedule('s', %s, %s)", group, settings)
    assert schedules.plan_due(db) == 3
    assert schedules.plan_due(db) == 0
    found = run(db, "select group_key, problem is null, fire_at is null from fairq.schedules order by 1")
    assert found == [("alice", False, True), ("bob", True, False), ("carol", False, True)]


def test_a_handler_is_told_the_tick() -> None:
    ctx = testing.context(headers={"scheduled_for": "2030-01-01T12:00:10.000000+00:00"})
    assert ctx.scheduled_for == noon("2030-01-01 12:00:10")
    assert testing.context().scheduled_for is None
