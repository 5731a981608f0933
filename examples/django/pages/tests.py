"""Tests of a project's tasks."""

import django.test

from fairq.contrib.django import testing
from pages.tasks import read


class Reading(django.test.TestCase):
    def test_a_page(self) -> None:
        result = read.enqueue(1, owner="bob")
        testing.run_tasks()  # in the test's transaction
        result.refresh()
        self.assertEqual(result.return_value, "page 1 of bob")
