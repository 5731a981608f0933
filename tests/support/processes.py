"""Other processes: programs that tests start and kill, and whether one still exists."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fairq import embedded

ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    """Whether such a process exists; one that waits to be reaped does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    with suppress(OSError):  # on Linux; ps reads the same, but is a process each time
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return not state.stdout.strip().startswith("Z") if state.returncode == 0 else False


@contextmanager
def program(code: str, *argv: str, env: dict[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Run Python code in its own process, which can import fairq, and is killed at the end if necessary."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_json(process: "subprocess.Popen[str]") -> Any:
    """The next line that the program prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the program ended with exit code {process.wait()} and printed nothing"
    return json.loads(line)


def run_dirs_of(pid: int) -> set[Path]:
    """The remaining temporary folders of servers that this process started."""
    found = set()
    for temp in {tempfile.gettempdir(), "/tmp", "/var/tmp"}:
        for run_dir in Path(temp).glob(f"{embedded.RUN_PREFIX}*"):
            with suppress(OSError):
                if (run_dir / "owner").read_text() == str(pid):
                    found.add(run_dir)
    return found


def modes(paths: Sequence[Path]) -> dict[str, tuple[int, int, int]]:
    """Mode and owner of these folders and of all their parents."""
    everything = {above for path in paths for above in (path.resolve(), *path.resolve().parents)}
    return {str(p): (s.st_mode, s.st_uid, s.st_gid) for p in sorted(everything) for s in [p.stat()]}
