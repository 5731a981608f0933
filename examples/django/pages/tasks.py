"""A task that reads pages of many owners."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from django_tasks import task


@task()
def read(page: int, owner: str) -> str:
    time.sleep(0.01)
    return f"page {page} of {owner}"


def owner(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The task's group: GROUP of the settings."""
    return str(kwargs["owner"])
