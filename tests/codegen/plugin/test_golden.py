"""The sqlalchemy template writes what sqlc-gen-python 1.3.0 writes; each golden directory shows one rule.

The directories with `strict: true` hold the reference's own output, apart from the version line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.plugin import sqlc

DIRECTORIES = [pytest.param(path, id=path.name) for path in sqlc.golden_directories()]
needs_sqlc = pytest.mark.skipif(bool(sqlc.why_sqlc_cannot_run()), reason=sqlc.why_sqlc_cannot_run())


def test_there_is_a_golden_directory_for_every_rule() -> None:
    """Ten rules, each named in the first line of at least one configuration."""
    heads = [Path(path, "sqlc.yaml").read_text().splitlines()[0] for path in sqlc.golden_directories()]
    rules = [head.split(":")[0] for head in heads if head.startswith("# Rule")]
    words = {word.strip(",") for rule in rules for word in rule.split()}
    assert {str(number) for number in range(1, 11)} <= words


FORMS = pytest.mark.parametrize("form", ["json", "protobuf"])


@needs_sqlc
@FORMS
@pytest.mark.parametrize("directory", DIRECTORIES)
def test_the_real_sqlc_gets_the_golden_files(directory: Path, form: str, tmp_path: Path) -> None:
    """And what is absent from a request is at its default."""
    work = sqlc.copied(directory, tmp_path / "work", form=form)
    done, request = sqlc.generate(work)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    expected = sqlc.files_in(directory / "expected")
    assert sqlc.files_in(work / sqlc.OUT) == expected
    if form == "json":
        slim = sqlc.pruned(request)
        assert sqlc.respond(slim) == expected
        as_protobuf = sqlc.as_protobuf(slim)
        assert as_protobuf[0] == 0x0A
        assert sqlc.respond(as_protobuf) == expected


@needs_sqlc
@FORMS
def test_the_real_sqlc_starts_the_real_plugin(form: str, tmp_path: Path) -> None:
    directory = sqlc.GOLDEN / "results"
    work = sqlc.copied(directory, tmp_path / "work", form=form)
    done = sqlc.command("generate", work)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert sqlc.files_in(work / sqlc.OUT) == sqlc.files_in(directory / "expected")


@needs_sqlc
def test_sqlc_diff_finds_nothing_stale_after_generate_and_fails_after_a_change(tmp_path: Path) -> None:
    work = sqlc.copied(sqlc.GOLDEN / "results", tmp_path / "work")
    assert sqlc.command("generate", work).returncode == 0
    assert sqlc.command("diff", work).returncode == 0
    models = work / sqlc.OUT / "models.py"
    models.write_text(models.read_text().replace("title: str", "title: int"))
    stale = sqlc.command("diff", work)
    assert stale.returncode == 1
    assert "title: str" in stale.stdout + stale.stderr
