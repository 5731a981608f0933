-- Lets a queue run empty: it refuses new tasks (QF016) until it is resumed; tasks that exist are served to the end, retries and schedules included. Costs the
-- same however many there are. fairq.queue_stats tells whether it is empty. A transaction that created tasks before this one commits is let through.
-- Raises QF003 unknown queue. Locks: queues, one row.
create function fairq.drain_queue(p_queue text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
begin
  perform fairq._queue(p_queue);
  update fairq.queues q set draining_at = coalesce(q.draining_at, fairq._now()) where q.queue = p_queue;
end;
$$;
comment on function fairq.drain_queue is 'Refuses new tasks of a queue until it is resumed, and serves those that are there.';
