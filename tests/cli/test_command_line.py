"""The skeleton of `fairq`: help, lazy loading, exit codes, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner, Result

from fairq import cli, install
from fairq.cli import COMMANDS, Command, Exit, main
from tests.support.database import Database

# Nothing listens there.
NOWHERE = "postgresql://bob:s3cr3t@127.0.0.1:1/shop?connect_timeout=2"


@pytest.fixture(autouse=True)
def no_database_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FAIRQ_DSN", "DATABASE_URL", "FAIRQ_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def fairq(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="fairq")


def loaded_by(code: str) -> set[str]:
    """The modules that a new Python has loaded after running some code."""
    program = f"import sys\n{code}\nprint('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("modules:", 1)[1].split())


# --- A worker's settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--lease 0", "--lease is 0.0; it must be 1 to 86400"),
        ("-c -3", "--concurrency is -3; it must be 0 to"),
        ("--poll-interval 0.1", "--poll-interval is 0.1; it must be 1 to 300"),
        ("--maintain-interval 5000", "--maintain-interval is 5000; it must be 0 to 3600"),
        (
            "--db-retry-max-ms 500 --db-retry-initial-ms 600",
            "--db-retry-max-ms (500) is less than --db-retry-initial-ms (600)",
        ),
        ("--prefetch 3", "--prefetch needs a --claim-lease: how long"),
        (
            "--breaker-cooldown-ms 50000",
            "--breaker-cooldown-ms (50000) is more than a third of",
        ),
        ("--once --drain", "--once and --drain exclude each other"),
    ],
)
def test_mistakes_of_a_worker_are_reported_by_option(options: str, says: str) -> None:
    done = fairq("work", "tests.worker.test_logs", *options.split(), "--dsn", NOWHERE)
    assert done.exit_code == Exit.USAGE
    assert f"\n  - {says}" in done.stderr
    assert "s3cr3t" not in done.stderr


@pytest.mark.parametrize("option", ["top --interval", "migrate --lock-timeout", "work x --poll-interval"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
def test_no_time_is_as_long_as_that(option: str, seconds: str) -> None:
    done = fairq(*option.split(), seconds, "--dsn", NOWHERE)
    assert done.exit_code == Exit.USAGE
    assert f"Invalid value for '{option.split()[-1]}'" in done.stderr


# --- Help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_it_explains_itself(arguments: list[str]) -> None:
    done = fairq(*arguments)
    assert done.exit_code == Exit.OK
    assert "FAIRQ_DSN" in done.stdout
    assert "migrate" in done.stdout


def test_python_m_fairq_is_fairq() -> None:
    done = subprocess.run([sys.executable, "-m", "fairq"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: fairq ")


def test_no_line_of_help_is_wider_than_a_terminal() -> None:
    """Examples are not wrapped, so a terminal would break them in the middle of a word."""
    group: Any = main
    for name in set(group.list_commands(click.Context(group))) - {"bench"}:
        command = group.get_command(click.Context(group), name)
        for path in ([name], *([name, sub] for sub in getattr(command, "commands", ()))):
            shown = CliRunner().invoke(main, [*path, "--help"], prog_name="fairq", terminal_width=80).stdout
            assert [line for line in shown.splitlines() if len(line) > 80] == [], path


def test_every_listed_command_has_help_that_says_the_same() -> None:
    group: Any = main
    context = click.Context(main, info_name="fairq")
    for name in group.list_commands(context):
        assert fairq(name, "--help").exit_code == Exit.OK
        command = group.get_command(context, name)
        assert command.get_short_help_str(200) == COMMANDS[name].help, name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_on_its_own_line_and_the_exit_codes(name: str) -> None:
    lines = [line.strip() for line in fairq(name, "--help").output.splitlines()]
    assert [line for line in lines if line.startswith((f"fairq {name}", "bash:"))], lines
    assert [line for line in lines if line.startswith("Exit codes: 0 ")], lines


def test_an_unknown_command_is_a_usage_error_with_a_suggestion() -> None:
    done = fairq("migrat")
    assert done.exit_code == Exit.USAGE
    assert "migrate" in done.stderr


def test_the_version_is_the_installed_one() -> None:
    assert fairq("--version").stdout.startswith("fairq 0.")


# --- Lean -----------------------------------------------------------------------------------------


def test_help_imports_no_command_and_no_driver() -> None:
    loaded = loaded_by("from fairq.cli import main\nmain(['--help'], standalone_mode=False)")
    assert not loaded & {
        "psycopg",
        "alembic",
        "sqlalchemy",
        "rich",
        "fairq.install",
        "fairq.commands.migrate",
    }


@pytest.mark.parametrize("module", ["fairq", "fairq.install", "fairq.dsn", "fairq.cli"])
def test_workers_load_neither_alembic_nor_sqlalchemy(module: str) -> None:
    """HR32: a worker checks the version when it starts, without the second that those two cost."""
    assert not loaded_by(f"import {module}") & {"alembic", "sqlalchemy", "mako"}


def test_a_worker_reads_the_version_without_alembic(database: Database) -> None:
    code = f"import psycopg, fairq.install\nfairq.install.check_version(psycopg.connect({database.dsn!r}))"
    assert not loaded_by(code) & {"alembic", "sqlalchemy"}


@pytest.mark.parametrize("arguments", [["sql"], ["migrate", "--help"]])
def test_printing_sql_loads_no_alembic(arguments: list[str]) -> None:
    code = f"from fairq.cli import main\nmain({arguments!r}, standalone_mode=False)"
    assert not loaded_by(code) & {"alembic", "sqlalchemy"}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, Command]:
    table = dict(COMMANDS)
    monkeypatch.setattr(cli, "COMMANDS", table)
    return table


def test_a_command_whose_extra_is_missing_says_what_to_install(commands: dict[str, Command]) -> None:
    commands["plot"] = Command("tests.cli.needs_something", "Plot.", "Look", "demo")
    done = fairq("plot")
    assert done.exit_code == Exit.USAGE
    assert "no_such_library" in done.stderr
    assert "pip install 'fairq[demo]'" in done.stderr


# --- Ends -----------------------------------------------------------------------------------------


def failing(commands: dict[str, Command], exc: BaseException, *arguments: str) -> Result:
    @cli.command()
    def fail() -> None:
        raise exc

    import tests.cli.needs_nothing as module

    module.fail = fail
    commands["fail"] = Command("tests.cli.needs_nothing", "Fail.", "Look")
    return fairq("fail", *arguments)


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (install.SchemaMissing("x"), Exit.NO),
        (install.SchemaTooOld("x"), Exit.NO),
        (install.UnknownRevision("x"), Exit.USAGE),
        (psycopg.OperationalError("x"), Exit.DATABASE),
        (psycopg.errors.InsufficientPrivilege("x"), Exit.DATABASE),
        (install.SchemaTooNew("x"), Exit.SCHEMA),
        (install.SchemaForeign("x"), Exit.SCHEMA),
        (install.SchemaBusy("x"), Exit.BUSY),
        (install.WouldLoseData("x"), Exit.REFUSED),
        (install.PackageBroken("x"), Exit.BUG),
        (ZeroDivisionError("x"), Exit.BUG),
        (PermissionError(13, "Permission denied", "x"), Exit.NO),
        (SystemExit(5), 5),
    ],
)
def test_every_kind_of_end_has_its_exit_code(
    commands: dict[str, Command], exc: BaseException, code: int
) -> None:
    done = failing(commands, exc)
    assert done.exit_code == code
    assert "Traceback" not in done.output


def test_an_error_shows_its_hint_on_stderr_and_nothing_on_stdout(commands: dict[str, Command]) -> None:
    done = failing(commands, install.SchemaTooOld("it is old", "Run: fairq migrate"))
    assert done.stdout == ""
    assert done.stderr == "fairq: it is old\n  Run: fairq migrate\n"


def test_errors_are_json_with_json(commands: dict[str, Command]) -> None:
    done = failing(commands, install.SchemaTooOld("it is old", "Run: fairq migrate"), "--json")
    assert json.loads(done.stdout) == {
        "error": {"code": "schema_too_old", "message": "it is old", "hint": "Run: fairq migrate"}
    }
    assert done.exit_code == Exit.NO


def test_a_bug_is_reported_without_passwords(commands: dict[str, Command]) -> None:
    done = failing(commands, RuntimeError(f"no idea what to do with {NOWHERE}"))
    assert "s3cr3t" not in done.output
    assert "FAIRQ_TRACEBACK" in done.stderr


def test_a_traceback_is_shown_when_asked_for(
    commands: dict[str, Command], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIRQ_TRACEBACK", "1")
    assert "Traceback" in failing(commands, ZeroDivisionError("x")).output + capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["migrate"], ["migrate", "--check"], ["migrate", "--json"]])
def test_a_database_that_is_not_there_is_an_error_of_the_database(arguments: list[str]) -> None:
    done = fairq(*arguments, "--dsn", NOWHERE)
    assert done.exit_code == Exit.DATABASE
    assert "s3cr3t" not in done.output


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`fairq sql | head -1`"""
    writer = subprocess.Popen(
        [sys.executable, "-m", "fairq", "sql"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout
    assert writer.stderr
    writer.stdout.readline()
    writer.stdout.close()
    errors = writer.stderr.read()
    writer.stderr.close()
    assert (writer.wait(60), errors) == (Exit.OK, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], Exit.NO),
        (["--version"], Exit.NO),
        (["sql", "--help"], Exit.NO),
        (["sql"], Exit.NO),
        (["stats", "--json"], Exit.USAGE),
    ],
)
def test_where_there_is_no_room_for_the_answer_that_is_said(arguments: list[str], code: int) -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "fairq", *arguments]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith("fairq: ")
    assert "bug" not in done.stderr


# --- migrate --------------------------------------------------------------------------------------


def test_without_a_database_migrate_says_how_to_name_one() -> None:
    done = fairq("migrate")
    assert done.exit_code == Exit.USAGE
    assert "FAIRQ_DSN" in done.stderr


def test_the_dsn_may_come_from_the_environment(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    alchemy = empty_database.dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    monkeypatch.setenv("DATABASE_URL", alchemy)
    assert fairq("migrate").exit_code == Exit.OK
    assert fairq("migrate", "--check").exit_code == Exit.OK


def test_migrate_tells_people_what_it_did(empty_database: Database) -> None:
    first = fairq("migrate", "--dsn", empty_database.dsn)
    assert f"↑ {install.head()}, the whole engine (" in first.stderr
    assert f"is now at {install.head()}" in first.stdout
    second = fairq("migrate", "--dsn", empty_database.dsn)
    assert second.stderr == ""
    assert "already at" in second.stdout


def test_migrate_tells_programs_what_it_did(empty_database: Database) -> None:
    done = fairq("migrate", "--json", "--dsn", empty_database.dsn)
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert (document["before"], document["after"]) == (None, install.head())
    assert [(step["revision"], step["direction"]) for step in document["steps"]] == [
        (revision.id, "up") for revision in install.revisions()
    ]


def test_check_changes_nothing_and_exits_1_when_the_database_is_behind(empty_database: Database) -> None:
    done = fairq("migrate", "--check", "--dsn", empty_database.dsn)
    assert done.exit_code == Exit.NO
    assert done.stdout.endswith("is at base, 1 step behind fairq_0001. Run: fairq migrate\n")
    as_json = fairq("migrate", "--check", "--json", "--dsn", empty_database.dsn)
    assert as_json.exit_code == Exit.NO
    assert json.loads(as_json.stdout)["pending"] == [revision.id for revision in install.revisions()]
    conn = empty_database.connect()
    assert conn.execute("select to_regnamespace('fairq')").fetchone() == (None,)


def test_check_exits_0_when_there_is_nothing_to_do(database: Database) -> None:
    done = fairq("migrate", "--check", "--json", "--dsn", database.dsn)
    assert done.exit_code == Exit.OK
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.parametrize("option", ["--check", "--to=head", "--to=base"])
def test_a_newer_database_has_its_own_exit_code(database: Database, option: str) -> None:
    """Not 1, because migrating does not help."""
    with database.connect() as conn:
        conn.execute("update fairq.schema_version set version_num = 'fairq_0099'")
    done = fairq("migrate", option, "--dsn", database.dsn)
    assert done.exit_code == Exit.SCHEMA
    assert "fairq_0099" in done.stderr
    assert "release that migrated" in done.stderr


def test_a_held_lock_has_its_own_exit_code(empty_database: Database) -> None:
    holder = empty_database.connect()
    holder.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
    done = fairq("migrate", "--lock-timeout", "0.05", "--patience", "0", "--dsn", empty_database.dsn)
    assert done.exit_code == Exit.BUSY


def test_a_downgrade_that_would_lose_data_has_its_own_exit_code(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("insert into fairq.groups (shard_no, queue, group_key) values (0, 'default', 'bob')")
    done = fairq("migrate", "--to", "base", "--dsn", database.dsn)
    assert done.exit_code == Exit.REFUSED
    assert "drop schema" in done.stderr


def test_what_was_built_on_fairq_and_keeps_it_is_named(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("create view public.mine as select id from fairq.tasks")
    done = fairq("migrate", "--to", "base", "--dsn", database.dsn)
    assert done.exit_code == Exit.DATABASE
    assert "view public.mine depends on table fairq.tasks" in done.stderr


def test_sql_prints_exactly_the_script() -> None:
    assert fairq("sql").stdout == install.script()
    assert fairq("sql", "--from", "head", "--to", "base").stdout == install.script("head", "base")


def test_an_unknown_revision_is_a_usage_error() -> None:
    done = fairq("sql", "--to", "9999")
    assert done.exit_code == Exit.USAGE
    assert "Known: base, fairq_0001" in done.stderr


def test_passwords_are_not_shown_by_a_migration(empty_database: Database) -> None:
    conninfo = psycopg.conninfo.make_conninfo(empty_database.dsn, password="s3cr3t")
    for arguments in (["migrate"], ["migrate", "--check"], ["migrate", "--json", "--to", "base"]):
        assert "s3cr3t" not in fairq(*arguments, "--dsn", conninfo).output
    assert os.environ.get("FAIRQ_DSN") is None
