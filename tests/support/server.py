"""Which PostgreSQL a test run uses: FAIRQ_TEST_DSN, else Docker when a daemon answers, else an embedded one.

FAIRQ_TEST_BACKEND=dsn|docker|embedded forces one. One server serves the whole run, all workers of
pytest-xdist together.
"""

import contextlib
import functools
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from fairq import embedded
from tests.support import cluster, managed
from tests.support.cluster import ON_CITUS
from tests.support.database import MANAGED
from tests.support.schema import load_schema

# A lost race shows at once, many connections fit, and two-phase commit can be tested.
SETTINGS: dict[str, embedded.Setting] = {
    "max_connections": 200,
    "max_prepared_transactions": 50,
    "deadlock_timeout": "100ms",
    "log_lock_waits": True,
}
MEMORY = "/dev/shm"
MEMORY_BYTES = 4 * 2**30
BACKENDS = ("dsn", "docker", "embedded")
_USERS_DOCKER_SOCKET = str(Path.home() / ".docker/run/docker.sock")
DOCKER_IMAGE = "postgres:17"


@dataclass(frozen=True)
class Choice:
    """The kind of server, and why it was chosen."""

    backend: str
    reason: str


@dataclass(frozen=True)
class TestServer:
    """A running server, for every process of the test run."""

    __test__ = False

    admin_dsn: str
    description: str
    run_id: str
    template: str = ""
    # What went wrong while the template was loaded: shown by each test that needs it, and by no other.
    template_error: str = ""
    log_file: str = ""
    # `make test-managed`: who owns the databases, and two ways to them.
    owner: str = ""
    given: str = ""
    pooled: str = ""

    def dsn(self, dbname: str) -> str:
        return with_database((self.given if managed.direct else self.pooled) or self.admin_dsn, dbname)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def with_database(dsn: str, dbname: str) -> str:
    """The same DSN for another database; both notations that libpq knows."""
    if "://" in dsn:
        return urlunsplit(urlsplit(dsn)._replace(path=f"/{dbname}"))
    return psycopg.conninfo.make_conninfo(dsn, dbname=dbname)


def keep_temporary_files_in_memory(env: MutableMapping[str, str]) -> Path | None:
    """Servers start in TMPDIR, and each test's database is 460 new files: on a disk, a run waits for those.

    On ext4 without a journal most of all: a new file is looked for past every one deleted in the last minute.
    A TMPDIR that is set stays, and so does the disk where memory is short or programs may not run from it:
    then it returns none.
    """
    if "TMPDIR" in env or not os.access(MEMORY, os.W_OK | os.X_OK):
        return None
    memory = os.statvfs(MEMORY)
    executable = not memory.f_flag & getattr(os, "ST_NOEXEC", 0)
    if executable and min(memory.f_bavail * memory.f_frsize, _available_memory()) >= MEMORY_BYTES:
        env["TMPDIR"] = tempfile.tempdir = MEMORY
        return Path(MEMORY)
    return None


def _available_memory() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def choose(env: Mapping[str, str], docker_answers: Callable[[], bool]) -> Choice:
    forced = env.get("FAIRQ_TEST_BACKEND", "")
    if forced:
        if forced not in BACKENDS:
            raise ValueError(f"FAIRQ_TEST_BACKEND is {forced!r}; it must be one of {', '.join(BACKENDS)}.")
        if forced == "dsn" and not env.get("FAIRQ_TEST_DSN"):
            raise ValueError("FAIRQ_TEST_BACKEND is dsn, but FAIRQ_TEST_DSN is not set.")
        return Choice(forced, "FAIRQ_TEST_BACKEND says so")
    if env.get("FAIRQ_TEST_DSN"):
        return Choice("dsn", "FAIRQ_TEST_DSN is set")
    if docker_answers():
        return Choice("docker", "a Docker daemon answers")
    return Choice("embedded", "no FAIRQ_TEST_DSN, and no Docker daemon answers")


def docker_answers() -> bool:
    """Ask the daemon. Imports the client library only if there may be one."""
    host = os.environ.get("DOCKER_HOST", "")
    sockets = [host.removeprefix("unix://")] if host else ["/var/run/docker.sock", _USERS_DOCKER_SOCKET]
    if (not host or host.startswith("unix://")) and not any(map(_accepts, sockets)):
        return False
    import docker

    # A given version spares the constructor its own request, whose connection it would not close on failure.
    try:
        client = docker.from_env(version="1.24", timeout=3)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


def _accepts(path: str) -> bool:
    # The client library leaks its socket where nobody listens.
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running_server(choice: Choice) -> Iterator[TestServer]:
    """Start (or find) the server, make the template database, and remove both at the end."""
    start = {"dsn": _given, "docker": _in_docker, "embedded": _embedded}[choice.backend]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start())
        if MANAGED:
            fields = stack.enter_context(managed.service(server.admin_dsn, server.run_id))
            server = replace(server, **fields, description=f"{server.description}, behind PgBouncer")
        yield stack.enter_context(_with_template(server))


@contextlib.contextmanager
def _given() -> Iterator[TestServer]:
    dsn = os.environ["FAIRQ_TEST_DSN"]
    yield TestServer(dsn, f"FAIRQ_TEST_DSN, {_version(dsn)}", _run_id())


@contextlib.contextmanager
def _in_docker() -> Iterator[TestServer]:
    from testcontainers.postgres import PostgresContainer

    command = ["postgres", "-c", "fsync=off", "-c", "full_page_writes=off"]
    for name, value in SETTINGS.items():
        command += ["-c", f"{name}={'on' if value is True else value}"]
    image = os.environ.get("FAIRQ_TEST_IMAGE", DOCKER_IMAGE)
    with PostgresContainer(image, driver=None).with_command(command) as container:
        dsn = container.get_connection_url()
        yield TestServer(dsn, f"Docker, {image}, {_version(dsn)}", _run_id())


@contextlib.contextmanager
def _embedded() -> Iterator[TestServer]:
    with embedded.start(settings=SETTINGS | (cluster.CITUS if ON_CITUS else {})) as server:
        if ON_CITUS:
            cluster.say_where(server)
        description = f"embedded from {server.binaries.source}, PostgreSQL {server.binaries.version}"
        yield TestServer(server.dsn(), description, _run_id(), log_file=str(server.log_file))


def _run_id() -> str:
    return uuid.uuid4().hex[:8]


def _version(dsn: str) -> str:
    with psycopg.connect(dsn) as conn:
        return f"PostgreSQL {conn.info.parameter_status('server_version')}"


@contextlib.contextmanager
def _with_template(server: TestServer) -> Iterator[TestServer]:
    name = f"fairq_test_{server.run_id}_template"
    create_database(server, name)
    problem = ""
    try:
        with psycopg.connect(with_database(server.given or server.admin_dsn, name)) as conn:
            load_schema(conn)
        if ON_CITUS:
            cluster.alone(server.dsn(name))
    except psycopg.Error as exc:
        problem = f"Loading sql/ failed: {exc}"
    yield replace(server, template=name, template_error=problem)
    drop_database(server, name)


@functools.cache
def _admin(dsn: str) -> psycopg.Connection[Any]:
    """One session for all databases that this process makes; connecting each time is a sixth of the cost."""
    conn = psycopg.connect(dsn, autocommit=True)
    conn.execute("set statement_timeout = 0")  # whatever the test that connects first asks for by PGOPTIONS
    _closing.callback(conn.close)
    return conn


_closing = contextlib.ExitStack()


def close_all() -> None:
    """What this process keeps from one test to the next."""
    _closing.close()
    _admin.cache_clear()
    _loaded.cache_clear()


def create_database(server: TestServer, name: str, template: str = "template1") -> None:
    # Copying files takes 10 ms; writing each page to the log as well, 8 to 190 ms.
    statement = sql.SQL("create database {} owner {} template {} strategy file_copy")
    owner = sql.Identifier(server.owner) if server.owner else sql.SQL("default")
    _admin(server.admin_dsn).execute(statement.format(sql.Identifier(name), owner, sql.Identifier(template)))


def drop_database(server: TestServer, name: str) -> None:
    statement = sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
    for _ in range(9 * ON_CITUS):  # its daemon may have come back while it was being sent away
        with contextlib.suppress(psycopg.errors.ObjectInUse):
            _admin(server.admin_dsn).execute(statement)
            return
    _admin(server.admin_dsn).execute(statement)


_leaving: list[str] = []


def drop_soon(server: TestServer, name: str) -> None:
    """Drop it when the next one is. Where a session to it is just about to end, PostgreSQL waits 100 ms."""
    drop_rest(server)
    _leaving.append(name)


def drop_rest(server: TestServer) -> None:
    while _leaving:
        drop_database(server, _leaving.pop())


@contextlib.contextmanager
def private_server(
    settings: Mapping[str, embedded.Setting] | None = None,
    *,
    load: bool = True,
    data_dir: Path | None = None,
) -> Iterator[embedded.Server]:
    """An embedded server for a test that stops, kills or configures it; its database `fairq` holds `sql/`."""
    kind = _Loaded if load else embedded.Server
    with kind(data_dir, {**SETTINGS, **(settings or {})}) as server:
        server.start()
        if not load:
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute("create database fairq")
        yield server


class _Loaded(embedded.Server):
    """One that begins with a copy of such data."""

    def _initialize(self) -> None:
        subprocess.run(["cp", "-a", _loaded(self.binaries.bin_dir), self.data_dir], check=True)


@functools.cache
def _loaded(bin_dir: Path) -> Path:
    """What a server has that was stopped, made by these programs: a copy takes a tenth of the time."""
    folder = _closing.enter_context(tempfile.TemporaryDirectory(prefix="fairq-", ignore_cleanup_errors=True))
    with private_server(load=False) as server:
        with psycopg.connect(server.dsn("fairq")) as conn:
            load_schema(conn)
        server.stop()
        subprocess.run(["cp", "-a", server.data_dir / "pgdata", folder], check=True)
    return Path(folder, "pgdata")
