"""What must hold for the engine's tables while no transaction is open (I1, I7, I11, I13)."""

from collections.abc import Mapping
from typing import Any

import psycopg

# Domains, lanes, places and charges. Lanes as they count: the newest version of each, if it is not from
# before a rebuild. Where promotion has heard all rings (is_heard) nothing is on its way any more.
LANES = """
with domain as materialized (
  select d.shard_no, d.queue, k.tick, k.clock, k.clock_position, k.horizon, k.horizon_position,
    k.first_version, k.next_due_at,
    -- While groups move, what came free is told where they were, and told again where they are.
    case when s.moving_from is null then h.is_heard else bool_and(h.is_heard) over (partition by d.queue) end
      as is_heard
  from fairq.settings s
  cross join fairq.domains d
  left join lateral fairq._tick(d.shard_no, d.queue) k on true
  cross join lateral (select k.tick is not null and not fairq._has_news(k) as is_heard offset 0) h
),
lane as materialized (
  select distinct on (l.shard_no, l.queue, l.group_key, l.user_key) l.*, d.queue as of_queue,
    d.is_heard, d.horizon, d.horizon_position, d.next_due_at
  from fairq.lanes l
  join domain d on d.shard_no = l.shard_no and l.queue in (d.queue, fairq._users_of(d.queue))
    and l.version >= d.first_version
  order by l.shard_no, l.queue, l.group_key, l.user_key, l.version desc
),
place as materialized (
  select s.shard_no, s.group_key,
    case when s.user_key is null then s.queue else fairq._users_of(s.queue) end as queue,
    coalesce(s.user_key, '') as user_key, count(*) as places
  from (
    select h.shard_no, h.id, h.counted, h.user_counted, h.meters, h.keyed from fairq.held h
    union all
    select r.shard_no, r.id, r.counted, r.user_counted, 0, r.keyed_at is not null from fairq.ready r
    union all
    select p.shard_no, p.id, false, false, 0, true from fairq.parked p
    where p.granted or p.concurrency_key = ''
  ) x
  join fairq.tasks t on t.shard_no = x.shard_no and t.id = x.id
  cross join lateral fairq._scopes(t.shard_no, t.queue, t.group_key, x.counted, x.meters,
    case when x.keyed then t.concurrency_key end, case when x.user_counted then t.user_key end) s
  group by 1, 2, 3, 4
),
charge as materialized (
  select t.shard_no, t.queue, t.group_key, t.user_key, sum(x.charge) as charged
  from (
    select h.shard_no, h.id, h.charge from fairq.held h
    union all
    select r.shard_no, r.id, r.charge from fairq.ready r
  ) x
  join fairq.tasks t on t.shard_no = x.shard_no and t.id = x.id
  group by 1, 2, 3, 4
)
"""

QUERIES = {
    "tasks in two of ready, held and parked": """
        select x.shard_no, x.id, array_agg(x.what)
        from (
          select shard_no, id, 'ready' as what from fairq.ready
          union all select shard_no, id, 'held' from fairq.held
          union all select shard_no, id, 'parked' from fairq.parked
        ) x
        group by 1, 2
        having count(*) > 1""",
    "rows without a body, or that say something else than it": """
        select 'held', h.id from fairq.held h
        where not exists (
          select from fairq.tasks t where t.shard_no = h.shard_no and t.id = h.id and not t.scheduled)
        union all
        select 'ready', r.id from fairq.ready r
        where not exists (
          select from fairq.tasks t
          where (t.shard_no, t.id, t.queue, t.group_key, t.user_key)
            = (r.shard_no, r.id, r.queue, r.group_key, r.user_key)
            and not t.scheduled)
        union all
        select 'parked', p.id from fairq.parked p
        where not exists (
          select from fairq.tasks t
          where (t.shard_no, t.id, t.queue, t.group_key, t.user_key, t.priority, t.sequence)
            = (p.shard_no, p.id, p.queue, p.group_key, p.user_key, p.priority, p.sequence) and not t.scheduled
            and p.concurrency_key in (t.concurrency_key, ''))""",
    "held tasks whose worker nobody knows": """
        select h.id, h.worker_id from fairq.held h
        where not exists (
          select from fairq.workers w where w.shard_no = h.shard_no and w.worker_id = h.worker_id)""",
    "tasks both live and ended": """
        select t.id from fairq.tasks t where exists (select from fairq.finished_tasks f where f.id = t.id)""",
    "counts below zero": """
        select l.queue, l.group_key, l.gate from fairq.lanes l
        where (l.gate).in_flight < 0 or (l.gate).uncounted < 0""",
    "groups that wait for a key with more or less than one turn, or not at their first task": """
        select p.concurrency_key, p.queue, p.group_key, count(p.turn),
          array_agg(p order by p.priority desc, p.sequence)
        from fairq.parked p
        where not p.granted
        group by p.shard_no, p.concurrency_key, p.queue, p.group_key
        having count(p.turn) <> 1
          or (array_agg(p.turn order by p.priority desc, p.sequence))[1] is null""",
    "turns before the clock of their key": """
        select p.concurrency_key, p.id, p.turn, (fairq._lane(p.shard_no, '#keys', p.concurrency_key)).finish
        from fairq.parked p
        where p.turn < (fairq._lane(p.shard_no, '#keys', p.concurrency_key)).finish""",
}

OF_LANES = {  # these read what LANES names
    "lanes that count other places than rows hold (queue, lane, by the lane, by the rows)": """
        select coalesce(l.queue, p.queue), coalesce(l.group_key, p.group_key),
          coalesce(l.user_key, p.user_key), (l.gate).in_flight, p.places
        from lane l
        full join place p on p.shard_no = l.shard_no and p.queue = l.queue and p.group_key = l.group_key
          and p.user_key = l.user_key
        where coalesce((l.gate).in_flight, 0) <> coalesce(p.places, 0)
          and exists (
            select from domain d
            where d.shard_no = coalesce(l.shard_no, p.shard_no)
              and coalesce(l.queue, p.queue) in (d.queue, fairq._users_of(d.queue))
              and d.is_heard)""",
    "lanes that reserve something else than their tasks in flight were charged": """
        select l.queue, l.group_key, (l.pace).reserved, s.charged
        from lane l
        left join (
          select c.shard_no, c.queue, c.group_key, sum(c.charged) as charged from charge c group by 1, 2, 3
        ) s on s.shard_no = l.shard_no and s.queue = l.queue and s.group_key = l.group_key
        where l.is_heard
          and l.pace is distinct from null
          and abs((l.pace).reserved - coalesce(s.charged, 0)) > 0.001 + 1e-9 * s.charged""",
    # What was charged before there was an order among them is only known to their group.
    "lanes of users that reserve more than their tasks in flight were charged": """
        select l.queue, l.group_key, l.user_key, (l.pace).reserved, s.charged
        from lane l
        left join charge s on s.shard_no = l.shard_no and s.queue = l.of_queue and s.group_key = l.group_key
          and s.user_key = l.user_key
        where l.is_heard
          and l.queue <> l.of_queue
          and (l.pace).reserved > coalesce(s.charged, 0) * (1 + 1e-9) + 0.001""",
    "lanes with more than one version": """
        select l.shard_no, l.queue, l.group_key, l.user_key
        from fairq.lanes l
        join domain d on d.shard_no = l.shard_no and l.queue in (d.queue, fairq._users_of(d.queue))
          and l.version >= d.first_version
        where d.is_heard
        group by 1, 2, 3, 4
        having count(*) > 1""",
    "ready tasks before the clock": """
        select r.id, r.block, r.position, d.clock, d.clock_position
        from fairq.ready r
        join domain d on d.shard_no = r.shard_no and d.queue = r.queue and d.tick is not null
        where (r.block, r.position) < (d.clock, d.clock_position)""",
    "waiting tasks that no cursor covers": """
        select t.id, t.group_key, t.priority, t.sequence, l.cursors
        from fairq.tasks t
        join domain d on d.shard_no = t.shard_no and d.queue = t.queue and d.is_heard
        left join lane o on o.shard_no = t.shard_no and o.queue = t.queue and o.group_key = t.group_key
        left join lane l on l.shard_no = t.shard_no and l.group_key = t.group_key and l.line = t.user_key
          and l.queue = case when o.inside is null then t.queue else fairq._users_of(t.queue) end
        where not t.scheduled
          and not exists (select from fairq._taken(t.shard_no, t.id))
          and not exists (
            select from unnest(l.cursors) c
            where c.priority = t.priority and c.sequence <= t.sequence
              or c.is_open and c.priority > t.priority)""",
    "scheduled tasks that nobody will wake": """
        select t.id, t.run_at, d.next_due_at
        from fairq.tasks t
        join domain d on d.shard_no = t.shard_no and d.queue = t.queue and d.is_heard
        where t.scheduled
          and (d.next_due_at is null or d.next_due_at > t.run_at)""",
    "lanes with waiting tasks that promotion passes": """
        select l.queue, l.group_key, l.admissible, l.look_at, l.finish, l.position, l.horizon,
          l.horizon_position, l.gate
        from lane l
        where l.is_heard
          and l.cursors <> '{}'
          and case
            when l.admissible and l.queue <> l.of_queue then
              not exists (
                select from lane o
                where o.shard_no = l.shard_no and o.queue = l.of_queue and o.group_key = l.group_key
                  and o.cursors <> '{}' and ((o.inside).clock, (o.inside).position) <= (l.finish, l.position))
            when l.admissible then
              l.horizon is null or (l.finish, l.position) < (l.horizon, l.horizon_position)
            when l.policy is not distinct from null and (l.gate).held_until is null then true
            else (fairq._allowance(l.policy, l.gate, fairq._now(), (l.pace).reserved)).tasks > 0
              and (l.look_at is null or l.next_due_at is null or l.look_at < l.next_due_at)
          end""",
    "tasks that wait for a key that has room": """
        select p.id, p.queue, p.group_key, p.concurrency_key, l.gate
        from fairq.parked p
        join domain d on d.shard_no = p.shard_no and d.queue = '#keys' and d.is_heard
        left join lane l on l.shard_no = p.shard_no and l.queue = '#keys' and l.group_key = p.concurrency_key
        where not p.granted
          and p.concurrency_key <> ''
          and (fairq._allowance(
            coalesce(l.policy, fairq._policy_of(p.shard_no, '#keys', p.concurrency_key)), l.gate, fairq._now()
          )).tasks > 0""",
}

VIOLATIONS = LANES + " union all ".join(
    f"select '{what}', x::text from ({query}) x\n"  # noqa: S608
    for what, query in {**QUERIES, **OF_LANES}.items()
)
# To plan it takes longer than most tests. A session keeps the plans of its functions, also from one test to
# the next, but not of what a test prepared (tests/support/kept.py).
FUNCTION = f"""
create schema checks;
create function checks.violations(out o_what text, out o_row text) returns setof record
language plpgsql as $violations$
begin
  return query {VIOLATIONS};
end;
$violations$;
"""

# What is in flight of a group, or a user of it, in one queue, and of a key, in all of them.
IN_FLIGHT = """
select t.queue, t.group_key as what, count(*)
from fairq.live_tasks t
where t.worker_id is not null and t.group_key = any(%(names)s)
group by 1, 2
union all
select t.queue, t.group_key || ' ' || t.user_key, count(*)
from fairq.live_tasks t
where t.worker_id is not null and t.group_key || ' ' || t.user_key = any(%(names)s)
group by 1, 2
union all
select 'all queues', t.concurrency_key, count(*)
from fairq.live_tasks t
where t.worker_id is not null and t.concurrency_key = any(%(names)s)
group by 1, 2
"""


def exceeded(conn: psycopg.Connection[Any], most: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Groups and keys above their cap: queue, name and how many are in flight."""
    found = conn.execute(IN_FLIGHT, {"names": list(most)}).fetchall()
    return [row for row in found if row[2] > most[row[1]]]


def violations(conn: psycopg.Connection[Any]) -> dict[str, list[str]]:
    """What is wrong, by name; empty if nothing is. In one statement, for one snapshot and one plan."""
    found: dict[str, list[str]] = {}
    has_it = conn.execute("select to_regproc('checks.violations') is not null").fetchone() == (True,)
    query = "select * from checks.violations()" if has_it else VIOLATIONS
    for what, row in conn.execute(query.encode(), prepare=True).fetchall():
        found.setdefault(what, []).append(row)
    return found


def hear_all(conn: psycopg.Connection[Any]) -> None:
    """Let every queue, the keys and the meters hear all rings. Needs that no transaction is open."""
    query = "select shard_no, queue from fairq.domains order by queue like '#%' desc, queue, shard_no"
    for _ in range(20):
        for shard, queue in conn.execute(query).fetchall():
            with conn.transaction():
                if queue == "#keys":
                    conn.execute("select fairq._lock_domain(%s, '#keys', true)", [shard])
                    conn.execute("select fairq._open_keys(%s, fairq._now())", [shard])
                elif queue.startswith("#") and shard == 0:
                    conn.execute("select fairq._hold_meter(%s)", [queue[1:]])
                elif not queue.startswith("#"):
                    conn.execute("select fairq.promote_overflow(%s, 1, %s)", [queue, shard])
        heard = conn.execute(
            "select bool_and(not fairq._has_news(k)) from fairq.domains d, fairq._tick(d.shard_no, d.queue) k"
        ).fetchone()
        if heard == (True,):
            return


def assert_sound(conn: psycopg.Connection[Any]) -> None:
    """Assert that derived tables agree with bodies and holders. Needs that no transaction is open."""
    wrong = violations(conn)
    assert not wrong, wrong
    hear_all(conn)
    wrong = violations(conn)
    assert not wrong, wrong


def assert_consistent(conn: psycopg.Connection[Any]) -> None:
    """The same, after one more promotion of each queue."""
    for (queue,) in conn.execute("select queue from fairq.queues where not internal").fetchall():
        conn.execute("select fairq.promote_overflow(%s)", [queue])
    assert_sound(conn)
