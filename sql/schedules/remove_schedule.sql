-- Removes a schedule, or those of all groups that have the name. Tasks that it created stay.
-- Returns how many schedules that were.
-- Raises QF018: there is none.
-- Locks: the schedules.
create function fairq.remove_schedule(p_name text, p_group_key text default null) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_count integer;
begin
  delete from fairq.schedules s
  where s.shard_no = any(array(select fairq._shards(null))) and s.name = p_name and (p_group_key is null or s.group_key = p_group_key);
  get diagnostics v_count = row_count;
  if v_count = 0 then
    perform fairq._refuse_schedule(p_name, p_group_key);
  end if;
  return v_count;
end;
$$;
comment on function fairq.remove_schedule is 'Removes a schedule; without a group, those of all groups.';
