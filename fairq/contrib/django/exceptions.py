"""Ends of Django's tasks that no function raised: `result.errors[0].exception_class` is one of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Expired", "Interrupted", "WorkerLost", "class_path"]


class WorkerLost(Exception):
    """The task's worker was lost, and no attempt was left."""


class Interrupted(SystemExit):
    """The worker ended while the task ran, and no attempt was left."""


class Expired(Exception):
    """The task's `expires_at` had passed."""


_BY_CODE = {
    "worker_lost": f"{__name__}.WorkerLost",
    "interrupted": f"{__name__}.Interrupted",
    "expired": f"{__name__}.Expired",
    "cancelled": "fairq.errors.Cancelled",
}


def class_path(error: Mapping[str, Any]) -> str:
    path = error.get("type")
    if path:
        return path if "." in path else f"builtins.{path}"
    return _BY_CODE.get(str(error.get("code")), "fairq.errors.TaskFailed")
