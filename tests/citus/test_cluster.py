"""fairq on Citus: a coordinator, two workers, an engine on each, and calls that find their node."""

import asyncio
import contextlib
import json
import os
import re
import signal
from functools import partial
from typing import Any

import psycopg
import pytest

import fairq
from fairq import citus, errors, install
from tests.support.calls import column, create, one, register, run
from tests.support.cluster import NAME, NODES, Cluster, Conn, group_of, on_citus
from tests.support.invariants import assert_sound
from tests.support.sessions import call_in_background, result, wait_until

pytestmark = on_citus


def waiting(conns: list[Conn]) -> list[int]:
    return [one(conn, "select count(*) from fairq.tasks") for conn in conns]


def sent(conn: Conn, *statements: str) -> list[str]:
    """What Citus sends to other nodes for this transaction."""
    said: list[str] = []

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        if found := re.match(r"issuing (.*)", notice.message_primary or "", re.DOTALL):
            said.append(found[1])

    conn.add_notice_handler(hear)
    with conn.transaction():
        conn.execute("set local citus.log_remote_commands = on")
        conn.execute("set local client_min_messages = log")
        for statement in statements:
            conn.execute(statement.encode())
    conn.remove_notice_handler(hear)
    return said


def test_a_second_migration_finds_nothing_to_do(cluster: Cluster, conns: list[Conn]) -> None:
    functions = (
        "select md5(string_agg(p.prosrc, '' order by p.oid)) from pg_proc p "
        "where p.pronamespace = 'fairq'::regnamespace"
    )
    before = [one(conn, functions) for conn in conns]
    assert cluster.migrate().steps == ()
    assert [one(conn, functions) for conn in conns] == before


def test_a_task_goes_to_the_node_of_its_group_from_wherever_it_comes(conns: list[Conn]) -> None:
    first, second = (group_of(conns[0], node) for node in (1, 2))
    ids = [create(conn, group) for conn in conns for group in (first, second)]
    assert waiting(conns) == [0, 3, 3]
    assert [each >> 48 for each in ids] == [1, 2] * 3
    # In the order in which they were created, whoever did.
    for conn, group, mine in ((conns[1], first, ids[::2]), (conns[2], second, ids[1::2])):
        popped = run(conn, "select id, group_key from fairq.pop_tasks('default', 10, %s)", register(conn))
        assert popped == [(each, group) for each in mine]
        assert_sound(conn)


def test_a_call_is_one_statement_to_one_node(conns: list[Conn]) -> None:
    group = group_of(conns[0], 1)
    said = sent(conns[0], f"select fairq.create_task('{group}', '{{}}')")
    assert [re.split(r"[ _;]", each)[0] for each in said] == ["BEGIN", "INSERT", "COMMIT"]
    # On the node itself it does not leave the session.
    assert sent(conns[1], f"select fairq.create_task('{group}', '{{}}')") == []
    assert waiting(conns) == [0, 2, 0]
    # Of the rows that carried the calls none stays.
    assert [one(conn, "select count(*) from fairq_citus.calls") for conn in conns] == [0, 0, 0]


def test_a_batch_is_one_statement_for_each_node_and_keeps_its_order(conns: list[Conn]) -> None:
    groups = [f"g{number % 7}" for number in range(50)]
    said = sent(
        conns[0],
        "create temporary table made as select id, ordinality as n from fairq.create_tasks("  # noqa: S608
        f"array{groups}, array(select to_jsonb(n) from generate_series(1, 50) n)) with ordinality made(id)",
    )
    assert sum(each.startswith("INSERT") for each in said) == 2
    made: dict[int, int] = dict(run(conns[0], "select n, id from made"))
    conns[0].execute("drop table made")
    tasks = [row for conn in conns for row in run(conn, "select payload, id, group_key from fairq.tasks")]
    assert {row[0]: row[1] for row in tasks} == made
    assert all(groups[row[0] - 1] == row[2] for row in tasks)


def test_a_batch_with_keys_is_created_once(conns: list[Conn]) -> None:
    names = [f"g{number}" for number in range(20)]
    call = "select fairq.create_tasks(%s, array_fill('{}'::jsonb, array[20]), p_idempotency_keys => %s)"
    first = column(conns[0], call, names, names)
    assert column(conns[2], call, names, names) == first
    assert sum(waiting(conns)) == 20


def test_a_transaction_that_rolls_back_leaves_no_task_on_any_node(conns: list[Conn]) -> None:
    groups = [group_of(conns[0], node) for node in (1, 2)]
    for end in ("rollback", "rollback to savepoint s"):
        conns[0].execute("begin")
        conns[0].execute("savepoint s")
        for group in groups:
            create(conns[0], group)
        conns[0].execute(end.encode())
        conns[0].execute("commit")
        assert waiting(conns) == [0, 0, 0]


@pytest.mark.parametrize("table", ["orders", "notes"])
def test_tasks_are_committed_with_what_the_application_wrote_or_not_at_all(
    conns: list[Conn], table: str
) -> None:
    """Rows and tasks on different nodes: prepared on each, then committed."""
    one_group, another = (group_of(conns[0], node) for node in (1, 2))
    write = (
        "insert into orders values ('a', 1), ('b', 1), ('c', 1), ('d', 1)"
        if table == "orders"
        else "insert into notes values (1)"
    )
    said = sent(
        conns[0],
        write,
        f"select fairq.create_task('{one_group}', '{{}}'), fairq.create_task('{another}', '{{}}')",
    )
    assert sum(each.startswith("PREPARE TRANSACTION") for each in said) == 2
    assert sum(each.startswith("COMMIT PREPARED") for each in said) == 2
    assert not any(each == "COMMIT" for each in said)
    assert waiting(conns) == [0, 1, 1]
    # A task of one node and a row of the coordinator: two nodes as well.
    if table == "notes":
        said = sent(conns[0], write, f"select fairq.create_task('{one_group}', '{{}}')")
        assert sum(each.startswith("PREPARE TRANSACTION") for each in said) == 1


def test_a_failure_on_one_node_undoes_all(conns: list[Conn]) -> None:
    groups = [group_of(conns[0], node) for node in (1, 2)]
    conns[0].execute("begin")
    for group in groups:
        create(conns[0], group)
    with pytest.raises(psycopg.errors.CheckViolation):
        conns[0].execute("insert into orders values ('a', 0)")
    conns[0].execute("commit")
    assert waiting(conns) == [0, 0, 0]
    assert one(conns[0], "select count(*) from pg_prepared_xacts") == 0


def test_one_enqueuer_waits_for_no_other(conns: list[Conn], cluster: Cluster) -> None:
    """I2: open transactions that enqueued for the same groups, in any order."""
    groups = [group_of(conns[0], node) for node in (1, 2)]
    with cluster.connect(2) as other:
        other.execute("set lock_timeout = '1s'")
        with conns[0].transaction():
            for group in groups:
                create(conns[0], group)
            with other.transaction():
                for group in reversed(groups):
                    create(other, group)
    assert waiting(conns) == [0, 2, 2]


def test_serializable_applications_do_not_fail_for_each_other(conns: list[Conn]) -> None:
    """Who creates a task looks at no call but its own, also where statistics say that a scan is cheap."""
    conn, group = conns[1], group_of(conns[1], 1)
    create(conn, group)
    conn.execute("set citus.override_table_visibility = off")
    tables = "select oid::regclass from pg_class where relname ~ '^calls_[0-9]+$' and relkind = 'r'"
    for table in column(conn, tables):
        conn.execute(f"vacuum analyze {table}".encode())
    with conn.transaction():
        conn.execute("set transaction isolation level serializable")
        create(conn, group)
        seen = column(conn, "select relation::regclass::text from pg_locks where mode = 'SIReadLock'")
    assert "fairq.queues_pkey" in seen
    assert not [table for table in seen if "calls" in table]
    conn.execute("reset citus.override_table_visibility")


def test_what_the_engine_refuses_is_refused_in_its_words(conns: list[Conn]) -> None:
    for conn, call, error in (
        (conns[0], "create_task(null, '{}')", errors.InvalidGroupKey),
        (conns[0], "create_task('a', '{}', 'nowhere')", errors.UnknownQueue),
        (conns[1], "create_tasks(array['a', 'b'], array['1']::jsonb[])", errors.LengthMismatch),
        (conns[1], "cancel_task(9)", errors.OutOfRange),
        (conns[2], """configure_queue('default', '{"notify": true}')""", errors.OutOfRange),
        (conns[2], """configure_queue('default', '{"wait": 1}')""", errors.UnknownSetting),
    ):
        with pytest.raises(psycopg.Error) as refused:
            run(conn, f"select fairq.{call}")
        assert refused.value.sqlstate == error.sqlstate
        assert refused.value.diag.message_hint
    assert sum(waiting(conns)) == 0


def test_settings_are_the_same_on_every_node(conns: list[Conn]) -> None:
    run(conns[1], "select fairq.configure_queue('mail', '{\"max_attempts\": 9}')")
    run(conns[2], "select fairq.configure_group('mail', 'bob', '{\"weight\": 3}')")
    run(conns[0], "select fairq.pause_group('mail', 'bob')")
    seen = (
        "select q.max_attempts, g.weight, g.paused_at is not null "
        "from fairq.queues q join fairq.groups g using (queue) where queue = 'mail'"
    )
    assert [run(conn, seen) for conn in conns] == [[(9, 3.0, True)]] * 3
    # On all of them or on none.
    with conns[0].transaction(force_rollback=True):
        run(conns[0], "select fairq.resume_group('mail', 'bob')")
    assert [run(conn, seen) for conn in conns] == [[(9, 3.0, True)]] * 3


def test_a_task_is_asked_about_and_cancelled_from_any_node(conns: list[Conn]) -> None:
    for node in (1, 2):
        task = create(conns[0], group_of(conns[0], node))
        for conn in conns:
            assert run(conn, "select task_id, state from fairq.explain_task(%s)", task) == [
                (task, "overflow")
            ]
            assert run(conn, "select live from fairq.task_result(%s)", task) == [(True,)]
            # Who only asks writes nothing.
            with conn.transaction():
                conn.execute("set transaction read only")
                for asked in ("explain_task", "task_result", "task_progress"):
                    conn.execute(f"select fairq.{asked}(%s)".encode(), [task])
                conn.execute("select fairq.rate_usage('default', 'bob'), fairq.rate_usage('default')")
        assert one(conns[3 - node], "select fairq.cancel_task(%s)", task)
        run(conns[node], "select fairq.promote_overflow('default')")
        assert run(conns[0], "select outcome from fairq.task_result(%s)", task) == [("cancelled",)]


def test_a_task_of_a_node_that_nobody_knows_is_none(conns: list[Conn]) -> None:
    with pytest.raises(errors.NoSuchTask):
        fairq.result(conns[1], 9 << 48, timeout=0)
    assert not one(conns[2], "select fairq.cancel_task(%s)", 9 << 48)


def test_a_result_is_awaited_from_any_node(cluster: Cluster, conns: list[Conn]) -> None:
    for node in (1, 2):
        task = create(conns[0], group_of(conns[0], node))
        for conn in conns:
            with pytest.raises(errors.ResultTimeout):
                fairq.result(conn, task, timeout=0.05)
        waits = [call_in_background(partial(fairq.result, conn, task, timeout=30)) for conn in conns]
        with cluster.connect(3 - node) as other:
            assert one(other, "select fairq.cancel_task(%s)", task)
        with cluster.connect(node) as home:
            run(home, "select fairq.promote_overflow('default')")
        assert {result(each).outcome for each in waits} == {"cancelled"}


def test_who_does_not_have_a_task_does_not_end_it_from_elsewhere(conns: list[Conn]) -> None:
    task = create(conns[0], group_of(conns[0], 1))
    worker = register(conns[1])
    assert column(conns[1], "select id from fairq.pop_tasks('default', 1, %s)", worker) == [task]
    finish = "select fairq.finish_tasks(%s, array[%s::bigint], array[1])"
    assert column(conns[2], finish, worker + 1, task) == []
    with conns[2].transaction(force_rollback=True):
        assert column(conns[2], finish, worker, task) == [task]
    assert column(conns[0], finish, worker, task) == [task]
    assert column(conns[0], finish, worker, task) == []
    assert column(conns[0], "select fairq.finish_tasks(%s, '{}', '{}')", worker) == []


def test_who_registered_a_worker_speaks_for_it_from_every_node(cluster: Cluster, conns: list[Conn]) -> None:
    for name in ("one", "another"):
        conns[0].execute(f"create role runs_{name} login in role fairq_work".encode())
    task = create(conns[0], group_of(conns[0], 1))
    finish = "select fairq.finish_tasks(%s, array[%s::bigint], array[1])"
    with cluster.connect(1, user="runs_one") as conn:
        worker = register(conn)
        assert column(conn, "select id from fairq.pop_tasks('default', 1, %s)", worker) == [task]
    with cluster.connect(2, user="runs_another") as conn:
        for call in (finish, finish.replace("fairq.", "fairq_citus.")):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                run(conn, call, worker, task)
    with cluster.connect(2, user="runs_one") as conn:
        assert column(conn, finish, worker, task) == [task]


def test_a_worker_has_a_number_that_no_other_node_gives(conns: list[Conn]) -> None:
    assert [register(conn) >> 48 for conn in conns] == [0, 1, 2]


def test_a_schedule_is_on_the_node_of_its_group(conns: list[Conn]) -> None:
    group = group_of(conns[0], 2)
    run(conns[0], "select fairq.configure_schedule('tick', %s, '{\"every\": \"1 day\"}')", group)
    assert [one(conn, "select count(*) from fairq.schedules") for conn in conns] == [0, 0, 1]
    assert len(column(conns[1], "select fairq.run_schedule('tick', %s)", group)) == 1
    assert waiting(conns) == [0, 0, 1]
    assert one(conns[1], "select fairq.remove_schedule('tick', %s)", group) == 1


def test_producers_pass_calls_on_and_nothing_else(cluster: Cluster, conns: list[Conn]) -> None:
    conns[0].execute("create role producer login in role fairq_enqueue")
    conns[0].execute("create role runner login in role fairq_work")
    roles = '{"enqueue_role": "fairq_admin", "work_role": "fairq_work"}'
    run(conns[0], "select fairq.configure_queue('secret', %s)", roles)
    task = create(conns[0], group_of(conns[0], 1), queue="secret")
    with cluster.connect(2, user="runner") as conn:
        assert run(conn, "select live from fairq.task_result(%s)", task) == [(True,)]
    with cluster.connect(0, user="producer") as conn:
        create(conn, group_of(conns[0], 1))
        for forbidden in (
            "insert into fairq_citus.calls (shard_no, statement) values (1, 'drop schema fairq cascade')",
            "select fairq_citus.pass_on(1, 'drop schema fairq cascade', true)",
            "select fairq_citus.create_task('a', '{}')",
            "select fairq.create_task('a', '{}', 'secret')",
            "select fairq.create_tasks(array['a'], array['{}']::jsonb[], 'secret')",
            "select fairq_citus.cancel_task(1)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(forbidden.encode())
        # Of a queue that is not theirs there is no task, wherever it is.
        assert run(conn, "select live from fairq.task_result(%s)", task) == [(False,)]
        assert not one(conn, "select fairq.cancel_task(%s)", task)
        assert not one(conn, "select fairq.watch_task(%s)", task)
    run(conns[0], """select fairq.configure_queue('secret', '{"enqueue_role": null, "work_role": null}')""")


def test_settings_of_a_producer_change_nothing_of_what_he_passes_on(
    cluster: Cluster, conns: list[Conn]
) -> None:
    """Citus sends SET LOCAL along, to where he is the owner of fairq."""
    conns[0].execute("create role sly login in role fairq_enqueue")
    conns[0].execute("create schema sly authorization sly")
    group = group_of(conns[0], 2)
    for number in NODES:
        with cluster.connect(number, user="sly") as there:
            run(there, "set citus.enable_ddl_propagation = off")
            run(there, "create table sly.seen (who text)")
            run(there, "grant all on sly.seen to public")
            run(
                there,
                """
                create function sly.sees(t pg_catalog.text) returns boolean language plpgsql
                as $$ begin insert into sly.seen values (current_user); return true; end $$
                """,
            )
            for name in ("text", "varchar", "bpchar"):
                run(there, f"create domain sly.{name} as pg_catalog.text check (sly.sees(value))")
    payload = r'{"path": "C:\\temp", "it' 's": "\u00e9 %s $$"}'
    sneaks = r"x\', (select jsonb_build_object($$a$$, sly.sees($$a$$)))) f --"
    with cluster.connect(0, user="sly") as conn:
        for each in ("on", "off"):
            run(conn, f"set standard_conforming_strings = {each}")
            conn.execute("select fairq.create_task(%s, %s::jsonb)", [group, payload.replace("''", "'")])
        run(conn, "set standard_conforming_strings = on")
        for setting in ("standard_conforming_strings = off", "search_path = sly, pg_catalog"):
            with conn.transaction():
                run(conn, "set local citus.propagate_set_commands = 'local'")
                run(conn, f"set local {setting}")
                run(conn, "set standard_conforming_strings = on")
                for number in range(10):
                    run(conn, "select fairq.create_task(%s, '{}')", sneaks.replace("x", f"x{number}", 1))
                run(conn, "select fairq.task_result(%s)", 2 << 48)
    assert [column(conn, "select distinct who from sly.seen") for conn in conns] == [[], [], []]
    seen = column(conns[2], "select payload from fairq.tasks where group_key = %s", group)
    assert seen == [json.loads(payload.replace("''", "'"))] * 2


def test_arguments_are_the_same_there_whatever_the_session_likes(cluster: Cluster, conns: list[Conn]) -> None:
    group = group_of(conns[0], 2)
    with cluster.connect(0) as conn:
        for name, value in (
            ("datestyle", "SQL, DMY"),
            ("intervalstyle", "sql_standard"),
            ("timezone", "Asia/Tokyo"),
        ):
            run(conn, f"set {name} = '{value}'")
        run(conn, "set extra_float_digits = -10")
        run(
            conn,
            "select fairq.create_task(%s, '{}', p_run_at => '2031-02-01 00:00Z', p_cost => 1.0 / 3,"
            " p_timeout => '1 day 02:03')",
            group,
        )
    seen = "select run_at = '2031-02-01 00:00Z', cost = 1.0 / 3, timeout = '1 day 02:03' from fairq.tasks"
    assert run(conns[2], seen) == [(True, True, True)]


@pytest.mark.parametrize("commits", [False, True], ids=["before its commit", "behind it"])
def test_what_a_crash_left_between_the_two_phases_ends_the_same_way_everywhere(
    cluster: Cluster, conns: list[Conn], commits: bool
) -> None:
    """The coordinator crashes when nodes have prepared. Citus ends that, and then workers see what it was."""
    prepared = "select count(*) from pg_prepared_xacts"
    workers = [register(conn) for conn in conns[1:]]
    pop = "select id from fairq.pop_tasks('default', 9, %s)"
    with psycopg.connect(cluster.dsn(0)) as conn:
        tasks = [create(conn, group_of(conns[0], node)) for node in (1, 2)]
        (last,) = column(
            conns[2],
            "select pid from pg_stat_activity where application_name like 'citus_internal%%' "
            "and state = 'idle in transaction'",
        )
        if commits:
            # Its own commit waits for a standby that is not there.
            conns[0].execute("alter system set synchronous_standby_names = 'nobody'")
            conns[0].execute("select pg_reload_conf()")
            sync = "select current_setting('synchronous_standby_names') <> ''"
            wait_until(lambda: one(conn, sync), "it has read that")
        else:
            os.kill(last, signal.SIGSTOP)
        call = call_in_background(conn.commit)
        wait_until(lambda: one(conns[1], prepared) == 1, "one node has prepared")
        if commits:
            waits = "select exists (select from pg_stat_activity where wait_event = 'SyncRep')"
            wait_until(lambda: one(conns[0], waits), "the coordinator commits")
        cluster.servers[0].stop("immediate")
        with pytest.raises(psycopg.Error):
            result(call)
    if not commits:
        os.kill(last, signal.SIGCONT)
    # Others go on meanwhile.
    other = create(conns[1], group_of(conns[1], 1))
    assert column(conns[1], pop, workers[0]) == [other]
    cluster.servers[0].start()
    conns[0].close()
    conns[0] = cluster.connect(0)
    conns[0].execute("alter system reset synchronous_standby_names")
    conns[0].execute("select pg_reload_conf()")

    def recovered() -> bool:
        # As its daemon does each minute.
        run(conns[0], "select recover_prepared_transactions()")
        return [one(conn, prepared) for conn in conns] == [0, 0, 0]

    wait_until(recovered, "Citus has ended them")
    found = [column(conn, pop, worker) for conn, worker in zip(conns[1:], workers, strict=True)]
    assert found == ([tasks[:1], tasks[1:]] if commits else [[], []])
    for conn in conns[1:]:
        assert_sound(conn)


def test_groups_move_to_a_new_node_and_their_old_tasks_end_where_they_are(
    cluster: Cluster, conns: list[Conn]
) -> None:
    run(conns[0], "select fairq.configure_queue('mail', '{\"max_attempts\": 9}')")
    run(conns[0], "select fairq.configure_group('mail', 'bob', '{\"weight\": 3}')")
    group = group_of(conns[0], 2)
    shard = one(
        conns[0],
        "select get_shard_id_for_distribution_column('fairq_citus.calls', fairq_citus.slot(%s))",
        group,
    )
    old = create(conns[0], group)
    cluster.start()
    cluster.add(3)
    try:
        cluster.migrate()
        node = one(conns[0], "select groupid from pg_dist_node where nodename = %s", cluster.place(3)[0])
        conns[0].execute(
            "select citus_move_shard_placement(%s, %s, %s, %s, %s, 'block_writes')",
            [shard, *cluster.place(2), *cluster.place(3)],
        )
        young = create(conns[1], group)
        assert (old >> 48, young >> 48) == (2, node)
        with cluster.connect(3) as fresh:
            assert one(fresh, "select max_attempts from fairq.queues where queue = 'mail'") == 9
            assert one(fresh, "select weight from fairq.groups where queue = 'mail'") == 3
            assert column(fresh, "select id from fairq.pop_tasks('default', 9, %s)", register(fresh)) == [
                young
            ]
            assert_sound(fresh)
        assert column(conns[2], "select id from fairq.pop_tasks('default', 9, %s)", register(conns[2])) == [
            old
        ]
        assert run(conns[0], "select task_id, state from fairq.explain_task(%s)", old) == [(old, "running")]
        conns[0].execute(
            "select citus_move_shard_placement(%s, %s, %s, %s, %s, 'block_writes')",
            [shard, *cluster.place(3), *cluster.place(2)],
        )
    finally:
        conns[0].execute("select citus_remove_node(%s, %s)", cluster.place(3))
        cluster.servers.pop().close()
        cluster.everywhere("delete from fairq.workers")


def test_one_machine_becomes_the_coordinator_and_its_tasks_end_there() -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.start(2)
        conns = [cluster.connect(number) for number in (0, 1)]
        conns[0].execute("drop extension citus")
        cluster.migrate()
        old = [create(conns[0], f"g{number}") for number in range(10)]
        conns[0].execute("create extension citus")
        cluster.add(1)
        cluster.migrate()
        young = [create(conns[0], f"g{number}") for number in range(10)]
        for conn, ids in zip(conns, (old, young), strict=True):
            assert (
                sorted(column(conn, "select id from fairq.pop_tasks('default', 99, %s)", register(conn)))
                == ids
            )


# --- Refused ----------------------------------------------------------------------------------------


def refused(conn: Conn, *changes: str) -> citus.ClusterNotReady:
    """What is said about the cluster, were it like that."""
    with conn.transaction(force_rollback=True):
        for change in changes:
            conn.execute(change.encode())
        with pytest.raises(citus.ClusterNotReady) as error:
            citus.nodes(conn, install.sql_dir())
    assert error.value.hint
    return error.value


def test_a_set_up_by_half_is_refused_with_what_to_do(cluster: Cluster, conns: list[Conn]) -> None:
    for conn, changes, message, hint in (
        (conns[1], (), "worker node", "on the coordinator"),
        (
            conns[0],
            ("update pg_extension set extversion = '12.1-1' where extname = 'citus'",),
            "Citus 12.1",
            "alter extension",
        ),
        (
            conns[0],
            ("delete from pg_dist_node where groupid = 0",),
            "not among",
            "citus_set_coordinator_host",
        ),
        (
            conns[0],
            ("update pg_dist_node set isactive = false where groupid = 2",),
            cluster.place(2)[0],
            "citus_activate_node",
        ),
        (conns[0], ("update pg_dist_node set shouldhaveshards = false",), "no node may", "citus_add_node"),
        (
            conns[0],
            ("delete from pg_dist_shard", "set local citus.shard_count = 1"),
            "1 shards",
            "citus.shard_count",
        ),
    ):
        error = refused(conn, *changes)
        assert message in str(error)
        assert hint in str(error.hint)
    assert [node.group for node in citus.nodes(conns[0], install.sql_dir())] == [0, 1, 2]
    with pytest.raises(citus.ClusterNotReady, match="all nodes"):
        install.upgrade(conns[0])
    with pytest.raises(install.UnknownRevision):
        install.migrate(cluster.dsn(0), to="base")


def test_any_node_knows_all_and_a_single_machine_has_none(conns: list[Conn], cluster: Cluster) -> None:
    async def around(dsn: str) -> tuple[int, list[citus.Node]]:
        async with await psycopg.AsyncConnection[Any].connect(dsn) as conn:
            return await citus.around(conn)

    for number in NODES:
        near, nodes = asyncio.run(around(cluster.dsn(number)))
        assert near == number
        assert [(node.host, node.port) for node in nodes] == [cluster.place(each) for each in NODES]
    # Without fairq, though with Citus.
    assert asyncio.run(around(cluster.servers[0].dsn())) == (0, [])


def test_the_owner_need_not_be_a_superuser() -> None:
    """Queues for some roles are for these on each node. What only a superuser may do is said."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.start(2)
        cluster.add(1)
        admin = cluster.connect(0)
        admin.execute("create role keeper login createrole")
        cluster.everywhere(f"alter database {NAME} owner to keeper")
        install.migrate(cluster.dsn(0, user="keeper"))
        admin.execute("create role team login in role fairq_enqueue, fairq_work")
        with cluster.connect(0, user="keeper") as owner:
            roles = '{"enqueue_role": "team", "work_role": "team"}'
            run(owner, "select fairq.configure_queue('mail', %s)", roles)
        with cluster.connect(0, user="team") as conn:
            task = create(conn, group_of(admin, 1), queue="mail")
            assert run(conn, "select live from fairq.task_result(%s)", task) == [(True,)]
            with cluster.connect(1, user="team") as there:
                worker = register(there, "mail")
                assert column(there, "select id from fairq.pop_tasks('mail', 1, %s)", worker) == [task]
            finish = "select fairq.finish_tasks(%s, array[%s::bigint], array[1])"
            assert column(conn, finish, worker, task) == [task]
        cluster.start()
        cluster.add(2)
        with pytest.raises(citus.ClusterNotReady, match="superuser") as error:
            install.migrate(cluster.dsn(0, user="keeper"))
        assert error.value.hint is not None
        admin.execute("select replicate_reference_tables('block_writes')")
        cluster.everywhere(f"alter database {NAME} owner to keeper")
        install.migrate(cluster.dsn(0, user="keeper"))


def test_a_node_with_tasks_of_its_own_is_refused() -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.start(2)
        with psycopg.connect(cluster.dsn(1)) as conn:
            conn.execute("set citus.enable_ddl_propagation = off")
            install.load_sql(conn)
            conn.execute("select fairq.create_task('a', '{}')")
        cluster.add(1)
        with pytest.raises(citus.ClusterNotReady, match="tasks of its own"):
            cluster.migrate()
