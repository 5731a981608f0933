"""The decisions about versions: pure functions over a list of revisions."""

import re
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from fairq import install
from fairq.install import Revision
from tests.migrations.conftest import History


def revisions(*breaking: bool) -> list[Revision]:
    return [
        Revision(f"fairq_{number:04d}", f"{number:04d}_x", Path(), here)
        for number, here in enumerate(breaking, 1)
    ]


FIVE = revisions(False, False, True, False, False)


def test_alembic_sees_the_same_chain_as_the_file_names() -> None:
    config = Config()
    config.set_main_option("script_location", str(install.migrations_dir()))
    scripts = list(reversed(list(ScriptDirectory.from_config(config).walk_revisions())))
    known = install.revisions()
    assert [script.revision for script in scripts] == [revision.id for revision in known]
    assert [script.down_revision for script in scripts] == [None, *[revision.id for revision in known[:-1]]]
    assert scripts[0].branch_labels == {"fairq"}


@pytest.mark.parametrize("revision", install.revisions(), ids=lambda revision: revision.stem)
def test_a_revision_has_both_files_and_a_head_that_tells_an_operator_what_to_expect(
    revision: Revision,
) -> None:
    head = re.match(r"(--.*\n)+", revision.text("up"))
    assert head
    for word in ("Why:", "Locks:", "Rewrites:", "Beforehand:"):
        assert word in head[0]
    assert revision.file("down").exists()
    assert re.fullmatch(r"\d{4}_[a-z0-9_]+", revision.stem)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_revision_neither_ends_the_transaction_nor_reads_sql(direction: install.Direction) -> None:
    """A step is one transaction, and it belongs to the runner: ours, or a user's own Alembic tree."""
    for revision in install.revisions():
        text = re.sub(r"(\$\w*\$).*?\1", "", revision.text(direction), flags=re.DOTALL)
        assert not re.search(r"^\s*(begin|commit|rollback|end)\s*;", text, re.MULTILINE | re.IGNORECASE)
        assert not re.search(r"^\\", text, re.MULTILINE), "psql's own commands work in psql only"
        assert "read_text" not in (revision.folder / f"{revision.stem}.py").read_text()


@pytest.mark.parametrize("name", ["head", "3", "003", "0003", "fairq_0003", "0003_added_probe"])
def test_a_revision_may_be_named_in_many_ways(history: History, name: str) -> None:
    assert install.resolve(name) == "fairq_0003" == history.head


def test_base_is_the_database_without_fairq(history: History) -> None:
    assert install.resolve("base") is None


@pytest.mark.parametrize(
    "name", ["", "0", "4", "fairq_0004", "added_probe", "00003", "head~1", "'; drop table x"]
)
def test_an_unknown_revision_is_refused_with_the_known_ones(history: History, name: str) -> None:
    with pytest.raises(install.UnknownRevision) as caught:
        install.resolve(name)
    assert caught.value.hint
    assert history.initial in caught.value.hint


def steps(version: str | None, target: str | None) -> list[tuple[str, str, str | None]]:
    return [(step.revision.id, step.direction, step.result) for step in install.plan(version, target, FIVE)]


def test_a_plan_goes_up_one_revision_at_a_time() -> None:
    assert steps(None, "fairq_0002") == [
        ("fairq_0001", "up", "fairq_0001"),
        ("fairq_0002", "up", "fairq_0002"),
    ]


def test_a_plan_goes_down_one_revision_at_a_time() -> None:
    assert steps("fairq_0002", None) == [("fairq_0002", "down", "fairq_0001"), ("fairq_0001", "down", None)]


@pytest.mark.parametrize("version", [None, "fairq_0001", "fairq_0005"])
def test_a_plan_to_where_we_are_is_empty(version: str | None) -> None:
    assert steps(version, version) == []


def test_a_plan_from_a_newer_database_is_refused() -> None:
    with pytest.raises(install.SchemaTooNew):
        steps("fairq_0006", "fairq_0005")


def test_a_plan_from_a_version_of_somebody_else_is_refused() -> None:
    with pytest.raises(install.SchemaForeign):
        steps("8f2b1c", "fairq_0005")


def test_a_database_at_head_may_be_worked_with() -> None:
    """HR32"""
    assert install.judge(("fairq_0005", "fairq_0003"), FIVE) == "fairq_0005"


def test_a_database_without_fairq_is_refused_with_the_command_that_helps() -> None:
    with pytest.raises(install.SchemaMissing) as caught:
        install.judge(None, FIVE)
    assert "fairq migrate" in str(caught.value.hint)


def test_a_database_behind_the_code_is_refused() -> None:
    with pytest.raises(install.SchemaTooOld):
        install.judge(("fairq_0004", "fairq_0003"), FIVE)


@pytest.mark.parametrize("oldest", ["fairq_0001", "fairq_0005"])
def test_a_newer_database_that_still_fits_older_code_may_be_worked_with(oldest: str) -> None:
    """So that a deployment may migrate first and replace the workers one by one."""
    assert install.judge(("fairq_0009", oldest), FIVE) == "fairq_0009"


def test_a_newer_database_after_a_breaking_change_is_refused() -> None:
    with pytest.raises(install.SchemaTooNew):
        install.judge(("fairq_0009", "fairq_0006"), FIVE)


@pytest.mark.parametrize(
    ("version", "oldest"),
    [
        ("fairq_0001", "fairq_0001"),
        ("fairq_0002", "fairq_0001"),
        ("fairq_0003", "fairq_0003"),
        ("fairq_0005", "fairq_0003"),
    ],
)
def test_the_oldest_code_that_fits_is_the_last_breaking_change(version: str, oldest: str) -> None:
    assert install._oldest_code(version, FIVE) == oldest
