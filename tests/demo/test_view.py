"""The demo's view, on terminals of any size."""

import io

import pytest
from rich.console import Console

from fairq.demo.engines import Held, Record
from fairq.demo.run import Board, Standings
from fairq.demo.scenario import Scenario, plan
from fairq.demo.view import frame, headline, line, moral, outcomes, result_table, seconds_text


def held(tenant: str, waited: float) -> Held:
    return Held(1, 1, tenant, waited)


def two_sides(scenario: Scenario) -> list[Standings]:
    """At second 10: Bob's flood came at 1, alice enqueued two tasks at 2, fairq has started one."""
    sides = []
    for engine in ("FIFO", "fairq"):
        board = Board(engine, scenario)
        board.arrived("bob", 1000, 1.0)
        board.arrived("alice", 2, 2.0)
        board.started([held("bob", 0.5)] * 100)
        if engine == "fairq":
            board.started([held("alice", 0.0042)])
        sides.append(board.standings(10.0))
    return sides


def rendered(what: object, width: int, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0, "0.0 ms"),
        (0.0031, "3.1 ms"),
        (0.00996, "10 ms"),
        (0.0421, "42 ms"),
        (0.9996, "1.0 s"),
        (12.36, "12.4 s"),
    ],
)
def test_waits_are_written_as_people_read_them(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_tasks_that_still_wait_count_with_their_age() -> None:
    """A queue must not look good just because the longest waiting tasks have not been served yet."""
    fifo, fair = two_sides(plan(1000, 3, 4))
    alice = fifo.tenants[1]
    assert (alice.arrived, alice.started, alice.waiting) == (2, 0, 2)
    assert alice.p50 == alice.longest == 8.0
    alice = fair.tenants[1]
    assert (alice.started, alice.waiting, alice.longest) == (1, 1, 8.0)
    assert (fair.others.arrived, fair.others.started) == (2, 1)
    assert (fair.started, fair.total) == (101, 1006)


def test_a_start_may_be_seen_before_the_enqueue_has_returned() -> None:
    board = Board("fairq", plan(10, 2, 1))
    board.started([held("alice", 0.001)])
    standing = board.standings(1.0).tenants[1]
    assert (standing.started, standing.p50) == (1, 0.001)
    board.arrived("alice", 1, 0.5)
    assert board.standings(1.0).tenants[1].waiting == 0


@pytest.mark.parametrize("width", [40, 63, 64, 80, 105, 106, 140, 250])
@pytest.mark.parametrize("height", [10, 24, 60])
@pytest.mark.parametrize("tenants", [2, 10, 60])
def test_the_live_view_fits_the_terminal(width: int, height: int, tenants: int) -> None:
    scenario = plan(1000, tenants, 4)
    lines = rendered(frame(10.0, two_sides(scenario), scenario, width, height), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "bob" in text
    assert "fairq" in text
    assert "10.0 s" in text
    if tenants == 60:
        assert "others" in text


def test_a_wide_terminal_shows_both_queues_side_by_side() -> None:
    scenario = plan(1000, 3, 4)
    lines = rendered(frame(10.0, two_sides(scenario), scenario, 140, 24), 140)
    alice = next(each for each in lines if "alice" in each)
    assert alice.count("alice") == 2
    assert alice.index("8.0 s") < alice.index("1 ")
    assert any("FIFO" in each and "fairq" in each for each in lines)


def test_a_pipe_gets_plain_lines() -> None:
    text = line(10.0, two_sides(plan(1000, 3, 4)))
    assert text.startswith(" 10.0 s  FIFO: 100 of 1,006 started")
    assert "fairq: 101 of 1,006 started" in text
    assert "\n" not in text


def test_one_other_tenant_is_singular() -> None:
    assert "1 other tenant enqueues 3 in all" in headline(plan(100, 2, 4))
    assert "2 other tenants enqueue 6 in all" in headline(plan(100, 3, 4))


def test_the_result_compares_each_tenant_and_all_but_bob_together() -> None:
    scenario = plan(100, 3, 4)
    fifo = [Record("bob", 0, 1.0), Record("alice", 0, 4.0), Record("alice", 0, 6.0), Record("carol", 1, 7.0)]
    fair = [Record("bob", 0, 2.0), Record("alice", 0, 0.1), Record("alice", 0, 0.3), Record("carol", 1, 1.2)]
    bob, alice, carol, others = outcomes(fifo, fair, scenario)
    assert (bob.tasks, bob.fifo, bob.fair) == (1, (1.0, 1.0), (2.0, 2.0))
    assert (alice.tasks, alice.fifo[0], alice.fair[0]) == (2, 5.0, 0.2)
    assert alice.ratio == pytest.approx(25)
    assert (others.tasks, others.fifo[0]) == (3, 6.0)
    assert carol.ratio == pytest.approx(30)
    assert bob.ratio == 0.5, "what Bob pays is shown as it is"

    wide = "\n".join(rendered(result_table([bob, alice, carol, others], 100), 100))
    assert "fairq p99" in wide
    assert "25x" in wide
    assert "0.5x" in wide
    narrow = rendered(result_table([bob, alice, carol, others], 50), 50)
    assert max(map(len, narrow)) <= 50
    assert "p99" not in "\n".join(narrow)
    assert "…" not in "\n".join(narrow)
    assert "200 ms instead of 6.0 s" in moral([bob, alice, carol, others], (7.0, 7.5))
