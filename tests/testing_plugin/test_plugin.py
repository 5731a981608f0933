"""The pytest plugin, in a pytest of its own."""

import os
import uuid
from pathlib import Path

import psycopg
import pytest

from tests.support.server import TestServer

pytest_plugins = ["pytester"]

SUITE = """
    import dataclasses
    import fairq
    from fairq import testing

    @dataclasses.dataclass
    class Parse:
        file: str

    app = fairq.App()
    seen = []

    @app.task
    def parse(payload: Parse) -> None:
        seen.append(payload.file)

    def test_a_task_runs(fairq_db):
        parse.enqueue(fairq_db, "bob", Parse("a.pdf"))
        assert len(testing.drain(fairq_db, app)) == 1
        assert seen == ["a.pdf"]

    def test_nothing_is_left_of_the_test_before(fairq_db):
        assert testing.enqueued(fairq_db) == []
        assert fairq_db.execute("select count(*) from fairq.finished_tasks").fetchone() == (0,)

    def test_the_dsn_is_for_other_connections(fairq_dsn):
        import psycopg
        with psycopg.connect(fairq_dsn) as conn:
            assert fairq.enqueue(conn, "bob") > 0
            conn.rollback()

    def test_the_dsn_is_a_url(fairq_dsn):
        import sqlalchemy
        engine = sqlalchemy.create_engine(sqlalchemy.make_url(fairq_dsn).set(drivername="postgresql+psycopg"))
        with engine.connect() as conn:
            assert fairq.enqueue(conn, "bob") > 0
"""


def test_an_application_tests_with_a_database_of_its_own(
    pytester: pytest.Pytester, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the server of FAIRQ_TEST_DSN, it leaves nothing behind."""
    monkeypatch.setenv("FAIRQ_TEST_DSN", server.admin_dsn)
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("-q", "-W", "error", "-p", "no:xdist").assert_outcomes(passed=4)


def test_the_queues_of_an_app_are_there(
    pytester: pytest.Pytester, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRQ_TEST_DSN", server.admin_dsn)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.fspath(Path(__file__).parents[2]), "."]))
    pytester.makeini("[pytest]\nfairq_app = declares:app")
    pytester.makepyfile(
        declares="""
            import fairq
            app = fairq.App()
            app.queue("mail", max_attempts=2)
        """,
        test_it="""
            import fairq
            def test_the_queue_is_there(fairq_db):
                assert fairq.configure_queue(fairq_db, "mail")["max_attempts"] == 2
        """,
    )
    pytester.runpytest_subprocess("-q", "-W", "error", "-p", "no:xdist").assert_outcomes(passed=1)


def test_a_database_that_cannot_be_prepared_is_dropped(
    pytester: pytest.Pytester, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRQ_TEST_DSN", server.admin_dsn)
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    given = uuid.uuid4()
    pytester.makeini("[pytest]\nfairq_app = nowhere:app")
    pytester.makeconftest(f"import uuid\nuuid.uuid4 = lambda: uuid.UUID(int={given.int})")
    pytester.makepyfile("def test_x(fairq_db): ...")
    pytester.runpytest_subprocess("-q", "-p", "no:xdist").assert_outcomes(errors=1)
    with psycopg.connect(server.admin_dsn) as conn:
        query = "select from pg_database where datname = %s"
        assert conn.execute(query, [f"fairq_test_{given.hex[:12]}"]).rowcount == 0


def test_without_a_server_an_embedded_one_is_started(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAIRQ_TEST_DSN", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("-q", "-W", "error", "-p", "no:xdist").assert_outcomes(passed=4)


def test_a_run_without_a_database_is_told_what_to_do(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FAIRQ_TEST_DSN", raising=False)
    monkeypatch.setenv("FAIRQ_PG_BIN", os.fspath(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    pytester.makepyfile("def test_x(fairq_db): ...")
    ran = pytester.runpytest_subprocess("-q", "-p", "no:xdist")
    ran.assert_outcomes(errors=1)
    ran.stdout.fnmatch_lines(["*set FAIRQ_TEST_DSN*"])


def test_a_run_that_does_not_use_fairq_loads_nothing_of_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            assert "psycopg" not in sys.modules
            assert "fairq.embedded" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("-q", "-p", "no:xdist").assert_outcomes(passed=1)
