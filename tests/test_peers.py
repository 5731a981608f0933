"""Other queues beside fairq: what the runner makes of adapters, and of those that are missing or fail."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import bench_peers
from benchmarks.bench_peers import drain_rate, first_and_last_quarter, measure, url, wait
from benchmarks.harness import SCALES, Session
from benchmarks.peers import places
from benchmarks.peers.places import Missing, Place
from benchmarks.peers.processes import Adapter, Failed, Report, running, said_once
from benchmarks.results import gather
from tests.support.database import Database

PEERS = Path(places.__file__).parent
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no node here")


def session(dsn: str) -> Session:
    return Session("peers", dsn, SCALES["tiny"], io.StringIO())


def notes(run: Session) -> dict[str, str]:
    assert isinstance(run.out, io.StringIO)
    return gather(map(json.loads, run.out.getvalue().splitlines())).notes["peers"]


def test_missing_and_failing_peers_are_reported_and_cost_the_others_nothing(
    empty_database: Database, tmp_path: Path
) -> None:
    run = session(empty_database.dsn)
    absent = Place("absent", ("absent==1",), folder=tmp_path)
    measure(run, bench_peers.SIZES["tiny"], [absent, Breaks("breaks"), HasNoWorker("fifo")])
    assert notes(run)["absent"] == "not measured: not installed: python -m benchmarks.peers install absent"
    assert notes(run)["breaks"] == "not measured: about ended with 1: no such adapter"
    for scenario in ("drain", "drain_by_two", "latency", "newcomers", "held_snapshot"):
        assert f"{scenario} failed: work ended with 1: no such adapter" in notes(run)["fifo"]
    assert {(record["subject"], record["what"]) for record in run.records} == {("fifo", "bulk enqueue")}


def test_a_failure_of_our_own_is_not_a_line_of_the_results_but_an_error(empty_database: Database) -> None:
    with pytest.raises(Failed, match="about ended with 1"):
        measure(session(empty_database.dsn), bench_peers.SIZES["tiny"], [OursBreaks("fairq")])


def test_a_worker_that_dies_is_told_with_its_last_words() -> None:
    with (
        running(Breaks("breaks"), "work", "postgresql://nowhere") as adapter,
        pytest.raises(Failed, match="work ended with 1: no such adapter"),
    ):
        adapter.answer(30)


def test_what_cannot_be_installed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="npm is not here"):
        places.install(Place("some", ("some@1",), node=True, folder=tmp_path), lambda line: None)
    assert not Place("some", ("some@1",), node=True, folder=tmp_path).is_here


def test_another_pin_asks_for_a_new_installation(tmp_path: Path) -> None:
    place = Place("some", ("some==1",), folder=tmp_path)
    place.home.mkdir()
    place.stamp.write_text("some==1")
    assert place.is_here
    assert not Place("some", ("some==2",), folder=tmp_path).is_here


def test_every_pinned_peer_has_an_adapter_and_ours_speak_for_themselves() -> None:
    readme = (PEERS / "README.md").read_text()
    for name, place in places.places().items():
        file = f"{name}{'.mjs' if place.node else '.py'}"
        assert (PEERS / file).exists()
        assert f"[{name}]({file})" in readme
        if place.is_ours:
            about = said_once(place, "about")
            assert about["configuration"]
            assert about["docs"]


@needs_node
def test_javascript_adapters_say_what_they_are() -> None:
    for place in places.places().values():
        if place.node:
            about = said_once(Here(place.name, place.packages, node=True), "about")
            assert about.keys() == said_once(places.places()["fifo"], "about").keys()
            assert about["configuration"]
            assert about["docs"]


@needs_node
def test_the_javascript_half_of_the_protocol_speaks_as_the_python_half(tmp_path: Path) -> None:
    adapter = tmp_path / "peer.mjs"
    adapter.write_text(IN_MEMORY.replace("PROTOCOL", (PEERS / "protocol.mjs").as_uri()))
    place = NodeScript(str(adapter))
    request = {"count": 25, "batch": 10, "watched": True, "group": "", "ms": 0, "pause": 0, "seconds": 9}
    with running(place, "enqueue", "") as producer:
        assert producer.answer() == {"ready": True}
        answer = producer.ask(request, 30)
        assert answer["enqueued"] == 25
        assert 0 <= answer["seconds"] < 9
    with running(place, "work", "", slots=3) as worker:
        wait([worker], lambda: worker.report.count == 3, 30, "no handler starts")
        assert worker.report.watched[0][:2] == ("bob", 1.5)
        assert worker.report.first <= worker.report.last == worker.report.steps[-1][0]


def test_the_rate_of_two_workers_counts_from_when_both_were_running() -> None:
    first = report([(1.0, 1), (2.0, 1001), (3.0, 2001)])
    second = report([(2.0, 1), (3.0, 1001)])
    assert drain_rate([first, second], None) == pytest.approx(2000)


def test_the_rate_of_a_drain_that_one_worker_did_alone_counts_all() -> None:
    assert drain_rate([report([(1.0, 1), (2.0, 1000)]), report([])], None) == pytest.approx(1000)


def test_the_rate_of_a_drain_counts_until_all_is_finished() -> None:
    assert drain_rate([report([(1.0, 1), (2.0, 1001)])], 3.0) == pytest.approx(500)


def test_quarters_of_a_span() -> None:
    steps = [(10.0, 0), (11.0, 100), (12.0, 150), (13.0, 200), (14.0, 210)]
    assert first_and_last_quarter(steps, 10.0, 4.0) == (100, 10)


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("host=/tmp/a port=5433 user=me dbname=x", "postgresql://me@/db?host=%2Ftmp%2Fa&port=5433"),
        ("postgresql://me:p%40ss@h:1/x", "postgresql://me:p%40ss@h:1/db"),
    ],
)
def test_the_dsn_for_adapters_is_a_url(dsn: str, expected: str) -> None:
    assert url(dsn, "db") == expected


# --- Parts -----------------------------------------------------------------------------------------


IN_MEMORY = """
import { handle, main } from "PROTOCOL";
await main({
  about: { package: "none" },
  left: "select 0",
  open: async () => {},
  enqueue: async (payloads) => {
    console.log("chatter");
    if (payloads.some((each) => !each.sent || !each.group.startsWith("group "))) throw new Error("wrong");
  },
  work: async (slots) => {
    for (let slot = 0; slot < slots; slot++) await handle({ group: "bob", sent: 1.5, ms: 0 });
  },
});
"""


class Here(Place):
    """An adapter that may start without its packages."""

    is_here = True


class NodeScript(Place):
    """An adapter in a file of its own; its name is its path."""

    def command(self, role: str) -> list[str]:
        return ["node", self.name, role]


class OursBreaks(Place):
    """An adapter that cannot start."""

    def command(self, role: str) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no such adapter')"]


class Breaks(OursBreaks):
    """The same, of another queue."""

    is_ours = False
    is_here = True


class HasNoWorker(Place):
    """A queue that takes tasks and whose worker cannot start."""

    is_ours = False

    def command(self, role: str) -> list[str]:
        breaks = [sys.executable, "-c", "raise SystemExit('no such adapter')"]
        return breaks if role == "work" else Place(self.name).command(role)


def report(steps: list[tuple[float, int]]) -> Adapter:
    adapter = Adapter.__new__(Adapter)
    adapter.report = Report()
    for index, (at, count) in enumerate(steps):
        first = steps[0][0] if index else at
        adapter.report.take({"count": count, "first": first, "last": at, "starts": []})
    return adapter
