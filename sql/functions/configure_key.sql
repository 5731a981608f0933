-- How many tasks with a concurrency key may be in flight at once, over all queues and groups of a shard. Keys need no settings: an unknown one has one place.
-- Returns the settings in force.
-- Raises QF006 key, QF005 not READ COMMITTED, QF007 a number out of range, QF014 an unknown name in p_reset.
-- Locks: the domain #keys, waits for it; groups, one row.
create function fairq.configure_key(p_concurrency_key text, p_max_running integer default null, p_reset text[] default '{}') returns fairq.groups
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_shard_no integer;
  v_key fairq.groups;
begin
  if p_concurrency_key is null or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500 then
    raise exception 'a concurrency key has 1 to 500 bytes' using errcode = 'QF006', hint = 'Name the resource that tasks share.';
  end if;
  perform fairq._check_reset(format('concurrency key "%s"', p_concurrency_key), p_reset, array['max_running']);
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform fairq._promote(v_shard_no, '#keys', 1, true);
    v_key := fairq._set_limits(v_shard_no, '#keys', p_concurrency_key, null, p_max_running, null, null, null, null, null, p_reset);
    -- Hears the ring: what a higher cap lets in is unblocked now.
    perform fairq._promote(v_shard_no, '#keys', 1, true);
  end loop;
  return v_key;
end;
$$;
comment on function fairq.configure_key(text, integer, text[]) is 'Changes how many tasks with a concurrency key may be in flight.';
