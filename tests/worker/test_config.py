"""A worker's configuration: all mistakes are reported at once, before it connects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

import fairq
from fairq.dsn import VARIABLES
from fairq.errors import ConfigurationError
from fairq.worker import Settings, Worker
from fairq.worker.config import BOUNDS, banner, cores, limits, problems, queues_of
from fairq.worker.connect import conninfo
from fairq.worker.ending import LAST_RESORT_SECONDS

NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"


@pytest.fixture
def app() -> fairq.App:
    app = fairq.App()

    @app.task
    def parse(payload: Any) -> None: ...

    return app


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("db_retry_initial_ms", 100, 60_000),
        ("db_retry_max_ms", 500, 300_000),
        ("db_retry_max_attempts", 0, 10_000),
        ("notify_poll_interval_ms", 1_000, 300_000),
    ],
)
def test_bounds_are_those_the_checklist_names(name: str, least: int, most: int) -> None:
    """HR21, HR22, HR23, HR24"""
    assert BOUNDS[name] == (least, most)
    for value, fits in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
        # The two pauses are bound to each other, too; that is another test.
        given: dict[str, Any] = {"db_retry_initial_ms": 100, "db_retry_max_ms": 300_000, name: value}
        assert (problems(Settings(**given)) == []) is fits, value


def test_defaults_are_those_the_checklist_names() -> None:
    """HR21 to HR24; the longest pause is some seconds, because an outage lasts that much longer."""
    settings = Settings()
    assert settings.db_retry_initial_ms == 500
    assert settings.db_retry_max_ms == 5_000
    assert settings.db_retry_max_attempts == 0
    assert problems(settings) == []


def test_there_are_as_many_slots_as_cores_that_the_process_may_use() -> None:
    """H10: in a process of its own, bound to one core."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from fairq.worker.config import Settings, limits; print(limits(Settings()).slots)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    ("quota", "slots"),
    [("max 100000", 8), ("150000 100000", 2), ("20000 100000", 1), ("900000 100000", 8), ("", 8)],
)
def test_a_quota_of_the_container_bounds_the_cores(tmp_path: Path, quota: str, slots: int) -> None:
    path = tmp_path / "cpu.max"
    if quota:
        path.write_text(quota + "\n")
    assert cores(8, path) == slots


def test_the_worker_has_ended_before_kubernetes_kills_it() -> None:
    assert Settings().grace + LAST_RESORT_SECONDS < 30


def test_everything_that_is_wrong_is_said_at_once(app: fairq.App) -> None:
    """HR6: before it connects, so a DSN that leads nowhere does no harm."""
    with pytest.raises(ConfigurationError) as caught:
        Worker(
            app,
            NOWHERE,
            queues=["a", "a", ""],
            concurrency=-1,
            prefetch=3,
            grace=-5.0,
            db_retry_initial_ms=1,
            listen=False,
            listen_dsn=NOWHERE,
            nodes="every",
        )
    text = str(caught.value)
    for expected in (
        "'a' is named twice",
        "''",
        "concurrency",
        "claim_lease",
        "grace",
        "db_retry_initial_ms",
        "listen_dsn",
        "nodes is 'every'",
    ):
        assert expected in text, text
    assert caught.value.exit_code == 2


def test_queues_by_weight_are_checked_like_the_rest(app: fairq.App) -> None:
    assert problems(Settings(queues={"a": 3, "b": 0.5})) == []
    found = "\n".join(problems(Settings(queues={"a": 0, "b": float("inf"), "": 1, "c": True, "d": "2"})))  # type: ignore[dict-item]
    for expected in ("'a' is 0; it must be 0.001 to 1000", "'b' is inf", "''", "'c' is True", "'d' is '2'"):
        assert expected in found, found
    with pytest.raises(ConfigurationError, match="'a' is -1"):
        Worker(app, NOWHERE, queues={"a": -1, "b": 1})


@pytest.mark.parametrize(
    ("texts", "queues"),
    [
        ([], ()),
        (["a", "b"], ("a", "b")),
        (["a=3", "b=0.5"], {"a": 3.0, "b": 0.5}),
        (["a=b=2"], {"a=b": 2.0}),
    ],
)
def test_queues_of_the_command_line(texts: list[str], queues: Any) -> None:
    assert queues_of(texts) == (queues, [])


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a=3", "b", "c"], "'b', 'c' not"),
        (["a=3", "a=2"], "'a' is named twice"),
        (["a=three", "b=1"], "'a' is 'three'"),
        (["=3"], "''"),
    ],
)
def test_order_and_weights_are_not_mixed_and_no_weight_is_guessed(texts: list[str], problem: str) -> None:
    queues, found = queues_of(texts)
    assert not queues
    assert problem in found[0]


def test_prefetch_and_claim_lease_go_together() -> None:
    """H22"""
    assert "claim_lease" in problems(Settings(prefetch=4))[0]
    assert "prefetch" in problems(Settings(claim_lease=5.0))[0]
    assert problems(Settings(prefetch=4, claim_lease=5.0)) == []


def test_an_unknown_option_is_named_with_those_there_are(app: fairq.App) -> None:
    with pytest.raises(ConfigurationError, match="concurency") as caught:
        Worker(app, NOWHERE, concurency=4)
    assert "concurrency" in str(caught.value.hint)


def test_an_app_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no tasks"):
        Worker(fairq.App(), NOWHERE)


def test_a_handler_that_cannot_be_decoded_is_refused(app: fairq.App) -> None:
    @app.task
    def strange(payload: type) -> None: ...

    with pytest.raises(ConfigurationError, match="strange"):
        Worker(app, NOWHERE)


def test_a_worker_without_an_app_or_a_dsn_says_what_to_pass(
    app: fairq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"pass its DSN, or set FAIRQ_DSN"):
        Worker(app)
    anything: Any = object()
    with pytest.raises(ConfigurationError, match=r"the DSN is of type object; pass a text"):
        Worker(app, anything)
    text: Any = "myapp.tasks:app"
    with pytest.raises(ConfigurationError, match=r"'myapp.tasks:app' is no fairq.App") as caught:
        Worker(text, NOWHERE)
    assert caught.value.hint == "Pass the app itself: fairq.Worker(app, dsn)"


def test_a_password_is_not_in_the_message(app: fairq.App) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Worker(app, "postgresql://bob:secret@host:notaport/db?x=y z")
    assert "secret" not in f"{caught.value} {caught.value.hint}"


def test_the_line_at_the_start_says_the_limits_in_force() -> None:
    """H39, H10"""
    settings = Settings(concurrency=8)
    assert banner(7, ["default", "mail"], settings, limits(settings), listening=True) == (
        "worker 7 on default,mail: 8 slots, no prefetch, claim batch 8, lease 60s, listening,"
        " polling every 5s"
    )
    shared = Settings(concurrency=8, queues={"default": 3, "mail": 0.5})
    assert banner(7, ["default"], settings, limits(settings), listening=False, at="node1:5432").startswith(
        "worker 7 at node1:5432 on default: "
    )
    line = banner(7, ["default", "mail"], shared, limits(shared), listening=True)
    assert line.startswith("worker 7 on default=3,mail=0.5: 8 slots")
    soft = Settings(concurrency=1, prefetch=3, claim_lease=5, max_claim_per_worker=2, mode="drain")
    assert banner(8, ["default"], soft, limits(soft), listening=False) == (
        "worker 8 on default: 1 slot, prefetch 3 with claim lease 5s, claim batch 4,"
        " at most 2 waiting, lease 60s, not listening, polling every 1s, until nothing is left"
    )


def test_the_keeper_notices_a_dead_peer_while_its_lease_still_holds() -> None:
    given = conninfo_to_dict(conninfo("postgresql://db/shop", "fairq keeper", 20.0))
    assert given["tcp_user_timeout"] == "20000"
    own = conninfo_to_dict(conninfo("postgresql://db/shop?tcp_user_timeout=7000", "fairq keeper", 20.0))
    assert own["tcp_user_timeout"] == "7000"
