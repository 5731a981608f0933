"""The page in a real browser: it renders, refreshes, fits, and its own security rules do not stop it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from fairq import web
from fairq.web.guard import from_here
from fairq.web.serve import in_background
from tests.support.calls import create, one, run
from tests.support.database import Database
from tests.support.server import with_database
from tests.web import chromium
from tests.web.chromium import Tab

pytestmark = [
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.new_database,
]


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


def test_an_open_page_outlives_its_database(
    conn: psycopg.Connection[object], database: Database, address: str, tab: Tab
) -> None:
    """It says so, keeps what it showed, and goes on by itself."""
    tab.go(address)
    tab.until("document.getElementById('state').dataset.state === 'live'")
    name = psycopg.sql.Identifier(conn.info.dbname)
    with psycopg.connect(with_database(database.dsn, "postgres"), autocommit=True) as admin:
        try:
            admin.execute(psycopg.sql.SQL("alter database {} allow_connections false").format(name))
            tab.until("document.getElementById('state').dataset.state === 'broken'")
            assert "bob" in tab.value("document.querySelector('main').textContent")
        finally:
            admin.execute(psycopg.sql.SQL("alter database {} allow_connections true").format(name))
    create(conn, "dave")
    tab.until("[...document.querySelectorAll('td.key')].some(each => each.textContent.trim() === 'dave')")
    assert tab.value("document.getElementById('state').dataset.state") == "live"


NAMES = (
    "customer-" + "0123456789abcdef" * 15,
    "\u05e9\u05dc\u05d5\u05dd " * 6,
    "\U0001f469\u200d\U0001f469 & 'co'",
    "<script>alert('x')</script>\"",
)
HOURLY = Jsonb({"every": "1 hour", "kind": "k"})
PAGES = (
    "/",
    "/queues",
    "/queue?queue=default",
    "/workers",
    "/failures",
    "/schedules",
    "/upkeep",
    "/doctor",
    "/group?queue=default&group=bob",
    "/task?id=1",
    "/schedule?name=report&group=bob",
    "/preview?verb=purge&queue=default&group=bob",
    "/preview?verb=run-schedule&name=report&group=bob",
)
# What sticks out of its window, or of the box that it is in; cells that say another thing than their head.
STICKS_OUT = """
[...document.querySelectorAll('html, .table')].filter(each => each.scrollWidth > each.clientWidth)
  .map(each => each.className + ' ' + each.scrollWidth + ' > ' + each.clientWidth)
"""
MISLABELED = """
[...document.querySelectorAll('td[data-is]')].filter(each => {
  let at = 0;
  for (let cell = each; cell = cell.previousElementSibling;) at += cell.colSpan;
  const heads = [...each.closest('table').querySelectorAll('th')].flatMap(th => Array(th.colSpan).fill(th));
  return heads[at].textContent !== each.dataset.is;
}).map(each => each.dataset.is)
"""
# Texts whose contrast with what is behind them is less than 4.5 to 1.
FAINT = """
(() => {
  const light = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(each => each / 255)
      .map(each => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const behind = each => {
    for (; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
  };
  const own = each => [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  return [...document.querySelectorAll('body *')].filter(own).filter(each => {
    const [one, other] = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
    return each.offsetParent && !each.classList.contains('scale') && (one + .05) / (other + .05) < 4.5;
  }).map(each => each.outerHTML.slice(0, 100));
})()
"""


def test_every_page_fits_and_is_readable_whatever_names_there_are(
    conn: psycopg.Connection[object], address: str, tab: Tab
) -> None:
    """At 400, 1280 and 2560 pixels, dark and light."""
    for name in NAMES:
        for kind in ("parse", "app.documents." + "a_long_name_of_a_handler_" * 5):
            create(conn, name, kind=kind, max_attempts=1)
        run(conn, "select fairq.configure_schedule(%s, %s, %s)", name[:99], name, HOURLY)
    run(conn, "select fairq.configure_schedule('report', 'bob', %s)", HOURLY)
    worker = one(conn, "select fairq.register_worker('a host ' || repeat('x', 90), array['default'], 50)")
    ids = [id for (id,) in run(conn, "select id from fairq.pop_tasks('default', 50, %s)", worker)]
    error = Jsonb({"type": "a.module." + "VeryLongError" * 8, "message": "what it said " * 50})
    run(
        conn,
        "select fairq.finish_tasks(%s, %s, array_fill(1, array[%s]), array_fill('failed'::text, array[%s]),"
        " p_errors => array_fill(%s::jsonb, array[%s]))",
        worker,
        ids,
        *[len(ids)] * 2,
        error,
        len(ids),
    )
    found: dict[str, list[str]] = {}
    for path in PAGES:
        tab.go(address.rstrip("/") + path)
        for width in (400, 1280, 2560):
            tab.looks(width)
            found[f"{path} at {width}"] = tab.value(STICKS_OUT)
        found[f"{path}, labels"] = tab.value(MISLABELED)
        for scheme in ("light", "dark"):
            tab.looks(1280, scheme=scheme)
            found[f"{path}, {scheme}"] = tab.value(FAINT)
        found[f"{path}, said"] = tab.said
    assert {where: what for where, what in found.items() if what} == {}


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
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert tab.value(
        "[...document.querySelectorAll('main [href], main input')].every(each => each.tabIndex >= 0)"
    )
