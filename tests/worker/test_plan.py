"""A worker's decisions, tested by properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fairq.worker import plan
from fairq.worker.config import Limits, Settings, limits, poll_interval

counts = st.integers(0, 1000)


@st.composite
def some_limits(draw: st.DrawFn) -> Limits:
    return limits(
        Settings(
            concurrency=draw(st.integers(1, 500)),
            prefetch=draw(counts),
            claim_lease=5.0,
            max_claim_batch=draw(counts),
            max_claim_per_worker=draw(counts),
        )
    )


@given(some_limits(), counts, counts)
def test_a_worker_never_asks_for_more_than_it_has_room_for(limits: Limits, held: int, waiting: int) -> None:
    """H18, H33: slots and prefetch, minus what it holds. H25: and no more than may wait."""
    room = plan.pop_limit(limits, held=held, waiting=waiting)
    assert 0 <= room <= max(0, limits.slots + limits.prefetch - held)
    assert room <= max(0, limits.claim_per_worker - waiting)


@given(some_limits(), counts)
def test_a_worker_with_room_and_nothing_waiting_always_asks(limits: Limits, held: int) -> None:
    """I8"""
    if held < limits.slots + limits.prefetch:
        assert plan.pop_limit(limits, held=held, waiting=0) > 0


@given(some_limits(), counts, counts)
def test_no_more_claimed_tasks_are_started_than_there_are_free_slots(
    limits: Limits, running: int, claimed: int
) -> None:
    """H8"""
    starts = plan.to_start(limits, running=running, claimed=claimed)
    assert 0 <= starts <= claimed
    assert starts == 0 or running + starts <= limits.slots


def test_zero_means_the_slots_and_with_prefetch_the_slots_and_the_prefetch() -> None:
    """H26"""
    hard = limits(Settings(concurrency=8))
    assert (hard.claim_batch, hard.claim_per_worker) == (8, 8)
    soft = limits(Settings(concurrency=8, prefetch=4, claim_lease=5.0))
    assert (soft.claim_batch, soft.claim_per_worker) == (12, 12)


@given(st.integers(1, 10_000), st.floats(0.1, 60), st.floats(0.5, 300), st.floats(0, 1))
def test_pauses_double_and_are_capped_and_move_by_a_quarter(
    failures: int, initial: float, cap: float, draw: float
) -> None:
    """HR25"""
    pause = plan.retry_delay(failures, initial, cap, lambda: draw)
    plain = min(initial * 2.0 ** min(failures - 1, 40), cap)
    assert 0.75 * plain - 1e-9 <= pause <= 1.25 * plain + 1e-9


@given(st.integers(0, 100), st.booleans(), st.floats(1, 300), st.none() | st.floats(0, 1000), st.floats(0, 1))
def test_a_worker_sleeps_no_longer_than_the_interval_nor_past_what_is_due(
    empties: int, listening: bool, interval: float, due_in: float | None, draw: float
) -> None:
    """HR19, HR24"""
    pause = plan.poll_delay(empties, listening=listening, interval=interval, due_in=due_in, draw=lambda: draw)
    assert 0 <= pause <= 1.25 * interval
    assert due_in is None or pause <= due_in


def test_polling_slows_down_while_nothing_comes() -> None:
    """D34: for whatever reason nothing came."""
    pauses = [
        plan.poll_delay(empties, listening=False, interval=5, due_in=None, draw=lambda: 0.5)
        for empties in range(1, 12)
    ]
    assert pauses == sorted(pauses)
    assert pauses[0] == plan.FIRST_PAUSE
    assert pauses[-1] == 5


def test_the_poll_interval_is_five_seconds_and_one_without_listen() -> None:
    """HR24"""
    assert poll_interval(Settings(), listening=True) == 5
    assert poll_interval(Settings(), listening=False) == 1
    assert poll_interval(Settings(notify_poll_interval_ms=7000), listening=False) == 7


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 50), st.integers(1, 5000))
def test_a_batch_is_within_its_bounds_and_never_empty(sizes: list[int], most: int, most_bytes: int) -> None:
    count = plan.batch_size(sizes, most, most_bytes)
    assert 1 <= count <= min(len(sizes), most)
    assert count == 1 or sum(sizes[:count]) <= most_bytes
    # As large as the bounds allow.
    if count < min(len(sizes), most):
        assert sum(sizes[: count + 1]) > most_bytes


@given(st.lists(st.integers(), min_size=2))
def test_halving_loses_nothing_and_ends(batch: list[int]) -> None:
    first, second = plan.halves(batch)
    assert [*first, *second] == batch
    assert 0 < len(first) < len(batch)


@given(st.integers(1, 5000), st.floats(0, 1e6), st.integers(0, 10**6))
def test_more_ticks_are_fired_at_a_time_the_later_they_are(slots: int, late: float, stalls: int) -> None:
    assert 4 <= plan.ticks_at_a_time(slots, 0, 0) <= max(4, slots // 2)
    some = plan.ticks_at_a_time(slots, late, stalls)
    assert some <= plan.ticks_at_a_time(slots, late + 10, stalls) <= 100
    assert some <= plan.ticks_at_a_time(slots, late, stalls + 1) <= 100
    assert plan.ticks_at_a_time(slots, 0, 5) == 100


@given(st.lists(st.floats(0.01, 0.4), min_size=1), st.floats(1, 100))
def test_a_loop_that_stands_still_is_found_out_and_one_stopped_with_its_process_is_not(
    looks: list[float], stop: float
) -> None:
    """With a lease of a second, a process that was stopped for longer looks once, much too late."""
    still = plan.standstill(0.0, stop, 1.0)
    assert still < 0.5
    for elapsed in looks:
        still = plan.standstill(still, elapsed, 1.0)
    assert still >= min(sum(looks), len(looks) / 3) - 1e-9  # sums round
