"""The keeper of any worker fires schedules when they are due, not when it happens to look."""

from datetime import datetime, timedelta

import fairq
from tests.worker.running import Desk, worker_thread


def test_a_worker_fires_each_tick_between_two_signs_of_life(desk: Desk) -> None:
    """S5."""
    app = fairq.App()
    told: list[datetime | None] = []

    @app.task(schedule=fairq.Schedule("every 1s", missed="all"))
    def look(payload: None, ctx: fairq.Context) -> None:
        told.append(ctx.scheduled_for)

    app.install(desk.conn)
    # One sign of life at the start, the next one after the test.
    with worker_thread(app, desk.dsn, lease=300, heartbeat_ms=100_000, notify_poll_interval_ms=300_000):
        desk.wait_until(lambda: len(told) >= 3, "three ticks fired")
    ticks = sorted(tick for tick in told if tick is not None)
    assert len(ticks) == len(told)
    assert ticks == [ticks[0] + timedelta(seconds=n) for n in range(len(ticks))]


def test_a_task_enqueued_while_a_thousand_are_due_waits_for_few_of_them(desk: Desk) -> None:
    """I6, S5: counted in turns, not in seconds. A worker with one slot fires four at a time."""
    app = fairq.App()
    begun: list[str] = []

    @app.task
    def tick(payload: None) -> None:
        begun.append("tick")
        if len(begun) % 50 == 0:
            desk.enqueue("other", group_key=f"other {len(begun)}")
            begun.append("asked")

    @app.task
    def other(payload: None) -> None:
        begun.append("other")

    desk.rows(
        """
        select fairq.configure_schedule('s', 'g' || g, '{"every": 86400, "kind": "tick"}')
        from generate_series(1, 1000) g
        """
    )
    desk.conn.execute("update fairq.schedules set next_tick = now(), fire_at = now()")
    with worker_thread(app, desk.dsn, concurrency=1):
        desk.wait_until(lambda: begun.count("other") >= 4, "four of others have run")
    for _ in range(4):
        asked, ran = begun.index("asked"), begun.index("other")
        assert ran - asked <= 25
        begun[asked] = begun[ran] = ""


def some_app() -> fairq.App:
    app = fairq.App()

    @app.task
    def default(payload: None) -> None: ...

    return app


def test_a_worker_plans_what_was_configured_by_sql(desk: Desk) -> None:
    desk.rows("""select fairq.configure_schedule('s', 'bob', '{"cron": "0 3 * * *"}')""")
    with worker_thread(some_app(), desk.dsn, heartbeat_ms=50):
        desk.wait_until(lambda: desk.one("select fire_at is not null from fairq.schedules"), "it is planned")


def test_a_worker_without_upkeep_fires_nothing(desk: Desk) -> None:
    desk.rows("""select fairq.configure_schedule('s', 'bob', '{"every": 1}')""")
    desk.conn.execute("update fairq.schedules set fire_at = now(), next_tick = now()")
    beats = "select max(beat_at) from fairq.heartbeats"
    with worker_thread(some_app(), desk.dsn, heartbeat_ms=50, maintain_interval_ms=0):
        desk.wait_until(lambda: desk.one(beats) is not None, "a sign of life")
        first = desk.one(beats)
        desk.wait_until(lambda: desk.one(beats) > first + timedelta(seconds=0.2), "some more")
    assert desk.live == 0
