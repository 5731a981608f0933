-- Pauses a schedule, or, without a group, those of the name in all groups: no ticks until it is resumed. Tasks that exist go on.
-- Returns how many schedules have the name. Raises QF018 when none has. Locks: the schedules.
create function fairq.pause_schedule(p_name text, p_group_key text default null) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_count integer;
begin
  perform fairq._schedules(p_name, p_group_key);
  update fairq.schedules s set paused_at = coalesce(s.paused_at, fairq._now()), fire_at = null
  where s.shard_no = any(array(select fairq._shards(null))) and s.name = p_name and s.group_key = coalesce(p_group_key, s.group_key);
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function fairq.pause_schedule is 'Stops a schedule until it is resumed; without a group, those of all groups.';
