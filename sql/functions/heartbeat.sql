-- A worker's sign of life.
-- Returns those of its tasks that somebody wished to cancel, until they are finished: stop them, and finish them as cancelled.
-- Raises QF004 unknown worker: it counts as lost, and its tasks may be with others.
-- Locks: heartbeats, the worker's own rows.
-- With p_ids, the tasks it is running, only these are looked up: a worker that knows them should say them.
-- Cost: one step in tasks_pkey and one in cancellations_task_idx for each of p_ids; without it all open cancellations are read. Never all the
-- worker's tasks: under a held xmin that would be all it ever ran.
create function fairq.heartbeat(p_worker_id bigint, p_ids bigint[] default null) returns setof bigint
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
    if p_ids is not null then
      return query
        select t.id
        from unnest(p_ids) i(id)
        cross join lateral (
          select h.id
          from fairq.tasks h
          where h.shard_no = v_shard_no
            and h.id = i.id
            and h.worker_id is not distinct from p_worker_id
            and exists (select from fairq.cancellations c where c.shard_no = v_shard_no and c.task_id = i.id offset 0)
          offset 0
        ) t;
      continue;
    end if;
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
comment on function fairq.heartbeat(bigint, bigint[]) is 'A worker''s sign of life. Returns its tasks that are to be cancelled.';
