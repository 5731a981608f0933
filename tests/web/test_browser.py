"""The page in a real browser: it is drawn, it refreshes, it fits, and its own rules do not stop it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fairq import web
from fairq.web.guard import from_here
from fairq.web.serve import in_background
from tests.support.calls import create, one, run
from tests.support.database import Database
from tests.web import chromium
from tests.web.chromium import Tab

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium.browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def conn(database: Database) -> psycopg.Connection[object]:
    conn = database.connect(autocommit=True)
    for group, many in (("bob", 40), ("alice", 2), ("carol", 1), ("<b>mal\nlory</b>", 3)):
        for _ in range(many):
            create(conn, group)
    worker = one(conn, "select fairq.register_worker('w', array['default'], 8)")
    run(conn, "select fairq.pop_tasks('default', 6, %s)", worker)
    return conn


@pytest.fixture
def address(conn: object, database: Database) -> Iterator[str]:
    with in_background(web.asgi(database.dsn, allow=from_here, allow_changes=True)) as found:
        yield found


def test_a_page_fits_its_window_and_follows_what_happens(
    conn: psycopg.Connection[object], address: str, tab: Tab
) -> None:
    tab.go(address)
    for width in (400, 1280, 2560):
        tab.looks(width, scheme="dark")
        assert tab.value("document.documentElement.scrollWidth") <= width
        assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 23)"
    tab.until("document.getElementById('state').dataset.state === 'live'")
    create(conn, "dave")
    tab.until("[...document.querySelectorAll('td.key')].some(each => each.textContent.trim() === 'dave')")
    assert tab.value("document.querySelectorAll('b').length") == 0
    assert tab.said == []


def test_a_change_is_shown_and_then_made(
    conn: psycopg.Connection[object], address: str, tab: Tab, tmp_path: Path
) -> None:
    """By a group whose name has a line's end, which browsers send as two characters in a field."""
    tab.looks(1280)
    tab.go(address)
    tab.click("[...document.querySelectorAll('td.key a')].find(each => each.textContent.includes('lory'))")
    tab.value("document.querySelector('input[name=weight]').value = '3'")
    tab.click("document.querySelector('form.settings button')")
    assert "weight" in tab.value("document.querySelector('main').textContent")
    assert run(conn, "select from fairq.groups") == []
    tab.click("document.querySelector('form.verbs button')")
    assert "1 setting changed" in tab.value("document.querySelector('main').textContent")
    assert run(conn, "select group_key, weight from fairq.groups") == [("<b>mal\nlory</b>", 3.0)]
    assert tab.said == []


def test_the_keyboard_reaches_everything(address: str, tab: Tab) -> None:
    tab.go(address)
    for kind in ("keyDown", "keyUp"):
        tab.ask(
            "Input.dispatchKeyEvent", type=kind, key="/", text="/" if kind == "keyDown" else "", code="Slash"
        )
    assert tab.value("document.activeElement.name") == "group"
    assert tab.value(
        "[...document.querySelectorAll('main [href], main input')].every(each => each.tabIndex >= 0)"
    )
