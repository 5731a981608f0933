"""Queues that the same tasks go through, and one small worker for all of them.

A task's payload says how long it sleeps. What waited how long is read from each queue's own history, by the
database's clock; a task that still waits at the end counts with its age.
"""

import asyncio
import contextlib
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import psycopg

BATCH = 1_000
IDLE_SECONDS = 0.002

# Forks from a process that has loaded everything: a fresh start would cost more than some measurements.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])

Conn = psycopg.Connection[Any]


@dataclass(frozen=True)
class Engine:
    """One queue, as statements. `create` makes %(count)s tasks of one group."""

    name: str
    create: str
    pop: str  # limit, worker -> id, attempt, payload
    finish: str  # worker, ids, attempts
    history: str  # -> group, created, started, finished (epoch seconds; null where not yet), milliseconds
    left: str  # how many are waiting or running


FIFO = Engine(
    "fifo",
    "insert into bench_fifo.tasks (group_key, payload)"
    " select %(group)s, %(payload)s::jsonb from generate_series(1, %(count)s::int)",
    "select id, attempt, payload from bench_fifo.pop_tasks('default', %s, %s)",
    "select f from bench_fifo.finish_tasks(%s, %s::bigint[], %s::integer[]) f",
    """
select group_key, extract(epoch from created_at)::float8, extract(epoch from started_at)::float8,
  extract(epoch from finished_at)::float8, (payload ->> 'ms')::float8
from bench_fifo.finished_tasks
union all
select group_key, extract(epoch from created_at)::float8, extract(epoch from started_at)::float8, null,
  (payload ->> 'ms')::float8
from bench_fifo.tasks""",
    "select count(*) from bench_fifo.tasks where group_key like %s",
)

ARTICLE = Engine(
    "article",
    "select count(bench_article.create_task(%(group)s, %(payload)s::jsonb))"
    " from generate_series(1, %(count)s::int)",
    "select id, 1, payload from bench_article.pop_tasks(%s) where %s > 0",
    "select f from bench_article.finish_tasks(%s, %s::bigint[], %s::integer[]) f",
    """
select g.group_key, extract(epoch from t.created_at)::float8, extract(epoch from t.started_at)::float8,
  extract(epoch from t.finished_at)::float8, (t.payload ->> 'ms')::float8
from (
  select group_no, created_at, started_at, finished_at, payload from bench_article.finished_tasks
  union all
  select group_no, created_at, started_at, null, payload from bench_article.tasks
) t
join bench_article.groups g on g.group_no = t.group_no""",
    "select count(*) from bench_article.tasks t join bench_article.groups g on g.group_no = t.group_no"
    " where g.group_key like %s",
)

FAIRQ = Engine(
    "fairq",
    "select count(*) from fairq.create_tasks(array_fill(%(group)s::text, array[%(count)s::int]),"
    " array_fill(%(payload)s::jsonb, array[%(count)s::int]), p_kind => %(kind)s)",
    "select id, attempt, payload from fairq.pop_tasks('default', %s, %s)",
    "select f from fairq.finish_tasks(%s, %s::bigint[], %s::integer[]) f",
    """
select group_key, extract(epoch from created_at)::float8, extract(epoch from started_at)::float8,
  extract(epoch from finished_at)::float8, (payload ->> 'ms')::float8
from fairq.finished_tasks
union all
select t.group_key, extract(epoch from t.created_at)::float8, extract(epoch from h.started_at)::float8, null,
  (t.payload ->> 'ms')::float8
from fairq.tasks t
left join fairq.held h on h.shard_no = t.shard_no and h.id = t.id""",
    "select count(*) from fairq.tasks where group_key like %s",
)

ENGINES = {engine.name: engine for engine in (FIFO, ARTICLE, FAIRQ)}


@dataclass(frozen=True)
class Record:
    """The times of one task; `started` and `finished` are None while it waits or runs."""

    group: str
    created: float
    started: float | None
    finished: float | None
    milliseconds: float = 0.0

    def waited(self, end: float) -> float:
        return (end if self.started is None else self.started) - self.created


def create(
    conn: Conn, engine: Engine, group: str, count: int, milliseconds: float, kind: str = "nap"
) -> None:
    """Create tasks in committed batches of at most a thousand, to avoid a long transaction."""
    payload = json.dumps({"ms": milliseconds})
    for start in range(0, count, BATCH):
        number = min(BATCH, count - start)
        named = {"group": group, "payload": payload, "count": number, "kind": kind}
        conn.execute(engine.create.encode(), named)


def records(conn: Conn, engine: Engine) -> list[Record]:
    return [Record(*row) for row in conn.execute(engine.history.encode()).fetchall()]


def left(conn: Conn, engine: Engine, groups: str) -> int:
    """How many tasks of the matching groups are not finished."""
    row = conn.execute(engine.left.encode(), (groups,)).fetchone()
    assert row is not None
    return int(row[0])


def now(conn: Conn) -> float:
    row = conn.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0])


# --- The worker ------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(dsn: str, engine: Engine, slots: int) -> Iterator[None]:
    """The small worker, in a process of its own, while the block runs."""
    ready, stop = PROCESSES.Event(), PROCESSES.Event()
    process = PROCESSES.Process(target=_serve, args=(dsn, engine.name, slots, ready, stop), daemon=True)
    process.start()
    try:
        while not ready.wait(0.1):
            if process.exitcode is not None:
                raise RuntimeError("the worker did not start")
        yield
    finally:
        stop.set()
        process.join(60)
    if process.exitcode != 0:
        raise RuntimeError(f"the worker ended with {process.exitcode}")


def _serve(dsn: str, name: str, slots: int, ready: Event, stop: Event) -> None:
    asyncio.run(_turns(dsn, ENGINES[name], slots, ready, stop))


async def _turns(dsn: str, engine: Engine, slots: int, ready: Event, stop: Event) -> None:
    """Take as many tasks as there are free slots, and finish what ended in the same transaction."""
    ended: list[tuple[int, int]] = []
    napping: set[asyncio.Task[None]] = set()
    news = asyncio.Event()

    async def nap(task_id: int, attempt: int, milliseconds: float) -> None:
        await asyncio.sleep(milliseconds / 1000)
        ended.append((task_id, attempt))
        news.set()

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        worker_id = await _register(conn, engine, slots)
        ready.set()
        while not stop.is_set():
            news.clear()
            done, ended = ended, []
            async with conn.pipeline():
                if done:
                    ids, attempts = map(list, zip(*done, strict=True))
                    await conn.execute(engine.finish.encode(), (worker_id, ids, attempts))
                free = slots - len(napping)
                popped = await conn.execute(engine.pop.encode(), (free, worker_id)) if free else None
            rows = await popped.fetchall() if popped else []
            for task_id, attempt, payload in rows:
                task = asyncio.create_task(nap(task_id, attempt, payload["ms"]))
                napping.add(task)
                task.add_done_callback(napping.discard)
            if rows and len(napping) < slots:
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), IDLE_SECONDS)
        await asyncio.gather(*napping)


async def _register(conn: psycopg.AsyncConnection[Any], engine: Engine, slots: int) -> int:
    if engine is not FAIRQ:
        return 1
    found = await conn.execute("select fairq.register_worker('bench', '{default}', %s, '1 hour')", (slots,))
    row = await found.fetchone()
    assert row is not None
    return int(row[0])
