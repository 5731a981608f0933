"""The two queues of the demo, behind the same calls: enqueue, turn, history."""

from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import psycopg

QUEUE = "demo"
KIND = "fairq.demo"

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Held:
    """A task that a slot works on."""

    id: int
    attempt: int
    tenant: str
    waited: float  # seconds from enqueue to start, by the database's clock


@dataclass(frozen=True)
class Record:
    """A task of the history: seconds since the first of its engine was enqueued."""

    tenant: str
    created: float
    started: float

    @property
    def waited(self) -> float:
        return self.started - self.created


class Engine(Protocol):
    """A queue. Every call is one transaction; `turn` ends the tasks in `done`, and takes up to `free`."""

    name: str

    def enqueue(self, conn: Connection, tenant: str, count: int) -> None: ...
    def turn(self, conn: Connection, done: list[Held], free: int) -> list[Held]: ...
    def history(self, conn: Connection) -> list[Record]: ...


def _payloads(count: int) -> list[str]:
    return [f'{{"page": {number}}}' for number in range(count)]


class Fifo:
    """First come, first served, whoever comes."""

    name = "FIFO"

    _ENQUEUE = """
        insert into fairq_demo_fifo.tasks (group_key, payload)
        select %s, p from unnest(%s::text[]::jsonb[]) p
    """
    _FINISH = """
        with ended as (
          delete from fairq_demo_fifo.tasks t where t.id = any(%s::bigint[]) and t.state = 'running'
          returning t.id, t.created_at, t.started_at, t.group_key, t.payload
        )
        insert into fairq_demo_fifo.finished_tasks (id, created_at, started_at, group_key, payload)
        select e.id, e.created_at, e.started_at, e.group_key, e.payload from ended e
    """
    _POP = """
        with next as materialized (
          select t.id from fairq_demo_fifo.tasks t
          where t.state = 'waiting' order by t.id limit %s for update skip locked
        ),
        popped as (
          update fairq_demo_fifo.tasks t
          set state = 'running', started_at = clock_timestamp()
          where t.id = any(array(select n.id from next n)) and t.state = 'waiting'
          returning t.id, t.group_key, t.created_at, t.started_at
        )
        select p.id, 1, p.group_key, extract(epoch from p.started_at - p.created_at)::float8
        from popped p order by p.id
    """
    _HISTORY = """
        select f.group_key, extract(epoch from f.created_at - min(f.created_at) over ())::float8,
          extract(epoch from f.started_at - min(f.created_at) over ())::float8
        from fairq_demo_fifo.finished_tasks f order by f.started_at, f.id
    """

    def enqueue(self, conn: Connection, tenant: str, count: int) -> None:
        conn.execute(self._ENQUEUE, (tenant, _payloads(count)))

    def turn(self, conn: Connection, done: list[Held], free: int) -> list[Held]:
        with conn.pipeline(), conn.transaction():
            if done:
                conn.execute(self._FINISH, ([task.id for task in done],))
            popped = conn.execute(self._POP, (free,))
        return [Held(*row) for row in popped]

    def history(self, conn: Connection) -> list[Record]:
        return [Record(*row) for row in conn.execute(self._HISTORY)]


class Fair:
    """fairq, by its public functions."""

    name = "fairq"

    _ENQUEUE = """
        select count(*) from fairq.create_tasks(array_fill(%s::text, array[%s::int]), %s::text[]::jsonb[],
          p_queue => %s, p_kind => %s)
    """
    _FINISH = "select f from fairq.finish_tasks(%s, %s::bigint[], %s::int[]) f"
    _POP = """
        select t.id, t.attempt, t.group_key, extract(epoch from t.started_at - t.created_at)::float8
        from fairq.pop_tasks(%s, %s, %s) t
    """
    _HISTORY = """
        select f.group_key, extract(epoch from f.created_at - min(f.created_at) over ())::float8,
          extract(epoch from f.started_at - min(f.created_at) over ())::float8
        from fairq.finished_tasks f where f.queue = %s and f.kind = %s order by f.started_at, f.id
    """

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id

    def enqueue(self, conn: Connection, tenant: str, count: int) -> None:
        conn.execute(self._ENQUEUE, (tenant, count, _payloads(count), QUEUE, KIND))

    def turn(self, conn: Connection, done: list[Held], free: int) -> list[Held]:
        with conn.pipeline(), conn.transaction():
            if done:
                ids, attempts = [task.id for task in done], [task.attempt for task in done]
                conn.execute(self._FINISH, (self._worker_id, ids, attempts))
            popped = conn.execute(self._POP, (QUEUE, free, self._worker_id))
        return [Held(*row) for row in popped]

    def history(self, conn: Connection) -> list[Record]:
        return [Record(*row) for row in conn.execute(self._HISTORY, (QUEUE, KIND))]


def set_up(conn: Connection, slots: int) -> tuple[Fifo, Fair]:
    """Both queues, in a new database where fairq is installed."""
    with conn.transaction():
        conn.execute(resources.files("fairq.demo").joinpath("fifo.sql").read_bytes())
        conn.execute("""select fairq.configure_queue(%s, '{"notify": false}')""", (QUEUE,))
        row = conn.execute(
            "select fairq.register_worker('fairq demo', %s::text[], %s)", ([QUEUE], slots)
        ).fetchone()
    assert row is not None
    return Fifo(), Fair(row[0])
