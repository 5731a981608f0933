"""Tasks of 10 ms beside long ones of ten tenants, on eight slots: how long the short ones wait.

Each tenant has long tasks waiting all the time, and now and then a short one: through a FIFO queue, and
through fairq with its own worker, which shares time, has a cap per tenant, or keeps slots for short tasks.
"""

import json
import random
from typing import Any

from benchmarks import measures
from benchmarks.bench_fairness import SLOTS, TENANTS, Arrival, Conn, play
from benchmarks.harness import Scale, Session

BASELINES = ("fifo",)
SHORT, LONG = 10.0, 1_000.0  # milliseconds: a minute would take hours, and be no other case
SHORT_PER_SECOND = 40.0
PLAIN, CAPPED, KEPT = "fairq work", "fairq work, a cap per tenant", "fairq work, slots for short ones"
# What each is given beside fairness by time.
SETTINGS: dict[str, dict[str, float]] = {
    PLAIN: {},
    CAPPED: {"group_max_running": 1},
    KEPT: {"short_slots": 2, "short_under": SHORT / 1000 * 10},
}


def estimate(scale: Scale) -> float:
    return 2 + scale.repetitions * (1 + len(SETTINGS)) * (duration(scale) + 4)


def duration(scale: Scale) -> float:
    return 1.5 + 6 * scale.seconds


def run(session: Session) -> None:
    for repetition in session.repetitions():
        for subject in ("fifo", *SETTINGS):
            session.say(f"{subject}, {repetition + 1}")
            measure(session, subject)


def measure(session: Session, subject: str) -> None:
    seconds = duration(session.scale)
    chance = random.Random(11 + session.repetition)
    names = [f"tenant {number}" for number in range(TENANTS)]
    waiting = [Arrival(0, name, int(seconds) + 5, LONG, "long_nap") for name in names]
    later, at = [], chance.expovariate(SHORT_PER_SECOND)
    while at < seconds:
        later.append(Arrival(at, chance.choice(names), 1, SHORT))
        at += chance.expovariate(SHORT_PER_SECOND)

    def configure(conn: Conn) -> None:
        if subject != "fifo":
            given = json.dumps({"fairness": "time", **SETTINGS[subject]})
            conn.execute("select fairq.configure_queue('default', %s)", (given,))
            for kind, cost in (("nap", SHORT), ("long_nap", LONG)):
                given = json.dumps({"cost": cost / 1000})
                conn.execute("select fairq.configure_kind('default', %s, %s)", (kind, given))

    played = play(session, subject, waiting, later, seconds=seconds, configure=configure)
    scenario: dict[str, Any] = {"tenants": TENANTS, "slots": SLOTS, "long": f"{LONG / 1000:g} s"}
    limit = (played.end - played.start) * 1000
    waits = [record.waited(played.end) * 1000 for record in played.records if record.milliseconds == SHORT]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        wait = min(measures.percentile(waits, share), limit)
        session.record(subject, f"short tasks' wait, {name}", wait, "ms", limit=limit, **scenario)
    got = measures.service(played.records, names, played.start, played.end, by_seconds=True)
    least = measures.evenness(got.values())
    session.record(subject, "least share beside the most", least, "share", **scenario)
    busy = sum(got.values()) / (SLOTS * (played.end - played.start))
    session.record(subject, "slots at work", busy, "share", **scenario)
