"""The circuit breaker: D16 to D26. Pure values, so time is a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fairq.worker import breaker as circuit
from fairq.worker.breaker import Breaker
from fairq.worker.config import Settings, limits, problems


def longest() -> float:
    return 0.0


def after(failures: int, *, threshold: int = 5, cooldown: float = 60.0) -> Breaker:
    found = Breaker(threshold, cooldown)
    for _ in range(failures):
        found = circuit.failed(found, 0.0, longest)
    return found


def test_defaults_are_five_failures_and_at_most_five_seconds() -> None:
    """D25: a minute is possible, but not with a lease of a minute: the pause must not cost held tasks."""
    assert Settings().breaker_threshold == 5
    assert limits(Settings()).cooldown == 5.0
    assert limits(Settings(lease=3.0)).cooldown == 1.0
    assert "breaker_cooldown_ms" in problems(Settings(breaker_cooldown_ms=60_000))[0]
    minute = Settings(breaker_cooldown_ms=60_000, lease=180.0)
    assert (problems(minute), limits(minute).cooldown) == ([], 60.0)


def test_not_all_workers_come_back_at_once() -> None:
    for draw, rest in ((0.0, 60.0), (0.5, 52.5), (1.0, 45.0)):
        found = circuit.failed(after(4), 7.0, lambda draw=draw: draw)  # type: ignore[misc]
        assert circuit.wait(found, 7.0) == rest


def test_it_opens_at_the_fifth_failure_in_a_row() -> None:
    """D17, D19"""
    assert after(4).state == "closed"
    assert after(5).state == "open"


def test_a_success_forgets_the_failures_before_it() -> None:
    """D19: consecutive ones count."""
    found = circuit.succeeded(after(4))
    for _ in range(4):
        found = circuit.failed(found, 0.0)
    assert found.state == "closed"


def test_nothing_passes_until_the_cooldown_is_over() -> None:
    """D17, D20"""
    found = after(5)
    assert circuit.may_pass(found, 59.9) == (found, False)
    assert circuit.wait(found, 20.0) == 40.0


def test_exactly_one_probe_passes_after_the_cooldown() -> None:
    """D20"""
    probing, passes = circuit.may_pass(after(5), 60.0)
    assert passes
    assert probing.state == "half_open"
    assert [circuit.may_pass(probing, now)[1] for now in (60.0, 61.0, 10_000.0)] == [False] * 3


def test_a_probe_that_succeeds_closes_and_one_that_fails_opens_again() -> None:
    """D21"""
    probing, _ = circuit.may_pass(after(5), 60.0)
    assert circuit.succeeded(probing).state == "closed"
    again = circuit.failed(probing, 61.0, longest)
    assert again.state == "open"
    assert circuit.wait(again, 61.0) == 60.0


def test_threshold_zero_never_opens() -> None:
    assert after(10_000, threshold=0).state == "closed"


@given(
    st.integers(1, 8),
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=80),
)
def test_it_lets_through_what_the_three_states_allow(
    threshold: int, cooldown: float, steps: list[tuple[float, bool]]
) -> None:
    """D17, D20, D21: compared with a model that only remembers what passed and how that ended."""
    found, now = Breaker(threshold, cooldown), 0.0
    in_a_row, opened_at = 0, None
    for pause, succeeds in steps:
        now += pause
        found, passes = circuit.may_pass(found, now)
        assert passes == (opened_at is None or now >= opened_at + cooldown)
        if not passes:
            assert circuit.wait(found, now) > 0
            continue
        # While one probe is out there is no second one.
        if opened_at is not None:
            assert not circuit.may_pass(found, now + 10 * cooldown)[1]
        if succeeds:
            found, in_a_row, opened_at = circuit.succeeded(found), 0, None
        else:
            found, in_a_row = circuit.failed(found, now, longest), in_a_row + 1
            if opened_at is not None or in_a_row >= threshold:
                opened_at = now
        assert (found.state == "open") == (opened_at is not None)
