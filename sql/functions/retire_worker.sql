-- A worker leaves in good order: what it still holds goes back in line without burning an attempt.
-- Unknown workers are ignored: retiring twice does no harm.
-- Locks: the worker's row, waits for a pop of its to end; tasks it holds.
create function fairq.retire_worker(p_worker_id bigint) returns void
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id for update;
    perform fairq._return_tasks(v_shard_no, array(
      select t.ctid
      from fairq.tasks t
      where t.shard_no = v_shard_no
        and t.worker_id = p_worker_id
      for update
    ), false);
    delete from fairq.heartbeats h where h.shard_no = v_shard_no and h.worker_id = p_worker_id;
    delete from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id;
  end loop;
end;
$$;
comment on function fairq.retire_worker(bigint) is 'Takes a worker off the list and puts what it holds back in line.';
