"""fairq inside a user's own Alembic tree: as a branch, and called from a revision."""

import asyncio
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import alembic
import psycopg
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from fairq import install
from tests.migrations.conftest import TRICKY, History, waiters
from tests.migrations.test_script import run as psql
from tests.support.catalog import catalog, differences
from tests.support.database import Database
from tests.support.sessions import call_in_background, result, wait_until

# What `alembic init` writes, but for the connection, which the tests hand in.
ENV = """
from alembic import context

def run(connection):
    context.configure(connection=connection, target_metadata=None)
    with context.begin_transaction():
        context.run_migrations()

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    run(context.config.attributes["connection"])
"""

REVISION = """
from alembic import context, op
import sqlalchemy as sa
from fairq import install

revision = "{id}"
down_revision = {before!r}
branch_labels = {label!r}
depends_on = {depends_on!r}

def upgrade():
{up}

def downgrade():
{down}
"""

OWN_UP = '    op.create_table("orders", sa.Column("id", sa.Integer))'
OWN_DOWN = '    op.drop_table("orders")'


class Tree:
    """A user's migrations, and Alembic over them."""

    def __init__(self, folder: Path) -> None:
        self.versions = folder / "versions"
        self.versions.mkdir(parents=True)
        (folder / "env.py").write_text(ENV)
        shutil.copy(Path(alembic.__file__).parent / "templates/generic/script.py.mako", folder)
        self.output = io.StringIO()
        self.config = Config(output_buffer=self.output)
        self.config.set_main_option("script_location", str(folder))
        self.config.set_main_option("path_separator", "os")

    def add(
        self,
        id: str,
        before: str | None,
        up: str,
        down: str,
        depends_on: str | None = None,
        label: str | None = None,
    ) -> None:
        text = REVISION.format(
            id=id, before=before, up=up, down=down, depends_on=depends_on, label=label and (label,)
        )
        (self.versions / f"{id}.py").write_text(text)

    def add_fairq(self, id: str, before: str | None) -> None:
        """What docs/how-to/embed-in-your-alembic.md says to write."""
        self.add(
            id,
            before,
            f'    install.upgrade(op.get_bind(), to="{id}", start="{before or "base"}")',
            f'    install.downgrade(op.get_bind(), to="{before or "base"}", start="{id}")',
            label=None if before else "fairq",
        )

    def run(self, dsn: str, call: Callable[..., Any], *arguments: Any) -> None:
        engine = create_engine(
            "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool
        )
        with engine.begin() as connection:
            self.on(connection, call, *arguments)

    def on(self, connection: Connection, call: Callable[..., Any], *arguments: Any) -> None:
        self.config.attributes["connection"] = connection
        call(self.config, *arguments)

    def sql(self, call: Callable[..., Any], *arguments: Any) -> str:
        self.output.seek(0)
        self.output.truncate()
        call(self.config, *arguments, sql=True)
        return self.output.getvalue()


@pytest.fixture
def branch(history: History, tmp_path: Path) -> Tree:
    """A tree with an own revision, one that needs fairq, and a branch for fairq's."""
    tree = Tree(tmp_path / "app")
    for before, id in zip([None, *history.ids], history.ids, strict=False):
        tree.add_fairq(id, before)
    tree.add("own_1", None, OWN_UP, OWN_DOWN)
    needs = '    op.execute("create view waiting as select id from fairq.tasks")'
    tree.add("own_2", "own_1", needs, '    op.execute("drop view waiting")', depends_on=history.initial)
    return tree


@pytest.fixture
def caller(history: History, tmp_path: Path) -> Tree:
    """A tree whose revisions call fairq, with their own operations before and after."""
    tree = Tree(tmp_path / "app")
    tree.add(
        "own_1",
        None,
        '    install.upgrade(op.get_bind(), to="1")\n' + OWN_UP,
        OWN_DOWN + '\n    install.downgrade(op.get_bind(), start="1")',
    )
    tree.add(
        "own_2",
        "own_1",
        '    op.add_column("orders", sa.Column("before", sa.Integer))\n'
        '    install.upgrade(op.get_bind(), to="3", start="1")\n'
        '    op.add_column("orders", sa.Column("after", sa.Integer))\n'
        "    assert context.config.attributes is not None",
        '    op.drop_column("orders", "after")\n'
        '    install.downgrade(op.get_bind(), to="1", start="3")\n'
        '    op.drop_column("orders", "before")',
    )
    return tree


def heads(conn: psycopg.Connection[Any]) -> set[str]:
    return {row[0] for row in conn.execute("select version_num from public.alembic_version")}


def by_migrate(conn: psycopg.Connection[Any], dsn: str, to: str = "head") -> dict[str, dict[str, str]]:
    """The catalogue that `fairq migrate` builds in the same empty database."""
    install.migrate(dsn, to=to)
    built = catalog(conn)
    install.migrate(dsn, to="base")
    return built


# --- As a branch ----------------------------------------------------------------------------------


def files(*folders: Path) -> set[Path]:
    found = (file for folder in folders for file in folder.rglob("*") if "__pycache__" not in file.parts)
    return set(found)


def test_in_a_tree_of_fairq_alone_the_next_revision_is_written_beside_the_others(
    history: History, tmp_path: Path, empty_database: Database
) -> None:
    """Alembic writes it beside the head that it follows, never into the package."""
    tree = Tree(tmp_path / "app")
    tree.add_fairq(history.initial, None)
    package = files(install.sql_dir(), install.migrations_dir(), Path(install.__file__).parent)
    before = files(tree.versions)
    command.revision(tree.config, "orders")
    command.revision(tree.config, "bills", head="base", branch_label="app")
    assert len(files(tree.versions) - before) == 2
    assert files(install.sql_dir(), install.migrations_dir(), Path(install.__file__).parent) == package
    tree.run(empty_database.dsn, command.upgrade, "heads")
    assert install.schema_version(empty_database.connect()) == history.initial


def test_a_branch_builds_what_fairq_migrate_builds(
    branch: Tree, history: History, empty_database: Database
) -> None:
    conn = empty_database.connect(autocommit=True)
    expected = by_migrate(conn, empty_database.dsn)
    branch.run(empty_database.dsn, command.upgrade, "heads")
    assert differences(expected, catalog(conn), "migrate", "branch") == []
    assert heads(conn) == {"own_2", history.head}
    assert conn.execute("select fairq.probe()").fetchone() == (TRICKY,)
    assert conn.execute("select count(*) from public.waiting").fetchone() == (0,)
    assert install.check_version(conn) == history.head


def test_a_branch_goes_down_by_its_label(branch: Tree, history: History, empty_database: Database) -> None:
    conn = empty_database.connect(autocommit=True)
    branch.run(empty_database.dsn, command.upgrade, "heads")
    branch.run(empty_database.dsn, command.downgrade, f"fairq@{history.initial}")
    assert install.schema_version(conn) == history.initial
    branch.run(empty_database.dsn, command.downgrade, "own_1")
    branch.run(empty_database.dsn, command.downgrade, "fairq@base")
    assert catalog(conn) == {}
    assert heads(conn) == {"own_1"}


def test_a_branch_may_be_migrated_alone(branch: Tree, history: History, empty_database: Database) -> None:
    branch.run(empty_database.dsn, command.upgrade, "fairq@head")
    conn = empty_database.connect(autocommit=True)
    assert heads(conn) == {history.head}
    assert conn.execute("select to_regclass('public.orders')").fetchone() == (None,)


def test_a_database_that_fairq_migrate_made_joins_a_tree_without_stamping(
    branch: Tree, history: History, empty_database: Database
) -> None:
    install.migrate(empty_database.dsn, to="2")
    branch.run(empty_database.dsn, command.upgrade, "heads")
    conn = empty_database.connect(autocommit=True)
    assert heads(conn) == {"own_2", history.head}
    assert install.check_version(conn) == history.head
    assert install.migrate(empty_database.dsn).steps == ()


def test_a_failure_in_the_users_transaction_takes_fairq_back_with_it(
    branch: Tree, history: History, empty_database: Database
) -> None:
    branch.add("own_3", "own_2", '    op.execute("select 1 / 0")', "    pass", depends_on=history.head)
    with pytest.raises(Exception, match="division by zero"):
        branch.run(empty_database.dsn, command.upgrade, "heads")
    assert catalog(empty_database.connect()) == {}


def test_two_trees_at_once_do_no_harm(branch: Tree, history: History, empty_database: Database) -> None:
    """One migrates through a tree, one by `fairq migrate`; the second finds the work done."""
    gate = empty_database.connect()
    gate.execute("select pg_advisory_xact_lock(%s)", (install.LOCK_KEY,))
    observer = empty_database.connect(autocommit=True)
    tree = call_in_background(lambda: branch.run(empty_database.dsn, command.upgrade, "heads"))
    wait_until(lambda: len(waiters(observer)) == 1, "the tree waits")
    process = history.command("migrate", "--dsn", empty_database.dsn, "--lock-timeout", "60")
    wait_until(lambda: len(waiters(observer)) == 2, "fairq migrate waits")
    gate.commit()
    result(tree)
    assert process.wait(60) == 0
    process.communicate()
    assert install.check_version(observer) == history.head


def test_offline_sql_of_a_branch_builds_the_same(
    branch: Tree, history: History, empty_database: Database
) -> None:
    conn = empty_database.connect(autocommit=True)
    expected = by_migrate(conn, empty_database.dsn)
    psql(empty_database.dsn, branch.sql(command.upgrade, "heads"))
    assert differences(expected, catalog(conn), "migrate", "branch --sql") == []
    assert heads(conn) == {"own_2", history.head}


def test_an_asyncpg_connection_runs_the_files_as_well(
    branch: Tree, history: History, empty_database: Database
) -> None:
    """Its cursors prepare, but a file of many statements cannot be prepared."""
    parts = psycopg.conninfo.conninfo_to_dict(empty_database.dsn)
    parts["database"] = parts.pop("dbname")
    conn = empty_database.connect(autocommit=True)
    expected = by_migrate(conn, empty_database.dsn)

    async def migrate() -> None:
        import asyncpg

        engine = create_async_engine(
            "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(**parts), poolclass=NullPool
        )
        async with engine.begin() as connection:
            await connection.run_sync(branch.on, command.upgrade, "heads")
        await engine.dispose()

    asyncio.run(migrate())
    assert differences(expected, catalog(conn), "psycopg", "asyncpg") == []


# --- Called from a revision -----------------------------------------------------------------------


def test_a_users_revision_may_call_fairq_between_its_own_operations(
    caller: Tree, history: History, empty_database: Database
) -> None:
    """Alembic keeps the running operations in a global; the call gives them back."""
    conn = empty_database.connect(autocommit=True)
    expected = by_migrate(conn, empty_database.dsn)
    caller.run(empty_database.dsn, command.upgrade, "head")
    assert differences(expected, catalog(conn), "migrate", "called") == []
    assert heads(conn) == {"own_2"}
    assert [column.name for column in conn.execute("table public.orders").description or []] == [
        "id",
        "before",
        "after",
    ]
    caller.run(empty_database.dsn, command.downgrade, "own_1")
    assert install.schema_version(conn) == history.initial
    caller.run(empty_database.dsn, command.downgrade, "base")
    assert catalog(conn) == {}


def test_a_call_commits_nothing(history: History, empty_database: Database) -> None:
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(empty_database.dsn), poolclass=NullPool
    )
    with engine.connect() as connection:
        install.upgrade(connection)
        connection.rollback()
    assert catalog(empty_database.connect()) == {}


def test_a_call_upwards_never_goes_down(history: History, empty_database: Database) -> None:
    """Two histories may ask for different revisions of the same schema; the higher one wins."""
    install.migrate(empty_database.dsn)
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(empty_database.dsn), poolclass=NullPool
    )
    with engine.begin() as connection:
        install.upgrade(connection, to="1")
    with empty_database.connect() as conn:
        assert install.schema_version(conn) == history.head


def test_offline_sql_of_a_calling_revision_builds_the_same(
    caller: Tree, history: History, empty_database: Database
) -> None:
    conn = empty_database.connect(autocommit=True)
    expected = by_migrate(conn, empty_database.dsn)
    psql(empty_database.dsn, caller.sql(command.upgrade, "head"))
    assert differences(expected, catalog(conn), "migrate", "called --sql") == []
    psql(empty_database.dsn, caller.sql(command.downgrade, "own_2:base"))
    assert catalog(conn) == {}
