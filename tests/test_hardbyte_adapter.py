"""The adapter for the open harness: its lines have the shape that the harness reads."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks.peers import hardbyte
from benchmarks.peers.hardbyte.main import MANIFEST, Delays, credited
from tests.support.database import Database
from tests.support.processes import ROOT

ADAPTER = Path(hardbyte.__file__).parent / "main.py"
REQUIRED = {
    "claim_p50_ms",
    "claim_p95_ms",
    "claim_p99_ms",
    "enqueue_rate",
    "completion_rate",
    "queue_depth",
}


@contextmanager
def adapter(dsn: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(ADAPTER)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": dsn, "SAMPLE_EVERY_S": "1", **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def samples_until_served(process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The descriptor, and the samples up to one that says that tasks were completed."""
    assert process.stdout is not None
    descriptor = json.loads(process.stdout.readline())
    samples = []
    for line in process.stdout:
        samples.append(json.loads(line))
        rates = [each["value"] for each in samples if each["metric"] == "completion_rate"]
        if any(rates) and samples[-1]["metric"] == "producer_target_rate":
            break
    return descriptor, samples


def end(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return [json.loads(line) for line in rest.splitlines()]


def test_lines_follow_the_contract_and_sigterm_ends_with_a_last_sample(empty_database: Database) -> None:
    with adapter(empty_database.dsn, PRODUCER_RATE="200", BENCH_INSTANCE_ID="0") as process:
        descriptor, samples = samples_until_served(process)
        last = end(process)
    assert descriptor["kind"] == "descriptor"
    assert descriptor["system"] == MANIFEST["system"] == "fairq"
    assert set(descriptor["event_tables"]) >= set(MANIFEST["event_tables"])
    assert any(table.startswith("fairq.finished_tasks_") for table in descriptor["event_tables"])
    assert set(descriptor["extensions"]) >= set(MANIFEST["extensions"])
    assert descriptor["db_name"] == empty_database.name
    assert descriptor["started_at"].endswith("Z")
    for each in [*samples, *last]:
        assert each["kind"] == each["subject_kind"] == "adapter"
        assert each["system"] == "fairq"
        assert each["t"].endswith("Z")
        assert isinstance(each["value"], float)
        assert isinstance(each["window_s"], float)
        assert each["instance_id"] == 0
    assert {each["metric"] for each in samples} >= REQUIRED
    assert {each["metric"] for each in last} >= REQUIRED
    delays = [each["value"] for each in samples if each["metric"] == "claim_p99_ms"]
    assert max(delays) > 0


def test_the_harness_may_keep_the_pace(empty_database: Database) -> None:
    with adapter(empty_database.dsn, PRODUCER_PACING="harness", BENCH_INSTANCE_ID="0") as process:
        assert process.stdin is not None
        process.stdin.write("ENQUEUE 30\nENQUEUE 12\n")
        process.stdin.flush()
        samples_until_served(process)
        end(process)
    with psycopg.connect(empty_database.dsn) as conn:
        query = "select (select count(*) from fairq.finished_tasks) + (select count(*) from fairq.tasks)"
        assert conn.execute(query).fetchone() == (42,)


def test_tables_of_the_manifest_are_there(database: Database) -> None:
    with psycopg.connect(database.dsn) as conn:
        for table in MANIFEST["event_tables"]:
            assert conn.execute("select to_regclass(%s) is not null", (table,)).fetchone() == (True,)


def test_credit_counts_real_time() -> None:
    assert credited(0.0, 800, 0.05, 128) == (40, 0.0)
    assert credited(0.75, 1, 0.5, 128) == (1, 0.25)
    assert credited(0.0, 1_000, 1.0, 128) == (128, 872.0)


def test_percentiles_forget_what_is_older_than_the_window() -> None:
    delays = Delays()
    for number in range(1, 101):
        delays.add(1000.0, float(number))
    p50, p99 = delays.percentiles(1001.0, (0.50, 0.99))
    assert p50 == pytest.approx(50, rel=0.005)
    assert p99 == pytest.approx(99, rel=0.005)
    assert delays.percentiles(1031.0, (0.50,)) == [0.0]
