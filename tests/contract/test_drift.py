"""The migrations build exactly what `sql/` describes."""

import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from fairq import install
from tests.support.catalog import catalog, differences
from tests.support.database import Database
from tools import freeze


def drift(database: Database) -> list[str]:
    """The differences between a database built by all migrations and one loaded from `sql/`."""
    conn = database.connect(autocommit=True)
    install.load_sql(conn)
    loaded = catalog(conn)
    conn.execute("drop schema fairq cascade")
    with conn.transaction():
        conn.execute(install._text("bootstrap.sql").encode())
        for revision in install.revisions():
            for _, text in revision.parts("up"):
                conn.execute(text.encode())
        conn.execute(install._record(install.head()).encode())
    migrated = catalog(conn)
    conn.execute("drop schema fairq cascade")
    assert len(migrated) > 100
    return differences(migrated, loaded, "migrated", "sql/")


def test_a_migrated_database_equals_one_loaded_from_sql(empty_database: Database) -> None:
    found = drift(empty_database)
    assert not found, "See migrations/README.md.\n\n" + "\n\n".join(found)


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `sql/` that has been released, used by this process."""
    shutil.copytree(install.sql_dir(), tmp_path / "sql")
    (tmp_path / "migrations").mkdir()
    monkeypatch.setattr(install, "sql_dir", lambda: tmp_path / "sql")
    monkeypatch.setattr(install, "migrations_dir", lambda: tmp_path / "migrations")
    assert CliRunner().invoke(freeze.main, ["release"]).exit_code == 0
    return tmp_path


def test_a_change_of_sql_after_a_release_needs_its_delta(released: Path, empty_database: Database) -> None:
    """After the release the initial revision does not change, and what the deltas lack is reported."""
    assert drift(empty_database) == []
    table = released / "sql/schema/030_tables.sql"
    table.write_text(table.read_text() + "\nalter table fairq.groups add column notes text;\n")
    assert drift(empty_database) == ["column groups.notes: only sql/"]

    assert CliRunner().invoke(freeze.main, ["new", "notes"]).exit_code == 0
    delta = released / "migrations/0002_notes.up.sql"
    delta.write_text("alter table fairq.groups add column notes text default '';\n")
    (found,) = drift(empty_database)
    assert found.startswith("column groups.notes: default: migrated ''")
    delta.write_text("alter table fairq.groups add column notes text;\n")
    assert drift(empty_database) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("create table fairq.extra (id int)", "relation extra: only right"),
        ("alter table fairq.groups add column extra text", "column groups.extra: only right"),
        (
            "alter table fairq.groups alter weight set default 2",
            "column groups.weight: default: left – · right 2",
        ),
        ("alter table fairq.groups alter weight set not null", "column groups.weight: not null:"),
        ("alter table fairq.kinds alter cost type real", "column kinds.cost: type:"),
        (
            'alter table fairq.domains alter queue type text collate "POSIX"',
            "column domains.queue: collation: left C · right POSIX",
        ),
        ("alter table fairq.groups alter queue set storage external", "column groups.queue: storage:"),
        ("alter table fairq.groups set (fillfactor = 50)", "relation groups: options: left – · right"),
        (
            "alter table fairq.queues drop constraint queue_name_in_range",
            "constraint fairq.queues.queue_name_in_range: only left",
        ),
        ("create index extra on fairq.groups (weight)", "index fairq.extra: only right"),
        ("comment on table fairq.groups is 'x'", "relation groups: comment:"),
        ("comment on column fairq.groups.weight is 'x'", "column groups.weight: comment:"),
        ("grant select on fairq.groups to public", "relation groups: acl:"),
        ("grant update (weight) on fairq.groups to public", "column groups.weight: acl: left – · right"),
        ("grant execute on function fairq._round to pg_monitor", "function fairq._round(): acl:"),
        ("alter function fairq._round stable", "function fairq._round(): volatility:"),
        ("alter function fairq._round cost 7", "function fairq._round(): cost:"),
        ("alter function fairq._round set search_path = ''", "function fairq._round(): settings:"),
        ("alter sequence fairq.task_ids cache 7", "sequence task_ids: seqcache:"),
        ("create view fairq.extra as select 1 as one", "view extra: only right"),
        ("create type fairq.extra as enum ('a')", "type extra: only right"),
        ("alter table fairq.groups enable row level security", "relation groups: row security:"),
        (
            "create rule extra as on delete to fairq.groups do also notify x",
            "rule fairq.groups.extra: only right",
        ),
        ("insert into fairq.queues (queue) values ('extra')", "rows of queues: all:"),
        ("create role extra; grant usage on schema fairq to extra", "role extra: only right"),
        ("alter default privileges in schema fairq grant select on tables to public", "default privileges"),
    ],
)
def test_no_difference_goes_unseen(db: psycopg.Connection[Any], change: str, expected: str) -> None:
    before = catalog(db)
    db.execute(change.encode())
    found = differences(before, catalog(db), "left", "right")
    assert any(text.startswith(expected) for text in found), "\n".join(found)


def test_a_changed_function_body_is_shown_line_by_line(db: psycopg.Connection[Any]) -> None:
    db.execute("create function fairq.probe() returns int language sql as $$\n  select 1\n$$")
    before = catalog(db)
    db.execute("create or replace function fairq.probe() returns int language sql as $$\n  select 2\n$$")
    (found,) = differences(before, catalog(db), "left", "right")
    assert "-  select 1" in found
    assert "+  select 2" in found


def test_catalogues_of_equal_schemas_are_equal(db: psycopg.Connection[Any]) -> None:
    assert differences(catalog(db), catalog(db), "one", "other") == []
