"""What the log of `fairq work` says about tasks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import fairq
from fairq.commands import work
from fairq.dsn import mask
from fairq.errors import UnknownQueue
from tests.worker.running import Desk, drain, worker_thread

app = fairq.App()
its_own = logging.getLogger("shop.tasks")
go = threading.Event()


@app.task
async def fine(payload: Any) -> None:
    its_own.warning("reading %s", "a.pdf", extra={"pages": 3})


@app.task
def fine_in_a_thread(payload: Any) -> None:
    its_own.warning("reading a.pdf")


@app.task(max_attempts=2, retry=fairq.Backoff(base=0.1, cap=0.1, jitter=0))
def breaks(payload: Any) -> None:
    raise ValueError("no such\nfile postgresql://bob:s3cr3t@db/shop")


@app.task
def gives_up(payload: Any) -> None:
    raise fairq.Fail("the file is empty", code="empty")


@app.task
def hangs(payload: Any, ctx: fairq.Context) -> None:
    go.set()
    ctx.cancelled.wait(60)
    ctx.cancelled.raise_if_set()


class Lines(logging.Handler):
    """Formats lines when they are written, as the command's own handler does."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))

    def of(self, action: str) -> list[dict[str, Any]]:
        return [each for each in map(json.loads, self.found) if each.get("action") == action]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines(work.JsonLines())
    root, level = logging.getLogger(), logging.getLogger("fairq").level
    root.addHandler(handler)
    logging.getLogger("fairq").setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    logging.getLogger("fairq").setLevel(level)


def facts(line: dict[str, Any]) -> dict[str, Any]:
    names = ("queue", "group", "kind", "task_id", "attempt", "worker")
    return {name: line.get(name) for name in names}


def test_the_last_failure_is_an_error_with_its_traceback_and_those_before_it_say_what_comes_next(
    desk: Desk, lines: Lines
) -> None:
    id = desk.enqueue("breaks", group_key="bob & sons", max_attempts=2)
    drain(app, desk.dsn)
    (retried,), (failed,) = lines.of("task_retry"), lines.of("task_failed")
    worker = desk.one("select worker_id from fairq.finished_tasks")
    common = {"queue": "default", "group": "bob & sons", "kind": "breaks", "task_id": id, "worker": worker}

    assert retried["level"] == "warning"
    assert facts(retried) == {**common, "attempt": 1}
    assert re.search(
        r"\(attempt 1 of 2\) failed after 0\.\d+ s; next attempt in 0\.1 s: ValueError", retried["message"]
    )
    assert "traceback" not in retried

    assert failed["level"] == "error"
    assert facts(failed) == {**common, "attempt": 2}
    assert 0 <= failed["duration"] < 60
    assert (
        f"task {id} of bob & sons, queue default, kind breaks (attempt 2 of 2) failed for good"
        in (failed["message"])
    )
    assert failed["message"].endswith(": ValueError: no such file postgresql://bob:***@db/shop")
    assert failed["traceback"].startswith("Traceback")
    assert 'raise ValueError("no such' in failed["traceback"]
    assert "s3cr3t" not in "".join(lines.found)


@pytest.mark.parametrize("formatter", [work.Lines(), work.JsonLines()], ids=["text", "json"])
def test_an_exception_that_quotes_megabytes_takes_no_more_of_the_log_than_another(
    formatter: logging.Formatter,
) -> None:
    try:
        raise ValueError("\x1b" * 2_000_000 + "the end")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    line = formatter.format(record)
    assert "Traceback" in line
    assert line.rstrip('"}').endswith("the end")
    assert len(line) < 7 * work.LONGEST_TRACEBACK  # escapes


@dataclass
class Account:
    iban: int


@app.task
def pay(payload: Account) -> None:
    raise AssertionError("not with that")


def test_the_log_names_the_misfit_of_a_payload_without_its_value(desk: Desk, lines: Lines) -> None:
    id = desk.enqueue("pay", {"iban": "DE02120300000000202051"})
    drain(app, desk.dsn)
    (failed,) = lines.of("task_failed")
    assert failed["message"].endswith(f": payload_invalid: payload.iban does not fit; fairq explain {id}")
    assert "DE0212" not in "".join(lines.found)


def test_no_payload_and_no_password_reaches_the_log(desk: Desk, lines: Lines) -> None:
    logging.getLogger("fairq").setLevel(logging.DEBUG)
    desk.enqueue("breaks", {"iban": "DE02120300000000202051"})
    desk.enqueue("fine", {"iban": "DE02120300000000202051"})
    drain(app, desk.dsn)
    assert lines.of("task_succeeded")
    assert "DE0212" not in "".join(lines.found)
    assert all(line == mask(line) for line in lines.found)


def test_a_handler_that_gives_up_fails_for_good_at_once(desk: Desk, lines: Lines) -> None:
    desk.enqueue("gives_up")
    drain(app, desk.dsn)
    assert not lines.of("task_retry")
    (failed,) = lines.of("task_failed")
    assert "(attempt 1 of" in failed["message"]
    assert failed["message"].endswith(": fairq.errors.Fail: the file is empty")


def test_starts_and_successes_are_for_those_who_debug(desk: Desk, lines: Lines) -> None:
    desk.enqueue("fine")
    drain(app, desk.dsn)
    assert not lines.of("task_started")
    assert not lines.of("task_succeeded")
    logging.getLogger("fairq").setLevel(logging.DEBUG)
    id = desk.enqueue("fine")
    drain(app, desk.dsn)
    (started,), (ended,) = lines.of("task_started"), lines.of("task_succeeded")
    assert facts(started) == facts(ended)
    assert ended["task_id"] == id
    assert "duration" not in started
    assert ended["duration"] >= 0


@pytest.mark.parametrize("kind", ["fine", "fine_in_a_thread"])
def test_a_handlers_log_lines_have_the_facts_of_its_task(desk: Desk, lines: Lines, kind: str) -> None:
    ids = [desk.enqueue(kind, group_key=group) for group in ("bob", "alice")]
    drain(app, desk.dsn)
    said = [each for each in map(json.loads, lines.found) if each["logger"] == "shop.tasks"]
    assert {(each["task_id"], each["group"]) for each in said} == {(ids[0], "bob"), (ids[1], "alice")}
    assert {each["kind"] for each in said} == {kind}
    assert all(each["message"] == "reading a.pdf" for each in said)
    assert [each.get("pages") for each in said] == ([3, 3] if kind == "fine" else [None, None])
    its_own.warning("after all tasks")
    assert "task_id" not in json.loads(lines.found[-1])


def test_a_task_that_somebody_cancelled_is_no_failure(desk: Desk, lines: Lines) -> None:
    go.clear()
    id = desk.enqueue("hangs")
    with worker_thread(app, desk.dsn, lease=3.0):
        assert go.wait(40)
        desk.conn.execute("select fairq.cancel_task(%s)", [id])
        desk.wait_until(lambda: desk.live == 0, "it is cancelled")
    (ended,) = lines.of("task_cancelled")
    assert ended["level"] == "info"
    assert "cancelled after" in ended["message"]


def test_names_of_tenants_cannot_write_lines_of_their_own(desk: Desk, lines: Lines) -> None:
    lines.setFormatter(work.Lines("%(message)s"))
    desk.enqueue("gives_up", group_key="bob\n2026-01-01 ERROR all is lost\x1b[2J")
    drain(app, desk.dsn)
    (failed,) = [line for line in lines.found if "failed for good after 0." in line]
    assert "of bob\\u000a2026-01-01 ERROR all is lost\\u001b[2J, queue default" in failed.split("\n")[0]
    assert "\x1b" not in failed


def test_a_hint_is_part_of_the_traceback() -> None:
    error = UnknownQueue('there is no queue "dcos"', "fairq queues lists them.")
    assert error.__notes__ == ["Hint: fairq queues lists them."]
    assert str(error) == 'there is no queue "dcos"'


@pytest.mark.parametrize("strange", [float("nan"), object(), {"a": 1}, ["a", object()]])
def test_a_line_is_json_whatever_is_in_it(strange: Any) -> None:
    record = logging.makeLogRecord({"msg": "a\nb", "strange": strange})
    line = work.JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert found["message"] == "a\nb"
    assert "strange" in found


@app.task(timeout=0.1)
async def slow(payload: Any) -> None:
    await asyncio.sleep(60)


@app.task(store_result=True)
def returns_nonsense(payload: Any) -> Any:
    return object()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("slow", "fairq.errors.TaskTimeout: the handler of 'slow' took longer than 0.1 s"),
        ("returns_nonsense", "fairq.errors.ResultNotEncodable: result"),
    ],
)
def test_the_reason_is_the_one_that_is_stored(desk: Desk, lines: Lines, kind: str, says: str) -> None:
    desk.enqueue(kind, max_attempts=1)
    drain(app, desk.dsn)
    (failed,) = lines.of("task_failed")
    assert says in failed["message"]
