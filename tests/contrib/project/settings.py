"""A project with fairq, on one of the two name spaces of Django's tasks; `tests.contrib.test_project` says
where its database is.
"""

import json
import os

SPACE = os.environ["TASKS_SPACE"]
BACKEND = {
    "django.tasks": "fairq.contrib.django.backend.FairqBackend",
    "django_tasks": "fairq.contrib.django.backport.FairqBackend",
}[SPACE]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "OPTIONS": {"application_name": "shop"},
        **json.loads(os.environ["TEST_DATABASE"]),
    },
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    *(["django_tasks"] if SPACE == "django_tasks" else []),
    "fairq.contrib.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "urls"
SECRET_KEY = "test"
USE_TZ = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"nowhere": {"class": "logging.NullHandler"}},
    "root": {"handlers": ["nowhere"]},
}
TASKS = {
    "default": {
        "BACKEND": BACKEND,
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"GROUP": "shop.tenants.of", "USER": "shop.tenants.user"},
    },
    "anywhere": {"BACKEND": BACKEND, "QUEUES": []},
    "of the request": {
        "BACKEND": BACKEND,
        "OPTIONS": {"GROUP": "fairq.contrib.django.groups.current"},
    },
    "of the schema": {
        "BACKEND": BACKEND,
        "OPTIONS": {"GROUP": "fairq.contrib.django.groups.schema"},
    },
    "stubborn": {"BACKEND": BACKEND, "QUEUES": ["mail"], "OPTIONS": {"MAX_ATTEMPTS": 3}},
}
