"""What `fairq.metrics()` says, and its text for Prometheus."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import psycopg
import pytest
import yaml

from fairq import metrics
from tests.support.calls import Conn, call, create_many, maintain, one, refused, run
from tests.support.database import Database
from tests.support.processes import ROOT
from tests.support.simulation import Simulation

pytestmark = [pytest.mark.usefixtures("one_shard"), pytest.mark.new_database]

SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')

ALERTS = "examples/monitoring/alerts.yml"


def scrape(conn: Conn, **options: int) -> dict[str, float]:
    """By name and labels, as a scraper reads the text: it refuses a series that comes twice."""
    found: dict[str, float] = {}
    for line in metrics.render(conn, **options).splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            series = f"{match[1]}{{{match[2] or ''}}}"
            assert series not in found
            found[series] = float(match[3])
    return found


def test_an_empty_installation_has_metrics(conn: Conn) -> None:
    found = scrape(conn)
    assert found['fairq_tasks{queue="default",state="waiting"}'] == 0
    assert found['fairq_desired_slots{queue="default"}'] == 0
    assert found["fairq_upkeep_failures{}"] == 0


def test_a_busy_queue_in_numbers(conn: Conn) -> None:
    """Two tenants, eight slots, tasks of a second, of which each fourth fails."""
    simulation = Simulation(conn, outcome=lambda task: "failed" if task % 4 == 0 else "succeeded")
    create_many(conn, "bob", 2000, kind="render")
    create_many(conn, "alice", 1000, kind="mail")
    simulation.until(105)
    found = scrape(conn)
    part = 90  # how far the ledger is
    ended = Counter(
        (each.task.group_key, "failed" if each.task % 4 == 0 else "succeeded")
        for each in simulation.ran
        if each.ended is not None and each.ended < part
    )
    for group, kind in (("bob", "render"), ("alice", "mail")):
        for outcome in ("succeeded", "failed"):
            series = f'fairq_ended_total{{kind="{kind}",queue="default",outcome="{outcome}"}}'
            assert found[series] == ended[group, outcome]
        of_kind = sum(ended[group, outcome] for outcome in ("succeeded", "failed"))
        assert found[f'fairq_run_seconds_count{{kind="{kind}",queue="default"}}'] == of_kind
        assert found[f'fairq_run_seconds_sum{{kind="{kind}",queue="default"}}'] == pytest.approx(of_kind)
        assert found[f'fairq_run_seconds_bucket{{le="+Inf",kind="{kind}",queue="default"}}'] == of_kind
        assert found[f'fairq_run_seconds_bucket{{le="0.32",kind="{kind}",queue="default"}}'] == 0
    assert found['fairq_slots{queue="default",state="busy"}'] == 8
    assert found['fairq_slots{queue="default",state="idle"}'] == 0
    waiting = found['fairq_tasks{queue="default",state="waiting"}']
    assert waiting == one(conn, "select count(*) from fairq.live_tasks where state in ('overflow', 'queued')")
    assert found['fairq_backlog_seconds{queue="default"}'] == pytest.approx(waiting)
    assert found['fairq_worst_debt_ratio{queue="default"}'] <= 1
    assert found['fairq_fairness_error{queue="default"}'] < 0.02
    assert found['fairq_group_slots{group="bob",queue="default"}'] == pytest.approx(4, abs=0.1)
    # All 3,000 came within five minutes, and shall be through in five.
    assert found['fairq_desired_slots{queue="default"}'] == pytest.approx(3000 / 300, abs=1)


def test_working_off_a_backlog_asks_for_no_more_slots(conn: Conn) -> None:
    """Twelve minutes old, and served ever since: what began after a long wait is not taken for new work."""
    simulation = Simulation(conn, length=lambda _: 30.0)
    create_many(conn, "bob", 480)
    simulation.until(720)
    found = scrape(conn)
    waiting = found['fairq_tasks{queue="default",state="waiting"}']
    assert waiting == pytest.approx(480 - 8 * 720 / 30, abs=8)
    assert found['fairq_desired_slots{queue="default"}'] == pytest.approx(waiting * 30 / 300, abs=1)


def test_counters_stay_when_the_history_goes(conn: Conn) -> None:
    simulation = Simulation(conn)
    create_many(conn, "bob", 100)
    simulation.until(75)
    before = {
        name: value
        for name, value in scrape(conn).items()
        if re.match(r"\w+_(total|bucket|count|sum)\{", name)
    }
    assert before['fairq_ended_total{kind="default",queue="default",outcome="succeeded"}'] == 100
    run(conn, "truncate fairq.finished_tasks, fairq.attempts")
    simulation.until(140)
    after = scrape(conn)
    assert {name: after[name] for name in before} == before


def test_a_hundred_kinds_are_told_apart(conn: Conn) -> None:
    simulation = Simulation(conn, slots=(200,))
    run(
        conn,
        "select count(fairq.create_task('bob', '{}', 'default', 'kind ' || g))"
        " from generate_series(1, 150) g",
    )
    simulation.until(75)
    found = scrape(conn)
    ended = {name: value for name, value in found.items() if name.startswith("fairq_ended_total")}
    assert len(ended) == 101
    assert sum(ended.values()) == 150


def test_series_are_bounded_and_a_scrape_reads_little(conn: Conn) -> None:
    """Whatever the number of groups: those that matter by name, and all others together."""
    simulation = Simulation(conn, slots=(100,), step=1.0)
    run(conn, "select count(fairq.create_task('tenant ' || g, '{}')) from generate_series(1, 5000) g")
    simulation.until(75)
    few, many = scrape(conn, groups=0), scrape(conn, groups=10)
    of_groups = set(many) - set(few)
    assert 0 < len(of_groups) <= 10 * 10 + 5
    assert any('group="other"' in name for name in of_groups)
    assert many['fairq_groups{queue="default"}'] >= 1000
    query = "select count(*) from fairq.metrics()"
    run(conn, query)
    (plan,) = run(conn, f"explain (analyze, buffers, format json) {query}")[0]
    assert plan[0]["Plan"]["Shared Hit Blocks"] < 3000


def test_a_group_that_mattered_stays_for_a_while(conn: Conn) -> None:
    """Who is shown does not change with each scrape: the last quarter of an hour counts."""
    simulation = Simulation(conn, slots=(1,))
    create_many(conn, "slow", 60)
    simulation.until(70)
    create_many(conn, "busy", 30)
    simulation.until(135, lambda: create_many(conn, "slow", 1) if simulation.now % 10 == 0 else None)
    found = scrape(conn, groups=1)
    assert 'fairq_group_slots{group="slow",queue="default"}' in found
    assert 'fairq_group_slots{group="busy",queue="default"}' not in found


def test_names_cannot_break_the_text(conn: Conn) -> None:
    simulation = Simulation(conn)
    evil = 'a"}\nfairq_slots{queue="x"} 9 \\'
    call(conn, "configure_queue", evil)
    create_many(conn, evil, 3)
    run(conn, "select fairq.create_task(%s, '{}', %s)", evil, evil)
    simulation.until(75)
    assert 'fairq_slots{queue="x"}' not in scrape(conn)


def test_the_number_of_groups_has_a_range(conn: Conn) -> None:
    for wrong in (-1, 1001, None):
        with refused(conn, "QF007"):
            run(conn, "select * from fairq.metrics(%s)", wrong)


def test_an_observer_may_scrape(database: Database, conn: Conn) -> None:
    maintain(conn)
    observer = database.connect_as("fairq_observe", autocommit=True)
    assert "fairq_ledger_age_seconds" in metrics.render(observer)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        metrics.render(database.connect_as("fairq_enqueue", autocommit=True))
    assert one(conn, "select count(*) from fairq.metrics()") > 10


def test_samples_have_the_labels_that_are_declared(conn: Conn) -> None:
    create_many(conn, "bob", 2)
    maintain(conn)
    for name, labels, _ in metrics.samples(conn):
        metric = name if name in metrics.METRICS else name.rsplit("_", 1)[0]
        assert ",".join(each for each in labels if each != "le") == metrics.METRICS[metric][1], name


@pytest.mark.parametrize("name", [ALERTS, "examples/monitoring/dashboard.json", "docs/reference/metrics.md"])
def test_files_name_what_there_is(name: str) -> None:
    """Metrics and labels. Between them they name every metric."""
    text = (ROOT / name).read_text("utf-8")
    named = set(re.findall(r"\bfairq_\w+", text)) - {"fairq_observe"}
    suffixed = {f"{each}{suffix}" for each in metrics.METRICS for suffix in ("_bucket", "_count", "_sum")}
    assert named <= set(metrics.METRICS) | suffixed
    labels = set(re.findall(r"(?<=[{, ])(\w+)=~?\\?\"", text))
    assert labels <= {"queue", "state", "kind", "outcome", "group", "le"}
    if name.endswith(".json"):
        assert len({each["id"] for each in json.loads(text)["panels"]}) >= 10
    if name.endswith(".md"):
        assert named >= set(metrics.METRICS)


def test_alert_rules_are_what_prometheus_reads(tmp_path: Path) -> None:
    """By promtool where there is one; else their shape."""
    rules = yaml.safe_load((ROOT / ALERTS).read_text("utf-8"))["groups"][0]["rules"]
    assert all({"alert", "expr", "for", "labels", "annotations"} == set(rule) for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    if tool := shutil.which("promtool"):
        subprocess.run([tool, "check", "rules", str(ROOT / ALERTS)], check=True)
