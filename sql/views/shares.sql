-- Who gets what: of each group what it received in the last time, what it was entitled to, how far it is behind the one that is furthest ahead, and what it
-- waits for. From the ledger, and what has happened since its last part: so it is as of now.
-- debt is what the group is behind the group that is furthest ahead of it while both had work waiting all the time with nothing but their turn before them,
-- bound how far it may be (I4). Both are null for a group that did not wait like that up to now: it has no debt.
-- eta_seconds: until all that waits of it is through, if nothing else comes, and nobody waits beside the groups returned; null: unknown, or nothing waits.
-- Returns a row for each of the p_limit groups that are most behind, or received most, and for p_group_key, and one, of the group '', for all others
-- together; none before anything was done or waited.
-- Raises QF003 unknown queue, QF007 limit, QF009 time.
-- Locks: none.
-- Cost: the ledger of the time, history since its last part, and the tasks that wait of the groups returned.
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
  v_rows fairq.ledger[];
begin
  perform fairq._check_length('the time', p_since, interval '366 days');
  perform fairq._check_limit(p_limit);
  v_rows := fairq._ledger_rows(p_queue, v_now - p_since, v_now);
  return query
    with account as materialized (
      select r.*, r.group_key <> '' and (r.group_key is not distinct from p_group_key or r.nth <= p_limit) as shown
      from (
        select a.*, row_number() over (order by a.group_key = '', a.debt / a.bound desc nulls last, a.received desc, a.group_key) as nth
        from unnest(fairq._accounts(v_queue, v_rows)) a
      ) r
    ),
    mean as materialized (
      select sum(a.ran) / nullif(sum(a.ended), 0) as seconds from account a
    ),
    held as materialized (
      select b.group_key, count(*) as tasks
      from fairq._shards(null) s(shard_no)
      join fairq.held h on h.shard_no = s.shard_no
      cross join lateral (
        select t.group_key from fairq.tasks t where t.shard_no = h.shard_no and t.id = h.id and t.queue = p_queue offset 0
      ) b
      group by b.group_key
    ),
    backlog as materialized (
      -- What waits of each: how many tasks, how long they take, and how much of what the queue shares they ask for.
      select a.*, l.waiting, l.waiting * m.seconds as takes, l.waiting * coalesce(nullif(
          case v_queue.fairness when 'time' then m.seconds when 'cost' then a.received / nullif(a.ended, 0) else a.cost / nullif(a.tasks, 0) end, 0), 1) as asks,
        case when l.waiting > 0 then (select o.reason from fairq._obstacles(a.shard_no, p_queue, a.group_key, null, null, 'overflow', v_now) o order by o.nth limit 1) end as reason
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
      -- All drain at once, by weight, on as many slots as are busy: a group is through after as many rounds as it has work for. Until then each other one has
      -- used what it has, or, if it has work for longer, its part of that.
      select b.*, (sum(b.takes) over by_rounds + b.asks / b.weight * (sum(b.takes * b.weight / nullif(b.asks, 0)) over () - sum(b.takes * b.weight / nullif(b.asks, 0)) over by_rounds))
        / greatest(1, (select sum(h.tasks) from held h)) as through
      from backlog b
      window by_rounds as (order by b.asks / b.weight)
    ),
    told as materialized (
      select b.* from fairq._waits(v_rows, array(select a.group_key from account a where a.shown)) b
    )
    (select a.group_key, a.groups, a.weight, a.tasks, a.seconds, a.cost, a.received, a.entitled, a.debt, a.bound, fairq._quantile(f.waits, 0.5),
      fairq._quantile(f.waits, 0.95), a.waiting_since, a.waiting, a.takes,
      -- What its own limits hold back goes at the rate that it had.
      case when a.waiting > 0 and a.takes is not null then coalesce(case when a.reason is not null then a.asks / nullif(a.pace, 0) end, a.through) end, a.reason, f.behind
    from drain a
    left join told f on f.shard_no = a.shard_no and f.group_key = a.group_key
    order by a.nth)
    union all
    select '', sum(a.groups)::integer, sum(a.weight), sum(a.tasks)::bigint, sum(a.seconds), sum(a.cost), sum(a.received), sum(a.entitled), null, null, null, null,
      min(a.waiting_since), null, null, null, null, null
    from account a
    where not a.shown
    having count(*) > 0;
end;
$$;
comment on function fairq.shares is
  'Who gets what: a row per group with what it received and was entitled to, its debt and the bound of that, its waits, its backlog, and what it waits for.';

-- The ledger of a queue since p_from, and, with p_now, what has happened since its last part as a part of its own.
create function fairq._ledger_rows(p_queue text, p_from timestamptz, p_now timestamptz) returns fairq.ledger[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_queue fairq.queues := fairq._queue(p_queue);
begin
  return array(
    select l
    from fairq._shards(null) s(shard_no)
    join fairq.ledger l on l.shard_no = s.shard_no and l.queue = p_queue and l.begins_at > p_from - fairq._ledger_step()
    union all
    select l
    from fairq._shards(null) s(shard_no)
    cross join lateral (select coalesce(fairq._ledger_until(s.shard_no), fairq._ledger_begin(p_now)) offset 0) u(until)
    cross join lateral fairq._ledger_part(s.shard_no, v_queue, fairq._tally(s.shard_no, u.until, p_now), u.until, p_now, p_now) l
    where p_now > u.until
  );
end;
$$;

-- The rows of a ledger taken together by group, with what each is behind. Of a group that was judged in every part up to the last one, each stretch up to
-- now is compared with the group that is furthest ahead in it; the stretch that comes nearest to the bound counts.
-- Pops that overlap may begin and commit in another order than that in which they took tasks: with several workers one more task of each for each of them.
create function fairq._accounts(p_queue fairq.queues, p_rows fairq.ledger[]) returns fairq.account[]
language plpgsql stable set search_path = pg_catalog, pg_temp set enable_nestloop = off set enable_mergejoin = off as $$
begin
  return (
    with part as materialized (
      select n.*, case when lag(n.part_no) over of_group = n.part_no + 1 then lag(n.slack) over of_group end as slack_before
      from (
        -- All but the waits: they are most of a row, and it is sorted several times.
        select r.shard_no, r.groups, r.begins_at, r.until, r.waiting_since, r.weight, r.tasks, r.ended, r.cost, r.seconds, r.ran, r.service, r.entitled,
          r.largest, r.slack, r.judged, r.group_key, dense_rank() over (partition by r.shard_no order by r.begins_at desc) as part_no
        from unnest(p_rows) r
      ) n
      window of_group as (partition by n.shard_no, n.group_key order by n.begins_at)
    ),
    stretch as materialized (
      select j.shard_no, j.group_key, j.part_no, j.weight, sum(j.service) over back / j.weight as served, max(j.largest) over back / j.weight as largest,
        2 * max(greatest(j.slack, j.slack_before)) over back / j.weight as slack
      from (
        select p.*, row_number() over (partition by p.shard_no, p.group_key order by p.part_no) as nth from part p where p.judged
      ) j
      where j.nth = j.part_no
      window back as (partition by j.shard_no, j.group_key order by j.part_no)
    ),
    ahead as materialized (
      select distinct on (s.shard_no, s.part_no) s.*
      from stretch s
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
    )
    select array_agg((g.shard_no, g.group_key, g.groups, g.weight, g.tasks, g.ended, g.seconds, g.cost, g.ran, g.received, g.entitled, d.debt, d.bound,
      g.pace, g.waiting_since)::fairq.account)
    from (
      select p.shard_no, p.group_key, max(p.groups) as groups, (array_agg(p.weight order by p.part_no))[1] as weight, sum(p.tasks)::bigint as tasks,
        sum(p.ended)::bigint as ended, sum(p.seconds) as seconds, sum(p.cost) as cost, sum(p.ran) as ran, sum(p.service) as received,
        sum(p.entitled) as entitled, min(p.waiting_since) filter (where p.part_no = 1) as waiting_since,
        coalesce(sum(p.entitled) filter (where p.waiting_since is not null)
          / nullif(sum(date_part('epoch', p.until - p.begins_at)) filter (where p.waiting_since is not null), 0),
          sum(p.entitled) / nullif(sum(date_part('epoch', p.until - p.begins_at)), 0)) as pace
      from part p
      group by p.shard_no, p.group_key
    ) g
    left join debt d on d.shard_no = g.shard_no and d.group_key = g.group_key
  );
end;
$$;

-- How long tasks of these groups waited, and behind whom: the three that had most while they waited. Of each part the ten that had most count.
-- Hashes, whatever the planner thinks of arrays: a row of one with each row of the other is minutes for an hour of 200 groups.
create function fairq._waits(p_rows fairq.ledger[], p_groups text[]) returns table (shard_no integer, group_key text, waits bigint[], behind jsonb)
language sql stable set search_path = pg_catalog, pg_temp set enable_nestloop = off set enable_mergejoin = off as $$
  with line as materialized (
    select r.shard_no, r.begins_at, r.group_key, r.seconds, r.waiting_since, r.waits,
      row_number() over (partition by r.shard_no, r.begins_at order by r.seconds desc, r.group_key) as nth
    from unnest(p_rows) r
    where r.group_key <> ''
  ),
  own as materialized (
    select g.* from unnest(p_groups) n(group_key) join line g on g.group_key = n.group_key
  ),
  hist as materialized (
    select h.shard_no, h.group_key, array_agg(h.number order by h.step) as waits
    from (
      select g.shard_no, g.group_key, u.step, sum(u.number)::bigint as number
      from own g
      cross join lateral unnest(g.waits) with ordinality u(number, step)
      group by g.shard_no, g.group_key, u.step
    ) h
    group by h.shard_no, h.group_key
  ),
  pair as materialized (
    select g.shard_no, g.group_key, o.group_key as ahead, sum(o.seconds) as seconds
    from own g
    join line o on o.shard_no = g.shard_no and o.begins_at = g.begins_at
    where g.waiting_since is not null and o.nth <= 10 and o.group_key <> g.group_key and o.seconds > 0
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

-- A quantile of a histogram, in seconds: in its step as if lengths were spread evenly there.
create function fairq._quantile(p_histogram bigint[], p_part double precision) returns double precision
language sql immutable parallel safe as $$
  select case when c.before + c.number = 0 then null
      when c.step = 0 then 0.005 * (c.wanted - c.before) / c.number
      else 0.005 * power(2, c.step - 1) * (1 + (c.wanted - c.before) / c.number) end
  from (
    select u.nth - 1 as step, u.number, sum(u.number) over (order by u.nth) - u.number as before, p_part * sum(u.number) over () as wanted
    from unnest(p_histogram) with ordinality u(number, nth)
  ) c
  where c.number > 0
    and c.before + c.number >= c.wanted
  order by c.step
  limit 1
$$;
