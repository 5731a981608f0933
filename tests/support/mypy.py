"""mypy as users of fairq run it: strict, without the settings of this repository."""

import fcntl
from pathlib import Path

from mypy import api

from tests.support.processes import ROOT

CACHE = ROOT / ".mypy_cache" / "samples"


def said_of(*paths: str | Path) -> list[str]:
    """The lines that mypy prints. Only one runs at a time, because they share a cache of the libraries."""
    CACHE.mkdir(parents=True, exist_ok=True)
    options = ["--strict", "--config-file=", "--explicit-package-bases", "--no-error-summary", "--no-pretty"]
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out, err, _ = api.run([*options, f"--cache-dir={CACHE}", *map(str, paths)])
    assert not err
    return out.splitlines()
