"""No false alarm: what `fairq doctor` says of fairness while real workers serve mixed load.

An hour in `make alarms` (FAIRQ_TEST_ALARMS=seconds); a moment in `make test`.
"""

import os
import random
import signal
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import fairq
from fairq.commands.doctor import judge_fairness
from fairq.queries.doctor import check_fairness
from tests.support.calls import Conn, call, one
from tests.support.database import Database
from tests.worker.running import work_process

SECONDS = float(os.environ.get("FAIRQ_TEST_ALARMS", "1"))
QUEUES = ("default", "timed")
GROUPS = [f"group {number}" for number in range(12)]
FULL = 6000


def one_step(conn: Conn, luck: random.Random, length: dict[str, float]) -> None:
    """Somebody enqueues, or an operator changes something."""
    queue, group = luck.choice(QUEUES), luck.choice(GROUPS)
    dice = luck.random()
    if dice < 0.05:
        call(conn, "configure_group", queue, group, weight=luck.choice([0.5, 1, 2, 5]))
    elif dice < 0.08:
        call(conn, luck.choice(["pause_group", "resume_group", "resume_group"]), queue, group)
    elif one(conn, "select count(*) from fairq.tasks") < FULL:
        count = luck.choice([1, 1, 3, 10, 400])
        options: dict[str, Any] = {"kind": "fails" if luck.random() < 0.1 else "sleeps"}
        item: dict[str, Any] = {}
        if dice < 0.12:
            item["concurrency_key"], count = luck.choice(["a key", "another"]), min(count, 20)
        elif dice < 0.2:
            item["priority"] = luck.randint(-2, 2)
        elif dice < 0.25:
            options["expires_at"] = datetime.now(UTC) + timedelta(seconds=luck.choice([1, 10, 60]))
        elif dice > 0.9:
            group, count = f"new {luck.random()}", 2
        seconds = luck.uniform(0.5, 1.5) * length.get(group, 0.1)
        fairq.enqueue_many(conn, [fairq.Item(group, seconds, **item)] * count, queue=queue, **options)


def test_an_hour_of_mixed_load_raises_no_alarm(database: Database) -> None:
    luck = random.Random(os.environ.get("FAIRQ_TEST_SEED", "4711"))
    conn = database.connect(autocommit=True)
    call(conn, "configure_queue", "timed", fairness="time")
    length = {group: luck.choice([0.02, 0.1, 0.1, 0.3, 2.0]) for group in GROUPS}
    for queue in QUEUES:
        call(conn, "configure_group", queue, GROUPS[1], max_running=2)
        call(conn, "configure_group", queue, GROUPS[2], rate_limit=60, rate_period="1 minute")
        call(conn, "configure_group", queue, GROUPS[3], breaker_threshold=2, breaker_cooldown="20 seconds")
    arguments = [each for queue in QUEUES for each in ("--queue", queue)]
    ratios: list[float] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(work_process(database.dsn, *arguments, app="mixed")) for _ in range(2)]
        for worker in workers:
            worker.wait_for("slot")
        deadline = time.monotonic() + SECONDS
        look_at, restart_at = 0.0, time.monotonic() + 300
        while (now := time.monotonic()) < deadline:
            one_step(conn, luck, length)
            if now >= look_at:
                look_at = now + 5
                found = check_fairness(conn)
                assert judge_fairness(found).verdict == "ok", found
                ratios += [each.worst_debt for each in found if each.worst_debt is not None]
            if now >= restart_at:
                restart_at = now + 300
                number = luck.randrange(2)
                workers[number].send(luck.choice([signal.SIGTERM, signal.SIGKILL]))
                workers[number] = stack.enter_context(work_process(database.dsn, *arguments, app="mixed"))
            time.sleep(luck.uniform(0.05, 0.25))
    ended = one(conn, "select count(*) from fairq.finished_tasks")
    assert ended
    if SECONDS >= 120:
        assert len(ratios) > SECONDS / 20, "it judged too seldom to say anything"
    worst = max(ratios, default=0)
    print(f"{ended} tasks, judged {len(ratios)} times, the largest debt {worst:.2f} of its bound")
