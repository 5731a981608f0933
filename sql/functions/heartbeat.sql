-- A worker's sign of life.
-- Returns those of its tasks that somebody wished to cancel, until they are finished: stop them, and finish them as cancelled.
-- Raises QF004 unknown worker: it counts as lost, and its tasks may be with others.
-- Locks: heartbeats, the worker's own rows.
-- Cost: open cancellations, one step in tasks_pkey each. Not the worker's tasks: under a held xmin all it ever ran would be walked.
create function fairq.heartbeat(p_worker_id bigint) returns setof bigint
language plpgsql
volatile
rows 1
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform fairq._touch_worker(v_shard_no, p_worker_id, v_now);
    perform fairq._beat(v_shard_no, p_worker_id, v_now);
    return query
      select distinct t.id
      from fairq.cancellations c
      cross join lateral (
        select h.id
        from fairq.tasks h
        where h.shard_no = v_shard_no
          and h.id = c.task_id
          and h.worker_id is not distinct from p_worker_id
        offset 0
      ) t
      where c.shard_no = v_shard_no;
  end loop;
end;
$$;
comment on function fairq.heartbeat(bigint) is 'A worker''s sign of life. Returns its tasks that are to be cancelled.';
