"""A coordinator of Citus and its workers, on this machine. `make test-citus` has the programs."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairq import embedded, install

Conn = psycopg.Connection[Any]
NAME = "fairq"
# Of a running cluster: the coordinator, and two workers.
NODES = (0, 1, 2)
# `make test-citus`: each database of a test is a cluster of one node.
ON_CITUS = "FAIRQ_TEST_CITUS" in os.environ
on_citus = pytest.mark.skipif(not ON_CITUS, reason="make test-citus runs it")
# What cannot hold there, by the beginning of its name, and why.
NO_NOTIFY = "nobody announces tasks there: a transaction that notifies cannot commit in two phases"
NO_DETOUR = "workers go where Citus has the node: to a session, and past what a test puts in between"
NAMED = "a worker says of which node it speaks"
OTHER_WORDS = "the command line says that nobody announces tasks, or that a cluster is not taken apart"
LEFT_OUT = {
    "tests/api/test_results.py::test_a_look_costs_no_scan": "its text passes the question on",
    "tests/api/test_results.py::test_a_long_wait": NO_NOTIFY,
    "tests/api/test_results.py::test_a_notification": NO_NOTIFY,
    "tests/api/test_results.py::test_any_end_is_announced": NO_NOTIFY,
    "tests/api/test_results.py::test_ends_that_nobody_watches": NO_NOTIFY,
    "tests/cli/test_command_line.py::test_a_downgrade": OTHER_WORDS,
    "tests/cli/test_command_line.py::test_what_was_built_on_fairq": OTHER_WORDS,
    "tests/cli/test_command_line.py::test_a_newer_database_has_its_own_exit_code[--to=base]": OTHER_WORDS,
    "tests/cli/test_commands_queues.py::test_queues_lists_every_setting": OTHER_WORDS,
    "tests/cli/test_commands_queues.py::test_set_changes_only": OTHER_WORDS,
    "tests/cli/test_commands_reference.py::test_commands_print_what_the_page_shows[cli-q": OTHER_WORDS,
    "tests/cli/test_commands_reference.py::test_commands_print_what_the_page_shows[create-q": OTHER_WORDS,
    "tests/races/test_finish_tasks.py::test_two_finishes_and_a_start": "rows get other places there",
    "tests/races/test_moving_groups.py::test_who_watches": NO_NOTIFY,
    "tests/races/test_promote_overflow.py::test_a_prepared_transaction": "Citus refuses them to applications",
    "tests/sql/test_announcements.py::test_the_first_is": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_key_or_a_cluster": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_key_that_comes_free": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_key_wakes": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_place_of_the_cluster": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_slots_that_are_kept_no_longer": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_worker_that_retires": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_upkeep_wakes": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_call_for_many": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_scheduled_tasks": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_what_rolls_back": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_an_open_transaction": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_older_snapshots": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_a_promotion_by_the_creator": NO_NOTIFY,
    "tests/sql/test_announcements.py::test_places_that_come_free": NO_NOTIFY,
    "tests/policies/test_rates.py::test_the_rate_of_a_whole_queue_is_seen_and_reset": NO_NOTIFY,
    "tests/policies/test_settings.py::test_a_null_takes_a_setting_away": NO_NOTIFY,
    "tests/worker/test_docs.py::test_the_first_example": NAMED,
    "tests/worker/test_outages.py::test_a_dead_listener": NO_NOTIFY,
    "tests/worker/test_outages.py::test_a_worker_in_a_black_hole": NO_DETOUR,
    "tests/worker/test_outages.py::test_handlers_that_use_all_of_the_grace": NO_DETOUR,
    "tests/worker/test_outages.py::test_the_first_that_gets_through": NO_DETOUR,
    "tests/worker/test_outages.py::test_a_wait_in_vain": NO_DETOUR,
    "tests/worker/test_pooler.py::test_a_way_around": NO_DETOUR,
    "tests/worker/test_pooler.py::test_a_worker_behind_a_pooler": NO_DETOUR,
    "tests/worker/test_processes.py::test_it_says_its_limits": NO_NOTIFY,
    "tests/worker/test_processes.py::test_no_password": NO_NOTIFY,
    "tests/worker/test_waking.py::test_a_notice_wakes": NO_NOTIFY,
    "tests/worker/test_waking.py::test_a_burst_of_notices": NO_NOTIFY,
    "tests/worker/test_life.py::test_a_worker_has_three_connections_whatever_it_runs[1-options0": NO_NOTIFY,
    "tests/worker/test_life.py::test_a_worker_has_three_connections_whatever_it_runs[200-options0": NO_NOTIFY,
    "tests/worker/test_life.py::test_statements_are_prepared_where_there_is_a_session[options1": NO_DETOUR,
    "tests/worker/test_life.py::test_statements_are_prepared_where_there_is_a_session[options2": NO_DETOUR,
    "tests/worker/test_life.py::test_a_file_for_probes_is_fresh": NO_DETOUR,
    "tests/sql/test_attacks.py::test_a_session_does_not_move_the_clock_of_the_engine[fairq_enq": NO_NOTIFY,
    "tests/sql/test_attacks.py::test_asking_again_and_again_piles_nothing_up[fairq_enqueue": NO_NOTIFY,
    "tests/sql/test_explain_task.py::test_explaining_changes_nothing": "the question travels as a row",
    "tests/sql/test_promote_overflow.py::test_prepared_transactions": "Citus refuses them to applications",
    "tests/sql/test_schedules.py::test_nothing_due_costs": "Citus refuses explain analyze behind a call",
}
CITUS: dict[str, embedded.Setting] = {
    "max_connections": 200,
    # Each database has a daemon of Citus.
    "max_worker_processes": 100,
    "max_prepared_transactions": 50,
    "deadlock_timeout": "100ms",
    "shared_preload_libraries": "citus",
    "wal_level": "logical",
    # Tests look into private functions, which leave it on.
    "jit": False,
    "citus.enable_statistics_collection": False,
    "citus.shard_count": 8,
}


def say_where(server: embedded.Server) -> None:
    """Tell Citus the node's own address, because it does not listen on localhost."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        setting = sql.SQL("alter system set citus.local_hostname = {}")
        conn.execute(setting.format(sql.Literal(str(server.socket_dir))))
        conn.execute("select pg_reload_conf()")


def alone(dsn: str) -> None:
    """Make a database with fairq a cluster of one node, whose calls go the same way to itself."""
    place = conninfo_to_dict(dsn)
    host, port = str(place["host"]), int(str(place["port"]))
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create extension citus")
        conn.execute("select citus_set_coordinator_host(%s, %s)", [host, port])
        conn.execute("select citus_set_node_property(%s, %s, 'shouldhaveshards', true)", [host, port])
    install.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        # The daemon of Citus: nobody can copy a database that somebody is connected to.
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )


@dataclass
class Cluster:
    """A cluster; node 0 is the coordinator. Its connections are closed with it."""

    stack: contextlib.ExitStack
    servers: list[embedded.Server] = field(default_factory=list)

    def start(self, count: int = 1) -> None:
        """Start more servers, each with an empty database that has the extension."""
        for _ in range(count):
            server = self.stack.enter_context(embedded.start(settings=CITUS))
            say_where(server)
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute(f"create database {NAME}".encode())
            with psycopg.connect(server.dsn(NAME), autocommit=True) as conn:
                conn.execute("create extension citus")
            self.servers.append(server)

    def add(self, *numbers: int) -> None:
        """Add them as nodes."""
        with self.connect(0) as conn:
            conn.execute("select citus_set_coordinator_host(%s, %s)", self.place(0))
            for number in numbers:
                conn.execute("select citus_add_node(%s, %s)", self.place(number))

    def place(self, number: int) -> tuple[str, int]:
        """Host and port; the host is the folder of its socket."""
        return str(self.servers[number].socket_dir), embedded.SOCKET_PORT

    def dsn(self, number: int, **changes: Any) -> str:
        return make_conninfo(self.servers[number].dsn(NAME), **changes)

    def connect(self, number: int, **changes: Any) -> Conn:
        return self.stack.enter_context(psycopg.connect(self.dsn(number, **changes), autocommit=True))

    def migrate(self) -> install.Migration:
        return install.migrate(self.dsn(0))

    def everywhere(self, statement: str) -> None:
        """Run it on each node locally."""
        for number in range(len(self.servers)):
            with psycopg.connect(self.dsn(number), autocommit=True) as conn:
                conn.execute("set citus.enable_ddl_propagation = off")
                conn.execute(statement.encode())


@contextlib.contextmanager
def running_cluster(workers: int = 2) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.start(1 + workers)
        cluster.add(*range(1, 1 + workers))
        cluster.migrate()
        yield cluster


def group_of(conn: Conn, node: int) -> str:
    """A group whose home is that node."""
    return groups_of(conn, node, 1)[0]


def groups_of(conn: Conn, node: int, count: int) -> list[str]:
    rows = conn.execute(
        "select g from (select 'g' || n as g, n from generate_series(1, 10000) n) s "
        "where fairq_citus.node_of(fairq_citus.slot(g)) = %s order by n limit %s",
        [node, count],
    )
    return [group for (group,) in rows.fetchall()]
