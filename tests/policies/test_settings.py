"""What settings are refused, who may change them, and that explain_task names what keeps a task waiting."""

from typing import Any

import psycopg
import pytest

from tests.policies.calls import (
    Conn,
    at,
    call,
    create,
    explain,
    finish,
    maintain,
    one,
    pop,
    promote,
    refused,
    run,
    tasks,
    worker,
)

BAD_LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"weight": 0}, "QF007"),
    ({"weight": 1001}, "QF007"),
    ({"weight": float("nan")}, "QF007"),
    ({"max_running": -1}, "QF007"),
    ({"rate_limit": 0}, "QF007"),
    ({"rate_limit": 1, "rate_burst": 0}, "QF007"),
    ({"rate_limit": 1, "rate_burst": 100001}, "QF007"),
    ({"rate_limit": 1, "rate_period": "0 seconds"}, "QF009"),
    ({"rate_limit": 1, "rate_period": "-1 second"}, "QF009"),
    ({"rate_limit": 1, "rate_period": "367 days"}, "QF009"),
    ({"rate_period": "1 second"}, "QF007"),
    ({"breaker_threshold": 0}, "QF007"),
    ({"breaker_threshold": 1, "breaker_cooldown": "0 seconds"}, "QF009"),
    ({"breaker_threshold": 1, "breaker_cooldown": "100000 years"}, "QF009"),
    ({"breaker_cooldown": "1 second"}, "QF007"),
    ({"reset": ["everything"]}, "QF014"),
]


@pytest.mark.parametrize(("settings", "code"), BAD_LIMITS)
def test_a_setting_out_of_range_changes_nothing(conn: Conn, settings: dict[str, Any], code: str) -> None:
    """For a group, as the default of a queue's groups, and for the whole queue."""
    with refused(conn, code):
        call(conn, "configure_group", "default", "bob", **settings)
    with refused(conn, code):
        of_groups = {k if k in ("weight", "reset") else f"group_{k}": v for k, v in settings.items()}
        call(conn, "configure_queue", "default", **of_groups)
    if "weight" not in settings:
        with refused(conn, code):
            call(conn, "configure_queue", "default", **settings)
    if settings.keys() <= {"max_running", "reset"}:
        with refused(conn, code):
            call(conn, "configure_cluster", **settings)
        with refused(conn, code):
            call(conn, "configure_key", "k", **settings)


@pytest.mark.parametrize(
    "function",
    ["configure_group", "pause_group", "resume_group", "purge_group", "rate_usage", "reset_rate"],
)
def test_a_group_needs_a_queue_and_a_name(conn: Conn, function: str) -> None:
    for queue, group, code in (
        ("nowhere", "bob", "QF003"),
        ("#keys", "bob", "QF003"),
        ("#meters", "cluster", "QF003"),
        (None, "bob", "QF003"),
        *([] if "rate" in function else [("default", None, "QF001")]),
        ("default", "", "QF001"),
        ("default", "x" * 501, "QF001"),
    ):
        with refused(conn, code):
            call(conn, function, queue, group)


def test_keys_and_queues_need_names(conn: Conn) -> None:
    for key in (None, "", "x" * 501):
        with refused(conn, "QF006"):
            call(conn, "configure_key", key, 1)
    for queue in (None, "", "x" * 201, "#keys", "#mine"):
        with refused(conn, "QF006"):
            call(conn, "configure_queue", queue, max_running=1)
    for function in ("pause_queue", "resume_queue", "drain_queue", "rate_usage", "reset_rate"):
        for queue in ("nowhere", "#keys", "#meters", None):
            with refused(conn, "QF003"):
                call(conn, function, queue)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_settings_that_promote_need_read_committed(conn: Conn, level: str) -> None:
    run(conn, f"set default_transaction_isolation = '{level}'")
    for function, args in (
        ("configure_group", ["default", "bob", 1]),
        ("configure_key", ["k", 1]),
        ("purge_group", ["default", "bob"]),
        ("reset_rate", ["default", "bob"]),
        ("reset_rate", ["default"]),
    ):
        with pytest.raises(psycopg.Error) as caught:
            call(conn, function, *args)
        assert caught.value.sqlstate == "QF005"


RESETTABLE = {
    "configure_queue": (
        ("default",),
        {"ready_target", "weight", "max_running", "rate", "breaker"}
        | {"group_max_running", "group_rate", "group_breaker"},
    ),
    "configure_group": (("default", "bob"), {"weight", "max_running", "rate", "breaker"}),
    "configure_key": (("printer",), {"max_running"}),
    "configure_cluster": ((), {"max_running"}),
}


@pytest.mark.parametrize("function", RESETTABLE)
def test_only_what_a_function_sets_can_be_reset_by_it(conn: Conn, function: str) -> None:
    """A name that means nothing here is refused, with the names that do; it is never passed over."""
    args, known = RESETTABLE[function]
    every = set.union(*(names for _, names in RESETTABLE.values()))
    for name in every - known | {"everything", "", None}:
        with refused(conn, "QF014"):
            call(conn, function, *args, reset=[name])
        with refused(conn, "QF014"):
            call(conn, function, *args, reset=[*known, name])
    for name in known:
        call(conn, function, *args, reset=[name])
    call(conn, function, *args, reset=list(known))


@pytest.mark.parametrize("function", RESETTABLE)
def test_no_names_reset_nothing(conn: Conn, function: str) -> None:
    """Null leaves everything as it is, as an empty list does and as null does for each other setting."""
    args, known = RESETTABLE[function]
    values = {"ready_target": 7, "weight": 2.5, "breaker": 8, "group_breaker": 9, "rate": 4, "group_rate": 5}
    suffixes = {"rate": "_limit", "breaker": "_threshold"}
    settings = {name + suffixes.get(name.split("_")[-1], ""): values.get(name, 3) for name in known}
    call(conn, function, *args, **settings)
    in_force = call(conn, function, *args, reset=[])
    assert call(conn, function, *args, reset=None) == in_force
    assert call(conn, function, *args, max_running=2, reset=None) == call(
        conn, function, *args, max_running=2
    )
    if function == "configure_queue":
        limits = "max_running, rate_limit, rate_period::text, breaker_threshold, breaker_cooldown::text"
        query = f"select {limits} from fairq.groups where group_key = 'queue default'"  # noqa: S608
        assert run(conn, query) == [(2, 4, "00:00:01", 8, "00:01:00")]
        # What it says is also what it does.
        tasks(conn, "bob", 9)
        assert len(pop(conn, worker(conn))) == 2


def test_settings_answer_with_what_is_in_force(conn: Conn) -> None:
    names = (
        "max_running, rate_limit, rate_period::text, rate_burst, breaker_threshold, breaker_cooldown::text"
    )
    query = f"select {names} from fairq.configure_group('default', 'bob', %s)"  # noqa: S608
    run(conn, "select fairq.configure_group('default', 'bob', p_max_running => 3, p_rate_limit => 2)")
    run(conn, "select fairq.configure_group('default', 'bob', p_breaker_threshold => 5)")
    assert run(conn, query.replace("%s", "2")) == [(3, 2, "00:00:01", None, 5, "00:01:00")]
    run(conn, "select fairq.configure_group('default', 'bob', p_reset => '{rate,breaker}')")
    assert run(conn, query.replace("%s", "2")) == [(3, None, None, None, None, None)]


ADMIN_CALLS = (
    "select fairq.configure_group('default', 'bob', p_max_running => 1)",
    "select fairq.configure_queue('default', p_max_running => 1)",
    "select fairq.configure_cluster(p_max_running => 1)",
    "select fairq.configure_key('k', 1)",
    "select fairq.pause_group('default', 'bob')",
    "select fairq.resume_group('default', 'bob')",
    "select fairq.pause_queue('default')",
    "select fairq.resume_queue('default')",
    "select fairq.purge_group('default', 'bob')",
    "select fairq.drain_queue('default')",
    "select fairq.reset_rate('default', 'bob')",
)


@pytest.mark.parametrize("role", ["fairq_enqueue", "fairq_work", "fairq_observe"])
@pytest.mark.parametrize("query", ADMIN_CALLS)
def test_only_operators_change_settings(conn: Conn, role: str, query: str) -> None:
    run(conn, f"set role {role}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run(conn, query)


def test_operators_may_and_workers_serve_under_every_policy(conn: Conn) -> None:
    """The role of workers suffices for pops that meet every policy; that of observers to explain."""
    run(conn, "set role fairq_admin")
    for query in ADMIN_CALLS[:4]:
        run(conn, query)
    run(conn, "select fairq.configure_queue('default', p_group_rate_limit => 5, p_breaker_threshold => 3)")
    run(conn, "set role fairq_work")
    bob = worker(conn)
    first = create(conn, concurrency_key="k")
    second = create(conn, concurrency_key="k")
    held = pop(conn, bob)
    assert held[0][0] == first
    finish(conn, bob, held, "failed")
    assert pop(conn, bob)[0][0] == second
    assert one(conn, "select fairq.next_due_at('default')") is None
    maintain(conn)
    run(conn, "set role fairq_observe")
    assert explain(conn, second).startswith("running")
    assert run(conn, "select fairq.next_due_at('default')") is not None


@pytest.mark.usefixtures("one_shard")
def test_explain_names_each_reason(conn: Conn) -> None:
    """H40, D33: the first obstacle that the task would meet, with what is needed to act on it."""
    bob = worker(conn)
    holder = create(conn, "holder", concurrency_key="crane")
    pop(conn, bob)
    call(conn, "configure_group", "default", "capped", max_running=1)
    call(conn, "configure_group", "default", "slow", rate_limit=1, rate_period="1 hour")
    call(conn, "configure_group", "default", "broken", breaker_threshold=1)
    for group in ("capped", "slow", "broken"):
        create(conn, group)
    held = {group: (i, attempt, group) for i, attempt, group in pop(conn, bob)}
    finish(conn, bob, [held["broken"]], "failed")
    call(conn, "pause_group", "default", "paused")
    ids = {group: create(conn, group) for group in ("capped", "slow", "broken", "paused")}
    blocked = create(conn, "other", concurrency_key="crane")
    scheduled = create(conn, "other", run_at="2030-01-02 00:00:00+00")
    assert pop(conn, bob) == []
    late = create(conn, "capped", expires_at="2030-01-01 12:00:05+00")
    promote(conn)
    assert explain(conn, ids["capped"]) == 'group "capped": 1 tasks are in flight, the cap is 1'
    assert explain(conn, ids["slow"]).startswith('group "slow": rate limited until 2030-01-01 13:00:00')
    assert explain(conn, ids["broken"]).startswith(
        'group "broken": its breaker is open until 2030-01-01 12:01:00'
    )
    assert explain(conn, ids["paused"]).startswith('group "paused": paused since 2030-01-01 12:00:00')
    assert explain(conn, blocked) == (
        f'concurrency key "crane": 1 tasks are in flight, the cap is 1; held by task {holder}'
    )
    assert explain(conn, scheduled).startswith("scheduled at 2030-01-02")
    at(conn, "12:00:06")
    assert explain(conn, late).startswith("expired at 2030-01-01 12:00:05")
    at(conn, "12:01:01")
    (probe,) = pop(conn, bob)
    again = create(conn, "broken")
    promote(conn)
    assert explain(conn, again) == 'group "broken": its breaker is half open and waits for one task to end'
    finish(conn, bob, [probe])


@pytest.mark.usefixtures("one_shard")
def test_explain_names_queues_the_cluster_order_and_missing_workers(conn: Conn) -> None:
    """H40."""
    first, second, third = create(conn, "a"), create(conn, "a"), create(conn, "b")
    promote(conn)
    assert explain(conn, first) == 'no live worker for queue "default"'
    bob = worker(conn)
    assert [explain(conn, i) for i in (first, third, second)] == [
        f"behind {n} tasks in order" for n in range(3)
    ]
    call(conn, "pause_queue", "default")
    assert explain(conn, first).startswith('queue "default" is paused since 2030-01-01 12:00:00')
    call(conn, "resume_queue", "default")
    call(conn, "configure_cluster", max_running=1)
    pop(conn, bob)
    assert explain(conn, second) == "the cluster: 1 tasks are in flight, the cap is 1"
    call(conn, "configure_queue", "default", max_running=1)
    assert explain(conn, second) == 'queue "default": 1 tasks are in flight, the cap is 1'
    call(conn, "configure_queue", "default", reset=["max_running"], rate_limit=1, rate_period="1 hour")
    call(conn, "configure_cluster", reset=["max_running"])
    pop(conn, bob)
    last = create(conn, "a")
    assert explain(conn, last).startswith('queue "default": rate limited until 2030-01-01 13:00:00')


def test_every_gate_has_a_reason_and_every_reason_a_gate(conn: Conn) -> None:
    """One place decides: no allowance without tasks is without a reason, and none with tasks has one."""
    rows = run(
        conn,
        """
        select a.tasks, a.reason, a.look_at, p.paused, p.cap is not null and p.taken >= p.cap as full
        from (
          select *
          from (values (null), ('2030-01-01'::timestamptz)) as paused(paused)
          cross join (values (null), (0), (3)) as cap(cap)
          cross join (values (null), (0.5::float8)) as rate(rate)
          cross join (values (0), (3), (7)) as taken(taken)
          cross join (
            values (null), ('2030-01-01 11:59:00+00'::timestamptz), ('2030-01-01 12:30:00+00'::timestamptz)
          ) as t(opens)
        ) p
        cross join lateral fairq._allowance(
          (p.cap, p.paused, p.rate, 1, 3, interval '1 minute')::fairq.policy,
          (p.taken, p.opens, 3, p.opens, null)::fairq.gate, fairq._now()) a
        """,
    )
    assert len(rows) == 2 * 3 * 2 * 3 * 3
    for allowed, reason, look_at, paused, full in rows:
        assert (allowed > 0) == (reason is None)
        assert allowed >= 0
        assert allowed == 0 or look_at is None
        assert not (paused or full) or allowed == 0


def test_a_configuration_that_fails_leaves_no_trace(conn: Conn) -> None:
    tasks(conn, "bob", 3)
    promote(conn)
    with refused(conn, "QF014"):
        call(conn, "configure_queue", "new", max_running=1, reset=["nothing"])
    assert one(conn, "select count(*) from fairq.queues where queue = 'new'") == 0
