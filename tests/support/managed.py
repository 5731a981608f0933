"""`make test-managed`: as an ordinary role that owns one database, behind PgBouncer in transaction mode.

What RDS, Aurora, Neon or Supabase give: no superuser and no createrole, so an administrator has made fairq's
roles; sessions that belong to nobody; a LISTEN that hears nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.support.database import MANAGED, PASSWORD, ROLES
from tests.support.pooler import pooler

# What cannot run, by the beginning of its name, and why.
LEFT_OUT = {
    "tests/sql/test_finish_tasks.py::test_payloads_of_some_kilobytes": "reads the toast of a table",
    "tests/sql/test_publications.py::test_every_table_may_be_published": "only superusers may publish so",
    "tests/sql/test_roles.py::test_nothing_is_granted_to_public": "makes a role",
    "tests/sql/test_roles.py::test_new_partitions_are_not_for_public_either": "makes a role",
    "tests/sql/test_schedules.py::test_a_schedule_has_the_rights_of_who_made_it": "makes a role",
    "tests/api/test_examples.py": "makes databases",
    "tests/api/test_finish_in.py::test_two_who_end": "looks at who waits for whom",
    "tests/api/test_pooler.py": "has a PgBouncer of its own",
    "tests/api/test_results.py::test_a_role_that_may_not_watch_polls": "makes a role",
    "tests/api/test_rights.py::test_a_role_without_rights": "has a role that not everybody has",
    "tests/races/test_moving_storm.py": "grants pg_signal_backend",
    "tests/races/test_storm.py": "grants pg_signal_backend",
    "tests/worker/test_pooler.py": "has a PgBouncer of its own",
    "tests/worker/test_stopping.py::test_arun_cancelled_twice": "looks at what others' sessions wait for",
    "tests/worker/test_life.py::test_statements_are_prepared": "ends others' sessions",
    "tests/worker/test_outages.py": "has a server of its own, or stops others' sessions",
}
# What is about sessions: as the same role, on connections of its own.
DIRECT = {
    "tests/api/test_results.py": "listens",
    "tests/policies/test_adversaries.py::test_a_storm": "prepares statements",
    "tests/policies/test_cost.py": "counts what its session calls",
    "tests/policies/test_found.py::test_a_key_under_a_held_snapshot": "counts what its session reads",
    "tests/policies/test_found.py::test_settings_that_come_between": "stops a session between two statements",
    "tests/policies/test_races.py": "a clock for each session",
    "tests/policies/test_users.py::test_a_group_without_users_runs": "counts what its session calls",
    "tests/races/test_finish_tasks.py::test_a_start_that_comes_late": "stops one between two statements",
    "tests/races/test_finish_tasks.py::test_one_maintenance": "looks at who waits for whom",
    "tests/races/test_finish_tasks.py::test_two_finishes_and_a_start": "stops one between two statements",
    "tests/races/test_moving_groups.py": "stops a session between two statements",
    "tests/races/test_pop_tasks.py::test_eight_poppers_at_once": "prepares statements",
    "tests/races/test_stops.py": "stops a session between two statements",
    "tests/races/test_transactions.py": "prepares statements",
    "tests/sql/test_announcements.py": "listens",
    "tests/sql/test_ledger.py::test_what_commits_late": "a clock for each session",
    "tests/sql/test_retry_task.py::test_an_open_transaction_that_retries": "a clock for each session",
    "tests/worker/test_processes.py::test_it_says_its_limits": "listens",
    "tests/worker/test_processes.py::test_no_password_is": "listens",
    "tests/worker/test_waking.py::test_a_burst_of_notices": "listens",
    "tests/worker/test_life.py::test_a_worker_has_three": "counts sessions",
}
PATIENCE_SECONDS = 120

# Whether the test that runs now is one of DIRECT.
direct = False


def _impatient(*_: object) -> None:
    raise TimeoutError("the test takes too long")


def begin(item: pytest.Item) -> None:
    global direct
    direct = item.nodeid.startswith(tuple(DIRECT))
    if MANAGED:  # rather than wait for a session that somebody else has
        signal.signal(signal.SIGALRM, _impatient)
        signal.alarm(PATIENCE_SECONDS)


@contextlib.contextmanager
def service(admin_dsn: str, run_id: str) -> Iterator[dict[str, str]]:
    """What a provider offers, as fields of TestServer: a role, a direct way, and one through PgBouncer."""
    owner = f"fairq_test_{run_id}_owner"
    name = sql.Identifier(owner)
    workers = ["main", *(f"gw{number}" for number in range(16))]
    logins = [
        f"fairq_test_{run_id}_{worker}_{n}_{part}" for worker in workers for n in (0, 1) for part in ROLES
    ]
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        for part in ROLES:
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                admin.execute(f"create role fairq_{part} nologin".encode())
        admin.execute(sql.SQL("create role {} login password {}").format(name, PASSWORD))
        roles = ", ".join(f"fairq_{part}" for part in ROLES)
        admin.execute(sql.SQL(f"grant {roles} to {{}}").format(name))
        # What tests set to look closer.
        admin.execute(sql.SQL("grant set on parameter deadlock_timeout, track_functions to {}").format(name))
    given = make_conninfo(admin_dsn, user=owner, password=PASSWORD)
    os.environ["FAIRQ_TEST_ADMIN"] = admin_dsn
    with pooler(given, connections=60, users=[owner, *logins]) as pooled:
        yield {"owner": owner, "given": given, "pooled": pooled}
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("drop owned by {}").format(name))
        admin.execute(sql.SQL("drop role {}").format(name))
