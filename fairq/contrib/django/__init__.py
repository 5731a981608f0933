"""fairq in a Django project: `INSTALLED_APPS = [..., "fairq.contrib.django"]`.

apps        the app: what `migrate` does besides migrating
database    which of DATABASES it is, and its DSN
backend     the backend of `django.tasks`; `backport`: the one of `django_tasks`; `base`: what they share
results     what the database knows of a task, as Django tells it
worker      the app that `manage.py fairq work` runs
fresh       no task meets a connection that is lost
exceptions  what ends a task that no function raised
admin       tenants, tasks and limits; `models`: fairq's tables and views
groups      ways to say whose a task is
checks      what `manage.py check` says
testing     for the tests of a project
"""
