"""Bob and Alice in Django. On Django 6: without django_tasks, and with fairq.contrib.django.backend."""

import os

SECRET_KEY = "example"
USE_TZ = True
INSTALLED_APPS = ["django_tasks", "fairq.contrib.django", "pages"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ.get("PGDATABASE", "pages")}
}
TASKS = {
    "default": {
        "BACKEND": "fairq.contrib.django.backport.FairqBackend",
        "OPTIONS": {"GROUP": "pages.tasks.owner"},
    }
}
