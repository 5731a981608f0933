-- Ends tasks that nobody finishes: cancelled, expired, lost with no attempts left. The caller has locked them, or holds what protects them.
-- Rings for the places that come free, and what they were charged but did not use; tells those who wait for one of these tasks.
-- One that waited for a concurrency key may have been the one whose turn it was: the key is rung, or those behind it would wait for a ring that never comes.
-- By ctid and no other way, see _hold.
-- Returns how many it ended.
-- Locks: tasks, the rows named.
create function fairq._end_tasks(p_shard_no integer, p_ctids tid[], p_outcome text, p_error jsonb, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_ids bigint[];
begin
  with ended as (
    delete from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    returning t.*
  ),
  history as (
    insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at,
      started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload, error)
    select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, p_outcome, e.worker_id, e.created_at, e.run_at, e.expires_at,
      e.started_at, p_now, e.cost, e.attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers, e.payload, p_error
    from ended e
  ),
  timed as (
    insert into fairq.rings (shard_no, queue, group_key, correction)
    select e.shard_no, e.queue, e.group_key, sum(fairq._ran(e.started_at, p_now) - e.charge)
    from ended e
    where e.block is not null
      and e.charge is not null
    group by e.shard_no, e.queue, e.group_key
  ),
  freed as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, count(*)
    from ended e
    cross join lateral fairq._scopes(e.shard_no, e.queue, e.group_key, e.counted, e.meters, e.concurrency_key) s
    where e.block is not null
    group by s.shard_no, s.queue, s.group_key
  ),
  passed_on as (
    insert into fairq.rings (shard_no, queue, group_key)
    select distinct e.shard_no, '#keys', e.concurrency_key
    from ended e
    where e.block is null
      and e.state in ('overflow', 'blocked')
      and e.concurrency_key is not null
  )
  select array_agg(e.id) into v_ids from ended e;
  if v_ids is null then
    return 0;
  end if;
  perform fairq._tell_watchers(p_shard_no, v_ids, p_now);
  return cardinality(v_ids);
end;
$$;
comment on function fairq._end_tasks(integer, tid[], text, jsonb, timestamptz) is 'Ends tasks that no worker finishes.';
