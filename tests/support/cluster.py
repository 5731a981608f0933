"""A coordinator of Citus and its workers, on this machine. `make test-citus` has the programs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairq import embedded, install

Conn = psycopg.Connection[Any]
NAME = "fairq"
CITUS: dict[str, embedded.Setting] = {
    "max_connections": 200,
    "max_prepared_transactions": 50,
    "deadlock_timeout": "100ms",
    "shared_preload_libraries": "citus",
    "wal_level": "logical",
    # Tests look into private functions, which leave it on.
    "jit": False,
    "citus.enable_statistics_collection": False,
    "citus.shard_count": 8,
}


def say_where(server: embedded.Server) -> None:
    """Where Citus finds the node itself: it does not listen on localhost."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        setting = sql.SQL("alter system set citus.local_hostname = {}")
        conn.execute(setting.format(sql.Literal(str(server.socket_dir))))
        conn.execute("select pg_reload_conf()")


def alone(dsn: str) -> None:
    """Make a database that has fairq a cluster of one node: its calls take the same way, to itself."""
    place = conninfo_to_dict(dsn)
    host, port = str(place["host"]), int(str(place["port"]))
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create extension citus")
        conn.execute("select citus_set_coordinator_host(%s, %s)", [host, port])
        conn.execute("select citus_set_node_property(%s, %s, 'shouldhaveshards', true)", [host, port])
    install.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        # The daemon of Citus: nobody can copy a database that somebody is connected to.
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )


@dataclass
class Cluster:
    """Node 0 is the coordinator. Connections made here are closed with it."""

    stack: contextlib.ExitStack
    servers: list[embedded.Server] = field(default_factory=list)

    def start(self, count: int = 1) -> None:
        """More servers, each with an empty database that has the extension."""
        for _ in range(count):
            server = self.stack.enter_context(embedded.start(settings=CITUS))
            say_where(server)
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute(f"create database {NAME}".encode())
            with psycopg.connect(server.dsn(NAME), autocommit=True) as conn:
                conn.execute("create extension citus")
            self.servers.append(server)

    def add(self, *numbers: int) -> None:
        """Make them nodes."""
        with self.connect(0) as conn:
            conn.execute("select citus_set_coordinator_host(%s, %s)", self.place(0))
            for number in numbers:
                conn.execute("select citus_add_node(%s, %s)", self.place(number))

    def place(self, number: int) -> tuple[str, int]:
        """Host and port; the host is the folder of its socket."""
        return str(self.servers[number].socket_dir), embedded.SOCKET_PORT

    def dsn(self, number: int, **changes: Any) -> str:
        return make_conninfo(self.servers[number].dsn(NAME), **changes)

    def connect(self, number: int, **changes: Any) -> Conn:
        return self.stack.enter_context(psycopg.connect(self.dsn(number, **changes), autocommit=True))

    def migrate(self) -> install.Migration:
        return install.migrate(self.dsn(0))

    def everywhere(self, statement: str) -> None:
        """On each node for itself."""
        for number in range(len(self.servers)):
            with psycopg.connect(self.dsn(number), autocommit=True) as conn:
                conn.execute("set citus.enable_ddl_propagation = off")
                conn.execute(statement.encode())


@contextlib.contextmanager
def running_cluster(workers: int = 2) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.start(1 + workers)
        cluster.add(*range(1, 1 + workers))
        cluster.migrate()
        yield cluster
