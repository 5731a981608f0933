-- What a monitoring system wants to know, one row per sample: name as in Prometheus, labels, value. It reads the ledger's last parts and totals, so gauges are
-- up to 40 seconds old, and the number of groups does not matter. It counts tasks itself: the ledger does not, so that upkeep costs the same whatever the
-- backlog. p_groups groups have samples of their own, over all queues: those that were most behind, and those that waited longest, in any part of the last
-- quarter of an hour, so a group stays for a while. The others of a queue are the group 'other'.
-- fairq_desired_slots is for autoscalers: the slots that would do in five minutes what came in the last five and what has waited longer. Tasks that began after
-- a longer wait do not count as new, or working off a backlog would look like new work.
-- Cost: the ledger of the last quarter of an hour, at most 6,000 rows a queue; the totals; all held tasks; an index entry for each task that waits or is
-- scheduled, up to a million for each queue and shard.
create function fairq.metrics(p_groups integer default 20) returns table (name text, labels jsonb, value double precision)
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues;
begin
  perform fairq._check_limit(p_groups, 'the number of groups', 0, 1000);
  return query
    select 'fairq_upkeep_failures', '{}'::jsonb,
      (select count(*) from fairq._shards(null) s(shard_no) join fairq.upkeep_failures f on f.shard_no = s.shard_no)::double precision
    union all
    select 'fairq_ledger_age_seconds', '{}', date_part('epoch', v_now - min(fairq._ledger_until(s.shard_no))) from fairq._shards(null) s(shard_no)
    union all
    select 'fairq_schedule_lag_seconds', '{}', greatest(0, max(date_part('epoch', v_now - f.fire_at)))
    from fairq._shards(null) s(shard_no)
    cross join lateral (
      select c.fire_at from fairq.schedules c where c.shard_no = s.shard_no and c.fire_at is not null order by c.fire_at limit 1
    ) f
    union all
    -- The oldest transaction that this role can see. Only superusers and pg_monitor see sessions of other roles.
    select 'fairq_horizon_age_seconds', '{}', greatest(0,
      (select max(date_part('epoch', clock_timestamp() - a.xact_start)) from pg_catalog.pg_stat_activity a
       where a.pid <> pg_backend_pid() and coalesce(a.backend_xid, a.backend_xmin) is not null and (a.datname is null or a.datname = current_database())),
      (select max(date_part('epoch', v_now - m.marked_at))
       from fairq._shards(null) s(shard_no)
       join fairq.ledger_marks m on m.shard_no = s.shard_no and pg_snapshot_xmin(m.snapshot) >= pg_snapshot_xmin(pg_current_snapshot())))
    union all
    select 'fairq_circuits_open', '{}', count(*)::double precision from fairq.worker_stats w where w.circuit_open;

  return query
    select 'fairq_ended_total', jsonb_build_object('queue', t.queue, 'kind', t.kind, 'outcome', t.outcome), sum(t.tasks)::double precision
    from fairq._shards(null) s(shard_no)
    join fairq.totals t on t.shard_no = s.shard_no
    group by t.queue, t.kind, t.outcome
    union all
    select h.* from fairq._histograms('fairq_wait_seconds', false) h
    union all
    select h.* from fairq._histograms('fairq_run_seconds', true) h;

  for v_queue in select q.* from fairq.queues q where not q.internal order by q.queue loop
    return query select m.* from fairq._queue_metrics(v_queue, v_now) m;
  end loop;
  if p_groups > 0 then return query select m.* from fairq._group_metrics(p_groups, v_now) m; end if;
end;
$$;
comment on function fairq.metrics is 'What a monitoring system wants to know, one row per sample: name as in Prometheus, labels, value.';

-- Histograms of the totals in Prometheus's form, with every second step: how long tasks waited, by queue, or ran, by queue and kind.
create function fairq._histograms(p_name text, p_ran boolean) returns table (name text, labels jsonb, value double precision)
language plpgsql stable rows 100 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    with entry as materialized (
      select jsonb_strip_nulls(jsonb_build_object('queue', t.queue, 'kind', case when p_ran then t.kind end)) as labels,
        case when p_ran then t.runs else t.waits end as numbers, case when p_ran then t.seconds else t.waited end as seconds
      from fairq._shards(null) s(shard_no)
      join fairq.totals t on t.shard_no = s.shard_no
    ),
    step as materialized (
      select e.labels, u.step, sum(u.number) as number
      from entry e
      cross join lateral unnest(e.numbers) with ordinality u(number, step)
      group by e.labels, u.step
    )
    select p_name || '_bucket', a.labels || jsonb_build_object('le', case when a.step = 21 then '+Inf' else (0.005 * power(2, a.step - 1))::text end), a.below
    from (
      select t.labels, t.step, sum(t.number) over (partition by t.labels order by t.step)::double precision as below from step t
    ) a
    where a.step % 2 = 1
    union all
    select p_name || '_count', t.labels, sum(t.number)::double precision from step t group by t.labels
    union all
    select p_name || '_sum', e.labels, sum(e.seconds) from entry e group by e.labels;
end;
$$;

-- The samples of a queue.
create function fairq._queue_metrics(p_queue fairq.queues, p_now timestamptz) returns table (name text, labels jsonb, value double precision)
language plpgsql stable rows 20 set search_path = pg_catalog, pg_temp as $$
declare
  v_from timestamptz := p_now - interval '5 minutes';
  v_labels jsonb := jsonb_build_object('queue', p_queue.queue);
begin
  return query
    with part as materialized (
      select l.until, l.waiting_since, l.ended, l.ran,
        -- Up to the step of the histogram that ends after five minutes.
        (select sum(w.number) from unnest(l.waits) with ordinality w(number, nth) where w.nth <= width_bucket(300, fairq._ledger_steps()) + 1) as prompt
      from fairq._shards(null) s(shard_no)
      join fairq.ledger_queues l on l.shard_no = s.shard_no and l.queue = p_queue.queue and l.begins_at > v_from
    ),
    last as materialized (
      -- A queue without work in the last part has no row for it.
      select min(p.waiting_since) as waiting_since
      from part p
      where p.until = (select max(fairq._ledger_until(s.shard_no)) from fairq._shards(null) s(shard_no))
    ),
    slot as materialized (
      select (
          select coalesce(sum(w.slots), 0) from fairq.workers w where w.shard_no = 0 and w.lost_at is null and p_queue.queue = any(w.queues)
        ) as slots, (
          select count(b.id)
          from fairq._shards(null) s(shard_no)
          join fairq.held h on h.shard_no = s.shard_no
          cross join lateral fairq._body(h.shard_no, h.id) b
          where b.queue = p_queue.queue
        ) as busy,
        -- Held tasks are in line, too.
        sum((select count(*) from (select from fairq.tasks t where t.shard_no = s.shard_no and t.queue = p_queue.queue and not t.scheduled limit 1000000) t))
          as in_line,
        sum((select count(*) from (select from fairq.tasks t where t.shard_no = s.shard_no and t.queue = p_queue.queue and t.scheduled limit 1000000) t))
          as scheduled
      from fairq._shards(null) s(shard_no)
    ),
    pace as materialized (
      select (select sum(p.ran) / nullif(sum(p.ended), 0) from part p) as mean, greatest(0, s.in_line - s.busy) as waiting,
        (select coalesce(sum(p.prompt), 0) from part p) as prompt
      from slot s
    )
    select 'fairq_tasks', v_labels || jsonb_build_object('state', t.state), t.tasks::double precision
    from slot s
    cross join pace p
    cross join lateral (values ('waiting', p.waiting), ('scheduled', s.scheduled), ('running', s.busy)) t(state, tasks)
    union all
    select 'fairq_oldest_wait_seconds', v_labels, coalesce((select date_part('epoch', p_now - l.waiting_since) from last l), 0)
    union all
    select 'fairq_slots', v_labels || jsonb_build_object('state', t.state), t.slots::double precision
    from slot s
    cross join lateral (values ('busy', s.busy), ('idle', greatest(0, s.slots - s.busy))) t(state, slots)
    union all
    select 'fairq_backlog_seconds', v_labels, coalesce(p.waiting * p.mean, 0)::double precision from pace p
    union all
    select 'fairq_desired_slots', v_labels,
      greatest(case when p.waiting + s.busy > 0 then 1 else 0 end, ceil(coalesce((p.prompt + p.waiting) * p.mean / 300, 0)))::double precision
    from pace p
    cross join slot s
    union all
    select f.name, v_labels, f.value
    from fairq._fairness(p_queue, v_from, null) a
    cross join lateral (
      values ('fairq_fairness_error', a.shortfall), ('fairq_fairness_jain', a.jain), ('fairq_worst_debt_ratio', coalesce(a.worst_debt, 0)),
        ('fairq_idle_slots', coalesce(a.idle_slots, 0)), ('fairq_newcomer_p99_seconds', a.newcomer_p99)
    ) f(name, value)
    where f.value is not null;
end;
$$;

-- The samples of groups, by the last part. A group that was chosen for an earlier part and had no work since has none.
create function fairq._group_metrics(p_groups integer, p_now timestamptz) returns table (name text, labels jsonb, value double precision)
language plpgsql stable rows 100 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    with part as materialized (
      select l.queue, l.group_key, l.until, l.groups, date_part('epoch', l.until - l.begins_at) as length, l.seconds, l.tasks,
        coalesce(date_part('epoch', l.until - l.waiting_since), 0) as waits, greatest(0, l.entitled - l.service) as shortfall,
        l.until = (select max(fairq._ledger_until(s.shard_no)) from fairq._shards(null) s(shard_no)) as is_last
      from fairq._shards(null) s(shard_no)
      join fairq.ledger l on l.shard_no = s.shard_no and l.begins_at > p_now - interval '15 minutes'
    ),
    rank as materialized (
      select p.queue, p.group_key, row_number() over (order by max(p.shortfall) desc, max(p.waits) desc, p.queue, p.group_key) as by_shortfall,
        row_number() over (order by max(p.waits) desc, max(p.shortfall) desc, p.queue, p.group_key) as by_wait
      from part p
      where p.group_key <> ''
      group by p.queue, p.group_key
    ),
    chosen as materialized (
      select r.queue, r.group_key from rank r order by least(r.by_shortfall, r.by_wait), r.by_wait limit p_groups
    ),
    named as materialized (
      select p.queue, case when c.group_key is null then 'other' else p.group_key end as group_key, sum(p.seconds / p.length) as slots,
        sum(p.tasks / p.length) as tasks, max(p.waits) as waits, sum(p.shortfall) as shortfall, sum(p.groups) as groups
      from part p
      left join chosen c on c.queue = p.queue and c.group_key = p.group_key
      where p.is_last
      group by p.queue, case when c.group_key is null then 'other' else p.group_key end
    )
    select m.name, jsonb_build_object('queue', n.queue, 'group', n.group_key), m.value::double precision
    from named n
    cross join lateral (
      values ('fairq_group_slots', n.slots), ('fairq_group_started_per_second', n.tasks), ('fairq_group_oldest_wait_seconds', n.waits),
        ('fairq_group_shortfall', n.shortfall)
    ) m(name, value)
    union all
    select 'fairq_groups', jsonb_build_object('queue', n.queue), sum(n.groups)::double precision from named n group by n.queue;
end;
$$;
