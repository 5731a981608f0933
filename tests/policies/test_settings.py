"""What settings are refused, who may change them, and that explain_task names what keeps a task waiting."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from fairq import policies
from fairq.options import options_of
from tests.support.calls import (
    Conn,
    at,
    call,
    create,
    create_many,
    explain,
    finish,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    run,
)

BAD_LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"weight": 0}, "QF007"),
    ({"weight": 1001}, "QF007"),
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
    ({"max_running": 2**31}, "QF007"),
    ({"max_running": 1.5}, "QF007"),
    ({"max_running": "5"}, "QF007"),
    ({"max_running": True}, "QF007"),
    ({"max_running": [5]}, "QF007"),
    ({"max_running": {}}, "QF007"),
    ({"weight": "heavy"}, "QF007"),
    ({"weight": 10**400}, "QF007"),
    ({"rate_limit": 1, "rate_period": "soon"}, "QF009"),
    ({"rate_limit": 1, "rate_period": "infinity"}, "QF009"),
    ({"rate_limit": 1, "rate_period": "178000000 years"}, "QF009"),
    ({"rate_limit": 1, "rate_period": True}, "QF009"),
    ({"rate_limit": 1, "rate_period": 10**40}, "QF009"),
    ({"rate_limit": None, "rate_period": "1 second"}, "QF007"),
    ({"everything": 1}, "QF014"),
    ({"everything": None}, "QF014"),
    ({"": 1}, "QF014"),
    ({"paused_at": None}, "QF014"),
    ({"queue": "other"}, "QF014"),
]


@pytest.mark.parametrize(("settings", "code"), BAD_LIMITS)
def test_a_setting_out_of_range_changes_nothing(conn: Conn, settings: dict[str, Any], code: str) -> None:
    """For a group, as the default of a queue's groups, and for the whole queue."""
    with refused(conn, code):
        call(conn, "configure_group", "default", "bob", **settings)
    with refused(conn, code):
        of_groups = {k if k == "weight" else f"group_{k}": v for k, v in settings.items()}
        call(conn, "configure_queue", "default", **of_groups)
    if "weight" not in settings:
        with refused(conn, code):
            call(conn, "configure_queue", "default", **settings)
    if settings.keys() <= {"max_running"}:
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
        ("#cluster", "cluster", "QF003"),
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
            call(conn, "configure_key", key, max_running=1)
    for queue in (None, "", "x" * 201, "#keys", "#mine"):
        with refused(conn, "QF006"):
            call(conn, "configure_queue", queue, max_running=1)
    for function in ("pause_queue", "resume_queue", "drain_queue", "rate_usage", "reset_rate"):
        for queue in ("nowhere", "#keys", "#cluster", None):
            with refused(conn, "QF003"):
                call(conn, function, queue)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_settings_that_promote_need_read_committed(conn: Conn, level: str) -> None:
    run(conn, f"set default_transaction_isolation = '{level}'")
    for function, args in (
        ("configure_group", ["default", "bob"]),
        ("purge_group", ["default", "bob"]),
        ("reset_rate", ["default", "bob"]),
        ("reset_rate", ["default"]),
    ):
        with pytest.raises(psycopg.Error) as caught:
            call(conn, function, *args)
        assert caught.value.sqlstate == "QF005"


SCOPES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "configure_queue": (("default",), set(options_of(policies.QueueSettings))),
    "configure_group": (("default", "bob"), set(options_of(policies.GroupSettings))),
    "configure_key": (("printer",), set(options_of(policies.KeySettings))),
    "configure_cluster": ((), set(options_of(policies.ClusterSettings))),
}


@pytest.mark.parametrize("function", SCOPES)
def test_each_function_knows_its_settings_and_no_other(conn: Conn, function: str) -> None:
    """A name that means nothing here is refused, with the names that do; it is never passed over."""
    args, known = SCOPES[function]
    every = set.union(*(names for _, names in SCOPES.values()))
    for name in every - known:
        with refused(conn, "QF014"):
            call(conn, function, *args, **{name: None})
        with refused(conn, "QF014"):
            call(conn, function, *args, **dict.fromkeys([*known, name]))
    for name in known:
        call(conn, function, *args, **{name: None})
    call(conn, function, *args, **dict.fromkeys(known))


@pytest.mark.parametrize("function", SCOPES)
def test_settings_are_an_object(conn: Conn, function: str) -> None:
    args, _ = SCOPES[function]
    query = f"select fairq.{function}({', '.join(['%s'] * len(args) + ['%s::jsonb'])})"
    for wrong in ("[]", '["max_running"]', "5", '"max_running"', "null", "true"):
        with refused(conn, "QF014"):
            run(conn, query, *args, wrong)
    before = run(conn, query, *args, "{}")
    assert run(conn, query, *args, None) == before, "null says nothing"


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("max_runing", "max_running"),
        ("wieght", "weight"),
        ("rate", "rate_limit"),
        ("group_limit", "group_rate_limit"),
        ("breaker_treshold", "breaker_threshold"),
        ("retries", "retry_cap"),
        ("maxAttempts", "max_attempts"),
        ("", "ready_target"),
    ],
)
def test_an_unknown_setting_is_told_the_nearest(conn: Conn, given: str, nearest: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        call(conn, "configure_queue", "default", **{given: 1})
    assert caught.value.sqlstate == "QF014"
    assert str(caught.value.diag.message_hint).startswith(
        f"Did you mean {nearest}? Known settings: ready_target, "
    )


BAD_SETTINGS_OF_QUEUES: list[tuple[dict[str, Any], str]] = [
    ({"ready_target": 0}, "QF007"),
    ({"ready_target": 1_000_001}, "QF007"),
    ({"max_attempts": 0}, "QF007"),
    ({"retry_base": "-1 second"}, "QF009"),
    ({"retry_base": "367 days"}, "QF009"),
    ({"retry_cap": "2 years"}, "QF009"),
    ({"retention": "-1 second"}, "QF009"),
    ({"retention": "infinity"}, "QF009"),
    ({"retention": "36526 days"}, "QF009"),
    ({"retention": "10000 years"}, "QF009"),
    ({"notify": "no"}, "QF014"),
    ({"notify": 0}, "QF014"),
    ({"fairness": "luck"}, "QF014"),
    ({"fairness": 1}, "QF014"),
    ({"metered": False}, "QF014"),
    ({"internal": True}, "QF014"),
    ({"draining_at": None}, "QF014"),
]


@pytest.mark.parametrize(("settings", "code"), BAD_SETTINGS_OF_QUEUES)
def test_a_setting_of_queues_out_of_range_changes_nothing(
    conn: Conn, settings: dict[str, Any], code: str
) -> None:
    for queue in ("default", "new"):
        with refused(conn, code):
            call(conn, "configure_queue", queue, **settings, max_running=3)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"shard_count": 0}, "QF007"),
        ({"shard_count": 4097}, "QF007"),
        ({"payload_limit": 0}, "QF007"),
        ({"payload_limit": 268435457}, "QF007"),
        ({"singleton": False}, "QF014"),
    ],
)
def test_a_setting_of_the_cluster_out_of_range_changes_nothing(
    conn: Conn, settings: dict[str, Any], code: str
) -> None:
    with refused(conn, code):
        call(conn, "configure_cluster", **settings)


def test_what_is_accepted_stops_nothing(conn: Conn) -> None:
    """The longest times there are. One that is none, but whose parts no date can take, is refused."""
    longest = {"retention": "36525 days", "retry_base": "366 days", "retry_cap": "366 days"}
    call(conn, "configure_queue", "default", **longest, max_attempts=1_000_000)
    with refused(conn, "QF009"):
        call(conn, "configure_queue", "default", retention="100000 years -36525000 days")
    call(conn, "configure_group", "default", "bob", rate_limit=1, rate_period="366 days", rate_burst=100_000)
    call(conn, "configure_group", "default", "bob", breaker_threshold=1, breaker_cooldown="366 days")
    bob = register(conn)
    create(conn)
    for _ in range(3):
        held = pop(conn, bob)
        finish(conn, bob, held, "failed")
        maintain(conn)
    # Doubled so often that no interval could hold it, a back-off ends at its cap.
    create(conn, "carol")
    conn.execute("update fairq.tasks set attempt = 39 where group_key = 'carol'")
    finish(conn, bob, pop(conn, bob), "retry")
    row = conn.execute("select run_at - fairq._now() from fairq.tasks where attempt = 40").fetchone()
    assert row
    assert timedelta(days=270) < row[0] < timedelta(days=460)


def test_a_null_takes_a_setting_away_and_an_absent_one_stays(conn: Conn) -> None:
    """The default of a setting is that of its column, wherever it is taken from."""
    row = "select to_jsonb(q) - 'queue' from fairq.queues q where q.queue = %s"
    call(conn, "configure_queue", "fresh")
    fresh = one(conn, row, "fresh")
    given: dict[str, Any] = {
        name: {int: 7, float: 2.5, bool: False, str: "time"}.get(option.type, "1 hour")
        for name, option in options_of(policies.QueueSettings).items()
    }
    given |= {"enqueue_role": "fairq_enqueue", "work_role": "fairq_work", "short_slots": 6}
    call(conn, "configure_queue", "docs", **given)
    every = one(conn, row, "docs")
    assert all(every[name] != fresh[name] for name in given)
    call(conn, "configure_queue", "docs", max_attempts=3)
    assert one(conn, row, "docs") == {**every, "max_attempts": 3}
    call(conn, "configure_queue", "docs", **dict.fromkeys(given))
    assert one(conn, row, "docs") == fresh
    call(conn, "configure_cluster", payload_limit=5, max_running=5)
    call(conn, "configure_cluster", payload_limit=None, max_running=None)
    assert run(conn, "select payload_limit, max_running from fairq.settings") == [(1048576, None)]


def test_a_rate_and_its_period_come_and_go_together(conn: Conn) -> None:
    query = "select rate_limit, rate_period::text, rate_burst from fairq.groups where group_key = 'bob'"

    def after(**settings: Any) -> Any:
        call(conn, "configure_group", "default", "bob", **settings)
        return run(conn, query)[0]

    assert after(rate_limit=2) == (2, "00:00:01", None)
    assert after(rate_period="1 minute", rate_burst=5) == (2, "00:01:00", 5)
    assert after(rate_limit=3) == (3, "00:01:00", 5)
    assert after(rate_period=None) == (3, "00:00:01", 5)
    assert after(rate_limit=None) == (None, None, None)
    assert after(rate_burst=4) == (None, None, 4), "a burst of its own goes with its queue's rate"
    assert after(rate_limit=None, rate_burst=6) == (None, None, 6)


def test_times_are_texts_or_seconds(conn: Conn) -> None:
    for given, kept in (("90 seconds", 90), (90, 90), (0.5, 0.5), ("1 month", 30 * 86400), ("P1D", 86400)):
        call(conn, "configure_queue", "default", retention=given)
        assert (
            one(conn, "select extract(epoch from retention) from fairq.queues where queue = 'default'")
            == kept
        )


def test_settings_answer_with_what_is_in_force(conn: Conn) -> None:
    names = (
        "max_running, rate_limit, rate_period::text, rate_burst, breaker_threshold, breaker_cooldown::text"
    )
    query = f"select {names} from fairq.configure_group('default', 'bob')"  # noqa: S608
    call(conn, "configure_group", "default", "bob", max_running=3, rate_limit=2)
    call(conn, "configure_group", "default", "bob", breaker_threshold=5)
    assert run(conn, query) == [(3, 2, "00:00:01", None, 5, "00:01:00")]
    call(conn, "configure_group", "default", "bob", rate_limit=None, breaker_threshold=None)
    assert run(conn, query) == [(3, None, None, None, None, None)]


ADMIN_CALLS = (
    """select fairq.configure_group('default', 'bob', '{"max_running": 1}')""",
    """select fairq.configure_queue('default', '{"max_running": 1}')""",
    """select fairq.configure_cluster('{"max_running": 1}')""",
    """select fairq.configure_key('k', '{"max_running": 1}')""",
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
    run(
        conn, """select fairq.configure_queue('default', '{"group_rate_limit": 5, "breaker_threshold": 3}')"""
    )
    run(conn, "set role fairq_work")
    bob = register(conn)
    first = create(conn, concurrency_key="k")
    second = create(conn, concurrency_key="k")
    held = pop(conn, bob)
    assert held[0] == first
    finish(conn, bob, held, "failed")
    assert pop(conn, bob)[0] == second
    assert one(conn, "select fairq.next_due_at('default')") is None
    maintain(conn)
    run(conn, "set role fairq_observe")
    assert explain(conn, second).startswith("running")
    assert run(conn, "select fairq.next_due_at('default')") is not None


@pytest.mark.usefixtures("one_shard")
def test_explain_names_each_reason(conn: Conn) -> None:
    """H40, D33: the first obstacle that the task would meet, with what is needed to act on it."""
    bob = register(conn)
    holder = create(conn, "holder", concurrency_key="crane")
    pop(conn, bob)
    call(conn, "configure_group", "default", "capped", max_running=1)
    call(conn, "configure_group", "default", "slow", rate_limit=1, rate_period="1 hour")
    call(conn, "configure_group", "default", "broken", breaker_threshold=1)
    for group in ("capped", "slow", "broken"):
        create(conn, group)
    held = {task.group_key: task for task in pop(conn, bob)}
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
    bob = register(conn)
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
    call(conn, "configure_queue", "default", max_running=None, rate_limit=1, rate_period="1 hour")
    call(conn, "configure_cluster", max_running=None)
    pop(conn, bob)
    last = create(conn, "a")
    assert explain(conn, last).startswith('queue "default": rate limited until 2030-01-01 13:00:00')


def test_every_gate_has_a_reason_and_every_reason_a_gate(conn: Conn) -> None:
    """One place decides: no allowance without tasks is without a reason, and none with tasks has one."""
    rows = run(
        conn,
        """
        select a.tasks, a.reason, a.look_at, p.paused,
          coalesce(p.taken + coalesce(p.uncounted, 0) >= p.cap, false)
            or coalesce(p.spent + 20 >= p.budget, false) as full
        from (
          select *
          from (values (null), ('2030-01-01'::timestamptz)) as paused(paused)
          cross join (values (null), (0), (3)) as cap(cap)
          cross join (values (null), (0.5::float8)) as rate(rate)
          cross join (values (null, null), (100.0, 20.0), (100.0, 90.0)) as money(budget, spent)
          cross join (values (0), (3), (7)) as taken(taken)
          cross join (values (null), (2)) as uncounted(uncounted)
          cross join (
            values (null), ('2030-01-01 11:59:00+00'::timestamptz), ('2030-01-01 12:30:00+00'::timestamptz)
          ) as t(opens)
        ) p
        cross join lateral fairq._allowance(
          (p.cap, p.paused, p.rate, 1, 3, interval '1 minute', p.budget, 3600)::fairq.policy,
          (p.taken, p.uncounted, p.opens, 3, p.opens, null, p.spent, '2030-01-01 13:00+00', null,
            null)::fairq.gate,
          fairq._now(), 20) a
        """,
    )
    assert len(rows) == 2 * 3 * 2 * 3 * 3 * 2 * 3
    for allowed, reason, look_at, paused, full in rows:
        assert (allowed > 0) == (reason is None)
        assert allowed >= 0
        assert allowed == 0 or look_at is None
        assert not (paused or full) or allowed == 0


def test_a_configuration_that_fails_leaves_no_trace(conn: Conn) -> None:
    create_many(conn, "bob", 3)
    promote(conn)
    with refused(conn, "QF014"):
        call(conn, "configure_queue", "new", max_running=1, nothing=None)
    assert one(conn, "select count(*) from fairq.queues where queue = 'new'") == 0
