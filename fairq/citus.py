"""fairq on Citus: what `fairq migrate` does besides installing the engine on each node. See sql/citus.sql."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from fairq.errors import FairqError
from fairq.queries import install as queries


class ClusterNotReady(FairqError, exit_code=4):
    """fairq cannot be installed on this Citus cluster as it is set up."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster. ``group`` is Citus's number for it; the coordinator has 0."""

    group: int
    host: str
    port: int

    def dsn(self, coordinator: str) -> str:
        """The connection string of the same database, with the same user and options, on this node."""
        return psycopg.conninfo.make_conninfo(coordinator, host=self.host, port=self.port, hostaddr=None)


def nodes(conn: psycopg.Connection[Any], folder: Path) -> list[Node]:
    """The nodes of this coordinator's cluster, itself first; empty without Citus. ``folder`` is sql/.

    Raises :class:`ClusterNotReady` if something is missing, with a hint.
    """
    if not queries.has_citus(conn):
        return []
    try:
        conn.execute((folder / "citus_ready.sql").read_bytes())
    except psycopg.errors.ObjectNotInPrerequisiteState as exc:
        raise ClusterNotReady(exc.diag.message_primary or str(exc), exc.diag.message_hint) from exc
    cursor = conn.cursor(row_factory=tuple_row)
    cursor.execute(
        "select groupid, nodename, nodeport from pg_dist_node where noderole = 'primary' order by groupid"
    )
    return [Node(*row) for row in cursor]


async def around(conn: psycopg.AsyncConnection[Any]) -> tuple[int, list[Node]]:
    """This node's group, and all nodes, whether they answer or not; no nodes if fairq is on one machine."""
    cursor = conn.cursor(row_factory=tuple_row)
    await cursor.execute(
        """
        select exists (
          select from pg_proc p join pg_namespace n on n.oid = p.pronamespace
          where n.nspname = 'fairq_citus' and p.proname = 'create_task')
        """
    )
    if await cursor.fetchone() != (True,):
        return 0, []
    await cursor.execute(
        """
        select l.groupid, d.groupid, d.nodename, d.nodeport
        from pg_dist_local_group l, pg_dist_node d
        where d.noderole = 'primary' and d.isactive order by d.groupid
        """
    )
    rows = await cursor.fetchall()
    return rows[0][0] if rows else 0, [Node(*row[1:]) for row in rows]


def stay_local(conn: psycopg.Connection[Any]) -> None:
    """Keep what this session creates on this node: each node gets the engine as a single machine does."""
    conn.execute("set citus.enable_ddl_propagation = off")


def join(
    coordinator: psycopg.Connection[Any], others: Mapping[Node, psycopg.Connection[Any]], folder: Path
) -> None:
    """Let calls go from any node to any other. ``folder`` is sql/.

    Each step checks whether it has been done, so you can repeat a call that was cut off.
    """
    text = (folder / "citus.sql").read_text("utf-8")
    coordinator.execute(text.encode())
    [(settings,)] = coordinator.execute("select fairq_citus.settings()::text").fetchall()
    for node, conn in others.items():
        conn.execute(text.encode())
        [(fits,)] = conn.execute("select fairq_citus.become(%s, %s)", [node.group, settings]).fetchall()
        if not fits:
            raise ClusterNotReady(
                f"{node.host}:{node.port} has tasks of its own, from before it was a node of this cluster",
                "Make that machine the coordinator, or let it run empty first.",
            )
    # One by one: Citus passes each text on to the other nodes as it is.
    for statement in (folder / "citus_calls.sql").read_text("utf-8").split(";\n"):
        coordinator.execute(statement.encode())
    _replicate(coordinator)
    for conn in (*others.values(), coordinator):
        conn.execute("select fairq_citus.enter()")


def _replicate(coordinator: psycopg.Connection[Any]) -> None:
    """Copy the reference tables to new nodes."""
    lacking = coordinator.execute(
        """
        select from pg_dist_node n
        where n.noderole = 'primary' and not exists (
          select from pg_dist_placement p join pg_dist_shard h using (shardid)
          where h.logicalrelid = 'fairq_citus.settings_calls'::regclass and p.groupid = n.groupid)
        """
    )
    if lacking.rowcount == 0:
        return
    call = "select replicate_reference_tables('block_writes')"
    try:
        coordinator.execute(call)
    except psycopg.errors.InsufficientPrivilege as exc:
        raise ClusterNotReady(
            "a new node has no copy of the reference tables, and only a superuser may make it",
            f"As a superuser, on the coordinator: {call}; and then fairq migrate again.",
        ) from exc
