-- Stores the ticks of a schedule by cron, all that come after p_done_until, as far ahead as the planner looked. The next plan is due when half of them are
-- past, and within a day in any case: time zones change. p_problem says why no ticks could be planned: it is noted, and the schedule is planned again in an
-- hour. Nothing happens when the schedule has moved on meanwhile, or was changed: then the plan is obsolete.
-- Returns whether the ticks were stored.
-- Raises QF009 when the ticks do not ascend from p_done_until; QF007 more than 1000; 42501 when the queue is for other roles. Locks: the schedule.
create function fairq.plan_schedule(p_name text, p_group_key text, p_done_until timestamptz, p_ticks timestamptz[], p_problem text default null)
returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_schedule fairq.schedules;
begin
  if cardinality(p_ticks) > 1000 then
    raise exception 'schedule "%" is planned with % ticks', coalesce(left(p_name, 60), 'null'), cardinality(p_ticks)
      using errcode = 'QF007', hint = 'At most 1000.';
  end if;
  if exists (
    select from unnest(p_ticks) with ordinality t(tick, nth)
    where (t.tick > coalesce(p_ticks[t.nth - 1], p_done_until)) is not true or t.tick > '9999-01-01'
  ) then
    raise exception 'the ticks of schedule "%" do not ascend from %', coalesce(left(p_name, 60), 'null'), coalesce(p_done_until::text, 'null')
      using errcode = 'QF009', hint = 'Give the ticks after the done_until that unplanned_schedules returned, in order, each once.';
  end if;
  v_shard_no := fairq._home(p_group_key);
  select s.* into v_schedule from fairq.schedules s
  where s.shard_no = v_shard_no and s.name = p_name and s.group_key = p_group_key and s.cron is not null and s.done_until = p_done_until
  for update;
  if not found then return false; end if;
  -- Whoever plans a tick decides when a task is created.
  if not fairq._may_plan(v_schedule.queue) then
    perform fairq._check_role(q.queue, q.work_role) from fairq.queues q where q.queue = v_schedule.queue;
  end if;

  v_schedule.problem := coalesce(left(p_problem, 500), case when coalesce(cardinality(p_ticks), 0) = 0 then 'no time ever matches it' end);
  if v_schedule.problem is null then
    v_schedule.ticks := p_ticks;
    v_schedule := fairq._aimed(v_schedule);
    v_schedule.plan_at := greatest(v_now + interval '1 minute', least(p_ticks[1 + cardinality(p_ticks) / 2],
      v_now + interval '12 hours' + fairq._share_of(interval '12 hours', p_name, p_group_key)));
  else
    v_schedule.plan_at := v_now + interval '1 hour';
  end if;
  update fairq.schedules s
  set problem = v_schedule.problem, ticks = v_schedule.ticks, next_tick = v_schedule.next_tick, fire_at = v_schedule.fire_at, plan_at = v_schedule.plan_at
  where s.shard_no = v_shard_no and s.name = p_name and s.group_key = p_group_key;
  return true;
end;
$$;
comment on function fairq.plan_schedule is 'Stores the ticks of a schedule by cron. False: it has changed meanwhile.';
