-- Holds a concurrency key: no task with it starts before p_until; null ends a hold. Otherwise as hold_group.
-- Raises QF006 key, QF005 not READ COMMITTED, QF009 a time that is past, or more than 366 days away.
-- Locks: settings, shared; #keys, if nobody holds it; to end a hold, waits for it.
create function fairq.hold_key(p_concurrency_key text, p_until timestamptz) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_shard_no integer;
begin
  perform fairq._check_name('the concurrency key', p_concurrency_key, 500, 'QF006', 'Name the resource that tasks share');
  perform fairq._check_until(format('concurrency key "%s"', p_concurrency_key), p_until);
  -- The number of shards must not change meanwhile: a hold that ended only in some shards would go on in the others.
  perform from fairq.settings s for share;
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    if fairq._lock_domain(v_shard_no, '#keys', p_until is null) and p_until is null then
      perform fairq._open_keys(v_shard_no, fairq._now());
      perform fairq._end_hold(v_shard_no, '#keys', p_concurrency_key);
    end if;
    perform fairq._ring_group(v_shard_no, '#keys', p_concurrency_key, p_hold_until => p_until);
    if fairq._lock_domain(v_shard_no, '#keys', false) then
      perform fairq._open_keys(v_shard_no, fairq._now());
    end if;
  end loop;
end;
$$;
comment on function fairq.hold_key is 'Starts nothing with a concurrency key before a time; null ends a hold.';
