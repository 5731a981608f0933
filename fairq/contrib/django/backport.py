"""`django_tasks`, the backport for Django 5.2:

TASKS = {"default": {"BACKEND": "fairq.contrib.django.backport.FairqBackend"}}
"""

from __future__ import annotations

from django_tasks import base, exceptions, signals
from django_tasks.backends.base import BaseTaskBackend
from django_tasks.utils import normalize_json

from fairq.contrib.django.base import Backend, Space, task_class

__all__ = ["FairqBackend", "FairqTask"]

FairqTask = task_class(base.Task, __name__)


class FairqBackend(Backend, BaseTaskBackend):
    space = Space(base, exceptions, signals, exceptions.InvalidTaskError, normalize_json)
    task_class = FairqTask
