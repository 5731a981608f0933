"""The served order against the block ids of the 2024 article, for tasks of cost 1."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.engine import Engine
from tests.properties.profile import PROFILE
from tests.support.calls import groups_of
from tests.support.database import Database

BLOCK_LENGTH = 1024 * 1024
GROUPS = ["a", "b", "c", "d", "e", "f"]


@dataclass
class Article:
    """Ids are assigned when tasks are created; workers pop the smallest."""

    numbers: dict[str, int] = field(default_factory=dict)
    last_block: dict[str, int] = field(default_factory=dict)
    queued: dict[int, str] = field(default_factory=dict)
    max_popped: int = -1

    def max_assigned(self) -> int:
        """p_max_assigned: the block of the largest id no longer queued; of all, when the queue is empty."""
        if not self.queued:
            return max(self.last_block.values(), default=0)
        return self.max_popped // BLOCK_LENGTH if self.max_popped >= 0 else 0

    def create(self, group: str) -> None:
        clock = self.max_assigned()
        if group not in self.numbers:
            self.numbers[group] = len(self.numbers)
            block = clock
        else:
            block = max(clock, self.last_block[group] + 1)
        self.last_block[group] = block
        self.queued[self.numbers[group] + BLOCK_LENGTH * block] = group

    def pop(self) -> str:
        id_ = min(self.queued)
        self.max_popped = max(self.max_popped, id_)
        return self.queued.pop(id_)


@pytest.fixture
def engine(database: Database) -> Engine:
    engine = Engine(database, sessions=1)
    if engine.shards > 1:
        pytest.skip("the article knows one order, each shard has its own")
    return engine


@PROFILE
@given(
    order=st.permutations(GROUPS),
    sizes=st.lists(st.integers(1, 8), min_size=6, max_size=6),
    turns=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=6)), max_size=12),
    ready=st.one_of(st.none(), st.integers(1, 6)),
)
def test_backlogged_groups_are_served_in_the_order_of_the_articles_block_ids(
    engine: Engine,
    order: list[str],
    sizes: list[int],
    turns: list[tuple[int, list[int]]],
    ready: int | None,
) -> None:
    """I3, F7, F8, F15-F20, F32: for groups that wait; newcomers follow a rule of this engine's own."""
    engine.reset()
    engine.run("update fairq.queues set ready_target = %s", [ready])
    worker, article = engine.worker(), Article()
    served: list[str] = []
    expected: list[str] = []
    for group, size in zip(order, sizes, strict=True):
        engine.create([group] * size)
        for _ in range(size):
            article.create(group)
    for count, more in turns:
        if count:
            expected += [article.pop() for _ in range(min(count, len(article.queued)))]
            served += groups_of(engine.pop(worker, count))
        for number in more:
            # Only a group that still waits: the article and this engine differ about newcomers.
            if order[number] in article.queued.values():
                article.create(order[number])
                engine.create([order[number]])
    expected += [article.pop() for _ in range(len(article.queued))]
    while popped := engine.pop(worker, 3):
        served += groups_of(popped)
    assert served == expected
