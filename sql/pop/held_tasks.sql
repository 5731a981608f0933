-- Which of these tasks the worker still holds in these attempts. This is for handlers that end their task in a transaction of their own: once it commits the
-- task is gone, when it rolls back the task is still held, and while it is open the row is locked and left out of the answer.
-- Raises QF011 arrays of different length. Locks: held, the rows it returns, "skip locked".
create function fairq.held_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
begin
  perform fairq._check_lengths(array[coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)]);
  if p_worker_id is null then return; end if;
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    perform fairq._check_worker(v_shard_no, p_worker_id);
    return query
      select h.id
      from unnest(p_ids, p_attempts) as i(id, attempt)
      cross join lateral (
        select t.id from fairq.held t
        where t.shard_no = v_shard_no and t.id = i.id and t.attempt = i.attempt and t.worker_id = p_worker_id
        for update skip locked offset 0
      ) h;
  end loop;
end;
$$;
comment on function fairq.held_tasks is 'Which of these tasks a worker still holds, without those that an open transaction is finishing.';
