"""Caps, rates and breakers of whole queues and of the cluster: decided at pop, under their own lock."""

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    at,
    call,
    create,
    create_many,
    finish,
    in_flight,
    maintain,
    one,
    pop,
    promote,
    refused,
    register,
    release,
    run,
    written,
)
from tests.support.database import Database
from tests.support.invariants import assert_sound


def test_a_queue_and_the_cluster_count_claimed_and_running(conn: Conn) -> None:
    """I7, H5, H6, H13, H14, H16, H17, H34, H38: caps compose; the smallest room counts."""
    for queue, cap in (("critical", 10), ("normal", 3), ("slow", 2)):
        call(conn, "configure_queue", queue, max_running=cap)
        create_many(conn, "bob", 20, queue=queue)
    call(conn, "configure_cluster", max_running=12)
    bob = register(conn, "critical", "normal", "slow")
    held = [pop(conn, bob, queue=queue) for queue in ("slow", "normal", "critical")]
    assert [len(each) for each in held] == [2, 3, 7]
    assert (in_flight(conn, "cluster", "#cluster"), in_flight(conn, "queue slow", "#queue slow")) == (12, 2)
    finish(conn, bob, held[0])
    assert len(pop(conn, bob, queue="normal")) == 0
    assert len(pop(conn, bob, queue="critical")) == 2
    assert len(pop(conn, bob, queue="slow")) == 0, "the cluster is full"
    assert_sound(conn)


def test_a_queue_cap_goes_with_claim_leases(conn: Conn) -> None:
    """H14, H20: a claim holds a place until its lease is over."""
    call(conn, "configure_queue", "default", max_running=2)
    bob = register(conn)
    create_many(conn, "bob", 5)
    held = pop(conn, bob, lease="10 seconds")
    assert len(held) == 2
    assert pop(conn, bob) == []
    at(conn, "12:00:11")
    assert maintain(conn)["unclaimed"] == 2
    assert len(pop(conn, bob)) == 2
    assert_sound(conn)


def test_a_cluster_cap_excludes_claim_leases(conn: Conn) -> None:
    """H21."""
    call(conn, "configure_cluster", max_running=5)
    bob = register(conn)
    create_many(conn, "bob", 2)
    promote(conn)
    with refused(conn, "QF015"):
        pop(conn, bob, lease="1 minute")
    call(conn, "configure_cluster", max_running=None)
    assert len(pop(conn, bob, lease="1 minute")) == 2


@pytest.mark.parametrize("scope", ["queue", "cluster"])
def test_a_cap_on_a_running_queue_counts_what_is_held_and_may_come_and_go(conn: Conn, scope: str) -> None:
    """I7, H37: raised it fills at once, lowered it drains; a cap above all slots is legal."""

    def cap(number: int | None) -> None:
        if scope == "queue":
            call(conn, "configure_queue", "default", max_running=number)
        else:
            call(conn, "configure_cluster", max_running=number)

    bob = register(conn)
    create_many(conn, "bob", 100)
    held = pop(conn, bob, 3)
    cap(5)
    held += pop(conn, bob)
    assert len(held) == 5
    cap(7)
    held += pop(conn, bob)
    assert len(held) == 7
    cap(2)
    finish(conn, bob, held[:5])
    assert pop(conn, bob) == []
    finish(conn, bob, held[5:6])
    assert len(pop(conn, bob)) == 1
    cap(None)
    assert len(pop(conn, bob, 10)) == 10
    cap(1000)
    assert_sound(conn)
    assert len(pop(conn, bob)) == 82


def test_places_of_a_queue_come_free_once_however_a_task_leaves(conn: Conn) -> None:
    """I7, I10, D7."""
    call(conn, "configure_queue", "default", max_running=6)
    call(conn, "configure_cluster", max_running=6)
    lost, bob = register(conn, lease="1 minute"), register(conn)
    create_many(conn, "bob", 40, max_attempts=9)
    held = pop(conn, bob, 5)
    pop(conn, lost, 1)
    for one_held, outcome in zip(held, ("succeeded", "failed", "cancelled", "expired", "retry"), strict=True):
        assert pop(conn, bob) == []
        assert len(finish(conn, bob, [one_held], outcome, delay="1 hour")) == 1
        assert finish(conn, bob, [one_held], outcome, delay="1 hour") == [], "stale"
        again = pop(conn, bob)
        assert len(again) == 1, outcome
        assert len(release(conn, bob, again)) == 1
        assert release(conn, bob, again) == []
        assert len(pop(conn, bob)) == 1
        assert_sound(conn)
    at(conn, "12:10:00")
    assert pop(conn, bob) == []
    assert maintain(conn)["recovered"] == 1
    assert len(pop(conn, bob)) == 1
    assert pop(conn, bob) == []
    assert_sound(conn)


def test_a_task_keeps_its_place_until_its_end_when_the_cap_was_lifted_meanwhile(conn: Conn) -> None:
    """I7: however often a cap comes and goes, the count is that of the tasks held."""
    call(conn, "configure_queue", "default", rate_limit=1000)
    bob = register(conn)
    create_many(conn, "bob", 60)
    held = []
    for _ in range(3):
        call(conn, "configure_queue", "default", max_running=100)
        held += pop(conn, bob, 4)
        assert_sound(conn)
        call(conn, "configure_queue", "default", max_running=None)
        held += pop(conn, bob, 4)
        assert_sound(conn)
        finish(conn, bob, held[:3])
        held = held[3:]
    call(conn, "configure_queue", "default", max_running=len(held) + 1)
    assert len(pop(conn, bob)) == 1


def test_only_metered_queues_ask_the_meters(conn: Conn) -> None:
    """H36: a plain pop takes no lock that others share; a capped one says so in its settings."""
    bob = register(conn)
    create_many(conn, "bob", 3)
    with conn.transaction():
        pop(conn, bob, 1)
        locked = "select from fairq.domains where queue like '#%' for update nowait"
        with psycopg.connect(conn.info.dsn) as other:
            other.execute(locked)
    query = "select metered from fairq.queues where queue = 'default'"
    assert one(conn, query) is False
    call(conn, "configure_queue", "other", max_running=1)
    assert one(conn, query) is False
    call(conn, "configure_cluster", max_running=1)
    assert one(conn, query) is True
    call(conn, "configure_queue", "third")
    assert one(conn, "select metered from fairq.queues where queue = 'third'") is True
    call(conn, "configure_cluster", max_running=None)
    assert one(conn, query) is False
    call(conn, "configure_queue", "other", max_running=None, rate_limit=None, breaker_threshold=None)
    assert one(conn, "select count(*) from fairq.queues where metered") == 0


def test_an_empty_poll_of_a_capped_queue_writes_nothing(conn: Conn) -> None:
    """D28, I9: neither when there is no work nor when there is no room."""
    call(conn, "configure_queue", "default", max_running=1, rate_limit=5)
    bob = register(conn)
    pop(conn, bob)
    for _ in range(2):
        with conn.transaction():
            before = written(conn)
            assert pop(conn, bob) == []
            assert written(conn) == before
        create_many(conn, "bob", 3)
        pop(conn, bob)


def test_the_rate_of_a_queue_holds_over_all_its_groups_and_says_when(conn: Conn) -> None:
    """D27, D28, D31: exact, with burst; charged per task, not per poll."""
    call(conn, "configure_queue", "default", rate_limit=60, rate_period="1 minute", rate_burst=3)
    bob = register(conn)
    for group in ("a", "b", "c"):
        create_many(conn, group, 10)
    assert len(pop(conn, bob)) == 3
    for _ in range(5):
        assert pop(conn, bob) == []
    assert str(one(conn, "select fairq.next_due_at('default')")) == "2030-01-01 12:00:01+00:00"
    at(conn, "12:00:01")
    assert len(pop(conn, bob)) == 1
    at(conn, "12:00:03")
    assert len(pop(conn, bob)) == 2
    at(conn, "12:10:00")
    assert len(pop(conn, bob)) == 3, "idle time saves up one burst, no more"
    call(conn, "configure_queue", "default", rate_limit=None)
    assert len(pop(conn, bob)) == 21


def test_the_breaker_of_a_queue_opens_for_all_its_groups(conn: Conn) -> None:
    """D17, D19, D20, D21, D25."""
    call(conn, "configure_queue", "default", breaker_threshold=3, breaker_cooldown="1 minute")
    bob = register(conn)
    for group in ("a", "b", "c", "d"):
        create_many(conn, group, 10)
    held = pop(conn, bob, 3)
    finish(conn, bob, held, "failed")
    assert pop(conn, bob) == []
    assert str(one(conn, "select fairq.next_due_at('default')")) == "2030-01-01 12:01:00+00:00"
    at(conn, "12:01:00")
    probe = pop(conn, bob)
    assert len(probe) == 1
    assert pop(conn, bob) == []
    finish(conn, bob, probe, "retry", delay="1 hour")
    assert pop(conn, bob) == []
    at(conn, "12:02:00")
    probe = pop(conn, bob)
    finish(conn, bob, probe)
    assert len(pop(conn, bob)) == 35
    assert_sound(conn)


def test_a_capped_queue_does_not_promote_without_bound(conn: Conn) -> None:
    call(conn, "configure_queue", "default", max_running=2, ready_target=20)
    bob = register(conn)
    create_many(conn, "bob", 500)
    ended = 0
    for _ in range(60):
        held = pop(conn, bob)
        ended += len(finish(conn, bob, held))
        assert one(conn, "select count(*) from fairq.live_tasks where state = 'queued'") <= 50
    assert ended == 120


def test_a_paused_queue_takes_no_places(conn: Conn) -> None:
    call(conn, "configure_queue", "default", max_running=2, rate_limit=2, rate_burst=2)
    bob = register(conn)
    create(conn)
    call(conn, "pause_queue", "default")
    assert pop(conn, bob) == []
    call(conn, "resume_queue", "default")
    assert len(pop(conn, bob)) == 1
    assert run(conn, "select 1 from fairq.live_tasks where meters = 1") == [(1,)]


def test_a_pop_that_hangs_stops_only_those_who_share_its_limit(conn: Conn, database: Database) -> None:
    for queue in ("a", "b"):
        call(conn, "configure_queue", queue, max_running=3)
    bob = register(conn, "a", "b")
    for queue in ("a", "b"):
        create_many(conn, "ann", 2, queue=queue)
    hung = database.connect()
    assert len(pop(hung, bob, 1, queue="a")) == 1
    assert len(pop(conn, bob, 1, queue="b")) == 1
    assert pop(conn, bob, 1, queue="a") == []
    assert len(run(conn, "select id from fairq.turn(%s, '{b,a}', '{1,1}', 2)", bob)) == 2, "b's, and the end"
    call(conn, "configure_cluster", max_running=9)
    hung.rollback()
    assert len(pop(hung, bob, 1, queue="a")) == 1
    assert pop(conn, bob, 1, queue="b") == []
