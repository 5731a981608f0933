"""A task's group: one of its arguments, or a default."""

from typing import Any


def of(task: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    return str(kwargs.get("tenant", "nobody"))


def user(task: Any, args: list[Any], kwargs: dict[str, Any]) -> str | None:
    return kwargs.get("user")
