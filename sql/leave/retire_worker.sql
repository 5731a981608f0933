-- A worker leaves in good order: what it still holds goes back in line without burning an attempt, but for what may be tried only once, and perhaps began.
-- Unknown workers are ignored: retiring twice does no harm.
-- Raises QF005 not READ COMMITTED: an older snapshot would leave behind what the worker has popped since, and nobody would know its holder.
-- Locks: the worker's row, waits for a pop of its to end; held, waits for a finish to end.
create function fairq.retire_worker(p_worker_id bigint) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_tasks fairq.leaving[];
  v_left integer;
  v_tries integer := 0;
begin
  perform fairq._check_isolation('retiring a worker');
  loop
    begin
      for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
        perform fairq._check_worker(v_shard_no, p_worker_id);
        -- What it holds first, as a turn of its that ends tasks and pops; then nobody pops for it any more, and the rest is what it popped meanwhile.
        perform from fairq.held h where h.shard_no = v_shard_no and h.worker_id = p_worker_id order by h.ctid for update;
        perform from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id for update;
        -- What is being finished right now is waited for: should that roll back, nobody would know the worker any more that holds it. Again for what somebody
        -- replaced between the look and the end of it.
        loop
          v_tasks := fairq._find_held(v_shard_no, p_worker_id, array(
            select h.id from fairq.held h where h.shard_no = v_shard_no and h.worker_id = p_worker_id
          ), null, fairq._now(), 'interrupted');
          perform fairq._leave(v_shard_no, v_tasks, fairq._now());
          get diagnostics v_left = row_count;
          exit when v_left = coalesce(cardinality(v_tasks), 0);
        end loop;
        delete from fairq.heartbeats h where h.shard_no = v_shard_no and h.worker_id = p_worker_id;
        delete from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id;
      end loop;
      return;
    exception when deadlock_detected then
      -- A pop of its goes through the shards in an order of its own, and waits here for one that this transaction has passed. What it waits for may be
      -- older than this call: then it would wait for ever.
      v_tries := v_tries + 1;
      if v_tries = 5 then raise; end if;
      -- So that the pop wakes up before this begins again.
      perform pg_sleep(0.01 * v_tries);
    end;
  end loop;
end;
$$;
comment on function fairq.retire_worker is 'Removes a worker and puts the tasks it holds back in line.';
