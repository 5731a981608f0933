-- Serves a paused queue again; a draining one takes new tasks again.
-- Raises QF003 unknown queue. Locks: queues, one row.
create function fairq.resume_queue(p_queue text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
begin
  perform pg_notify('fairq', p_queue) where (fairq._queue(p_queue)).notify;
  update fairq.queues q set paused_at = null, draining_at = null where q.queue = p_queue;
end;
$$;
comment on function fairq.resume_queue is 'Serves a paused queue again, and accepts new tasks if it was draining.';
