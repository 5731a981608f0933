"""Tenants, tasks and limits in Django's admin. Changes go through fairq's functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.widgets import AdminTextInputWidget
from django.core.paginator import Paginator
from django.db import models
from django.http import HttpRequest, HttpResponseRedirect

from fairq import policies
from fairq.client import cancel
from fairq.connections import run
from fairq.contrib.django import database
from fairq.contrib.django.models import EndedTask, Queue, Task, Tenant
from fairq.errors import FairqError
from fairq.queries import client as queries

__all__ = ["EndedTaskAdmin", "QueueAdmin", "TaskAdmin", "TenantAdmin"]

# Counting stops at this many rows; users search instead.
MOST = 10_000


class Bounded(Paginator):
    """Counts at most `MOST` rows."""

    @cached_property
    def count(self) -> int:
        return int(self.object_list.order_by()[:MOST].count())


class Choice(admin.SimpleListFilter):
    choices_of: tuple[str, ...] = ()

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in self.choices_of]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class OfQueue(Choice):
    title = parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = Queue.objects.filter(internal=False).order_by("queue").values_list("queue", flat=True)
        return [(name, name) for name in names]


class InState(Choice):
    title = parameter_name = "state"
    choices_of = ("scheduled", "overflow", "blocked", "queued", "claimed", "running")


class WithOutcome(Choice):
    title = parameter_name = "outcome"
    choices_of = ("succeeded", "failed", "cancelled", "expired")


class FairqAdmin(admin.ModelAdmin):
    """Rows come and go through fairq's functions. Their refusals become messages, not server errors."""

    paginator = Bounded
    show_full_result_count = False
    list_per_page = 50
    formfield_overrides = {models.TextField: {"widget": AdminTextInputWidget}}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().changeform_view(request, *args, **kwargs)
        except FairqError as exc:
            self.message_user(request, _words(exc), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())

    def do(
        self, request: HttpRequest, rows: Iterable[Any], function: Callable[[Any, Any], Any], done: str
    ) -> None:
        """An action: call the function for each row, and show for how many it had something to do."""
        conn = database.connection()
        count = 0
        for row in rows:
            try:
                count += function(conn, row) is not False
            except FairqError as exc:
                self.message_user(request, _words(exc), messages.ERROR)
        self.message_user(request, f"{count} {done}.", messages.SUCCESS if count else messages.WARNING)


def _words(exc: FairqError) -> str:
    return f"{exc}. {exc.hint}" if exc.hint else str(exc)


class AnyTaskAdmin(FairqAdmin):
    search_fields = ("id", "group_key")
    search_help_text = "A task's id, or a tenant"
    ordering = ("-id",)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allowed only for the list's actions; a single task is read only."""
        return obj is None and super().has_change_permission(request)

    def get_queryset(self, request: HttpRequest) -> Any:
        # Every index begins with the shard.
        with database.connection().cursor() as cursor:
            cursor.execute("select s.shard_no from fairq._shards(null) s(shard_no)")
            shards = [row[0] for row in cursor.fetchall()]
        return super().get_queryset(request).filter(shard_no__in=shards)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        if term.isascii() and term.isdigit() and int(term) < 2**63:
            return queryset.filter(models.Q(id=int(term)) | models.Q(group_key=term)), False
        return queryset.filter(group_key=term), False

    @admin.action(description="Retry, or run now", permissions=["change"])
    def retry(self, request: HttpRequest, rows: Any) -> None:
        self.do(request, rows, _retry, "tasks run again")


def _retry(conn: Any, row: Any) -> Any:
    return run(conn, queries.retry_task.call(id=row.id, strict=False))


@admin.register(Task)
class TaskAdmin(AnyTaskAdmin):
    list_display = ("id", "queue", "group_key", "user_key", "kind", "state", "priority", "attempt", "run_at")
    list_filter = (OfQueue, InState)
    actions = ("cancel", "retry")
    fields = (
        *("id", "queue", "group_key", "user_key", "kind", "state", "why", "payload", "priority", "cost"),
        *("attempt", "max_attempts", "created_at", "run_at", "expires_at", "timeout", "started_at"),
        *("worker_id", "idempotency_key", "concurrency_key"),
    )

    @admin.action(description="Cancel", permissions=["change"])
    def cancel(self, request: HttpRequest, rows: Any) -> None:
        self.do(request, rows, lambda conn, row: cancel(conn, row.id), "tasks cancelled")

    @admin.display(description="why it waits")
    def why(self, task: Task) -> str:
        return str(_one("select e.reason from fairq.explain_task(%s) e", task.id))

    def payload(self, task: Task) -> str:
        query = "select t.payload::text from fairq.tasks t where (t.shard_no, t.id) = (%s, %s)"
        found = _one(query, task.shard_no, task.id)
        return json.dumps(json.loads(found or "null"), indent=2, ensure_ascii=False)


def _one(query: str, *parameters: Any) -> Any:
    with database.connection().cursor() as cursor:
        cursor.execute(query, parameters)
        row = cursor.fetchone()
    return row[0] if row else None


@admin.register(EndedTask)
class EndedTaskAdmin(AnyTaskAdmin):
    list_display = (
        *("id", "queue", "group_key", "user_key", "kind"),
        *("outcome", "attempt", "finished_at", "message"),
    )
    list_filter = (OfQueue, WithOutcome)
    actions = ("retry",)

    def message(self, task: EndedTask) -> str:
        return str((task.error or {}).get("message", ""))[:80]


@admin.register(Queue)
class QueueAdmin(FairqAdmin):
    list_display = (
        *("queue", "paused_at", "draining_at"),
        *("fairness", "max_running", "group_max_running", "retention"),
    )
    readonly_fields = ("queue", "paused_at", "draining_at")
    actions = ("pause", "resume")
    ordering = ("queue",)

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).filter(internal=False)

    def save_model(self, request: HttpRequest, obj: Queue, form: Any, change: bool) -> None:
        changed = {name: form.cleaned_data[name] for name in form.changed_data}
        policies.configure_queue(database.connection(), obj.queue, **changed)

    @admin.action(description="Pause", permissions=["change"])
    def pause(self, request: HttpRequest, rows: Any) -> None:
        self.do(request, rows, lambda conn, row: policies.pause_queue(conn, row.queue), "queues are paused")

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, rows: Any) -> None:
        self.do(request, rows, lambda conn, row: policies.resume_queue(conn, row.queue), "queues are served")


@admin.register(Tenant)
class TenantAdmin(FairqAdmin):
    list_display = (
        *("group_key", "queue", "waiting", "running", "scheduled", "oldest_waiting_since"),
        *("paused_at", "weight", "max_running", "rate_limit"),
    )
    list_filter = (OfQueue,)
    search_fields = ("group_key",)
    ordering = ("-waiting", "queue", "group_key")
    actions = ("pause", "resume")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Adding a tenant stores settings before it has tasks."""
        return bool(admin.ModelAdmin.has_add_permission(self, request))

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        counts = ("waiting", "running", "scheduled", "oldest_waiting_since", "paused_at")
        return () if obj is None else ("queue", "group_key", *counts)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        return (queryset.filter(group_key=term) if term else queryset), False

    def save_model(self, request: HttpRequest, obj: Tenant, form: Any, change: bool) -> None:
        names = {*form.changed_data} - {"queue", "group_key"}
        changed = {name: form.cleaned_data[name] for name in names}
        obj.key = json.dumps([obj.queue, obj.group_key], ensure_ascii=False)
        policies.configure_group(database.connection(), obj.queue, obj.group_key, **changed)

    @admin.action(description="Pause", permissions=["change"])
    def pause(self, request: HttpRequest, rows: Any) -> None:
        self.do(request, rows, _of_group(policies.pause_group), "tenants are paused")

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, rows: Any) -> None:
        self.do(request, rows, _of_group(policies.resume_group), "tenants are served")


def _of_group(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda conn, row: function(conn, row.queue, row.group_key)
