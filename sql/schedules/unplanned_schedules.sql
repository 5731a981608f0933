-- Schedules by cron whose plan is to be renewed. SQL cannot read cron expressions: the caller computes the ticks after done_until, and stores them with
-- plan_schedule. A plan reaches some days ahead, so firing goes on that long when nobody plans.
-- Returns at most p_limit per shard, those that wait longest first, and what time it is, because the caller's clock may be wrong. Leaves out those in queues of
-- other roles.
-- Raises QF007 bad limit.
create function fairq.unplanned_schedules(p_limit integer default 100) returns setof fairq.unplanned
language plpgsql security definer set search_path = pg_catalog, pg_temp
set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  perform fairq._check_limit(p_limit);
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    return query
      select s.name, s.group_key, s.cron, s.time_zone, s.done_until, v_now from fairq.schedules s
      where s.shard_no = v_shard_no and s.plan_at <= v_now and fairq._may_plan(s.queue)
      order by s.plan_at limit p_limit;
  end loop;
end;
$$;
comment on function fairq.unplanned_schedules is 'Schedules by cron whose ticks are to be planned.';
