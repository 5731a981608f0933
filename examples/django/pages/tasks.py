"""Pages of many owners are read, one after the other."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from django_tasks import task


@task()
def read(page: int, owner: str) -> str:
    time.sleep(0.01)
    return f"page {page} of {owner}"


def owner(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Whose a task is: GROUP of the settings."""
    return str(kwargs["owner"])
