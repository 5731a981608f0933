"""The two queues of the demo: the same calls in two schemas."""

from dataclasses import dataclass
from importlib import resources
from typing import Any, LiteralString

import psycopg
from psycopg import sql

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
    """A queue: a schema with the functions of fairq. Every call is one transaction."""

    name: str
    schema: str
    worker_id: int = 0

    def enqueue(self, conn: Connection, tenant: str, count: int) -> None:
        payloads = [f'{{"page": {number}}}' for number in range(count)]
        create = "select count(*) from {}.create_tasks(%s::text[], %s::text[]::jsonb[], p_queue => 'demo')"
        conn.execute(self._sql(create), [[tenant] * count, payloads])

    def turn(self, conn: Connection, done: list[Held], free: int) -> list[Held]:
        """End the tasks in `done`, and take up to `free`."""
        finish = self._sql("select count(*) from {}.finish_tasks(%s, %s::bigint[], %s::int[])")
        pop = self._sql(
            """
            select t.id, t.attempt, t.group_key, extract(epoch from t.started_at - t.created_at)::float8
            from {}.pop_tasks('demo', %s, %s) t
            """
        )
        with conn.pipeline(), conn.transaction():
            if done:
                attempts = [task.attempt for task in done]
                conn.execute(finish, [self.worker_id, [task.id for task in done], attempts])
            popped = conn.execute(pop, [free, self.worker_id])
        return [Held(*row) for row in popped]

    def history(self, conn: Connection) -> list[Record]:
        query = self._sql(
            """
            select f.group_key, extract(epoch from f.created_at - min(f.created_at) over ())::float8,
              extract(epoch from f.started_at - min(f.created_at) over ())::float8
            from {}.finished_tasks f order by f.started_at, f.id
            """
        )
        return [Record(*row) for row in conn.execute(query)]

    def _sql(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(sql.Identifier(self.schema))


def set_up(conn: Connection, slots: int) -> tuple[Engine, Engine]:
    """Both queues, in a new database where fairq is installed."""
    with conn.transaction():
        conn.execute(resources.files("fairq.demo").joinpath("fifo.sql").read_bytes())
        conn.execute("""select fairq.configure_queue('demo', '{"notify": false}')""")
        registered = "select fairq.register_worker('fairq demo', array['demo'], %s)"
        ((worker_id,),) = conn.execute(registered, [slots])
    return Engine("FIFO", "fairq_demo_fifo"), Engine("fairq", "fairq", worker_id)
