"""The operation of Django's migrations: one revision of fairq's installer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.db import router
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ModelState

from fairq import install
from fairq.contrib.django import database
from fairq.contrib.django.worker import discover

__all__ = ["Revision"]


class Revision(Operation):
    """Upgrades to a revision of fairq, or downgrades to the one before. A schema that is already there, made
    by any tool, stays unchanged.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, id: str) -> None:
        self.id = id

    @property
    def before(self) -> str:
        ids = [install.BASE, *(revision.id for revision in install.revisions())]
        return ids[ids.index(self.id) - 1]

    def deconstruct(self) -> tuple[str, list[str], dict[str, Any]]:
        return type(self).__qualname__, [self.id], {}

    def describe(self) -> str:
        return f"Bring fairq to {self.id}"

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Take the models from the code, because they are not managed."""
        for model in apps.get_app_config(app_label).get_models():
            if (app_label, model._meta.model_name) not in state.models:
                state.add_model(ModelState.from_model(model))

    def database_forwards(self, app_label: str, editor: Any, from_state: Any, to_state: Any) -> None:
        self._run(app_label, editor, install.upgrade, self.before, self.id)

    def database_backwards(self, app_label: str, editor: Any, from_state: Any, to_state: Any) -> None:
        self._run(app_label, editor, install.downgrade, self.id, self.before)

    def _run(self, app_label: str, editor: Any, move: Callable[..., None], start: str, to: str) -> None:
        conn = editor.connection
        if conn.alias != database.alias() or not router.allow_migrate(conn.alias, app_label):
            return
        if editor.collect_sql:  # sqlmigrate
            editor.collected_sql += install.statements(start, to)
            return
        conn.ensure_connection()
        if to == install.BASE:
            with conn.cursor() as cursor:  # queues that the project declares are no loss
                cursor.execute("delete from fairq.queues where queue = any(%s)", [discover().queues])
        move(conn.connection, to)
