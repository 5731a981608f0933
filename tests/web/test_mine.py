"""A tenant's own view: its standing, by a pass, and nothing about others."""

import time
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

import fairq
from fairq import web
from fairq.web import pages
from fairq.web.signing import Pass, link, sign_pass
from fairq.web.site import Ask, Page
from tests.support.calls import create, one, run
from tests.support.database import Database
from tests.web.asking import TOKEN, Browser, Seen, client

SECRET = "a secret of thirty-two bytes or so"


@pytest.fixture
def conn(database: Database) -> psycopg.Connection[Any]:
    conn = database.connect(autocommit=True)
    for group, many in (("bob", 9), ("alice", 3), ("mallory", 2)):
        for _ in range(many):
            create(conn, group)
    worker = one(conn, "select fairq.register_worker('w', array['default'], 4)")
    run(conn, "select fairq.pop_tasks('default', 4, %s)", worker)
    return conn


@pytest.fixture
def browser(database: Database) -> Browser:
    return client(database, token=TOKEN, secret=SECRET)


def test_a_link_shows_where_its_tenant_stands(conn: psycopg.Connection[Any], browser: Browser) -> None:
    answer = browser.get(f"/{link(SECRET, 'default', 'alice', seconds=60)}")
    assert answer.status_code == 200
    seen = Seen(answer.text)
    assert "running 1 waiting 2" in seen.text
    assert "your share 25.0%" in seen.text
    assert not [name for name in ("bob", "mallory", "postgres") if name in answer.text]
    assert seen.links == []


def test_a_program_gets_it_as_json(conn: psycopg.Connection[Any], browser: Browser) -> None:
    path = f"/{link(SECRET, 'default', 'bob', seconds=60)}"
    found = browser.get(path, {"accept": "application/json"}).json()
    assert (found["queue"], found["group_key"], found["running"], found["waiting"]) == (
        "default",
        "bob",
        2,
        7,
    )
    assert found["ahead"] >= 0
    assert found["share"] == pytest.approx(0.5)
    assert browser.stream(path).parts[0].startswith("event: message")


def test_an_application_asks_on_its_own_connection(conn: psycopg.Connection[Any], database: Database) -> None:
    found = web.standing(database.connect_as("fairq_observe"), "default", "alice")
    assert (found.running, found.waiting, found.held_back_by) == (1, 2, None)
    assert web.standing(conn, "default", "nobody").waiting == 0


def test_a_tenant_sees_only_its_own_limits(conn: psycopg.Connection[Any]) -> None:
    run(conn, "select fairq.configure_group('default', 'alice', '{\"max_running\": 1}')")
    run(conn, "select fairq.promote_overflow('default', 10)")
    assert web.standing(conn, "default", "alice").held_back_by == "1 tasks are in flight, the cap is 1"
    run(conn, "select fairq.pause_queue('default')")
    assert web.standing(conn, "default", "alice").held_back_by == "a limit that is shared"


def test_the_rest_of_a_budget_is_shown(conn: psycopg.Connection[Any]) -> None:
    run(conn, "select fairq.configure_queue('default', '{\"fairness\": \"cost\"}')")
    run(
        conn,
        "select fairq.configure_group('default', 'alice', '{\"budget\": 50, \"budget_period\": \"1 day\"}')",
    )
    found = web.standing(conn, "default", "alice")
    assert found.budget == 50
    assert found.budget_left is not None
    assert 0 <= found.budget_left <= 50
    assert found.budget_renews_at is not None
    assert web.standing(conn, "default", "bob").budget is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        sign_pass(SECRET, Pass("default", "bob", int(time.time()) - 1)),
        sign_pass(SECRET + "!", Pass("default", "bob", int(time.time()) + 60)),
        TOKEN,
    ],
    ids=["none", "nonsense", "over", "of another secret", "the token of operators"],
)
def test_without_a_pass_that_holds_nothing_is_shown(
    conn: psycopg.Connection[Any], browser: Browser, text: str
) -> None:
    for headers in ({}, {"accept": "application/json"}, {"accept": "text/event-stream"}):
        answer = browser.get(f"/mine?pass={quote(text)}", headers)
        assert (answer.status_code, answer.text) == (404, "This link has expired.")


def test_a_pass_opens_nothing_else(conn: psycopg.Connection[Any], browser: Browser) -> None:
    """Other parameters do not count either."""
    path = link(SECRET, "default", "alice", seconds=60)
    query = path.partition("?")[2]
    assert (
        browser.get(f"/{path}&group=bob&queue=other", {"accept": "application/json"}).json()["waiting"] == 2
    )
    for each in ("/", "/group", "/queues", "/task", "/failures"):
        assert browser.get(f"{each}?{query}&group=alice&id=1").status_code == 401
        assert browser.get(each, {"authorization": f"Bearer {query[5:]}"}).status_code == 401


def test_without_a_secret_there_are_no_links(database: Database) -> None:
    path = link(SECRET, "default", "alice", seconds=60)
    assert client(database).get(f"/{path}").status_code == 404


def test_a_short_secret_is_refused_at_once(database: Database) -> None:
    with pytest.raises(fairq.ConfigurationError, match="the secret has 5 bytes"):
        client(database, secret="short")


def test_the_pages_that_a_tenant_has_open_take_nothing_from_others(
    conn: psycopg.Connection[Any], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairq.web.app.STREAMS", 4)
    monkeypatch.setattr("fairq.web.app.STREAMS_OF_TENANT", 2)
    browser = client(database, secret=SECRET)
    mallory, bob, alice = (
        f"/{link(SECRET, 'default', key, seconds=600)}" for key in ("mallory", "bob", "alice")
    )
    for _ in range(2):  # those that are closed do not count
        assert browser.streams([mallory] * 3 + [bob] * 2 + [alice] + ["/queues"] * 5) == (
            [200, 200, 503] + [200, 200] + [503] + [200] * 4 + [503]
        )


def test_repeated_requests_ask_the_database_once(
    conn: psycopg.Connection[Any], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    mine = pages.mine

    def counted(ask: Ask) -> Page:
        asked.append(ask.params["group"])
        return mine(ask)

    monkeypatch.setattr(pages, "mine", counted)
    browser = client(database, secret=SECRET)
    alice, bob = (f"/{link(SECRET, 'default', key, seconds=600)}" for key in ("alice", "bob"))
    for _ in range(20):
        assert browser.get(alice, {"accept": "application/json"}).json()["waiting"] == 2
        assert browser.get(alice).status_code == 200
        browser.stream(alice)
    browser.get(bob)
    assert asked == ["alice", "bob"]
    monkeypatch.setattr("fairq.web.app.MINE_SECONDS", 0.0)
    create(conn, "alice")
    browser = client(database, secret=SECRET)
    assert browser.get(alice, {"accept": "application/json"}).json()["waiting"] == 3
