-- Removes a schedule, or, without a group, those of the name in all groups. Tasks that it created stay.
-- Returns how many schedules had the name. Raises QF018 when none has. Locks: the schedules.
create function fairq.remove_schedule(p_name text, p_group_key text default null) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_count integer;
begin
  perform fairq._schedules(p_name, p_group_key);
  delete from fairq.schedules s
  where s.shard_no = any(array(select fairq._shards(null))) and s.name = p_name and s.group_key = coalesce(p_group_key, s.group_key);
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function fairq.remove_schedule is 'Removes a schedule; without a group, those of all groups.';
