"""`fairq enqueue`, `cancel`, `retry`, `result`, `explain`, against a real database."""

import json
import os
import re
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.sql import SQL

from fairq import client
from fairq.commands.common import clean, parse_duration, parse_when, span
from tests.cli.running import answer, fairq, ok, process, terminal
from tests.support.calls import Conn, finish, held_by, pop, register
from tests.support.database import Database
from tests.support.sessions import wait_until

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def tasks(database: Database, columns: LiteralString = "group_key, payload") -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        query = SQL("select {} from fairq.tasks order by sequence").format(SQL(columns))
        return conn.execute(query).fetchall()


def lines(*objects: Any) -> str:
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in objects)


def worker(database: Database, queue: str = "default") -> tuple[Conn, int]:
    conn = database.connect(autocommit=True)
    return conn, register(conn, queue)


# --- enqueue: one -----------------------------------------------------------------------------------


def test_enqueue_creates_the_task_and_prints_its_id(database: Database) -> None:
    printed = ok(database, "enqueue", "bob", '{"file": "a.pdf"}')
    assert tasks(database, "id::text, group_key, queue, kind, payload") == [
        (printed.strip(), "bob", "default", "default", {"file": "a.pdf"})
    ]


def test_without_a_payload_it_is_an_empty_object(database: Database) -> None:
    ok(database, "enqueue", "bob")
    assert tasks(database) == [("bob", {})]


def test_the_payload_may_come_from_stdin(database: Database) -> None:
    ok(database, "enqueue", "bob", "-", stdin='[1, "ü"]\n')
    assert tasks(database) == [("bob", [1, "ü"])]


def test_every_option_reaches_the_task(database: Database) -> None:
    ok(database, "queues", "create", "docs")
    found = answer(
        database,
        *("enqueue", "bob", "1", "--queue", "docs", "--kind", "parse", "--priority", "-5"),
        *("--run-at", "2099-01-31T08:00:00+01:00", "--expires-at", "2099-02-01T00:00:00Z"),
        *("--max-attempts", "7", "--cost", "2.5", "--timeout", "1h30m"),
        *("--idempotency-key", "i", "--concurrency-key", "c", "--headers", '{"trace": "t"}'),
    )
    columns = (
        "id, queue, kind, priority, run_at, expires_at, max_attempts, cost, timeout, idempotency_key, "
        "concurrency_key, headers"
    )
    run_at = datetime(2099, 1, 31, 7, tzinfo=UTC)
    expires_at = datetime(2099, 2, 1, tzinfo=UTC)
    length = timedelta(minutes=90)
    assert tasks(database, columns) == [
        (found["id"], "docs", "parse", -5, run_at, expires_at, 7, 2.5, length, "i", "c", {"trace": "t"})
    ]


def test_an_idempotency_key_gives_the_same_id_again(database: Database) -> None:
    """H27"""
    first = ok(database, "enqueue", "bob", "1", "--idempotency-key", "k")
    assert ok(database, "enqueue", "bob", "1", "--idempotency-key", "k") == first
    done = fairq(database, "enqueue", "bob", "2", "--idempotency-key", "k", "--json")
    assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (1, "idempotency_conflict")
    assert len(tasks(database)) == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        ([], 2, "Name a GROUP"),
        (["bob", "{nonsense"], 2, "not JSON"),
        (["bob", "NaN"], 2, "not JSON"),
        (["bob", "[" * 100_000], 2, "not JSON"),
        (["bob", "1", "--headers", "[]"], 2, "not a JSON object"),
        (["bob", "1", "--run-at", "2030-01-31 08:00"], 2, "with its zone"),
        (["bob", "1", "--timeout", "soon"], 2, "not a length of time"),
        (["bob", "1", "--skip", "5"], 2, "need --from"),
        (["bob", "1", "--from", "-"], 2, "in the lines of the file"),
        (["--from", "/nowhere/x.jsonl"], 2, "cannot be read"),
        ([""], 1, "group key"),
        (["bob", "--queue", "nope"], 1, "fairq queues create"),
        (["bob", "--priority", "99999999"], 1, "priority"),
        (["bob", "--cost", "nan"], 1, "cost"),
        (["bob", "--max-attempts", "0"], 1, "--max-attempts is 0"),
        (["bob", '"\\u0000"'], 1, "U+0000"),
    ],
)
def test_mistakes_are_reported_and_nothing_is_created(
    database: Database, arguments: list[str], exit_code: int, says: str
) -> None:
    done = fairq(database, "enqueue", *arguments)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert says in done.stderr
    assert tasks(database) == []


# --- enqueue: many ----------------------------------------------------------------------------------


def test_a_file_becomes_tasks_in_its_order(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(lines(*({"group_key": f"g{n % 3}", "payload": n} for n in range(250))))
    found = answer(database, "enqueue", "--from", str(file), "--batch", "100")
    assert tasks(database) == [(f"g{n % 3}", n) for n in range(250)]
    ids = [row[0] for row in tasks(database, "id")]
    assert found == {"created": 250, "groups": 3, "first_id": ids[0], "last_id": ids[-1]}


def test_lines_with_different_options_keep_their_order_too(database: Database) -> None:
    """A group's tasks run in the order of the file, whatever their kinds are."""
    text = lines(*({"group_key": "bob", "payload": n, "kind": f"k{n % 2}"} for n in range(50)))
    ok(database, "enqueue", "--from", "-", stdin=text)
    assert tasks(database, "payload, kind") == [(n, f"k{n % 2}") for n in range(50)]


def test_a_line_may_say_everything_and_options_fill_the_rest(database: Database) -> None:
    ok(database, "queues", "create", "docs")
    full = {
        "group_key": "alice",
        "payload": None,
        "queue": "docs",
        "kind": "parse",
        "priority": 3,
        "run_at": "2099-01-01T00:00:00Z",
        "expires_at": "2099-01-02T00:00:00Z",
        "max_attempts": 2,
        "cost": 1.5,
        "timeout": "10m",
        "idempotency_key": "i",
        "concurrency_key": "c",
        "headers": {"a": 1},
    }
    defaults = ["bob", "--kind", "mail", "--priority", "1", "--timeout", "5", "--headers", '{"b": 2}']
    ok(database, "enqueue", *defaults, "--from", "-", stdin=lines(full, {}))
    columns = (
        "group_key, payload::text, queue, kind, priority, max_attempts, cost, timeout, idempotency_key, "
        "concurrency_key, headers"
    )
    ten, five = timedelta(minutes=10), timedelta(seconds=5)
    assert tasks(database, columns) == [
        ("alice", "null", "docs", "parse", 3, 2, 1.5, ten, "i", "c", {"a": 1}),
        ("bob", "{}", "default", "mail", 1, 5, 1.0, five, None, None, {"b": 2}),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lines({"group_key": "a"}, "{nonsense"), "line 2: not JSON"),
        (lines({"group_key": "a"}, "", "NaN"), "line 3: not JSON"),
        (lines({"group_key": "a"}, [1]), "line 2: not a JSON object"),
        (lines({"group_key": "a"}, {"payload": 1}), "line 2: no group_key"),
        (lines({"group_key": "a"}, {"group_key": "b", "file": 1}), "line 2: unknown field 'file'"),
        (lines({"group_key": "a"}, {"group_key": ""}), "line 2: the group key"),
        (lines({"group_key": "a"}, {"group_key": 5.5}), "line 2: the group key"),
        (lines({"group_key": "a"}, {"group_key": "b", "cost": -1}), "line 2: the cost"),
        (lines({"group_key": "a"}, {"group_key": "b", "cost": "1"}), "line 2: the cost"),
        (lines({"group_key": "a"}, {"group_key": "b", "kind": 5}), "line 2: the kind"),
        (lines({"group_key": "a"}, {"group_key": "b", "priority": 0.5}), "line 2: the priority"),
        (lines({"group_key": "a"}, {"group_key": "b", "run_at": "noon"}), "line 2: run_at"),
        (lines({"group_key": "a"}, {"group_key": "b", "timeout": []}), "line 2: timeout"),
        (lines({"group_key": "a"}, {"group_key": "b", "timeout": 0}), "line 2: the timeout"),
        (lines({"group_key": "a"}, {"group_key": "b", "headers": 1}), "line 2: headers"),
        (lines({"group_key": "a"}, {"group_key": "b", "payload": ["\0"]}), "line 2: payload[0]"),
        (lines({"group_key": "a"}, '{"group_key": "b", "payload": 1e999}'), "line 2: payload"),
        (
            lines({"group_key": "a"}, {"group_key": "b", "queue": "nope"}),
            'lines 1 to 2: there is no queue "nope"',
        ),
    ],
)
def test_a_wrong_line_is_named_and_nothing_of_the_file_is_created(
    database: Database, text: str, says: str
) -> None:
    done = fairq(database, "enqueue", "--from", "-", stdin=text)
    assert (done.exit_code, done.stdout) == (1, "")
    assert says in done.stderr
    assert "Nothing was created." in done.stderr
    assert tasks(database) == []


def test_a_file_that_is_not_utf_8_is_refused(database: Database) -> None:
    done = fairq(database, "enqueue", "--from", "-", stdin=b'{"group_key": "\xff"}\n')
    assert done.exit_code == 1
    assert "line 1" in done.stderr


def test_a_byte_order_mark_and_empty_lines_do_no_harm(database: Database) -> None:
    done = fairq(database, "enqueue", "--from", "-", stdin=b'\xef\xbb\xbf{"group_key": "a"}\r\n\r\n  \n')
    assert done.exit_code == 0
    assert tasks(database) == [("a", {})]


def test_an_empty_file_is_no_tasks(database: Database) -> None:
    assert answer(database, "enqueue", "--from", "-", stdin="\n")["created"] == 0


def test_commit_each_keeps_what_came_before_and_says_where_to_go_on(database: Database) -> None:
    good = [{"group_key": "a", "payload": n} for n in range(5)]
    arguments = ["enqueue", "--from", "-", "--commit-each", "--batch", "2"]
    done = fairq(database, *arguments, stdin=lines(*good[:3], "{wrong", good[4]))
    assert done.exit_code == 1
    assert "line 4" in done.stderr
    assert "--skip 2" in done.stderr
    assert tasks(database) == [("a", 0), ("a", 1)]
    ok(database, *arguments, "--skip", "2", stdin=lines(*good))
    assert tasks(database) == [("a", n) for n in range(5)]


def test_lines_that_are_skipped_are_counted_with_those_that_are_empty(database: Database) -> None:
    good = [{"group_key": "a", "payload": n} for n in range(5)]
    arguments = ["enqueue", "--from", "-", "--commit-each", "--batch", "2"]
    done = fairq(database, *arguments, stdin=lines(good[0], "", "", good[1], "", "{wrong"))
    assert "line 6" in done.stderr
    assert "--skip 4" in done.stderr
    ok(database, *arguments, "--skip", "4", stdin=lines(good[0], "", "", good[1], "", *good[2:]))
    assert tasks(database) == [("a", n) for n in range(5)]


def test_after_ctrl_c_it_says_where_to_go_on(database: Database) -> None:
    arguments = ["enqueue", "--from", "-", "--commit-each", "--batch", "1"]
    with process(database, *arguments, stdin=subprocess.PIPE) as running:
        assert running.stdin
        running.stdin.write(lines({"group_key": "a"}, {"group_key": "a"}))
        running.stdin.flush()
        wait_until(lambda: len(tasks(database)) == 2, "two are created")
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 1
        assert running.stderr
        assert "Lines 1 to 2 are created." in running.stderr.read()


def test_a_process_killed_halfway_leaves_nothing(database: Database) -> None:
    """I1: the file is one transaction."""
    with process(database, "enqueue", "--from", "-", "--batch", "1", stdin=subprocess.PIPE) as running:
        assert running.stdin
        running.stdin.write(lines(*({"group_key": "a", "payload": "x" * 1000} for _ in range(200))))
        running.stdin.flush()
        seen_task_ids(database, at_least=50)
        running.kill()
        running.wait()
    assert tasks(database) == []


def seen_task_ids(database: Database, at_least: int) -> None:
    """Wait until another session has drawn so many ids, although its rows are not visible yet."""
    observer = database.connect(autocommit=True)

    def drawn() -> bool:
        row = observer.execute("select last_value from fairq.task_ids").fetchone()
        return row is not None and row[0] >= at_least

    wait_until(drawn, "the other process is under way")


def test_on_a_terminal_a_progress_bar_goes_to_stderr_and_only_the_answer_to_stdout(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(lines(*({"group_key": "a"} for _ in range(3000))))
    with terminal() as screen:
        arguments = ["enqueue", "--from", str(file), "--json"]
        with process(database, *arguments[:-1], stderr=screen.theirs) as running:
            assert running.stdout
            assert running.stdout.read().startswith("3,000 tasks of 1 group")
            assert running.wait() == 0
        assert b"enqueueing" in screen.read_rest()
        quiet = len(screen.written)
        with process(database, *arguments, stderr=screen.theirs) as running:
            assert running.wait() == 0
        assert len(screen.read_rest()) == quiet


# --- cancel and retry -------------------------------------------------------------------------------


def test_cancel_ends_waiting_tasks_and_names_those_that_are_not_live(database: Database) -> None:
    first, second = (ok(database, "enqueue", "bob").strip() for _ in range(2))
    done = fairq(database, "cancel", first, second, "999999")
    assert done.exit_code == 1
    assert done.stdout == "2 tasks cancelled.\n999999: not live: it has ended, or never existed\n"
    ok(database, "maintain")
    assert tasks(database) == []
    found = answer(database, "cancel", first, exit_code=1)
    assert found == {"accepted": [], "refused": [int(first)]}


def test_ids_may_come_from_stdin(database: Database) -> None:
    ids = [ok(database, "enqueue", "bob").strip() for _ in range(3)]
    assert answer(database, "cancel", "-", stdin="\n".join(ids)) == {
        "accepted": [int(each) for each in ids],
        "refused": [],
    }


@pytest.mark.parametrize("word", ["x", "-5", "1.5", str(2**63), "\x1b[31m"])
def test_invalid_ids_are_refused(database: Database, word: str) -> None:
    done = fairq(database, "cancel", "-", stdin=word)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "not a task id" in done.stderr
    assert "\x1b" not in done.stderr


def test_cancel_and_retry_of_many_show_how_many_and_ask(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(
            "select fairq.create_tasks(array['bob', 'bob', 'ada'], array['{}', '{}', '{}']::jsonb[])"
        )
        asked = fairq(database, "cancel", "--queue", "default", "--group", "bob", stdin="n\n")
        assert (asked.exit_code, len(tasks(database))) == (1, 3)
        assert "Cancel 2 tasks of queue default? [y/N]" in asked.output
        done = ok(database, "cancel", "--queue", "default", "--group", "bob", stdin="y\n")
        assert done.endswith("2 tasks cancelled.\n")
        conn.execute("select fairq.maintain()")
        assert tasks(database) == [("ada", {})]
        assert ok(database, "cancel", "--queue", "default", "--kind", "x") == "No such tasks.\n"
        assert answer(database, "retry", "--queue", "default", "--outcome", "cancelled", "--yes") == {
            "queue": "default",
            "tasks": 2,
        }
    assert [group for group, _ in tasks(database)] == ["ada", "bob", "bob"]
    assert ok(database, "retry", "--queue", "default", "--since", "1h", "--yes").startswith("0 ")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--yes"], ["--group", "bob"], ["5", "--queue", "default"], ["--queue", "default", "--json"]],
)
def test_a_filter_without_a_queue_or_beside_ids_is_refused(database: Database, arguments: list[str]) -> None:
    for command in ("cancel", "retry"):
        assert fairq(database, command, *arguments).exit_code == 2


def test_retry_runs_a_failed_task_again_and_a_scheduled_one_now(database: Database) -> None:
    failed, later, waiting = (
        int(ok(database, "enqueue", "bob", "1", *options))
        for options in (["--max-attempts", "1"], ["--run-at", "+1h"], [])
    )
    conn, me = worker(database)
    held = pop(conn, me, 1)
    assert held == [failed]
    finish(conn, me, held, "failed", errors=['{"code": "boom"}'])
    found = answer(database, "retry", str(failed), str(later), str(waiting), "999999", exit_code=1)
    assert found == {"accepted": [failed, later], "refused": [waiting, 999999]}
    assert {*pop(conn, me, 10)} == {failed, later, waiting}


# --- result -----------------------------------------------------------------------------------------


def test_result_prints_what_the_handler_returned(database: Database) -> None:
    task_id = ok(database, "enqueue", "bob").strip()
    conn, me = worker(database)
    held = pop(conn, me, 1)
    finish(conn, me, held, "succeeded", results=['{"pages": 3, "text": "\\u001b[31m\\u0085"}'])
    printed = ok(database, "result", task_id)
    assert json.loads(printed) == {"pages": 3, "text": "\x1b[31m\x85"}
    assert printed.replace("\n", "").isprintable()
    found = answer(database, "result", task_id)
    assert (found["outcome"], found["result"]["pages"]) == ("succeeded", 3)


def test_result_of_a_failed_task_says_why_and_exits_1(database: Database) -> None:
    task_id = ok(database, "enqueue", "bob").strip()
    conn, me = worker(database)
    finish(
        conn,
        me,
        pop(conn, me, 1),
        "failed",
        errors=['{"code": "boom", "message": "no such file \\u001b[31m"}'],
    )
    done = fairq(database, "result", task_id)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "boom: no such file \\u001b[31m" in done.stderr
    assert answer(database, "result", task_id, exit_code=1)["error"]["code"] == "boom"


def test_result_of_a_live_or_unknown_task_exits_1_with_a_code(database: Database) -> None:
    task_id = ok(database, "enqueue", "bob").strip()
    assert answer(database, "result", task_id, exit_code=1)["error"]["code"] == "not_ended"
    assert answer(database, "result", "999999", exit_code=1)["error"]["code"] == "no_such_task"
    waited = answer(database, "result", task_id, "--wait", "--timeout", "50ms", exit_code=1)
    assert waited["error"]["code"] == "result_timeout"


def test_result_waits_until_the_task_has_ended(database: Database) -> None:
    task_id = ok(database, "enqueue", "bob").strip()
    conn, me = worker(database)
    held = pop(conn, me, 1)
    with process(database, "result", task_id, "--wait") as waiting:

        def asked() -> bool:
            row = conn.execute(
                "select count(*) from pg_stat_activity where datname = current_database() "
                "and application_name = 'fairq'"
            ).fetchone()
            return row is not None and row[0] == 1

        wait_until(asked, "the command is connected")
        finish(conn, me, held, "succeeded", results=['"done"'])
        assert waiting.stdout
        assert waiting.stdout.read() == '"done"\n'
        assert waiting.wait() == 0


def test_a_wait_can_be_ended_by_ctrl_c_without_a_traceback(database: Database) -> None:
    task_id = ok(database, "enqueue", "bob").strip()
    with process(database, "result", task_id, "--wait") as waiting:
        conn = database.connect(autocommit=True)

        def connected() -> bool:
            row = conn.execute(
                "select count(*) from pg_stat_activity where datname = current_database() "
                "and query like '%task_result%' and pid <> pg_backend_pid()"
            ).fetchone()
            return row is not None and row[0] == 1

        wait_until(connected, "the command has looked")
        os.kill(waiting.pid, signal.SIGINT)
        assert waiting.wait() == 1
        assert waiting.stderr
        assert "Traceback" not in waiting.stderr.read()


# --- explain ----------------------------------------------------------------------------------------


def test_explain_says_why_a_task_waits(database: Database) -> None:
    ids = [ok(database, "enqueue", "bob", "--kind", "parse").strip() for _ in range(3)]
    printed = ok(database, "explain", ids[2])
    assert 'no live worker for queue "default"' in printed
    assert "2 of its own group" in printed
    found = answer(database, "explain", ids[2])
    with database.connect() as conn:
        row = conn.execute("select reason, state from fairq.explain_task(%s)", [ids[2]]).fetchone()
    assert (found["reason"], found["state"]) == row
    assert (found["group_key"], found["kind"], found["ahead_in_group"]) == ("bob", "parse", 2)


def test_explain_shows_earlier_attempts_and_progress(database: Database) -> None:
    """H17"""
    task_id = ok(database, "enqueue", "bob", '{"secret": "x"}').strip()
    conn, me = worker(database)
    finish(conn, me, pop(conn, me, 1), "retry", errors=['{"code": "boom", "message": "no route"}'])
    printed = ok(database, "explain", task_id)
    assert "back-off" in printed
    assert "boom: no route" in printed
    assert "secret" not in printed
    (attempt,) = answer(database, "explain", task_id)["attempts"]
    assert (attempt["attempt"], attempt["outcome"], attempt["worker_id"]) == (1, "retry", me)
    ok(database, "retry", task_id)
    held = pop(conn, me, 1)
    conn.execute("select fairq.report_progress(%s, %s, %s, array[30], array[100])", held_by(me, held))
    assert "30 of 100 (30%)" in ok(database, "explain", task_id)
    assert answer(database, "explain", task_id)["started_at"] is not None
    assert re.search(r"^  started +\d{4}-.* ago\)$", ok(database, "explain", task_id), re.MULTILINE)


def test_explain_of_an_ended_task_says_how_it_ended(database: Database) -> None:
    task_id = ok(database, "enqueue", "bob").strip()
    conn, me = worker(database)
    finish(conn, me, pop(conn, me, 1), "succeeded")
    assert "ended as succeeded" in ok(database, "explain", task_id)


def test_explain_shows_everything_that_is_known_of_a_task(database: Database) -> None:
    """Except what the reason says; values of ordinary tasks are not shown."""
    ok(database, "enqueue", "bob")
    options = (
        "--user",
        "jane",
        "--concurrency-key",
        "k",
        "--priority",
        "3",
        "--cost",
        "2",
        "--expires-at",
        "+1h",
    )
    task_id = ok(database, "enqueue", "bob", *options).strip()
    facts = {"queue", "group", "kind", "attempt", "created"}

    def shown(of: str) -> set[str]:
        return {line.strip().partition("  ")[0] for line in ok(database, "explain", of).splitlines()[1:]}

    assert shown("1") == facts | {"ahead"}
    assert shown(task_id) == facts | {"ahead", "user", "concurrency key", "priority", "cost", "expires"}
    found = answer(database, "explain", task_id)
    with database.connect() as conn:
        known = client.get(conn, int(task_id))
    assert {name for name in known.__slots__ if name not in found} == {"id"}
    assert (found["user_key"], found["concurrency_key"], found["error"]) == ("jane", "k", None)


def test_explain_of_an_unknown_task_exits_1(database: Database) -> None:
    assert answer(database, "explain", "999999", exit_code=1)["error"]["code"] == "no_such_task"


# --- Words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("10m", 600),
        ("10 min", 600),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("7d", 604800),
        ("2W", 1209600),
        ("", None),
        ("-5", None),
        ("5 parsecs", None),
        ("1h30", None),
        ("9" * 400, None),
    ],
)
def test_lengths_of_time_are_read(text: str, seconds: float | None) -> None:
    expected = None if seconds is None else timedelta(seconds=seconds)
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+10m", NOW + timedelta(minutes=10)),
        ("2030-01-31T08:00:00Z", datetime(2030, 1, 31, 8, tzinfo=UTC)),
        ("2030-01-31T08:00:00", None),
        ("+" + "9" * 12 + "w", None),
        ("tomorrow", None),
    ],
)
def test_times_are_read_and_need_a_zone(text: str, expected: datetime | None) -> None:
    assert parse_when(text, NOW) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.012, "12 ms"),
        (4.25, "4.2 s"),
        (59.9, "1 min"),
        (75, "1 min 15 s"),
        (1230, "20 min"),
        (12000, "3 h 20 min"),
        (90000, "1 d 1 h"),
        (-90, "-1 min 30 s"),
    ],
)
def test_lengths_of_time_are_shown_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


@given(st.text())
def test_a_terminal_obeys_nothing_that_is_shown(text: str) -> None:
    assert clean(text).isprintable()
    if text.isprintable():
        assert clean(text) == text
