"""The admin: lists, what actions and forms do and refuse, and their cost with many tasks."""

import datetime as dt
from collections.abc import Iterator
from typing import Any

from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import fairq
from fairq.contrib.django import testing
from fairq.contrib.django.admin import MOST, TaskAdmin
from fairq.contrib.django.models import EndedTask, Queue, Task, Tenant
from shop import tasks


class Admin(TestCase):
    def setUp(self) -> None:
        self.client.force_login(User.objects.create_superuser("root"))

    def page(self, name: str, *args: Any, **query: Any) -> str:
        answer = self.client.get(reverse(f"admin:fairq_{name}", args=args), query)
        self.assertEqual(answer.status_code, 200)
        return answer.content.decode()

    def act(self, model: str, action: str, *keys: Any) -> str:
        data = {"action": action, "_selected_action": keys}
        answer = self.client.post(reverse(f"admin:fairq_{model}_changelist"), data, follow=True)
        self.assertEqual(answer.status_code, 200)
        return answer.content.decode()

    def change(self, model: str, key: Any, **data: Any) -> str:
        at = reverse(f"admin:fairq_{model}_change", args=[key])
        answer = self.client.post(at, data, follow=True)
        self.assertEqual(answer.status_code, 200)
        return answer.content.decode()


class Lists(Admin):
    def test_tasks_are_listed_searched_and_filtered(self) -> None:
        ids = [int(tasks.add.using(group=who).enqueue(1).id) for who in ("bob", "bob", "alice")]
        mail = int(tasks.mail.using(group="carol").enqueue("x").id)
        self.assertIn("shop.tasks.mail", self.page("task_changelist"))
        for query, found in (
            ({"q": "bob"}, ids[:2]),
            ({"q": str(mail)}, [mail]),
            ({"q": "bo"}, []),
            ({"queue": "mail"}, [mail]),
            ({"state": "running"}, []),
            ({"state": "overflow", "queue": "default"}, ids),
        ):
            text = self.page("task_changelist", **query)
            shown = [id for id in (*ids, mail) if f"/task/{id}/" in text]
            self.assertEqual(shown, found, query)

    def test_a_task_shows_its_payload_and_why_it_waits(self) -> None:
        id = int(tasks.add.using(group="bob").enqueue(4711).id)
        text = self.page("task_change", id)
        self.assertIn("4711", text)
        self.assertIn("no live worker for queue", text)
        self.assertNotIn('name="_save"', text)

    def test_ended_tasks_are_listed_with_their_errors(self) -> None:
        good, bad = tasks.add.enqueue(1), tasks.fail.enqueue("this is why")
        testing.run_tasks(raise_errors=False)
        text = self.page("endedtask_changelist", outcome="failed")
        self.assertIn("this is why", text)
        self.assertNotIn(f"/endedtask/{good.id}/", text)
        self.assertIn("Traceback", self.page("endedtask_change", bad.id).replace("traceback", "Traceback"))

    def test_tenants_are_those_with_tasks_or_settings(self) -> None:
        tasks.add.using(group="bob").enqueue(1)
        fairq.configure_group(connection, "default", "alice", weight=3)
        text = self.page("tenant_changelist")
        self.assertIn("bob", text)
        self.assertIn("alice", text)
        self.assertNotIn("alice", self.page("tenant_changelist", q="bob").split("<tbody>")[1])

    def test_queues_are_listed_without_those_inside(self) -> None:
        self.assertNotIn("#keys", self.page("queue_changelist"))

    def test_nobody_adds_or_deletes_tasks_here(self) -> None:
        for model in (Task, EndedTask, Queue):
            name = f"admin:fairq_{model._meta.model_name}_add"
            self.assertEqual(self.client.get(reverse(name)).status_code, 403)

    def test_a_user_who_may_only_view_sees_no_actions(self) -> None:
        user = User.objects.create_user("eve", is_staff=True)
        user.user_permissions.add(Permission.objects.get(codename="view_task"))
        self.client.force_login(user)
        tasks.add.enqueue(1)
        self.assertNotIn('value="cancel"', self.page("task_changelist"))
        self.act("task", "cancel", 1)
        self.assertEqual(len(testing.enqueued()), 1)


class Actions(Admin):
    def test_cancel(self) -> None:
        result = tasks.add.enqueue(1)
        self.assertIn("1 tasks cancelled", self.act("task", "cancel", result.id))
        testing.run_tasks()
        result.refresh()
        self.assertEqual(result.errors[0].exception_class, fairq.Cancelled)

    def test_retry_what_failed_and_run_what_is_scheduled(self) -> None:
        failed = tasks.fail.enqueue()
        testing.run_tasks(raise_errors=False)
        self.assertIn("1 tasks run again", self.act("endedtask", "retry", failed.id))
        later = tasks.add.using(run_after=dt.timedelta(hours=1)).enqueue(1)
        self.act("task", "retry", later.id)
        testing.run_tasks(raise_errors=False)
        failed.refresh()
        later.refresh()
        self.assertEqual((failed.attempts, later.is_finished), (1, True))

    def test_a_task_that_succeeded_is_not_retried(self) -> None:
        done = tasks.add.enqueue(1)
        testing.run_tasks()
        self.assertIn("0 tasks run again", self.act("endedtask", "retry", done.id))

    def test_pause_and_resume_a_tenant(self) -> None:
        tasks.add.using(group="bob").enqueue(1)
        tasks.add.using(group="alice").enqueue(1)
        key = '["default", "bob"]'
        self.act("tenant", "pause", key)
        self.assertEqual([each.group_key for each in testing.run_tasks()], ["alice"])
        self.assertIsNotNone(Tenant.objects.get(key=key).paused_at)
        self.act("tenant", "resume", key)
        self.assertEqual(len(testing.run_tasks()), 1)

    def test_pause_and_resume_a_queue(self) -> None:
        tasks.add.enqueue(1)
        self.act("queue", "pause", "default")
        self.assertEqual(testing.run_tasks(), [])
        self.act("queue", "resume", "default")
        self.assertEqual(len(testing.run_tasks()), 1)


class Limits(Admin):
    def test_limits_of_a_tenant_are_set_and_taken_away(self) -> None:
        tasks.add.using(group="bob/é").enqueue(1)
        (tenant,) = Tenant.objects.all()
        self.change("tenant", tenant.key, weight="3", max_running="5", rate_limit="", rate_period="")
        tenant.refresh_from_db()
        self.assertEqual((tenant.weight, tenant.max_running, tenant.rate_limit), (3.0, 5, None))
        self.change("tenant", tenant.key, weight="", max_running="5", rate_limit="10", rate_period="0:01:00")
        tenant.refresh_from_db()
        self.assertEqual(
            (tenant.weight, tenant.rate_limit, tenant.rate_period), (None, 10, dt.timedelta(minutes=1))
        )

    def test_a_tenant_has_limits_before_it_has_tasks(self) -> None:
        data = {"queue": "mail", "group_key": "zoë", "max_running": "2"}
        answer = self.client.post(reverse("admin:fairq_tenant_add"), data, follow=True)
        self.assertEqual(answer.status_code, 200)
        self.assertEqual(Tenant.objects.get(key='["mail", "zoë"]').max_running, 2)

    def test_refusals_of_fairq_are_shown(self) -> None:
        data = {"queue": "nowhere", "group_key": "zoe", "max_running": "2"}
        answer = self.client.post(reverse("admin:fairq_tenant_add"), data, follow=True)
        self.assertEqual((answer.status_code, Tenant.objects.count()), (200, 0))
        self.assertIn("nowhere", answer.content.decode())

    def test_limits_of_a_queue(self) -> None:
        queue = Queue.objects.get(queue="default")
        data = {
            "fairness": "count",
            "weight": "1",
            "max_attempts": "7",
            "retention": "1 00:00:00",
            "max_running": "3",
        }
        self.change("queue", "default", **data)
        queue.refresh_from_db()
        self.assertEqual(
            (queue.max_attempts, queue.max_running, queue.retention), (7, 3, dt.timedelta(days=1))
        )
        self.change("queue", "default", **{**data, "max_running": "-3"})
        queue.refresh_from_db()
        self.assertEqual(queue.max_running, 3)


class ManyTasks(Admin):
    def read(self, name: str, **query: Any) -> list[int]:
        """How many rows each statement of a page reads from the tables of tasks."""
        with CaptureQueriesContext(connection) as ran:
            self.page(name, **query)
        found = []
        with connection.cursor() as cursor:
            for each in ran:
                if "_tasks" in each["sql"]:
                    cursor.execute(f"explain (analyze, format json) {each['sql']}")
                    found.append(sum(rows_of(cursor.fetchone()[0][0]["Plan"])))
        return found

    def test_pages_read_little_of_many_tasks(self) -> None:
        many = 3 * MOST
        with connection.cursor() as cursor:
            cursor.execute(
                "select count(*) from fairq.create_tasks(array(select 'tenant ' || n %% 100"
                " from generate_series(1, %s) n), array_fill('{}'::jsonb, array[%s]))",
                [many, many],
            )
            cursor.execute("analyze fairq.tasks")
        count, page = self.read("task_changelist")
        self.assertLessEqual(count, MOST)
        self.assertLessEqual(page, 2 * TaskAdmin.list_per_page)
        self.assertIn(f"{MOST} tasks", self.page("task_changelist"))


def rows_of(plan: Any) -> Iterator[int]:
    if plan.get("Relation Name", "").endswith("tasks"):
        yield plan["Actual Rows"] * plan["Actual Loops"] + plan.get("Rows Removed by Filter", 0)
    for each in plan.get("Plans", []):
        yield from rows_of(each)
