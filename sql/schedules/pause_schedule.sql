-- Pauses a schedule, or those of all groups that have the name: no ticks until it is resumed. Tasks that are there go on.
-- Returns how many schedules that is. Raises QF018: there is none. Locks: the schedules.
create function fairq.pause_schedule(p_name text, p_group_key text default null) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_schedule fairq.schedules;
  v_count integer := 0;
begin
  for v_schedule in select n.* from fairq._schedules(p_name, p_group_key) n loop
    update fairq.schedules s
    set paused_at = coalesce(s.paused_at, fairq._now()), fire_at = null
    where s.shard_no = v_schedule.shard_no and s.name = v_schedule.name and s.group_key = v_schedule.group_key;
    v_count := v_count + 1;
  end loop;
  return v_count;
end;
$$;
comment on function fairq.pause_schedule is 'Stops a schedule until it is resumed; without a group, those of all groups.';
