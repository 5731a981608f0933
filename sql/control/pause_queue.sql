-- Pauses a queue: pops return nothing until it is resumed. Tasks can still be created, and running tasks go on.
-- Raises QF003 unknown queue. Locks: queues, one row.
create function fairq.pause_queue(p_queue text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
begin
  perform fairq._queue(p_queue);
  update fairq.queues q set paused_at = coalesce(q.paused_at, fairq._now()) where q.queue = p_queue;
end;
$$;
comment on function fairq.pause_queue is 'Stops serving a queue until it is resumed.';
