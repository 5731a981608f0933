"""The small process between `fairq.embedded` and a program of PostgreSQL: none outlives who started it.

Run by path, as `python -I -S _keeper.py ORDER`; imports nothing but the standard library. ORDER is JSON:

    parent, run_dir      who started it; what to remove when he is gone
    argv, env, log       the program, its environment, where its output goes
    locks                files to lock (flock) for as long as this runs and, for those after the first, as
                         long as any process of the program lives; a taken one ends this with EX_TEMPFAIL
    patience             [[signal, seconds], …]: how the program is asked to end when its owner is gone
    uid, gid, folder     run it as that user; give it that folder, open, in the place of {folder} in argv

It prints the program's process id, and ends with its exit code. Its standard input is a pipe whose other
end only the owner holds: the kernel closes it however he dies, SIGKILL included, on Linux as on macOS.
(PR_SET_PDEATHSIG is tied to the forking thread, is cleared when the user changes, and has no counterpart on
macOS.) A copy of the pipe in a forked child would hide the death, so the parent's process id is looked at
too, twice a second.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import Any

PARENT_CHECK_SECONDS = 0.5


def spawn(order: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Lock what is to be locked and start the program, which inherits all locks but the first."""
    inherited = []
    for path in order["locks"]:
        inherited.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            fcntl.flock(inherited[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(os.EX_TEMPFAIL)
    argv, as_user = order["argv"], {}
    if "uid" in order:
        as_user = {"user": order["uid"], "group": order["gid"], "extra_groups": []}
    if "folder" in order:
        inherited.append(os.open(order["folder"], os.O_RDONLY | os.O_DIRECTORY))
        argv = [each.replace("{folder}", f"/proc/self/fd/{inherited[-1]}") for each in argv]
    with open(order["log"], "ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=order["env"],
            pass_fds=inherited[1:],
            start_new_session=True,
            umask=0o077,
            **as_user,
        )


def watch(program: "subprocess.Popen[bytes]", parent: int) -> bool:
    """Wait for the end of the program, or of its owner: then it says yes."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while program.poll() is None:
        if os.getppid() != parent:
            return True
        ready = select.select([0, woken], [], [], PARENT_CHECK_SECONDS)[0]
        if 0 in ready:
            return True  # nobody writes to the pipe: that is its end
        if woken in ready:
            os.read(woken, 512)  # also when the program was only stopped for a while
    return False


def end(program: "subprocess.Popen[bytes]", patience: list[tuple[int, float]]) -> None:
    for number, seconds in patience:
        if program.poll() is None:
            program.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(seconds)


def stop(number: int, frame: object) -> None:
    raise SystemExit(0)


def main(order: dict[str, Any]) -> None:
    stopping = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in stopping:
        signal.signal(number, stop)
    program = spawn(order)
    orphaned = True
    try:
        os.write(1, f"{program.pid}\n".encode())
        orphaned = watch(program, order["parent"])
    finally:
        for number in stopping:
            signal.signal(number, signal.SIG_IGN)
        end(program, order["patience"])
        if orphaned:
            shutil.rmtree(order["run_dir"], ignore_errors=True)
    sys.exit(program.returncode if program.returncode >= 0 else 128 - program.returncode)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
