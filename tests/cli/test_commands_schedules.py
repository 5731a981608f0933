"""`fairq schedules`, and schedules in `fairq doctor` and `fairq maintain`."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from fairq.commands import doctor
from fairq.queries import doctor as queries
from tests.cli.running import answer, as_role, fairq, ok
from tests.support.calls import one, run
from tests.support.database import Database

CRON = ("--cron", "0 3 * * *", "--time-zone", "Europe/Berlin")


def test_a_schedule_from_its_creation_to_its_end(database: Database) -> None:
    assert "No schedules" in ok(database, "schedules")
    headers = ("--headers", '{"a": 1}', "--payload", '{"n": 1}')
    created = answer(
        database, "schedules", "create", "s", "--group", "bob", *CRON, *headers, "--kind", "report"
    )
    assert (created["cron"], created["kind"], created["last_state"]) == ("0 3 * * *", "report", None)
    assert answer(database, "schedules", "create", "s", "--group", "alice", "--every", "1h")["every"] == 3600
    assert fairq(database, "schedules", "create", "s", "--group", "bob", *CRON).exit_code == 1

    found = answer(database, "schedules")["schedules"]
    assert {(each["name"], each["group_key"]) for each in found} == {("s", "alice"), ("s", "bob")}
    assert len(answer(database, "schedules", "--group", "bob")["schedules"]) == 1
    assert "0 3 * * * Europe/Berlin" in ok(database, "schedules")

    times = answer(database, "schedules", "preview", "s", "--group", "bob", "--count", "3")["times"]
    assert [at[11:16] for at in times] == ["03:00"] * 3
    assert (
        times[0]
        == datetime.fromisoformat(created["fire_at"])
        .astimezone(datetime.fromisoformat(times[0]).tzinfo)
        .isoformat()
    )

    assert answer(database, "schedules", "set", "s", "--group", "alice", "--spread", "10m")["spread"] == 600
    ok(
        database,
        "schedules",
        "set",
        "s",
        "--group",
        "bob",
        "--every",
        "5m",
        "--reset",
        "cron",
        "--reset",
        "headers",
    )
    assert answer(database, "schedules", "pause", "s")["schedules"] == 2
    assert "paused" in ok(database, "schedules")
    assert answer(database, "schedules", "resume", "s", "--group", "bob")["schedules"] == 1
    (task,) = answer(database, "schedules", "run", "s", "--group", "bob")["ids"]
    with database.connect() as conn:
        stored = run(
            conn, "select kind, headers - 'scheduled_for', payload from fairq.tasks where id = %s", task
        )
    assert stored == [("report", {"schedule": "s"}, {"n": 1})]
    assert answer(database, "schedules", "remove", "s")["schedules"] == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["create", "s", "--group", "bob", "--cron", "61 * * * *"], 1),
        (["create", "s", "--group", "bob"], 1),
        (["create", "s", "--group", "bob", "--every", "1s", "--payload", "{"], 2),
        (["create", "s", "--every", "1s"], 2),
        (["set", "s", "--group", "bob", "--every", "1s"], 1),
        (["set", "s", "--group", "bob"], 2),
        (["preview"], 2),
        (["preview", "s"], 1),
        (["preview", "--cron", "* * * *"], 1),
        *[([verb, "s"], 1) for verb in ("pause", "resume", "run", "remove")],
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_reported(database: Database, arguments: list[str], code: int) -> None:
    done = fairq(database, "schedules", *arguments)
    assert done.exit_code == code, done.output
    assert done.stderr.startswith("fairq: ")


def test_rights(database: Database) -> None:
    ok(as_role(database, "fairq_admin"), "schedules", "create", "s", "--group", "bob", *CRON)
    ok(as_role(database, "fairq_observe"), "schedules")
    ok(as_role(database, "fairq_observe"), "schedules", "preview", "s")
    assert fairq(as_role(database, "fairq_work"), "schedules", "pause", "s").exit_code == 3


def test_maintain_plans_and_fires(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        run(conn, """select fairq.configure_schedule('s', 'bob', '{"cron": "* * * * *", "missed": "all"}')""")
        run(conn, "update fairq.schedules set done_until = now() - interval '3 minutes'")
        assert answer(as_role(database, "fairq_work"), "maintain")["done"]["fired"] == 1
        assert one(conn, "select next_tick = last_tick + interval '1 minute' from fairq.schedules")


def test_doctor_says_when_nobody_fires_or_plans() -> None:
    well = queries.CheckSchedulesRow(2, late=0, behind=None, unplanned=0, problems=0, problem=None)
    assert doctor.judge_schedules(well).verdict == "ok"
    late = doctor.judge_schedules(replace(well, late=1, behind=timedelta(minutes=3)))
    assert (late.verdict, late.text) == ("wrong", "1 schedule late, by up to 3 min: nobody fires them")
    assert doctor.judge_schedules(replace(well, unplanned=1)).verdict == "wrong"
    odd = doctor.judge_schedules(replace(well, problems=2, problem="s of bob: Bad minute"))
    assert (odd.verdict, odd.text) == ("look", "s of bob: Bad minute; and 1 more")


def test_doctor_finds_what_is_late(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        run(conn, """select fairq.configure_schedule('s', 'bob', '{"every": 1}')""")
        run(conn, """select fairq.configure_schedule('s', 'alice', '{"cron": "* * * * *"}')""")
        found = {each.check: each for each in doctor.examine(database.dsn, None)}
        assert found["schedules"].verdict == "ok"
        run(conn, "update fairq.schedules set fire_at = now() - interval '2 minutes' where every is not null")
        found = {each.check: each for each in doctor.examine(database.dsn, None)}
        assert "1 schedule late" in found["schedules"].text
        run(conn, "delete from fairq.schedules where every is not null")
        run(conn, "update fairq.schedules set plan_at = now() - interval '2 minutes'")
        found = {each.check: each for each in doctor.examine(database.dsn, None)}
        assert "not planned" in found["schedules"].text
