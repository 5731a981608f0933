"""What the planner chose, and its cost in rows and buffers, never in time."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import psycopg
import pytest
from psycopg import sql

Node = dict[str, Any]


@dataclass(frozen=True)
class Statement:
    """A statement that ran, perhaps inside a function, with its plan."""

    query: str
    plan: Node


@dataclass
class Recording:
    """The statements that ended inside `recorded_plans`, in that order (so inner ones come first)."""

    statements: list[Statement] = field(default_factory=list)

    def of(self, text: str) -> list[Statement]:
        """Those whose text contains `text`."""
        return [statement for statement in self.statements if text in statement.query]


def explain(
    conn: psycopg.Connection[Any],
    query: str,
    params: Sequence[Any] | None = None,
    *,
    analyze: bool = True,
) -> Node:
    """The plan of a statement, which really runs (roll back what it writes) unless `analyze` is false."""
    options = "analyze, buffers, timing off, " if analyze else ""
    text = f"explain ({options}format json) {query}"
    row = conn.execute(text, params).fetchone()
    assert row is not None
    return cast(Node, row[0][0]["Plan"])


def explain_generic(
    conn: psycopg.Connection[Any], query: str, params: Sequence[Any], *, types: Sequence[str] = ()
) -> Node:
    """The generic plan of a prepared statement. `query` has `$1`, `$2` …"""
    name = sql.Identifier("explained")
    types_text = sql.SQL("({})").format(sql.SQL(", ").join([sql.SQL(each) for each in types]))
    body = sql.SQL(query)
    with conn.transaction():
        conn.execute("set local plan_cache_mode = force_generic_plan")
        conn.execute(sql.SQL("prepare {}{} as {}").format(name, types_text if types else sql.SQL(""), body))
        try:
            arguments = sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, params)))
            row = conn.execute(
                sql.SQL("explain (analyze, buffers, timing off, format json) execute {}{}").format(
                    name, arguments if params else sql.SQL("")
                )
            ).fetchone()
        finally:
            conn.execute(sql.SQL("deallocate {}").format(name))
    assert row is not None
    return cast(Node, row[0][0]["Plan"])


def nodes(plan: Node) -> Iterator[Node]:
    """Every node of the plan, outermost first."""
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def node_types(plan: Node) -> list[str]:
    return [node["Node Type"] for node in nodes(plan)]


def index_names(plan: Node) -> set[str]:
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


def relation_names(plan: Node, node_type: str = "") -> set[str]:
    """The tables that the plan reads or writes, by default with nodes of any type."""
    return {
        node["Relation Name"]
        for node in nodes(plan)
        if "Relation Name" in node and node_type in ("", node["Node Type"])
    }


def shared_buffers(plan: Node) -> int:
    """The touched pages of tables and indexes, in memory or not. The outermost node includes all below it."""
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


def rows_visited(plan: Node, relation: str | None = None) -> int:
    """Rows that scans produced or threw away, over all loops; only scans of `relation` when one is given.

    PostgreSQL shows averages per loop, so a small rounding error remains where a scan runs often.
    """
    total = 0.0
    for node in nodes(plan):
        if "Scan" not in node["Node Type"] or "Plans" in node:
            continue
        if relation is not None and node.get("Relation Name") != relation:
            continue
        per_loop = node["Actual Rows"]
        per_loop += node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        total += per_loop * node["Actual Loops"]
    return round(total)


def require_auto_explain(conn: psycopg.Connection[Any]) -> None:
    """Skip the test where there is no auto_explain: the wheel lacks it, npm's and Debian's have it, for
    superusers.
    """
    try:
        with conn.transaction():
            conn.execute("load 'auto_explain'")
    except (psycopg.errors.UndefinedFile, psycopg.errors.InsufficientPrivilege):
        pytest.skip(
            "this PostgreSQL has no auto_explain, which shows plans inside functions; see make test-matrix"
        )


@contextmanager
def recorded_plans(conn: psycopg.Connection[Any]) -> Iterator[Recording]:
    """Record the plan of every statement that `conn` runs inside the block, also inside functions."""
    require_auto_explain(conn)
    recording = Recording()

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        if statement := parse_auto_explain(diagnostic.message_primary or ""):
            recording.statements.append(statement)

    settings = {
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_nested_statements": "on",
        "auto_explain.log_analyze": "on",
        "auto_explain.log_buffers": "on",
        "auto_explain.log_timing": "off",
        "auto_explain.log_format": "json",
        "client_min_messages": "log",
    }
    before = {name: _setting(conn, name) for name in settings}
    for name, value in settings.items():
        _set(conn, name, value)
    conn.add_notice_handler(note)
    try:
        yield recording
    finally:
        conn.remove_notice_handler(note)
        if conn.info.transaction_status != psycopg.pq.TransactionStatus.INERROR:
            for name, value in before.items():
                _set(conn, name, value)


def parse_auto_explain(message: str) -> Statement | None:
    """Read "duration: … ms  plan: {json}"; None for other messages."""
    found = re.match(r"duration: [0-9.]+ ms\s+plan:\s*(\{.*)", message, re.DOTALL)
    if not found:
        return None
    parsed = json.loads(found[1])
    return Statement(parsed.get("Query Text", ""), parsed["Plan"])


def _setting(conn: psycopg.Connection[Any], name: str) -> str:
    row = conn.execute("select current_setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])


def _set(conn: psycopg.Connection[Any], name: str, value: str) -> None:
    conn.execute("select set_config(%s, %s, false)", [name, value])
