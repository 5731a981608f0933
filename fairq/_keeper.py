"""The small process between `fairq.embedded` and a PostgreSQL program, which it ends when its owner ends.

It is run by path, as `python -I -S _keeper.py ORDER`, and imports only the standard library. ORDER is JSON:

    parent, run_dir      the owner's process id; the folder to remove when the owner is gone
    argv, env, log       the program, its environment, where its output goes
    locks                files to lock (flock) while this process runs. The program inherits all but the
                         first and holds them as long as it lives. A taken lock ends this with EX_TEMPFAIL
    patience             [[signal, seconds], …]: how to end the program when its owner is gone
    uid, gid, folder     run it as that user; pass it that folder, open, in place of {folder} in argv

It prints the program's process id and ends with the program's exit code. Only the owner holds the other end
of its standard input, a pipe: the kernel closes it however the owner dies, SIGKILL included, on Linux and
macOS. (PR_SET_PDEATHSIG is tied to the forking thread, is cleared when the user changes, and has no
counterpart on macOS.) A copy of the pipe in a forked child would hide the owner's death, so the keeper also
checks its parent's process id twice a second.
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
    """Take the locks and start the program, which inherits all locks but the first."""
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
    """Wait until the program ends or its owner does. Return whether it was the owner."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while program.poll() is None:
        if os.getppid() != parent:
            return True
        ready = select.select([0, woken], [], [], PARENT_CHECK_SECONDS)[0]
        if 0 in ready:
            return True  # nobody writes to the pipe, so it was closed
        if woken in ready:
            os.read(woken, 512)  # SIGCHLD also comes when the program is only suspended
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
