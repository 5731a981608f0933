"""Changes from the page: previewed, then made, only by those who may and only by its own forms."""

import os
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.types.json import Jsonb

from fairq.web.changes import _VERBS as VERBS
from fairq.web.changes import OF_GROUP, OF_QUEUE, TARGET
from tests.cli.running import as_role
from tests.support.calls import create, one, run
from tests.support.database import Database
from tests.web.asking import Browser, Seen, client, page

Conn = psycopg.Connection[Any]


@pytest.fixture
def browser(database: Database) -> Browser:
    return client(database, allow_changes=True)


def preview(browser: Browser, status: int = 200, /, **asked: str) -> Seen:
    return page(browser, f"/preview?{urlencode(asked)}", status)


def form_of(seen: Seen) -> tuple[str, dict[str, str]]:
    """The target of a preview's form, and what it sends."""
    (action,) = [each["action"] or "" for tag, each in seen.elements if tag == "form"]
    fields = {each["name"] or "": each["value"] or "" for tag, each in seen.elements if tag == "input"}
    return action, fields


def confirm(browser: Browser, seen: Seen, status: int = 200) -> Seen:
    answer = browser.post(*form_of(seen))
    assert answer.status_code == status, answer.text
    return Seen(answer.text)


def failed(conn: Conn, *groups: str, kind: str = "parse") -> list[int]:
    worker = one(conn, "select fairq.register_worker('w', array['default'], 50)")
    ids = [create(conn, group, kind=kind, max_attempts=1) for group in groups]
    run(conn, "select fairq.pop_tasks('default', 50, %s)", worker)
    run(
        conn,
        "select fairq.finish_tasks(%s, %s, array_fill(1, array[%s]), array_fill('failed'::text, array[%s]),"
        " p_errors => array_fill(%s::jsonb, array[%s]))",
        worker,
        ids,
        len(ids),
        len(ids),
        Jsonb({"type": "ValueError", "message": "no"}),
        len(ids),
    )
    return ids


def test_a_tenant_is_paused_and_resumed(conn: Conn, browser: Browser) -> None:
    create(conn, "bob")
    seen = preview(browser, verb="pause", queue="default", group="bob")
    assert "1 waiting, 0 running" in seen.text
    assert "state served paused" in seen.text
    assert run(conn, "select from fairq.groups") == [], "a preview changes nothing"
    confirm(browser, seen)
    assert one(conn, "select paused_at is not null from fairq.groups")
    assert "paused" in page(browser, "/group?queue=default&group=bob").text
    confirm(browser, preview(browser, verb="resume", queue="default", group="bob"))
    assert not one(conn, "select paused_at is not null from fairq.groups")


def test_a_schedule_is_paused_resumed_and_run(conn: Conn, browser: Browser) -> None:
    run(
        conn, 'select fairq.configure_schedule(\'report\', \'bob\', \'{"every": "1 hour", "kind": "parse"}\')'
    )
    of = {"name": "report", "group": "bob"}
    paused = "select paused_at is not null from fairq.schedules"
    seen = preview(browser, verb="pause-schedule", **of)
    assert "state fires paused" in seen.text
    assert not one(conn, paused), "a preview changes nothing"
    confirm(browser, seen)
    assert one(conn, paused)
    assert "paused" in page(browser, f"/schedule?{urlencode(of)}").text
    assert "There is nothing to do." in preview(browser, verb="pause-schedule", **of).text
    confirm(browser, preview(browser, verb="resume-schedule", **of))
    assert not one(conn, paused)

    seen = preview(browser, verb="run-schedule", **of)
    assert run(conn, "select from fairq.tasks") == []
    confirm(browser, seen)
    assert run(conn, "select group_key, kind from fairq.tasks") == [("bob", "parse")]
    assert "Something has changed meanwhile" in confirm(browser, seen, 409).text, "sent twice, it runs once"
    assert one(conn, "select count(*) from fairq.tasks") == 1
    preview(browser, 404, verb="run-schedule", name="report", group="nobody")


def test_a_queue_is_paused(conn: Conn, browser: Browser) -> None:
    confirm(browser, preview(browser, verb="pause", queue="default"))
    assert one(conn, "select paused_at is not null from fairq.queues where queue = 'default'")


def test_settings_are_shown_as_they_are_and_as_they_would_be(conn: Conn, browser: Browser) -> None:
    run(conn, "select fairq.configure_group('default', 'bob', '{\"max_running\": 5, \"rate_limit\": 7}')")
    asked = {"weight": "3", "max_running": "", "rate_limit": "7", "rate_period": "1m30s", "rate_burst": ""}
    seen = preview(browser, verb="set", queue="default", group="bob", **asked)
    assert "at once 5 its queue's (none)" in seen.text
    assert "weight its queue's (1) 3" in seen.text
    assert "rate limit" not in seen.text, "that one stays"
    confirm(browser, seen)
    state = run(conn, "select weight, max_running, rate_limit, rate_period::text from fairq.groups")
    assert state == [(3.0, None, 7, "00:01:30")]


def test_settings_of_a_queue_are_changed(conn: Conn, browser: Browser) -> None:
    asked = {"group_max_running": "2", "max_running": "9"}
    confirm(browser, preview(browser, verb="set", queue="default", **asked))
    found = run(conn, "select group_max_running, max_running from fairq.queues where queue = 'default'")
    assert found == [(2, 9)]


def test_a_change_by_somebody_else_is_shown_again(conn: Conn, browser: Browser) -> None:
    seen = preview(browser, verb="set", queue="default", group="bob", weight="3")
    run(conn, "select fairq.configure_group('default', 'bob', '{\"weight\": 2}')")
    again = confirm(browser, seen, 409)
    assert "Something has changed meanwhile" in again.text
    assert one(conn, "select weight from fairq.groups") == 2
    confirm(browser, again)
    assert one(conn, "select weight from fairq.groups") == 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weight": "much"}, "Enter a number"),
        ({"weight": "-1"}, "weight"),
        ({"max_running": "1.5"}, "Enter a number"),
        ({"rate_period": "soon"}, "Enter a length of time"),
    ],
)
def test_invalid_settings_are_refused(conn: Conn, browser: Browser, asked: dict[str, str], said: str) -> None:
    answer = browser.get(f"/preview?{urlencode({'verb': 'set', 'queue': 'default', 'group': 'bob'} | asked)}")
    if answer.status_code == 200:  # the engine knows ranges, and is asked when it is done
        seen = confirm(browser, Seen(answer.text), 400)
        assert said in seen.text
    else:
        assert (answer.status_code, said in answer.text) == (400, True)
    assert run(conn, "select from fairq.groups") == []


def test_all_that_a_tenant_has_waiting_is_cancelled(conn: Conn, browser: Browser) -> None:
    for _ in range(15):
        create(conn, "bob")
    other = create(conn, "alice")
    worker = one(conn, "select fairq.register_worker('w', array['default'], 1)")
    running = one(conn, "select id from fairq.pop_tasks('default', 1, %s)", worker)
    seen = preview(browser, verb="purge", queue="default", group="bob")
    assert "14 waiting tasks end as cancelled; 1 running ones go on" in seen.text
    assert f"/task?id={running}" not in seen.links
    assert "14 tasks cancelled" in confirm(browser, seen).text
    assert [row[0] for row in run(conn, "select id from fairq.tasks order by id")] == [running, other]


def test_tasks_created_after_the_preview_are_not_cancelled(conn: Conn, browser: Browser) -> None:
    """Tasks in line, ready and scheduled, before and after."""

    def some() -> set[int]:
        run(conn, "select fairq.configure_queue('default', '{\"ready_target\": 2}')")
        ids = {create(conn, "bob") for _ in range(4)}
        return {*ids, create(conn, "bob", run_at=datetime.now(UTC) + timedelta(hours=1))}

    before = some()
    run(conn, "select fairq.promote_overflow('default', 10)")
    seen = preview(browser, verb="purge", queue="default", group="bob")
    after = some()
    run(conn, "select fairq.promote_overflow('default', 10)")
    assert "5 tasks cancelled" in confirm(browser, seen).text
    assert {id for (id,) in run(conn, "select id from fairq.tasks")} == after
    assert {id for (id,) in run(conn, "select id from fairq.finished_tasks")} == before


def test_a_task_that_began_after_the_preview_is_shown_again(conn: Conn, browser: Browser) -> None:
    task = create(conn, "bob")
    seen = preview(browser, verb="cancel", id=str(task))
    assert "It never runs" in seen.text
    worker = one(conn, "select fairq.register_worker('w', array['default'], 1)")
    run(conn, "select fairq.pop_tasks('default', 1, %s)", worker)
    again = confirm(browser, seen, 409)
    assert "Its worker learns it" in again.text
    assert run(conn, "select from fairq.cancellations") == []
    confirm(browser, again)
    assert run(conn, "select task_id from fairq.cancellations") == [(task,)]


ODD = (
    *("", " ", "0", "-1", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "null", "None", "true"),
    *("'; drop table fairq.tasks; --", "<script>", "\u05e9\u05dc\u05d5\u05dd", "\u202e", "x" * 10_000),
    *(
        "0s",
        "1s",
        "-5m",
        "9999999999d",
        "9999-12-31T23:59:59-23:59",
        "0001-01-01T00:00:00+23:59",
        "{}",
        "\ud800",
    ),
)


def test_all_input_gets_an_answer(conn: Conn, database: Database) -> None:
    """The answer is a page, or says what is wrong; never an error of the page or the database."""
    chance = random.Random(3)
    ids = failed(conn, "bob")
    run(conn, "select fairq.configure_schedule('report', 'bob', '{\"every\": \"1 hour\"}')")
    names = (*TARGET, *OF_GROUP, *OF_QUEUE, "until", "was", "behind", "time", "behind_name", "behind_group")
    good = {
        **dict.fromkeys(("group", "behind", "behind_group"), "bob"),
        **{"queue": "default", "name": "report", "kind": "parse", "id": str(ids[0]), "time": "1 h"},
    }
    paths = ("/", "/group", "/task", "/queue", "/failures", "/schedules", "/schedule", "/mine")
    browser = client(database, allow_changes=True, secret="a secret of thirty-two bytes or so")
    csrf = form_of(preview(browser, verb="pause", queue="default"))[1]["csrf"]
    for _ in range(int(os.environ.get("FAIRQ_TEST_PASSES", "400")) // 2):
        verb = chance.choice([*VERBS, "drop", ""])
        asked = {**good, "verb": verb} | {chance.choice(names): chance.choice(ODD) for _ in range(2)}
        dropped = {name: asked[name] for name in asked if chance.random() < 0.9}
        query = urlencode(dropped, errors="surrogatepass")
        statuses = {
            browser.get(f"{chance.choice(paths)}?{query}").status_code,
            browser.get(f"/preview?{query}").status_code,
            browser.post(f"/change?{query}", {"csrf": csrf}).status_code,
        }
        assert statuses <= {200, 400, 404, 409}, (query, statuses)


def test_a_task_is_cancelled_and_retried(conn: Conn, browser: Browser) -> None:
    task = create(conn, "bob")
    confirm(browser, preview(browser, verb="cancel", id=str(task)))
    run(conn, "select fairq.promote_overflow('default', 10)")
    assert one(conn, "select outcome from fairq.finished_tasks") == "cancelled"
    confirm(browser, preview(browser, verb="retry", id=str(task)))
    assert one(conn, "select id from fairq.tasks") == task


def test_all_failures_that_match_are_retried_and_later_ones_are_not(conn: Conn, browser: Browser) -> None:
    ids = failed(conn, "bob", "alice", "bob")
    others = failed(conn, "bob", kind="send")
    seen = preview(browser, verb="retry-all", queue="default", kind="parse")
    assert "3 failed tasks of 2 tenants" in seen.text
    later = failed(conn, "bob")
    assert "3 tasks will run again" in confirm(browser, seen).text
    assert [row[0] for row in run(conn, "select id from fairq.tasks order by id")] == ids
    left = run(conn, "select id from fairq.finished_tasks order by id")
    assert [row[0] for row in left] == [*others, *later]


def test_a_page_that_only_shows_changes_nothing(conn: Conn, database: Database, browser: Browser) -> None:
    create(conn, "bob")
    for allow in (False, lambda request: False):
        reader = client(database, allow_changes=allow)
        for path in ("/group?queue=default&group=bob", "/queue?queue=default", "/failures", "/task?id=1"):
            assert not [each for each in page(reader, path).links if "/preview" in each]
        preview(reader, 403, verb="pause", queue="default")
        action, fields = form_of(preview(browser, verb="pause", queue="default"))
        assert reader.post(action, fields, {"cookie": f"fairq_csrf={fields['csrf']}"}).status_code == 403
    assert not one(conn, "select paused_at is not null from fairq.queues where queue = 'default'")


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"cookie": ""}, {}),
        ({"cookie": "fairq_csrf=other"}, {}),
        ({}, {"csrf": ""}),
        ({"sec-fetch-site": "cross-site"}, {}),
        ({"sec-fetch-site": "same-site"}, {}),
        ({"origin": "http://evil.example"}, {}),
        ({"origin": "null"}, {}),
        ({"origin": "http://["}, {}),
    ],
)
def test_a_form_from_elsewhere_is_refused(
    conn: Conn, browser: Browser, headers: dict[str, str], fields: dict[str, str]
) -> None:
    action, own = form_of(preview(browser, verb="pause", queue="default"))
    assert browser.post(action, own | fields, headers).status_code == 403
    assert not one(conn, "select paused_at is not null from fairq.queues where queue = 'default'")
    action, own = form_of(preview(browser, verb="pause", queue="default"))
    same = {"sec-fetch-site": "same-origin", "origin": "http://localhost"}
    assert browser.post(action, own, same).status_code == 200


def test_a_role_that_may_not_change_is_told_so(conn: Conn, database: Database) -> None:
    browser = client(as_role(database, "fairq_observe"), allow_changes=True)
    seen = confirm(browser, preview(browser, verb="pause", queue="default"), 403)
    assert "permission denied" in seen.text


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"verb": "drop"},
        {"verb": "pause"},
        {"verb": "cancel", "id": "x"},
        {"verb": "retry-all", "until": "now"},
        {"verb": "retry-all", "until": "2026-01-01"},
        {"verb": "purge", "queue": "default", "group": ""},
    ],
)
def test_a_change_that_makes_no_sense_is_refused(browser: Browser, asked: dict[str, str]) -> None:
    preview(browser, 400, **asked)
