"""PgBouncer in transaction mode in front of a test server, if it is installed."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.database import PASSWORD
from tests.support.sessions import wait_until

CONFIG = """
[databases]
* = {server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
{who}
pool_mode = transaction
default_pool_size = {connections}
max_client_conn = 1000
server_login_retry = 1
"""


def pgbouncer() -> str | None:
    """Find PgBouncer also in the system's folders, where Debian installs it."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def pooler(dsn: str, *, connections: int = 5, users: Sequence[str] = ()) -> Iterator[str]:
    """The DSN of the same database through PgBouncer, which has so many connections to the server.

    Everybody is the DSN's user there, or who they say, if that is one of these.
    """
    program = pgbouncer()
    if program is None:
        pytest.skip("PgBouncer is not installed; on Debian: apt-get install pgbouncer")
    parts = {key: value for key, value in conninfo_to_dict(dsn).items() if value}
    database = parts.pop("dbname")
    kept = ("host", "port") if users else ("host", "port", "user", "password")
    server = " ".join(f"{key}='{parts[key]}'" for key in kept if key in parts)
    with tempfile.TemporaryDirectory(prefix="fairq-pooler-") as folder:
        os.chmod(folder, 0o755)
        file = Path(folder) / "pgbouncer.ini"
        port = _free_port()
        who = "auth_type = any"
        if users:
            names = Path(folder) / "users"
            names.write_text("".join(f'"{name}" "{PASSWORD}"\n' for name in users))
            who = f"auth_type = trust\nauth_file = {names}\nignore_startup_parameters = options"
        file.write_text(CONFIG.format(server=server, port=port, connections=connections, who=who))
        # It refuses to run as root.
        user = "nobody" if os.getuid() == 0 else None
        process = subprocess.Popen(
            [program, "-q", str(file)], user=user, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        through = make_conninfo(
            host="127.0.0.1", port=port, user=parts.get("user", "postgres"), dbname=database
        )
        try:
            wait_until(lambda: _answers(through) or process.poll() is not None, "PgBouncer answers")
            yield through
        finally:
            process.kill()
            process.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(dsn: str) -> bool:
    try:
        with psycopg.connect(dsn, connect_timeout=2) as conn:
            conn.execute("select 1")
    except psycopg.OperationalError:
        return False
    return True
