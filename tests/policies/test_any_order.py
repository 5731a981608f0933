"""Users, keys, caps, returns, and slots for short tasks, in some order: nobody is passed, nothing is lost."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.calls import (
    Conn,
    Held,
    call,
    column,
    create,
    create_many,
    finish,
    pop,
    register,
    release,
    run,
)
from tests.support.invariants import assert_sound

pytestmark = pytest.mark.usefixtures("one_shard")

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
STEPS = [
    *["create"] * 6,
    *["pop"] * 5,
    *["finish"] * 5,
    *("release", "cancel", "weight", "pause", "resume", "time", "rebuild", "cap", "short", "short"),
    *("key", "key", "urgent"),
]


@pytest.mark.parametrize("seed", [118])
def test_nobody_is_passed_whatever_happens(conn: Conn, seed: int) -> None:
    """I1, I13, I14. The seed is one in which a recall passed a user whose task had been given back."""
    chance = random.Random(seed)
    fairness = chance.choice(["cost", "count", "time"])
    ready = chance.choice([4, 20])
    call(conn, "configure_queue", "default", fairness=fairness, ready_target=ready, max_attempts=100)
    worker = register(conn, lease="366 days")
    held: list[Held] = []
    seconds = 0
    for _ in range(60):
        what = chance.choice(STEPS)
        group, user = chance.choice("abc"), chance.choice([None, "x", "y"])
        of: dict[str, Any] = {"user_key": user}
        level, names = ("user", [group, user]) if user else ("group", [group])
        if what == "create" and user is None:
            create_many(conn, group, chance.randint(1, 8), cost=chance.choice([1, 10, 50]))
        elif what == "create":
            for _ in range(3):
                create(conn, group, cost=chance.choice([1, 10, 50]), **of)
        elif what == "key":
            for cost in (10, 50):
                create(conn, group, cost=cost, concurrency_key=chance.choice(["k", "l"]), **of)
        elif what == "urgent":
            create(conn, group, cost=chance.choice([5, 100]), priority=5, **of)
        elif what == "pop":
            held += pop(conn, worker, chance.randint(1, 6))
        elif what == "finish" and held:
            chance.shuffle(held)
            ended, held = held[:3], held[3:]
            finish(conn, worker, ended, chance.choice(["succeeded", "retry", "failed"]), delay="1 second")
        elif what == "release" and held:
            release(conn, worker, [held.pop()])
        elif what == "cancel" and (ids := column(conn, "select id from fairq.tasks")):
            call(conn, "cancel_task", chance.choice(ids))
        elif what == "weight":
            call(conn, f"configure_{level}", "default", *names, weight=chance.choice([1, 2, 5]))
        elif what == "cap":
            call(conn, f"configure_{level}", "default", *names, max_running=chance.choice([None, 1, 3]))
        elif what in ("pause", "resume"):
            call(conn, f"{what}_group", "default", *names)
        elif what == "time":
            seconds += chance.choice([1, 10, 61])
            set_time(conn, seconds)
        elif what == "rebuild":
            call(conn, "rebuild", "default")
        elif what == "short":
            call(conn, "configure_queue", "default", short_slots=chance.choice([None, 3, 7]))
            chance.random()
        assert_sound(conn)

    for group in "abc":
        free: list[Any] = [[group], [group, "x"], [group, "y"]]
        for names in free:
            call(conn, "resume_group", "default", *names)
            call(
                conn,
                f"configure_{'user' if len(names) > 1 else 'group'}",
                "default",
                *names,
                max_running=None,
            )
    finish(conn, worker, held)
    for _ in range(200):
        seconds += 61
        set_time(conn, seconds)
        finish(conn, worker, pop(conn, worker, 50))
        if not column(conn, "select id from fairq.tasks"):
            break
    assert column(conn, "select id from fairq.tasks") == []


def set_time(conn: Conn, seconds: int) -> None:
    run(conn, "select set_config('fairq.now', %s, false)", (NOON + timedelta(seconds=seconds)).isoformat())
