"""Many who fire schedules, killed all the time, with clocks that are wrong by 90 seconds: no tick is lost,
and none fires twice.

Some seconds in `make test`, ten minutes with twenty of them in `make chaos` (FAIRQ_TEST_SCHEDULES=seconds).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from random import Random

import psycopg

from fairq import schedules
from tests.support.calls import column, one, run
from tests.support.database import Database
from tests.support.processes import ROOT

SECONDS = float(os.environ.get("FAIRQ_TEST_SCHEDULES", "4"))
FIRERS = 20 if SECONDS > 60 else 3
EVERY_SECOND = 20
RULES = ("* * * * *", "*/2 * * * *", "0-59 * * * *")
ZONES = ("UTC", "Europe/Berlin", "Australia/Lord_Howe")


def start(dsn: str, random: Random) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.scheduler", dsn, str(random.choice((-90, 0, 90)))],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def test_each_tick_fires_once(database: Database) -> None:
    """S5, S12."""
    random = Random(1)
    conn = database.connect(autocommit=True)
    rules: dict[str, tuple[str | None, str, timedelta | None]] = {}
    for n in range(EVERY_SECOND):
        rules[f"second {n}"] = (None, "UTC", timedelta(seconds=1))
        spread = 3 if n % 2 else None
        schedules.configure_schedule(conn, "s", f"second {n}", every=1, spread=spread, missed="all")
    for n, cron in enumerate(RULES):
        rules[f"minute {n}"] = (cron, ZONES[n], None)
        schedules.configure_schedule(conn, "s", f"minute {n}", cron=cron, time_zone=ZONES[n], missed="all")
    # All of them as if a while had passed already: the first look finds something to make up for.
    run(
        conn,
        """
        update fairq.schedules
        set next_tick = next_tick - interval '1 minute', fire_at = fire_at - interval '1 minute'
        where every is not null
        """,
    )
    began: dict[str, datetime] = dict(
        run(conn, "select group_key, coalesce(next_tick - every, done_until) from fairq.schedules")
    )

    firers = [start(database.dsn, random) for _ in range(FIRERS)]
    kills = 0
    try:
        for firer in firers:
            assert firer.stdout is not None
            assert firer.stdout.readline() == b"up\n"
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(random.uniform(0.1, 0.5))
            if random.random() < 0.3:
                victim = random.randrange(FIRERS)
                firers[victim].send_signal(signal.SIGKILL)
                firers[victim].communicate()
                firers[victim] = start(database.dsn, random)
            else:
                run(
                    conn,
                    """
                    select pg_terminate_backend(a.pid) from pg_stat_activity a
                    where a.datname = current_database() and a.pid <> pg_backend_pid()
                    order by random() limit 1
                    """,
                )
            kills += 1
    finally:
        for firer in firers:
            firer.kill()
            firer.communicate()

    at = one(conn, "select clock_timestamp()")
    for _ in range(1000):
        with contextlib.suppress(psycopg.errors.SerializationFailure):
            schedules.plan_due(conn, 100)
            if not one(conn, "select fairq.fire_schedules()")["fired"]:
                break
    fired = 0
    for group, (rule, zone, every) in rules.items():
        told = "select headers ->> 'scheduled_for' from fairq.tasks where group_key = %s order by 1"
        found = [datetime.fromisoformat(each) for each in column(conn, told, group)]
        assert found == sorted(set(found)), f"{group}: a tick fired twice"
        last = one(conn, "select done_until from fairq.schedules where group_key = %s", group)
        assert last >= at - timedelta(seconds=64 + 60 * (rule is not None)) or not found
        due = []
        for tick in schedules.ticks_of(rule, zone, every, began[group]):
            if tick > last:
                break
            due.append(tick.astimezone(UTC))
        assert found == due, f"{group}: a tick was lost"
        fired += len(found)
    print(f"{FIRERS} firers, {SECONDS:g} s, {kills} kills: {fired} ticks, each once")
    assert fired > EVERY_SECOND * (60 + SECONDS) / 2
