"""sqlc with our plugin and `fairq gen` make the same model and files from the same queries."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from fairq.codegen import catalog, command, config, generate, plugin, protocol, remarks
from fairq.codegen.model import Catalog, Query, Request, Untypable
from fairq.codegen.psycopg_types import python_type
from tests.codegen.plugin import sqlc
from tests.support.server import TestServer

ROOT = Path(__file__).parents[3]
SAMPLES = Path(__file__).parent / "agreement"
OWN = ROOT / "sql"
PROJECTS = [OWN, *sorted(path.parent for path in SAMPLES.glob("*/sqlc.yaml"))]

# Queries of fairq that sqlc reads wrongly; `fairq gen` reads them. A test below keeps the list short.
_MINIMUM = "sqlc types min() and max() inside a view as anyarray"
SQLC_CANNOT_READ = {
    "QueueStats": _MINIMUM,
    "GroupStats": _MINIMUM,
    "WorkerStats": _MINIMUM,
    "GroupsNow": "sqlc numbers the parameters of a with query in another order",
}

pytestmark = pytest.mark.skipif(bool(sqlc.why_sqlc_cannot_run()), reason=sqlc.why_sqlc_cannot_run())


def without(project: Path, work: Path, left_out: Collection[str]) -> Path:
    """A copy of a project without some of its queries."""
    shutil.copytree(project, work)
    for file in work.rglob("*.sql"):
        _, *queries = re.split(r"(?m)^(?=-- name: )", file.read_text())
        if queries:
            # sqlc takes a comment at the head of a file for one of its first query.
            file.write_text("".join(query for query in queries if query.split()[2] not in left_out))
    return work


@pytest.fixture(params=PROJECTS, ids=lambda path: path.name)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return without(request.param, tmp_path / "project", SQLC_CANNOT_READ)


def by_sqlc(project: Path, work: Path, server: TestServer) -> Request:
    """The plugin's model of sqlc's request. sqlc also uses a database."""
    (entry,) = config.read(project / "sqlc.yaml")
    with command.scratch_database(server.dsn("postgres")) as conn:
        catalog.load(conn, entry.schema)
        parts = conn.info.get_parameters()
        address = f"postgresql://{parts['user']}@localhost:{conn.info.port}/{conn.info.dbname}?host={conn.info.host}"
        file = project / "sqlc.yaml"
        lines = file.read_text().splitlines()
        place = next(
            number
            for number, line in enumerate(lines)
            if line.strip().startswith("engine:") or "- engine:" in line
        )
        lines.insert(place + 1, f"    database: {{uri: '{address}'}}")
        with_database = work.with_name("with_database")
        shutil.copytree(project, with_database, dirs_exist_ok=True)
        (with_database / "sqlc.yaml").write_text("\n".join(lines))
        return plugin.to_model(protocol.read_request(sqlc.capture(with_database, work)))


def by_postgresql(project: Path, server: TestServer) -> Request:
    (entry,) = config.read(project / "sqlc.yaml")
    with command.scratch_database(server.dsn("postgres")) as conn:
        catalog.load(conn, entry.schema)
        found, queries = command.read_database(conn, entry.queries, entry.promised)
    return command.request(found, queries, entry.targets[0].options)


def meaning(query: Query, found: Catalog) -> dict[str, Any]:
    """All that a template can see of a query."""
    query = remarks.apply(query)
    return {
        "name": query.name,
        "cmd": query.cmd,
        "text": query.text,
        "comments": query.comments,
        "source": query.source,
        "params": [
            (
                param.number,
                param.column.name,
                python_type(param.column, found).annotation,
                param.column.not_null,
            )
            for param in query.params
        ],
        "columns": []
        if query.cmd == ":exec"
        else [
            (column.name, python_type(column, found).annotation, column.not_null) for column in query.columns
        ],
        "one row": query.one_row,
        "copies into": query.insert_into if query.cmd == ":copyfrom" else None,
    }


def test_both_front_ends_read_the_same_model(
    project: Path, request: pytest.FixtureRequest, server: TestServer, tmp_path: Path
) -> None:
    theirs, ours = by_sqlc(project, tmp_path / "work", server), by_postgresql(project, server)
    assert [query.name for query in theirs.queries] == [query.name for query in ours.queries]
    assert ours.queries
    for left, right in zip(theirs.queries, ours.queries, strict=True):
        if request.node.callspec.id == OWN.name:
            left = with_nulls_of(right, left)
        assert not differ_in_null(left, right), "say which it is, in the query file"
        assert meaning(left, theirs.catalog) == meaning(right, ours.catalog)


def with_nulls_of(said: Query, query: Query) -> Query:
    """fairq's own queries have no remarks for sqlc, because only `fairq gen` writes their calls."""
    columns = [
        dataclasses.replace(column, not_null=other.not_null)
        for column, other in zip(query.columns, said.columns, strict=False)
    ]
    return dataclasses.replace(query, columns=tuple(columns))


def differ_in_null(left: Query, right: Query) -> list[str]:
    """The lines to choose from where the front ends differ: sqlc takes every cast and call for NOT NULL."""
    pairs = zip(remarks.apply(left).columns, remarks.apply(right).columns, strict=False)
    if left.cmd == ":exec":
        return []
    return [
        f"{left.source}, {left.name}: -- fairq: not null {a.name}   or   -- fairq: nullable {a.name}"
        for a, b in pairs
        if a.name == b.name and a.not_null != b.not_null
    ]


def test_both_front_ends_write_the_same_files(server: TestServer, tmp_path: Path) -> None:
    project = without(SAMPLES / "shop", tmp_path / "project", ())
    theirs, ours = by_sqlc(project, tmp_path / "work", server), by_postgresql(project, server)
    assert generate(theirs) == generate(ours)


@pytest.mark.parametrize("name", SQLC_CANNOT_READ)
def test_sqlc_really_cannot_read_what_is_left_out(name: str, server: TestServer, tmp_path: Path) -> None:
    project = without(ROOT / "sql", tmp_path / "project", SQLC_CANNOT_READ.keys() - {name})
    ours = by_postgresql(project, server)
    assert name in [query.name for query in ours.queries]
    try:
        theirs = by_sqlc(project, tmp_path / "work", server)
        same = [meaning(query, theirs.catalog) for query in theirs.queries if query.name == name] == [
            meaning(query, ours.catalog) for query in ours.queries if query.name == name
        ]
    except (subprocess.CalledProcessError, Untypable):
        same = False
    assert not same


def test_fairqs_own_calls_are_those_of_its_sql(server: TestServer) -> None:
    """Stale? `fairq gen --config sql/sqlc.yaml`."""
    (entry,) = config.read(ROOT / "sql" / "sqlc.yaml")
    generated = generate(by_postgresql(ROOT / "sql", server))
    assert generated == sqlc.files_in(entry.targets[0].out)
