-- Four times the slots of the workers that serve the queue, and at least 1000: small enough to stay in cache, large enough that a refill is rare.
-- Where groups share time, at least 50: what is queued was charged by an estimate that may be wrong.
create function fairq._ready_target(p_shard_no integer, p_queue fairq.queues) returns integer
language plpgsql
stable
set search_path = ''
as $$
begin
  return coalesce(p_queue.ready_target, greatest(case when p_queue.fairness = 'time' then 50 else 1000 end, (
    select 4 * least(coalesce(sum(w.slots), 0), 250000)
    from fairq.workers w
    where w.shard_no = p_shard_no
      and p_queue.queue = any(w.queues)
  )))::integer;
end;
$$;
comment on function fairq._ready_target(integer, fairq.queues) is 'How many tasks a queue keeps ready.';
