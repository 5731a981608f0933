"""The app in a project: migrations, the command line, checks, and a project's tests."""

import io
import logging
import sys
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import psycopg
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.test import TestCase, override_settings

import fairq
from fairq import install
from fairq.contrib.django import database, groups, testing
from fairq.contrib.django.models import EndedTask, Queue
from shop import tasks
from shop.models import Order


def said(*words: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(*words, stdout=out, **options)
    return out.getvalue()


class Migrations(testing.TransactionTestCase):
    databases = {"default", "other"}

    def test_each_revision_of_fairq_is_a_migration(self) -> None:
        names = sorted(name for app, name in MigrationLoader(connection).disk_migrations if app == "fairq")
        self.assertEqual([name[:4] for name in names], [each.stem[:4] for each in install.revisions()])

    def test_the_models_are_those_of_the_migrations(self) -> None:
        call_command("makemigrations", "--check", "--dry-run", stdout=io.StringIO())

    def test_there_and_back_and_there_again(self) -> None:
        for target, there in (("zero", None), (None, install.head())):
            call_command("migrate", "fairq", *([target] if target else []), verbosity=0)
            connection.ensure_connection()
            self.assertEqual(install.schema_version(connection.connection), there)
        self.assertIn("mail", [each.queue for each in queues()])

    def test_the_way_back_is_refused_while_there_are_tasks(self) -> None:
        tasks.add.enqueue(1)
        with self.assertRaises(install.WouldLoseData):
            call_command("migrate", "fairq", "zero", verbosity=0)
        self.assertEqual(install.schema_version(connection.connection), install.head())

    def test_a_schema_installed_by_another_tool_stays_unchanged(self) -> None:
        tasks.add.enqueue(1)
        call_command("migrate", "fairq", "zero", fake=True, verbosity=0)
        call_command("migrate", "fairq", verbosity=0)
        self.assertEqual(len(testing.enqueued()), 1)

    def test_other_databases_have_nothing_of_it(self) -> None:
        call_command("migrate", "fairq", database="other", verbosity=0)

    def test_sqlmigrate_prints_it(self) -> None:
        self.assertIn("create function fairq.create_task", said("sqlmigrate", "fairq", "0001"))
        self.assertIn("drop function fairq.create_task", said("sqlmigrate", "fairq", "0001", backwards=True))


def queues() -> list[Any]:
    return list(Queue.objects.all())


class Databases(TestCase):
    def test_the_dsn_leads_to_the_database_of_the_settings(self) -> None:
        with psycopg.connect(database.dsn()) as conn:
            row = conn.execute("select current_database(), current_setting('application_name')").fetchone()
        self.assertEqual(row, (connection.settings_dict["NAME"], "shop"))

    def test_a_role_that_django_assumes_is_assumed(self) -> None:
        options = {**connection.settings_dict["OPTIONS"], "assume_role": "fairq_work"}
        before = connection.settings_dict["OPTIONS"]
        self.addCleanup(connection.settings_dict.__setitem__, "OPTIONS", before)
        connection.settings_dict["OPTIONS"] = options
        with psycopg.connect(database.dsn()) as conn:
            self.assertEqual(conn.execute("select current_user").fetchone(), ("fairq_work",))

    def test_another_alias_is_named_or_comes_from_a_router(self) -> None:
        self.assertEqual(database.alias(), "default")
        with override_settings(FAIRQ_DATABASE="other"):
            self.assertEqual(database.alias(), "other")
            with self.assertRaisesMessage(fairq.ConfigurationError, "not PostgreSQL"):
                database.dsn()
        with override_settings(DATABASE_ROUTERS=["shop.routers.FairqElsewhere"]):
            self.assertEqual(database.alias(), "other")


class CommandLine(testing.TransactionTestCase):
    def test_commands_run_on_the_database_of_the_settings(self) -> None:
        fairq.enqueue(connection, "bob", {})
        self.assertIn("bob", said("fairq", "groups"))
        self.assertIn("is at fairq_0001", said("fairq", "migrate", "--check"))

    def test_failures_are_command_errors(self) -> None:
        with self.assertRaises(CommandError) as caught:
            said("fairq", "explain", "4711")
        self.assertEqual(caught.exception.returncode, 1)

    def test_a_module_of_tasks_that_is_broken_is_named(self) -> None:
        from django.conf import settings

        errors = io.StringIO()
        more = override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "broken"])
        with more, self.assertRaises(CommandError) as caught:
            call_command("fairq", "work", "--drain", stderr=errors)
        self.assertEqual(caught.exception.returncode, 2)
        self.assertIn("nothing_of_that_name", errors.getvalue())

    def test_it_works_on_tasks_of_django_and_of_apps(self) -> None:
        result = tasks.order.enqueue("a book")
        later = tasks.order_later.enqueue("a pen")
        tasks.send_parcel.enqueue(connection, "bob", {"name": "a parcel"})
        said("fairq", "work", "--drain")
        result.refresh()
        later.refresh()
        self.assertEqual({each.name for each in Order.objects.all()}, {"a book", "a pen", "a parcel"})
        self.assertEqual(Order.objects.get(pk=result.return_value).name, "a book")

    def test_tasks_enqueued_by_a_task_belong_to_its_tenant(self) -> None:
        for task, tenant in ((tasks.follow_up, "bob"), (tasks.follow_up_later, "alice")):
            with groups.use(tenant):
                task.enqueue()
        said("fairq", "work", "--drain")
        ended = {(each.group_key, each.kind.split(".")[-1]) for each in EndedTask.objects.all()}
        self.assertEqual(
            ended, {("bob", "follow_up"), ("bob", "add"), ("alice", "follow_up_later"), ("alice", "add")}
        )
        self.assertEqual({each.outcome for each in EndedTask.objects.all()}, {"succeeded"})

    def test_logging_of_the_settings_is_respected(self) -> None:
        tasks.fail.enqueue()
        logger = logging.getLogger("fairq")
        handler = logging.StreamHandler(io.StringIO())
        before = logger.level, logger.propagate, list(logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(logging.CRITICAL)
        logger.propagate = False
        try:
            said("fairq", "work", "--drain")
            self.assertEqual((logger.level, logging.getLogger().handlers), (logging.CRITICAL, before[2]))
            self.assertEqual(handler.stream.getvalue(), "")
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]

    def test_without_its_extra_it_says_which(self) -> None:
        with mock.patch.dict(sys.modules, {"click": None}):
            sys.modules.pop("fairq.cli", None)
            with self.assertRaisesMessage(CommandError, "fairq[cli]"):
                call_command("fairq", "stats")

    def test_help_is_fairqs(self) -> None:
        from fairq.contrib.django.management.commands.fairq import Command

        out = io.StringIO()
        with redirect_stdout(out), self.assertRaises(SystemExit):
            Command().print_help("manage.py", "fairq")
        self.assertIn("Usage: manage.py fairq", out.getvalue())


class Checks(TestCase):
    databases = {"default", "other"}

    def ids(self, **settings: Any) -> set[str | None]:
        with override_settings(**settings):
            return {each.id for each in checks.run_checks()}

    def test_a_project_that_is_right_passes(self) -> None:
        self.assertEqual(checks.run_checks(databases=["default"]), [])

    def test_what_is_wrong_with_a_backend(self) -> None:
        from django.conf import settings

        def backend(**options: Any) -> dict[str, Any]:
            return {"TASKS": {"default": {"BACKEND": settings.BACKEND, "OPTIONS": options}}}

        self.assertIn("fairq.E002", self.ids(**backend(GROUPS="x")))
        self.assertIn("fairq.E002", self.ids(**backend(GROUP="shop.tenants.gone")))
        self.assertIn("fairq.E002", self.ids(**backend(COST=-1)))
        self.assertIn("fairq.E003", self.ids(**backend(GROUP="shop.tests.test_project.NO_FUNCTION")))

    def test_a_schema_that_does_not_fit_is_a_warning(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "update fairq.schema_version set version_num = 'fairq_9999', oldest_code = 'fairq_9999'"
            )
        (found,) = checks.run_checks(databases=["default"])
        self.assertEqual(found.id, "fairq.W001")
        self.assertIn("Upgrade fairq", str(found.hint))

    def test_what_is_wrong_with_the_database(self) -> None:
        self.assertIn("fairq.E004", self.ids(FAIRQ_DATABASE="gone"))
        self.assertIn("fairq.E005", self.ids(FAIRQ_DATABASE="other"))


NO_FUNCTION = 1


class InTheTestsTransaction(TestCase):
    def test_handlers_of_apps_see_it_and_write_in_it_coroutines_too(self) -> None:
        for send in (tasks.send_parcel, tasks.send_letter):
            send.enqueue(connection, "bob", {"name": send.kind})
        self.assertEqual([each.outcome for each in testing.run_tasks()], ["succeeded"] * 2)
        self.assertEqual({each.name for each in Order.objects.all()}, {"send_parcel", "send_letter"})


class Helpers(testing.TransactionTestCase):
    def test_a_transaction_test_case_leaves_nothing(self) -> None:
        tasks.add.enqueue(1)
        self.assertEqual(len(testing.run_tasks()), 1)
        tasks.add.enqueue(1)
        fairq.configure_group(connection, "default", "bob", weight=3)
        testing.reset()
        self.assertEqual(testing.enqueued(), [])
        with connection.cursor() as cursor:
            cursor.execute(
                "select (select count(*) from fairq.finished_tasks), (select count(*) from fairq.groups)"
            )
            self.assertEqual(cursor.fetchone(), (0, 0))
        tasks.add.enqueue(1)
        self.assertEqual(len(testing.run_tasks()), 1)
