"""Lengths of time that calls accept: none keeps a later call, least of all maintain(), from its work."""

import pytest

from tests.support.calls import Conn, at, create, finish, maintain, one, pop, refused, register, release, run

YEAR, CENTURY = "366 days", "36525 days"

# What takes a length of time, whether zero is one, and the longest.
CALLS = {
    "retention": ("configure_queue('default', jsonb_build_object('retention', %s::text))", True, CENTURY),
    "retry base": ("configure_queue('default', jsonb_build_object('retry_base', %s::text))", True, YEAR),
    "retry cap": ("configure_queue('default', jsonb_build_object('retry_cap', %s::text))", True, YEAR),
    "lease": ("register_worker('w', '{default}', 1, %s)", False, YEAR),
    "claim lease": ("pop_tasks('default', 9, fairq.register_worker('w', '{default}', 1), %s)", False, YEAR),
    "rate": (
        "configure_group('default', 'bob', jsonb_build_object('rate_limit', 1, 'rate_period', %s::text))",
        False,
        YEAR,
    ),
    "breaker": (
        "configure_queue('default',"
        " jsonb_build_object('breaker_threshold', 1, 'breaker_cooldown', %s::text))",
        False,
        YEAR,
    ),
    "watch": ("watch_task(1, %s)", False, "1 hour"),
}
# The last ones are short by their sum, but none of their parts can be added to a time.
TOO_LONG = [
    "100000 years",
    "infinity",
    "10000 years -3652425 days",
    "5000000 years -1800000000 days",
    "100000000 days -2400000000 hours",
    "-10000 years 3652425 days 1 second",
]


def needs(conn: Conn, length: str) -> None:
    if "infinity" in length and conn.info.server_version < 170000:
        pytest.skip("intervals are finite before PostgreSQL 17")


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("length", ["-1 microsecond", "-infinity", *TOO_LONG, "one more than the longest"])
def test_a_length_of_time_out_of_range_is_refused(db: Conn, what: str, length: str) -> None:
    call, _, longest = CALLS[what]
    needs(db, length)
    create(db)
    with refused(db, "QF009"):
        run(db, f"select fairq.{call}", f"{longest} 1 microsecond" if length.startswith("one") else length)
    assert pop(db, register(db), 9, lease="1 minute"), "everything is as it was"
    maintain(db)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("end", ["shortest", "longest"])
def test_everything_works_with_the_shortest_and_the_longest_time(db: Conn, what: str, end: str) -> None:
    call, may_be_zero, longest = CALLS[what]
    at(db, "12:00:00")
    worker = register(db, lease="366 days")
    first, second = create(db, "alice", max_attempts=100), create(db)
    run(db, f"select fairq.{call}", longest if end == "longest" else "0" if may_be_zero else "1 microsecond")
    for time in ("12:00:00", "12:00:01", "23:00:00"):
        at(db, time)
        maintain(db)
    run(db, "select fairq.configure_group('default', 'bob', '{\"breaker_threshold\": null}')")
    popped = pop(db, worker, 9)
    for id_, attempt in run(db, "select id, attempt from fairq.live_tasks where id = any(%s)", popped):
        assert finish(db, worker, [id_], "retry", attempt=attempt) == [id_]
    maintain(db)
    assert {first, second} >= set(popped)


def test_a_long_back_off_ends_at_its_cap_after_any_number_of_attempts(db: Conn) -> None:
    """Doubled thirty times, a year is more than an interval can hold."""
    at(db, "12:00:00")
    run(
        db,
        'select fairq.configure_queue(\'default\', \'{"retry_base": "366 days", "retry_cap": "366 days"}\')',
    )
    worker = register(db)
    task = create(db, max_attempts=5)
    for attempt in range(1, 40):
        assert pop(db, worker, 1) == [task]
        assert release(db, worker, [task], attempt) == [task]
    assert pop(db, worker, 1) == [task]
    assert finish(db, worker, [task], "retry", attempt=40) == [task]
    days = one(db, "select extract(day from run_at - fairq._now()) from fairq.tasks where id = %s", task)
    assert 366 * 0.75 - 1 <= days <= 366 * 1.25
    maintain(db)
