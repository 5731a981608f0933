"""The app `fairq`."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate

__all__ = ["FairqConfig"]


class FairqConfig(AppConfig):
    name = "fairq.contrib.django"
    label = "fairq"
    verbose_name = "fairq"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from fairq.contrib.django import checks  # noqa: F401  # they register themselves

        post_migrate.connect(_install, sender=self)


def _install(using: str, **_: Any) -> None:
    """Create the project's queues after each `migrate`, so that test databases have them too."""
    from fairq.contrib.django import database, worker

    if using == database.alias():
        worker.install(database.connection())
