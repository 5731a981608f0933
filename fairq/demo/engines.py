"""The two queues of the demo: their own statements behind the same calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, LiteralString

import psycopg

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Held:
    """A task in a slot."""

    id: int
    attempt: int
    tenant: str
    waited: float  # seconds from enqueue to start, by the database's clock


@dataclass(frozen=True)
class Record:
    """A task of the history. Times are seconds since its engine's first task was enqueued."""

    tenant: str
    created: float
    started: float

    @property
    def waited(self) -> float:
        return self.started - self.created


@dataclass(frozen=True)
class Engine:
    """A queue: its statements, and their other parameters. Every call is one transaction."""

    name: str
    creates: LiteralString
    finishes: LiteralString
    pops: LiteralString
    finished: LiteralString
    known: Mapping[str, Any] = field(default_factory=dict)

    def enqueue(self, conn: Connection, tenant: str, count: int) -> None:
        payloads = [f'{{"page": {number}}}' for number in range(count)]
        conn.execute(self.creates, {**self.known, "tenant": tenant, "payloads": payloads})

    def turn(self, conn: Connection, done: list[Held], free: int) -> list[Held]:
        """End the tasks in `done`, and take up to `free`."""
        ended = {"ids": [task.id for task in done], "attempts": [task.attempt for task in done]}
        with conn.pipeline(), conn.transaction():
            if done:
                conn.execute(self.finishes, {**self.known, **ended})
            popped = conn.execute(self.pops, {**self.known, "free": free})
        return [Held(*row) for row in popped]

    def history(self, conn: Connection) -> list[Record]:
        query = f"""
            select f.group_key, extract(epoch from f.created_at - min(f.created_at) over ())::float8,
              extract(epoch from f.started_at - min(f.created_at) over ())::float8
            from {self.finished} f order by f.started_at, f.id
        """  # noqa: S608  # a table of ours
        return [Record(*row) for row in conn.execute(query)]


FIFO = Engine(
    "FIFO",
    creates="""
        insert into fairq_demo_fifo.tasks (group_key, payload)
        select %(tenant)s, p from unnest(%(payloads)s::text[]::jsonb[]) p
    """,
    finishes="""
        with ended as (
          delete from fairq_demo_fifo.tasks t where t.id = any(%(ids)s::bigint[]) and t.state = 'running'
          returning t.id, t.created_at, t.started_at, t.group_key, t.payload
        )
        insert into fairq_demo_fifo.finished_tasks (id, created_at, started_at, group_key, payload)
        select e.id, e.created_at, e.started_at, e.group_key, e.payload from ended e
    """,
    pops="""
        with next as materialized (
          select t.id from fairq_demo_fifo.tasks t
          where t.state = 'waiting' order by t.id limit %(free)s for update skip locked
        ),
        popped as (
          update fairq_demo_fifo.tasks t
          set state = 'running', started_at = clock_timestamp()
          where t.id = any(array(select n.id from next n)) and t.state = 'waiting'
          returning t.id, t.group_key, t.created_at, t.started_at
        )
        select p.id, 1, p.group_key, extract(epoch from p.started_at - p.created_at)::float8
        from popped p order by p.id
    """,
    finished="fairq_demo_fifo.finished_tasks",
)


def fair(worker_id: int) -> Engine:
    """fairq, through its public functions."""
    return Engine(
        "fairq",
        creates="""
            select count(*) from fairq.create_tasks(
              array_fill(%(tenant)s::text, array[cardinality(%(payloads)s::text[])]),
              %(payloads)s::text[]::jsonb[], p_queue => 'demo')
        """,
        finishes="select f from fairq.finish_tasks(%(worker)s, %(ids)s::bigint[], %(attempts)s::int[]) f",
        pops="""
            select t.id, t.attempt, t.group_key, extract(epoch from t.started_at - t.created_at)::float8
            from fairq.pop_tasks('demo', %(free)s, %(worker)s) t
        """,
        finished="fairq.finished_tasks",
        known={"worker": worker_id},
    )


def set_up(conn: Connection, slots: int) -> tuple[Engine, Engine]:
    """Both queues, in a new database where fairq is installed."""
    with conn.transaction():
        conn.execute(resources.files("fairq.demo").joinpath("fifo.sql").read_bytes())
        conn.execute("""select fairq.configure_queue('demo', '{"notify": false}')""")
        registered = "select fairq.register_worker('fairq demo', array['demo'], %s)"
        ((worker_id,),) = conn.execute(registered, [slots])
    return FIFO, fair(worker_id)
