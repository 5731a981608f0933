"""Workers started by `manage.py fairq work`, with what users expect from other backends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.conf import settings
from django.db import connection

from fairq.contrib.django import exceptions as ends
from fairq.contrib.django import testing
from shop import tasks

Status: Any = import_module(settings.SPACE).TaskResultStatus
PATIENCE = 60.0
TERMINATE_THE_OTHERS = (
    "select count(pg_terminate_backend(a.pid)) from pg_stat_activity a where"
    " a.datname = current_database() and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'"
)


@contextlib.contextmanager
def worker(*words: str, **database: Any) -> Iterator["subprocess.Popen[str]"]:
    known = {**json.loads(os.environ["TEST_DATABASE"]), "NAME": connection.settings_dict["NAME"], **database}
    started = subprocess.Popen(
        [sys.executable, "manage.py", "fairq", "work", *words],
        env={**os.environ, "TEST_DATABASE": json.dumps(known)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def workers() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from fairq.worker_stats")
        return int(cursor.fetchone()[0])


def is_(result: Any, *statuses: Any) -> bool:
    result.refresh()
    return result.status in statuses


class Workers(testing.TransactionTestCase):
    def test_lost_connections_odd_ends_and_one_interrupt(self) -> None:
        """A worker that keeps its connections loses all of them, again and again, and no task notices. What
        a task raises ends the task. Ctrl-C lets the running one end.
        """
        with worker("-c", "2", CONN_MAX_AGE=None) as running:
            for _ in range(3):
                results = [tasks.backend_pid.enqueue() for _ in range(6)] + [tasks.order_later.enqueue("x")]
                for result in results:
                    until(lambda result=result: is_(result, Status.SUCCESSFUL, Status.FAILED))
                    self.assertEqual((result.errors, result.attempts), ([], 1))
                with connection.cursor() as cursor:
                    cursor.execute(TERMINATE_THE_OTHERS)
                    self.assertGreaterEqual(cursor.fetchone()[0], 2)
            for odd, why in ((tasks.exits, SystemExit), (tasks.interrupts, KeyboardInterrupt)):
                result = odd.enqueue()
                until(lambda result=result: is_(result, Status.FAILED))
                self.assertEqual(result.errors[0].exception_class, why)
            last = tasks.lazily.enqueue(0.5)
            until(lambda: is_(last, Status.RUNNING))
            self.assertEqual(last.attempts, 1)
            running.send_signal(signal.SIGINT)
            self.assertEqual(running.wait(PATIENCE), 0)
        self.assertTrue(is_(last, Status.SUCCESSFUL))

    @unittest.skipUnless(find_spec("psycopg_pool"), "psycopg_pool is not installed")
    def test_lost_connections_of_a_pool(self) -> None:
        """The pool has several, and hands them out as they are."""
        with worker("-c", "2", OPTIONS={"pool": {"min_size": 4}}):
            for _ in range(2):
                results = [tasks.backend_pid.enqueue() for _ in range(6)] + [tasks.order_later.enqueue("x")]
                for result in results:
                    until(lambda result=result: is_(result, Status.SUCCESSFUL, Status.FAILED))
                    self.assertEqual((result.errors, result.attempts), ([], 1))
                with connection.cursor() as cursor:
                    cursor.execute(TERMINATE_THE_OTHERS)
                    self.assertGreaterEqual(cursor.fetchone()[0], 4)

    def test_a_second_interrupt_does_not_wait(self) -> None:
        result = tasks.lazily.enqueue(PATIENCE)
        with worker() as running:
            until(lambda: is_(result, Status.RUNNING))
            running.send_signal(signal.SIGINT)
            time.sleep(0.3)
            self.assertIsNone(running.poll())
            self.assertTrue(is_(result, Status.RUNNING))
            running.send_signal(signal.SIGINT)
            self.assertEqual(running.wait(PATIENCE), 0)
        self.assertTrue(is_(result, Status.FAILED))
        self.assertEqual(result.errors[0].exception_class, ends.Interrupted)
        self.assertTrue(issubclass(result.errors[0].exception_class, SystemExit))

    def test_a_killed_worker_and_several_that_follow(self) -> None:
        killed = tasks.kills_its_worker.enqueue()
        with worker("--lease", "1") as running:
            self.assertEqual(running.wait(PATIENCE), -signal.SIGKILL)
        self.assertTrue(is_(killed, Status.RUNNING))
        with worker("-p", "2", "--lease", "1", "-c", "2") as running:
            until(lambda: is_(killed, Status.FAILED))
            until(lambda: workers() == 2)
            results = [tasks.lazily.enqueue(0.1) for _ in range(20)]
            for result in results:
                until(lambda result=result: is_(result, Status.SUCCESSFUL))
                self.assertEqual(result.attempts, 1)
            running.terminate()
            self.assertEqual(running.wait(PATIENCE), 0)
        self.assertEqual(killed.errors[0].exception_class, ends.WorkerLost)
        self.assertEqual(len({result.worker_ids[0] for result in results}), 2)
