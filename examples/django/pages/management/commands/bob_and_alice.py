"""Bob's 500 pages wait; then Alice enqueues one, while a worker runs."""

import time
from typing import Any

from django.core.management.base import BaseCommand
from django.db import transaction

from fairq.contrib.django.models import EndedTask
from pages.tasks import read


class Command(BaseCommand):
    def handle(self, **_: Any) -> None:
        with transaction.atomic():  # so that all of them appear at once
            for page in range(500):
                read.enqueue(page, owner="bob")
        alices = read.enqueue(1, owner="alice")
        while not alices.is_finished:
            time.sleep(0.05)
            alices.refresh()
        earlier = EndedTask.objects.filter(group_key="bob", started_at__lt=alices.started_at)
        self.stdout.write(f"{alices.return_value} is read, after {earlier.count()} of Bob's 500.")
