"""fairq in a Django project: `INSTALLED_APPS = [..., "fairq.contrib.django"]`.

apps        the app: what `migrate` does besides migrating
database    which of DATABASES to use, and its DSN
backend     the backend of `django.tasks`; `backport`: that of `django_tasks`; `base`: what they share
worker      the app that `manage.py fairq work` runs
fresh       checks Django's connections around each task
exceptions  ends of tasks that no function raised
admin       tenants, tasks and limits; `models`: fairq's tables and views
groups      ways to choose a task's group
checks      checks for `manage.py check`
testing     helpers for a project's tests
"""
