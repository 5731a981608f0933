"""Who is let in, and the headers for browsers."""

import pytest
from starlette.requests import Request

from fairq import web
from fairq.errors import ConfigurationError
from tests.support.database import Database
from tests.web.asking import TOKEN, client, page


def test_somebody_has_to_say_who_may_look(database: Database) -> None:
    with pytest.raises(ConfigurationError):
        web.asgi(database.dsn)


def test_a_short_token_is_refused(database: Database) -> None:
    with pytest.raises(ConfigurationError):
        web.asgi(database.dsn, token="secret")


@pytest.mark.parametrize(
    "path", ["/", "/queues", "/task?id=1", "/doctor", "/?token=wrong", "/group?group=bob"]
)
def test_without_the_token_nothing_is_shown(database: Database, path: str) -> None:
    browser = client(database, token=TOKEN)
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"cookie": "fairq_web=wrong"},
        {"accept": "text/event-stream"},
    ):
        answer = browser.get(path, headers=headers)
        assert answer.status_code == 401
        assert "default" not in answer.text


def test_the_token_opens_once_and_a_cookie_from_then_on(database: Database) -> None:
    browser = client(database, token=TOKEN)
    answer = browser.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert browser.get("/").status_code == 200


def test_the_form_takes_the_token_too(database: Database) -> None:
    browser = client(database, token=TOKEN)
    assert browser.post("/login", data={"token": "wrong"}).headers.get("set-cookie") is None
    browser.post("/login", data={"token": TOKEN})
    assert browser.get("/").status_code == 200


def test_a_program_sends_the_token_as_a_header(database: Database) -> None:
    answer = client(database, token=TOKEN).get("/queues", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("is_async", [False, True])
def test_an_application_decides_who_may_look(database: Database, is_async: bool) -> None:
    def allow(request: Request) -> bool:
        return request.headers.get("x-user") == "operator"

    async def allow_async(request: Request) -> bool:
        return allow(request)

    browser = client(database, allow=allow_async if is_async else allow)
    assert browser.get("/").status_code == 401
    assert browser.get("/", headers={"x-user": "operator"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8377", 200),
        ("127.0.0.1", 200),
        ("[::1]:8377", 200),
        ("evil.example", 401),
        ("localhost.evil.example", 401),
        ("", 401),
        ("[", 401),
        ("a]b", 401),
    ],
)
def test_without_a_token_only_this_machine_by_its_own_name_is_let_in(
    database: Database, host: str, status: int
) -> None:
    """The owner of a name that points at 127.0.0.1 could make a browser ask us."""
    from fairq.web.guard import from_here

    assert client(database, allow=from_here).get("/queues", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/", "/nothing", "/health", "/static/app.css", "/task?id=0"])
def test_every_answer_forbids_what_it_does_not_need(database: Database, path: str) -> None:
    headers = client(database).get(path).headers
    rules = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules.values()) == {"'none'", "'self'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-cache" if path.startswith("/static") else "no-store")


@pytest.mark.parametrize("name", ["app.css", "app.js", "icon.svg"])
def test_a_browser_gets_a_file_only_once(database: Database, name: str) -> None:
    asked = client(database)
    first = asked.get(f"/static/{name}")
    again = asked.get(f"/static/{name}", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.text) == (200, 304, "")
    assert again.headers["cache-control"] == "no-cache"
    assert {"app.css": "css", "app.js": "javascript", "icon.svg": "svg"}[name] in first.headers[
        "content-type"
    ]


def test_a_page_loads_nothing_from_elsewhere(database: Database) -> None:
    seen = page(client(database), "/")
    for _, each in seen.elements:
        for name in ("src", "href", "action"):
            assert (each.get(name) or "/").startswith(("/", "#")), each
        assert not (each.get("src") or "").startswith("//")


@pytest.mark.parametrize("path", ["/", "/nothing", "/?token=wrong"])
def test_a_stranger_does_not_learn_which_database_it_is(database: Database, path: str) -> None:
    name = database.dsn.rsplit("/", 1)[-1].partition("?")[0]
    assert name in client(database).get("/queues").text
    answer = client(database, token=TOKEN).get(path)
    assert answer.status_code in (401, 404)
    assert name not in answer.text
