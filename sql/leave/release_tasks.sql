-- Gives tasks back unfinished, without burning an attempt: shutdown, or a worker that took too many. The next attempt has the next number all the same,
-- and the task may have one more.
-- Returns the ids that were accepted; a stale one is missing.
-- Raises QF011 arrays of different length.
-- Locks: held, the rows named, in the order of their ids.
create function fairq.release_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  perform fairq._check_lengths(array[coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)]);
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    perform fairq._check_worker(v_shard_no, p_worker_id);
    return query
      select l.*
      from fairq._leave(v_shard_no, fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts, v_now, 'released'), v_now) l;
  end loop;
end;
$$;
comment on function fairq.release_tasks is
  'Puts tasks of a worker back in line without burning an attempt. Returns the ids accepted.';
