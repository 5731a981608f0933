-- Puts held tasks back in line: through promotion again, at their old place within the group, never at a stale address (I12).
-- p_burn: the attempt is used up. Otherwise the task may have one more, and its number is not given out again all the same: worker and attempt are the
-- fencing token, and the same worker may take the task again while a message about the first time is still under way (I10).
-- The caller has locked the tasks.
-- By ctid and no other way, see _hold.
-- Returns how many it put back.
-- Locks: tasks, the rows named.
create function fairq._return_tasks(p_shard_no integer, p_ctids tid[], p_burn boolean) returns integer
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
  with held as materialized (
    select t.ctid, t.counted, t.meters, t.started_at
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    for update
  ),
  returned as (
    update fairq.tasks t
    set state = 'overflow', block = null, position = null, worker_id = null, started_at = null, lease_expires_at = null, counted = false, meters = 0,
      max_attempts = t.max_attempts + case when p_burn then 0 else 1 end
    from held h
    where t.shard_no = p_shard_no
      and t.ctid = h.ctid
    returning t.id, t.queue, t.group_key, t.priority, t.sequence, t.concurrency_key, t.charge, h.counted, h.meters, h.started_at
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
    select p_shard_no, r.queue, r.group_key, r.priority, min(r.sequence), bool_or(r.concurrency_key is not null)
    from returned r
    group by r.queue, r.group_key, r.priority
  ),
  timed as (
    insert into fairq.rings (shard_no, queue, group_key, correction)
    select p_shard_no, r.queue, r.group_key, sum(fairq._ran(r.started_at, fairq._now()) - r.charge)
    from returned r
    where r.charge is not null
    group by r.queue, r.group_key
  ),
  freed as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, count(*)
    from returned r
    cross join lateral fairq._scopes(p_shard_no, r.queue, r.group_key, r.counted, r.meters, r.concurrency_key) s
    group by s.shard_no, s.queue, s.group_key
  )
  select array_agg(r.id) into v_ids from returned r;
  perform fairq._ring_wishes(p_shard_no, v_ids);
  return coalesce(cardinality(v_ids), 0);
end;
$$;
comment on function fairq._return_tasks(integer, tid[], boolean) is 'Puts held tasks back in line.';
