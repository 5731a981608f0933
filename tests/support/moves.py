"""Changes of the number of shards: what moves, and where it must be afterwards."""

import time
from collections.abc import Callable
from typing import Any

import psycopg

from tests.support.calls import call, one, run
from tests.support.invariants import assert_consistent

Conn = psycopg.Connection[Any]

# Whatever is stored by shard and group is in the shard of its group.
MISPLACED = """
select x.what, x.shard_no, x.group_key
from (
  select 'task' as what, t.shard_no, t.group_key from fairq.tasks t
  union all select 'lane', l.shard_no, l.group_key from fairq.lanes l
  where l.queue not like '#%%' or l.queue like '#users%%'
  union all select 'setting', g.shard_no, g.group_key from fairq.groups g
  where g.queue not like '#%%'
  union all select 'schedule', s.shard_no, s.group_key from fairq.schedules s
  -- Of a shard that has gone one may be left that somebody was taking: nobody looks for it there.
  union all select 'key', k.shard_no, k.group_key from fairq.idempotency_keys k
  where k.shard_no < (select s.shard_count from fairq.settings s)
) x
where x.shard_no <> fairq._shard_of(x.group_key, (select s.shard_count from fairq.settings s))
"""


def begin(conn: Conn, shards: int) -> None:
    call(conn, "configure_cluster", shard_count=shards)


def step(conn: Conn) -> dict[str, Any]:
    """Call move_groups once, and return its answer."""
    found: dict[str, Any] = one(conn, "select fairq.move_groups()")
    return found


def go_on(conn: Conn, patience: float = 60, meanwhile: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Move until it is done."""
    until = time.monotonic() + patience
    while (said := step(conn))["state"] != "done":
        assert time.monotonic() < until, said
        meanwhile()
        if said["state"] == "waiting":
            time.sleep(0.01)
    return said


def set_shards(conn: Conn, shards: int) -> None:
    begin(conn, shards)
    go_on(conn)


def move(conn: Conn, shards: int) -> None:
    set_shards(conn, shards)
    assert_moved(conn)


def assert_moved(conn: Conn) -> None:
    assert run(conn, MISPLACED) == []
    assert run(conn, "select * from fairq.moving") == []
    assert run(conn, "select * from fairq.groups where leaving_at is not null") == []
    assert_consistent(conn)
