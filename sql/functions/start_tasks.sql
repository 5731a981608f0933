-- Prefetch only: claimed tasks begin to run. Ownership, lease and deadline are looked at once more, before any user code runs: a task whose
-- claim ran out or was taken over is missing in the answer, one whose deadline passed in the buffer ends as expired and is missing too.
-- Returns the ids to run.
-- Raises QF011 arrays of different length.
-- Locks: tasks, the rows named.
create function fairq.start_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql
volatile
rows 100
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
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    return query
      select s.id
      from fairq._held_by(v_shard_no, p_worker_id, p_ids, p_attempts, 'claimed') h
      cross join lateral fairq._start(v_shard_no, h.o_ctids, v_now) s(id);
  end loop;
end;
$$;
comment on function fairq.start_tasks(bigint, bigint[], integer[], integer) is
  'Prefetch: claimed tasks begin to run. Returns the ids that the worker still holds.';
