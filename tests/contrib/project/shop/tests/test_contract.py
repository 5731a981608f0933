"""What Django's documentation promises of tasks, sentence by sentence: topics/tasks, ref/tasks, and the
README of the backport. Both name spaces run this.
"""

import asyncio
import datetime as dt
import json
import logging
import math
import os
import pickle
from importlib import import_module
from typing import Any
from unittest import skipIf

import django
from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.db import connection, connections, transaction
from django.test import TestCase, override_settings
from django.utils import timezone

import fairq
from fairq.contrib.django import exceptions as ends
from fairq.contrib.django import groups, testing
from shop import tasks
from shop.models import Order

space: Any = import_module(settings.SPACE)
exceptions: Any = import_module(f"{settings.SPACE}.exceptions")
signals: Any = import_module(f"{settings.SPACE}.signals")
# As the backport has released them.
InvalidTask: Any = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
InvalidTaskBackend: Any = (
    getattr(exceptions, "InvalidTaskBackend", None) or exceptions.InvalidTaskBackendError
)
Status = space.TaskResultStatus
TASKS = settings.TASKS


def run(result: Any) -> Any:
    """The same after all tasks have run."""
    testing.run_tasks(raise_errors=False)
    result.refresh()
    return result


class Definition(TestCase):
    def test_the_decorator_makes_tasks_with_and_without_arguments(self) -> None:
        self.assertIsInstance(tasks.add, space.base.Task)
        self.assertIsInstance(tasks.add_later, space.base.Task)
        self.assertEqual((tasks.mail.priority, tasks.mail.queue_name), (5, "mail"))

    def test_defaults(self) -> None:
        declared = tasks.add
        self.assertEqual(
            (declared.priority, declared.queue_name, declared.backend), (0, "default", "default")
        )
        self.assertEqual((declared.takes_context, declared.run_after), (False, None))

    def test_the_name_is_that_of_the_function(self) -> None:
        self.assertEqual(tasks.add.name, "add")

    def test_attributes_cannot_be_modified(self) -> None:
        with self.assertRaises(AttributeError):
            tasks.add.priority = 10

    def test_using_makes_another_task_and_leaves_the_first(self) -> None:
        at = timezone.now()
        changed = tasks.add.using(priority=10, queue_name="mail", backend="stubborn", run_after=at)
        self.assertEqual(
            (changed.priority, changed.queue_name, changed.backend, changed.run_after),
            (10, "mail", "stubborn", at),
        )
        self.assertEqual(tasks.add.priority, 0)

    def test_priorities_are_whole_numbers_from_minus_100_to_100(self) -> None:
        for good in (-100, 0, 100):
            tasks.add.using(priority=good)
        for bad in (-101, 101, 3.1):
            with self.assertRaises(InvalidTask):
                tasks.add.using(priority=bad)

    def test_functions_are_at_module_level(self) -> None:
        def inner() -> None: ...

        with self.assertRaises(InvalidTask):
            space.task(inner)

    def test_a_task_with_context_has_it_as_first_argument(self) -> None:
        with self.assertRaises(InvalidTask):
            space.task(takes_context=True)(tasks.add.func)

    def test_queues_are_those_of_the_backend(self) -> None:
        with self.assertRaises(InvalidTask):
            tasks.add.using(queue_name="unknown")

    def test_run_after_is_aware(self) -> None:
        with self.assertRaises(InvalidTask):
            tasks.add.using(run_after=dt.datetime(2030, 1, 1))

    def test_a_backend_has_to_be_there(self) -> None:
        with self.assertRaises(InvalidTaskBackend):
            tasks.add.using(backend="gone")

    def test_a_task_is_called_directly_as_the_function(self) -> None:
        self.assertEqual(tasks.add.call(1, b=2), 3)
        self.assertEqual(tasks.add_later.call(1, b=2), 3)
        self.assertEqual(asyncio.run(tasks.add_later.acall(1, b=2)), 3)

    def test_every_feature_is_supported(self) -> None:
        backend = space.default_task_backend
        self.assertTrue(backend.supports_defer)
        self.assertTrue(backend.supports_async_task)
        self.assertTrue(backend.supports_get_result)
        self.assertTrue(backend.supports_priority)

    def test_backends_by_alias(self) -> None:
        self.assertEqual(space.default_task_backend, space.task_backends["default"])
        self.assertEqual(space.task_backends["stubborn"].alias, "stubborn")
        self.assertEqual(space.task_backends["stubborn"].options, {"MAX_ATTEMPTS": 3})

    @skipIf(settings.SPACE == "django.tasks" and django.VERSION < (6, 1), "the decorator passes on nothing")
    def test_the_decorator_takes_options_of_the_backend(self) -> None:
        made = space.task(group="bob", cost=2.5)(tasks.add.func)
        self.assertEqual((made.group, made.cost), ("bob", 2.5))

    @skipIf(settings.SPACE != "django.tasks" or django.VERSION < (6, 1), "tasks were not picklable")
    def test_tasks_and_results_are_pickled(self) -> None:
        result = tasks.add.using(priority=3).enqueue(1)
        again = pickle.loads(pickle.dumps(result))
        self.assertEqual((again, again.task.priority), (result, 3))


class Enqueueing(TestCase):
    def test_one_query_and_a_result_that_is_ready(self) -> None:
        for task in (tasks.add, tasks.add_later):
            with self.subTest(task), self.assertNumQueries(1):
                result = task.enqueue(1, b=2)
            self.assertEqual((result.status, result.is_finished, result.attempts), (Status.READY, False, 0))
            self.assertEqual((result.task, result.args, result.kwargs), (task, [1], {"b": 2}))
            self.assertEqual((result.backend, result.errors, result.worker_ids), ("default", [], []))
            self.assertIsNotNone(result.enqueued_at)
            self.assertIsNone(result.started_at or result.last_attempted_at or result.finished_at)
            with self.assertRaisesMessage(ValueError, "Task has not finished yet"):
                _ = result.return_value

    def test_async(self) -> None:
        async def both() -> Any:
            result = await tasks.add.aenqueue(1, b=2)
            return (
                result,
                await tasks.add.aget_result(result.id),
                await space.default_task_backend.aget_result(result.id),
            )

        from asgiref.sync import async_to_sync

        first, second, third = async_to_sync(both)()
        self.assertEqual(first, second)
        self.assertEqual(first, third)

    def test_the_id_is_a_short_text(self) -> None:
        result = tasks.add.enqueue(1)
        self.assertIsInstance(result.id, str)
        self.assertLess(len(result.id), 64)

    def test_a_value_without_json_is_a_type_error(self) -> None:
        with self.assertRaises(TypeError):
            tasks.add.enqueue(timezone.now())
        with self.assertRaises(TypeError):
            tasks.add.enqueue(1, tenant=Order(name="x"))
        with self.assertRaisesMessage(TypeError, "payload.args[0] is nan"):
            tasks.add.enqueue(math.nan)
        with self.assertRaisesMessage(TypeError, "payload.kwargs.tenant contains the character U+0000"):
            tasks.add.enqueue(1, tenant="\0")

    def test_arguments_make_a_round_trip(self) -> None:
        result = run(tasks.twice.enqueue((1, 2, 3)))
        self.assertEqual(result.args, [[1, 2, 3]])
        self.assertEqual(result.status, Status.FAILED)
        self.assertIn("TypeError: unhashable type: 'list'", result.errors[0].traceback)

    def test_it_is_validated_when_it_is_enqueued(self) -> None:
        task = tasks.add.using(queue_name="mail")
        less = {"default": {**TASKS["default"], "QUEUES": ["default"]}}
        with override_settings(TASKS=less), self.assertRaises(InvalidTask):
            task.enqueue(1)

    def test_it_commits_with_the_models_and_rolls_back_with_them(self) -> None:
        with self.assertRaises(RuntimeError), transaction.atomic():
            tasks.add.enqueue(1)
            raise RuntimeError
        self.assertEqual(testing.enqueued(), [])

    def test_without_queues_any_name_will_do(self) -> None:
        result = tasks.add.using(backend="anywhere", queue_name="brand new").enqueue(1)
        self.assertEqual([each.queue for each in testing.enqueued()], ["brand new"])
        again = tasks.add.using(backend="anywhere", queue_name="brand new").enqueue(1)
        self.assertEqual(again.task, result.task)

    def test_higher_priorities_first(self) -> None:
        for priority in (0, -100, 100, 7):
            tasks.add.using(priority=priority).enqueue(priority)
        self.assertEqual([each.result for each in testing.run_tasks()], [101, 8, 1, -99])

    def test_run_after(self) -> None:
        later = timezone.now() + dt.timedelta(hours=10)
        result = tasks.add.using(run_after=later, priority=9).enqueue(1)
        self.assertEqual(result.task.run_after, later)
        self.assertEqual(testing.run_tasks(), [])
        self.assertEqual(tasks.add.get_result(result.id).task, result.task)
        testing.run_tasks(at=later + dt.timedelta(seconds=1))
        result.refresh()
        self.assertEqual(result.status, Status.SUCCESSFUL)

    def test_run_after_may_be_a_length_of_time(self) -> None:
        result = tasks.add.using(run_after=dt.timedelta(hours=1)).enqueue(1)
        self.assertLess(
            abs(result.task.run_after - timezone.now() - dt.timedelta(hours=1)), dt.timedelta(minutes=1)
        )

    def test_without_time_zones_run_after_is_local(self) -> None:
        with override_settings(USE_TZ=False):
            at = dt.datetime.now() + dt.timedelta(hours=1)
            result = tasks.add.using(run_after=at).enqueue(1)
            found = tasks.add.get_result(result.id)
            self.assertEqual((found.task.run_after, found), (at, result))
            self.assertTrue(timezone.is_naive(found.enqueued_at))
        (task,) = testing.enqueued()
        self.assertLess(abs(task.run_at - timezone.make_aware(at)), dt.timedelta(seconds=1))

    def test_in_one_transaction_with_the_order(self) -> None:
        other = connections.create_connection("default")
        try:
            with other.cursor() as cursor:
                tasks.add.enqueue(1)
                cursor.execute("select count(*) from fairq.tasks")
                self.assertEqual(cursor.fetchone(), (0,))
        finally:
            other.close()


class Results(TestCase):
    def test_it_is_found_by_its_id_in_one_query(self) -> None:
        result = tasks.mail.using(priority=50).enqueue("bob")
        with self.assertNumQueries(1):
            found = tasks.mail.get_result(result.id)
        self.assertEqual(found, result)
        self.assertEqual(space.default_task_backend.get_result(result.id), result)

    def test_enqueueing_needs_one_more_right(self) -> None:
        role = f"shop_app_{os.getpid()}"
        with connection.cursor() as cursor:
            cursor.execute(f"create role {role}")
            cursor.execute(f"grant fairq_enqueue to {role}")
            cursor.execute(f"set local role {role}")
            result = tasks.add.enqueue(1, b=41)
            with self.assertRaises(fairq.NotAllowed), transaction.atomic():
                tasks.add.get_result(result.id)
            cursor.execute("reset role")
            cursor.execute(f"grant execute on function fairq.task_history to {role}")
            cursor.execute(f"set local role {role}")
            self.assertEqual(tasks.add.get_result(result.id), result)
            cursor.execute("reset role")
            cursor.execute("set local role fairq_work")
            self.assertEqual(tasks.add.get_result(result.id), result)
            cursor.execute("reset role")

    def test_an_unknown_one_does_not_exist(self) -> None:
        for unknown in ("0", "9" * 30, "no number", "", "-1", "٣"):
            with self.subTest(unknown), self.assertRaises(exceptions.TaskResultDoesNotExist):
                tasks.add.get_result(unknown)

    def test_a_result_of_another_task_is_a_mismatch(self) -> None:
        result = tasks.add.enqueue(1)
        with self.assertRaises(exceptions.TaskResultMismatch):
            tasks.mail.get_result(result.id)

    def test_a_result_of_no_django_task_is_suspicious(self) -> None:
        id = fairq.enqueue(connection, "bob", {}, kind="parse")
        with self.assertRaises(SuspiciousOperation):
            space.default_task_backend.get_result(str(id))

    def test_it_changes_only_when_it_is_refreshed(self) -> None:
        result = tasks.add.enqueue(1, b=41)
        testing.run_tasks()
        self.assertEqual((result.status, result.attempts), (Status.READY, 0))
        with self.assertNumQueries(1):
            result.refresh()
        self.assertEqual(
            (result.status, result.is_finished, result.return_value), (Status.SUCCESSFUL, True, 42)
        )
        self.assertEqual((result.attempts, len(result.worker_ids)), (1, 1))
        self.assertEqual(result.started_at, result.last_attempted_at)
        self.assertLessEqual(result.enqueued_at, result.started_at)
        self.assertLessEqual(result.started_at, result.finished_at)

    def test_it_is_refreshed_in_a_coroutine(self) -> None:
        from asgiref.sync import async_to_sync

        result = tasks.add.enqueue(1)
        testing.run_tasks()
        async_to_sync(result.arefresh)()
        self.assertEqual(result.return_value, 2)

    def test_coroutines_return_and_fail_as_functions_do(self) -> None:
        self.assertEqual(run(tasks.add_later.enqueue(1)).return_value, 2)
        ordered = run(tasks.order_later.enqueue("a book"))
        self.assertEqual(Order.objects.get(pk=ordered.return_value).name, "a book")
        self.assertEqual(run(tasks.fail_later.enqueue()).errors[0].exception_class, ValueError)

    def test_a_failed_one_has_its_error(self) -> None:
        result = run(tasks.fail.enqueue("this is why"))
        self.assertEqual((result.status, result.is_finished, result.attempts), (Status.FAILED, True, 1))
        self.assertIsNotNone(result.finished_at)
        with self.assertRaisesMessage(ValueError, "Task failed"):
            _ = result.return_value
        (error,) = result.errors
        self.assertEqual(
            (error.exception_class_path, error.exception_class), ("builtins.ValueError", ValueError)
        )
        self.assertTrue(error.traceback.startswith("Traceback (most recent call last):\n"))
        self.assertIn("shop/tasks.py", error.traceback)
        self.assertTrue(error.traceback.endswith("ValueError: this is why\n"))

    def test_errors_hold_whatever_was_raised(self) -> None:
        result = run(tasks.fail_with_cause.enqueue())
        self.assertEqual(result.errors[0].exception_class, ValueError)
        self.assertIn("the inner one", result.errors[0].traceback)

    def test_exits_are_errors(self) -> None:
        self.assertEqual(run(tasks.exits.enqueue()).errors[0].exception_class, SystemExit)

    def test_a_value_that_is_no_json_is_an_error(self) -> None:
        result = run(tasks.returns_itself.enqueue())
        self.assertEqual((result.status, result.errors[0].exception_class), (Status.FAILED, TypeError))
        self.assertIsNotNone(result.finished_at)

    def test_every_attempt_leaves_its_error_and_its_worker(self) -> None:
        result = tasks.third_time_lucky.enqueue()
        seen = []
        for minute in range(3):
            testing.run_tasks(at=timezone.now() + dt.timedelta(hours=minute), raise_errors=False)
            result.refresh()
            seen.append((result.status, result.attempts, len(result.errors), result.is_finished))
        self.assertEqual(
            seen, [(Status.READY, 1, 1, False), (Status.READY, 2, 2, False), (Status.SUCCESSFUL, 3, 2, True)]
        )
        self.assertEqual({each.exception_class for each in result.errors}, {ConnectionError})
        self.assertIn("attempt 2", result.errors[1].traceback)
        self.assertLess(result.started_at, result.last_attempted_at)
        self.assertEqual(result.return_value, 3)

    def test_the_last_attempt_fails(self) -> None:
        result = tasks.fail.using(backend="stubborn", queue_name="mail").enqueue()
        for minute in range(3):
            testing.run_tasks(at=timezone.now() + dt.timedelta(hours=minute), raise_errors=False)
        result.refresh()
        self.assertEqual((result.status, result.attempts, len(result.errors)), (Status.FAILED, 3, 3))

    def test_the_context_knows_the_result_and_the_attempt(self) -> None:
        result = run(tasks.about.enqueue(7))
        self.assertEqual(result.return_value, [1, result.id, "RUNNING", [7], 1, 7])

    def test_a_result_is_kept_for_the_retention_of_its_queue(self) -> None:
        result = run(tasks.add.enqueue(1))
        waiting = tasks.add.using(run_after=dt.timedelta(days=900)).enqueue(1)
        fairq.configure_queue(connection, "default", retention=dt.timedelta(days=3))
        with connection.cursor() as cursor:
            for days, there in ((2, True), (9, False)):
                now = (timezone.now() + dt.timedelta(days=days)).isoformat()
                cursor.execute("update fairq.settings set test_clock = true")
                cursor.execute("select set_config('fairq.now', %s, true), fairq.maintain()", [now])
                if there:
                    result.refresh()
        with self.assertRaises(exceptions.TaskResultDoesNotExist):
            result.refresh()
        waiting.refresh()

    def test_cancelled_and_expired_tasks_have_failed(self) -> None:
        cancelled = tasks.add.enqueue(1)
        fairq.cancel(connection, int(cancelled.id))
        expired = tasks.add.using(expires_at=timezone.now() + dt.timedelta(seconds=1)).enqueue(1)
        testing.run_tasks(at=timezone.now() + dt.timedelta(minutes=1))
        for result, why in ((cancelled, fairq.Cancelled), (expired, ends.Expired)):
            result.refresh()
            self.assertEqual((result.status, result.attempts), (Status.FAILED, 0))
            self.assertEqual(result.errors[0].exception_class, why)

    def test_sql_can_create_tasks(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("""select fairq.create_task('bob', '{"args": [2]}', p_kind => 'shop.tasks.add')""")
            id = str(cursor.fetchone()[0])
        self.assertIsNotNone(tasks.add.get_result(id).enqueued_at)
        testing.run_tasks()
        self.assertEqual(tasks.add.get_result(id).return_value, 3)

    def test_a_function_that_is_no_task_cannot_start(self) -> None:
        id = fairq.enqueue(connection, "bob", {}, kind="shop.tasks.no_task", max_attempts=1)
        (ran,) = testing.run_tasks(raise_errors=False)
        self.assertEqual((ran.id, ran.outcome), (id, "failed"))

    def test_modules_outside_the_project_are_not_imported(self) -> None:
        fairq.enqueue(connection, "bob", {}, kind="antigravity.fly")
        (ran,) = testing.run_tasks(raise_errors=False, limit=1)
        self.assertEqual(ran.outcome, "declined")


class Signals(TestCase):
    def setUp(self) -> None:
        self.heard: list[tuple[str, Any, str]] = []
        for name in ("task_enqueued", "task_started", "task_finished"):
            signal = getattr(signals, name)

            def hear(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
                self.heard.append((name, sender, str(task_result.status)))
                self.last = task_result

            signal.connect(hear, weak=False, dispatch_uid=f"hear {name}")
            self.addCleanup(signal.disconnect, dispatch_uid=f"hear {name}")

    def test_each_in_its_turn_with_the_backend_as_sender(self) -> None:
        result = tasks.add.enqueue(1)
        sender = type(space.task_backends["default"])
        self.assertEqual(self.heard, [("task_enqueued", sender, "READY")])
        self.assertEqual(self.last, result)
        testing.run_tasks()
        self.assertEqual(
            self.heard[1:], [("task_started", sender, "RUNNING"), ("task_finished", sender, "SUCCESSFUL")]
        )
        self.assertEqual((self.last.return_value, self.last.id), (2, result.id))

    def test_a_failure_is_finished_with_its_error(self) -> None:
        run(tasks.fail.enqueue())
        self.assertEqual([(name, status) for name, _, status in self.heard][-1], ("task_finished", "FAILED"))
        self.assertEqual(self.last.errors[0].exception_class, ValueError)

    def test_a_result_that_cannot_be_stored_is_a_failure(self) -> None:
        result = run(tasks.unlimited.enqueue())
        self.assertEqual((result.status, result.errors[0].exception_class), (Status.FAILED, TypeError))
        self.assertEqual(self.heard[-1][::2], ("task_finished", "FAILED"))

    def test_only_the_last_attempt_finishes(self) -> None:
        tasks.third_time_lucky.enqueue()
        for minute in range(3):
            testing.run_tasks(at=timezone.now() + dt.timedelta(hours=minute), raise_errors=False)
        names = [name for name, _, _ in self.heard]
        self.assertEqual(names, ["task_enqueued", *["task_started"] * 3, "task_finished"])

    def test_a_receiver_that_fails_in_the_end_does_not_make_a_task_fail(self) -> None:
        def broken(**_: Any) -> None:
            raise RuntimeError("broken receiver")

        signals.task_finished.connect(broken)
        self.addCleanup(signals.task_finished.disconnect, broken)
        with self.assertLogs("django.dispatch", logging.ERROR):
            result = run(tasks.add.enqueue(1))
        self.assertEqual(result.status, Status.SUCCESSFUL)

    def test_django_logs_them(self) -> None:
        with self.assertLogs(settings.SPACE, logging.DEBUG) as logged:
            result = run(tasks.add.enqueue(1))
            run(tasks.fail.enqueue())
        self.assertIn("enqueued", logged.output[0])
        self.assertIn(result.id, logged.output[0])
        self.assertIn("RUNNING", logged.output[1])
        self.assertIn("SUCCESSFUL", logged.output[2])
        self.assertIn("FAILED", logged.output[5])
        self.assertIn("ValueError: no", logged.output[5])


class Tenants(TestCase):
    def groups(self) -> list[str]:
        return [each.group_key for each in testing.enqueued()]

    def test_group_says_whose_a_task_is(self) -> None:
        tasks.add.enqueue(1, tenant="bob")
        tasks.add.enqueue(1)
        tasks.add.using(group="alice").enqueue(1, tenant="bob")
        tasks.add.using(backend="stubborn", queue_name="mail").enqueue(1, tenant="bob")
        self.assertEqual(self.groups(), ["bob", "nobody", "alice", "default"])

    def test_the_function_gets_task_args_and_kwargs_after_their_round_trip(self) -> None:
        seen: list[Any] = []

        def group(*given: Any) -> str:
            seen.append(given)
            return "x"

        task = tasks.add.using(group=group)
        task.enqueue((1,), b=2)
        self.assertEqual(seen, [(task, [[1]], {"b": 2})])

    def test_the_request_says_whose(self) -> None:
        task = tasks.add.using(backend="of the request")
        with groups.use("bob"):
            task.enqueue(1)
            with groups.use("alice"):
                task.enqueue(1)
        with self.assertRaises(fairq.InvalidGroupKey):
            task.enqueue(1)
        self.assertEqual(self.groups(), ["bob", "alice"])

    def test_the_schema_says_whose_and_the_task_runs_in_it(self) -> None:
        connection.schema_name = "tenant_1"
        connection.set_schema = lambda name: setattr(connection, "schema_name", name)
        self.addCleanup(delattr, connection, "schema_name")
        self.addCleanup(delattr, connection, "set_schema")
        result = tasks.schema.using(backend="of the schema").enqueue()
        self.assertEqual(self.groups(), ["tenant_1"])
        connection.set_schema("public")
        self.assertEqual(run(result).return_value, "tenant_1")
        self.assertEqual(connection.schema_name, "public")

    def test_inside_a_tenant_its_users_take_turns(self) -> None:
        for number in range(3):
            tasks.add.enqueue(number, tenant="bob", user="jane")
        tasks.add.using(user="joe").enqueue(10, tenant="bob")
        tasks.add.enqueue(20, tenant="alice")
        self.assertEqual(
            [each.user_key for each in testing.enqueued()], ["jane", "jane", "jane", "joe", None]
        )
        ran = [(each.group_key, each.result) for each in testing.run_tasks()]
        self.assertEqual({*ran[:3]}, {("bob", 1), ("bob", 11), ("alice", 21)})

    def test_tenants_take_turns(self) -> None:
        for number in range(3):
            tasks.add.using(group="bob").enqueue(number)
        tasks.add.using(group="alice").enqueue(10)
        self.assertEqual([each.group_key for each in testing.run_tasks()], ["bob", "alice", "bob", "bob"])

    def test_other_options_of_fairq_are_for_tasks_too(self) -> None:
        task = tasks.add.using(idempotency_key="once", concurrency_key="one", cost=2.5, timeout=60)
        self.assertEqual(task.enqueue(1).id, task.enqueue(1).id)
        (found,) = testing.enqueued()
        self.assertEqual((found.idempotency_key, found.concurrency_key), ("once", "one"))
        with self.assertRaises(InvalidTask):
            tasks.add.using(cost=-1)
        with self.assertRaises(InvalidTask):
            tasks.add.using(backend="anywhere", queue_name="q" * 201)
        with self.assertRaises(TypeError):
            tasks.add.using(costs=1)

    def test_payload_and_headers_are_what_the_page_says(self) -> None:
        tasks.add.using(priority=3).enqueue(1, b=2)
        (found,) = testing.enqueued()
        self.assertEqual((found.kind, found.payload), ("shop.tasks.add", {"args": [1], "kwargs": {"b": 2}}))
        self.assertEqual(json.loads(json.dumps(found.headers))["django"]["backend"], "default")
