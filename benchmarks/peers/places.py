"""Where each peer is installed, how, and how to start its adapter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "peers"
OURS = ("fairq", "fifo")


class Missing(Exception):
    """This peer cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Place:
    """One peer: what it needs, and its folder."""

    name: str
    packages: tuple[str, ...] = ()
    node: bool = False
    folder: Path = FOLDER

    @property
    def home(self) -> Path:
        return self.folder / self.name

    @property
    def stamp(self) -> Path:
        """A file written after a successful installation, with what was installed."""
        return self.home / ".installed"

    @property
    def is_ours(self) -> bool:
        return not self.packages

    @property
    def is_here(self) -> bool:
        return self.is_ours or (self.stamp.exists() and self.stamp.read_text() == "\n".join(self.packages))

    def command(self, role: str) -> list[str]:
        """How to start the adapter. Raises `Missing` if its packages are missing or outdated."""
        if self.is_ours:
            return [sys.executable, "-m", "benchmarks.peers.run", self.name, role]
        if not self.is_here:
            raise Missing(f"not installed: python -m benchmarks.peers install {self.name}")
        if self.node:
            return ["node", str(Path(__file__).parent / f"{self.name}.mjs"), role]
        return [str(self.home / "bin" / "python"), "-m", "benchmarks.peers.run", self.name, role]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PEER_FOLDER": str(self.home), "PYTHONPATH": str(ROOT)}


def places(folder: Path = FOLDER) -> dict[str, Place]:
    """All peers by name, ours first."""
    pins = tomllib.loads((Path(__file__).parent / "pins.toml").read_text())
    ours = {name: Place(name, folder=folder) for name in OURS}
    others = {
        name: Place(name, tuple(pin["packages"]), pin.get("node", False), folder)
        for name, pin in pins.items()
    }
    return ours | others


def install(place: Place, say: Callable[[str], None]) -> None:
    """Install a peer's packages in its folder, unless they are there. Raises `Missing` if that fails."""
    if place.is_here:
        return
    say(f"{place.name}: {', '.join(place.packages)}")
    shutil.rmtree(place.home, ignore_errors=True)
    place.home.mkdir(parents=True)
    if place.node:
        if not shutil.which("npm"):
            raise Missing("npm is not here")
        options = ["--no-audit", "--no-fund", "--prefix", str(place.home)]
        _run(place, ["npm", "install", *options, *place.packages])
    else:
        venv.create(place.home, with_pip=True)
        pip = [str(place.home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        _run(place, [*pip, *place.packages])
    place.stamp.write_text("\n".join(place.packages))


def _run(place: Place, command: list[str]) -> None:
    done = subprocess.run(command, cwd=place.home, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise Missing(f"{Path(command[0]).name} cannot install it: {' '.join(errors[:3])[:300]}")
