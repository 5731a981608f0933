-- Makes anew what promotion knows of a queue, from its bodies and holders. Use it when a queue seems wrong: no task is lost, and none runs twice; groups start
-- at the clock again. A call is short however many tasks there are: the following passes announce them again in portions.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the meters of the queue, if it has any, and the domains of the queue and of #keys, and waits for them; also for ready tasks that are being popped.
create function fairq.rebuild(p_queue text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_scope text;
begin
  perform fairq._queue(p_queue);
  -- Only the meters that the queue has: a session that hangs in another one would make this call wait with locks in hand.
  for v_scope in select m.scope from fairq._meters(p_queue) m loop
    perform fairq._lock_domain(0, '#' || v_scope, true);
    perform fairq._start_anew(0, '#' || v_scope);
  end loop;
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    loop
      begin
        -- The shard may have gone meanwhile.
        if fairq._lock_domain(v_shard_no, p_queue, true) then
          perform fairq._start_anew(v_shard_no, p_queue);
          perform fairq._start_anew(v_shard_no, '#keys');
        end if;
        exit;
      exception when deadlock_detected then
        -- A pop that holds tasks of this shard waits for another shard, which this transaction has locked. It waits only a moment: try again.
        null;
      end;
    end loop;
  end loop;
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
end;
$$;
comment on function fairq.rebuild is 'Rebuilds what promotion knows of a queue from its tasks and their holders.';
