"""The tool that freezes SQL, and the seal on what has been released."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fairq import install
from tools import freeze


def test_the_initial_revision_is_frozen_from_sql_as_it_is_today() -> None:
    if f"versions/{freeze.INITIAL}.up.sql" in freeze.released():
        pytest.skip("released: it never changes any more, and the drift test guards what came later")
    stale = [file.name for file, text in freeze.initial_files().items() if file.read_text("utf-8") != text]
    assert not stale, "run: make freeze"


def test_what_has_been_released_has_not_changed() -> None:
    now = freeze.digests()
    assert {name: now.get(name) for name in freeze.released()} == freeze.released()


def test_files_are_frozen_in_the_order_in_which_they_are_loaded(tmp_path: Path) -> None:
    """Tables, then the rooms in the order of a task's life; who may do what comes when all is there."""
    order = (
        *("schema/010_a", "schema/020_b", "create/b", "promote/a", "promote/b", "pop/a", "leave/a"),
        *("policies/a", "control/a", "upkeep/a", "views/a", "first_rows", "grants"),
    )
    for name in sorted(order):
        file = tmp_path / f"{name}.sql"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"select '{name}';\n")
    text = freeze.up_text(tmp_path)
    places = [text.index(f"select '{name}'") for name in order]
    assert places == sorted(places)


def test_no_file_of_the_engine_is_left_out() -> None:
    """A room that install does not know would be neither loaded nor frozen."""
    loaded = {file.relative_to(freeze.ROOT / "sql") for file in install.sql_files()}
    there = {file.relative_to(freeze.ROOT / "sql") for file in (freeze.ROOT / "sql").rglob("*.sql")}
    assert {file for file in there if file.parts[0] != "queries"} == loaded


def test_creating_the_schema_is_left_to_the_runner(tmp_path: Path) -> None:
    """It asks for a right on the database even when the schema is there."""
    (tmp_path / "schema").mkdir()
    (tmp_path / "schema/010.sql").write_text("create schema if not exists fairq;\ncreate table fairq.a ();\n")
    assert "create schema" not in freeze.up_text(tmp_path)
    assert "create table fairq.a" in freeze.up_text(tmp_path)


def test_a_downgrade_drops_in_reverse_order_and_never_cascades() -> None:
    up = """
create function fairq.one() returns int language sql as $$ select 1 $$;
create or replace function fairq.plpgsql() returns void language plpgsql as $x$
begin
create table not_this_one ();
end $x$;
create table if not exists fairq.things (id int default fairq.one());
create index things_idx on fairq.things (id);
create unique index things_key on fairq.things (id);
create view fairq.seen as select * from fairq.things;
create type fairq.pair as (a int, b int);
"""
    assert freeze.created(up) == [
        ("function", "fairq.one"),
        ("function", "fairq.plpgsql"),
        ("table", "fairq.things"),
        ("view", "fairq.seen"),
        ("type", "fairq.pair"),
    ]
    down = [line for line in freeze.down_text(up).splitlines() if line.startswith("drop")]
    assert down == [
        "drop type fairq.pair;",
        "drop view fairq.seen;",
        "drop table fairq.things;",
        "drop function fairq.plpgsql;",
        "drop function fairq.one;",
    ]


def test_what_freeze_cannot_take_back_it_refuses() -> None:
    with pytest.raises(click.ClickException, match="operator"):
        freeze.created("create operator fairq.=== (leftarg = int, rightarg = int, function = int4eq);")


def test_a_downgrade_guards_the_tables_with_rows_of_the_user() -> None:
    down = install.revisions()[0].text("down")
    assert "lock table fairq.tasks, fairq.finished_tasks" in down
    assert down.index("lock table") < down.index("raise exception") < down.index("drop ")


def test_a_sealed_file_that_changed_stops_the_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(freeze, "RELEASED", tmp_path / "released.sha256")
    runner = CliRunner()
    assert runner.invoke(freeze.main, ["release"]).exit_code == 0
    assert freeze.released() == freeze.digests()
    name = f"versions/{freeze.INITIAL}.up.sql"
    text = freeze.RELEASED.read_text().replace(freeze.digests()[name], "0" * 64)
    freeze.RELEASED.write_text(text)
    refused = runner.invoke(freeze.main, ["release"])
    assert refused.exit_code == 1
    assert name in refused.output
    sealed = runner.invoke(freeze.main, ["initial"])
    assert sealed.exit_code == 1
    assert "never changes" in sealed.output


def test_a_new_revision_gets_the_next_number_and_the_files_of_its_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(freeze, "VERSIONS", tmp_path)
    function = tmp_path / "f.sql"
    function.write_text("create or replace function fairq.f() returns int language sql as $$ select 1 $$;\n")
    runner = CliRunner()
    assert runner.invoke(freeze.main, ["new", "changed_f", str(function)]).exit_code == 0
    number = len(install.revisions()) + 1
    stem = f"{number:04d}_changed_f"
    assert function.read_text() in (tmp_path / f"{stem}.up.sql").read_text()
    python = (tmp_path / f"{stem}.py").read_text()
    assert f'revision = "fairq_{number:04d}"' in python
    assert f'down_revision = "{install.head()}"' in python
    assert (tmp_path / f"{stem}.down.sql").exists()


@pytest.mark.parametrize("file", sorted(freeze.VERSIONS.glob("*.sql")), ids=lambda file: file.name)
def test_frozen_sql_is_ascii(file: Path) -> None:
    """So it can be loaded into a database of any encoding, over a connection of any other."""
    text = file.read_text("utf-8")
    assert [line for line in text.splitlines() if not line.isascii()] == []
