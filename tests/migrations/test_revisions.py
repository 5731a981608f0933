"""The decisions about versions: pure functions over a list of revisions."""

import re
from pathlib import Path

import pytest

from fairq import install
from fairq.install import Revision
from fairq.queries.models import FairqSchemaVersion
from tests.migrations.conftest import History


def revisions(*breaking: bool) -> list[Revision]:
    return [
        Revision(f"fairq_{number:04d}", f"{number:04d}_x", Path(), here)
        for number, here in enumerate(breaking, 1)
    ]


FIVE = revisions(False, False, True, False, False)


DELTAS = sorted(install.migrations_dir().glob("[0-9]*.up.sql"))


@pytest.mark.parametrize("file", DELTAS, ids=lambda file: file.name)
def test_a_delta_has_a_way_back_and_a_head_that_tells_an_operator_what_to_expect(file: Path) -> None:
    head = re.match(r"(--.*\n)+", file.read_text())
    assert head
    for word in ("Why:", "Locks:", "Rewrites:", "Beforehand:"):
        assert word in head[0]
    assert "…" not in head[0]
    assert file.name.startswith("0001_") or file.with_name(file.name.replace(".up.", ".down.")).exists()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_revision_does_not_end_the_transaction(direction: install.Direction) -> None:
    """A step is one transaction, which belongs to its runner: fairq, or a user's own Alembic tree."""
    for revision in install.revisions():
        for _, part in revision.parts(direction):
            text = re.sub(r"(\$\w*\$).*?\1", "", part, flags=re.DOTALL)
            assert not re.search(r"^\s*(begin|commit|rollback|end)\s*;", text, re.MULTILINE | re.IGNORECASE)
            assert not re.search(r"^\\", text, re.MULTILINE), "psql's own commands work in psql only"


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


def test_a_plan_from_base_to_head_is_one_step() -> None:
    (step,) = install.plan(None, "fairq_0005", FIVE)
    assert (step.revision.id, step.direction, step.result, step.fresh) == (
        "fairq_0005",
        "up",
        "fairq_0005",
        True,
    )


def test_a_plan_goes_up_one_revision_at_a_time() -> None:
    assert steps("fairq_0003", "fairq_0005") == [
        ("fairq_0004", "up", "fairq_0004"),
        ("fairq_0005", "up", "fairq_0005"),
    ]
    assert not any(step.fresh for step in install.plan(None, "fairq_0004", FIVE))
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
    assert install.judge(FairqSchemaVersion("fairq_0005", "fairq_0003"), FIVE) == "fairq_0005"


def test_a_database_without_fairq_is_refused_with_the_command_that_helps() -> None:
    with pytest.raises(install.SchemaMissing) as caught:
        install.judge(None, FIVE)
    assert "fairq migrate" in str(caught.value.hint)


def test_a_database_behind_the_code_is_refused() -> None:
    with pytest.raises(install.SchemaTooOld):
        install.judge(FairqSchemaVersion("fairq_0004", "fairq_0003"), FIVE)


@pytest.mark.parametrize("oldest", ["fairq_0001", "fairq_0005"])
def test_a_newer_database_that_still_fits_older_code_may_be_worked_with(oldest: str) -> None:
    """So that a deployment can migrate first and then replace the workers one by one."""
    assert install.judge(FairqSchemaVersion("fairq_0009", oldest), FIVE) == "fairq_0009"


def test_a_newer_database_after_a_breaking_change_is_refused() -> None:
    with pytest.raises(install.SchemaTooNew):
        install.judge(FairqSchemaVersion("fairq_0009", "fairq_0006"), FIVE)


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
