-- How fair a queue is, in one row. shares says it of each group.
-- shortfall: how much less groups received than they were entitled to, as a part of all that was received. jain: Jain's index of what each group received, as a
-- part of what it was entitled to; 1 when all are alike. Both are blurred when a group's turn comes less than once in the time asked for. worst_debt is not: it
-- is the largest debt as a part of its bound, and above 1 the order is broken.
-- idle_slots: slots that ran nothing, on average, while a group waited all the time with nothing but its turn before it; each task may cost its slot a second.
-- Raises QF003 unknown queue, QF009 time. Cost: the ledger of the time, and history since its last part.
create function fairq.fairness(p_queue text default 'default', p_since interval default '10 minutes')
returns table (
  groups integer, tasks bigint, seconds double precision, shortfall double precision, jain double precision, worst_debt double precision, worst_group text,
  idle_slots double precision, newcomer_p99 double precision, wait_p50 double precision, wait_p95 double precision, ledger_until timestamptz
)
language plpgsql security definer rows 1 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues := fairq._queue(p_queue);
begin
  perform fairq._check_length('the time', p_since, interval '366 days');
  return query select * from fairq._fairness(v_queue, v_now - p_since, fairq._ledger_live(v_queue, v_now));
end;
$$;
comment on function fairq.fairness is
  'How fair a queue is: shortfall, Jain''s index, the largest debt as a part of its bound, slots that idle while tasks wait, newcomers'' waits.';

-- The same by the ledger since p_from, and a part that is not written yet.
create function fairq._fairness(p_queue fairq.queues, p_from timestamptz, p_live fairq.ledger[])
returns table (
  groups integer, tasks bigint, seconds double precision, shortfall double precision, jain double precision, worst_debt double precision, worst_group text,
  idle_slots double precision, newcomer_p99 double precision, wait_p50 double precision, wait_p95 double precision, ledger_until timestamptz
)
language plpgsql stable rows 1 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    with account as materialized (select a.* from fairq._accounts(p_queue, p_from, p_live) a),
    part as materialized (
      select l.begins_at, l.until, max(l.slots) filter (where l.queue = p_queue.queue) as slots, sum(l.seconds) as seconds,
        sum(l.tasks) filter (where l.queue = p_queue.queue) as tasks, bool_or(l.judged) filter (where l.queue = p_queue.queue) as judged
      from fairq._shards(null) s(shard_no)
      join fairq.ledger_queues l on l.shard_no = s.shard_no and l.begins_at > p_from - fairq._ledger_step()
      group by l.begins_at, l.until
    ),
    hist as materialized (
      select array_agg(h.waits order by h.step) as waits, array_agg(h.newcomers order by h.step) as newcomers
      from (
        select u.step, sum(u.waits)::bigint as waits, sum(u.newcomers)::bigint as newcomers
        from fairq._shards(null) s(shard_no)
        join fairq.ledger_queues l on l.shard_no = s.shard_no and l.queue = p_queue.queue and l.begins_at > p_from - fairq._ledger_step()
        cross join lateral unnest(l.waits, l.newcomers) with ordinality u(waits, newcomers, step)
        group by u.step
      ) h
    )
    select g.groups, g.tasks, g.seconds, g.shortfall, g.jain, w.ratio, w.group_key,
      (select avg(greatest(0, p.slots - (p.seconds + p.tasks) / date_part('epoch', p.until - p.begins_at))) from part p where p.judged),
      fairq._quantile(h.newcomers, 0.99), fairq._quantile(h.waits, 0.5), fairq._quantile(h.waits, 0.95),
      (select min(fairq._ledger_until(s.shard_no)) from fairq._shards(null) s(shard_no))
    from (
      select coalesce(sum(a.groups), 0)::integer as groups, coalesce(sum(a.tasks), 0)::bigint as tasks, coalesce(sum(a.seconds), 0) as seconds,
        coalesce(sum(greatest(0, a.entitled - a.received)) / nullif(sum(a.received), 0), 0) as shortfall,
        coalesce(power(sum(a.received / nullif(a.entitled, 0)), 2)
          / nullif(count(*) filter (where a.entitled > 0) * sum(power(a.received / nullif(a.entitled, 0), 2)), 0), 1) as jain
      from account a
    ) g
    cross join hist h
    left join lateral (
      select a.debt / nullif(a.bound, 0) as ratio, a.group_key from account a
      where a.debt is not null
      order by ratio desc nulls last, a.group_key limit 1
    ) w on true;
end;
$$;
