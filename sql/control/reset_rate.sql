-- Forgets what was used of a rate: of a group's, or, with p_group_key null, of the rate of the whole queue. A full burst may start at once. Running tasks go
-- on, and are not charged again. Nothing happens when nothing was used.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the domain of the queue, or its meter, and waits for it; lanes, one row replaced.
create function fairq.reset_rate(p_queue text, p_group_key text default null) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_shard_no integer;
  v_lane fairq.lanes;
begin
  -- The lane first hears all its news; from here on no other session writes it.
  if p_group_key is null then
    perform fairq._queue(p_queue);
    perform fairq._hold_meter('queue ' || p_queue);
    v_lane := fairq._lane(0, '#queue ' || p_queue, 'queue ' || p_queue);
  else
    perform fairq._group_shard(p_queue, p_group_key);
    v_shard_no := fairq._lock_group(p_queue, p_group_key);
    perform fairq._promote(v_shard_no, p_queue, 1, true);
    v_lane := fairq._lane(v_shard_no, p_queue, p_group_key);
  end if;
  if (v_lane.gate).rate_at is null then return; end if;

  v_lane.gate.rate_at := null;
  perform fairq._write_lane(v_lane);
  -- Its waiting tasks may start: promotion looks at it, and workers that sleep until its next task would have been due are woken.
  if p_group_key is not null then
    perform fairq._ring_group(v_shard_no, p_queue, p_group_key);
    perform fairq._promote(v_shard_no, p_queue, 1, true);
  else
    perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
  end if;
end;
$$;
comment on function fairq.reset_rate is 'Forgets how much of a rate was used, of a group or of a whole queue.';
