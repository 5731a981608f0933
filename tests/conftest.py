"""The server of the run and the databases of the tests; see CONTRIBUTING.md."""

import contextlib
import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings

from fairq.embedded import EmbeddedError
from tests.support import calls, cluster, managed
from tests.support.database import MANAGED, PASSWORD, ROLES, Database, Preparation, prepare, session
from tests.support.kept import FOLDERS, KEEPS, KeptDatabase
from tests.support.moves import set_shards
from tests.support.server import (
    Choice,
    TestServer,
    choose,
    close_all,
    create_database,
    docker_answers,
    drop_database,
    drop_rest,
    drop_soon,
    keep_temporary_files_in_memory,
    running_server,
    with_database,
)

# The same examples each time: a red run means a change. FAIRQ_HYPOTHESIS_PROFILE=thorough looks elsewhere.
settings.register_profile("same", derandomize=True, database=None, deadline=None, print_blob=True)
if os.environ.get("FAIRQ_HYPOTHESIS_PROFILE", "quick") == "quick":
    settings.load_profile("same")

SERVER = pytest.StashKey[TestServer]()
CHOICE = pytest.StashKey[Choice]()
CLOSING = pytest.StashKey[contextlib.ExitStack]()
LOG_START = pytest.StashKey[int]()
LOG_LINES = 40

# What a database is a copy of, and what is done to it.
Kind = tuple[str, Preparation | None]


@pytest.hookimpl(tryfirst=True)  # before pytest chooses its folder for temporary files
def pytest_configure(config: pytest.Config) -> None:
    """Start the server in the controller or the only process; pytest-xdist's workers get its address."""
    # A run in the background of a script ignores Ctrl-C, and so would every process that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    if workerinput is not None:
        config.stash[SERVER] = TestServer(**workerinput["fairq_server"])
        return
    if config.option.collectonly or config.option.help or config.option.showfixtures:
        return
    stack = config.stash[CLOSING] = contextlib.ExitStack()
    in_memory = keep_temporary_files_in_memory(os.environ)
    if config.option.basetemp is None:
        parent = in_memory or config.rootpath / ".cache" / "pytest"
        config.option.basetemp = stack.enter_context(_temporary_folder(parent))
    try:
        config.stash[CHOICE] = choose(os.environ, docker_answers)
        config.stash[SERVER] = stack.enter_context(running_server(config.stash[CHOICE]))
    except (ValueError, EmbeddedError, psycopg.Error) as exc:
        raise pytest.UsageError(f"No PostgreSQL for the tests: {exc}") from exc


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """The folder for this run's files. Those of passed tests are removed."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fairq-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "files"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fairq_server"] = node.config.stash[SERVER].as_dict()


# Whatever is imported and collected stays to the end: to go through it each time would take a tenth of a run.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here."""
    left_out = (managed.LEFT_OUT if MANAGED else {}) | (cluster.LEFT_OUT if cluster.ON_CITUS else {})
    for item in items:
        for name, why in left_out.items():
            if item.nodeid.startswith(name):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash.get(CLOSING, contextlib.ExitStack()).close()
    close_all()


def pytest_report_header(config: pytest.Config) -> str | None:
    server, choice = config.stash.get(SERVER, None), config.stash.get(CHOICE, None)
    return f"server: {server.description} ({choice.reason})" if server and choice else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (server := config.stash.get(SERVER, None)) and config.get_verbosity() < 0:  # -q hides the header
        terminalreporter.write_line(f"server: {server.description}")


@pytest.hookimpl(tryfirst=True)  # before fixtures connect
def pytest_runtest_setup(item: pytest.Item) -> None:
    managed.begin(item)
    server = item.config.stash.get(SERVER, None)
    if server and server.log_file and Path(server.log_file).exists():
        item.stash[LOG_START] = Path(server.log_file).stat().st_size


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show a failed test's part of the server's log."""
    report: Any = yield
    server = item.config.stash.get(SERVER, None)
    if report.failed and server and LOG_START in item.stash:
        with open(server.log_file, errors="replace") as log:
            log.seek(item.stash[LOG_START])
            lines = log.read().splitlines()
        if lines:
            report.sections.append(("PostgreSQL log", "\n".join(lines[-LOG_LINES:])))
    return report  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[TestServer]:
    """The server of this run."""
    server = pytestconfig.stash[SERVER]
    yield server
    drop_rest(server)


@pytest.fixture(scope="session")
def template(server: TestServer) -> str:
    """The name of the template database with the engine; nobody connects to it."""
    if server.template_error:
        pytest.fail(server.template_error, pytrace=False)
    return server.template


@pytest.fixture(scope="session")
def _worker_database(server: TestServer, template: str, worker: str) -> Iterator[str]:
    name = f"fairq_test_{server.run_id}_{worker}"
    create_database(server, name, template)
    yield server.dsn(name)
    drop_database(server, name)


@pytest.fixture(scope="session")
def worker(request: pytest.FixtureRequest) -> str:
    """The name of this pytest-xdist worker."""
    workerinput: dict[str, str] = getattr(request.config, "workerinput", {})
    return workerinput.get("workerid", "main")


@pytest.fixture(scope="session")
def logins(server: TestServer, template: str, worker: str) -> Iterator[dict[str, str]]:
    """Two users for each role of fairq, named by the role and "another …"; see `Database.dsn_as`."""
    names = {
        f"{which}fairq_{part}": f"fairq_test_{server.run_id}_{worker}_{number}_{part}"
        for number, which in enumerate(("", "another "))
        for part in ROLES
    }
    with psycopg.connect(server.admin_dsn, autocommit=True) as conn:
        for role, name in names.items():
            granted = role.removeprefix("another ")
            conn.execute(f"create role {name} login password '{PASSWORD}' in role {granted}".encode())
    yield names
    drop_rest(server)  # where they may own something
    with psycopg.connect(server.admin_dsn, autocommit=True) as conn:
        conn.execute(f"drop role {', '.join(names.values())}".encode())


@pytest.fixture(scope="module")
def _module_connection(_worker_database: str) -> Iterator[psycopg.Connection[Any]]:
    """Compile the functions, which takes each session longer than most tests."""
    with contextlib.closing(session(_worker_database, application_name="db")) as conn:
        yield conn


@pytest.fixture
def db(_module_connection: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a migrated database, which is rolled back at the end, so nothing may commit."""
    yield _module_connection
    _module_connection.rollback()


@pytest.fixture
def preparation(request: pytest.FixtureRequest) -> Preparation | None:
    """Hook to prepare `database` before the test."""
    marker = request.node.get_closest_marker("prepared")
    return marker.args[0] if marker else None


@pytest.fixture
def source(template: str) -> str:
    """What `database` is a copy of."""
    return template


@pytest.fixture(scope="session")
def noon(server: TestServer, template: str, worker: str) -> Iterator[str]:
    """A source for tests whose clock stands at NOON: its history has the days around that. Else the first
    upkeep would make them, and drop today's: sixteen tables each, and a database that is not kept.
    """
    if cluster.ON_CITUS:
        yield template
        return
    name = f"fairq_test_{server.run_id}_{worker}_noon"
    create_database(server, name, template)
    with psycopg.connect(with_database(server.given or server.admin_dsn, name), autocommit=True) as conn:
        calls.at(conn, "12:00:00")
        conn.execute("select fairq._rotate_partitions()")
    yield name
    drop_database(server, name)


@pytest.fixture
def database(
    request: pytest.FixtureRequest,
    server: TestServer,
    source: str,
    logins: dict[str, str],
    preparation: Preparation | None,
    _kept: dict[Kind, list[KeptDatabase]],
) -> Iterator[Database]:
    """The test's own migrated database, for commits and several sessions."""
    node = request.node
    if not (KEEPS and node.nodeid.startswith(FOLDERS)) or node.get_closest_marker("new_database"):
        yield from _database(server, source, logins, preparation)
        return
    kept = _kept.setdefault((source, preparation), [])
    if not kept:
        name = _new_name(server)
        create_database(server, name, source)
        kept.append(KeptDatabase(server, name, logins, preparation))
    database = kept.pop()
    with database.lends():
        yield database
    database.close()
    if database.is_as_new():
        kept.append(database)
    else:
        database.drop(server)


@pytest.fixture
def conn(database: Database) -> psycopg.Connection[Any]:
    """A connection to `database` that commits each statement."""
    return database.connect(autocommit=True)


@pytest.fixture(scope="session")
def _kept(server: TestServer) -> Iterator[dict[Kind, list[KeptDatabase]]]:
    """The databases that wait for their next test."""
    kept: dict[Kind, list[KeptDatabase]] = {}
    yield kept
    for database in itertools.chain(*kept.values()):
        database.drop(server)


@pytest.fixture
def one_shard(database: Database) -> None:
    """A single shard, for the order of groups and keys; `make test-shards` has many."""
    if os.environ.get("FAIRQ_TEST_SHARDS"):
        with psycopg.connect(database.dsn) as conn:
            set_shards(conn, 1)


@pytest.fixture
def empty_database(server: TestServer) -> Iterator[Database]:
    """The test's own empty database, for migrations."""
    yield from _database(server, "template0")


_numbers = itertools.count(1)


def _new_name(server: TestServer) -> str:
    return f"fairq_test_{server.run_id}_{os.getpid()}_{next(_numbers)}"


def _database(
    server: TestServer,
    template: str,
    logins: dict[str, str] | None = None,
    preparation: Preparation | None = None,
) -> Iterator[Database]:
    name = _new_name(server)
    create_database(server, name, template)
    database = Database(name, server.dsn(name), logins or {})
    prepare(database, preparation)
    yield database
    database.close()
    drop_soon(server, name)


@pytest.fixture
def by_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let producers and workers call as fairq_enqueue and fairq_work, whatever the session's role is."""
    monkeypatch.setattr(calls, "by_roles", True)
