-- Gives queued tasks to a worker. The caller has locked them.
-- By ctid and no other way: every other scan is switched off, here and in the functions below that take ctids. Where statistics are missing or old,
-- the planner finds a walk through all tasks of the shard cheaper than a hundred fetches by ctid, and it keeps such a plan for the whole session.
-- Returns the tasks in served order.
create function fairq._hold(p_shard_no integer, p_ctids tid[], p_worker_id bigint, p_claim_lease interval, p_now timestamptz, p_meters integer)
returns setof fairq.tasks
language plpgsql
volatile
rows 100
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  return query
    with held as (
      update fairq.tasks t
      set state = case when p_claim_lease is null then 'running' else 'claimed' end,
        worker_id = p_worker_id,
        attempt = t.attempt + 1,
        started_at = case when p_claim_lease is null then p_now end,
        lease_expires_at = p_now + p_claim_lease,
        meters = p_meters
      where t.shard_no = p_shard_no
        and t.ctid = any(p_ctids)
      returning t.*
    )
    select h.* from held h order by h.block, h.position;
end;
$$;
comment on function fairq._hold(integer, tid[], bigint, interval, timestamptz, integer) is 'Gives queued tasks to a worker.';
