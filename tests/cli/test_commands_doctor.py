"""`fairq doctor`: each judgement without a database, and all checks against a real one."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from fairq import embedded, install
from fairq.cli import Exit
from fairq.commands import doctor
from fairq.commands.doctor import Finding
from fairq.queries import doctor as queries
from tests.cli.running import answer, as_role, fairq, ok
from tests.support.database import Database
from tests.support.moves import begin, set_shards
from tests.support.pooler import pooler
from tests.support.server import private_server

pytestmark = pytest.mark.new_database

NOW = datetime(2026, 1, 2, tzinfo=UTC)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
SERVER: dict[str, Any] = {
    "version": "18.4",
    "number": 180004,
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "track_counts": "on",
    "encoding": "UTF8",
}
CONNECTION: dict[str, Any] = {
    "role": "bob",
    "pid": 7,
    "standby": False,
    "isolation": "read committed",
    "read_only": "off",
}
RIGHTS: dict[str, Any] = {
    **dict.fromkeys(("superuser", "enqueue", "work", "observe", "admin"), False),
    "granted": True,
}


def findings(database: Database | str, exit_code: int = 0, *options: str) -> dict[str, dict[str, Any]]:
    """The findings by name. A test server runs with fsync off, which does not count as wrong."""
    done = fairq(database, "doctor", "--json", *options)
    document = json.loads(done.stdout)
    found = {each["check"]: each for each in document["findings"]}
    wrong = {name for name, each in found.items() if each["verdict"] in ("wrong", "failed")}
    assert done.exit_code == (Exit.NO if wrong else Exit.OK)
    assert document["ok"] is not bool(wrong)
    assert bool(wrong - {"server"}) is bool(exit_code), found
    return found


# --- Judgements -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "pid", "verdict", "says"),
    [
        ({}, 7, "ok", "as bob"),
        ({}, 8, "ok", "through a pooler"),
        ({"standby": True}, 7, "wrong", "a standby"),
        ({"read_only": "on"}, 7, "wrong", "read only"),
        ({"isolation": "serializable"}, 7, "look", "serializable"),
    ],
)
def test_the_connection_is_judged(changes: dict[str, Any], pid: int, verdict: str, says: str) -> None:
    row = queries.CheckSessionRow(**CONNECTION | changes)
    found = doctor.judge_connection(row, "postgresql://bob:s3cr3t@db/shop", pid)
    assert found.verdict == verdict
    assert says in found.text
    assert "s3cr3t" not in f"{found}"


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({}, "ok", "18.4"),
        ({"number": 140020, "version": "14.20"}, "wrong", "older than 15"),
        ({"fsync": "off"}, "wrong", "fsync off"),
        ({"full_page_writes": "off"}, "wrong", "full_page_writes off"),
        ({"autovacuum": "off"}, "wrong", "autovacuum off"),
        ({"track_counts": "off"}, "wrong", "track_counts off"),
        ({"encoding": "LATIN1"}, "look", "has the encoding LATIN1"),
    ],
)
def test_the_server_is_judged(changes: dict[str, Any], verdict: str, says: str) -> None:
    found = doctor.judge_server(queries.CheckServerRow(**SERVER | changes))
    assert (found.verdict, says in found.text) == (verdict, True)


@pytest.mark.parametrize(
    ("at", "verdict", "says"),
    [
        (NOW, "ok", "agree"),
        (NOW + 2 * SECOND, "ok", "agree"),
        (NOW + 5 * SECOND, "look", "4.0 s behind"),
        (NOW - 10 * SECOND, "look", "10 s ahead of"),
    ],
)
def test_the_clocks_are_compared_with_room_for_the_round_trip(at: datetime, verdict: str, says: str) -> None:
    found = doctor.judge_clock(NOW, at, NOW + SECOND)
    assert found.verdict == verdict
    assert says in found.text.replace("4 s", "4.0 s")


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({}, "wrong", "may do nothing"),
        ({"enqueue": True, "observe": True}, "ok", "may enqueue, observe"),
        ({"superuser": True}, "ok", "superuser"),
        ({"superuser": True, "granted": False}, "wrong", "fairq's roles have no rights here"),
    ],
)
def test_rights_are_judged(changes: dict[str, Any], verdict: str, says: str) -> None:
    found = doctor.judge_rights(queries.CheckRightsRow(**RIGHTS | changes))
    assert (found.verdict, says in found.text) == (verdict, True)


def queue(
    name: str, waiting: int = 0, waits: timedelta | None = None, paused: bool = False
) -> queries.CheckQueuesRow:
    return queries.CheckQueuesRow(name, waiting, None if waits is None else NOW - waits, NOW, paused)


def worker(
    *names: str, alive: bool = True, lease: float = 60.0, is_open: bool = False
) -> queries.CheckWorkersRow:
    return queries.CheckWorkersRow(1, "w", [*names], lease, alive, is_open, 3)


@pytest.mark.parametrize(
    ("queues", "workers", "verdict", "says"),
    [
        ([queue("a", 5)], [worker("a")], "ok", "1 worker alive"),
        ([queue("a")], [], "look", "0 workers alive"),
        ([queue("a", 5)], [], "wrong", 'nobody serves "a"'),
        ([queue("a", 5)], [worker("a", alive=False)], "wrong", 'nobody serves "a"'),
        ([queue("a", 5), queue("b", 5)], [worker("a")], "wrong", 'nobody serves "b"'),
        ([queue("a", 5, paused=True)], [worker("b")], "ok", "1 worker alive"),
        ([queue("a", 5)], [worker("a"), worker("a", lease=2e6)], "look", "a lease of 23 d 3 h"),
        ([queue("a")], [worker("a", is_open=True)], "look", "is open (3 times so far)"),
        ([queue(f"q{n}", 1) for n in range(9)], [], "wrong", "and 4 more"),
    ],
)
def test_a_queue_with_tasks_needs_a_worker_that_lives(
    queues: list[Any], workers: list[Any], verdict: str, says: str
) -> None:
    found = doctor.judge_workers(queues, workers)
    assert (found.verdict, says in found.text) == (verdict, True), found


@pytest.mark.parametrize(
    ("waits", "max_wait", "verdict"),
    [
        (None, None, "ok"),
        (30 * MINUTE, None, "ok"),
        (2 * HOUR, None, "look"),
        (30 * MINUTE, 10 * MINUTE, "wrong"),
        (5 * MINUTE, 10 * MINUTE, "ok"),
    ],
)
def test_a_long_wait_is_wrong_only_where_somebody_said_what_is_long(
    waits: timedelta | None, max_wait: timedelta | None, verdict: str
) -> None:
    """Bob's backlog has to wait: that is fairness, not a fault."""
    assert doctor.judge_waiting([queue("a", 1, waits)], max_wait).verdict == verdict


def test_paused_queues_may_wait() -> None:
    assert doctor.judge_waiting([queue("a", 1, HOUR, paused=True)], SECOND).verdict == "ok"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"lost": 1}, "upkeep: 1 lost worker"),
        ({"expired": 3}, "upkeep: 3 expired tasks"),
        ({"overdue": 1}, "1 overdue scheduled task"),
    ],
)
def test_overdue_upkeep_shows_that_nobody_runs_it(row: dict[str, int], says: str) -> None:
    found = doctor.judge_maintenance(left(**row), [])
    assert (found.verdict, says in found.text) == ("wrong", True)
    assert "nobody seems to run the upkeep" in found.text
    assert doctor.judge_maintenance(left(), []).verdict == "ok"


def failure(part: str) -> queries.CheckUpkeepRow:
    return queries.CheckUpkeepRow(part, NOW, "disk full (53100)")


def left(lost: int = 0, expired: int = 0, overdue: int = 0) -> queries.CheckMaintenanceRow:
    return queries.CheckMaintenanceRow(lost, expired, overdue, moving_from=None, shard_count=1)


def test_a_move_to_more_shards_that_was_left_half_way_is_worth_a_look(database: Database) -> None:
    conn = database.connect(autocommit=True)
    set_shards(conn, 1)
    begin(conn, 5)
    found = findings(database, 0)["maintenance"]
    assert found["verdict"] == "look"
    assert "from 1 shard to 5" in found["text"]
    assert "fairq cluster set --shard-count 5" in found["remedy"]


@pytest.mark.parametrize("overdue", [0, 2])
def test_a_part_of_maintenance_that_fails_is_named_with_its_message(overdue: int) -> None:
    """Then somebody does run it, although something is overdue."""
    found = doctor.judge_maintenance(left(overdue=overdue), [failure("queue bob's")])
    assert found.verdict == "wrong"
    assert "queue bob's has failed since 2026-01-02T00:00:00+00:00: disk full (53100)" in found.text
    assert "nobody" not in found.text
    assert ("2 overdue scheduled tasks" in found.text) is bool(overdue)
    assert found.remedy is not None
    assert "select fairq.maintain(p_part => 'queue bob''s');" in found.remedy


def test_the_first_of_many_failing_parts_are_named() -> None:
    found = doctor.judge_maintenance(left(), [failure(f"queue {n}") for n in range(9)])
    assert "queue 2 has failed" in found.text
    assert "queue 3" not in found.text
    assert found.text.endswith("and 6 more")


def holder(
    kind: str, held_for: timedelta | None = None, age: int | None = 5, handle: str = "'x'"
) -> queries.CheckHorizonRow:
    return queries.CheckHorizonRow(kind, f"the {kind}", handle, held_for, age)


@pytest.mark.parametrize(
    ("rows", "verdict", "remedy"),
    [
        ([], "ok", None),
        ([holder("session", MINUTE)], "ok", None),
        ([holder("session", HOUR, handle="42")], "look", "pg_terminate_backend(42)"),
        ([holder("session", None, 2_000_000, "42")], "look", "pg_terminate_backend(42)"),
        ([holder("session", None, None)], "ok", None),
        ([holder("prepared", HOUR)], "wrong", "rollback prepared 'x'"),
        ([holder("slot", None, 2_000_000)], "look", "replica"),
        ([holder("idle slot", None, 2_000_000)], "wrong", "pg_drop_replication_slot('x')"),
        ([holder("idle slot", None, 5)], "ok", None),
    ],
)
def test_the_holder_of_the_horizon_is_named_with_a_remedy(
    rows: list[Any], verdict: str, remedy: str | None
) -> None:
    """I9: fairq stays fast with a held snapshot, but the disk fills up."""
    found = doctor.judge_horizon(rows)
    assert found.verdict == verdict
    assert remedy is None or remedy in (found.remedy or "")


@pytest.mark.parametrize(
    ("used", "notifications", "verdict"), [(10, 0.0, "ok"), (95, 0.0, "look"), (10, 0.6, "wrong")]
)
def test_connections_and_the_queue_of_notifications_are_judged(
    used: int, notifications: float, verdict: str
) -> None:
    found = doctor.judge_connections(queries.CheckConnectionsRow(used, 100, notifications, 7))
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("live", "dead", "verdict"),
    [(0, 0, "ok"), (10, 5000, "ok"), (5_000_000, 2_000_000, "ok"), (9, 2_000_000, "look")],
)
def test_dead_rows_are_judged_beside_the_living(live: int, dead: int, verdict: str) -> None:
    row = queries.CheckDeadRowsRow("tasks", live, dead, None)
    assert doctor.judge_dead_rows([row]).verdict == verdict


def timeout(ms: int, name: str = "statement_timeout", role: str | None = None) -> queries.CheckTimeoutsRow:
    return queries.CheckTimeoutsRow(role is None, role or "me", name, timedelta(milliseconds=ms))


@pytest.mark.parametrize(
    ("found", "verdict", "says", "remedy"),
    [
        ([timeout(0), timeout(30_000), timeout(60_000, "idle_session_timeout")], "ok", "long enough", ""),
        (
            [timeout(0), timeout(50, role="shop")],
            "wrong",
            "role shop: statement_timeout is 50 ms",
            "role shop set",
        ),
        ([timeout(2000)], "look", "this session: statement_timeout is 2 s", "PGOPTIONS"),
        ([timeout(1500, "transaction_timeout")], "look", "transaction_timeout is 1.5 s", "'1min'"),
        ([timeout(30_000, "idle_session_timeout")], "look", "cut off, and connect again", "'1min'"),
        ([timeout(500, "idle_session_timeout")], "look", "cut off, and connect again", "'1min'"),
        ([timeout(2000), timeout(500, "idle_session_timeout")], "look", "calls are stopped", "'1min'"),
        ([queries.CheckTimeoutsRow(False, "a", "statement_timeout", None)], "ok", "long enough", ""),
        (
            [timeout(900, role="a"), timeout(120_000, role="b")],
            "wrong",
            "role a: statement_timeout is 900 ms",
            "role a",
        ),
    ],
)
def test_timeouts_of_roles_are_judged(found: list[Any], verdict: str, says: str, remedy: str) -> None:
    judged = doctor.judge_timeouts(found)
    assert (judged.verdict, says in judged.text) == (verdict, True), judged
    assert remedy in (judged.remedy or "")


@pytest.mark.parametrize(
    ("said", "ms"),
    [("0", 0), ("900", 900), ("50ms", 50), ("1.5 s", 1500), ("2min", 120_000), ("1d", 86_400_000)],
)
def test_a_timeout_is_read_in_any_unit(db: psycopg.Connection[Any], said: str, ms: int) -> None:
    db.execute("create role fairq_test_hasty in role fairq_work")
    db.execute(f"alter role fairq_test_hasty set statement_timeout = '{said}'".encode())
    found = [each for each in queries.check_timeouts(db) if each.role == "fairq_test_hasty"]
    assert found == [timeout(ms, role="fairq_test_hasty")]


def test_timeouts_are_read_however_they_were_written(database: Database) -> None:
    role = f"fairq_test_{uuid.uuid4().hex[:12]}"
    with database.connect(autocommit=True) as conn:
        try:
            conn.execute(f"create role {role} in role fairq_work".encode())
            for written, length in (
                ("' 50ms '", 0.05),
                ("'1.5 min'", 90),
                ("200", 0.2),
                ("'1e4'", None),
                ("'0x100'", None),
            ):
                conn.execute(f"alter role {role} set statement_timeout = {written}".encode())
                (row,) = (each for each in queries.check_timeouts(conn) if each.role == role)
                assert row.length == (None if length is None else timedelta(seconds=length))
        finally:
            conn.execute(f"drop role if exists {role}".encode())


# --- The round --------------------------------------------------------------------------------------


def test_a_fresh_installation_is_well(database: Database) -> None:
    ok(database, "maintain")
    found = findings(database)
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {
        **dict.fromkeys(verdicts, "ok"),
        "server": verdicts["server"],
        "workers": "look",
    }


@pytest.fixture
def safe_server(tmp_path: Path) -> Iterator[str]:
    """A server that keeps its data, with fsync, as in production."""
    with contextlib.closing(embedded.start(tmp_path / "data")) as server:
        install.migrate(server.dsn())
        yield server.dsn()


def test_all_is_well_exits_0(safe_server: str) -> None:
    ok(safe_server, "maintain")
    done = fairq(safe_server, "doctor")
    assert done.exit_code == Exit.OK, done.output
    assert "Nothing is wrong" in done.stdout  # but that no worker is there
    document = answer(safe_server, "doctor")
    assert document["ok"] is True


def test_without_fairq_it_says_how_to_install_it_and_checks_the_rest(empty_database: Database) -> None:
    found = findings(empty_database, 1)
    assert found["schema"]["verdict"] == "wrong"
    assert "fairq migrate" in found["schema"]["remedy"]
    assert found["listen"]["verdict"] == "ok"
    assert "workers" not in found


def test_a_database_that_is_not_there_exits_3() -> None:
    done = fairq("postgresql://bob:s3cr3t@127.0.0.1:1/shop?connect_timeout=2", "doctor")
    assert done.exit_code == Exit.DATABASE
    assert "s3cr3t" not in done.output


def test_tasks_without_a_worker_are_wrong(database: Database) -> None:
    ok(database, "enqueue", "bob")
    found = findings(database, 1)
    assert "nobody serves" in found["workers"]["text"]
    assert "fairq work" in found["workers"]["remedy"]


def test_kinds_that_no_live_worker_knows_are_named(database: Database) -> None:
    conn = database.connect(autocommit=True)
    kinds = """select fairq.register_worker('w', '{default}', 1, p_kinds => '{"parse": null}')"""
    worker = conn.execute(kinds).fetchall()[0][0]
    create = "select fairq.create_task('bob', '1', p_kind => 'mail')"
    ids = [conn.execute(create).fetchall()[0][0] for _ in range(2)]
    conn.execute("select fairq.create_task('bob', '1', p_kind => 'parse')")
    assert findings(database)["kinds"]["verdict"] == "ok"
    conn.execute("select from fairq.pop_tasks('default', 3, %s)", [worker])
    conn.execute("select fairq.finish_tasks(%s, %s, '{1,1}', '{declined,declined}')", [worker, ids])
    found = findings(database, 1)["kinds"]
    assert (found["verdict"], found["text"]) == (
        "wrong",
        '2 tasks are of a kind that no live worker knows: "mail (default)"',
    )
    conn.execute("select fairq.register_worker('new', '{default}', 1, p_kinds => '{\"mail\": null}')")
    assert findings(database)["kinds"]["verdict"] == "ok"


def test_a_task_that_waits_longer_than_it_may_is_wrong(database: Database) -> None:
    ok(database, "enqueue", "bob")
    with database.connect() as conn:
        conn.execute("select fairq.register_worker('tester', '{default}', 1)")
    assert findings(database)["waiting"]["verdict"] == "ok"
    assert findings(database, 1, "--max-wait", "1ms")["waiting"]["verdict"] == "wrong"


def test_nobody_runs_the_upkeep(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("select set_config('fairq.now', (now() - interval '2 hours')::text, true)")
        conn.execute("select fairq.create_task('bob', '1', p_run_at => now() - interval '1 hour')")
    assert findings(database, 1)["maintenance"]["verdict"] == "wrong"
    ok(database, "maintain")
    assert findings(database, 1)["maintenance"]["verdict"] == "ok"  # 1: nobody serves the task


FAILS = """
create function public.fails() returns trigger language plpgsql as $$
begin
  raise exception 'no room for ticks' using errcode = '53100';
end
$$;
create trigger fails before insert on fairq.ticks for each row execute function public.fails();
"""


@pytest.mark.parametrize("role", ["fairq_observe", "fairq_work", "fairq_admin"])
def test_a_part_of_maintenance_that_fails_is_found(database: Database, role: str) -> None:
    ok(database, "enqueue", "bob")
    with database.connect() as conn:
        conn.execute(FAILS)
    with database.connect() as conn:
        assert conn.execute("select fairq.maintain() ->> 'failed'").fetchone() == ("1",)
    found = findings(as_role(database, role), 1)["maintenance"]
    assert found["verdict"] == "wrong"
    assert found["text"].startswith("queue default has failed since 20")
    assert found["text"].endswith(": no room for ticks (53100)")
    assert "select fairq.maintain(p_part => 'queue default');" in found["remedy"]

    with database.connect() as conn:
        conn.execute("drop trigger fails on fairq.ticks")
        conn.execute("select fairq.maintain(p_part => 'queue default')")
    assert findings(database, 1)["maintenance"]["verdict"] == "ok"  # 1: nobody serves the task


def test_a_failure_of_a_part_that_is_gone_is_no_news(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("insert into fairq.upkeep_failures values (0, 'queue gone', now(), now(), 'deadlock')")
    assert findings(database)["maintenance"]["verdict"] == "ok"


def test_a_task_that_is_held_is_past_its_deadline_and_no_sign_of_anything(database: Database) -> None:
    """A deadline only concerns the start."""
    ok(database, "enqueue", "bob")
    with database.connect() as conn:
        conn.execute("select fairq.pop_tasks('default', 1, fairq.register_worker('w', '{default}', 1))")
        conn.execute(
            "update fairq.tasks set created_at = now() - interval '2 hours',"
            " expires_at = now() - interval '1 hour'"
        )
    assert findings(database)["maintenance"]["verdict"] == "ok"
    with database.connect() as conn:
        conn.execute("delete from fairq.held")
    assert "1 expired task" in findings(database, 1)["maintenance"]["text"]


def test_a_session_that_holds_the_horizon_is_found(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LONG_TRANSACTION", timedelta(0))
    holder = database.connect(application_name="report")
    holder.execute("begin isolation level repeatable read")
    holder.execute("select 1 from fairq.tasks")
    found = findings(database)["horizon"]
    assert found["verdict"] == "look"
    assert "report" in found["text"]
    assert f"pg_terminate_backend({holder.info.backend_pid})" in found["remedy"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("it''s forgotten", "rollback prepared 'it''s forgotten';"),
        # Decided by hand it might be undone here, and done on other nodes.
        ("citus_3_77_1_2", "group 3 in pg_dist_node"),
    ],
)
def test_a_forgotten_prepared_transaction_is_wrong(
    database: Database, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "LONG_TRANSACTION", timedelta(0))
    conn = database.connect(autocommit=True)
    if conn.execute("show max_prepared_transactions").fetchone() == ("0",):
        pytest.skip("this server has no prepared transactions")
    conn.execute("begin")
    conn.execute("select pg_current_xact_id()")
    conn.execute(f"prepare transaction '{name}'".encode())
    try:
        assert remedy in findings(database, 1)["horizon"]["remedy"]
    finally:
        conn.execute(f"rollback prepared '{name}'".encode())


def test_rights_that_a_restore_left_out_are_missed_and_can_be_given_again(database: Database) -> None:
    """`pg_restore --no-privileges`"""
    conn = database.connect(autocommit=True)
    granted = """
        select n.oid::regnamespace::text, n.nspacl::text from pg_namespace n where n.nspname = 'fairq'
        union all select p.oid::regprocedure::text, p.proacl::text
        from pg_proc p where p.pronamespace = 'fairq'::regnamespace
        union all select c.oid::regclass::text, c.relacl::text
        from pg_class c where c.relnamespace = 'fairq'::regnamespace
        union all select a.attrelid::regclass::text || '.' || a.attname, a.attacl::text
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'fairq'::regnamespace and a.attacl is not null
        order by 1"""
    before = conn.execute(granted.encode()).fetchall()
    for what in ("schema fairq", "all tables in schema fairq", "all functions in schema fairq"):
        roles = "fairq_enqueue, fairq_work, fairq_observe, fairq_admin"
        conn.execute(f"revoke all on {what} from {roles}".encode())
    assert findings(database, Exit.NO)["rights"]["verdict"] == "wrong"
    told = findings(as_role(database, "fairq_work"), Exit.NO)["schema"]
    assert told["verdict"] == "wrong"
    file = told["remedy"].split("psql -1 -f ")[1]
    with conn.transaction():
        conn.execute(Path(file).read_bytes())
    assert conn.execute(granted.encode()).fetchall() == before
    assert findings(as_role(database, "fairq_work"))["rights"]["verdict"] == "ok"


def test_behind_a_transaction_pooler_listen_is_silent_and_said_to_be(database: Database) -> None:
    """HR: LISTEN is accepted there, but nothing ever arrives."""
    with pooler(database.dsn) as dsn:
        found = findings(dsn)
    assert "through a pooler" in found["connection"]["text"]
    assert found["listen"]["verdict"] == "look"
    assert "--listen-dsn" in found["listen"]["remedy"]


@pytest.mark.parametrize("role", ["fairq_enqueue", "fairq_observe", "fairq_work", "fairq_admin"])
def test_a_role_of_few_rights_gets_the_answers_it_may_have(database: Database, role: str) -> None:
    ok(database, "maintain")
    found = findings(as_role(database, role))
    unknown = {name for name, each in found.items() if each["verdict"] == "unknown"}
    of_tables = {"workers", "kinds", "waiting", "fairness", "maintenance", "schedules"}
    assert unknown == (of_tables if role == "fairq_enqueue" else set())
    assert found["rights"]["text"].startswith("may ")


def test_a_role_without_any_right_is_told_so_once(database: Database) -> None:
    found = findings(as_role(database, "pg_monitor"), 1)
    assert found["schema"]["verdict"] == "wrong"
    assert "grant it fairq_enqueue" in found["schema"]["remedy"]
    assert "waiting" not in found


def test_strange_defaults_of_a_role_are_seen(database: Database) -> None:
    strict = make_conninfo(database.dsn, options="-c default_transaction_isolation=serializable")
    assert findings(strict)["connection"]["verdict"] == "look"
    read_only = make_conninfo(database.dsn, options="-c default_transaction_read_only=on")
    assert findings(read_only, 1)["connection"]["verdict"] == "wrong"


# --- Each check stands alone ------------------------------------------------------------------------


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.connect() as conn:
        conn.execute("alter table fairq.upkeep_failures rename to gone")
    monkeypatch.setattr(queries, "check_queues", lambda conn: conn.execute("select 1 / 0").fetchall())
    found = findings(database, 1)
    assert found["maintenance"]["verdict"] == "unknown"
    assert found["maintenance"]["text"].startswith("not in this schema: relation")
    assert found["waiting"]["verdict"] == "failed"
    assert found["waiting"]["text"] == "the check failed: division by zero"
    assert found["dead rows"]["verdict"] == "ok"
    done = fairq(database, "doctor")
    assert done.exit_code == Exit.NO
    assert "2 checks failed." in done.stdout.splitlines()[-1]


def test_a_roles_short_timeout_stops_no_check_and_is_found(database: Database) -> None:
    ok(database, "enqueue", "bob")
    hasty = make_conninfo(database.dsn, options="-c statement_timeout=5ms")
    found = findings(hasty, 1)
    assert "failed" not in {each["verdict"] for each in found.values()}
    assert found["timeouts"]["verdict"] == "wrong"
    assert "this session: statement_timeout is 5 ms" in found["timeouts"]["text"]


def test_a_lock_that_somebody_holds_fails_the_checks_that_need_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOCK_SECONDS", 0.01)
    holder = database.connect()
    holder.execute("lock table fairq.workers")
    found = findings(database, 1)
    assert found["workers"]["verdict"] == "failed"
    assert found["horizon"]["verdict"] == "ok"


def test_a_connection_that_breaks_is_made_anew_for_the_next_check(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    suicide = "select pg_terminate_backend(pg_backend_pid())"
    monkeypatch.setattr(queries, "check_server", lambda conn: conn.execute(suicide).fetchall())
    found = findings(database)
    assert found["server"]["verdict"] == "failed"
    assert "terminating connection" in found["server"]["text"]
    assert found["clock"]["verdict"] == "ok"


HAS_SIZES = embedded.find_binaries().major >= 17


@pytest.fixture(scope="module")
def small_server() -> Iterator[embedded.Server]:
    """The server's notification queue has room for half a megabyte."""
    with private_server({"max_notify_queue_pages": 64} if HAS_SIZES else {}) as server:
        yield server


@pytest.mark.skipif(not HAS_SIZES, reason="before PostgreSQL 17 the queue has 8 GB")
def test_a_full_queue_of_notifications_is_named_with_who_fills_it(small_server: embedded.Server) -> None:
    dsn = small_server.dsn("fairq")
    with psycopg.connect(dsn, autocommit=True) as listener, psycopg.connect(dsn, autocommit=True) as speaker:
        listener.execute("listen fairq")
        listener.execute("begin")
        with contextlib.suppress(psycopg.errors.ProgramLimitExceeded):
            for _ in range(200):
                speaker.execute(
                    "select pg_notify('fairq', n || repeat('x', 7990)) from generate_series(1, 60) n"
                )
        found = findings(dsn, 1)
        assert found["listen"]["verdict"] == "wrong"
        assert found["listen"]["text"].startswith("NOTIFY fails, and with it enqueueing")
        assert "--no-notify" in found["listen"]["remedy"]
        assert found["connections"]["verdict"] == "wrong"
        assert f"pg_terminate_backend({listener.info.backend_pid})" in found["connections"]["remedy"]
        assert found["dead rows"]["verdict"] == "ok"


def test_a_standby_gets_all_checks(small_server: embedded.Server) -> None:
    small_server.stop()
    signal = small_server.data_dir / "pgdata" / "standby.signal"
    signal.touch()
    small_server.start()
    try:
        found = findings(small_server.dsn("fairq"), 1)
    finally:
        signal.unlink()
    assert found["connection"]["verdict"] == "wrong"
    assert "a standby" in found["connection"]["text"]
    assert {name for name, each in found.items() if each["verdict"] in ("failed", "unknown")} == {"listen"}


def test_an_odd_lease_and_a_partition_that_is_not_there_are_worth_a_look(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("select fairq.register_worker('forever', '{default}', 1, '366 days')")
        conn.execute("select fairq.register_worker('never', '{default}', 1, '1 microsecond')")
        tomorrow = "to_char((clock_timestamp() at time zone 'UTC')::date + 1, 'YYYYMMDD')"
        row = conn.execute(
            f"select format('drop table if exists fairq.finished_tasks_%s', {tomorrow})"
        ).fetchone()
        assert row
        conn.execute(row[0])
    found = findings(database)
    assert found["workers"]["verdict"] == "look"
    assert "worker 1 (forever) has a lease of 366 d" in found["workers"]["text"]
    assert found["history"]["verdict"] == "look"
    assert "Workers and fairq maintain make them" in found["history"]["remedy"]


def test_an_older_schema_is_named_and_what_can_be_checked_is(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("update fairq.schema_version set version_num = 'fairq_0000', oldest_code = 'fairq_0000'")
    found = findings(database, 1)
    assert found["schema"]["verdict"] == "wrong"
    assert found["schema"]["remedy"]
    assert found["history"]["verdict"] in ("ok", "look")


def test_it_changes_nothing(database: Database) -> None:
    ok(database, "enqueue", "bob")
    with database.connect() as conn:
        before = conn.execute("select pg_current_wal_insert_lsn()").fetchone()
    findings(database, 1)
    with database.connect() as conn:
        written = conn.execute(
            "select count(*) from pg_stat_all_tables where schemaname = 'fairq' and n_tup_upd + n_tup_del > 0"
        ).fetchone()
    assert before is not None
    assert written == (0,)


def test_people_see_every_finding_and_a_sum(database: Database) -> None:
    done = fairq(database, "doctor")
    for name in ("connection", "server", "schema", "rights", "workers", "listen", "dead rows"):
        assert name in done.stdout
    assert done.stdout.rstrip().endswith((".",))


def test_a_finding_has_a_remedy_unless_it_is_fine() -> None:
    """Saying what to do is the point of the command."""
    judged: list[Finding] = [
        doctor.judge_server(queries.CheckServerRow(**SERVER | {"fsync": "off"})),
        doctor.judge_clock(NOW, NOW + HOUR, NOW),
        doctor.judge_rights(queries.CheckRightsRow(**RIGHTS)),
        doctor.judge_workers([queue("a", 1)], []),
        doctor.judge_waiting([queue("a", 1, 2 * HOUR)], None),
        doctor.judge_maintenance(left(lost=1), []),
        doctor.judge_maintenance(left(), [failure("recovery")]),
        doctor.judge_history(False),
        doctor.judge_horizon([holder("session", HOUR)]),
        doctor.judge_listen(False),
        doctor.judge_connections(queries.CheckConnectionsRow(99, 100, 0, None)),
        doctor.judge_dead_rows([queries.CheckDeadRowsRow("t", 1, 2_000_000, NOW)]),
    ]
    assert all(found.verdict != "ok" and found.remedy for found in judged)
