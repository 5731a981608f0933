"""Worker processes: killed, told to end, many at once, under a supervisor."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from fairq.commands.work import hide_dsns
from fairq.worker import supervisor
from tests.support.processes import is_alive
from tests.support.sessions import wait_until
from tests.worker.running import APPS, ROOT, Desk, children_of, lines_of, work_process

SHORT = ("--lease", "1.5", "--maintain-interval", "0.3")


def test_it_says_its_limits_at_the_start_and_ends_with_zero_when_told(desk: Desk) -> None:
    """H39, HR7"""
    with work_process(desk.dsn, "-c", "3") as worker:
        worker.wait_for("3 slots, no prefetch, claim batch 3, lease 60s, listening, polling every 5s")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert desk.workers == 0


def test_every_line_is_json_with_json(desk: Desk) -> None:
    desk.enqueue("waits", "not a number", max_attempts=1)
    with work_process(desk.dsn, "--drain", "--json") as worker:
        assert worker.wait() == 0
    documents = [json.loads(line) for line in worker.lines]
    assert "slots" in documents[0]["started"]
    assert "task_retry" in [each.get("action") for each in documents] or "task_failed" in [
        each.get("action") for each in documents
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--concurrency", "-1", "--db-retry-max-ms", "1"), ("concurrency is -1", "--db-retry-max-ms is 1")),
        (("--once", "--drain"), ("--once and --drain",)),
        (("--prefetch", "3"), ("--claim-lease",)),
        (("--processes", "0"), ("--processes is 0",)),
        (("-q", "a=3", "-q", "b", "-c", "-1"), ("'b' not", "concurrency is -1")),
        (("-q", "a=0", "-q", "b=many"), ("'b' is 'many'",)),
    ],
)
def test_a_bad_configuration_is_refused_with_everything_that_is_wrong(
    args: tuple[str, ...], says: tuple[str, ...]
) -> None:
    """HR6: nothing is connected; the DSN leads nowhere."""
    with work_process("postgresql://nobody@127.0.0.1:1/nowhere", *args) as worker:
        assert worker.wait() == 2
    for each in says:
        assert worker.says(each), worker.output


@pytest.mark.parametrize("app", ["nowhere", "effects:missing", "effects:note"])
def test_an_app_that_is_not_there_is_refused(app: str) -> None:
    with work_process("postgresql://nobody@127.0.0.1:1/nowhere", app=app) as worker:
        assert worker.wait() == 2
    assert worker.says("fairq: "), worker.output


@pytest.mark.parametrize("file", ["tasks.py", "./tasks.py:app", "tasks"])
def test_a_file_is_no_module_and_a_module_that_ends_python_no_app(file: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("import sys\nsys.exit(0)\n")
    argv = [sys.executable, "-m", "fairq", "work", file, "--dsn", "postgresql:///nowhere"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert ("Write tasks" if ".py" in file else "'tasks' cannot be imported: SystemExit") in done.stderr


def test_a_killed_workers_tasks_are_run_by_another_and_the_loss_is_recorded(desk: Desk) -> None:
    """S28, S29, HR30, I1: SIGKILL in the middle of a task."""
    id = desk.enqueue("sleeps", 30)
    with work_process(desk.dsn, *SHORT) as first:
        desk.wait_until(lambda: desk.effects("began") == 1, "the handler began")
        first.send(signal.SIGKILL)
        first.wait()
    desk.conn.execute("update fairq.tasks set payload = '0' where id = %s", [id])
    with work_process(desk.dsn, *SHORT) as second:
        desk.wait_until(lambda: desk.live == 0, "another worker did it")
        second.send(signal.SIGTERM)
        assert second.wait() == 0
    assert desk.end(id)[:2] == ("succeeded", 2)
    assert [(attempt, outcome, error["code"]) for attempt, outcome, error in desk.attempts(id)] == [
        (1, "worker_lost", "worker_lost")
    ]
    assert desk.effects("ended") == 1


def test_queues_that_nobody_named_share_equally(desk: Desk) -> None:
    desk.queue("archive")
    desk.queue("urgent")
    desk.enqueue_many("store", 60, queue="archive")
    desk.enqueue_many("page", 5, queue="urgent")
    with work_process(desk.dsn, "-c", "2", "--drain", app="two_queues") as worker:
        assert worker.wait() == 0, worker.output
    order = [what for (what,) in desk.rows("select what from effects order by id")]
    assert len(order) == 65
    assert "archive" in order[:4]
    assert "urgent" not in order[15:]
    assert worker.says("on archive=1,urgent=1")


def test_a_lost_workers_tasks_are_taken_soon_after_a_start_with_the_usual_lease(desk: Desk) -> None:
    """Here the lost worker has a short lease, and the one that finds it a long one."""
    id = desk.enqueue("count")
    lost = desk.one("select fairq.register_worker('lost', array['default'], 1, '1 second')")
    desk.rows("select id from fairq.pop_tasks('default', 1, %s)", lost)
    with work_process(desk.dsn) as worker:
        desk.wait_until(lambda: desk.outcomes() == {"succeeded": 1}, "the task is run by another")
        assert desk.attempts(id)[0][:2] == (1, "worker_lost")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output


def test_term_lets_a_slow_handler_end(desk: Desk) -> None:
    """HR17, S26"""
    id = desk.enqueue("sleeps", 1)
    waiting = desk.enqueue("sleeps", 1)
    with work_process(desk.dsn, "-c", "1") as worker:
        desk.wait_until(lambda: desk.effects("began") == 1, "the handler began")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert desk.end(id)[:2] == ("succeeded", 1)
    ((left, state),) = desk.rows("select id, state from fairq.live_tasks")
    assert (left, state in ("queued", "overflow")) == (waiting, True)
    assert desk.workers == 0


@pytest.mark.parametrize("kind", ["sleeps", "waits", "blocks"])
def test_tasks_that_outlast_the_grace_time_are_given_back(desk: Desk, kind: str) -> None:
    """S26: and burns no attempt. Also where the handler blocks the loop itself: then the keeper ends the
    process.
    """
    desk.enqueue(kind, 60)
    with work_process(desk.dsn, "--grace", "0.2", "--lease", "600") as worker:
        desk.wait_until(lambda: desk.effects("began") == 1, "the handler began")
        worker.send(signal.SIGTERM)
        assert worker.wait() == (1 if kind == "blocks" else 0)
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)]
    assert desk.rows("select attempt, outcome, error from fairq.attempts") == [(1, "released", None)]
    assert desk.workers == 0


@pytest.mark.parametrize(
    ("lifespan", "code"),
    [
        ("start waits", 0),
        ("start blocks", 1),
        ("start insists", 1),
        ("end waits", 1),
        ("end blocks", 1),
    ],
)
def test_a_lifespan_that_hangs_does_not_hold_up_the_end(desk: Desk, lifespan: str, code: int) -> None:
    """HR17: at the start nobody can be told yet, and at the end nobody any more."""
    when, how = lifespan.split()
    with work_process(desk.dsn, "--grace", "0.2", app="lives", env={"LIFESPAN": lifespan}) as worker:
        if when == "end":
            worker.wait_for("slot")
        else:
            worker.wait_for(lifespan)
        worker.send(signal.SIGTERM)
        assert worker.wait() == code, worker.output
    if how == "waits":
        assert worker.says(f"the lifespan lives.model did not {when} within the grace time"), worker.output
    else:
        assert worker.says("the worker did not end in time: thread MainThread: "), worker.output
    assert desk.workers == 0


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_lifespan_that_raises_is_named_with_its_error(desk: Desk, when: str) -> None:
    desk.enqueue("nothing")
    with work_process(desk.dsn, "--drain", app="lives", env={"LIFESPAN": f"{when} raises"}) as worker:
        assert worker.wait() == 1, worker.output
    error = f"the lifespan lives.model did not {when}: OSError: no model here"
    assert worker.lines[-1] == f"fairq: {error}"
    assert worker.says("in goes_wrong"), "where it happened"
    assert (desk.live, desk.workers) == (1 if when == "start" else 0, 0)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGQUIT])
def test_a_second_signal_gives_everything_back_now(desk: Desk, second: signal.Signals) -> None:
    """S27"""
    desk.enqueue_many("sleeps", 2, 60)
    with work_process(desk.dsn, "-c", "2", "--grace", "600") as worker:
        desk.wait_until(lambda: desk.effects("began") == 2, "the handlers began")
        worker.send(signal.SIGTERM)
        worker.wait_for("2 handlers have 600 s")  # equal signals that are not taken yet are one
        assert desk.running == 2
        worker.send(second)
        assert worker.wait() == 0
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)] * 2
    assert desk.workers == 0


def test_quit_gives_everything_back_at_once(desk: Desk) -> None:
    """S27"""
    desk.enqueue("waits", 60)
    with work_process(desk.dsn, "--grace", "600") as worker:
        desk.wait_until(lambda: desk.effects("began") == 1, "the handler began")
        worker.send(signal.SIGQUIT)
        assert worker.wait() == 0
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)]


def test_a_handler_that_starves_the_loop_is_not_taken_for_a_lost_worker(desk: Desk, tmp_path: Path) -> None:
    """As long as that is shorter than the lease: the sign of life does not come from the loop."""
    last_beat = "select max(beat_at) from fairq.heartbeats where worker_id = %s"
    go_on = tmp_path / "go on"
    silent = desk.one("select fairq.register_worker('silent', '{default}', 1, interval '1 minute')")
    id = desk.enqueue("blocks_until", str(go_on))
    with work_process(desk.dsn, "-c", "1", "--lease", "60", "--maintain-interval", "0") as worker:
        desk.wait_until(lambda: desk.effects("began") == 1, "it began")
        ours = desk.one("select worker_id from effects")
        before = desk.one(last_beat, ours)
        desk.wait_until(lambda: desk.one(last_beat, ours) > before, "there is a sign of life")
        with desk.conn.transaction(force_rollback=True):
            # When a worker would be lost that has been silent since the handler began.
            desk.rows("select set_config('fairq.now', (%s + interval '61 seconds')::text, true)", before)
            assert desk.one("select fairq.maintain(p_part => 'recovery')") == {}
            assert desk.rows("select distinct worker_id from fairq.workers") == [(ours,)] != [(silent,)]
        go_on.touch()
        desk.wait_until(lambda: desk.live == 0, "it ends")
        assert desk.end(id)[:2] == ("succeeded", 1)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
    assert desk.effects("began") == 1
    assert desk.rows("select * from fairq.attempts") == []


def test_a_dead_loop_costs_the_culprit_its_attempt_and_its_neighbors_nothing(desk: Desk) -> None:
    """I15: its own timeout cannot reach it. The process ends, and the supervisor starts another."""
    with desk.conn.transaction():
        neighbors = desk.enqueue_many("waits", 3, 0.1)
        culprit = desk.enqueue("blocks", 300, timeout=2, max_attempts=1)
    with work_process(desk.dsn, *SHORT, "-p", "2", "-c", "4") as supervisor:
        desk.wait_until(lambda: desk.live == 0, "the neighbors are done")
        supervisor.wait_for("ended with exit code 1; starting it again")
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait() == 0
    assert (desk.end(culprit)[0], desk.end(culprit)[3]["code"]) == ("failed", "timeout")
    assert {desk.end(id)[0] for id in neighbors} == {"succeeded"}
    assert {row[1:] for id in neighbors for row in desk.attempts(id)} <= {("released", None)}
    assert supervisor.says("in blocks"), "it says where"


def test_twenty_workers_do_every_task_exactly_once(desk: Desk) -> None:
    """HR31, I1, H29: processes under one supervisor, two slots each; the effect and the end commit together.
    None of them ends a task before all have begun two.
    """
    desk.enqueue_many("once", 400)
    with psycopg.connect(desk.owner_dsn) as gate:
        gate.execute("lock table effects in share mode")
        with work_process(desk.dsn, "-p", "20", "-c", "2", "--no-listen", "--drain") as supervisor:
            wait_until(lambda: desk.running == 40, "all are at work", 120)
            gate.commit()
            assert supervisor.wait(120) == 0, supervisor.output
    assert desk.outcomes() == {"succeeded": 400}
    assert desk.rows("select count(*), count(distinct task_id), max(attempt) from effects") == [(400, 400, 1)]
    assert (desk.live, desk.workers) == (0, 0)
    assert len(lines_of(supervisor, "slots")) == 20


def test_the_supervisor_starts_a_crashed_child_again(desk: Desk) -> None:
    """S1, S6: the handler kills its process, and the remaining workers run its task."""
    id = desk.enqueue("crashes")
    with work_process(desk.dsn, "-p", "2", *SHORT) as supervisor:
        supervisor.wait_for("starting it again")
        desk.wait_until(lambda: desk.live == 0, "the task was run again")
        desk.wait_until(lambda: len(lines_of(supervisor, "slots")) >= 3, "a new child started")
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait() == 0
    assert desk.end(id)[:2] == ("succeeded", 2)
    desk.wait_until(lambda: _after_maintenance(desk) == 0, "the crashed worker is struck off")


def _after_maintenance(desk: Desk) -> int:
    desk.conn.execute("select fairq.maintain()")
    return desk.workers


def test_the_supervisor_passes_signals_on_and_waits(desk: Desk) -> None:
    """S26: the second signal too."""
    desk.enqueue_many("sleeps", 2, 60)
    with work_process(desk.dsn, "-p", "2", "-c", "1", "--grace", "600") as supervisor:
        desk.wait_until(lambda: desk.effects("began") == 2, "both children work")
        children = children_of(supervisor.pid)
        assert len(children) == 2
        supervisor.send(signal.SIGINT)
        supervisor.wait_for("ending the processes")
        desk.wait_until(
            lambda: len(lines_of(supervisor, "1 handlers have 600 s")) == 2, "both children are ending"
        )
        supervisor.send(signal.SIGINT)
        assert supervisor.wait() == 0
    assert not [pid for pid in children if is_alive(pid)]
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)] * 2
    assert desk.workers == 0


def test_children_of_a_dead_supervisor_end_gracefully(desk: Desk) -> None:
    """S6: a pipe tells them, in whatever way it died."""
    id = desk.enqueue("sleeps", 1)
    children: list[int] = []
    try:
        with work_process(desk.dsn, "-p", "2", "-c", "1") as supervisor:
            desk.wait_until(lambda: desk.effects("began") == 1, "the handler began")
            children = children_of(supervisor.pid)
            supervisor.send(signal.SIGKILL)
            supervisor.process.wait()
            desk.wait_until(lambda: not any(map(is_alive, children)), "the children ended")
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert desk.end(id)[:2] == ("succeeded", 1)
    assert desk.workers == 0


def test_children_that_cannot_start_are_not_started_for_ever(desk: Desk) -> None:
    with work_process(desk.dsn, "-p", "2", "-q", "nowhere") as supervisor:
        assert supervisor.wait() == 2, supervisor.output
    assert desk.workers == 0


def test_a_supervisor_rests_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: it consumes the byte that woke it, or it would never pause again."""
    looks = 0
    tend = supervisor.Supervisor._tend

    def counting(self: supervisor.Supervisor) -> bool:
        nonlocal looks
        looks += 1
        return tend(self)

    monkeypatch.setattr(supervisor.Supervisor, "_tend", counting)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.1)
    mark = tmp_path / "crashed"
    child = (
        f"import pathlib, sys, time; mark = pathlib.Path({str(mark)!r})\n"
        "if mark.exists(): time.sleep(1)\n"
        "elif not mark.parent.exists(): sys.exit(2)\n"
        "else: mark.touch(); sys.exit(9)"
    )
    assert supervisor.Supervisor([sys.executable, "-c", child], 1, 1.0).run() == 0
    assert mark.exists()
    assert looks < 50


def test_a_call_that_hangs_in_a_thread_of_asyncio_does_not_keep_the_process(desk: Desk) -> None:
    """HR7: the handler was cancelled, but Python would wait for its thread for ever."""
    desk.enqueue("waits_for_a_thread", 3600)
    with work_process(desk.dsn, "--grace", "0") as worker:
        desk.wait_until(lambda: desk.effects("began") == 1, "the handler waits")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.output
    assert desk.rows("select state, max_attempts - attempt from fairq.live_tasks") == [("overflow", 5)]
    assert desk.workers == 0


def test_a_thread_that_a_handler_left_does_not_keep_the_process_and_is_named(desk: Desk) -> None:
    desk.enqueue("starts_a_thread", 3600)
    with work_process(desk.dsn, "--drain") as worker:
        assert worker.wait() == 0, worker.output
    assert worker.says("left behind: thread of-a-handler"), worker.output


def test_a_child_of_a_handler_can_be_terminated(desk: Desk) -> None:
    """It does not inherit what TERM means to the worker."""
    desk.enqueue("forks")
    with work_process(desk.dsn, "--drain") as worker:
        assert worker.wait() == 0, worker.output
    assert desk.effects(f"ended with {-signal.SIGTERM}") == 1


@pytest.mark.parametrize("kind", ["has_a_child", "has_a_child_on_the_loop"])
def test_a_child_of_a_handler_that_returns_or_exits_is_no_worker(desk: Desk, kind: str) -> None:
    """It has the sockets of its parent, and would take turns on them, or wait for tasks for ever."""
    for code in (0, 7):
        desk.enqueue(kind, code)
    with work_process(desk.dsn, "--drain", "-c", "1") as worker:
        assert worker.wait() == 0, worker.output
    assert (desk.effects("ended with 0"), desk.effects("ended with 7")) == (1, 1)
    assert desk.outcomes() == {"succeeded": 2}
    assert len(worker.lines) == 1, worker.output


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_in_the_last_moment_of_a_drain_changes_nothing(desk: Desk, processes: str) -> None:
    """The signal comes after the worker's end, while Python tidies up."""
    desk.enqueue("count")
    with work_process(desk.dsn, "--drain", "-p", processes, env={"TERM_AT_THE_END": "1"}) as worker:
        assert worker.wait() == 0, worker.output
    assert desk.outcomes() == {"succeeded": 1}


def test_no_password_is_among_the_arguments_of_a_child(desk: Desk) -> None:
    """S6: everybody on the machine may read arguments."""
    dsn = make_conninfo(desk.dsn, password="hunter2")
    with work_process(desk.dsn, "-p", "2", "--dsn", dsn, f"--listen-dsn={dsn}") as parent:
        desk.wait_until(lambda: len(lines_of(parent, ", listening")) == 2, "both children listen")
        shown = subprocess.run(
            ["ps", "-A", "-ww", "-o", "ppid=,args="], capture_output=True, text=True, check=True
        )
        children = [line for line in shown.stdout.splitlines() if line.split()[0] == str(parent.pid)]
        assert len(children) == 2
        assert all("work effects -p 2" in line and "hunter2" not in line for line in children)
        parent.send(signal.SIGTERM)
        assert parent.wait() == 0
    assert "hunter2" not in parent.output


@pytest.mark.parametrize(
    ("args", "kept", "secrets"),
    [
        (["work", "app", "-p", "2"], ["work", "app", "-p", "2"], {}),
        (["work", "--dsn", "a=b", "app"], ["work", "app"], {"FAIRQ_DSN": "a=b"}),
        (["work", "--dsn=a=b", "app"], ["work", "app"], {"FAIRQ_DSN": "a=b"}),
        (["work", "app", "--listen-dsn", "c"], ["work", "app"], {"FAIRQ_LISTEN_DSN": "c"}),
    ],
)
def test_connection_strings_reach_children_by_the_environment(
    args: list[str], kept: list[str], secrets: dict[str, str]
) -> None:
    assert hide_dsns(args) == (kept, secrets)


def test_a_child_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S6: the program is being replaced, or there are too many processes. The other children go on."""
    program = tmp_path / "program"

    def install(*args: Any) -> float:
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(0o700)
        return 0.1

    monkeypatch.setattr("fairq.worker.plan.retry_delay", install)
    with caplog.at_level(logging.WARNING, "fairq.worker"):
        assert supervisor.Supervisor([str(program)], 1, 1.0).run() == 0
    assert "cannot be started" in caplog.text


@pytest.mark.parametrize("output", ["full", "gone", "closed"])
def test_a_worker_whose_output_nobody_takes_works_all_the_same(desk: Desk, output: str) -> None:
    """A full disk under the log, for example."""
    if output == "full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    id = desk.enqueue("count")
    argv = [sys.executable, "-m", "fairq", "work", "effects", "--drain", "-c", "1"]
    redirection = {"full": ">/dev/full 2>&1", "gone": "| true", "closed": ">&- 2>&-"}[output]
    subprocess.run(
        ["sh", "-c", f"{shlex.join(argv)} {redirection}; true"],
        cwd=APPS,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAIRQ_DSN": desk.dsn},
        check=True,
        timeout=60,
    )
    assert desk.end(id)[0] == "succeeded"


def test_a_worker_that_does_not_listen_minds_no_address_for_listening(desk: Desk) -> None:
    with work_process(desk.dsn, "--no-listen", "--once", env={"FAIRQ_LISTEN_DSN": desk.dsn}) as worker:
        assert worker.wait() == 0, worker.output
