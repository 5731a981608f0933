"""`fairq stats`, `top`, `queues`, `groups`, `maintain`, and what all commands share."""

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from fairq import policies
from fairq.cli import COMMANDS, DSN, Exit, main
from fairq.commands import common
from fairq.dsn import to_url
from fairq.options import options_of
from tests.cli.running import answer, as_role, fairq, ok, process, terminal
from tests.support.calls import column, create_all, one, pop, promote, register
from tests.support.database import Database
from tests.support.moves import assert_moved, begin, step
from tests.support.server import TestServer, create_database, drop_database, private_server
from tests.support.sessions import wait_until, wait_until_blocked
from tools.reference import commands

ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def fill(database: Database) -> int:
    """Make a backlog, a running task, a live worker and a lost one. Return the live worker's id."""
    conn = database.connect(autocommit=True)
    conn.execute(
        "select fairq.create_tasks(array_fill('bob'::text, array[30]), array_fill('1'::jsonb, array[30]))"
    )
    conn.execute("select fairq.create_task('alice', '1')")
    conn.execute("select fairq.create_task('carol', '1', p_run_at => now() + interval '1 hour')")
    conn.execute("select fairq.register_worker('lost', '{default}', 1, interval '1 microsecond')")
    row = conn.execute("select fairq.register_worker('alive', '{default}', 4)").fetchone()
    assert row
    conn.execute("select * from fairq.pop_tasks('default', 3, %s)", row)
    conn.execute("select fairq.promote_overflow()")  # in all shards
    conn.close()
    return int(row[0])


# --- stats ------------------------------------------------------------------------------------------


def test_stats_says_what_the_views_say(database: Database) -> None:
    fill(database)
    found = answer(database, "stats")
    with database.connect() as conn, conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        queues = cursor.execute("select * from fairq.queue_stats").fetchall()
        groups = cursor.execute("select * from fairq.group_stats").fetchall()
    strip = ("oldest_waiting_since",)
    assert [{k: v for k, v in each.items() if k not in strip} for each in found["queues"]] == [
        {k: v for k, v in each.items() if k not in strip} for each in queues
    ]
    assert {(g["group_key"], g["overflow"] + g["queued"], g["running"]) for g in found["groups"]} == {
        (g["group_key"], g["overflow"] + g["queued"], g["running"]) for g in groups
    }
    assert {(w["name"], w["alive"], w["held"]) for w in found["workers"]} == {
        ("alive", True, 3),
        ("lost", False, 0),
    }


def test_stats_for_people_has_a_line_for_everything(database: Database) -> None:
    fill(database)
    printed = ok(database, "stats")
    assert re.search(r"^default +28 +28 +3 +1 +[12] ", printed, re.MULTILINE)
    assert re.search(r"^bob +2[78] ", printed, re.MULTILINE)
    assert "Workers: 1 alive" in printed
    assert re.search(r"lost .* lost ", printed)


def test_stats_can_be_limited_to_a_queue_and_some_groups(database: Database) -> None:
    fill(database)
    ok(database, "queues", "create", "docs")
    found = answer(database, "stats", "--queue", "docs")
    assert [each["queue"] for each in found["queues"]] == ["docs"]
    assert found["groups"] == found["workers"] == []
    assert [g["group_key"] for g in answer(database, "stats", "--groups", "1")["groups"]] == ["bob"]
    assert answer(database, "stats", "--queue", "nope", exit_code=1)["error"]["code"] == "unknown_queue"


@pytest.mark.parametrize("command", [["stats"], ["top", "--count", "1"], ["groups"], ["explain", "1"]])
def test_a_tenant_cannot_send_escape_sequences_to_the_operator(
    database: Database, command: list[str]
) -> None:
    conn = database.connect(autocommit=True)
    row = conn.execute("select fairq.create_task(%s, '1', p_kind => %s)", [ESCAPE, ESCAPE]).fetchone()
    conn.execute("select fairq.register_worker(%s, '{default}', 1)", [ESCAPE])
    assert row
    command = [str(row[0]) if word == "1" and command[0] == "explain" else word for word in command]
    printed = ok(database, *command)
    assert "owned" in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed


def test_a_letter_that_the_terminal_does_not_have_is_shown_escaped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.connect(autocommit=True).execute("select fairq.create_task('snow \u2603', '1')")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    with process(database, "groups") as started:
        printed, errors = started.communicate(timeout=60)
    assert r"snow \u2603" in printed
    assert errors == ""


# --- top --------------------------------------------------------------------------------------------


def test_top_without_a_terminal_writes_one_snapshot_after_the_other(database: Database) -> None:
    fill(database)
    printed = ok(database, "top", "--count", "2", "--interval", "0.1")
    assert printed.count("fairq top") == 2
    assert "\x1b" not in printed


def test_top_writes_one_object_a_line_with_json(database: Database) -> None:
    fill(database)
    done = fairq(database, "top", "--json", "--count", "2", "--interval", "0.1")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["created_per_second"] is None
    assert second["created_per_second"] >= 0
    assert first["queues"][0]["queued"] == 28


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_top_refreshes_on_a_terminal_until_q_or_ctrl_c_and_leaves_it_as_it_was(
    database: Database, end: bytes
) -> None:
    import termios

    fill(database)
    with terminal() as screen:

        def own_terminal() -> None:
            import fcntl

            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C comes as a signal

        streams = {"stdin": screen.theirs, "stdout": screen.theirs, "stderr": subprocess.PIPE}
        arguments = ["top", "--interval", "0.1"]
        with process(database, *arguments, **streams, preexec_fn=own_terminal) as running:
            screen.wait_for(b"bob")
            fill(database)
            screen.wait_for(b"56")  # the backlog has grown
            screen.press(end)
            screen.wait_for(b"\x1b[?1049l")  # back on the ordinary screen
            assert running.wait() == 0
            assert running.stderr
            assert running.stderr.read() == ""
        assert termios.tcgetattr(screen.theirs) == screen.modes


# --- queues, groups ---------------------------------------------------------------------------------


def test_queues_lists_every_setting(database: Database) -> None:
    (row,) = answer(database, "queues")["queues"]
    assert (row["queue"], row["max_attempts"], row["retention"]) == ("default", 5, 7 * 86400)
    printed = ok(database, "queues")
    assert re.search(r"^default +5 +1 s to 10 min +7 d$", printed, re.MULTILINE)


def test_create_makes_a_queue_and_leaves_one_that_is_there_alone(database: Database) -> None:
    made = answer(database, "queues", "create", "docs", "--max-attempts", "3")
    assert (made["queue"], made["max_attempts"]) == ("docs", 3)
    again = fairq(database, "queues", "create", "docs", "--max-attempts", "4")
    assert (again.exit_code, "There is a queue docs" in again.stderr) == (1, True)
    assert [each["max_attempts"] for each in answer(database, "queues")["queues"]] == [5, 3]
    assert answer(database, "queues", "create", "plain")["max_attempts"] == 5


def test_migrate_creates_the_queues_of_an_app(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "declares.py").write_text(
        "import fairq\napp = fairq.App()\napp.queue('mail', max_attempts=2)\n"
        "@app.task(queue='docs', max_attempts=1)\ndef parse(payload): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert answer(database, "migrate", "--app", "declares")["queues"] == ["docs", "mail"]
    assert [each["queue"] for each in answer(database, "queues")["queues"]] == ["default", "docs", "mail"]
    with database.connect() as conn:
        rows = conn.execute("select queue, kind, max_attempts from fairq.kinds").fetchall()
    assert rows == [("docs", "parse", 1)]
    assert fairq(database, "migrate", "--app", "declares", "--check").exit_code == 2


def test_set_changes_only_what_is_named(database: Database) -> None:
    made = answer(
        database,
        *("queues", "create", "docs", "--max-attempts", "3", "--retry-base", "5s", "--retention", "30d"),
        *("--no-notify", "--ready-target", "50", "--retry-cap", "1h"),
    )
    changed = answer(database, "queues", "set", "docs", "--max-attempts", "4", "--notify")
    assert changed == {**made, "max_attempts": 4, "notify": True}
    assert (changed["retry_base"], changed["retry_cap"], changed["ready_target"]) == (5, 3600, 50)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["default"], 2, "at least one setting"),
        (["default", "--max-attempts", "0"], 1, "--max-attempts"),
        (["dosc", "--max-attempts", "3"], 1, "fairq queues create dosc"),
        (["default", "--retention", "soon"], 2, "not a length of time"),
        (["x" * 201], 1, "queue"),
    ],
)
def test_a_wrong_setting_changes_nothing(
    database: Database, arguments: list[str], exit_code: int, says: str
) -> None:
    done = fairq(database, "queues", "set", *arguments)
    assert done.exit_code == exit_code
    assert says in done.stderr
    assert len(answer(database, "queues")["queues"]) == 1


def test_create_has_no_reset(database: Database) -> None:
    for create in (["queues", "create", "docs"], ["schedules", "create", "ping", "--group", "bob"]):
        done = fairq(database, *create, "--reset", "weight")
        assert (done.exit_code, "No such option" in done.stderr) == (Exit.USAGE, True), done.stderr


@pytest.mark.parametrize(
    ("command", "settings", "target"),
    [
        ("queues", policies.QueueSettings, ["default"]),
        ("groups", policies.GroupSettings, ["bob"]),
        ("keys", policies.KeySettings, ["k"]),
        ("cluster", policies.ClusterSettings, []),
    ],
)
def test_every_setting_has_an_option_and_can_be_reset(
    database: Database, command: str, settings: Any, target: list[str]
) -> None:
    group: Any = main
    found = group.get_command(click.Context(main), command).commands["set"]
    options = {option.name: option for option in found.params}
    known = options_of(settings)
    for name, declared in known.items():
        assert options[name].help == declared.help
    names = tuple(name.replace("_", "-") for name in known)
    assert options["reset"].type.choices == names
    ok(database, command, "set", *target, *(word for name in names for word in ("--reset", name)))


def test_a_limit_of_a_whole_queue_is_shown_with_the_queue(database: Database) -> None:
    ok(database, "queues", "create", "docs", "--max-running", "3")
    ok(database, "queues", "set", "docs", "--rate-limit", "100", "--rate-period", "1m")
    (docs,) = (row for row in answer(database, "queues")["queues"] if row["queue"] == "docs")
    assert (docs["max_running"], docs["rate_limit"], docs["rate_period"]) == (3, 100, 60)
    assert "3 at once; 100 per 1 min" in ok(database, "queues")
    changed = answer(database, "queues", "set", "docs", "--reset", "rate-limit", "--reset", "max-running")
    assert (changed["max_running"], changed["rate_limit"]) == (None, None)
    (default,) = (row for row in answer(database, "queues")["queues"] if row["queue"] == "default")
    assert default["max_running"] is None


def test_the_engines_own_queues_are_not_shown(database: Database) -> None:
    assert [row["queue"] for row in answer(database, "queues")["queues"]] == ["default"]
    assert [row["queue"] for row in answer(database, "stats")["queues"]] == ["default"]


def test_groups_lists_the_busiest_first(database: Database) -> None:
    fill(database)
    first, *_ = answer(database, "groups")["groups"]
    assert first["group_key"] == "bob"
    assert len(answer(database, "groups", "--limit", "1")["groups"]) == 1
    assert "bob" in ok(database, "groups")
    ok(database, "queues", "create", "docs")
    assert "No group has live tasks" in ok(database, "groups", "--queue", "docs")


def test_settings_of_a_group_are_listed_with_the_groups(database: Database) -> None:
    options = ["--weight", "3", "--max-running", "5", "--rate-limit", "10"]
    made = answer(database, "groups", "set", "bob", *options)
    assert (made["weight"], made["max_running"], made["rate_limit"], made["rate_period"]) == (3, 5, 10, 1)
    assert "5 at once; 10 per 1 s" in ok(database, "groups")
    changed = answer(database, "groups", "set", "bob", "--reset", "rate-limit")
    assert (changed["weight"], changed["rate_limit"]) == (3, None)
    (row,) = answer(database, "groups")["settings"]
    assert (row["group_key"], row["max_running"]) == ("bob", 5)


def test_queue_may_stand_before_or_after_set(database: Database) -> None:
    ok(database, "queues", "create", "docs")
    ok(database, "groups", "set", "bob", "--weight", "2", "--queue", "docs")
    from click.testing import CliRunner

    arguments = ["groups", "--dsn", database.dsn, "--queue", "docs", "set", "alice", "--weight", "2"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert {row["group_key"] for row in answer(database, "groups", "--queue", "docs")["settings"]} == {
        "bob",
        "alice",
    }


def test_a_cap_set_here_holds_at_the_next_pop(database: Database) -> None:
    """I7"""
    ok(database, "groups", "set", "bob", "--max-running", "2")
    me = fill(database)  # pops three: two of Bob's, one of Alice's
    (bob,) = answer(database, "stats")["groups"][:1]
    assert (bob["group_key"], bob["running"], bob["queued"], bob["overflow"]) == ("bob", 2, 0, 28)
    ok(database, "groups", "set", "bob", "--max-running", "4")
    conn = database.connect(autocommit=True)
    assert len(conn.execute("select id from fairq.pop_tasks('default', 10, %s)", [me]).fetchall()) == 2
    (bob,) = answer(database, "stats")["groups"][:1]
    assert bob["running"] == 4


def test_purge_asks_first_and_cancels_what_a_group_has_waiting(database: Database) -> None:
    fill(database)
    refused = fairq(database, "groups", "purge", "bob", stdin="n\n")
    assert refused.exit_code == 1
    assert fairq(database, "groups", "purge", "bob", "--json").exit_code == Exit.USAGE
    cancelled = answer(database, "groups", "purge", "bob", "--yes")["cancelled"]
    (bob,) = (row for row in answer(database, "stats")["groups"] if row["group_key"] == "bob")
    assert (bob["overflow"], bob["queued"], bob["running"]) == (0, 0, 30 - cancelled)
    assert cancelled in (27, 28)  # what was running goes on


@pytest.mark.parametrize("target", [[], ["--group", "bob"]])
def test_pause_stops_pops_and_resume_lets_them_go_on(database: Database, target: list[str]) -> None:
    conn = database.connect(autocommit=True)
    row = conn.execute("select fairq.register_worker('tester', '{default}', 4)").fetchone()
    assert row
    task_id = ok(database, "enqueue", "bob").strip()
    ok(database, "pause", "default", *target)
    assert conn.execute("select id from fairq.pop_tasks('default', 10, %s)", row).fetchall() == []
    assert "paused since" in ok(database, "explain", task_id)
    assert "since" in ok(database, "groups" if target else "queues")
    ok(database, "resume", "default", *target)
    assert conn.execute("select id from fairq.pop_tasks('default', 10, %s)", row).fetchall() == [
        (int(task_id),)
    ]
    assert answer(database, "pause", "nope", *target, exit_code=1)["error"]["code"] == "unknown_queue"


STRANGER = "It has neither tasks nor settings: is the name right?"


def test_a_group_that_nobody_has_heard_of_is_said_to_be_none(database: Database) -> None:
    """If the operator misspells a tenant, it is still served, and the operator must know."""
    assert STRANGER in ok(database, "resume", "default", "--group", "bbo")
    assert STRANGER in ok(database, "groups", "usage", "bbo")
    assert STRANGER in ok(database, "groups", "purge", "bbo", "--yes")
    assert STRANGER in ok(database, "pause", "default", "--group", "bbo")
    assert "It has no tasks yet" in ok(database, "groups", "set", "obb", "--weight", "2")
    ok(database, "enqueue", "bob")
    for command in (["pause", "default"], ["resume", "default"]):
        assert ok(database, *command, "--group", "bob").strip().endswith(("go on.", "again."))
    assert "Group bob of queue default was not paused." in ok(database, "resume", "default", "--group", "bob")
    assert "Queue default was not paused." in ok(database, "resume")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            "groups set bob --weight 0",
            '--weight of group "bob" cannot be 0.0',
            "0.001 to 1000. --reset weight takes it away.",
        ),
        (
            "groups set bob --max-running -1",
            '--max-running of group "bob" cannot be -1',
            "--reset max-running takes",
        ),
        (
            "queues set default --rate-limit 5 --rate-period 0s",
            '--rate-period of queue "default" cannot be 0 s',
            "A length of time such as 90s or 1h30m: more than zero, at most 366 days. --reset rate-period",
        ),
        (
            "queues set default --group-rate-period 1s",
            '--group-rate-period of queue "default" has no effect without --group-rate-limit',
            "Set --group-rate-limit as well.",
        ),
        (
            "queues set default --fairness magic",
            '--fairness of queue "default" cannot be "magic"',
            "count (as many",
        ),
        (
            "keys set k --max-running -1",
            '--max-running of concurrency key "k" cannot be -1',
            "A whole number",
        ),
        (
            "pause nope",
            'there is no queue "nope"',
            "fairq queues lists them; fairq queues create NAME creates one.",
        ),
        ("stats --queue nope", 'there is no queue "nope"', "fairq queues lists them"),
        ("schedules pause nope", 'there is no schedule "nope"', "fairq schedules lists them"),
        (
            "enqueue bob --unique waiting",
            'the task is to be unique: "waiting", without an idempotency key',
            '"waiting" is the only way, and goes with an idempotency key',
        ),
        ("enqueue bob --max-attempts 0", "--max-attempts is 0", "1 to 1000000."),
        (
            "enqueue bob --timeout 0",
            "--timeout is 0.0",
            "A length of time such as 90s or 1h30m, more than 0.",
        ),
        ("enqueue bob --concurrency-key=", "--concurrency-key is ''", "Pass a text of 1 to 500 bytes"),
    ],
)
def test_a_refusal_speaks_of_options_and_commands(
    database: Database, arguments: str, message: str, hint: str
) -> None:
    error = answer(database, *arguments.split(), exit_code=1)["error"]
    assert error["message"] == message
    assert error["hint"].startswith(hint) or hint in error["hint"]
    for word in ("select fairq", "p_", "None", "null", "_"):
        assert word not in f"{error['message']}{error['hint']}".replace("QF0", "")


@pytest.mark.parametrize(
    ("role", "arguments", "needs"),
    [
        ("fairq_enqueue", "stats", "fairq stats needs fairq_observe: grant fairq_observe to "),
        ("fairq_enqueue", "pause default", "fairq pause needs fairq_admin: grant fairq_admin to "),
        ("fairq_observe", "queues set default --weight 2", "fairq queues set needs fairq_admin: grant"),
        ("fairq_observe", "maintain", "fairq maintain needs fairq_work or fairq_admin: grant fairq_work to "),
        ("fairq_work", "retry 1", "fairq retry needs fairq_admin: grant fairq_admin to "),
        (
            "pg_monitor",
            "queues",
            "fairq queues needs fairq_observe to look, fairq_admin to change: grant fairq_observe",
        ),
    ],
)
def test_a_right_that_is_missing_is_named_with_the_command(
    database: Database, role: str, arguments: str, needs: str
) -> None:
    error = answer(as_role(database, role), *arguments.split(), exit_code=3)["error"]
    assert error["code"] == "not_allowed"
    assert error["hint"].startswith(needs)


def test_a_read_only_role_is_told_where_to_look(database: Database) -> None:
    dsn = make_conninfo(database.dsn, options="-c default_transaction_read_only=on")
    error = answer(dsn, "pause", "default", exit_code=3)["error"]
    assert "read-only transaction" in error["message"]
    assert "fairq doctor says which" in error["hint"]


def test_a_queue_that_drains_says_which_command_ends_that(database: Database) -> None:
    ok(database, "drain", "default")
    assert "fairq resume QUEUE" in answer(database, "enqueue", "bob", exit_code=1)["error"]["hint"]


def test_drain_refuses_new_tasks_until_the_queue_is_resumed(database: Database) -> None:
    ok(database, "enqueue", "bob")
    assert "1 task left" in ok(database, "drain")
    assert answer(database, "enqueue", "bob", exit_code=1)["error"]["code"] == "queue_draining"
    assert "since" in ok(database, "queues")
    assert answer(database, "drain")["left"] == 1
    ok(database, "resume")
    ok(database, "enqueue", "bob")
    assert answer(database, "drain", "nope", exit_code=1)["error"]["code"] == "unknown_queue"
    assert fairq(database, "drain", "--timeout", "1s").exit_code == Exit.USAGE


def test_rebuild_makes_the_order_anew_and_loses_nothing(database: Database) -> None:
    conn = database.connect(autocommit=True)
    ok(database, "enqueue", "bob")
    worker = register(conn)
    assert len(pop(conn, worker, 1)) == 1
    ok(database, "enqueue", "bob")
    before = one(conn, "select max(tick) from fairq.ticks where queue = 'default'")
    assert answer(database, "rebuild", "default")["done"] == "rebuilt"
    assert one(conn, "select max(tick) from fairq.ticks where queue = 'default'") > before
    assert len(pop(conn, worker, 5)) == 1
    assert answer(database, "rebuild", "nope", exit_code=1)["error"]["code"] == "unknown_queue"
    assert fairq(database, "rebuild").exit_code == Exit.USAGE


def test_drain_waits_until_the_queue_is_empty_or_time_is_up(database: Database) -> None:
    conn = database.connect(autocommit=True)
    task_id = int(ok(database, "enqueue", "bob"))
    error = answer(database, "drain", "--wait", "--timeout", "1ms", exit_code=1)["error"]
    assert error["code"] == "not_empty"
    assert "1 task" in error["message"]
    with process(database, "drain", "--wait", "--timeout", "1m", "--json") as waiting:
        conn.execute("select fairq.cancel_task(%s)", [task_id])
        conn.execute("select fairq.promote_overflow()")
        out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == Exit.OK
    assert json.loads(out)["left"] == 0


@pytest.mark.parametrize(
    ("command", "name", "target"),
    [("queues", "docs", ["docs"]), ("groups", "bob", ["bob", "--queue", "docs"])],
)
def test_usage_says_how_much_of_a_rate_is_used_and_reset_forgets_it(
    database: Database, command: str, name: str, target: list[str]
) -> None:
    """D32."""
    ok(database, "queues", "create", "docs")
    assert "has no rate" in ok(database, command, "usage", *target)
    assert answer(database, command, "usage", *target)["rate_limit"] is None
    ok(database, command, "set", *target, "--rate-limit", "1", "--rate-period", "1h", "--rate-burst", "3")
    found = answer(database, command, "usage", *target)
    assert (found["used"], found["available"], found["next_at"]) == (0, 3, None)
    for _ in range(5):
        ok(database, "enqueue", "bob", "--queue", "docs")
    conn = database.connect(autocommit=True)
    row = conn.execute("select fairq.register_worker('tester', '{docs}', 9)").fetchone()
    assert row
    assert len(conn.execute("select id from fairq.pop_tasks('docs', 9, %s)", row).fetchall()) == 3
    found = answer(database, command, "usage", *target)
    assert (found["used"], found["available"], found["rate_period"]) == (3, 0, 3600)
    assert found["next_at"] < found["full_at"]
    text = ok(database, command, "usage", *target)
    assert re.search(
        r"1 per 1 h, burst 3.*\n.*3 are used and 0 are free; the next .* in (1 h|59 min)", text
    ), text
    ok(database, command, "reset-rate", *target)
    assert len(conn.execute("select id from fairq.pop_tasks('docs', 9, %s)", row).fetchall()) == 2
    wrong = {"queues": ["nope"], "groups": [name, "--queue", "nope"]}[command]
    for verb in ("usage", "reset-rate"):
        assert answer(database, command, verb, *wrong, exit_code=1)["error"]["code"] == "unknown_queue"


def test_usage_of_a_group_says_what_is_left_of_its_budget(database: Database) -> None:
    ok(database, "queues", "set", "default", "--fairness", "cost")
    assert answer(database, "groups", "usage", "bob")["budget"] is None
    ok(database, "groups", "set", "bob", "--budget", "100", "--budget-period", "1d")
    found = answer(database, "groups", "usage", "bob")
    assert found["rate_limit"] is None
    assert (found["budget"]["budget"], found["budget"]["spent"], found["budget"]["available"]) == (
        100,
        0,
        100,
    )
    text = ok(database, "groups", "usage", "bob")
    assert "has a budget of 100 per 1 d." in text
    assert "0 are spent, 0 reserved for running tasks, 100 left; it renews in " in text
    assert "no rate" not in text


@pytest.mark.parametrize("name", [["groups", "hold", "bob"], ["keys", "hold", "printer"]])
def test_a_group_or_a_key_is_held_until_a_time(database: Database, name: list[str]) -> None:
    conn = database.connect(autocommit=True)
    ok(database, "enqueue", "bob", "--concurrency-key", "printer")
    row = conn.execute("select fairq.register_worker('tester', '{default}', 9)").fetchone()
    assert row
    assert "is held until 20" in ok(database, *name, "--until", "+10m")
    assert conn.execute("select id from fairq.pop_tasks('default', 9, %s)", row).fetchall() == []
    assert answer(database, *name, "--end")["held_until"] is None
    assert len(conn.execute("select id from fairq.pop_tasks('default', 9, %s)", row).fetchall()) == 1
    assert answer(database, *name, "--until", "2020-01-01T00:00:00Z", exit_code=1)["error"]["code"]
    for wrong in ([], ["--end", "--until", "+10m"], ["--until", "soon"]):
        assert fairq(database, *name, *wrong).exit_code == Exit.USAGE


def test_more_shards_while_there_are_tasks(database: Database) -> None:
    """And fewer again; an interrupted move goes on."""
    with psycopg.connect(database.dsn, autocommit=True) as conn:
        before = one(conn, "select shard_count from fairq.settings")
        tasks = create_all(conn, *"abcdefgh" * 3)
        promote(conn)
        begin(conn, 5)
        step(conn)
        assert answer(database, "cluster")["moving_from"] == before
        # Groups move there already: not to anywhere else meanwhile.
        other = fairq(database, "cluster", "set", "--shard-count", "7")
        assert (other.exit_code, "groups move from" in other.stderr) == (1, True)
        found = answer(database, "cluster", "set", "--shard-count", "5")
        assert (found["shard_count"], "moving_from" in found) == (5, False)
        assert_moved(conn)
        assert answer(database, "cluster", "set", "--shard-count", "1")["shard_count"] == 1
        assert_moved(conn)
        assert column(conn, "select id from fairq.tasks order by id") == tasks
    for count in ("0", "-3", "4097", "many"):
        assert fairq(database, "cluster", "set", "--shard-count", count).exit_code != 0


def test_keys_and_the_cluster_have_caps(database: Database) -> None:
    assert "one task per key runs at a time" in ok(database, "keys")
    assert answer(database, "keys", "set", "printer", "--max-running", "2")["max_running"] == 2
    assert answer(database, "keys")["keys"] == [{"concurrency_key": "printer", "max_running": 2}]
    assert answer(database, "keys", "set", "printer", "--reset", "max-running")["max_running"] == 1
    assert answer(database, "cluster")["max_running"] is None
    assert answer(database, "cluster", "set", "--max-running", "10")["max_running"] == 10
    assert answer(database, "cluster")["max_running"] == 10
    assert answer(database, "cluster", "set", "--reset", "max-running")["max_running"] is None
    assert "payload limit: 1,048,576" in ok(database, "cluster")


# --- maintain ---------------------------------------------------------------------------------------


def test_maintain_says_what_it_did(database: Database) -> None:
    for deadline in ("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z"):
        ok(database, "enqueue", "bob", "--expires-at", deadline)
    assert answer(database, "maintain")["done"]["expired"] == 2
    assert "expired" not in ok(database, "maintain")
    assert ok(database, "maintain") == "Nothing to do, or somebody else is doing it.\n"


@pytest.mark.usefixtures("one_shard")  # each would fail
def test_a_part_of_maintenance_that_fails_is_told_and_holds_up_no_other_one(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("alter table fairq.sweeps add constraint full_up check (what <> 'expiry') not valid")
        conn.execute("select fairq.configure_queue('other')")
        conn.execute("select fairq.create_task('bob', '1', p_queue => 'other')")
    done = fairq(database, "maintain")
    assert done.exit_code == Exit.NO
    assert "1 part failed, see fairq doctor" in done.stdout
    assert "1 task promoted" in done.stdout
    assert json.loads(fairq(database, "maintain", "--json").stdout)["done"]["failed"] == 1
    with database.connect() as conn:
        conn.execute("alter table fairq.sweeps drop constraint full_up")
    assert "failed" not in ok(database, "maintain")


def test_maintain_says_once_that_the_server_takes_no_writes(database: Database) -> None:
    """A standby, for example."""
    done = fairq(make_conninfo(database.dsn, options="-c default_transaction_read_only=on"), "maintain")
    assert (done.exit_code, done.stderr.count("read-only transaction")) == (Exit.DATABASE, 1)


def test_maintain_works_where_the_role_defaults_to_serializable(database: Database) -> None:
    """QF005 concerns only callers with their own transactions."""
    strict = make_conninfo(database.dsn, options="-c default_transaction_isolation=serializable")
    assert fairq(strict, "maintain").exit_code == 0
    assert fairq(strict, "enqueue", "bob").exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_maintain_goes_on_until_it_is_told_to_end(database: Database, number: signal.Signals) -> None:
    with process(database, "maintain", "--every", "100ms", "--json") as running:
        assert running.stdout
        for _ in range(3):
            assert "done" in json.loads(running.stdout.readline())
        os.kill(running.pid, number)
        assert running.wait() == 0
        assert running.stderr
        assert running.stderr.read() == ""


def test_a_part_of_maintenance_that_is_stopped_holds_up_no_other_one_and_no_later_round(
    database: Database,
) -> None:
    """A timeout of the role is such a stop; a server that goes away is waited for."""
    observer, holder = database.connect(autocommit=True), database.connect()
    sessions = "select pid from pg_stat_activity where application_name = 'fairq' and datname = %s"
    with process(database, "maintain", "--every", "100ms", "--json") as running:
        assert running.stdout
        assert running.stderr
        running.stdout.readline()
        (pid,) = column(observer, sessions, database.name)
        holder.execute("lock table fairq.maintenance in exclusive mode")
        wait_until_blocked(observer, pid)
        observer.execute("select pg_cancel_backend(%s::integer)", [pid])
        assert "canceling statement due to user request" in running.stderr.readline()
        wait_until_blocked(observer, pid)  # in the next part
        holder.rollback()
        while json.loads(running.stdout.readline())["done"].get("stopped") != 1:
            pass
        observer.execute("select pg_terminate_backend(%s::integer)", [pid])
        assert running.stderr.readline().endswith("; trying again\n")
        wait_until(lambda: column(observer, sessions, database.name) not in ([], [pid]), "it is back")
        running.terminate()
        assert running.wait() == 0


def test_maintain_waits_for_a_server_that_is_restarted() -> None:
    with (
        private_server() as server,
        process(server.dsn("fairq"), "maintain", "--every", "100ms", "--json") as running,
    ):
        assert running.stdout
        assert running.stderr
        running.stdout.readline()
        server.stop()
        while "failed: " not in running.stderr.readline():  # it connects in vain
            pass
        server.start()
        sessions = "select pid from pg_stat_activity where application_name = 'fairq'"
        with psycopg.connect(server.dsn(), autocommit=True) as observer:
            wait_until(lambda: bool(column(observer, sessions)), "it is back")
        running.terminate()
        assert running.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_maintain_goes_on_where_there_is_no_room_for_its_output(database: Database) -> None:
    ended = "select count(*) from fairq.finished_tasks"
    observer = database.connect(autocommit=True)
    with (
        open("/dev/full", "w") as full,
        process(database, "maintain", "--every", "100ms", "--json", stdout=full, stderr=full) as running,
    ):
        for rounds in (1, 2):
            ok(database, "enqueue", "bob", "--expires-at", "2020-01-01T00:00:00Z")
            wait_until(lambda: one(observer, ended) == rounds, "it expires")  # noqa: B023
        running.terminate()
        assert running.wait() == 0


def test_no_timeout_of_the_role_stops_a_part_of_maintenance(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("create table public.seen (at text)")
        conn.execute(
            "create function public.look() returns trigger language plpgsql as $$ begin"
            " insert into public.seen values (current_setting('statement_timeout')); return null; end $$"
        )
        conn.execute("create trigger look after insert on fairq.sweeps execute function public.look()")
    hurried = make_conninfo(database.dsn, options="-c statement_timeout=2s")
    ok(hurried, "enqueue", "bob", "--expires-at", "2020-01-01T00:00:00Z")
    ok(hurried, "maintain")
    assert set(column(database.connect(), "select at from public.seen")) == {"1min"}


# --- Styles of times --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "style", ["datestyle=German", "intervalstyle=sql_standard", "intervalstyle=iso_8601"]
)
def test_commands_read_times_whatever_style_the_role_or_the_database_has(
    database: Database, style: str
) -> None:
    fill(database)
    styled = make_conninfo(database.dsn, options=f"-c {style} -c timezone=Asia/Tokyo")
    ok(styled, "schedules", "create", "nightly", "--group", "bob", "--every", "1h")
    ok(styled, "groups", "set", "bob", "--rate-limit", "5", "--rate-period", "90s")
    for command in (
        "stats",
        "shares",
        "groups",
        "queues",
        "schedules",
        "keys",
        "cluster",
        "explain 1",
        "metrics",
    ):
        ok(styled, *command.split())
    for command in ("groups", "queues", "schedules", "explain 1"):
        assert answer(styled, *command.split()).keys() == answer(database, *command.split()).keys()
    assert answer(styled, "queues") == answer(database, "queues")
    assert "failed" not in fairq(styled, "doctor").stdout


# --- Letters ----------------------------------------------------------------------------------------


def test_commands_speak_utf8_whatever_the_environment_says(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    ok(database, "enqueue", "\u65e5\u672c", '"\u20ac"')
    assert "\u65e5\u672c" in ok(database, "groups")


# --- completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("fairq e", {"enqueue", "explain"}),
        ("fairq enqueue --com", {"--commit-each"}),
        ("fairq queues s", {"set"}),
        ("fairq work --log-level d", {"debug"}),
    ],
)
def test_tab_completes_commands_and_options(words: str, completions: set[str]) -> None:
    from click.testing import CliRunner

    position = str(len(words.split()) - 1)
    env = {"_FAIRQ_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": position}
    done = CliRunner().invoke(main, [], prog_name="fairq", env=env)
    assert {line.split(",")[1] for line in done.stdout.splitlines()} == completions


# --- All commands -----------------------------------------------------------------------------------

# The least that each needs, against any database.
# Arguments that a command needs, where it is not "1" for each that is required.
NEEDS: dict[str, list[str]] = {
    "cancel": ["1"],
    "rebuild": ["default"],
    "retry": ["1"],
    "enqueue": ["bob"],
    "enqueue --from": ["--from", "-"],
    "top": ["--count", "1"],
    "queues set": ["default", "--weight", "1"],
    "queues usage": ["default"],
    "queues reset-rate": ["default"],
    "groups set": ["bob", "--weight", "2"],
    "groups purge": ["bob", "--yes"],
    "groups hold": ["bob", "--until", "+10m"],
    "keys set": ["printer", "--max-running", "2"],
    "keys hold": ["printer", "--end"],
    "cluster set": ["--max-running", "100"],
    "schedules create": ["nightly", "--group", "bob", "--every", "1d", "--kind", "report"],
    "schedules set": ["1", "--group", "bob", "--every", "1d"],
    "schedules preview": ["1", "--group", "bob"],
    "pause": ["default"],
    "resume": ["default", "--group", "bob"],
}
ELSEWHERE = {"migrate", "work", "doctor", "web"}
LEAST = {
    name.removeprefix("fairq "): [
        "1" for each in command.params if isinstance(each, click.Argument) and each.required
    ]
    for name, command in commands()
    if DSN in command.params and name.removeprefix("fairq ") not in ELSEWHERE
} | NEEDS
NOWHERE = "postgresql://bob:s3cr3t@127.0.0.1:1/shop?connect_timeout=2"


def words(command: str) -> list[str]:
    return [*(word for word in command.split() if word != "--from"), *LEAST[command]]


@pytest.mark.parametrize("command", LEAST)
def test_an_unreachable_database_is_told_without_a_password(command: str) -> None:
    done = fairq(NOWHERE, *words(command), "--json")
    assert done.exit_code == Exit.DATABASE
    assert json.loads(done.stdout)["error"]["code"] == "unreachable"
    assert "s3cr3t" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["enqueue", "--json"],
        ["enqueue", "--json", "bob", "{nonsense"],
        ["enqueue", "bob", "--no-such-option", "--json"],
        ["stats", "--groups", "many", "--json"],
        ["groups", "set", "bob", "--json"],
        ["cancel", "x", "--json"],
    ],
)
def test_a_wrong_option_is_also_an_object_with_json(database: Database, arguments: list[str]) -> None:
    done = fairq(database, *arguments)
    assert (done.exit_code, done.stderr) == (Exit.USAGE, "")
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "usage"
    assert "--help" in error["hint"]


@pytest.fixture(scope="module")
def without_fairq(server: TestServer) -> Iterator[Database]:
    """For commands that change nothing there."""
    name = f"fairq_test_{server.run_id}_{uuid.uuid4().hex[:8]}"
    create_database(server, name, "template0")
    yield Database(name, server.dsn(name))
    drop_database(server, name)


@pytest.mark.parametrize("command", LEAST)
def test_without_fairq_in_the_database_it_says_how_to_install_it(
    without_fairq: Database, command: str
) -> None:
    done = fairq(without_fairq, *words(command), "--json")
    assert done.exit_code == Exit.NO
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["hint"]) == ("schema_missing", "Run: fairq migrate")


@pytest.mark.parametrize("own", ["", "&tcp_user_timeout=7000"])
def test_who_does_not_answer_is_given_up(
    database: Database, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sits before a silent command, and the page does not wait for ever for a server that is gone."""
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    with common.connect(to_url(database.dsn) + own) as conn:
        said = conn.info.get_parameters()
    assert (said["connect_timeout"], said["keepalives_idle"]) == ("10", "20")
    assert said["tcp_user_timeout"] == (own[-4:] or "60000")


ROLES = ("fairq_enqueue", "fairq_observe", "fairq_work", "fairq_admin")
EPILOGS = {name.removeprefix("fairq "): command.epilog or "" for name, command in commands()}


def may(command: str) -> set[str]:
    """The roles that a command's help names, and those that include them."""
    said = re.split(" to look|;", EPILOGS[command.removesuffix(" --from")].split("Rights: ")[1])[0]
    named = set(ROLES if "any role" in said else re.findall(r"fairq_\w+", said))
    assert named
    return named | {"fairq_admin"} | ({"fairq_work"} if named & {"fairq_enqueue", "fairq_observe"} else set())


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("command", LEAST)
def test_each_role_may_do_its_part_and_is_told_about_the_rest(
    database: Database, role: str, command: str
) -> None:
    """HR: an application's role can neither watch nor manage; a dashboard's can only watch."""
    task_id = ok(database, "enqueue", "bob", '{"secret": 1}').strip()
    if command.startswith("schedules"):
        ok(database, "schedules", "create", "1", "--group", "bob", "--every", "1d", "--kind", "report")
    arguments = [
        task_id if word == "1" and not command.startswith(("top", "schedules")) else word
        for word in words(command)
    ]
    text = '{"group_key": "bob"}\n{"group_key": "bob", "kind": "x"}\n'
    done = fairq(as_role(database, role), *arguments, "--json", stdin=text)
    error = json.loads(done.stdout).get("error")
    if role in may(command):
        # The task has not ended, and there is nothing to retry: an answer all the same.
        assert error is None or error["code"] == "not_ended"
        assert done.exit_code in (Exit.OK, Exit.NO)
    else:
        assert error["code"] == "not_allowed"
        assert done.exit_code == Exit.DATABASE
    assert "secret" not in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("name", [*COMMANDS])
def test_help_has_examples_exit_codes_and_options_that_say_something(name: str) -> None:
    group: Any = main
    command = group.get_command(click.Context(main, info_name="fairq"), name)
    commands = [command, *getattr(command, "commands", {}).values()]
    for each in commands:
        assert "fairq " in each.help
        assert each.epilog.startswith("Exit codes: 0 "), each.name
        for parameter in each.params:
            if isinstance(parameter, click.Option):
                assert (parameter.help or "").endswith((".", ")", "-.")), (each.name, parameter.name)


def test_behind_a_transaction_pooler_every_command_works(database: Database) -> None:
    from tests.support.pooler import pooler

    with pooler(database.dsn, connections=2) as dsn:
        task_id = ok(dsn, "enqueue", "bob").strip()
        ok(dsn, "enqueue", "--from", "-", stdin='{"group_key": "bob"}\n{"group_key": "al", "kind": "x"}\n')
        for command in ("stats", "queues", "groups", "keys", "cluster", "maintain"):
            ok(dsn, command)
        ok(dsn, "top", "--count", "2", "--interval", "0.1")
        ok(dsn, "explain", task_id)
        ok(dsn, "cancel", task_id)
        ok(dsn, "maintain")
        assert answer(dsn, "result", task_id, "--wait", exit_code=1)["outcome"] == "cancelled"
        ok(dsn, "retry", task_id)
        ok(dsn, "queues", "create", "docs", "--retention", "1d")
