"""`fairq shares`, and shares in `top`, `metrics` and `doctor`."""

import re
from typing import Any

import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

import fairq
from fairq.cli import main
from tests.cli.running import answer, ok
from tests.support.calls import Conn, call, create_many, run
from tests.support.database import Database
from tests.support.simulation import NOON, Simulation

pytestmark = pytest.mark.usefixtures("one_shard")


def then(database: Database, simulation: Simulation) -> str:
    """A DSN whose sessions have a simulation's current time."""
    at = f"{NOON.date()}T12:{int(simulation.now // 60):02}:{simulation.now % 60:09.6f}+00"
    return make_conninfo(database.dsn, options=f"-c fairq.now={at}")


def flood(conn: Conn) -> Simulation:
    """Bob with a flood, Alice with twice his weight, Carol under a cap of one."""
    simulation = Simulation(conn)
    call(conn, "configure_group", "default", "alice", weight=2)
    call(conn, "configure_group", "default", "carol", max_running=1)
    create_many(conn, "bob", 4000)
    create_many(conn, "alice", 1000)
    create_many(conn, "carol", 500)
    simulation.until(105)
    return simulation


def test_shares_for_people_and_for_programs(database: Database, conn: Conn) -> None:
    simulation = flood(conn)
    dsn = then(database, simulation)
    printed = ok(dsn, "shares", "--since", "1m")
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line}
    assert lines["alice"][1:3] == ["58", "%"]
    assert lines["bob"][1:3] == ["29", "%"]
    assert lines["carol"][1:3] == ["12", "%"]
    assert '\ngroup "carol": 1 tasks are in flight, the cap is 1' in printed
    assert "The order holds" in printed
    assert max(map(len, printed.splitlines())) <= 80
    found = answer(dsn, "shares", "--since", "1m")
    assert found["fairness"]["worst_debt"] <= 1
    assert [each["group_key"] for each in found["shares"]][-1] == "carol"
    shares = fairq.shares(conn, since=60)
    assert {each.group_key: each.weight for each in shares} == {"bob": 1, "alice": 2, "carol": 1}
    assert fairq.fairness(conn, "default").worst_debt == found["fairness"]["worst_debt"]


def test_an_idle_queue_has_no_shares(database: Database) -> None:
    assert ok(database, "shares") == "Nothing ran or waited in queue default.\n"


def test_top_shows_got_due_and_debt(database: Database, conn: Conn) -> None:
    dsn = then(database, flood(conn))
    printed = ok(dsn, "top", "--count", "1")
    head = next(line for line in printed.splitlines() if line.startswith("group"))
    assert head.split() == ["group", "waiting", "running", "got", "due", "debt", "oldest", "waits"]
    assert "58 %" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_metrics_are_printed(database: Database) -> None:
    assert "# TYPE fairq_tasks gauge\n" in ok(database, "metrics")
    found = answer(database, "metrics")["metrics"]
    assert {"name": "fairq_upkeep_failures", "labels": {}, "value": 0} in found


def fairness(dsn: str) -> dict[str, Any]:
    found = answer(dsn, "doctor", exit_code=1)["findings"]
    return next(each for each in found if each["check"] == "fairness")


def test_doctor_finds_a_broken_order_within_a_minute(database: Database, conn: Conn) -> None:
    simulation = flood(conn)
    assert fairness(then(database, simulation))["verdict"] == "ok"
    run(conn, "update fairq.lanes set finish = finish + 1000 * fairq._round() where group_key = 'alice'")
    simulation.until(simulation.now + 55)
    found = fairness(then(database, simulation))
    assert found["verdict"] == "wrong"
    assert 'the debt of group "alice" is' in found["text"]
    # In top she comes first, her debt in red, in a picture that fits.
    env = {"FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    done = CliRunner().invoke(main, ["top", "--count", "1", "--dsn", then(database, simulation)], env=env)
    lines = done.output.splitlines()
    (alice,) = (nth for nth, line in enumerate(lines) if "alice" in line)
    assert "\x1b[1;31m" in lines[alice]
    assert not any("bob" in line or "carol" in line for line in lines[:alice])
    assert len(lines) <= 24
    assert all(len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line)) <= 80 for line in lines)
