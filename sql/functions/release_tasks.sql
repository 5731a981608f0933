-- Gives tasks back unfinished, without burning an attempt: shutdown, or a worker that took too many. The next attempt has the next number all the same,
-- and the task may have one more.
-- Returns the ids that were accepted; a stale one is missing.
-- Raises QF011 arrays of different length.
-- Locks: tasks, the rows named.
create function fairq.release_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
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
  v_shard_no integer;
  v_held record;
begin
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    select h.* into v_held from fairq._held_by(v_shard_no, p_worker_id, p_ids, p_attempts, null) h;
    perform fairq._return_tasks(v_shard_no, v_held.o_ctids, false);
    return query select r.id from unnest(v_held.o_ids) r(id);
  end loop;
end;
$$;
comment on function fairq.release_tasks(bigint, bigint[], integer[], integer) is
  'Puts tasks of a worker back in line without burning an attempt. Returns the ids accepted.';
