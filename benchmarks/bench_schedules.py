"""Ten thousand tenants' schedules fire while others enqueue: what these wait, beside the same without.

At once: every tenant's tick at the same moment, until all have fired. Spread: over a minute.
"""

import time

import fairq
from benchmarks.bench_worker import scalar, wait_until_empty, workers
from benchmarks.harness import Scale, Session, clear
from benchmarks.measures import percentile

BASELINES: tuple[str, ...] = ()
TENANTS = 20
SLOTS = 8
PAUSE = 0.005
SPREAD = 60.0
# A worker of so few slots takes so long for ten thousand at once, at most.
LONGEST = 60.0


def estimate(scale: Scale) -> float:
    return 5 + scale.repetitions * (2 * max(3 * scale.seconds, 1) + schedules(scale) * 4e-3)


def schedules(scale: Scale) -> int:
    return min(scale.tasks, 10_000)


def run(session: Session) -> None:
    seconds = max(2 * session.scale.seconds, 0.3)
    with session.connect() as conn:
        clear(conn)
        conn.execute(
            """
            select fairq.configure_schedule('s', 'scheduled ' || g, '{"every": 86400, "kind": "nothing"}')
            from generate_series(1, %s) g
            """,
            (schedules(session.scale),),
        )
        aim = """
            update fairq.schedules
            set next_tick = clock_timestamp(), done_until = clock_timestamp() - interval '1 second',
              fire_at = clock_timestamp()
                + fairq._share_of(make_interval(secs => %(spread)s), name, group_key)
        """
        with workers(conn, session.dsn, 1, SLOTS):
            for _ in session.repetitions():
                for name, spread in (("none", None), ("spread", SPREAD), ("at once", 0.0)):
                    begin = scalar(conn, "select clock_timestamp()")
                    if spread is not None:
                        conn.execute(aim.encode(), {"spread": spread})
                    start = time.perf_counter()
                    enqueued = 0
                    while time.perf_counter() < start + seconds or (
                        spread == 0.0
                        and time.perf_counter() < start + LONGEST
                        and (enqueued % 100 or scalar(conn, DUE))
                    ):
                        tenant = f"tenant {enqueued % TENANTS}"
                        fairq.enqueue(conn, tenant, time.time(), kind="delay")
                        enqueued += 1
                        time.sleep(PAUSE)
                    conn.execute("update fairq.schedules set fire_at = null")
                    wait_until_empty(conn)
                    ((fired,),) = conn.execute(FIRED.encode(), (begin,)).fetchall()
                    waits = [row[0] * 1e3 for row in conn.execute(WAITS.encode(), (begin,)).fetchall()]
                    scenario = {"schedules": schedules(session.scale), "seconds": seconds}
                    session.record(name, "wait of others p50", percentile(waits, 0.5), "ms", **scenario)
                    session.record(name, "wait of others p99", percentile(waits, 0.99), "ms", **scenario)
                    if spread is not None:
                        session.record(name, "ticks fired", float(fired), "tasks/s", **scenario)


DUE = "select exists (select from fairq.schedules where fire_at <= clock_timestamp())"
WAITS = """
select result::float8 from fairq.finished_tasks where kind = 'delay' and created_at >= %s
"""
FIRED = """
select count(*) / greatest(extract(epoch from max(created_at) - min(created_at)), 0.001)::float8
from fairq.finished_tasks where kind = 'nothing' and created_at >= %s
"""
