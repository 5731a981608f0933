"""What promotion reaches with one, four and sixteen shards: two sessions promote all that waits.

A shard is promoted by one session at a time, so of one shard only one has something to do.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks.bench_worker import cpu, scalar
from benchmarks.cycles import FAIRQ, PAYLOAD, Conn
from benchmarks.harness import Scale, Session, clear

BASELINES: tuple[str, ...] = ()
SHARDS = (1, 4, 16)
SESSIONS = 2
GROUPS = 1_000
LIMIT = 100_000  # the most tasks that a promotion takes


def estimate(scale: Scale) -> float:
    return 2 + scale.repetitions * len(SHARDS) * min(scale.tasks, LIMIT) * 60e-6


def run(session: Session) -> None:
    tasks = min(session.scale.tasks, LIMIT)
    with ExitStack() as stack, session.connect() as conn:
        others = [stack.enter_context(session.connect()) for _ in range(SESSIONS)]
        for _ in session.repetitions():
            for shards in SHARDS:
                session.say(f"{shards} shards")
                clear(conn)
                conn.execute(
                    "select fairq.configure_cluster(jsonb_build_object('shard_count', %s::int))", (shards,)
                )
                while scalar(conn, "select fairq.move_groups() ->> 'state' <> 'done'"):
                    pass
                for start in range(0, tasks, 10_000):
                    number = min(10_000, tasks - start)
                    conn.execute(
                        FAIRQ.create.encode(), {"groups": GROUPS, "tasks": number, "payload": PAYLOAD}
                    )
                pids = [other.info.backend_pid for other in others]
                busy = cpu(pids)
                with ThreadPoolExecutor(SESSIONS) as pool:
                    begun = time.perf_counter()
                    list(pool.map(promote, others, range(SESSIONS), [shards] * SESSIONS))
                    seconds = time.perf_counter() - begun
                if (ready := scalar(conn, "select count(*) from fairq.ready")) != tasks:
                    raise RuntimeError(f"{ready} of {tasks} tasks were promoted")
                used = (cpu(pids) - busy) / tasks * 1e6
                subject = f"{shards} shards" if shards > 1 else "1 shard"
                session.record(subject, "promotion", tasks / seconds, "tasks/s", sessions=SESSIONS)
                session.record(subject, "processor time of promotion", used, "µs/task", sessions=SESSIONS)


def promote(conn: Conn, number: int, shards: int) -> None:
    """Promote one session's half of the shards until all their tasks are ready."""
    for shard in range(number, shards, SESSIONS):
        while scalar(conn, f"select fairq.promote_overflow('default', {LIMIT}, {shard})"):
            pass
