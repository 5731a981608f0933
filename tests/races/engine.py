"""The engine's calls, as short as races want them, and what must hold when all sessions are done."""

from collections.abc import Iterable
from typing import Any

import psycopg

from tests.support.invariants import assert_sound
from tests.support.sessions import Rows

Conn = psycopg.Connection[Any]


def create(conn: Conn, *group_keys: str, queue: str = "default", **options: Any) -> list[int]:
    """One create_task for each group key, in this order."""
    names = "".join(f", p_{name} => %({name})s" for name in options)
    ids = []
    for group_key in group_keys:
        row = conn.execute(
            f"select fairq.create_task(%(group_key)s, '{{}}', %(queue)s{names})",
            {"group_key": group_key, "queue": queue, **options},
        ).fetchone()
        assert row is not None
        ids.append(int(row[0]))
    return ids


def promote(conn: Conn, queue: str = "default", limit: int | None = None) -> int:
    row = conn.execute("select fairq.promote_overflow(%s, %s)", [queue, limit]).fetchone()
    assert row is not None
    return int(row[0])


def register(conn: Conn, *, lease: str = "1 hour", queues: Iterable[str] = ("default",)) -> int:
    row = conn.execute(
        "select fairq.register_worker('racer', %s, 8, %s::interval)", [list(queues), lease]
    ).fetchone()
    assert row is not None
    return int(row[0])


POP = "select t.id, t.attempt from fairq.pop_tasks(%s, %s, %s, %s::interval) t"
FINISH = "select f.id from fairq.finish_tasks(%s, %s::bigint[], %s::int[], %s::text[]) as f(id) order by 1"
RELEASE = "select r.id from fairq.release_tasks(%s, %s::bigint[], %s::int[]) as r(id) order by 1"
# What a promoter, a popper and maintenance wait for is this row.
LOCK_DOMAIN = "select from fairq.domains where queue = %s for update"


def pop(
    conn: Conn, worker: int, limit: int = 100, *, queue: str = "default", claim_lease: str | None = None
) -> Rows:
    """(id, attempt) of the tasks popped, in served order."""
    return conn.execute(POP, [queue, limit, worker, claim_lease]).fetchall()


def arrays(held: Rows) -> tuple[list[int], list[int]]:
    return [row[0] for row in held], [row[1] for row in held]


def finish_parameters(worker: int, held: Rows, outcome: str | None = None) -> list[Any]:
    ids, attempts = arrays(held)
    return [worker, ids, attempts, None if outcome is None else [outcome] * len(ids)]


def finish(conn: Conn, worker: int, held: Rows, outcome: str | None = None) -> list[int]:
    return [row[0] for row in conn.execute(FINISH, finish_parameters(worker, held, outcome))]


def release_parameters(worker: int, held: Rows) -> list[Any]:
    return [worker, *arrays(held)]


def maintain(conn: Conn) -> dict[str, int]:
    row = conn.execute("select fairq.maintain()").fetchone()
    assert row is not None
    return dict(row[0])


def cap(conn: Conn, group_key: str, max_running: int, queue: str = "default") -> None:
    """The group may have so many tasks in flight."""
    conn.execute(
        """
        insert into fairq.groups (shard_no, queue, group_key, max_running)
        select fairq._shard_of(%(group_key)s, s.shard_count), %(queue)s, %(group_key)s, %(max_running)s
        from fairq.settings s
        """,
        {"group_key": group_key, "queue": queue, "max_running": max_running},
    )


def states(conn: Conn) -> dict[int, str]:
    """State or outcome of every task."""
    rows = conn.execute(
        "select id, state from fairq.live_tasks union all select id, outcome from fairq.finished_tasks"
    ).fetchall()
    assert len({row[0] for row in rows}) == len(rows), "a task is there twice"
    return dict(rows)


def in_flight(conn: Conn, group_key: str, queue: str = "default") -> int:
    """What promotion believes the group has in flight."""
    row = conn.execute(
        """
        select (l.gate).in_flight from fairq.lanes l
        where l.queue = %s and l.group_key = %s
        order by l.version desc
        limit 1
        """,
        [queue, group_key],
    ).fetchone()
    assert row is not None
    return int(row[0])


# Those of before a rebuild do not count.
VERSIONS = """
select l.shard_no, l.queue, l.group_key
from fairq.lanes l
cross join lateral fairq._tick(l.shard_no, l.queue) k
where l.version >= k.first_version
group by 1, 2, 3
having count(*) <> 1
"""


def assert_consistent(conn: Conn) -> None:
    """With no transaction open: after one more promotion, what is derived says what is true (I11)."""
    for (queue,) in conn.execute("select queue from fairq.queues where not internal").fetchall():
        promote(conn, queue)
    assert_sound(conn)
    wrong = conn.execute(VERSIONS).fetchall()
    assert not wrong, f"lanes with another number of versions than one: {wrong}"


def drain(conn: Conn, worker: int, queue: str = "default") -> list[int]:
    """Pop and finish until nothing comes any more; the ids in served order."""
    served: list[int] = []
    while held := pop(conn, worker, 50, queue=queue):
        served += arrays(held)[0]
        assert len(finish(conn, worker, held)) == len(held)
    return served
