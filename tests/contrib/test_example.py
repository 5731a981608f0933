"""examples/django does what its page says."""

import os
import subprocess
import sys
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from tests.support.database import Database
from tests.support.processes import ROOT

EXAMPLE = ROOT / "examples" / "django"
PAGE = ROOT / "docs" / "how-to" / "use-with-django.md"


def test_alices_page_is_read_at_once(empty_database: Database) -> None:
    parts = conninfo_to_dict(empty_database.dsn)
    names = ("dbname", "user", "password", "host", "port")
    known = dict(zip(names, ("PGDATABASE", "PGUSER", "PGPASSWORD", "PGHOST", "PGPORT"), strict=True))
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FAIRQ_", "DATABASE_"))},
        **{known[name]: str(value) for name, value in parts.items() if name in known},
        "DJANGO_SETTINGS_MODULE": "settings",
        "PYTHONPATH": os.fspath(ROOT),
    }

    def manage(*words: str, **options: Any) -> Any:
        command = [sys.executable, "-W", "error", "manage.py", *words]
        return subprocess.Popen(command, cwd=EXAMPLE, env=env, stdout=subprocess.PIPE, text=True, **options)

    with manage("migrate", "-v", "0") as migrating:
        assert migrating.wait() == 0
    with manage("fairq", "work", "-c", "1") as working:
        try:
            with manage("bob_and_alice") as watching:
                said, _ = watching.communicate(timeout=60)
        finally:
            working.terminate()
            working.communicate(timeout=60)
    assert said.startswith("page 1 of alice is read, after ")
    assert int(said.split()[-4]) < 490
    assert working.returncode == 0
    with manage("test", "--noinput", stderr=subprocess.STDOUT) as testing:
        printed, _ = testing.communicate(timeout=60)
    assert ("Ran 1 test" in printed, testing.returncode) == (True, 0), printed


def test_the_page_shows_the_example() -> None:
    """All that it shows of a file is in that file, line by line."""
    text = PAGE.read_text("utf-8")
    shown = [block.split("\n", 1) for block in text.split("```python title=")[1:]]
    assert {name for name, _ in shown} == {"settings.py", "pages/tasks.py", "pages/tests.py"}
    for name, rest in shown:
        assert rest.split("```")[0] in (EXAMPLE / name).read_text("utf-8"), name
