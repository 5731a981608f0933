"""A Django project with fairq: its tests pass in Django's own runner, on each stack."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.processes import ROOT
from tests.support.server import TestServer

PROJECT = Path(__file__).parent / "project"
# Django 6 needs Python 3.12: .ci/venv makes a second environment where there is one.
DJANGO_6 = ROOT / ".venv" / "django6" / "bin" / "python"
# Each takes ten seconds of processor for all of it: what depends on the name space runs on both, the rest on
# one; `make test-django` runs all on each.
STACKS = {
    "django_tasks on Django 5.2": ("django_tasks", Path(sys.executable), ("contract", "workers", "admin")),
    "django.tasks on Django 6": ("django.tasks", DJANGO_6, ("contract", "project")),
    "django_tasks on Django 6": ("django_tasks", DJANGO_6, ()),
}
ALL = "FAIRQ_TEST_DJANGO" in os.environ


@pytest.mark.parametrize(
    ("space", "python", "parts"), [each for each in STACKS.values() if each[2] or ALL], ids=str
)
def test_the_tests_of_a_project_pass(
    space: str, python: Path, parts: tuple[str, ...], server: TestServer
) -> None:
    if not python.exists():
        pytest.skip("Django 6 needs a Python of at least 3.12")
    given = {name.upper(): value for name, value in conninfo_to_dict(server.admin_dsn).items()}
    known = {name: given.get(name, "") for name in ("USER", "PASSWORD", "HOST", "PORT")}
    name = f"fairq_test_{server.run_id}_django_{os.getpid()}_{space.replace('.', '_')}"
    database = {**known, "NAME": given["DBNAME"], "TEST": {"NAME": name}}
    labels = [] if ALL else [f"shop.tests.test_{part}" for part in parts]
    ran = subprocess.run(
        [python, "-W", "error", "manage.py", "test", "--noinput", *labels],
        cwd=PROJECT,
        env={
            **{
                key: value for key, value in os.environ.items() if not key.startswith(("FAIRQ_", "DATABASE_"))
            },
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": os.fspath(ROOT),
            "TASKS_SPACE": space,
            "TEST_DATABASE": json.dumps(database),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    # A worker may end the process; the last word is the runner's.
    assert (ran.returncode, "\nOK" in ran.stderr) == (0, True), ran.stderr[-10_000:] + ran.stdout[-2_000:]
