"""A rebuild counts what it removes the rings of, no more and no less, while others go on (I7, I11).

It is held up in the middle, by a row that it removes and that another session has locked; the other ones
commit then. What they rang is for the tick after: counted twice, a cap would let one task too many run.

Interleavings (P: promotion that rebuilds, W: a worker, A: an application, B: who holds a row P removes):

    B: begin; lock a ring or a ready task     P: promote (waits)     W: finish, commit     B: commit
    the same with a concurrency key, whose places are counted in a domain of their own
    the same with A: create, schedule and cancel, commit
    W: begin; pop             P: promote (waits for the ready task W took)          W: commit, or rollback
    the same in the second shard, and W waits for the first, which P has: for a moment
"""

import psycopg
import pytest

from tests.support.calls import (
    Conn,
    call,
    create_each,
    drain,
    finish,
    in_flight,
    maintain,
    one,
    pop,
    promote,
    register,
    run,
    states,
)
from tests.support.database import Database
from tests.support.invariants import assert_consistent
from tests.support.moves import set_shards
from tests.support.sessions import in_background, pid_of, result, wait_until_blocked

# Whatever of it is there; one row of each is enough to hold a rebuild up.
LOCK = {
    "a ready task": "select from fairq.ready where queue = %s and group_key <> %s for update",
    "a ring": "select from fairq.rings where queue = %s and group_key = %s for update",
    "a lane": "select from fairq.lanes where queue = %s and group_key = %s for update",
}
WHERE = pytest.mark.parametrize("where", ["a ready task", "a ring"])


class HeldUp:
    """A promotion that has to rebuild the queue's domains, in the midst of it."""

    def __init__(self, database: Database, observer: Conn, where: str, queue: str, group_key: str) -> None:
        observer.execute("update fairq.ticks set written_by = '3' where queue = %s", [queue])
        self.blocker, self.conn = database.connect(), database.connect()
        assert self.blocker.execute(LOCK[where], [queue, group_key]).rowcount > 0
        self.done = in_background(self.conn, "select fairq.promote_overflow()")
        assert wait_until_blocked(observer, pid_of(self.conn)) == [pid_of(self.blocker)]

    def goes_on(self) -> None:
        self.blocker.commit()
        result(self.done)
        self.conn.commit()


@WHERE
@pytest.mark.parametrize("outcome", [None, "retry"])
def test_places_freed_while_a_rebuild_counts_them_are_freed_once(
    database: Database, observer: Conn, where: str, outcome: str | None
) -> None:
    call(observer, "configure_group", "default", "g", max_running=3)
    tasks = create_each(observer, *["g"] * 9)
    worker = register(observer)
    held = pop(observer, worker, 3)
    (ready,) = create_each(observer, "ready")
    promote(observer)
    finish(observer, worker, held[:1])  # rings

    rebuild = HeldUp(database, observer, where, "default", "g")
    assert len(finish(observer, worker, held[1:2], outcome)) == 1
    rebuild.goes_on()

    assert_consistent(observer)
    assert in_flight(observer, "g") == 3
    popped = pop(observer, worker, 9)
    assert ready in popped
    assert len(set(popped) & set(tasks)) == 2, "one of three still runs"
    assert_consistent(observer)


@pytest.mark.parametrize("where", ["a lane", "a ring"])
def test_places_of_a_key_freed_while_a_rebuild_counts_them_are_freed_once(
    database: Database, observer: Conn, where: str
) -> None:
    observer.execute("""select fairq.configure_key('k', '{"max_running": 3}')""")
    create_each(observer, *["g"] * 9, concurrency_key="k")
    worker = register(observer)
    held = pop(observer, worker, 3)
    assert len(held) == 3
    finish(observer, worker, held[:1])

    rebuild = HeldUp(database, observer, where, "#keys", "k")
    assert len(finish(observer, worker, held[1:2])) == 1
    rebuild.goes_on()

    assert len(pop(observer, worker, 9)) == 2, "one of three still runs"
    assert in_flight(observer, "k", "#keys") == 3
    assert_consistent(observer)


@WHERE
def test_what_applications_commit_while_a_rebuild_looks_is_not_missed(
    database: Database, observer: Conn, where: str
) -> None:
    app = database.connect()
    (wished, first) = create_each(observer, "g", "g")
    create_each(observer, "ready")
    promote(observer)
    create_each(observer, "g")  # rings
    (pending,) = create_each(app, "g")

    rebuild = HeldUp(database, observer, where, "default", "g")
    (later,) = create_each(observer, "h")
    (due,) = create_each(observer, "i", run_at="2000-01-01")
    observer.execute("select set_config('fairq.now', '2001-01-01', false)")
    (scheduled,) = create_each(observer, "i", run_at="2001-01-01 00:00:01")
    observer.execute("reset fairq.now")
    observer.execute("select fairq.cancel_task(%s)", [wished])
    app.commit()
    rebuild.goes_on()

    maintain(observer)
    served = drain(observer, register(observer))
    assert {first, pending, later, due, scheduled} <= set(served)
    assert states(observer)[wished] == "cancelled"
    assert_consistent(observer)


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_pop_that_a_rebuild_waits_for_is_counted_when_it_commits(
    database: Database, observer: Conn, commits: bool
) -> None:
    """I7: what the pop holds is seen only by a statement that begins after it committed."""
    call(observer, "configure_group", "default", "capped", max_running=2)
    create_each(observer, *["capped"] * 6)
    promote(observer)
    worker = register(observer)
    popper, rebuilder = database.connect(), database.connect(autocommit=True)
    assert len(pop(popper, worker, 2)) == 2
    done = in_background(rebuilder, "select fairq.rebuild('default')")
    assert wait_until_blocked(observer, pid_of(rebuilder)) == [pid_of(popper)]
    if commits:
        popper.commit()
    else:
        popper.rollback()
    result(done)
    assert_consistent(observer)
    assert len(pop(observer, worker, 10)) == (0 if commits else 2)
    assert_consistent(observer)


@pytest.mark.usefixtures("one_shard")
def test_a_pop_of_two_shards_that_meets_a_rebuild_in_both_does_not_end_it(database: Database) -> None:
    conn, popper, promoter, rebuilder = (database.connect(autocommit=n == 0) for n in range(4))
    set_shards(conn, 5)
    worker = register(conn)
    tasks = create_each(conn, "bob", "bob", "bob")
    shard = one(conn, "select max(shard_no) from fairq.tasks")
    assert shard > 0
    pop(conn, worker, 1)
    # It has a task of one shard in hand.
    assert len(pop(popper, worker, 1)) == 1
    run(promoter, "select from fairq.domains where shard_no = %s and queue = 'default' for update", shard)
    rebuilt = in_background(rebuilder, "select fairq.rebuild('default')")
    wait_until_blocked(conn, pid_of(rebuilder))
    # As a pop would, for a moment: who rebuilds has shard 0, and is the one who sees the circle.
    run(popper, "set deadlock_timeout = '1min'")
    run(popper, "set lock_timeout = '2s'")
    waiting = in_background(
        popper, "select from fairq.domains where shard_no = 0 and queue = 'default' for update"
    )
    wait_until_blocked(conn, pid_of(popper))
    promoter.rollback()
    with pytest.raises(psycopg.errors.LockNotAvailable):
        result(waiting)
    popper.rollback()
    result(rebuilt)
    rebuilder.commit()
    assert_consistent(conn)
    assert pop(conn, worker, 5) == tasks[1:]
