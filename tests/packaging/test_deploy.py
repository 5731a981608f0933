"""The files of examples/deploy: their commands exist, and their probe notices a stale file."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from fairq.cli import main
from tests.support.processes import ROOT

DEPLOY = ROOT / "examples" / "deploy"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def container(manifest: dict[str, Any]) -> Any:
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return found


def entrypoint() -> list[str]:
    (words,) = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(words))


def started_by_systemd() -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "fairq-worker.service").read_text(), re.MULTILINE)
    return shlex.split(line)


def in_kubernetes() -> list[list[str]]:
    deployment, job = map(container, manifests())
    return [[*entrypoint(), *deployment["args"]], job["command"]]


@pytest.mark.parametrize("words", [entrypoint(), started_by_systemd(), *in_kubernetes()], ids=" ".join)
def test_the_files_run_existing_commands_and_options(words: list[str]) -> None:
    program, name, *arguments = words
    assert Path(program).name == "fairq"
    command = main.get_command(click.Context(main), name)
    assert command is not None
    command.make_context(name, arguments, parent=click.Context(main))


def test_the_image_has_what_the_command_line_needs() -> None:
    (extras,) = re.findall(r'"fairq\[(.*)\]"', (DEPLOY / "Dockerfile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"binary", "cli"} <= set(extras.split(",")) <= set(known)


def test_the_grace_time_ends_before_anything_kills() -> None:
    """20 seconds, and ten more."""
    deployment, _ = manifests()
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 30
    assert "TimeoutStopSec=40" in (DEPLOY / "fairq-worker.service").read_text()


def test_the_probe_tells_a_fresh_file_from_a_stale_one(tmp_path: Path) -> None:
    deployment, _ = manifests()
    command = container(deployment)["livenessProbe"]["exec"]["command"]
    file = tmp_path / "health"
    assert entrypoint()[-2:] == ["--health", "/tmp/health"]
    probe = [word.replace("/tmp/health", str(file)) for word in command]

    def is_alive() -> bool:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    assert not is_alive()
    file.write_text("{}")
    assert is_alive()
    os.utime(file, (time.time() - 60, time.time() - 60))
    assert not is_alive()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "fairq-worker.service"
    text = (DEPLOY / "fairq-worker.service").read_text()
    unit.write_text(text.replace(started_by_systemd()[0], "/bin/true").replace("User=shop", "User=root"))
    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert not [line for line in told.stderr.splitlines() if unit.name in line], told.stderr
