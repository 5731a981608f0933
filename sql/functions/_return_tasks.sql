-- Puts held tasks back in line: through promotion again, at their old place within the group, never at a stale address (I12).
-- p_burn keeps the attempt as used; otherwise it is given back. The caller has locked the tasks.
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
  v_count integer;
begin
  with held as materialized (
    select t.ctid, t.counted
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    for update
  ),
  returned as (
    update fairq.tasks t
    set state = 'overflow', block = null, position = null, worker_id = null, started_at = null, lease_expires_at = null, counted = false,
      attempt = t.attempt - case when p_burn then 0 else 1 end
    from held h
    where t.shard_no = p_shard_no
      and t.ctid = h.ctid
    returning t.queue, t.group_key, t.priority, t.sequence, h.counted
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, priority, sequence, freed)
    select p_shard_no, r.queue, r.group_key, r.priority, min(r.sequence), count(*) filter (where r.counted)
    from returned r
    group by r.queue, r.group_key, r.priority
  )
  select count(*)::integer into v_count from returned;
  return v_count;
end;
$$;
comment on function fairq._return_tasks(integer, tid[], boolean) is 'Puts held tasks back in line.';
