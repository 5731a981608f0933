-- Makes anew what promotion knows of a queue, from its bodies and holders. For when a queue seems wrong: nothing is lost by it, and nothing runs twice; groups
-- start at the clock again. A call is short however many tasks there are: they are announced again in portions, with the passes that follow.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the meters of the queue where it has any, the domains of the queue and of the keys, waits for them; ready tasks that are being popped.
create function fairq.rebuild(p_queue text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_scope text;
begin
  perform fairq._queue(p_queue);
  -- Meters are not locked for a queue that has none: whoever hangs there would keep this call waiting, with theirs in hand.
  for v_scope in select m.scope from fairq._meters(p_queue) m loop
    perform fairq._lock_domain(0, '#' || v_scope, true);
    perform fairq._start_anew(0, '#' || v_scope);
  end loop;
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    loop
      begin
        -- A shard may go meanwhile.
        if fairq._lock_domain(v_shard_no, p_queue, true) then
          perform fairq._start_anew(v_shard_no, p_queue);
          perform fairq._start_anew(v_shard_no, '#keys');
        end if;
        exit;
      exception when deadlock_detected then
        -- A pop that has tasks of this shard in hand waits for another one, which this transaction has. It does so for a moment only.
        null;
      end;
    end loop;
  end loop;
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
end;
$$;
comment on function fairq.rebuild is 'Rebuilds what promotion knows of a queue from its tasks and their holders.';
