"""Python functions change policies on every kind of connection, in the caller's transaction."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import fairq
from fairq import policies
from fairq.options import options_of
from tests.api.kinds import Opened
from tests.support import calls

Observer = psycopg.Connection[Any]

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def queue(group: str) -> str:
    return group.replace("group", "queue")


@pytest.fixture(autouse=True)
def _clean_cluster(observer: Observer) -> Iterator[None]:
    yield
    observer.execute("""select fairq.configure_cluster('{"max_running": null}')""")


def do(opened: Opened, function: Any, *args: Any, **changes: Any) -> Any:
    return opened.finish(function(opened.conn, *args, **changes))


@pytest.fixture
def role() -> str:
    return "fairq_admin"


def pop(observer: Observer, queue: str, limit: int = 100) -> list[calls.Held]:
    return calls.pop(observer, calls.register(observer, queue), limit, queue=queue)


def test_a_queue_takes_every_setting_and_says_what_holds(
    opened: Opened, observer: Observer, queue: str
) -> None:
    """Also the limits of the whole queue, which are stored elsewhere."""
    everything: dict[str, Any] = {
        "ready_target": 50,
        "max_attempts": 3,
        "retry_base": 2,
        "retry_cap": timedelta(hours=1),
        "retention": 2.5,
        "notify": False,
        "weight": 2,
        "fairness": "time",
        "group_max_running": 4,
        "group_rate_limit": 5,
        "group_rate_period": MINUTE,
        "group_rate_burst": 6,
        "group_breaker_threshold": 7,
        "group_breaker_cooldown": 8,
        "user_weight": 3,
        "user_max_running": 4,
        "user_rate_limit": 5,
        "user_rate_period": MINUTE,
        "user_rate_burst": 6,
        "user_breaker_threshold": 7,
        "user_breaker_cooldown": 8,
        "max_running": 9,
        "rate_limit": 10,
        "rate_period": 11,
        "rate_burst": 12,
        "breaker_threshold": 13,
        "breaker_cooldown": timedelta(milliseconds=1500),
        "short_slots": 2,
        "short_under": 3.5,
        "short_idle": 4,
        "group_budget": 100,
        "group_budget_period": MINUTE,
        "enqueue_role": "fairq_enqueue",
        "work_role": "fairq_work",
    }
    assert everything.keys() == options_of(policies.QueueSettings).keys()
    found = do(opened, fairq.configure_queue, queue, **everything)
    kinds = options_of(policies.QueueSettings)
    for name, value in everything.items():
        as_span = kinds[name].type is timedelta and not isinstance(value, timedelta)
        assert found[name] == (timedelta(seconds=value) if as_span else value), name
    assert (found["queue"], found["paused_at"], found["draining_at"]) == (queue, None, None)
    assert found.keys() == {*everything, "queue", "paused_at", "draining_at"}
    assert observer.execute("select from fairq.queues where queue = %s", [queue]).fetchall() == []
    opened.commit()

    nothing = {name: None for name in everything if name != "max_attempts"}
    changed = do(opened, fairq.configure_queue, queue, **nothing)
    assert (changed["max_attempts"], changed["retry_base"]) == (3, SECOND), "what is not named stays"
    defaults = {
        "max_attempts",
        "retry_base",
        "retry_cap",
        "retention",
        "notify",
        "weight",
        "fairness",
        "user_weight",
    }
    assert {name for name in everything if changed[name] is not None} == defaults
    assert changed["weight"] == 1
    opened.rollback()
    assert do(opened, fairq.configure_queue, queue) == found, "a rollback leaves nothing"
    again = {name: value for name, value in found.items() if name in everything}
    assert do(opened, fairq.configure_queue, queue, **again) == found, "what is answered can be set"


def test_settings_of_a_group_hold_from_the_commit_on(
    opened: Opened, observer: Observer, queue: str, group: str
) -> None:
    do(opened, fairq.configure_queue, queue)
    found = do(
        opened,
        fairq.configure_group,
        queue,
        group,
        weight=0.5,
        max_running=2,
        rate_limit=3,
        rate_period=MINUTE,
        rate_burst=3,
        breaker_threshold=4,
    )
    set_ = fairq.GroupState(
        queue=queue,
        group_key=group,
        weight=0.5,
        max_running=2,
        rate_limit=3,
        rate_period=MINUTE,
        rate_burst=3,
        breaker_threshold=4,
        breaker_cooldown=MINUTE,
        paused_at=None,
    )
    assert found == {**dict.fromkeys(options_of(policies.GroupSettings)), **set_}
    ids = opened.finish(fairq.enqueue_many(opened.conn, [(group, n) for n in range(5)], queue=queue))
    opened.commit()
    assert pop(observer, queue) == ids[:2]
    found = do(
        opened, fairq.configure_group, queue, group, weight=None, breaker_threshold=None, max_running=None
    )
    assert (found["weight"], found["breaker_threshold"], found["breaker_cooldown"]) == (None, None, None)
    assert found["rate_limit"] == 3
    opened.commit()
    assert len(pop(observer, queue)) == 1


def test_kinds(opened: Opened, queue: str) -> None:
    do(opened, fairq.configure_queue, queue)
    declared = do(opened, fairq.configure_kind, queue, "parse", max_attempts=1, timeout=90, priority=-3)
    everything = {
        "max_attempts": 1,
        "timeout": timedelta(seconds=90),
        "priority": -3,
        "cost": None,
        "owner": None,
    }
    assert declared == {"queue": queue, "kind": "parse", **everything}
    changed = do(opened, fairq.configure_kind, queue, "parse", timeout=None, cost=2)
    assert changed == {**declared, "timeout": None, "cost": 2.0}
    opened.rollback()


def test_keys_and_the_cluster(opened: Opened, group: str) -> None:
    assert do(opened, fairq.configure_key, group, max_running=3) == fairq.KeySettings(max_running=3)
    assert do(opened, fairq.configure_key, group, max_running=None) == fairq.KeySettings(max_running=None)
    before = do(opened, fairq.configure_cluster)
    assert before["shard_count"] >= 1
    assert before["max_running"] is None
    assert do(opened, fairq.configure_cluster, max_running=1000)["max_running"] == 1000
    assert do(opened, fairq.configure_cluster, payload_limit=2_000_000)["payload_limit"] == 2_000_000
    opened.rollback()
    assert do(opened, fairq.configure_cluster) == before


def test_pause_resume_drain_and_purge(opened: Opened, observer: Observer, queue: str, group: str) -> None:
    do(opened, fairq.configure_queue, queue)
    ids = opened.finish(fairq.enqueue_many(opened.conn, [(group, 1)] * 4, queue=queue))
    assert do(opened, fairq.pause_queue, queue) is None
    opened.commit()
    assert pop(observer, queue) == []
    paused_at = do(opened, fairq.configure_queue, queue)["paused_at"]
    assert abs(paused_at - datetime.now(UTC)) < timedelta(hours=1)
    do(opened, fairq.resume_queue, queue)
    do(opened, fairq.pause_group, queue, group)
    opened.commit()
    assert pop(observer, queue) == []
    assert do(opened, fairq.configure_group, queue, group)["paused_at"] is not None
    do(opened, fairq.resume_group, queue, group)
    do(opened, fairq.drain_queue, queue)
    opened.commit()
    with pytest.raises(fairq.QueueDraining):
        opened.finish(fairq.enqueue(opened.conn, group, queue=queue))
    opened.after_error()
    opened.rollback()
    assert pop(observer, queue, 1) == ids[:1]
    assert do(opened, fairq.purge_group, queue, group) == 3
    assert do(opened, fairq.configure_queue, queue)["draining_at"] is not None
    do(opened, fairq.resume_queue, queue)
    opened.finish(fairq.enqueue(opened.conn, group, queue=queue))
    opened.commit()
    assert len(pop(observer, queue)) == 1


def test_rates_are_seen_and_reset(opened: Opened, observer: Observer, queue: str, group: str) -> None:
    """D32."""
    do(opened, fairq.configure_queue, queue, rate_limit=5, rate_period=timedelta(days=1), rate_burst=3)
    assert do(opened, fairq.rate_usage, queue, group) is None
    do(opened, fairq.configure_group, queue, group, rate_limit=1, rate_period=timedelta(days=1), rate_burst=2)
    opened.finish(fairq.enqueue_many(opened.conn, [(group, 1)] * 9, queue=queue))
    opened.commit()
    assert len(pop(observer, queue)) == 2
    used = do(opened, fairq.rate_usage, queue, group)
    assert (used.queue, used.group_key, used.rate_limit, used.rate_burst) == (queue, group, 1, 2)
    assert (used.used, used.available, used.rate_period) == (2, 0, timedelta(days=1))
    assert used.next_at < used.full_at
    assert used.next_at.tzinfo is not None
    whole = do(opened, fairq.rate_usage, queue)
    assert (whole.group_key, whole.used, whole.available, whole.next_at) == (None, 2, 1, None)
    do(opened, fairq.reset_rate, queue, group)
    do(opened, fairq.reset_rate, queue)
    opened.commit()
    assert len(pop(observer, queue)) == 2
    assert do(opened, fairq.rate_usage, queue).used == 2


def test_budgets_are_seen(opened: Opened, observer: Observer, queue: str, group: str) -> None:
    do(opened, fairq.configure_queue, queue, fairness="cost")
    assert do(opened, fairq.budget_usage, queue, group) is None
    do(opened, fairq.configure_group, queue, group, budget=10, budget_period=timedelta(days=1))
    opened.finish(fairq.enqueue_many(opened.conn, [(group, 1)] * 9, queue=queue, cost=2))
    opened.commit()
    assert len(pop(observer, queue, 3)) == 3
    used = do(opened, fairq.budget_usage, queue, group)
    assert (used.queue, used.group_key, used.budget, used.budget_period) == (
        queue,
        group,
        10,
        timedelta(days=1),
    )
    assert (used.spent, used.available) == (0, 10 - used.reserved)
    assert used.reserved >= 6
    assert used.renews_at.tzinfo is not None


def test_groups_and_keys_are_held_until_a_time(
    opened: Opened, observer: Observer, queue: str, group: str
) -> None:
    do(opened, fairq.configure_queue, queue)
    opened.finish(fairq.enqueue(opened.conn, group, queue=queue))
    opened.finish(fairq.enqueue(opened.conn, f"{group} 2", queue=queue, concurrency_key=group))
    do(opened, fairq.hold_group, queue, group, datetime.now(UTC) + timedelta(hours=1))
    do(opened, fairq.hold_key, group, timedelta(hours=1))
    opened.commit()
    assert pop(observer, queue) == []
    do(opened, fairq.hold_group, queue, group, None)
    opened.commit()
    assert len(pop(observer, queue)) == 1
    do(opened, fairq.hold_key, group, None)
    opened.commit()
    assert len(pop(observer, queue)) == 1
    for until in (datetime(2020, 1, 1, tzinfo=UTC), timedelta(days=400)):
        with pytest.raises(fairq.InvalidTime):
            do(opened, fairq.hold_group, queue, group, until)
        opened.after_error()
        opened.rollback()
    wrong: list[Any] = [datetime(2040, 1, 1), "tomorrow", 60, timedelta.max]
    for until in wrong:
        with pytest.raises(fairq.InvalidTime):
            do(opened, fairq.hold_key, group, until)


def test_errors_of_the_engine_are_ours(opened: Opened, queue: str) -> None:
    for function, args, error in (
        (fairq.configure_group, ("nowhere", "bob"), fairq.UnknownQueue),
        (fairq.pause_queue, ("nowhere",), fairq.UnknownQueue),
        (fairq.rate_usage, ("nowhere",), fairq.UnknownQueue),
        (fairq.configure_queue, ("#keys",), fairq.InvalidName),
    ):
        with pytest.raises(error):
            do(opened, function, *args)
        opened.after_error()
        opened.rollback()
    with pytest.raises(fairq.OutOfRange):
        do(opened, fairq.configure_queue, queue, weight=0)
    opened.after_error()
    opened.rollback()
    opened.do("set transaction isolation level serializable")
    with pytest.raises(fairq.FairqError) as caught:
        do(opened, fairq.configure_group, "default", "bob", weight=2)
    assert getattr(caught.value, "sqlstate", None) == "QF005"


# --- Without the database ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_running": 2.5}, fairq.OutOfRange),
        ({"max_running": True}, fairq.OutOfRange),
        ({"max_running": 2**31}, fairq.OutOfRange),
        ({"max_running": "2"}, fairq.OutOfRange),
        ({"weight": "2"}, fairq.OutOfRange),
        ({"weight": float("nan")}, fairq.OutOfRange),
        ({"rate_period": "1 minute"}, fairq.InvalidTime),
        ({"rate_period": float("inf")}, fairq.InvalidTime),
        ({"rate_period": float("nan")}, fairq.InvalidTime),
        ({"notify": 1}, fairq.ConfigurationError),
        ({"weight": float("inf")}, fairq.OutOfRange),
        ({"fairness": 1}, fairq.ConfigurationError),
        ({"max_runing": 2}, TypeError),
    ],
)
def test_mistakes_found_early_leave_the_transaction_usable(
    observer: Observer, changes: dict[str, Any], error: type[Exception]
) -> None:
    with observer.transaction():
        with pytest.raises(error) as caught:
            fairq.configure_queue(observer, "default", **changes)
        assert next(iter(changes)) in str(caught.value)
        assert observer.execute("select 1").fetchone() == (1,)


@pytest.mark.parametrize("name", [None, "", 5.5, "x" * 501, "nul\0", "half \ud800"])
def test_names_are_looked_at_first(observer: Observer, name: Any) -> None:
    with observer.transaction():
        of_queues: list[Any] = [fairq.configure_queue, fairq.pause_queue, fairq.drain_queue, fairq.rate_usage]
        for function in of_queues:
            with pytest.raises(fairq.InvalidName):
                function(observer, name)
        with pytest.raises(fairq.InvalidName):
            fairq.configure_key(observer, name)
        of_groups: list[Any] = [
            fairq.configure_group,
            fairq.purge_group,
            fairq.pause_group,
            fairq.budget_usage,
        ]
        for function in of_groups:
            with pytest.raises(fairq.InvalidGroupKey):
                function(observer, "default", name)
        assert observer.execute("select 1").fetchone() == (1,)


@pytest.mark.parametrize(
    ("function", "args", "settings"),
    [
        ("configure_queue", ["q"], policies.QueueSettings),
        ("configure_group", ["default", "g"], policies.GroupSettings),
        ("configure_key", ["k"], policies.KeySettings),
        ("configure_kind", ["default", "k"], policies.KindSettings),
        ("configure_cluster", [], policies.ClusterSettings),
    ],
)
def test_python_knows_every_setting_that_the_engine_has(
    observer: Observer, function: str, args: list[str], settings: Any
) -> None:
    """The settings, as the engine's own hint lists them."""
    places = "".join("%s, " for _ in args)
    with pytest.raises(psycopg.Error) as caught:
        observer.execute(f"select fairq.{function}({places}'{{\"nonsense\": 1}}')".encode(), args)
    hint = str(caught.value.diag.message_hint)
    assert hint.endswith(f"Known settings: {', '.join(options_of(settings))}.")
