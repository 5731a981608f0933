"""The small process between `fairq.embedded` and its PostgreSQL: no server outlives its starting program.

Run by path, as `python -I -S _supervisor.py PARENT_PID RUN_DIR LOCK…`; imports nothing but the standard
library.

It watches its standard input, a pipe whose other end only the starting program holds. The kernel closes
that end however the program dies, SIGKILL included: nothing has to run in the dying program, and Linux and
macOS behave alike. (Linux' PR_SET_PDEATHSIG is tied to the forking *thread*, is cleared when the user
changes, and has no counterpart on macOS.) A copy of the pipe in a forked child would hide the death, so the
parent's process id is looked at too, twice a second.

Orders come in as JSON lines, answers go out as JSON lines:

    {"run": argv, …}             run to its end      -> {"exit": code}
    {"start": argv, …}           start the server    -> {"pid": pid}
    {"stop": signal, "wait": s}  signal and await it -> {"exit": code}; {"error": …} when it outlives s
    {"poll": true}               is it there?        -> {"exit": null or code}

At the end of the input the server is stopped and RUN_DIR removed. Locks (flock) on the files LOCK… are held
as long as this process lives and, for those after the first, as long as any process of its server lives.
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
# How the server is asked to end when its owner is gone: politely, firmly, at once.
LAST_ORDERS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))


def lock_files(paths: list[str]) -> list[int]:
    """Open and lock every file, or raise BlockingIOError naming the first that somebody else holds."""
    descriptors = []
    for path in paths:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise BlockingIOError(exc.errno, "locked", path) from None
        descriptors.append(descriptor)
    return descriptors


def spawn(order: dict[str, Any], argv: list[str], inherited: list[int]) -> "subprocess.Popen[bytes]":
    """Start a program, its output in the log; as another user when the order names one.

    With a `folder`, the program gets that folder open, and /proc/self/fd/{folder} in its arguments becomes
    the path by which it can reach it.
    """
    as_user = {}
    if "uid" in order:
        as_user = {"user": order["uid"], "group": order["gid"], "extra_groups": []}
    with contextlib.ExitStack() as opened:
        log = opened.enter_context(open(order["log"], "ab"))
        if "folder" in order:
            folder = os.open(order["folder"], os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, folder)
            argv = [each.replace("/proc/self/fd/{folder}", f"/proc/self/fd/{folder}") for each in argv]
            inherited = [*inherited, folder]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=order["env"],
            pass_fds=inherited,
            start_new_session=True,
            umask=0o077,
            **as_user,
        )


def serve(parent: int, inherited: list[int], server: "list[subprocess.Popen[bytes]]") -> None:
    """Obey orders until the input ends or the parent is gone. `server` holds the running one, or nothing."""
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], PARENT_CHECK_SECONDS)[0]:
            if server:
                server[0].poll()  # reaps a server that crashed
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            try:
                answer = obey(json.loads(line), inherited, server)
            except OSError as exc:
                answer = {"error": f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc)}
            reply(answer)


def obey(
    order: dict[str, Any], inherited: list[int], server: "list[subprocess.Popen[bytes]]"
) -> dict[str, Any]:
    if "run" in order:
        return {"exit": spawn(order, order["run"], []).wait()}
    if "start" in order:
        if server and server[0].poll() is None:
            return {"error": f"process {server[0].pid} still runs"}
        server[:] = [spawn(order, order["start"], inherited)]
        return {"pid": server[0].pid}
    if "poll" in order:
        return {"exit": server[0].poll() if server else 0}
    if not server:
        return {"exit": 0}
    with contextlib.suppress(ProcessLookupError):
        server[0].send_signal(order["stop"])
    try:
        code = server[0].wait(order["wait"])
    except subprocess.TimeoutExpired:
        return {"error": f"process {server[0].pid} did not stop within {order['wait']:g} seconds"}
    server.clear()
    return {"exit": code}


def reply(answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(answer).encode() + b"\n")


def end(server: "list[subprocess.Popen[bytes]]", throw_away: bool) -> None:
    """Stop the server. Nobody will read a throw-away folder again, so that one needs no last checkpoint."""
    for number, patience in LAST_ORDERS[1:] if throw_away else LAST_ORDERS:
        if not server or server[0].poll() is not None:
            return
        server[0].send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server[0].wait(patience)


def stop_on_signal(number: int, frame: object) -> None:
    raise SystemExit(0)


def main(parent: int, run_dir: str, locks: list[str]) -> None:
    server: list[subprocess.Popen[bytes]] = []
    stopping = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        for number in stopping:
            signal.signal(number, stop_on_signal)
        try:
            _, *inherited = lock_files(locks)
        except OSError as exc:
            reply({"error": str(exc.strerror), "path": exc.filename})
            return
        reply({"ready": os.getpid()})
        serve(parent, inherited, server)
    finally:
        for number in stopping:
            signal.signal(number, signal.SIG_IGN)
        end(server, throw_away=len(locks) == 1)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
