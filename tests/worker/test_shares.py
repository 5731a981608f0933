"""Several queues by weight: what the plan promises for any weights, rooms and arrivals."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fairq.worker.shares import Shares, quotas, served, shares_of, steps

weights = st.lists(st.sampled_from([0.001, 0.1, 0.3, 1.0, 2.0, 3.0, 7.5, 1000.0]), min_size=1, max_size=6)
rooms = st.lists(st.integers(1, 600), min_size=1, max_size=30)


def of(weights: list[float]) -> Shares:
    return shares_of({f"queue {number}": weight for number, weight in enumerate(weights)})


def ask(shares: Shares, room: int, stock: list[int]) -> tuple[list[int], Shares]:
    """The database's answer, step by step; a queue that gave less than asked for is not asked again."""
    asked = steps(shares, room)
    counts: Counter[int] = Counter()
    emptied: set[int] = set()
    for place, most in asked:
        most = min(most, room - counts.total())
        if most and place not in emptied:
            got = min(most, stock[place] - counts[place])
            counts[place] += got
            if got < most:
                emptied.add(place)
    answer = [counts[place] for place in range(len(stock))]
    return answer, served(shares, asked, answer, room)


@given(weights, rooms)
def test_while_all_have_work_each_gets_its_share(weights: list[float], rooms: list[int]) -> None:
    """After every turn of any size, no two queues differ by more than a task of one of them."""
    shares = of(weights)
    total = [0] * len(weights)
    for room in rooms:
        counts, shares = ask(shares, room, [10**9] * len(weights))
        assert sum(counts) == room
        total = [before + count for before, count in zip(total, counts, strict=True)]
        for count, weight in zip(total, weights, strict=True):
            for other_count, other in zip(total, weights, strict=True):
                assert abs(count / weight - other_count / other) <= max(1 / weight, 1 / other) * (1 + 1e-6)


@given(weights, rooms)
def test_the_others_share_by_weight_what_one_does_not_use(weights: list[float], rooms: list[int]) -> None:
    """The same bound among queues with tasks, once it is known which have none."""
    shares = of([*weights, 5.0])
    stock = [10**9] * len(weights) + [0]
    _, shares = ask(shares, 1000, stock)
    start = shares.tags
    total = [0] * len(weights)
    for room in rooms:
        counts, shares = ask(shares, room, stock)
        total = [before + count for before, count in zip(total, counts[:-1], strict=True)]
        tags = [tag + count / weight for tag, count, weight in zip(start, total, weights, strict=False)]
        for tag, weight in zip(tags, weights, strict=True):
            for other_tag, other in zip(tags, weights, strict=True):
                before = abs(max(start) - min(start))
                assert abs(tag - other_tag) <= max(before, max(1 / weight, 1 / other) * (1 + 1e-6))


@given(weights, st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5), st.integers(0, 80)), max_size=40))
def test_no_room_is_left_while_a_queue_has_work(
    weights: list[float], turns: list[tuple[int, int, int]]
) -> None:
    """I8: what one queue does not use goes to the others at once."""
    shares = of(weights)
    stock = [0] * len(weights)
    for room, place, more in turns:
        stock[place % len(weights)] += more
        counts, shares = ask(shares, room, stock)
        assert sum(counts) == min(room, sum(stock))
        stock = [before - count for before, count in zip(stock, counts, strict=True)]
        assert min(shares.tags) == 0


@given(weights.filter(lambda each: len(each) > 1), st.integers(1, 40), st.integers(1, 50))
def test_an_empty_queue_gains_nothing_and_one_served_alone_owes_nothing(
    weights: list[float], room: int, turns: int
) -> None:
    """I5, for queues: after any time alone, tags differ by no more than while all have work, plus what was
    left over in one turn: that goes to the first that has it.
    """
    shares = of(weights)
    for _ in range(turns):
        _, shares = ask(shares, room, [10**9] + [0] * (len(weights) - 1))
    for tag, weight in zip(shares.tags, weights, strict=True):
        bound = max(1 / weights[0], 1 / weight) + room / weights[0]
        assert abs(tag - shares.tags[0]) <= bound * (1 + 1e-6)


def test_three_to_one() -> None:
    shares = shares_of({"a": 3, "b": 1})
    order = []
    for _ in range(8):
        counts, shares = ask(shares, 1, [100, 100])
        order.append("ab"[counts.index(1)])
    assert "".join(order) == "aaabaaab"
    assert quotas(shares, [0, 1], 100) == {0: 75, 1: 25}
