"""The load of the demo."""

from collections import Counter
from itertools import islice

import pytest

from fairq.demo.scenario import FLOOD, HANDLER_SECONDS, handler_seconds, names, plan


@pytest.mark.parametrize("tenants", [2, 10, 11, 40])
def test_tenants_have_different_names_and_bob_is_the_first(tenants: int) -> None:
    everybody = names(tenants)
    assert everybody[0] == FLOOD
    assert len(set(everybody)) == tenants


def test_bob_enqueues_all_he_has_at_once_and_the_others_a_few_each_over_time() -> None:
    scenario = plan(10_000, 10, 8)
    of_bob = [arrival for arrival in scenario.arrivals if arrival.tenant == FLOOD]
    assert [arrival.count for arrival in of_bob] == [10_000]
    assert scenario.flood == 10_000

    tasks: Counter[str] = Counter()
    for arrival in scenario.arrivals:
        tasks[arrival.tenant] += arrival.count
    assert tasks == {FLOOD: 10_000, **dict.fromkeys(scenario.tenants[1:], 25)}
    assert scenario.tasks == 10_000 + 9 * 25
    assert min(arrival.at for arrival in scenario.arrivals) < of_bob[0].at, "it is quiet before the flood"
    after = [arrival for arrival in scenario.arrivals if arrival.at > of_bob[0].at]
    assert {arrival.tenant for arrival in after} == set(scenario.tenants[1:])


def test_arrivals_are_in_order_and_the_same_every_time() -> None:
    scenario = plan(500, 5, 4)
    assert list(scenario.arrivals) == sorted(scenario.arrivals, key=lambda arrival: arrival.at)
    assert plan(500, 5, 4) == scenario


def test_handlers_sleep_around_their_average_and_equally_long_in_both_queues() -> None:
    naps = list(islice(handler_seconds(), 1000))
    assert naps == list(islice(handler_seconds(), 1000))
    assert min(naps) >= HANDLER_SECONDS / 2
    assert max(naps) <= HANDLER_SECONDS * 1.5
    assert sum(naps) / len(naps) == pytest.approx(HANDLER_SECONDS, rel=0.05)
