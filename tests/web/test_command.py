"""`fairq web`: a process that prints its address, serves, and ends."""

import re
import signal
import subprocess
import urllib.error
import urllib.request

import pytest

from tests.cli.running import fairq, process
from tests.support.calls import create
from tests.support.database import Database
from tests.web.asking import TOKEN


def address_of(started: "subprocess.Popen[str]") -> str:
    assert started.stdout
    line = started.stdout.readline().strip()
    assert line, started.stderr.read() if started.stderr else ""
    return line


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(database: Database, number: signal.Signals) -> None:
    create(database.connect(autocommit=True), "bob")
    with process(database, "web", "--port", "0") as started:
        address = address_of(started)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert "bob" in read(address)
        assert "/preview" not in read(f"{address}group?queue=default&group=bob")
        # A page that is open does not hold it up.
        request = urllib.request.Request(address, headers={"accept": "text/event-stream"})
        with urllib.request.urlopen(request, timeout=30) as stream:
            assert stream.readline() == b"event: message\n"
            started.send_signal(number)
            assert started.wait(timeout=30) == 0
        assert started.stderr
        assert started.stderr.read() == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2"])
def test_it_makes_a_token_if_no_address_is_let_in(database: Database, host: str) -> None:
    """The page trusts the addresses that browsers on this machine use."""
    with process(database, "web", "--host", host, "--port", "0") as started:
        address = address_of(started).replace("0.0.0.0", "127.0.0.1")
        plain, _, token = address.partition("?token=")
        assert len(token) > 30
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(plain)
        request = urllib.request.Request(plain, headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200


def test_a_port_that_is_taken_is_said_so(database: Database) -> None:
    with process(database, "web", "--port", "0", "--token", TOKEN) as started:
        port = re.findall(r":(\d+)/", address_of(started))[0]
        done = fairq(database, "web", "--port", port)
        assert done.exit_code == 1
        assert "cannot listen" in done.stderr


def test_the_address_that_it_prints_opens_the_page_whatever_the_token_is(database: Database) -> None:
    with process(database, "web", "--port", "0", "--token", "a token & more + 100% of it #1") as started:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address_of(started), timeout=30) as answer:
            assert answer.status == 200


def test_a_short_token_is_refused(database: Database) -> None:
    done = fairq(database, "web", "--token", "short")
    assert done.exit_code == 2
    assert "It needs 16" in done.stderr
