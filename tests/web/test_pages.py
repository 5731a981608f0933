"""What the pages show, to whom; a tenant's text stays text."""

import itertools
import re
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.types.json import Jsonb
from starlette.applications import Starlette
from starlette.routing import Mount

from fairq import metrics, web
from fairq.web import app
from fairq.web.site import Ask, Site
from tests.cli.running import as_role
from tests.support.calls import create, one, run
from tests.support.database import Database
from tests.web.asking import TOKEN, Browser, Seen, client, page

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\u0007{{ 7*7 }}"


def worker(conn: psycopg.Connection[Any], slots: int = 2, name: str = "w") -> int:
    return int(one(conn, "select fairq.register_worker(%s, array['default'], %s)", name, slots))


def pop(conn: psycopg.Connection[Any], worker_id: int, many: int) -> list[int]:
    return [row[0] for row in run(conn, "select id from fairq.pop_tasks('default', %s, %s)", many, worker_id)]


def finish(conn: psycopg.Connection[Any], worker_id: int, id: int, outcome: str, error: Any = None) -> None:
    run(
        conn,
        "select fairq.finish_tasks(%s, array[%s]::bigint[], array[1], array[%s],"
        " p_errors => array[%s]::jsonb[])",
        worker_id,
        id,
        outcome,
        None if error is None else Jsonb(error),
    )


def every_page(group: str, ids: list[int]) -> list[str]:
    own = urlencode({"queue": "default", "group": group})
    return [
        "/",
        "/?behind=",
        "/queues",
        "/workers",
        "/schedules",
        "/failures",
        "/upkeep",
        "/doctor",
        f"/group?{own}",
        "/failures?kind=%3Cb%3E",
        *(f"/task?id={id}" for id in ids),
    ]


def test_the_first_page_shows_each_tenant(conn: psycopg.Connection[Any], database: Database) -> None:
    for group, many in (("bob", 30), ("alice", 1)):
        for _ in range(many):
            create(conn, group)
    pop(conn, worker(conn), 2)
    seen = page(client(database), "/")
    assert "busy slots 2 of 2" in seen.text
    assert re.search(r"bob 1 50\.0% 50\.0% 29 \d", seen.text)
    assert re.search(r"alice 1 50\.0% 50\.0% 0 ", seen.text)
    assert "/group?queue=default&group=bob" in seen.links


def test_a_tenant_page_says_why_each_task_waits(conn: psycopg.Connection[Any], database: Database) -> None:
    ids = [create(conn, "bob") for _ in range(3)]
    run(conn, "select fairq.configure_group('default', 'bob', '{\"max_running\": 1}')")
    assert pop(conn, worker(conn), 2) == ids[:1]
    seen = page(client(database), "/group?queue=default&group=bob")
    assert "1 at once" in seen.text
    assert "running by worker" in seen.text
    assert "1 tasks are in flight, the cap is 1" in seen.text
    assert [f"/task?id={id}" for id in ids] == [each for each in seen.links if "/task" in each]


def test_a_task_page_tells_its_life(conn: psycopg.Connection[Any], database: Database) -> None:
    task = create(conn, "bob", '{"file": "a.pdf"}', kind="parse", max_attempts=1)
    held_by = worker(conn)
    pop(conn, held_by, 1)
    finish(
        conn,
        held_by,
        task,
        "failed",
        {"type": "ValueError", "message": "no such page", "traceback": "line 1\nline 2"},
    )
    seen = page(client(database), f"/task?id={task}")
    for said in ("failed", "ValueError: no such page", "line 1 line 2", '"file": "a.pdf"', "attempt 1"):
        assert said in seen.text, said


def test_a_tenants_text_stays_text(conn: psycopg.Connection[Any], database: Database) -> None:
    """On every page, in every place: keys, kinds, payloads, headers, errors, names of workers and queues."""
    run(conn, "select fairq.configure_queue(%s, '{}')", HOSTILE)
    error = {"type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE, "code": HOSTILE}
    held_by = worker(conn, 5, HOSTILE)
    ids = [
        create(
            conn,
            HOSTILE,
            f'["{HOSTILE[:20]}"]',
            kind=HOSTILE,
            concurrency_key=key,
            headers=Jsonb({HOSTILE[:50]: HOSTILE[:50]}),
        )
        for key in (None, HOSTILE, HOSTILE)
    ]
    taken = pop(conn, held_by, 2)
    finish(conn, held_by, taken[0], "failed", error)
    browser = client(database, allow_changes=True)
    plain = page(client(database), "/queues")
    known = {tag for tag, _ in plain.elements} | {
        "dl",
        "dt",
        "dd",
        "div",
        "h2",
        "ol",
        "li",
        "pre",
        "details",
        "summary",
        "time",
        "svg",
        "rect",
        "path",
        "line",
        "form",
        "input",
        "label",
        "section",
        "b",
        "i",
        "br",
        "button",
        "bdi",
    }
    for path in every_page(HOSTILE, ids):
        seen = page(browser, path)
        assert {tag for tag, _ in seen.elements} <= known, path
        for tag, attributes in seen.elements:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], path
            assert tag != "script" or (attributes.get("src") or "").startswith("/static/app.js"), path
            assert not (attributes.get("href") or "").startswith("javascript:"), path
        shown = [each.get("title") or "" for tag, each in seen.elements if tag != "input"]
        assert not [each for each in (seen.text, *shown) if "\u202e" in each or "\a" in each], path
        assert "{{ 7*7 }}" in seen.text or "{{" not in seen.html, path


@pytest.mark.parametrize(
    "key",
    [
        *("../..", "a/b?c=d&e#f", " ", "%00", "a\nb", "ä€𝄞", "x" * 500, "<b>", "+", "javascript:alert(1)"),
        *(
            "null",
            "None",
            "undefined",
            "0",
            "'; drop table fairq.tasks; --",
            "{{ 7*7 }}",
            "\u05e9\u05dc\u05d5\u05dd",
            "\u202eevil",
        ),
    ],
)
def test_any_key_has_its_page(conn: psycopg.Connection[Any], database: Database, key: str) -> None:
    """F7."""
    create(conn, key)
    browser = client(database)
    (link,) = [each for each in page(browser, "/").links if "group=" in each]
    task = one(conn, "select id from fairq.tasks")
    assert f"/task?id={task}" in page(browser, link).links


def test_a_key_that_no_tenant_can_have_is_refused(conn: psycopg.Connection[Any], database: Database) -> None:
    """The engine refuses 10 kB, and so does the page."""
    browser = client(database, allow_changes=True)
    for key in ("<b>" * 3500, "\u05e9" * 5000):
        for path in ("/group?", "/preview?verb=purge&", "/preview?verb=pause&"):
            seen = page(browser, f"{path}{urlencode({'queue': 'default', 'group': key})}", 400)
            assert len(seen.html) < 3000
            assert "b" not in {tag for tag, _ in seen.elements}


def test_a_role_that_may_observe_sees_all_but_payloads_and_errors(
    conn: psycopg.Connection[Any], database: Database
) -> None:
    ids = [create(conn, "bob", '{"secret": "payload"}', max_attempts=1) for _ in range(2)]
    held_by = worker(conn)
    pop(conn, held_by, 1)
    finish(conn, held_by, ids[0], "failed", {"type": "Secret", "message": "error"})
    browser = client(as_role(database, "fairq_observe"))
    for path in every_page("bob", ids):
        seen = page(browser, path)
        assert "ecret" not in seen.html, path
    assert "hidden" in page(browser, f"/task?id={ids[0]}").text
    assert "hidden" in page(browser, "/failures").text
    assert "secret" in page(client(as_role(database, "fairq_admin")), f"/task?id={ids[1]}").text


def test_a_role_that_may_not_look_is_told_so(database: Database) -> None:
    seen = page(client(as_role(database, "fairq_enqueue")), "/queues", 403)
    assert "permission denied" in seen.text


def test_a_database_that_is_away_is_said_so_and_health_sees_it() -> None:
    browser = client("postgresql://nobody:s3cr3t@127.0.0.1:1/nowhere")
    assert "s3cr3t" not in page(browser, "/", 503).html
    assert browser.get("/health").status_code == 503


def test_schedules_are_listed(conn: psycopg.Connection[Any], database: Database) -> None:
    for number in range(3):
        settings = Jsonb({"every": "1 hour"})
        run(conn, "select fairq.configure_schedule('nightly', %s, %s)", f"tenant {number}", settings)
    seen = page(client(as_role(database, "fairq_observe")), "/schedules")
    assert seen.text.count("every 1 h") == 3
    assert "/group?queue=default&group=tenant+1" in seen.links


def test_metrics_are_those_of_the_exporter(conn: psycopg.Connection[Any], database: Database) -> None:
    create(conn, "bob")
    answer = client(as_role(database, "fairq_observe")).get("/metrics")
    assert answer.headers["content-type"] == metrics.CONTENT_TYPE
    assert "\nfairq_horizon_age_seconds 0" in answer.text
    assert client(database, token=TOKEN).get("/metrics").status_code == 401


def test_health_asks_for_no_token(database: Database) -> None:
    answer = client(database, token="x" * 20).get("/health")
    assert (answer.status_code, answer.json()) == (200, {"ok": True})


def test_many_who_ask_for_health_ask_the_database_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    ask = Site.ask

    def counted(site: Site) -> AbstractContextManager[Ask]:
        asked.append(None)
        return ask(site)

    monkeypatch.setattr(Site, "ask", counted)
    monkeypatch.setattr(app, "HEALTH_SECONDS", 60.0)
    browser = client(database, token=TOKEN)
    assert browser.gets(["/health"] * 50) == [200] * 50
    assert len(asked) == 1


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/task?id=999999", "/group?queue=nope&group=x", "/static/../app.py", "/static/nothing"],
)
def test_missing_things_are_not_found(database: Database, path: str) -> None:
    assert client(database).get(path).status_code == 404


@pytest.mark.parametrize(
    "path", ["/task", "/task?id=abc", "/task?id=99999999999999999999", "/group?queue=default&group=a%00b"]
)
def test_nonsense_is_refused(database: Database, path: str) -> None:
    assert client(database).get(path).status_code == 400


def test_a_page_reads_in_a_transaction_that_cannot_write(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairq.web.site import Site

    with Site(database.dsn).ask() as ask, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        ask.conn.execute("select fairq.create_task('bob', '{}')")


def test_the_changing_part_of_a_page_comes_as_events(
    conn: psycopg.Connection[Any], database: Database
) -> None:
    create(conn, "bob")
    whole = page(client(database), "/group?queue=default&group=bob")
    event = client(database).stream("/group?queue=default&group=bob").parts[0]
    assert event.startswith("event: message\ndata: ")
    live = Seen("\n".join(line.removeprefix("data: ") for line in event.splitlines()[1:]))
    assert "First in line" in live.text
    assert live.text in whole.text.replace("  ", " ") or live.links == [e for e in whole.links if "task" in e]
    assert "<html" not in event


def test_a_stream_says_when_the_page_cannot_be_had(database: Database) -> None:
    events = client(database).stream("/group?queue=nope&group=x").parts
    assert events == ['event: trouble\ndata: "Not found"\n\n']


def test_it_works_below_another_application(conn: psycopg.Connection[Any], database: Database) -> None:
    create(conn, "bob")
    app = Starlette(routes=[Mount("/ops/fairq", web.asgi(database.dsn, allow=lambda request: True))])
    browser = Browser(app)
    seen = page(browser, "/ops/fairq/")
    addresses = [
        value or ""
        for _, each in seen.elements
        for name, value in each.items()
        if name in ("href", "src", "action")
    ]
    assert addresses
    assert not [each for each in addresses if not each.startswith(("/ops/fairq/", "#main"))]
    for each in {each for each in addresses if each.startswith("/")}:
        assert browser.get(each).status_code in (200, 400), each


def test_tenants_are_listed_by_name_page_by_page(conn: psycopg.Connection[Any], database: Database) -> None:
    names = sorted(f"tenant {number:03}" for number in range(100))
    run(conn, "select fairq.create_tasks(%s::text[], array_fill('{}'::jsonb, array[100]))", names)
    browser, path, found = client(database), "/?queue=default&behind=", list[str]()
    for _ in itertools.repeat(None, 5):
        seen = page(browser, path)
        found += [each["title"] or "" for tag, each in seen.elements if tag == "a" and "title" in each]
        further = [each["href"] for tag, each in seen.elements if each.get("rel") == "next"]
        if not further:
            break
        path = further[0] or ""
    assert found == names
