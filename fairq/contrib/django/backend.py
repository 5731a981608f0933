"""`django.tasks`, Django 6.0 and later:

TASKS = {"default": {"BACKEND": "fairq.contrib.django.backend.FairqBackend"}}
"""

from __future__ import annotations

from django.tasks import base, exceptions, signals
from django.tasks.backends.base import BaseTaskBackend
from django.utils.json import normalize_json

from fairq.contrib.django.base import Backend, Space, task_class

__all__ = ["FairqBackend", "FairqTask"]

FairqTask = task_class(base.Task, __name__)


class FairqBackend(Backend, BaseTaskBackend):
    space = Space(base, exceptions, signals, exceptions.InvalidTask, normalize_json)
    task_class = FairqTask
