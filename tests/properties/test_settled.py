"""Whatever is charged, whoever ends, budgets and holds bind, and nothing of what was used is lost."""

import random
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.engine import START, Engine
from tests.properties.profile import PROFILE
from tests.support.calls import Held, call, finish, maintain, release
from tests.support.database import Database
from tests.support.invariants import assert_sound, hear_all

pytestmark = pytest.mark.usefixtures("one_shard")

HOUR = 3600
BUDGETS = {"tight": 100.0, "wide": 1000.0}
GROUPS = ["free", *BUDGETS]
STEPS = [
    "create",
    "pop",
    "end",
    "end",
    "postpone",
    "release",
    "lose",
    "cancel",
    "wait",
    "hour",
    "rebuild",
    "sweep",
]


class Books:
    """What was spent in this period, and until when nothing may start, as it should be."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(GROUPS, 0.0)
        self.in_excess = dict.fromkeys(GROUPS, 0.0)
        self.held_until = dict.fromkeys(GROUPS, START)

    def settle(self, group: str, used: float, expected: float) -> None:
        self.spent[group] += used
        self.in_excess[group] += max(0.0, used - expected)


@PROFILE
@example(
    seed=325,
    steps=[
        *("lose", "create", "sweep", "cancel", "create", "pop", "hour", "end", "end", "rebuild", "end"),
    ],
)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(STEPS), min_size=5, max_size=20))
def test_budgets_and_holds_bind_whatever_happens(database: Database, seed: int, steps: list[str]) -> None:
    """I11: spent is what was used by what ended since the hour began; more than the budget only by what was
    in flight. Nothing starts while its group is held. Recalls, losses, rebuilds and sweeps forget nothing.
    """
    engine = Engine(database, 1)
    engine.reset()
    conn = engine.on()
    call(conn, "configure_queue", "default", fairness="cost", ready_target=5)
    for group, budget in BUDGETS.items():
        call(conn, "configure_group", "default", group, budget=budget, budget_period=HOUR)
    draw = random.Random(seed)
    books, held = Books(), list[Held]()
    worker = engine.worker("1 hour")
    for step, following in zip(steps, [*steps[1:], ""], strict=True):
        conn = engine.on()
        if step == "create":
            engine.create([draw.choice(GROUPS)], cost=draw.choice([1.0, 10.0, 40.0]))
        elif step == "pop":
            for each in engine.pop(worker, 3):
                assert engine.now >= books.held_until[each.group_key]
                held.append(each)
        elif step in {"end", "postpone", "release"} and held:
            one = held.pop(draw.randrange(len(held)))
            (charge,) = engine.one("select charge from fairq.held where id = %s", [one])
            used = draw.choice([0.0, 5.0, charge, 60.0])
            if step == "end":
                finish(conn, worker, [one], costs=[used])
            elif step == "postpone":
                minutes = draw.choice([1, 10])
                finish(
                    conn, worker, [one], "postponed", delay=f"{minutes} min", holds=["group"], costs=[used]
                )
                until = engine.now + timedelta(minutes=minutes)
                books.held_until[one.group_key] = max(until, books.held_until[one.group_key])
            else:
                release(conn, worker, [one])
                used = 0.0
            books.settle(one.group_key, used, charge)
        elif step == "lose" and held:
            for one in held:
                (charge,) = engine.one("select charge from fairq.held where id = %s", [one])
                books.settle(one.group_key, 0.0, charge)
            engine.run("select fairq.retire_worker(%s)", [worker])
            held.clear()
            worker = engine.worker("1 hour")
        elif step == "cancel":
            engine.run(
                "select fairq.cancel_task(t.id) from fairq.tasks t order by t.id limit 1 offset %s",
                [draw.randrange(4)],
            )
        elif step == "rebuild":
            call(conn, "rebuild", "default")
        elif step == "sweep":
            maintain(conn)
        elif step in {"wait", "hour"}:
            hours = (engine.now - START).total_seconds() // HOUR
            engine.now = (
                engine.now + timedelta(minutes=2) if step == "wait" else START + timedelta(hours=hours + 1)
            )
            if (engine.now - START).total_seconds() // HOUR > hours:
                books.spent = dict.fromkeys(GROUPS, 0.0)
                books.in_excess = dict.fromkeys(GROUPS, 0.0)
            conn = engine.on()
            engine.run("select fairq.heartbeat(%s)", [worker])
        if following == "rebuild":
            continue  # it finds rings that nobody has heard
        hear_all(engine.on())
        for group, budget in BUDGETS.items():
            query = "select spent, reserved from fairq.budget_usage('default', %s)"
            spent, reserved = engine.one(query, [group])
            assert spent == pytest.approx(books.spent[group])
            # The last one that found something left, and what was used beyond what was expected.
            assert spent + reserved <= budget + 4 * 60 + books.in_excess[group] + 0.001
    assert_sound(engine.on())
