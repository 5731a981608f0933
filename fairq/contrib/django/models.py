"""fairq's tables and views, for the admin and your own queries. They are read only: create tasks with
`enqueue`, change settings with `fairq.configure_queue` and the like.
"""

from __future__ import annotations

from typing import Any

from django.db import models

from fairq.contrib.django import database

__all__ = ["EndedTask", "Queue", "Task", "Tenant"]


class Manager(models.Manager):
    def get_queryset(self) -> Any:
        return super().get_queryset().using(database.alias())


class _Task(models.Model):
    id = models.BigIntegerField(primary_key=True)
    shard_no = models.IntegerField(editable=False)
    queue = models.TextField()
    group_key = models.TextField("tenant")
    user_key = models.TextField("user", null=True)
    kind = models.TextField()
    priority = models.IntegerField()
    cost = models.FloatField()
    attempt = models.IntegerField()
    max_attempts = models.IntegerField()
    created_at = models.DateTimeField()
    run_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    timeout = models.DurationField(null=True)
    worker_id = models.BigIntegerField("worker", null=True)
    idempotency_key = models.TextField(null=True)
    concurrency_key = models.TextField(null=True)

    objects = Manager()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"task {self.id} of {self.group_key}"


class Task(_Task):
    """A live task, waiting or running."""

    state = models.TextField()

    class Meta:
        managed = False
        db_table = '"fairq"."live_tasks"'
        verbose_name = "task"


class EndedTask(_Task):
    """An ended task, until its queue's retention is over."""

    outcome = models.TextField()
    finished_at = models.DateTimeField()
    headers = models.JSONField(null=True)
    payload = models.JSONField()
    result = models.JSONField(null=True)
    error = models.JSONField(null=True)

    class Meta:
        managed = False
        db_table = '"fairq"."finished_tasks"'
        verbose_name = "ended task"


class Queue(models.Model):
    queue = models.TextField(primary_key=True)
    paused_at = models.DateTimeField(null=True, blank=True)
    draining_at = models.DateTimeField(null=True, blank=True)
    internal = models.BooleanField(editable=False)
    fairness = models.TextField(choices=[("count", "count"), ("time", "time")])
    weight = models.FloatField("weight of a tenant")
    group_max_running = models.IntegerField("most running of a tenant", null=True, blank=True)
    group_rate_limit = models.IntegerField("rate of a tenant", null=True, blank=True)
    group_rate_period = models.DurationField("period of that rate", null=True, blank=True)
    max_running = models.IntegerField("most running", null=True, blank=True)
    rate_limit = models.IntegerField("rate", null=True, blank=True)
    rate_period = models.DurationField("period of the rate", null=True, blank=True)
    max_attempts = models.IntegerField()
    retention = models.DurationField()

    objects = Manager()

    class Meta:
        managed = False
        db_table = '"fairq"."queues"'

    def __str__(self) -> str:
        return str(self.queue)


class Tenant(models.Model):
    """A group with live tasks or its own settings."""

    key = models.TextField(primary_key=True, editable=False)
    queue = models.TextField()
    group_key = models.TextField("tenant")
    waiting = models.BigIntegerField(editable=False)
    scheduled = models.BigIntegerField(editable=False)
    running = models.BigIntegerField(editable=False)
    oldest_waiting_since = models.DateTimeField("oldest waits since", null=True, editable=False)
    paused_at = models.DateTimeField(null=True, editable=False)
    weight = models.FloatField(null=True, blank=True)
    max_running = models.IntegerField("most running", null=True, blank=True)
    rate_limit = models.IntegerField("rate", null=True, blank=True)
    rate_period = models.DurationField("period of the rate", null=True, blank=True)

    objects = Manager()

    class Meta:
        managed = False
        db_table = '"fairq"."tenants"'

    def __str__(self) -> str:
        return f"{self.group_key} in {self.queue}"
