"""The output on a terminal of 80 columns and 24 lines: tables fit, and no word is broken."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

import fairq
from fairq.cli import main
from fairq.commands import top
from fairq.commands.common import table
from fairq.commands.stats import Snapshot
from fairq.queries import models
from tests.cli.running import as_role, ok, process, terminal
from tests.support.database import Database

LONG = "tenant:3fae1a0c-9f0d-4f2b-8d6f-6f1e2b7a9c31/user:0b5f1a77-0000-4000-8000-1234567890ab"
WIDE = "株式会社サンプル・東京本社・第二開発部・課金担当・バッチ処理グループ"
QUEUE = "reports-nightly-eu-central-1"
ERROR = """{"code": "unhandled_error", "type": "ValueError", "message": "could not read page 3 of a.pdf: \
unexpected end of file at offset 18233 while looking for the object stream"}"""


def seen(database: Database | str, *arguments: str) -> str:
    """What a terminal of 80 by 24 shows, without colours."""
    dsn = database if isinstance(database, str) else database.dsn
    env = {"FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    done = CliRunner().invoke(main, [*arguments, "--dsn", dsn], env=env, prog_name="fairq")
    assert done.exit_code in (0, 1), done.output
    return re.sub(r"\x1b\[[0-9;]*m", "", done.output)


@pytest.fixture
def busy(database: Database) -> Database:
    """Thirty queues, with names like those of tenants."""
    conn = database.connect(autocommit=True)
    for name in (QUEUE, *(f"queue-{n:02}" for n in range(28))):
        conn.execute("select fairq.configure_queue(%s)", [name])
        fairq.enqueue(conn, "bob", queue=name)
    limits = """{"max_running": 5, "rate_limit": 100, "rate_period": "90 minutes", "group_max_running": 2,
      "group_rate_limit": 10, "group_breaker_threshold": 5, "weight": 2.5, "ready_target": 64,
      "notify": false, "fairness": "time"}"""
    conn.execute("select fairq.configure_queue(%s, %s)", [QUEUE, limits])
    conn.execute("select fairq.pause_queue(%s), fairq.drain_queue(%s)", [QUEUE, QUEUE])
    conn.execute("""select fairq.configure_group('default', %s, '{"weight": 3, "rate_limit": 5}')""", [LONG])
    conn.execute("""select fairq.configure_key(%s, '{"max_running": 3}')""", [LONG])
    fairq.enqueue_many(conn, [(key, {}) for key in ("bob", LONG, WIDE) for _ in range(3)], max_attempts=1)
    conn.execute("select fairq.create_task('bob', '1', p_run_at => now() + interval '1 hour')")
    name = "worker-7f9c9d6b5-abcde.shop.svc.cluster.local:17"
    row = conn.execute("select fairq.register_worker(%s, array['default', %s], 50)", [name, QUEUE]).fetchone()
    assert row
    conn.execute("select fairq.pop_tasks('default', 3, %s)", row)
    conn.execute(
        "select fairq.finish_tasks(%s, array_agg(h.id), array_agg(h.attempt), array_agg('retry'::text), null,"
        " array_agg(%s::jsonb)) from fairq.held h",
        [*row, ERROR],
    )
    return database


def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(busy: Database) -> None:
    with busy.connect() as conn:
        (id,) = conn.execute("select min(f.id) from fairq.finished_tasks f").fetchone() or (0,)
    for arguments in (
        ["stats"],
        ["stats", "--queue", "default"],
        ["queues"],
        ["groups"],
        ["keys"],
        ["cluster"],
        ["explain", str(id)],
        ["result", str(id)],
        ["doctor"],
    ):
        printed = seen(busy, *arguments)
        wide = [line for line in printed.splitlines() if cell_len(line.rstrip()) > 80]
        assert not wide or arguments == ["result", str(id)], (arguments, wide)
        for name in (
            "waiting",
            "running",
            "scheduled",
            "oldest waits",
            "attempts",
            "last seen",
            "busy slots",
        ):
            # Whole, or not at all: never a piece of it at the end of a line.
            assert not re.search(rf"\b{name[:-2]}(?:…|\s*$)", printed, re.MULTILINE), (arguments, name)


def test_both_ends_of_a_long_name_are_shown_and_all_of_it_in_a_pipe(busy: Database) -> None:
    printed = seen(busy, "stats", "--queue", "default")
    assert re.search(r"^tenant:3fa\S+…\S+67890ab +2 ", printed, re.MULTILINE)
    assert re.search(r"^株式会社\S+…\S+グループ +2 ", printed, re.MULTILINE)
    piped = ok(busy, "stats", "--queue", "default")
    assert LONG in piped
    assert WIDE in piped


def test_columns_in_which_nothing_is_are_left_out(busy: Database) -> None:
    assert "scheduled" in seen(busy, "stats")
    assert "blocked" not in seen(busy, "stats")
    assert "scheduled" not in seen(busy, "stats", "--queue", QUEUE)


def test_unusual_settings_are_shown_in_words(busy: Database) -> None:
    printed = " ".join(ok(busy, "queues").split())
    assert "64 ready; weight 2.5; groups share time; no notify paused since" in printed
    assert "drains since" in printed
    assert "5 at once; 100 per 1 h 30 min" in printed


def test_prose_goes_on_in_the_next_line_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    prose = "stops for two minutes after five failures in a row, as long as nobody resets it " * 2
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(table(None, ("group", ">n", "~limits"), [("a" * 70, 1, prose)]))
    _, first, *others = captured.get().splitlines()
    assert len(others) > 2
    words = [*first.split()[2:], *" ".join(others).split()]
    assert words == prose.split()


# --- explain ----------------------------------------------------------------------------------------


def test_explain_shows_the_error_that_ended_a_task(busy: Database) -> None:
    with busy.connect() as conn:
        (id,) = conn.execute("select min(f.id) from fairq.finished_tasks f").fetchone() or (0,)
    printed = ok(busy, "explain", str(id))
    assert f"Task {id}: ended as failed" in printed
    assert re.search(r"^  1  failed after .*, worker 1$", printed, re.MULTILINE)
    assert "\n     ValueError: could not read page 3 of a.pdf: unexpected end" in printed
    hidden = ok(as_role(busy, "fairq_observe"), "explain", str(id))
    assert "ValueError" not in hidden
    assert "Only fairq_admin may read errors." in hidden


# --- messages ---------------------------------------------------------------------------------------


def test_a_message_is_wrapped_between_words_and_not_in_a_pipe(database: Database) -> None:
    arguments = ["enqueue", "bob", "--run-at", "yesterday"]
    with terminal() as screen:
        with process(database, *arguments, stderr=screen.theirs) as running:
            assert running.wait(60) == 2
        shown = screen.read_rest().decode()
    lines = shown.splitlines()
    assert all(len(line) < 80 for line in lines)
    assert " ".join(shown.split()).startswith(
        "fairq: Invalid value for '--run-at': 'yesterday' is not a time."
    )
    assert "2030-01-31T08:00:00+00:00." in shown
    assert lines[-1] == "  fairq enqueue --help tells more."
    done = CliRunner().invoke(main, [*arguments, "--dsn", database.dsn], prog_name="fairq")
    assert len(done.stderr.splitlines()) == 2


# --- top --------------------------------------------------------------------------------------------

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def snapshot(queues: int, groups: int, workers: int) -> Snapshot:
    counts: dict[str, Any] = {
        "scheduled": 0,
        "overflow": 7,
        "blocked": 0,
        "queued": 3,
        "claimed": 0,
        "running": 1,
    }
    return Snapshot(
        NOW,
        [
            models.FairqQueueStat(queue=f"{QUEUE}-{n}", waiting_groups=1, oldest_waiting_since=NOW, **counts)
            for n in range(queues)
        ],
        [
            models.FairqGroupStat(
                queue=f"{QUEUE}-{n % 3}",
                group_key=f"{LONG}{n}",
                oldest_waiting_since=NOW,
                budget_left=5000.0,
                budget_renews_at=NOW,
                **counts,
            )
            for n in range(groups)
        ],
        [worker(n) for n in range(workers)],
        0,
        0,
    )


def worker(n: int) -> models.FairqWorkerStat:
    names: dict[str, Any] = {
        "worker_id": n,
        "name": f"{LONG}{n}",
        "queues": ["default", QUEUE],
        "slots": 8,
        "held": 3,
        "lease": timedelta(minutes=1),
        "registered_at": NOW,
        "beat_at": NOW,
        "alive": True,
    }
    values: dict[str, Any] = {name: names.get(name) for name in models.FairqWorkerStat.__slots__}
    return models.FairqWorkerStat(**values)


@pytest.mark.parametrize("height", [16, 24, 50])
@pytest.mark.parametrize("there", [(1, 0, 0), (1, 3, 2), (30, 90, 12), (3, 40, 1), (40, 0, 30), (0, 0, 0)])
def test_top_fits_the_terminal_and_uses_its_lines(
    there: tuple[int, int, int], height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(width=80, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(top.frame(snapshot(*there), None, height))
    lines = captured.get().splitlines()
    assert len(lines) <= height
    assert all(cell_len(line.rstrip()) <= 80 for line in lines)
    cut = [line for line in lines if line.startswith("… and ")]
    if cut:
        assert len(lines) >= height - 3  # each table keeps a line for how many more there are
    rows = sum("tenant:" in line or QUEUE in line for line in lines)
    more = sum(int(re.sub(r"\D", "", line)) for line in cut)
    assert rows + more == sum(there)


def test_lines_are_shared_in_turns() -> None:
    assert top.share(10, [100, 2, 100]) == [4, 2, 4]
    assert top.share(1, [3, 3, 0]) == [1, 1, 0]
    assert top.share(100, [3, 0, 9]) == [3, 0, 9]
