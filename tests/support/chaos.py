"""Everything that goes wrong around a queue, one after the other, while it works: see test_chaos.py.

A server of its own, workers by the command line, each with a network of its own, producers, and the faults.

python -m tests.support.chaos DSN SEED FILE     a producer
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TextIO

import psycopg
from psycopg.conninfo import make_conninfo

import fairq
from fairq import embedded
from tests.support.moves import set_shards
from tests.support.proxy import Network, proxy
from tests.support.server import private_server
from tests.worker.running import Running, work_process

Conn = psycopg.Connection[Any]

WORKERS = 3
LEASE_SECONDS = 60.0  # what a worker has who is told nothing
MOST = {"capped": 3, "key 1": 1, "key 2": 1}
GROUPS = ("plain 1", "plain 2", "plain 3", "capped")
KEYS = ("key 1", "key 2", None, None, None, None)
KINDS = ("works", "works", "awaits", "settles")
# Few places for connections, as a server has that is too small; the data fits in memory.
SETTINGS: dict[str, embedded.Setting] = {
    "max_connections": 30,
    "max_wal_size": "64MB",
    "min_wal_size": "32MB",
}
DISK_BYTES = 512 * 2**20

# What producers and handlers write down.
WITNESSES = """
create table asked (task_id bigint primary key);
create table runs (
  token uuid primary key, task_id bigint not null, attempt integer not null, kind text not null,
  worker_id bigint not null, pid integer not null, group_key text not null, key text,
  began_at timestamptz not null, ended_at timestamptz
);
create table effects (task_id bigint not null, attempt integer not null);
grant insert on asked to fairq_enqueue;
grant insert, select, update on runs, effects to fairq_work;
"""


# --- Producers ------------------------------------------------------------------------------------


def produce(dsn: str, random: Random, note: Callable[..., None]) -> None:
    """Transactions of one to five tasks, noted in the same transaction, and in a file once committed."""
    while True:
        try:
            with psycopg.connect(dsn, application_name="producer", connect_timeout=5) as conn:
                while True:
                    ids = _some(conn, random)
                    conn.commit()
                    note("told", ids=ids)
                    time.sleep(random.random() * 0.2)
        except Exception as exc:
            if not fairq.is_retryable(exc):
                note("error", message=f"{type(exc).__name__}: {exc}")
            time.sleep(0.2)


def _some(conn: Conn, random: Random) -> list[int]:
    items = []
    for _ in range(random.choice([1, 1, 2, 5])):
        key = random.choice(KEYS)
        seconds = random.choice([0.03] * 200 + [5.0])
        payload = {"key": key, "seconds": seconds}
        items.append(fairq.Item(random.choice(GROUPS), payload, concurrency_key=key))
    ids = fairq.enqueue_many(conn, items, kind=random.choice(KINDS))
    conn.execute("insert into asked select unnest(%s::bigint[])", [ids])
    return ids


def main(dsn: str, seed: str, file: TextIO) -> None:
    def note(what: str, **said: Any) -> None:
        file.write(json.dumps({"what": what, "at": time.time(), **said}) + "\n")
        file.flush()

    produce(dsn, Random(seed), note)


# --- The world ------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A fault, and when it was over."""

    what: str
    began: float
    undone: float = 0.0
    pids: list[int] = field(default_factory=list)
    """The workers that existed when it was over."""
    stranded: list[int] = field(default_factory=list)
    """Tasks of workers that can no longer end them."""


class World:
    def __init__(
        self,
        server: embedded.Server,
        folder: Path,
        pause: float,
        disk: Path | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.server = server
        self.disk = disk
        self.pause = pause
        self.folder = folder
        self.stack = stack
        self.faults: list[Fault] = []
        dsn = server.dsn("fairq")
        self.networks = [
            stack.enter_context(proxy(make_conninfo(dsn, user="chaos_worker"))) for _ in range(WORKERS)
        ]
        self.offices = stack.enter_context(proxy(make_conninfo(dsn, user="chaos_producer")))
        self.workers: list[Running] = []
        self.dead: list[Running] = []
        for number in range(WORKERS):
            self.workers.append(self._worker(number))
        self.producers = [self._producer(number) for number in range(2)]

    def _worker(self, number: int) -> Running:
        return self.stack.enter_context(work_process(self.networks[number].dsn, app="tests.chaos.handlers"))

    def _producer(self, number: int) -> subprocess.Popen[bytes]:
        file = self.folder / f"producer-{number}.jsonl"
        command = [sys.executable, "-m", "tests.support.chaos", self.offices.dsn, str(number), str(file)]
        process = subprocess.Popen(command)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def observer(self) -> Conn:
        return psycopg.connect(self.server.dsn("fairq"), autocommit=True, connect_timeout=5)

    def held_by(self, pid: int) -> list[int]:
        query = """
            select h.id from fairq.held h join fairq.workers w using (shard_no, worker_id)
            where w.name like %s"""
        try:
            with self.observer() as conn:
                return [row[0] for row in conn.execute(query, [f"%:{pid}"]).fetchall()]
        except psycopg.OperationalError:  # another fault is under way
            return []

    def _halt(self, worker: Running) -> None:
        """Stop a worker while it holds tasks."""
        fault = self.faults[-1]
        for _ in range(20):
            worker.send(signal.SIGSTOP)
            fault.stranded = self.held_by(worker.pid)
            if fault.stranded:
                return
            worker.send(signal.SIGCONT)
            time.sleep(0.02)
        worker.send(signal.SIGSTOP)

    # --- Faults: each is a generator that begins it, yields how long it lasts, and undoes it. The table of
    # what they cost names them by what they say they are.

    def kill(self, random: Random) -> Iterator[float]:
        """a worker is killed, another started"""
        number = random.randrange(WORKERS)
        worker = self.workers[number]
        self._halt(worker)
        worker.send(signal.SIGKILL)
        worker.process.wait()
        self.dead.append(worker)
        yield 0
        self.workers[number] = self._worker(number)

    def stop(self, random: Random) -> Iterator[float]:
        """a worker stands still for longer than its lease"""
        worker = random.choice(self.workers)
        self._halt(worker)
        yield LEASE_SECONDS + 5
        worker.send(signal.SIGCONT)

    def crash(self, random: Random) -> Iterator[float]:
        """the server crashes and comes back"""
        self.server.stop("immediate")
        yield random.choice([0, 1])
        self.server.start()

    def outage(self, random: Random) -> Iterator[float]:
        """the server is gone for 10 s"""
        self.server.stop("immediate")
        yield 10
        self.server.start()

    def terminate(self, random: Random) -> Iterator[float]:
        """all sessions are terminated"""
        with self.observer() as conn:
            conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename like 'chaos%'")
        yield 0

    def cut(self, random: Random) -> Iterator[float]:
        """all connections break; new ones are refused"""
        yield from self._networks([*self.networks, self.offices], Network.cut, random.choice([0, self.pause]))

    def freeze(self, random: Random) -> Iterator[float]:
        """connections are taken, and nothing arrives"""
        yield from self._networks([*self.networks, self.offices], Network.freeze, random.choice([5, 15]))

    def part(self, random: Random) -> Iterator[float]:
        """one worker cannot reach the server, for longer than its lease"""
        number = random.randrange(WORKERS)
        way = random.choice([Network.cut, Network.freeze])
        stranded = self.held_by(self.workers[number].pid)
        for seconds in self._networks([self.networks[number]], way, LEASE_SECONDS + 5):
            self.faults[-1].stranded = stranded
            yield seconds

    def _networks(
        self, networks: list[Network], way: Callable[[Network], None], seconds: float
    ) -> Iterator[float]:
        for network in networks:
            way(network)
        yield seconds
        for network in networks:
            network.mend()

    def crowd(self, random: Random) -> Iterator[float]:
        """a client takes all connections, the others lose theirs"""
        taken: list[Conn] = []
        dsn = make_conninfo(self.server.dsn("fairq"), user="chaos_crowd")
        with self.observer() as conn:
            try:
                deadline = time.monotonic() + 2
                while time.monotonic() < deadline:
                    conn.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where usename like 'chaos%' and usename <> 'chaos_crowd'"
                    )
                    with contextlib.suppress(psycopg.OperationalError):
                        while True:
                            taken.append(psycopg.connect(dsn))
                yield self.pause
            finally:
                for one in taken:
                    one.close()

    def full(self, random: Random) -> Iterator[float]:
        """the disk is full; the server may not survive that"""
        assert self.disk is not None
        ballast = self.disk / "ballast"
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 2**16)
        yield self.pause
        ballast.unlink()
        if not self.server.is_running():
            self.server.start()

    def do(self, what: str, random: Random, watch: Callable[[float], None]) -> None:
        """Cause that fault; calls `watch` with the seconds that it lasts."""
        fault = Fault(what, time.time())
        self.faults.append(fault)
        for seconds in getattr(self, what)(random):
            watch(seconds)
        fault.undone = time.time()
        fault.pids = [worker.pid for worker in self.workers]


@contextlib.contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system that can be filled, if we may mount one."""
    with tempfile.TemporaryDirectory(prefix="fairq-disk-") as name:
        options = f"size={DISK_BYTES},mode=755"
        mount = ["mount", "-t", "tmpfs", "-o", options, "fairq-disk", name]
        try:
            mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            mounted = False
        try:
            yield Path(name) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", name], check=True)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Clean up workers, server and file system when the run is terminated."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def world(folder: Path, pause: float) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_in_order())
        disk = stack.enter_context(small_disk())
        server = stack.enter_context(private_server(SETTINGS, data_dir=disk / "data" if disk else None))
        with psycopg.connect(server.dsn("fairq"), autocommit=True) as conn:
            for role, group in (
                ("worker", "fairq_work"),
                ("producer", "fairq_enqueue"),
                ("crowd", "pg_monitor"),
            ):
                conn.execute(f"create role chaos_{role} login in role {group}".encode())
            conn.execute(WITNESSES.encode())
            # A key holds within a shard.
            set_shards(conn, 1)
            conn.execute("""select fairq.configure_group('default', 'capped', '{"max_running": 3}')""")
        yield World(server, folder, pause, disk, stack)


if __name__ == "__main__":
    with open(sys.argv[3], "a") as notes:
        main(sys.argv[1], sys.argv[2], notes)
