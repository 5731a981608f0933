"""What a release freezes, and the tool for it."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fairq import install
from tests.support.catalog import catalog, differences
from tests.support.database import Database
from tools import freeze


def run(*arguments: str) -> Result:
    return CliRunner().invoke(freeze.main, arguments)


def test_released_files_have_not_changed() -> None:
    now = freeze.digests()
    assert {name: now.get(name) for name in freeze.released()} == freeze.released()


def test_before_a_release_there_is_one_revision_and_it_is_sql(unreleased: Path) -> None:
    (only,) = install.revisions()
    assert (only.id, only.stem, only.breaking) == ("fairq_0001", "0001_initial", False)
    names = [name for name, _ in only.parts("up")]
    assert names[1:-1] == [file.name for file in install.sql_files()]


def test_before_a_release_there_are_no_deltas(unreleased: Path) -> None:
    done = run("new", "too_early")
    assert (done.exit_code, "nothing is released yet" in done.output) == (1, True)
    assert list((unreleased / "migrations").iterdir()) == []


def test_a_release_keeps_the_engine_as_it_was(released: Path, empty_database: Database) -> None:
    """From then on the initial revision does not follow `sql/`, and can still be installed and removed."""
    conn = empty_database.connect(autocommit=True)
    install.migrate(empty_database.dsn)
    at_release = catalog(conn)
    install.migrate(empty_database.dsn, to="base")
    assert run("new", "later").exit_code == 0
    (released / "sql/schema/999_later.sql").write_text("create table fairq.later (id int);\n")
    install.migrate(empty_database.dsn, to="1")
    assert differences(at_release, catalog(conn), "at the release", "now") == []
    install.migrate(empty_database.dsn, to="base")
    assert catalog(conn) == {}


def test_a_sealed_file_that_changed_stops_the_next_release(released: Path) -> None:
    assert freeze.released() == freeze.digests()
    assert run("release").exit_code == 0, "a second time changes nothing"
    file = released / "migrations/0001_initial.up.sql"
    file.write_text(file.read_text() + "select 1;\n")
    refused = run("release")
    assert (refused.exit_code, file.name in refused.output) == (1, True)
    assert freeze.released() != freeze.digests()


def test_a_new_revision_gets_the_next_number_and_the_files_of_its_change(released: Path) -> None:
    function = released / "f.sql"
    function.write_text("create or replace function fairq.f() returns int language sql as $$ select 1 $$;\n")
    assert run("new", "changed_f", str(function)).exit_code == 0
    assert [revision.stem for revision in install.revisions()] == ["0001_initial", "0002_changed_f"]
    assert function.read_text() in (released / "migrations/0002_changed_f.up.sql").read_text()
    assert (released / "migrations/0002_changed_f.down.sql").exists()
    assert "lower-case letters" in run("new", "Changed F").output


def test_files_are_loaded_in_order(unreleased: Path) -> None:
    """Tables, then the rooms in the order of a task's life, and the grants last."""
    files = [str(file.relative_to(unreleased / "sql")) for file in install.sql_files()]
    rooms = list(dict.fromkeys(name.split("/")[0] for name in files))
    assert rooms == [*install.ROOMS, *install.LAST]
    assert [
        name for room in install.ROOMS for name in sorted(n for n in files if n.startswith(f"{room}/"))
    ] == [name for name in files if "/" in name]


def test_no_file_of_the_engine_is_left_out() -> None:
    """A room that install does not know would not be loaded. The bootstrap is before all of them, the
    way back behind, the guard in scripts; only on Citus are its files, anew each time."""
    root = install.sql_dir()
    there = {file.relative_to(root) for file in root.rglob("*.sql") if file.parent.name != "queries"}
    apart = {
        Path("bootstrap.sql"),
        Path("guard.sql"),
        Path("way_back.sql"),
        *(file.relative_to(root) for file in root.glob("citus*.sql")),
    }
    assert there - apart == {file.relative_to(root) for file in install.sql_files()}


def test_the_engine_is_ascii() -> None:
    """So it loads into a database of any encoding, over a connection of any encoding."""
    for file in (*install.sql_files(), *install.migrations_dir().glob("*.sql")):
        assert [line for line in file.read_text("utf-8").splitlines() if not line.isascii()] == [], file.name


def test_the_way_back_drops_in_reverse_order_and_never_cascades() -> None:
    up = """
create function fairq.one() returns int language sql as $$ select 1 $$;
create or replace function fairq.plpgsql() returns void language plpgsql as $x$
begin
create table not_this_one ();
end $x$;
create table if not exists fairq.things (id int default fairq.one());
create table fairq.tasks (id int);
create index things_idx on fairq.things (id);
create unique index things_key on fairq.things (id);
create view fairq.seen as select * from fairq.things;
create type fairq.pair as (a int, b int);
"""
    down = install._way_back(up)
    assert [line for line in down.splitlines() if line.startswith("drop")] == [
        "drop type fairq.pair;",
        "drop view fairq.seen;",
        "drop table fairq.tasks;",
        "drop table fairq.things;",
        "drop function fairq.plpgsql;",
        "drop function fairq.one;",
    ]
    assert down.index("lock table") < down.index("raise exception") < down.index("drop type")


def test_sql_that_cannot_be_undone_is_refused() -> None:
    with pytest.raises(install.PackageBroken, match="operator"):
        install._created("create operator fairq.=== (leftarg = int, rightarg = int, function = int4eq);")
