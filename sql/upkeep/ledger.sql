-- The ledger: who got what, who waited, who was entitled to what, in parts of half a minute. It sums up the history and what is held, so tasks cost no more
-- when they begin and end. It reads one snapshot, so it is exact: there an attempt is either held or in the history.
-- A part is written when nothing that ended in it can still commit: all transactions that were running when it was over have ended. That wait is ten seconds at
-- most: attempts that commit later are only in the history.
-- Returns how many parts it wrote, at most four: after a time without upkeep it catches up with the last hour.
-- Locks: none; the caller holds maintenance. Cost: the history of the last half minute, and some hundred groups of each queue.
create function fairq._keep_ledger(p_shard_no integer, p_now timestamptz) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_snapshot pg_snapshot := pg_current_snapshot();
  v_from timestamptz := fairq._ledger_until(p_shard_no);
  v_final timestamptz;
  v_written integer := 0;
begin
  insert into fairq.ledger_marks (shard_no, marked_at, snapshot)
  select p_shard_no, p_now, v_snapshot
  where not exists (select from fairq.ledger_marks m where m.shard_no = p_shard_no and m.marked_at > p_now - interval '3 seconds');
  delete from fairq.ledger_marks m where m.shard_no = p_shard_no and m.marked_at < p_now - interval '5 minutes';
  delete from fairq.limit_changes c where c.shard_no = p_shard_no and c.until < p_now - interval '5 minutes';
  v_from := case
    when v_from is null then fairq._ledger_begin(p_now)
    else greatest(v_from, fairq._ledger_begin(p_now - interval '1 hour'))
  end;

  select max(m.marked_at) into v_final from fairq.ledger_marks m
  where m.shard_no = p_shard_no
    and (pg_snapshot_xmax(m.snapshot) <= pg_snapshot_xmin(v_snapshot) or m.marked_at <= p_now - interval '10 seconds');
  while v_from + fairq._ledger_step() <= v_final and v_written < 4 loop
    perform fairq._write_ledger(p_shard_no, v_from, v_from + fairq._ledger_step(), p_now);
    v_from := v_from + fairq._ledger_step();
    v_written := v_written + 1;
  end loop;
  perform fairq._set_sweep_floor(p_shard_no, 'ledger', (extract(epoch from v_from) * 1000000)::bigint);
  return v_written;
end;
$$;

-- The length of a part.
create function fairq._ledger_step() returns interval
language sql immutable parallel safe as $$ select interval '30 seconds' $$;

-- The beginning of the part that a time is in.
create function fairq._ledger_begin(p_at timestamptz) returns timestamptz
language sql immutable parallel safe
as $$ select date_bin(fairq._ledger_step(), p_at, timestamptz '2000-01-01 00:00:00+00') $$;

-- Up to when the ledger is written; null: it has not begun.
create function fairq._ledger_until(p_shard_no integer) returns timestamptz
language sql stable as $$ select to_timestamp(fairq._sweep_floor(p_shard_no, 'ledger') / 1000000.0) $$;

-- Where the steps of a histogram end, in seconds: 5 ms, doubled each time, up to 44 minutes. Longer times are in a last step.
create function fairq._ledger_steps() returns double precision[]
language sql immutable parallel safe
as $$ select array(select 0.005 * power(2, g.n) from generate_series(0, 19) g(n)) $$;

-- A histogram made of pairs of a step and a number.
create function fairq._histogram(p_classes integer[], p_numbers bigint[]) returns bigint[]
language sql immutable parallel safe as $$
  select array_agg(coalesce(n.number, 0) order by s.step)
  from generate_series(0, 20) s(step)
  left join (select u.class, sum(u.number)::bigint as number from unnest(p_classes, p_numbers) u(class, number) group by u.class) n on n.class = s.step
$$;

-- The sum of two histograms.
create function fairq._add_histograms(p_one bigint[], p_other bigint[]) returns bigint[]
language sql immutable parallel safe as $$
  select array_agg(coalesce(u.a, 0) + coalesce(u.b, 0) order by u.nth) from unnest(p_one, p_other) with ordinality u(a, b, nth)
$$;

-- Writes one part: its groups, its queues, the totals.
create function fairq._write_ledger(p_shard_no integer, p_from timestamptz, p_until timestamptz, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_own record;
  v_queue fairq.queues;
  v_parts fairq.ledger[];
begin
  for v_own in
    select q as queue, t.tallies
    from fairq.queues q
    left join fairq._tally(p_shard_no, p_from, p_until) t on t.queue = q.queue
    where not q.internal
    order by q.queue
  loop
    v_queue := v_own.queue;
    v_parts := array(select p from fairq._ledger_part(p_shard_no, v_queue, v_own.tallies, p_from, p_until, p_now) p);
    continue when v_parts = '{}';
    insert into fairq.ledger select p.* from unnest(v_parts) p;
    with tally as materialized (
      select t.group_key, t.began, t.wait_class, t.attempts, t.first_at, t.first_start from unnest(v_own.tallies) t
    )
    insert into fairq.ledger_queues (shard_no, workers, slots, begins_at, until, waiting_since, tasks, ended, seconds, ran, clock, judged, queue, waits,
      newcomers)
    select p_shard_no, w.workers, w.slots, p_from, p_until, p.waiting_since, p.tasks, p.ended, p.seconds, p.ran,
      coalesce((select fairq._rounds(t.clock) from fairq._tick(p_shard_no, v_queue.queue) t), 0), p.judged, v_queue.queue, c.waits, n.newcomers
    from (
      select min(k.waiting_since) as waiting_since, sum(k.tasks)::bigint as tasks, sum(k.ended)::bigint as ended, sum(k.seconds) as seconds,
        sum(k.ran) as ran, bool_or(k.judged) as judged
      from unnest(v_parts) k
    ) p
    cross join (
      select coalesce(sum(a.slots), 0)::integer as slots, count(*)::integer as workers from fairq.workers a
      where a.shard_no = p_shard_no and a.lost_at is null and v_queue.queue = any(a.queues)
    ) w
    cross join (
      select fairq._histogram(array_agg(t.wait_class), array_agg(t.attempts)) as waits from tally t
      where t.began and t.wait_class is not null
    ) c
    cross join (
      -- Newcomers: the first task of each group that had none before.
      select fairq._histogram(array_agg(width_bucket(date_part('epoch', g.first_start - g.first_at), fairq._ledger_steps())), array_agg(1::bigint)) as newcomers
      from (
        select min(t.first_at) as first_at, min(t.first_start) as first_start from tally t
        group by t.group_key
        having bool_and(t.began) and min(t.first_at) >= p_from
      ) g
    ) n;
    perform fairq._add_totals(p_shard_no, v_queue.queue, v_own.tallies);
  end loop;
  perform fairq._summarize_history();
end;
$$;

-- All attempts in a time, by queue, with like ones taken together. began: they began in that time; ended: they ended in it. While they are counted, one number
-- says what makes them alike, and lengths are doubles: three times as fast as a column for each, and intervals.
-- "+ 0" keeps the planner from the other indexes of the history, which begin with the shard and would be read whole.
-- Cost: history since p_from, found by its block ranges, a third of a microsecond a task; and all held rows, with a held snapshot also the dead ones since.
create function fairq._tally(p_shard_no integer, p_from timestamptz, p_until timestamptz) returns table (queue text, tallies fairq.tally[])
language sql stable set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = on set enable_sort = off set work_mem = '32MB' as $$
  select c.queue, array_agg((c.group_key, c.kind, c.outcome, c.alike & 1024 <> 0, c.alike & 2048 <> 0, c.alike & 4096 <> 0, nullif(c.alike & 31, 31),
    nullif(c.alike >> 5 & 31, 31), c.attempts, c.cost, c.seconds, c.ran, c.waited, c.largest, c.longest, c.used, c.most_used, c.first_at,
    c.first_start)::fairq.tally)
  from (
    select a.queue, a.group_key, a.kind, a.outcome,
      case when a.began or a.ended then coalesce(width_bucket(a.waited, fairq._ledger_steps()), 31) else 31 end
      + 32 * case when a.ended then coalesce(width_bucket(a.ran, fairq._ledger_steps()), 31) else 31 end
      + case when a.began then 1024 else 0 end + case when a.ended then 2048 else 0 end
      + case when a.started_at is null and not a.ended then 4096 else 0 end as alike,
      count(*) as attempts, sum(a.cost) as cost,
      coalesce(sum(case
        when a.began and a.ended then a.ran
        when a.started_at is not null then tstzrange_subdiff(least(a.ended_at, p_until), greatest(a.started_at, p_from))
      end), 0) as seconds,
      sum(a.ran) as ran, sum(a.waited) as waited, max(a.cost) as largest, max(a.ran) as longest, sum(a.used) as used, max(a.used) as most_used,
      min(a.runnable_at) as first_at,
      min(a.started_at) as first_start
    from (
      select x.queue, x.group_key, x.kind, x.outcome, x.cost, x.used, x.started_at, x.runnable_at, x.ended_at,
        coalesce(x.began_at >= p_from, false) as began, coalesce(x.ended_at < p_until, false) as ended,
        tstzrange_subdiff(x.started_at, x.runnable_at) as waited,
        tstzrange_subdiff(coalesce(x.ended_at, p_until), x.started_at) as ran
      from (
        select f.queue, f.group_key, f.kind, f.outcome, f.cost, coalesce(f.used, case when f.started_at is not null then f.cost end) as used, f.started_at,
          f.started_at as began_at, f.finished_at as ended_at, greatest(f.created_at, f.run_at) as runnable_at
        from fairq.finished_tasks f
        where f.shard_no + 0 = p_shard_no and f.finished_at >= p_from
          and coalesce(f.started_at, f.finished_at) < p_until
        union all
        -- A task that was given back before it began was served all the same, and will be served again.
        select b.queue, b.group_key, b.kind, a.outcome, b.cost, coalesce(a.used, b.cost), a.started_at, coalesce(a.started_at, a.ended_at), a.ended_at, null
        from fairq.attempts a
        cross join lateral (
          select m.*
          -- The group may have moved since.
          from (select p_shard_no union all select n.shard_no from fairq._shards(null) n(shard_no)) s(shard_no)
          cross join lateral (
            (select t.queue, t.group_key, t.kind, t.cost from fairq._body(s.shard_no, a.task_id) t)
            union all
            (select f.queue, f.group_key, f.kind, f.cost from fairq.finished_tasks f where f.shard_no = s.shard_no and f.id = a.task_id offset 0)
          ) m
          limit 1
        ) b
        where a.shard_no + 0 = p_shard_no and a.ended_at >= p_from
          and coalesce(a.started_at, a.ended_at) < p_until
        union all
        select b.queue, b.group_key, b.kind, null, b.cost, null, h.started_at, h.started_at, null, greatest(b.created_at, b.run_at)
        from fairq.held h
        cross join lateral fairq._body(p_shard_no, h.id) b
        where h.shard_no = p_shard_no and coalesce(h.started_at, '-infinity') < p_until
      ) x
      offset 0
    ) a
    group by a.queue, a.group_key, a.kind, a.outcome, alike
  ) c
  group by c.queue
$$;

-- The rows of a queue: the hundred groups that used most, the hundred that waited longest, and one row for all others.
-- What a group was entitled to: all service of the queue is poured into its groups like water into vessels as wide as their weights. A group that waited all
-- the time takes any amount, any other takes what it received.
create function fairq._ledger_part(
  p_shard_no integer, p_queue fairq.queues, p_tallies fairq.tally[], p_from timestamptz, p_until timestamptz, p_now timestamptz
) returns setof fairq.ledger
language plpgsql stable rows 100 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    with tally as materialized (select t.* from unnest(p_tallies) t),
    received as materialized (
      select t.group_key, coalesce(sum(t.attempts) filter (where t.began), 0)::bigint as tasks,
        coalesce(sum(t.attempts) filter (where t.ended and t.run_class is not null), 0)::bigint as ended,
        coalesce(sum(t.cost) filter (where t.began), 0) as cost, sum(t.seconds) as seconds, coalesce(sum(t.ran) filter (where t.ended), 0) as ran,
        coalesce(max(t.largest) filter (where t.began), 0) as largest, coalesce(max(t.longest), 0) as longest,
        coalesce(sum(t.used) filter (where t.ended), 0) as used, coalesce(max(t.most_used) filter (where t.ended), 0) as most_used,
        sum(t.attempts) filter (where t.claimed) as claimed, sum(t.attempts) filter (where not t.ended) as in_flight, sum(t.attempts) as attempts,
        bool_or(t.ended and t.run_class is null) as unserved
      from tally t
      group by t.group_key
    ),
    waiter as materialized (
      select w.* from unnest(fairq._waiters(p_shard_no, p_queue, array(select r.group_key from received r order by r.seconds desc, r.group_key limit 100),
        p_from, p_now)) w
    ),
    line as materialized (
      -- The other groups that wait, by what promotion knows of them. At most five thousand are counted: beyond that each is entitled to next to nothing. "not
      -- in" is a hash, whatever the statistics. Lateral and ordered, so that the scan begins at the clock, past idle and dead lanes; a join could begin with
      -- the lanes.
      select count(*) as groups, coalesce(sum(l.weight), 0) as weight
      from fairq._tick(p_shard_no, p_queue.queue) i
      cross join lateral (
        select k.weight, k.group_key
        from fairq.lanes k
        where k.shard_no = p_shard_no and k.queue = p_queue.queue and k.user_key = '' and k.admissible and k.finish >= i.clock
        order by k.finish, k.position limit 5000
      ) l
      where l.group_key not in (select w.group_key from waiter w)
    ),
    member as materialized (
      select m.*, row_number() over (order by m.seconds desc, m.group_key) <= 100 or (m.since is not null and m.nth_waiter <= 100) as shown,
        -- If a lane is further ahead than its group can have moved it, a fault put it there, and the group does not owe that. Few lanes look like it; for those
        -- the history is read.
        case
          when m.judged and m.ahead > m.before + m.used + m.charged * m.largest
            then least(m.ahead, m.before + m.largest + fairq._explained(p_shard_no, p_queue.queue, m.group_key, m.weight, p_from))
          else m.ahead
        end as owes
      from (
        select coalesce(r.group_key, w.group_key) as group_key, coalesce(w.weight, g.weight, p_queue.weight) as weight, w.since, coalesce(r.tasks, 0) as tasks,
          coalesce(r.ended, 0) as ended, coalesce(r.cost, 0) as cost, coalesce(r.seconds, 0) as seconds, coalesce(r.ran, 0) as ran,
          case p_queue.fairness when 'time' then coalesce(r.seconds, 0) when 'cost' then coalesce(r.used, 0) else coalesce(r.cost, 0) end as service,
          greatest(case p_queue.fairness when 'time' then r.longest when 'cost' then r.most_used else r.largest end, w.cost, 0) as largest,
          case when p_queue.fairness = 'count' then coalesce(r.claimed, 0) else coalesce(r.in_flight, 0) + coalesce(w.ready, 0) end as charged,
          coalesce(w.ahead, 0) as ahead, w.before, coalesce(r.used, 0) as used,
          coalesce(w.is_free and not coalesce(r.unserved, false) and (w.most is null or coalesce(r.attempts, 0) < w.most), false) as judged,
          row_number() over (order by w.since) as nth_waiter
        from received r
        full join waiter w on w.group_key = r.group_key
        left join fairq.groups g on g.shard_no = p_shard_no and g.queue = p_queue.queue and g.group_key = r.group_key and g.user_key = ''
        where r.group_key is not null or w.since is not null
      ) m
    ),
    part as materialized (
      select t.group_key, greatest(sum(t.groups), 1)::integer as groups, min(t.since) as since, sum(t.weight) as weight, sum(t.tasks)::bigint as tasks,
        sum(t.ended)::bigint as ended, sum(t.cost) as cost, sum(t.seconds) as seconds, sum(t.ran) as ran, sum(t.service) as service,
        max(t.largest) as largest, sum(t.slack) as slack, bool_or(t.judged) as judged,
        case when bool_or(t.judged) or (t.group_key = '' and sum(t.weight) > 0) then 'infinity' else sum(t.service) end as demand
      from (
        select case when m.shown then m.group_key else '' end as group_key, 1 as groups, m.since, case when m.shown then m.weight else 0 end as weight, m.tasks,
          m.ended, m.cost, m.seconds, m.ran, m.service, m.largest, greatest(m.charged * m.largest, m.owes) as slack, m.shown and m.judged as judged
        from member m
        union all
        select '', l.groups, null, l.weight, 0, 0, 0, 0, 0, 0, 0, 0, false from line l where l.groups > 0
      ) t
      group by t.group_key
    ),
    level as materialized (
      -- The level: that of the first vessel that is not full when the water stands as high in it as in all vessels after it.
      select (array_agg(v.level order by v.nth) filter (where v.level <= v.full_at))[1] as level
      from (
        select d.nth, d.full_at,
          (sum(d.service) over () - coalesce(sum(d.demand) over (by_nth rows between unbounded preceding and 1 preceding), 0))
            / nullif(sum(d.weight) over (by_nth rows between current row and unbounded following), 0) as level
        from (
          select p.*, coalesce(p.demand / nullif(p.weight, 0), 0) as full_at,
            row_number() over (order by coalesce(p.demand / nullif(p.weight, 0), 0), p.group_key) as nth
          from part p
        ) d
        window by_nth as (order by d.nth)
      ) v
    )
    select p_shard_no, p.groups, p_from, p_until, p.since, p.weight, p.tasks, p.ended, p.cost, p.seconds, p.ran, p.service,
      case when p.demand < 'infinity' then least(p.demand, coalesce(p.weight * l.level, p.demand)) else p.weight * l.level end, p.largest, p.slack, p.judged,
      p_queue.queue, p.group_key, fairq._histogram(h.classes, h.numbers)
    from part p
    cross join level l
    left join (
      select case when m.shown then m.group_key else '' end as group_key, array_agg(t.wait_class) as classes, array_agg(t.attempts) as numbers
      from tally t
      join member m on m.group_key = t.group_key
      where t.began and t.wait_class is not null
      group by case when m.shown then m.group_key else '' end
    ) h on h.group_key = p.group_key;
end;
$$;

-- Groups of a queue that may have work waiting, with the next task of each: those named, those that waited in the part before, and those whose turn is next. A
-- group is free if, as promotion saw it, its task waited all the time since p_from with nothing but its turn before it.
-- Cost: some hundred lanes and bodies, from the clock and from the cursors on, and what is ready.
create function fairq._waiters(p_shard_no integer, p_queue fairq.queues, p_received text[], p_from timestamptz, p_now timestamptz) returns fairq.waiter[]
language plpgsql stable set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_tick fairq.ticks;
  v_before timestamptz := p_from - fairq._ledger_step();
  v_clock double precision := (
    select q.clock from fairq.ledger_queues q where q.shard_no = p_shard_no and q.begins_at = v_before and q.queue = p_queue.queue
  );
  v_seen pg_snapshot := (
    select m.snapshot from fairq.ledger_marks m where m.shard_no = p_shard_no and m.marked_at <= p_from order by m.marked_at desc limit 1
  );
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue.queue) k;
  return (
    with ready as materialized (
      select r.group_key, count(*)::integer as tasks, (array_agg(r.id order by r.block, r.position))[1] as id
      from fairq.ready r
      where r.shard_no = p_shard_no and r.queue = p_queue.queue and r.position >= 0
        and (r.block, r.position) >= (v_tick.clock, v_tick.clock_position)
      group by r.group_key
    ),
    candidate as materialized (
      select u.group_key from unnest(p_received) u(group_key)
      union
      (select l.group_key from fairq.ledger l
       where l.shard_no = p_shard_no and l.begins_at = v_before and l.queue = p_queue.queue and l.waiting_since is not null and l.group_key <> ''
       order by l.waiting_since, l.group_key limit 200)
      union
      (select k.group_key from fairq.lanes k
       where k.shard_no = p_shard_no and k.queue = p_queue.queue and k.user_key = '' and k.admissible and k.finish >= v_tick.clock
       order by k.finish, k.position limit 200)
      union
      (select r.group_key from ready r order by r.id limit 200)
    )
    select array_agg((c.group_key, b.since,
      case when p_queue.fairness = 'count' then b.cost else fairq._expected(l.pace, b.kind, b.cost, g.weight) end, g.weight,
      b.is_seen and b.concurrency_key is null and coalesce(b.expires_at > p_now, true) and p_queue.paused_at is null
        and p_queue.short_slots is null and not g.has_changed
        -- Limits of its users hold a group back, too.
        and (l.inside is not distinct from null or coalesce(p_queue.user_max_running, p_queue.user_rate_limit, p_queue.user_breaker_threshold) is null
          and not exists (
            select from fairq.groups k
            where k.shard_no = p_shard_no and k.queue = p_queue.queue and k.group_key = c.group_key
              and (k.user_key <> '' or coalesce(k.user_max_running, k.user_rate_limit, k.user_breaker_threshold) is not null)
          ))
        and not coalesce(l.keyed, false) and g.weight = coalesce(l.weight, g.weight) and g.weight = coalesce(w.weight, g.weight)
        -- Whether a breaker or a budget held it back in the meantime cannot be told afterwards.
        and (g.policy).breaker_threshold is null and (g.policy).budget is null
        and (g.policy is not distinct from null or (fairq._allowance(g.policy, l.gate, p_from, (l.pace).reserved)).tasks > 0),
      (g.policy).max_running, coalesce(r.tasks, 0),
      -- For tasks that used more than they were charged, such as those of a lost worker, the group pays with turns that it misses later.
      case when p_queue.fairness = 'count' then 0 else coalesce(greatest(0, fairq._rounds(l.finish - v_tick.clock)) * g.weight, 0) end,
      (w.slack / w.weight + v_clock - fairq._rounds(v_tick.clock)) * g.weight)::fairq.waiter)
    from candidate c
    left join ready r on r.group_key = c.group_key
    cross join lateral fairq._lane(p_shard_no, p_queue.queue, c.group_key) l
    left join fairq.ledger w on w.shard_no = p_shard_no and w.begins_at = v_before and w.queue = p_queue.queue and w.group_key = c.group_key
    cross join lateral (
      select s.weight, s.policy, exists (
          select from fairq.limit_changes k
          where k.shard_no = p_shard_no and k.queue = p_queue.queue and k.group_key in (c.group_key, '')
            and (k.until > p_from or not coalesce(fairq._is_committed(k.xmin, v_seen), false))
        ) as has_changed
      from fairq._limits_now(p_shard_no, p_queue, c.group_key, null, false, true) s
      offset 0
    ) g
    -- In a group that has users, the user who is next.
    left join lateral (
      select k.user_key, k.cursors[1] as next from fairq.lanes k
      where l.inside is distinct from null
        and k.shard_no = p_shard_no and k.queue = fairq._users_of(p_queue.queue) and k.queue like '#users %' and k.group_key = c.group_key and k.admissible
      order by k.finish, k.position limit 1
    ) u on true
    left join lateral (
      select t.id
      from (
        select k.id from fairq.tasks k
        where k.shard_no = p_shard_no and k.queue = p_queue.queue and k.group_key = c.group_key and k.user_key = coalesce(u.user_key, l.line, '')
          and not k.scheduled
          and (-k.priority, k.sequence) >= (-(coalesce(u.next, l.cursors[1])).priority, (coalesce(u.next, l.cursors[1])).sequence)
        order by -k.priority, k.sequence limit 100
      ) t
      where not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = t.id offset 0)
        and not exists (select from fairq.parked k where k.shard_no = p_shard_no and k.id = t.id offset 0)
      limit 1
    ) n on true
    left join lateral (
      select greatest(t.created_at, t.run_at) as since, t.kind, t.cost, t.concurrency_key, t.expires_at,
        greatest(t.created_at, t.run_at) <= p_from and coalesce(fairq._is_committed(t.xmin, v_seen), false) as is_seen
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = coalesce(r.id, n.id)
      offset 0
    ) b on true
  );
end;
$$;

-- How far ahead of the clock a group can have come since p_from, in a queue that shares what tasks use: by what was settled for its ended attempts, by what it
-- is charged for tasks in flight and ready, and by its credit, which addresses already given out keep from coming back.
-- Cost: history since p_from. "+ 0" as in _tally.
create function fairq._explained(p_shard_no integer, p_queue text, p_group_key text, p_weight double precision, p_from timestamptz) returns double precision
language sql stable set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = on as $$
  select coalesce((l.pace).reserved, 0) + fairq._rounds(coalesce((l.pace).credit, 0)) * p_weight + coalesce(u.used, 0)
  from fairq._lane(p_shard_no, p_queue, p_group_key) l
  cross join lateral (
    select sum(coalesce(e.used, fairq._expected(l.pace, e.kind, e.cost, p_weight))) as used
    from (
      select f.kind, f.cost, f.used from fairq.finished_tasks f
      where f.shard_no + 0 = p_shard_no and f.finished_at >= p_from and f.queue = p_queue and f.group_key = p_group_key
      union all
      select b.kind, b.cost, a.used
      from fairq.attempts a
      cross join lateral (
        (select t.queue, t.group_key, t.kind, t.cost from fairq._body(p_shard_no, a.task_id) t)
        union all
        (select f.queue, f.group_key, f.kind, f.cost from fairq.finished_tasks f where f.shard_no = p_shard_no and f.id = a.task_id offset 0)
        limit 1
      ) b
      where a.shard_no + 0 = p_shard_no and a.ended_at >= p_from and b.queue = p_queue and b.group_key = p_group_key
    ) e
  ) u
$$;

-- Whether the transaction that wrote a row had committed when a snapshot was taken.
create function fairq._is_committed(p_xid xid, p_snapshot pg_snapshot) returns boolean
language sql stable as $$
  select pg_visible_in_snapshot((n.next - ((n.next - p_xid::text::bigint) & 4294967295))::text::xid8, p_snapshot)
  from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) n(next)
$$;

-- Adds the ended tasks of a queue to the totals. A hundred kinds have rows of their own, the others are 'other'.
create function fairq._add_totals(p_shard_no integer, p_queue text, p_tallies fairq.tally[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  with ended as materialized (
    select t.kind, t.outcome, t.run_class, t.wait_class, sum(t.attempts)::bigint as attempts, sum(t.ran) as ran, sum(t.waited) as waited
    from unnest(p_tallies) t
    where t.ended and t.outcome in ('succeeded', 'failed', 'cancelled', 'expired')
    group by t.kind, t.outcome, t.run_class, t.wait_class
  ),
  named as materialized (
    select a.kind, case when row_number() over (order by a.is_known desc, a.kind) <= 100 then a.kind else 'other' end as name
    from (
      select x.kind, bool_or(x.is_known) as is_known
      from (
        select e.kind, false as is_known from ended e
        union all
        select o.kind, true from fairq.totals o where o.shard_no = p_shard_no and o.queue = p_queue
      ) x
      group by x.kind
    ) a
  )
  insert into fairq.totals as o (shard_no, tasks, seconds, waited, queue, kind, outcome, runs, waits)
  select p_shard_no, sum(e.attempts), coalesce(sum(e.ran), 0), coalesce(sum(e.waited), 0), p_queue, n.name, e.outcome,
    fairq._histogram(array_agg(e.run_class) filter (where e.run_class is not null), array_agg(e.attempts) filter (where e.run_class is not null)),
    fairq._histogram(array_agg(e.wait_class) filter (where e.wait_class is not null), array_agg(e.attempts) filter (where e.wait_class is not null))
  from ended e
  join named n on n.kind = e.kind
  group by n.name, e.outcome
  on conflict (shard_no, queue, kind, outcome) do update
  set tasks = o.tasks + excluded.tasks,
    seconds = o.seconds + excluded.seconds,
    waited = o.waited + excluded.waited,
    runs = fairq._add_histograms(o.runs, excluded.runs),
    waits = fairq._add_histograms(o.waits, excluded.waits);
end;
$$;

-- Summarises the block ranges of today's history that have filled up, so that the index tells them apart by time. While a vacuum is at work there, it gives up.
create function fairq._summarize_history() returns void
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '5ms' set timezone = 'UTC' as $$
begin
  perform brin_summarize_new_values(i.inhrelid)
  from pg_catalog.pg_inherits i
  join pg_catalog.pg_index x on x.indexrelid = i.inhrelid
  join pg_catalog.pg_class c on c.oid = x.indrelid
  where i.inhparent in ('fairq.finished_tasks_age_idx'::regclass, 'fairq.attempts_age_idx'::regclass)
    and (c.relname like '%\_default' or c.relname like '%\_' || to_char(fairq._now(), 'YYYYMMDD'));
exception when lock_not_available then
  null;
end;
$$;
