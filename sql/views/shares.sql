-- Who gets what: for each group, what it received in the last p_since, what it was entitled to, how far it is behind the group furthest ahead, and what it
-- waits for. It reads the ledger, and what has happened since its last part, so it is as of now.
-- debt: how far the group is behind the group furthest ahead of it, while both had work waiting all the time with nothing but their turn before them. bound:
-- how far it may be (I4). Both are null for a group that did not wait like that up to now: it has no debt.
-- eta_seconds: until all its waiting tasks are done, if no others come, and only the groups returned have tasks waiting; null: unknown, or nothing waits.
-- Returns a row for each of the p_limit groups that are most behind, or received most, one for p_group_key, and one, with group_key '', for all others
-- together; no row before any task ran or waited.
-- Raises QF003 unknown queue, QF007 limit, QF009 time.
-- Cost: the ledger of the time, history since its last part, and the waiting tasks of the groups returned.
create function fairq.shares(p_queue text default 'default', p_since interval default '10 minutes', p_limit integer default 100, p_group_key text default null)
returns table (
  group_key text, groups integer, weight double precision, tasks bigint, seconds double precision, cost double precision, received double precision,
  entitled double precision, debt double precision, bound double precision, wait_p50 double precision, wait_p95 double precision, waiting_since timestamptz,
  backlog bigint, backlog_seconds double precision, eta_seconds double precision, limited_by text, behind jsonb
)
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues := fairq._queue(p_queue);
  v_live fairq.ledger[];
begin
  perform fairq._check_length('the time', p_since, interval '366 days');
  perform fairq._check_limit(p_limit);
  v_live := fairq._ledger_live(v_queue, v_now);
  return query
    with account as materialized (
      select r.*, r.group_key <> '' and (r.group_key is not distinct from p_group_key or r.nth <= p_limit) as shown
      from (
        select a.*, row_number() over (order by a.group_key = '', a.debt / a.bound desc nulls last, a.received desc, a.group_key) as nth
        from fairq._accounts(v_queue, v_now - p_since, v_live) a
      ) r
    ),
    mean as materialized (select sum(a.ran) / nullif(sum(a.ended), 0) as seconds from account a),
    held as materialized (
      select b.group_key, count(*) as tasks
      from fairq._shards(null) s(shard_no)
      join fairq.held h on h.shard_no = s.shard_no
      cross join lateral fairq._body(h.shard_no, h.id) b
      where b.queue = p_queue
      group by b.group_key
    ),
    backlog as materialized (
      -- The backlog of each group: how many tasks, how long they take, and how much they ask for of what groups share.
      select a.*, l.waiting, l.waiting * m.seconds as takes, l.waiting * coalesce(nullif(
          case v_queue.fairness when 'time' then m.seconds when 'cost' then a.received / nullif(a.ended, 0) else a.cost / nullif(a.tasks, 0) end,
          0), 1) as asks,
        case when l.waiting > 0 then (
          select o.reason from fairq._obstacles(a.shard_no, p_queue, a.group_key, null, null, 'overflow', v_now) o order by o.nth limit 1
        ) end as reason
      from account a
      left join held h on h.group_key = a.group_key
      cross join lateral (select coalesce(a.ran / nullif(a.ended, 0), n.seconds) as seconds from mean n) m
      cross join lateral (
        select greatest(0, count(*) - coalesce(h.tasks, 0)) as waiting
        from (
          select from fairq.tasks t
          where t.shard_no = a.shard_no and t.queue = p_queue and t.group_key = a.group_key and not t.scheduled
          limit 1000000
        ) t
      ) l
      where a.shown
    ),
    drain as materialized (
      -- All groups drain at once, by weight, on as many slots as are busy: a group is done after as many rounds as it has work for. By then each other group
      -- has used all its work takes, or, if it has work for longer, the part of that which fits into these rounds.
      select b.*, (sum(b.takes) over by_rounds
          + b.asks / b.weight
            * (sum(b.takes * b.weight / nullif(b.asks, 0)) over () - sum(b.takes * b.weight / nullif(b.asks, 0)) over by_rounds))
        / greatest(1, (select sum(h.tasks) from held h)) as through
      from backlog b
      window by_rounds as (order by b.asks / b.weight)
    ),
    told as materialized (
      select b.* from fairq._waits(p_queue, v_now - p_since, v_live, array(select a.group_key from account a where a.shown)) b
    )
    (select a.group_key, a.groups, a.weight, a.tasks, a.seconds, a.cost, a.received, a.entitled, a.debt, a.bound, fairq._quantile(f.waits, 0.5),
      fairq._quantile(f.waits, 0.95), a.waiting_since, a.waiting, a.takes,
      -- A group that its own limits hold back goes on as fast as it did.
      case when a.waiting > 0 and a.takes is not null then coalesce(case when a.reason is not null then a.asks / nullif(a.pace, 0) end, a.through) end,
      a.reason, f.behind
    from drain a
    left join told f on f.shard_no = a.shard_no and f.group_key = a.group_key
    order by a.nth)
    union all
    select '', sum(a.groups)::integer, sum(a.weight), sum(a.tasks)::bigint, sum(a.seconds), sum(a.cost), sum(a.received), sum(a.entitled),
      null, null, null, null, min(a.waiting_since), null, null, null, null, null
    from account a
    where not a.shown
    having count(*) > 0;
end;
$$;
comment on function fairq.shares is
  'Who gets what: a row per group with what it received and was entitled to, its debt and its bound, its waits, its backlog, and what it waits for.';

-- What has happened in a queue since the last part of its ledger, as a part of its own.
create function fairq._ledger_live(p_queue fairq.queues, p_now timestamptz) returns fairq.ledger[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return array(
    select l
    from fairq._shards(null) s(shard_no)
    cross join lateral (select coalesce(fairq._ledger_until(s.shard_no), fairq._ledger_begin(p_now)) offset 0) u(until)
    left join lateral (select t.tallies from fairq._tally(s.shard_no, u.until, p_now) t where t.queue = p_queue.queue offset 0) t on true
    cross join lateral fairq._ledger_part(s.shard_no, p_queue, t.tallies, u.until, p_now, p_now) l
    where p_now > u.until
  );
end;
$$;

-- The ledger of a queue since p_from, and a part that is not written yet. It returns a set, and has no settings, so it is inlined, and only the columns wanted
-- are read.
create function fairq._ledger_since(p_queue text, p_from timestamptz, p_live fairq.ledger[]) returns setof fairq.ledger
language sql stable rows 1000 as $$
  select l.* from fairq.ledger l
  where l.shard_no = any(array(select s from fairq._shards(null) s)) and l.queue = p_queue and l.begins_at > p_from - fairq._ledger_step()
  union all
  select u.* from unnest(p_live) u
$$;

-- The rows of a ledger taken together by group, with the debt of each. For a group that was judged in the last part, each stretch up to now in all of whose
-- parts it was judged is compared with the group furthest ahead in it; the stretch in which the debt comes nearest to its bound counts.
-- Overlapping pops may begin and commit in another order than they took tasks: so the bound has the largest task of both groups once for each worker.
create function fairq._accounts(p_queue fairq.queues, p_from timestamptz, p_live fairq.ledger[]) returns setof fairq.account
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_nestloop = off set enable_mergejoin = off set work_mem = '64MB' as $$
begin
  return query
    with entry as materialized (
      select r.shard_no, r.groups, r.begins_at, r.until, r.waiting_since, r.weight, r.tasks, r.ended, r.cost, r.seconds, r.ran, r.service, r.entitled,
        r.largest, r.slack, r.judged, r.group_key
      from fairq._ledger_since(p_queue.queue, p_from, p_live) r
    ),
    step as materialized (
      select t.shard_no, t.begins_at, row_number() over (partition by t.shard_no order by t.begins_at desc) as part_no
      from (select distinct r.shard_no, r.begins_at from entry r) t
    ),
    -- For groups that were judged in the last part, the parts before it, back to the first in which they were not.
    judged as materialized (
      select j.*
      from (
        select r.*, t.part_no, row_number() over (partition by r.shard_no, r.group_key order by t.part_no) as nth
        from (
          select k.shard_no, k.group_key
          from entry k
          join step i on i.shard_no = k.shard_no and i.begins_at = k.begins_at and i.part_no = 1
          where k.judged
        ) g
        join entry r on r.shard_no = g.shard_no and r.group_key = g.group_key and r.judged
        join step t on t.shard_no = r.shard_no and t.begins_at = r.begins_at
      ) j
      where j.nth = j.part_no
    ),
    stretch as materialized (
      select j.shard_no, j.group_key, j.part_no, j.weight, sum(j.service) over back / j.weight as served, max(j.largest) over back / j.weight as largest,
        2 * max(greatest(j.slack, b.slack)) over back / j.weight as slack
      from judged j
      left join step t on t.shard_no = j.shard_no and t.part_no = j.part_no + 1
      left join entry b on b.shard_no = t.shard_no and b.begins_at = t.begins_at and b.group_key = j.group_key
      window back as (partition by j.shard_no, j.group_key order by j.part_no)
    ),
    ahead as materialized (
      select distinct on (s.shard_no, s.part_no) s.* from stretch s
      order by s.shard_no, s.part_no, s.served - s.largest - s.slack desc, s.group_key
    ),
    worker as materialized (
      select greatest(1, count(*)) as workers from fairq.workers w where w.shard_no = 0 and w.lost_at is null and p_queue.queue = any(w.queues)
    ),
    debt as materialized (
      select distinct on (d.shard_no, d.group_key) d.*
      from (
        select s.shard_no, s.group_key, s.weight * greatest(0, a.served - s.served) as debt,
          s.weight * ((a.largest + s.largest) * w.workers + a.slack + s.slack) as bound
        from stretch s
        join ahead a on a.shard_no = s.shard_no and a.part_no = s.part_no
        cross join worker w
      ) d
      order by d.shard_no, d.group_key, d.debt / nullif(d.bound, 0) desc nulls last
    ),
    whole as materialized (
      select r.shard_no, r.group_key, max(r.groups) as groups, max(r.begins_at) as last_at, sum(r.tasks)::bigint as tasks, sum(r.ended)::bigint as ended,
        sum(r.seconds) as seconds, sum(r.cost) as cost, sum(r.ran) as ran, sum(r.service) as received, sum(r.entitled) as entitled,
        coalesce(sum(r.entitled) filter (where r.waiting_since is not null)
          / nullif(sum(tstzrange_subdiff(r.until, r.begins_at)) filter (where r.waiting_since is not null), 0),
          sum(r.entitled) / nullif(sum(tstzrange_subdiff(r.until, r.begins_at)), 0)) as pace
      from entry r
      group by r.shard_no, r.group_key
    )
    select g.shard_no, g.group_key, g.groups, l.weight, g.tasks, g.ended, g.seconds, g.cost, g.ran, g.received, g.entitled, d.debt, d.bound,
      g.pace, case when t.part_no = 1 then l.waiting_since end
    from whole g
    join entry l on l.shard_no = g.shard_no and l.group_key = g.group_key and l.begins_at = g.last_at
    join step t on t.shard_no = g.shard_no and t.begins_at = g.last_at
    left join debt d on d.shard_no = g.shard_no and d.group_key = g.group_key;
end;
$$;

-- How long tasks of these groups waited, and behind whom: the three groups that had most while they waited. In each part, the ten that had most count.
-- Nested loops are off, so it hashes, whatever the planner thinks of arrays: a nested loop takes minutes for an hour of 200 groups.
create function fairq._waits(p_queue text, p_from timestamptz, p_live fairq.ledger[], p_groups text[])
returns table (shard_no integer, group_key text, waits bigint[], behind jsonb)
language sql stable set search_path = pg_catalog, pg_temp set enable_nestloop = off set enable_mergejoin = off as $$
  with line as materialized (
    select r.shard_no, r.begins_at, r.group_key, r.seconds, r.waiting_since is not null as waits,
      row_number() over (partition by r.shard_no, r.begins_at order by r.seconds desc, r.group_key) as nth
    from fairq._ledger_since(p_queue, p_from, p_live) r
    where r.group_key <> ''
  ),
  hist as materialized (
    -- Step by step: taking the arrays apart and putting them together again costs ten times as much.
    select r.shard_no, r.group_key, array[
      sum(r.waits[1]), sum(r.waits[2]), sum(r.waits[3]), sum(r.waits[4]), sum(r.waits[5]), sum(r.waits[6]), sum(r.waits[7]), sum(r.waits[8]),
      sum(r.waits[9]), sum(r.waits[10]), sum(r.waits[11]), sum(r.waits[12]), sum(r.waits[13]), sum(r.waits[14]), sum(r.waits[15]), sum(r.waits[16]),
      sum(r.waits[17]), sum(r.waits[18]), sum(r.waits[19]), sum(r.waits[20]), sum(r.waits[21])
    ]::bigint[] as waits
    from unnest(p_groups) n(group_key)
    join fairq._ledger_since(p_queue, p_from, p_live) r on r.group_key = n.group_key
    group by r.shard_no, r.group_key
  ),
  pair as materialized (
    select g.shard_no, g.group_key, o.group_key as ahead, sum(o.seconds) as seconds
    from unnest(p_groups) n(group_key)
    join line g on g.group_key = n.group_key and g.waits
    join line o on o.shard_no = g.shard_no and o.begins_at = g.begins_at
    where o.nth <= 10 and o.group_key <> g.group_key and o.seconds > 0
    group by g.shard_no, g.group_key, o.group_key
  )
  select h.shard_no, h.group_key, h.waits, b.behind
  from hist h
  left join (
    select p.shard_no, p.group_key, jsonb_agg(jsonb_build_object('group', p.ahead, 'seconds', p.seconds) order by p.nth) as behind
    from (select a.*, row_number() over (partition by a.shard_no, a.group_key order by a.seconds desc, a.ahead) as nth from pair a) p
    where p.nth <= 3
    group by p.shard_no, p.group_key
  ) b on b.shard_no = h.shard_no and b.group_key = h.group_key
$$;

-- A quantile of a histogram, in seconds, as if the lengths in each step were spread evenly.
create function fairq._quantile(p_histogram bigint[], p_part double precision) returns double precision
language sql immutable parallel safe as $$
  select case when c.before + c.number = 0 then null
      when c.step = 0 then 0.005 * (c.wanted - c.before) / c.number
      else 0.005 * power(2, c.step - 1) * (1 + (c.wanted - c.before) / c.number) end
  from (
    select u.nth - 1 as step, u.number, sum(u.number) over (order by u.nth) - u.number as before, p_part * sum(u.number) over () as wanted
    from unnest(p_histogram) with ordinality u(number, nth)
  ) c
  where c.number > 0 and c.before + c.number >= c.wanted
  order by c.step limit 1
$$;
