-- Resumes a paused schedule, or, without a group, those of the name in all groups. Nothing makes up for ticks that passed during the pause.
-- Returns how many schedules have the name. Raises QF018 when none has. Locks: the schedules.
create function fairq.resume_schedule(p_name text, p_group_key text default null) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_schedule fairq.schedules;
  v_count integer := 0;
begin
  for v_schedule in select n.* from fairq._schedules(p_name, p_group_key) n loop
    v_count := v_count + 1;
    continue when v_schedule.paused_at is null;
    v_schedule.paused_at := null;
    v_schedule.done_until := greatest(v_schedule.done_until, v_now - v_schedule.delay);
    v_schedule := fairq._aimed(v_schedule);
    update fairq.schedules s
    set paused_at = null, done_until = v_schedule.done_until, next_tick = v_schedule.next_tick, fire_at = v_schedule.fire_at,
      plan_at = case when v_schedule.next_tick is null then v_now else s.plan_at end
    where s.shard_no = v_schedule.shard_no and s.name = v_schedule.name and s.group_key = v_schedule.group_key;
  end loop;
  return v_count;
end;
$$;
comment on function fairq.resume_schedule is 'Resumes a paused schedule; without a group, those of all groups.';
