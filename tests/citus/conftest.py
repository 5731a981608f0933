"""A coordinator, two workers, an engine on each; `make test-citus` has the programs."""

from collections.abc import Iterator

import pytest

from tests.support.calls import run
from tests.support.cluster import NODES, Cluster, Conn, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        with cluster.connect(0) as conn:
            conn.execute("create table orders (tenant text, n integer, constraint positive check (n > 0))")
            conn.execute("select create_distributed_table('orders', 'tenant')")
            conn.execute("create table notes (n integer)")
            conn.execute("select citus_add_local_table_to_metadata('notes')")
        yield cluster


TABLES = ("tasks", "rings", "ready", "held", "lanes", "ticks", "groups", "finished_tasks", "workers")


@pytest.fixture
def conns(cluster: Cluster) -> Iterator[list[Conn]]:
    """A connection to each node, and no task anywhere."""
    conns = [cluster.connect(number) for number in NODES]
    yield conns
    for conn in conns:
        conn.rollback()
        for table in TABLES:
            run(conn, f"delete from fairq.{table}")  # noqa: S608
        conn.close()
