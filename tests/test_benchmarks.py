"""Each benchmark runs once, tiny, so that none rots; what is made of the results is right."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import compare, harness, measures, page, plots
from benchmarks.__main__ import NAMES, main
from benchmarks.engines import Record
from benchmarks.results import Results, gather, newest, reference, shown
from fairq.commands.bench import find_benchmarks
from tests.support.database import Database
from tests.support.processes import ROOT, is_alive, program, read_json
from tests.support.sessions import wait_until


def check_plans(out: Path) -> None:
    """They are kept, and tell who got what."""
    plans = {path.name: path.read_text() for path in (out.parent / "plans" / "out").iterdir()}
    assert "WindowAgg" in plans["window-300-tasks-10-groups.txt"]
    assert "ready_order_idx" in plans["fairq-pop-300-tasks-10-groups.txt"] or "auto_explain" in str(plans)

    values = gather(map(json.loads, out.read_text().splitlines()))
    got = {key.what: subjects for key, subjects in values.of("explain").items() if "got" in key.what}
    for subject in ("fifo", "block id", "fairq pop"):
        assert got["got by ten workers"][subject] == {0: 150}
        assert got["got by the worker with least"][subject] == {0: 15}
        assert got["got by more than one"][subject] == {0: 0}
    visited = next(iter(values.of("explain", "rows visited").values()))
    # Of each task an entry of the order and its body, and no more of others than that makes.
    assert visited["fairq pop"][0] < 2 * 15 + 15 < 300 <= visited["window"][0]


def check_shares(out: Path) -> None:
    """What is settled is shared evenly. And the clock of the simulated seconds is the engine's: without, both
    would share by count.
    """
    values = gather(map(json.loads, out.read_text().splitlines()))
    for subjects in values.of("settled_cost").values():
        assert subjects["fairq, settled"][0] < 0.1 < 0.5 < subjects["by count"][0]


CHECKS = {"explain": check_plans, "settled_cost": check_shares}


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs_and_is_reported(name: str, empty_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ["explain"] if name == "explain" else ["run", name]
    ran = CliRunner().invoke(
        main,
        [*command, "--scale", "tiny", "--dsn", empty_database.dsn, "--out", str(out), "--draft"],
        catch_exceptions=False,
    )
    assert ran.exit_code == 0
    facts, *records = map(json.loads, out.read_text().splitlines())
    assert facts["facts"]["postgresql"]
    assert all(record["value"] >= 0 for record in records if "value" in record)
    assert {record["subject"] for record in records} > {"machine"}

    reported = CliRunner().invoke(main, ["report", str(out)], catch_exceptions=False)
    assert reported.exit_code == 0
    text = out.with_suffix(".md").read_text()
    tables = (tmp_path / "out-tables.md").read_text()
    assert f"## {page.TITLES.get(name, name)}" in text
    assert "(out-tables.md)" in text
    for what in {record["what"] for record in records if "value" in record} - {"spin"}:
        assert f"**{what}**" in tables
    for picture in plots.PLOTS:
        if picture[0] == name:
            assert f"(bench-{picture[1]}.png)" in text
            assert (tmp_path / f"bench-{picture[1]}.png").stat().st_size > 10_000
    if name in CHECKS:
        CHECKS[name](out)


def test_one_that_fails_does_not_stop_the_others(
    empty_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("benchmarks.bench_cycle.run", fail)
    out = tmp_path / "out.jsonl"
    arguments = ["--scale", "tiny", "--dsn", empty_database.dsn, "--out", str(out), "--draft"]
    ran = CliRunner().invoke(main, ["run", "cycle", "generated_call", *arguments])
    assert ran.exit_code == 1
    assert "out of luck" in ran.output
    assert "failed: cycle" in ran.output
    assert '"generated_call"' in out.read_text()


def test_a_report_takes_each_benchmark_from_the_newest_file(tmp_path: Path) -> None:
    row = {"what": "cycle", "unit": "tasks/s", "subject": "fairq", "scenario": {}, "repetition": 0}
    paths = []
    for name, found in (("1", {"cycle": 1.0, "worker": 1.0}), ("2", {"cycle": 2.0}), ("3", {"cycle": 3.0})):
        paths.append(tmp_path / f"{name}.jsonl")
        lines = [
            {"facts": {"commit": name}},
            *({**row, "benchmark": of, "value": v} for of, v in found.items()),
        ]
        paths[-1].write_text("\n".join(map(json.dumps, lines)))
    read = newest(paths)
    assert [values["fairq"] for values in read.of("cycle").values()] == [{0: 3.0}]
    assert [values["fairq"] for values in read.of("worker").values()] == [{0: 1.0}]
    assert read.files == ["1.jsonl", "3.jsonl"]
    assert {facts["commit"] for facts in read.facts} == {"1", "3"}


def a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one committed file of the engine, in the place of ours."""
    monkeypatch.setattr("benchmarks.harness.ROOT", tmp_path / "benchmarks")
    for folder in ("benchmarks/results", "sql", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sql" / "engine.sql").write_text("select 1;")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    return tmp_path


def test_what_is_measured_is_committed_or_called_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = a_clone(tmp_path, monkeypatch)
    (clone / "docs" / "page.md").write_text("Documents may change.")
    (clone / "benchmarks" / "results" / "new.jsonl").write_text("And so may results.")
    assert harness.uncommitted() == []
    assert "draft" not in str(harness.commit())

    (clone / "sql" / "new.sql").write_text("select 2;")
    assert harness.uncommitted() == ["sql/new.sql"]
    assert str(harness.commit()).endswith("-draft")
    refused = CliRunner().invoke(main, ["run", "cycle", "--scale", "tiny", "--dsn", "postgresql://nowhere"])
    assert refused.exit_code == 2
    assert "Not committed: sql/new.sql" in refused.output
    assert "--draft" in refused.output


def test_without_git_every_measurement_is_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.ROOT", tmp_path / "benchmarks")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert harness.uncommitted()


def test_a_wait_that_was_cut_off_is_no_wait(tmp_path: Path) -> None:
    """Neither in the tables nor in a ratio: the task was not served."""
    base = {"benchmark": "peers", "what": "newcomers' wait, p50", "unit": "ms", "scenario": {}, "limit": 6000}
    rows = [("fairq", 6.0), ("fifo", 6000.0), ("other", 5999.0)]
    lines = [{**base, "subject": subject, "value": value, "repetition": 0} for subject, value in rows]
    facts = {"postgresql": "18", "python": "3", "psycopg": "3", "commit": "abc", "settings": {}}
    facts["machine"] = {"cores": 2, "system": "Linux", "arch": "x86_64"}
    out = tmp_path / "out.jsonl"
    out.write_text("\n".join(json.dumps(each) for each in [{"facts": facts}, *lines]))
    page.write([out], tmp_path / "page.md", tmp_path, tmp_path / "tables.md")
    tables = (tmp_path / "tables.md").read_text()
    assert "| fifo | not served in 6 s |" in tables
    assert "| fairq | 6 |" in tables
    assert "| other | 5,999 |" in tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00412, "0.00412"),
        (12.345, "12.3"),
        (107, "107"),
        (999.7, "1,000"),
        (1234567.8, "1,234,568"),
    ],
)
def test_numbers_are_shown_with_three_digits_or_whole(value: float, text: str) -> None:
    assert shown(value) == text
    assert shown(value, "ms") == f"{text} ms"


# --- Fairness as numbers ----------------------------------------------------------------------------


def test_jain_is_one_for_equal_service_and_one_nth_for_a_monopoly() -> None:
    assert measures.jain([5, 5, 5, 5]) == 1
    assert measures.jain([8, 0, 0, 0]) == 0.25
    assert measures.jain([0, 0]) == 1


def test_shares_are_judged_by_the_weights() -> None:
    weights = {"one": 1.0, "two": 2.0, "five": 5.0}
    assert measures.share_error({"one": 10, "two": 20, "five": 50}, weights) == 0
    assert measures.share_error({"one": 20, "two": 20, "five": 40}, weights) == 1
    assert measures.share_error({"five": 50}, weights) == 1


def test_service_is_counted_where_tasks_start_and_measured_while_they_run() -> None:
    history = [
        Record("bob", created=0, started=1, finished=3),
        Record("bob", created=0, started=3, finished=None),
        Record("alice", created=0, started=None, finished=None),
    ]
    counted = measures.service(history, ["bob", "alice"], 0, 2, by_seconds=False)
    assert counted == {"bob": 1, "alice": 0}
    timed = measures.service(history, ["bob", "alice"], 2, 10, by_seconds=True)
    assert timed == {"bob": 1 + 7, "alice": 0}


def test_who_still_waits_has_waited_until_the_end() -> None:
    history = [Record("newcomer 1", created=1, started=3, finished=4), Record("newcomer 2", 2, None, None)]
    assert measures.by_class(history, end=10) == {"newcomer": [2_000, 8_000]}


def test_percentiles_are_values_that_were_measured() -> None:
    assert measures.percentile([4, 1, 3, 2], 0.5) == 2
    assert measures.percentile([4, 1, 3, 2], 0.99) == 4
    assert measures.percentile([7], 0.5) == 7


# --- Compare ---------------------------------------------------------------------------------------


def a_run(
    fairq: list[float], fifo: list[float], *, spin: float = 0.01, unit: str = "tasks/s", what: str = "cycle"
) -> Results:
    def record(subject: str, value: float, number: int) -> dict[str, Any]:
        return {
            "benchmark": "cycle",
            "subject": subject,
            "what": what,
            "value": value,
            "unit": unit,
            "scenario": {"batch": 200},
            "repetition": number,
        }

    records = [record("fairq", value, number) for number, value in enumerate(fairq)]
    records += [record("fifo", value, number) for number, value in enumerate(fifo)]
    records += [record("machine", spin, number) for number in range(len(fairq))]
    return gather(records)


def slower(old: Results, new: Results) -> list[str]:
    return [change.subject for change in compare.compare(old, new) if change.regressed]


def test_a_busier_machine_is_no_regression() -> None:
    old = a_run([10_000, 10_200, 10_100], [20_000, 20_300, 20_100])
    new = a_run([5_000, 5_100, 5_050], [10_000, 10_100, 10_050], spin=0.02)
    assert slower(old, new) == []


def test_a_worse_ratio_is_a_regression_and_a_better_one_is_none() -> None:
    old = a_run([10_000, 10_200, 10_100], [20_000, 20_300, 20_100])
    new = a_run([7_000, 7_100, 7_050], [20_000, 20_100, 20_050])
    assert slower(old, new) == ["fairq"]
    assert slower(new, old) == []


def test_what_the_measurements_vary_by_anyway_is_tolerated() -> None:
    old = a_run([10_000, 14_000, 7_000], [20_000, 20_300, 20_100])
    new = a_run([7_000, 9_000, 6_000], [20_000, 20_100, 20_050])
    assert slower(old, new) == []


def test_times_are_worse_when_they_are_longer() -> None:
    old = a_run([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], unit="ms")
    new = a_run([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], unit="ms")
    assert slower(old, new) == ["fairq"]


def test_a_held_snapshot_is_compared_with_the_same_queue_without() -> None:
    rows = [("fairq free", 1.0), ("fairq held", 3.0), ("fifo free", 0.5), ("fifo held", 5.0)]
    base = {"benchmark": "held", "what": "pop p50", "unit": "ms", "scenario": {}, "repetition": 0}
    found = gather({**base, "subject": subject, "value": value} for subject, value in rows)
    key = next(iter(found.values))
    assert reference(found, key, "fairq held") == ("fairq free", {0: 1.0})
    assert reference(found, key, "fifo held") == ("fifo free", {0: 0.5})
    assert reference(found, key, "fairq free") is None


def test_counts_are_compared_as_they_are() -> None:
    old = a_run([107, 107], [100, 100], unit="rows")
    new = a_run([214, 214], [200, 200], unit="rows")
    assert sorted(slower(old, new)) == ["fairq", "fifo"]


def test_compare_exits_with_1_when_something_is_slower(tmp_path: Path) -> None:
    def written(name: str, value: float) -> str:
        path = tmp_path / name
        row = {"benchmark": "cycle", "subject": "fairq", "what": "cycle", "unit": "buffers", "scenario": {}}
        path.write_text(json.dumps({**row, "value": value, "repetition": 0}) + "\n")
        return str(path)

    before, after = written("before", 100), written("after", 200)
    assert CliRunner().invoke(main, ["compare", before, before]).exit_code == 0
    done = CliRunner().invoke(main, ["compare", before, after])
    assert done.exit_code == 1
    assert "100%" in done.output
    assert CliRunner().invoke(main, ["compare", before, "/dev/null"]).exit_code == 2


# --- fairq bench -----------------------------------------------------------------------------------


def test_the_benchmarks_are_those_of_the_clone(tmp_path: Path) -> None:
    assert find_benchmarks(tmp_path) == ROOT


def test_without_a_clone_the_command_says_where_the_benchmarks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from fairq import cli
    from fairq.commands import bench

    monkeypatch.setattr(bench, "find_benchmarks", lambda here: None)
    done = CliRunner().invoke(cli.main, ["bench", "run"])
    assert done.exit_code == cli.Exit.USAGE
    assert "repository" in done.stderr


def test_workers_of_a_benchmark_that_is_killed_end(database: Database) -> None:
    code = (
        "import json, sys, time, psycopg\n"
        "from benchmarks.bench_worker import workers\n"
        "dsn = sys.argv[1]\n"
        "with psycopg.connect(dsn, autocommit=True) as conn, workers(conn, dsn, 1, 1) as pids:\n"
        "    print(json.dumps(pids), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with program(code, database.dsn) as bench:
        (pid,) = read_json(bench)
        assert is_alive(pid)
        bench.kill()
        bench.wait()
        try:
            wait_until(lambda: not is_alive(pid), "the worker ends, too", 40)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
