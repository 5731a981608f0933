"""A standby of a test's server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairq import embedded
from tests.support.sessions import wait_until

NAME = "standby"


@contextlib.contextmanager
def standby(primary: embedded.Server) -> Iterator[embedded.Server]:
    """A standby, which is asynchronous until `wait_for_standby`."""
    backup = primary.binaries.bin_dir / "pg_basebackup"
    if not backup.exists():
        pytest.skip(f"there is no pg_basebackup beside the server's programs in {primary.binaries.bin_dir}")
    with tempfile.TemporaryDirectory(prefix="fairq-standby-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)
        home = Path(folder) / "home"
        home.mkdir()
        data = home / "pgdata"
        copy = [str(backup), "--pgdata", str(data), "--dbname", primary.dsn(), "--write-recovery-conf"]
        subprocess.run([*copy, "--checkpoint=fast", "--no-sync"], check=True, capture_output=True)
        (home / "password").write_text("a standby has that of its primary")
        owner = (primary.data_dir / "pgdata").stat()
        for path in (data, *data.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
        settings = {**primary.settings, "cluster_name": NAME, "fsync": False}
        with embedded.start(home, settings=settings) as server:
            wait_until(lambda: follows(primary), "the standby follows")
            yield server


def follows(primary: embedded.Server) -> bool:
    with psycopg.connect(primary.dsn()) as conn:
        query = "select from pg_stat_replication where application_name = %s and state = 'streaming'"
        return conn.execute(query, [NAME]).fetchone() is not None


def wait_for_standby(primary: embedded.Server) -> None:
    """From now on, acknowledge commits only when the standby has them."""
    with psycopg.connect(primary.dsn(), autocommit=True) as conn:
        conn.execute(f"alter system set synchronous_standby_names = '{NAME}'".encode())
        conn.execute("select pg_reload_conf()")
        query = "select from pg_stat_replication where sync_state = 'sync'"
        wait_until(lambda: conn.execute(query).fetchone() is not None, "commits wait for the standby")


def stop_following(server: embedded.Server) -> None:
    """From now on, the primary's commits do not arrive."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("alter system set primary_conninfo = ''")
        conn.execute("select pg_reload_conf()")
        query = "select from pg_stat_wal_receiver"
        wait_until(lambda: conn.execute(query).fetchone() is None, "the receiver has ended")


def promote(server: embedded.Server) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("select pg_promote()")


def dsn_of_both(first: embedded.Server, second: embedded.Server) -> str:
    """The DSN that leads to the one that accepts writes."""
    parts = [conninfo_to_dict(server.dsn("fairq")) for server in (first, second)]
    hosts, ports = (",".join(str(part[name]) for part in parts) for name in ("host", "port"))
    return make_conninfo(first.dsn("fairq"), host=hosts, port=ports, target_session_attrs="read-write")
