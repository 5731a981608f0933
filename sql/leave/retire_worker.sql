-- Retires a worker in good order. What it still holds goes back in line without using up an attempt, except a task that may be tried only once and perhaps
-- began. Other workers are told: what it gave back, just now or before, waits for them.
-- Unknown workers are ignored: retiring twice does no harm.
-- Raises QF005 not READ COMMITTED: an older snapshot would leave behind what the worker has popped since, and nobody would know its holder.
-- Locks: the worker's row, waiting for a pop of this worker to end; held, waiting for a finish to end.
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
        -- What it holds comes first, in the order of a turn, which ends tasks before it pops. Once its row is locked nobody pops for it any more, and the rest
        -- is what it popped meanwhile.
        perform from fairq.held h where h.shard_no = v_shard_no and h.worker_id = p_worker_id order by h.ctid for update;
        perform from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id for update;
        -- What is being finished right now is waited for: if that finish rolled back, the tasks would be held by a worker that nobody knows. Repeated for rows
        -- that somebody replaced between the look and the end.
        loop
          v_tasks := fairq._find_held(v_shard_no, p_worker_id, array(
            select h.id from fairq.held h where h.shard_no = v_shard_no and h.worker_id = p_worker_id
          ), null, fairq._now(), 'interrupted');
          perform fairq._leave(v_shard_no, v_tasks, fairq._now());
          get diagnostics v_left = row_count;
          exit when v_left = coalesce(cardinality(v_tasks), 0);
        end loop;
        delete from fairq.heartbeats h where h.shard_no = v_shard_no and h.worker_id = p_worker_id;
        perform pg_notify('fairq', q.queue)
        from fairq.workers w
        join fairq.queues q on q.queue = any(w.queues) and q.notify
        where w.shard_no = v_shard_no and w.worker_id = p_worker_id;
        delete from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id;
      end loop;
      return;
    exception when deadlock_detected then
      -- A pop of this worker goes through the shards in an order of its own and waits here for a shard that this transaction has passed. What it waits for may
      -- be older than this call; without starting again it would wait for ever.
      v_tries := v_tries + 1;
      if v_tries = 5 then raise; end if;
      -- Lets the pop wake up before this begins again.
      perform pg_sleep(0.01 * v_tries);
    end;
  end loop;
end;
$$;
comment on function fairq.retire_worker is 'Removes a worker and puts the tasks it holds back in line.';
