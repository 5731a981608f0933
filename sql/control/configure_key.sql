-- Changes how many tasks with a concurrency key may be in flight at once, over all queues and groups of a shard. Keys need no settings: an unknown key has one
-- place.
-- Returns the settings in force.
-- Raises QF006 key, QF007 a number out of range, QF014 an unknown setting.
-- It rings for the key and wakes sleeping workers of the queues where tasks wait for it: the next pop of a queue that has tasks with keys grants the places
-- that a higher cap adds. Locks: settings; groups, one row.
create function fairq.configure_key(p_concurrency_key text, p_settings jsonb default '{}') returns fairq.groups
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_shard_no integer;
  v_key fairq.groups;
begin
  perform from fairq.settings s for update;
  perform fairq._check_name('the concurrency key', p_concurrency_key, 500, 'QF006', 'Name the resource that tasks share');
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    v_key := fairq._set_limits(v_shard_no, '#keys', p_concurrency_key, format('concurrency key "%s"', p_concurrency_key), p_settings, '{max_running}');
  end loop;
  return v_key;
end;
$$;
comment on function fairq.configure_key is 'Changes how many tasks with a concurrency key may be in flight.';
